"""What of this machine matters to ling, checked one by one. Ends on every machine; the CLI prints it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ling_local import hub, paths
from ling_local.doctor import gpu
from ling_local.doctor.checks import Check, Status
from ling_local.engine.checkpoint import hub_repository
from ling_local.errors import LingError
from ling_local.settings import Settings, resolve, terminal_hints

__all__ = ["Check", "Status", "run_checks"]

MIN_PYTHON = (3, 11)
PROBE_S = 60.0
_LOW_DISK_BYTES = 2 << 30
_GIB = 1 << 30


def run_checks(settings: Settings | None, terminal: bool, timeout_s: float = PROBE_S) -> Iterator[Check]:
    """All checks, in order, each as soon as it is known. settings None: resolve them here and report what is wrong.

    terminal: stdout is one; timeout_s: what torch and the driver may take to answer. Raises nothing: a check that
    breaks is a failed check.
    """
    steps: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("python", _python),
        ("torch", lambda: gpu.check(settings, timeout_s)),
        ("memory", lambda: _memory(settings)),
        ("models", lambda: _models(settings)),
        ("disk", _weights_cache),
        ("folders", _folders),
        ("config", lambda: _config(settings)),
        ("network", lambda: _network(settings)),
        ("optional engines", _engines),
        ("terminal", lambda: _terminal(terminal)),
    )
    for name, step in steps:
        try:
            yield from step()
        except Exception as error:  # the report has to end; what broke is in it
            yield Check(name, Status.FAIL, f"the check itself broke: {error!r}")


def _python() -> Iterator[Check]:
    good = sys.version_info[:2] >= MIN_PYTHON
    fix = "" if good else "Install Python 3.11 or newer."
    yield Check("python", Status.PASS if good else Status.FAIL, f"{platform.python_version()}, {sys.executable}", fix)
    libc = " ".join(platform.libc_ver()).strip()
    detail = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs"
    tested = platform.system() == "Linux"
    yield Check(
        "platform",
        Status.PASS if tested else Status.WARN,
        f"{detail}, {libc}" if libc else detail,
        "" if tested else "ling is tested on Linux only.",
    )


def _memory(settings: Settings | None) -> Iterator[Check]:
    """Main memory, and whether the chosen model fits there when it runs on the CPU."""
    free, total = _main_memory()
    detail = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    needed = _needed_bytes(settings)
    if needed > free:
        detail += f"; the chosen model needs {needed / _GIB:.1f} GiB"
        yield Check("memory", Status.WARN, detail, "Use --dtype bfloat16, a smaller model, or close other programs.")
    else:
        yield Check("memory", Status.PASS, detail)


def _main_memory() -> tuple[int, int]:
    """Bytes of main memory that this process may still take, and in all; a container's limit counts."""
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit():
        total = min(total, int(limit[0]))
        free = min(free, max(total - int(used[0]), 0))
    return free, total


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _needed_bytes(settings: Settings | None) -> int:
    """What the weights of the chosen model take in main memory, 0 where it runs elsewhere or is not known."""
    if settings is None or settings["device"] != "cpu" or settings["engine"] != "native":
        return 0
    try:
        folder = hub.find_model(settings["model"])
    except LingError:
        return 0
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # two bytes a weight
    return stored * 2 if settings["dtype"] == "float32" else stored


def _models(settings: Settings | None) -> Iterator[Check]:
    demo = hub.check_folder(paths.demo_dir())
    fix = "Install ling-local again." if demo else ""
    yield Check("demo model", Status.FAIL if demo else Status.PASS, demo or "whole", fix)
    name = settings["model"] if settings and settings["engine"] == "native" else None
    for model in hub.list_models()[1:]:
        if not model.problem:
            yield Check("models", Status.PASS, f"{model.name}: whole, {model.folder}")
            continue
        repo = hub_repository(model.folder)
        fix = f"ling pull {repo}" if repo else f"Complete or remove {model.folder}."
        yield Check("models", Status.WARN, f"{model.name}: {model.problem}", fix)
    if name is None:
        return
    try:
        folder = hub.find_model(name)
    except LingError as error:
        yield Check("model", Status.FAIL, error.message, error.hint.replace("\n", "; "))
        return
    problem = hub.check_folder(folder)
    yield Check("model", Status.FAIL if problem else Status.PASS, f"{name}: {problem or 'whole'}")


def _weights_cache() -> Iterator[Check]:
    folder = paths.hugging_face_cache()
    free = shutil.disk_usage(_existing(folder)).free
    low = free < _LOW_DISK_BYTES
    detail = f"{free / 1e9:.1f} GB free for models in {folder}"
    yield Check("disk", Status.WARN if low else Status.PASS, detail, "Set HF_HOME to a larger disk." if low else "")


def _folders() -> Iterator[Check]:
    yield _writable("cache", paths.cache_dir(), "XDG_CACHE_HOME")
    yield _writable("state", paths.state_dir(), "XDG_STATE_HOME")


def _writable(name: str, folder: Path, variable: str) -> Check:
    """Whether files can be made in folder, or the nearest folder above it that exists. Creates nothing."""
    above = _existing(folder)
    good = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    fix = "" if good else f"Correct its permissions, or set {variable}."
    return Check(name, Status.PASS if good else Status.WARN, f"{folder}{'' if good else ' cannot be written'}", fix)


def _existing(folder: Path) -> Path:
    """folder, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _config(settings: Settings | None) -> Iterator[Check]:
    file = paths.config_file()
    if settings is None:
        try:
            settings = resolve()
        except LingError as error:
            yield Check("config", Status.FAIL, error.message, error.hint)
            return
    for warning in settings.warnings:
        yield Check("config", Status.WARN, warning, "`ling help settings` lists the names.")
    if not settings.warnings:
        yield Check("config", Status.PASS, f"{file}" if file.exists() else f"none ({file})")


def _network(settings: Settings | None) -> Iterator[Check]:
    """Nothing is asked over the network; only what was decided about it."""
    if settings is not None and settings["offline"]:
        yield Check("network", Status.PASS, f"offline by {settings.sources['offline']}: `ling pull` fetches nothing")
    else:
        yield Check("network", Status.PASS, "used by `ling pull` only")


def _engines() -> Iterator[Check]:
    here = importlib.util.find_spec("sglang") is not None
    yield Check("optional engines", Status.PASS, "sglang" if here else "none installed; none is needed")


def _terminal(terminal: bool) -> Iterator[Check]:
    hints = terminal_hints()
    encoding = (sys.stdout.encoding or "unknown").lower()
    if not terminal:
        yield Check("terminal", Status.PASS, "stdout is no terminal: plain text")
    elif encoding.replace("-", "") != "utf8":
        yield Check("terminal", Status.WARN, f"encoding {encoding}", "Set a UTF-8 locale: export LC_ALL=C.UTF-8")
    else:
        detail = "dumb: plain text" if hints.dumb else "UTF-8" + (", no colour (NO_COLOR)" if hints.no_color else "")
        yield Check("terminal", Status.PASS, f"{detail}, {shutil.get_terminal_size().columns} columns")
