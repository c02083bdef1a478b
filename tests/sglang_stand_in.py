"""Puts the stand-in for the sglang package, and a driver that knows GPUs, in place of what a test machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints import write_checkpoint, write_draft
from ling_local.engine.gpus import Gpu
from ling_local.engine.protocol import EngineSpec

FOLDER = Path(__file__).with_name("fake_sglang")
HOPPER = [Gpu(0, "NVIDIA H200", 1 << 37, 1 << 37, (9, 0))]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
_DRIVER = r"""
#include <string.h>
typedef void *H;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, H *handle) { *handle = (H)(long)(index + 1); return 0; }
int nvmlDeviceGetMemoryInfo(H handle, unsigned long long *m) { m[0] = m[1] = 1ull << 37; m[2] = 0; return 0; }
int nvmlDeviceGetName(H handle, char *name, unsigned size) { strncpy(name, "Stand-in GPU", size); return 0; }
int nvmlDeviceGetCudaComputeCapability(H handle, int *major, int *minor) { *major = MAJOR; *minor = 0; return 0; }
"""


@contextmanager
def importable() -> Iterator[None]:
    """The stand-in can be imported and has a version, in this process."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


def environment(folder: Path, gpus: int = 1, major: int = 9) -> dict[str, str]:
    """Variables for a process that finds the stand-in, and so many GPUs of that generation."""
    source = folder / "driver.c"
    source.write_text(_DRIVER)
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", f"-DGPUS={gpus}", f"-DMAJOR={major}", str(source)]
    subprocess.run([*command, "-o", str(folder / "libnvidia-ml.so.1")], check=True)
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(folder), "FAKE_SGLANG_NOTES": str(folder / "notes")}


def make_model(folder: Path, draft: bool = True, **changes: Any) -> Path:
    """A small checkpoint with an MTP layer, and with a DSpark draft where one is wanted."""
    model = write_checkpoint(folder / "model", num_nextn_predict_layers=1, **changes)
    if draft:
        write_draft(model / "dspark", model, model_type="qwen3")
    return model


def make_spec(folder: Path, draft: str = "dspark", context: int = 64) -> EngineSpec:
    return EngineSpec(str(make_model(folder)), "sglang", "cuda", "bfloat16", draft, context=context)
