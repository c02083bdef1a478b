"""Torch, the GPUs, the compiler for their kernels and the links between them, asked of a child process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ling_local import paths
from ling_local.doctor.checks import Check, Status
from ling_local.engine.links import find_links, try_exchange
from ling_local.engine.shard import SIZES
from ling_local.settings import Settings

TORCH_RANGE = ((2, 11), (2, 15))
LEAST_CAPABILITY = (8, 0)
GIB = 1 << 30
_KILLED_S = 2.0


@dataclass(frozen=True, slots=True)
class Answers:
    """What the child said, by question; `hung` is the question that it never answered, "" if it ended by itself.

    words: the last line that it wrote on stderr, for a child that crashed.
    """

    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)
    hung: str = ""
    crashed: str = ""
    words: str = ""


def ask(timeout_s: float) -> Answers:
    """Start the child and give it timeout_s seconds. Comes back even where the child cannot be killed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        late = False
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                # one that is stuck inside the driver, where no signal arrives, is left behind
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_KILLED_S)
        out.seek(0)
        err.seek(0)
        lines = [json.loads(line) for line in out.read().splitlines() if line.startswith(b"{") and line.endswith(b"}")]
        said = [line for line in err.read().decode("utf-8", "replace").splitlines() if line.strip()]
    answers = {line["name"]: line for line in lines if "name" in line}
    open_one = next((line["asking"] for line in reversed(lines) if "asking" in line), "torch")
    unfinished = "" if open_one in answers else open_one
    crashed = unfinished if not late else ""
    return Answers(answers, unfinished if late else "", crashed, said[-1] if said else f"exit code {child.returncode}")


def check(settings: Settings | None, timeout_s: float) -> Iterator[Check]:
    """Torch, then the GPUs if there are any."""
    wanted = settings is not None and settings["device"] == "cuda"
    answers = ask(timeout_s)
    torch = answers.by_name.get("torch", {})
    if "version" not in torch:
        if answers.hung == "torch":
            yield Check("torch", Status.FAIL, f"importing it takes longer than {timeout_s:g} s", _LONGER)
            return
        why = torch.get("error") or answers.words
        fix = "Install it again: pip install --force-reinstall torch"
        yield Check("torch", Status.FAIL, f"torch cannot be imported: {why}", fix)
        return
    numbers = tuple(int(part) for part in torch["version"].split("+")[0].split(".")[:2])
    known = TORCH_RANGE[0] <= numbers < TORCH_RANGE[1]
    detail = f"{torch['version']}, {torch['threads']} threads, CUDA {torch['cuda'] or 'not built in'}"
    yield Check("torch", Status.PASS if known else Status.WARN, detail, "" if known else "Tested: torch 2.11 to 2.14.")
    yield from _gpus(answers, torch, wanted, timeout_s)
    gpus = answers.by_name.get("gpus", {}).get("gpus") or []
    yield _kernels(answers, bool(gpus))
    if len(gpus) > 1:
        yield _links(answers, len(gpus))
        yield _exchange(len(gpus), timeout_s)


_LONGER = "Look at `nvidia-smi`; a first start may be slow: ling doctor --timeout 300."


def _gpus(answers: Answers, torch: dict[str, Any], wanted: bool, timeout_s: float) -> Iterator[Check]:
    driver, found = driver_version(), answers.by_name.get("gpus", {})
    bad = Status.FAIL if wanted else Status.WARN
    fix = "" if wanted else "ling runs on the CPU. "
    if answers.hung == "gpus":
        detail = f"driver {driver or 'unknown'} gives no answer within {timeout_s:g} s"
        yield Check("gpu", Status.FAIL, detail, _LONGER)
    elif answers.crashed == "gpus":
        yield Check("gpu", Status.FAIL, f"asking for it crashes: {answers.words}", "Look at `nvidia-smi` and `dmesg`.")
    elif driver and not torch["cuda"]:
        detail = f"driver {driver}, but this torch was built without CUDA"
        yield Check("gpu", bad, detail, f"{fix}Install a CUDA build of torch to use the GPU.")
    elif not driver and not found.get("gpus"):
        if wanted:
            yield Check("gpu", Status.FAIL, "none, but --device cuda is asked for", "Use --device cpu.")
        else:
            yield Check("gpu", Status.PASS, "none; ling runs on the CPU")
    elif found.get("error"):
        yield Check("gpu", bad, f"driver {driver}: {found['error']}", f"{fix}Look at `nvidia-smi`.")
    elif not found.get("gpus"):
        yield Check("gpu", bad, f"driver {driver}, but no GPU is visible", f"{fix}Look at CUDA_VISIBLE_DEVICES.")
    for index, gpu in enumerate(found.get("gpus") or []):
        yield _gpu(index, gpu, driver)


def _gpu(index: int, gpu: dict[str, Any], driver: str) -> Check:
    free = f"{gpu['free'] / GIB:.1f} of {gpu['total'] / GIB:.1f} GiB free"
    detail = (
        f"GPU {index}: {gpu['name']} ({gpu['arch']}, {gpu['processors']} SMs), {free}, driver {driver or 'unknown'}"
    )
    if gpu.get("problem") or not gpu.get("computes"):
        why = gpu.get("problem") or "it gives a wrong sum"
        return Check("gpu", Status.FAIL, f"{detail}: it cannot compute: {why}", "Look at `nvidia-smi` and `dmesg`.")
    if tuple(gpu["capability"]) < LEAST_CAPABILITY:
        fix = "The kernels need compute capability 8.0 (Ampere) or newer; ling runs on the CPU."
        return Check("gpu", Status.WARN, detail, fix)
    if gpu["free"] < 0.8 * gpu["total"]:
        return Check("gpu", Status.WARN, detail, "Others use its memory; `nvidia-smi` names them.")
    return Check("gpu", Status.PASS, detail)


def _kernels(answers: Answers, needed: bool) -> Check:
    """The compiler for the GPU kernels, and what it has made already."""
    folder = paths.cache_dir() / "kernels"
    ready = len(list(folder.glob("*.cubin"))) if folder.is_dir() else 0
    nvrtc = answers.by_name.get("nvrtc", {})
    if "version" in nvrtc:
        detail = f"NVRTC {nvrtc['version']}; {ready} compiled in {folder}"
        return Check("kernels", Status.PASS, detail)
    why = nvrtc.get("error") or ("no answer" if answers.hung else answers.words)
    if not needed:
        return Check("kernels", Status.PASS, "no NVRTC; only a GPU needs it")
    return Check("kernels", Status.FAIL, f"no NVRTC: {why}", "pip install 'ling-local[gpu]'")


def _links(answers: Answers, count: int) -> Check:
    """Whether the GPUs of this machine can read each other's memory, which tensor parallel needs to be fast."""
    peers = answers.by_name.get("peers", {})
    if "apart" not in peers:
        return Check("links", Status.WARN, f"{count} GPUs: {peers.get('error') or 'no answer about their links'}")
    if not peers["apart"]:
        return Check("links", Status.PASS, f"{count} GPUs, each reaches the memory of every other")
    pairs = ", ".join(f"{a}-{b}" for a, b in peers["apart"] if a < b)
    fix = "Several GPUs as one need peer access (NVLink, or PCIe with ACS off)."
    return Check("links", Status.WARN, f"{count} GPUs; these pairs do not reach each other: {pairs}", fix)


def _exchange(count: int, timeout_s: float) -> Check:
    """Whether as many GPUs as can share a model bring their sums together, and how fast: tried, not believed."""
    size = max(size for size in SIZES if size <= count)
    trial = try_exchange(range(size), timeout_s)
    if not trial.kind:
        fix = "One GPU works without it; for several look at `nvidia-smi topo -m`, and at NCCL's own tests."
        return Check("exchange", Status.WARN, f"{size} GPUs cannot work as one: {trial.note}", fix)
    links = "; ".join(str(link) for link in find_links() if link.second < size)
    took = f"{trial.one_row_us:g} us for one row, {trial.nine_rows_us:g} for nine, norm included"
    detail = f"{size} GPUs over {trial.kind}: {took}" + (f" ({links})" if links else "")
    if trial.note:
        fix = "Switch PCIe's ACS off, or pass the IOMMU by, where GPUs should write into each other's memory."
        return Check("exchange", Status.WARN, f"{detail}; {trial.note}", fix)
    return Check("exchange", Status.PASS, detail)


def driver_version() -> str:
    """The NVIDIA kernel driver's version, "" where there is none."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), "unknown")
