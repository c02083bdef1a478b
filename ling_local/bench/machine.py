"""What this process can tell about the program and the machine it runs on, without torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import ling_local

_ROOT = Path(__file__).parents[2]
_GIT = ("git", "describe", "--always", "--dirty=.changed", "--exclude=*")


def version() -> str:
    """`0.1.0`, and from a clone `0.1.0+1cb8c55`, with `.changed` where files differ from that commit."""
    commit = ""
    if (_ROOT / ".git").exists() and (_ROOT / "pyproject.toml").exists():  # not a repository that we lie in by chance
        try:
            done = subprocess.run(_GIT, cwd=_ROOT, capture_output=True, text=True, timeout=10, check=False)
            commit = done.stdout.strip() if done.returncode == 0 else ""
        except (OSError, subprocess.TimeoutExpired):  # no git here
            commit = ""
    return f"{ling_local.__version__}+{commit}" if commit else ling_local.__version__


def machine() -> dict[str, Any]:
    """What this process can tell about the machine, without torch."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpus": len(usable_cpus()),
        "memory_bytes": _memory_bytes(),
    }


def usable_cpus() -> frozenset[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.machine()


def _memory_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
