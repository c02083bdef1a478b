"""What takes long to build, built once for all tests and all workers of a run."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def once(path: Path, build: Callable[[Path], object]) -> Path:
    """The folder `path`: filled by `build` where it is not there yet, while others who want it wait."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            aside = path.with_name(f"{path.name}.part")
            shutil.rmtree(aside, ignore_errors=True)  # of a build that failed
            aside.mkdir()
            build(aside)
            os.replace(aside, path)
    return path
