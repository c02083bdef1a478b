"""Run as a program of its own: what torch and the GPUs say about themselves, a line of JSON for each question.

The caller reads the lines that came, however this ends: a driver that hangs or crashes takes only this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MIB = 1 << 20


def ask_torch() -> dict[str, Any]:
    """Version and build; does not touch a driver."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "archs": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }


def ask_gpus() -> dict[str, Any]:
    """Each GPU, after it has computed something. Touches the driver."""
    import torch

    if not torch.version.cuda:
        return {"gpus": []}
    torch.cuda.init()
    rows = []
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        row = {"name": props.name, "free": free, "total": total, "arch": f"sm_{props.major}{props.minor}"}
        row |= {"processors": props.multi_processor_count, "capability": [props.major, props.minor]}
        try:
            ones = torch.ones(MIB, device=f"cuda:{index}")
            row["computes"] = float(ones.sum()) == MIB
        except RuntimeError as error:
            row["problem"] = str(error).splitlines()[0]
        rows.append(row)
    return {"gpus": rows}


def ask_peers() -> dict[str, Any]:
    """Pairs of GPUs, (from, to), that cannot reach each other's memory."""
    import torch

    count = torch.cuda.device_count() if torch.version.cuda else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return {"apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]}


def ask_nvrtc() -> dict[str, Any]:
    """Version of the compiler for GPU kernels."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(str(status))
    return {"version": f"{major}.{minor}"}


QUESTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": ask_torch,
    "nvrtc": ask_nvrtc,
    "gpus": ask_gpus,
    "peers": ask_peers,
}


def main() -> None:
    """Answer all questions; an exception is an answer."""
    for name, ask in QUESTIONS.items():
        sys.stdout.write(json.dumps({"asking": name}) + "\n")
        sys.stdout.flush()
        try:
            answer = ask()
        except BaseException as error:  # SystemExit from a broken package included
            lines = str(error).strip().splitlines() or [type(error).__name__]
            answer = {"error": lines[0], "kind": type(error).__name__}
        sys.stdout.write(json.dumps({"name": name, **answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
