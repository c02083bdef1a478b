"""What of this machine matters to ling, checked one by one. Ends on every machine; the CLI prints it.

What only torch can tell is asked of a child process, so that a broken or slow torch is a line here, no crash.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ling_local import hub, paths
from ling_local.errors import LingError
from ling_local.settings import Settings, resolve, terminal_hints

MIN_PYTHON = (3, 11)
TORCH_RANGE = ((2, 11), (2, 15))
_PROBE_S = 120.0
_LOW_DISK_BYTES = 2 << 30
_PROBE = """
import json, sys
import torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(), "gpus": []}
try:
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        found["gpus"].append({"name": name, "free": free, "total": total, "arch": f"sm_{major}{minor}"})
except Exception as error:
    found["gpu_error"] = str(error).splitlines()[0]
sys.stdout.write("\\n" + json.dumps(found))
"""


class Status(StrEnum):
    """How a check went."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. fix is the next step, "" where there is nothing to do."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def run_checks(settings: Settings | None, terminal: bool) -> Iterator[Check]:
    """All checks, in order, each as soon as it is known. settings None: resolve them here and report what is wrong.

    terminal: stdout is one. Raises nothing: a check that breaks is a failed check.
    """
    steps = (_python, _torch_and_gpu, _model, _weights_cache, _kernel_cache, _state, _config, _engines)
    for step in steps:
        try:
            yield from step(settings)
        except Exception as error:  # the report has to end; what broke is in it
            yield Check(step.__name__.strip("_"), Status.FAIL, f"the check itself broke: {error!r}")
    yield _terminal(terminal)


def _python(settings: Settings | None) -> Iterator[Check]:
    version = platform.python_version()
    good = sys.version_info[:2] >= MIN_PYTHON
    yield Check(
        "python",
        Status.PASS if good else Status.FAIL,
        f"{version} on {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "" if good else "Install Python 3.11 or newer.",
    )


def _torch_and_gpu(settings: Settings | None) -> Iterator[Check]:
    found = _ask_torch()
    if "error" in found:
        yield Check("torch", Status.FAIL, found["error"], "Install it again: pip install --force-reinstall torch")
        return
    numbers = tuple(int(part) for part in found["version"].split("+")[0].split(".")[:2])
    known = TORCH_RANGE[0] <= numbers < TORCH_RANGE[1]
    detail = f"{found['version']}, {found['threads']} threads, CUDA {found['cuda'] or 'not built in'}"
    yield Check("torch", Status.PASS if known else Status.WARN, detail, "" if known else "Tested: torch 2.11 to 2.14.")
    yield from _gpus(found)


def _ask_torch() -> dict[str, Any]:
    """What torch says about itself, or {"error": reason}."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            capture_output=True,
            timeout=_PROBE_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"asking torch failed: {error}"}
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    words = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return {"error": f"torch cannot be imported: {words[-1] if words else f'exit code {done.returncode}'}"}


def _gpus(found: dict[str, Any]) -> Iterator[Check]:
    driver = _driver_version()
    if found.get("gpu_error"):
        yield Check("gpu", Status.WARN, found["gpu_error"], "ling runs on the CPU; look at `nvidia-smi`.")
    elif not found["gpus"] and driver and not found["cuda"]:
        fix = "Install a CUDA build of torch to use the GPU."
        yield Check("gpu", Status.WARN, f"driver {driver}, but this torch was built without CUDA", fix)
    elif not found["gpus"]:
        yield Check("gpu", Status.PASS, "none; ling runs on the CPU")
    for index, gpu in enumerate(found["gpus"]):
        free = f"{gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        detail = f"GPU {index}: {gpu['name']} ({gpu['arch']}), {free}, driver {driver or 'unknown'}"
        yield Check("gpu", Status.PASS, detail)


def _driver_version() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), "unknown")


def _model(settings: Settings | None) -> Iterator[Check]:
    demo = hub.check_folder(paths.demo_dir())
    yield Check(
        "demo model",
        Status.FAIL if demo else Status.PASS,
        demo or "whole",
        "Install ling-local again." if demo else "",
    )
    name = settings["model"] if settings else None
    if name is None or (settings and settings["engine"] == "scripted"):
        return
    try:
        folder = hub.find_model(name)
    except LingError as error:
        yield Check("model", Status.FAIL, error.message, error.hint.replace("\n", "; "))
        return
    problem = hub.check_folder(folder)
    yield Check("model", Status.FAIL if problem else Status.PASS, f"{name}: {problem or 'whole'}")


def _weights_cache(settings: Settings | None) -> Iterator[Check]:
    folder = paths.hugging_face_cache()
    above = folder
    while not above.exists() and above != above.parent:
        above = above.parent
    free = shutil.disk_usage(above).free
    low = free < _LOW_DISK_BYTES
    detail = f"{free / 1e9:.1f} GB free for models in {folder}"
    yield Check("disk", Status.WARN if low else Status.PASS, detail, "Set HF_HOME to a larger disk." if low else "")


def _kernel_cache(settings: Settings | None) -> Iterator[Check]:
    yield _writable("cache", paths.cache_dir(), "XDG_CACHE_HOME")


def _state(settings: Settings | None) -> Iterator[Check]:
    yield _writable("state", paths.state_dir(), "XDG_STATE_HOME")


def _writable(name: str, folder: Path, variable: str) -> Check:
    """Whether files can be made in folder, or the nearest folder above it that exists. Creates nothing."""
    above = folder
    while not above.exists() and above != above.parent:
        above = above.parent
    good = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    fix = "" if good else f"Correct its permissions, or set {variable}."
    return Check(name, Status.PASS if good else Status.WARN, f"{folder}{'' if good else ' cannot be written'}", fix)


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


def _engines(settings: Settings | None) -> Iterator[Check]:
    here = [name for name in ("sglang", "fla") if importlib.util.find_spec(name) is not None]
    yield Check("optional engines", Status.PASS, ", ".join(here) or "none installed; none is needed")


def _terminal(terminal: bool) -> Check:
    hints = terminal_hints()
    encoding = (sys.stdout.encoding or "unknown").lower()
    if not terminal:
        return Check("terminal", Status.PASS, "stdout is no terminal: plain text")
    if encoding.replace("-", "") != "utf8":
        return Check("terminal", Status.WARN, f"encoding {encoding}", "Set a UTF-8 locale: export LC_ALL=C.UTF-8")
    detail = "dumb: plain text" if hints.dumb else "UTF-8" + (", no colour (NO_COLOR)" if hints.no_color else "")
    return Check("terminal", Status.PASS, detail)
