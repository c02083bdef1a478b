"""The house rules as tests: who imports whom, no torch in front of the door, sizes, one table of exit codes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ling_local"
KERNELS = ROOT / "kernels" / "ling_kernels"
FILES = sorted([*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py")])

# A room may import rooms with a smaller number, and others of its own number where they are listed as one room.
ROOMS = {
    "types": 0,
    "errors": 0,
    "": 0,  # ling_local itself: the version
    "engine.protocol": 1,
    "paths": 1,
    "text": 2,
    "engine.config": 2,
    "engine.layout": 3,
    "engine.shard": 3.5,
    "engine.checkpoint": 4,
    "engine.script": 4,
    "engine.shapes": 4,
    "engine.staging": 4.5,
    "engine.weights": 5,
    "engine.state": 5,
    "engine.model": 6,
    "engine.width": 1,
    "engine.pulse": 1,
    "engine.pinning": 1,
    "engine.gpus": 4.5,
    "engine.links": 4.6,
    "engine.exchange_probe": 4.6,
    "engine.follow": 7.86,
    "engine.work": 7.95,
    "engine.ranks": 8.5,
    "engine.launch": 10.5,
    "engine.threads": 1,
    "engine.drafter": 7,
    "engine.dspark": 7.5,
    "engine.nextn": 7.5,
    "engine.forced": 7.5,
    "engine.drafts": 7.8,
    "engine.step": 7.8,
    "engine.capture": 7.85,
    "engine.gpu": 7.85,
    "engine.memory": 7.85,
    "engine.dummy": 7.85,
    "engine.source": 7.87,
    "engine.generation": 7.9,
    "engine.native": 8,
    "engine.timing": 1,
    "engine.sglang": 8,
    "engine.breakdown": 9,
    "engine.scripted": 8,
    "train": 9,
    "engine": 10,
    "engine.worker": 11,
    "engine.remote": 9,
    "stats": 12,
    "setting": 12,
    "settings_bench": 12.5,
    "settings_table": 12.7,
    "settings": 13,
    "published": 1,
    "hub": 13,
    "pull": 14,
    "sessions": 13,
    "generate": 14,
    "bench": 15,
    "doctor": 15,
    "serve": 16,
    "tui": 16,
    "cli": 17,
    "__main__": 18,
}
TORCH_BEHIND = {"engine.weights", "engine.state", "engine.model", "engine.step", "engine.native", "train"}
TORCH_BEHIND |= {"engine.drafter", "engine.drafts", "engine.dspark", "engine.nextn", "engine.generation"}
TORCH_BEHIND |= {"engine.capture", "engine.gpu", "engine.dummy", "engine.memory", "engine.forced", "engine.source"}
TORCH_BEHIND |= {"engine.staging", "engine.breakdown", "engine.timing", "engine.launch", "engine.follow"}
TORCH_BEHIND |= {"engine.exchange_probe", "engine.work"}
MAX_LINES, MAX_FUNCTION = 400, 80


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    while module and module not in ROOMS:
        module = module.rpartition(".")[0]
    return module


def imports(file: Path, top_level: bool) -> set[str]:
    """Modules that a file imports: dotted names, `from x import y` as x (and x.y where that is a module)."""
    tree = ast.parse(file.read_text())
    # what is imported for type checkers only is no edge
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for block in typing_only for inner in ast.walk(block)}
    nodes = [n for n in (tree.body if top_level else ast.walk(tree)) if id(n) not in skipped]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", [f for f in FILES if f.is_relative_to(PACKAGE)], ids=lambda f: module_of(f) or "ling")
def test_a_room_imports_only_rooms_below_it(file: Path) -> None:
    here = room_of(module_of(file))
    for name in imports(file, top_level=False):
        if name.startswith("ling_local."):
            target = name.removeprefix("ling_local.")
            is_module = (PACKAGE / Path(*target.split("."))).with_suffix(".py").exists()
            is_package = (PACKAGE / Path(*target.split("."))).is_dir()
            if not (is_module or is_package):
                continue
            there = room_of(target)
            assert there == here or ROOMS[there] < ROOMS[here], f"{module_of(file)} imports {target}"


@pytest.mark.parametrize("file", [f for f in FILES if f.is_relative_to(KERNELS)], ids=lambda f: f.stem)
def test_kernels_never_import_the_application(file: Path) -> None:
    assert not any(name.startswith("ling_local") for name in imports(file, top_level=False))


def test_no_module_in_front_of_the_door_imports_torch() -> None:
    front = [module_of(f) for f in FILES if f.is_relative_to(PACKAGE)]
    front = [m for m in front if m not in ("__main__",) and room_of(m) not in TORCH_BEHIND]
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module('ling_local{'.' + m if m else ''}')\n" for m in front
    )
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_repository_has_no_top_level_module_named_kernels() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec and spec.origin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert str(ROOT) not in done.stdout
    assert done.stdout.strip() == "None"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_is_read_in_one_sitting(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= MAX_LINES, "this file wants to be two rooms"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION, f"{node.name} is too long"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text())) or not file.read_text().strip()


def test_exit_codes_and_streams_are_decided_in_one_place() -> None:
    for file in FILES:
        text, name = file.read_text(), str(file.relative_to(ROOT))
        if name != "ling_local/cli/output.py":
            assert ".isatty(" not in text, f"{name} tests for a terminal"
        if not name.startswith(
            ("ling_local/cli/main", "ling_local/errors", "ling_local/train/", "ling_local/__main__")
        ):
            assert "sys.exit(" not in text or "engine/worker" in name, f"{name} ends the process"
