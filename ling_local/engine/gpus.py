"""Which GPUs there are and how many a model needs, asked of the driver's management library. No torch.

NVML answers in milliseconds and makes no context on any GPU, so the front can ask before it starts a process for each.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ling_local.engine.checkpoint import DSPARK_FOLDER
from ling_local.engine.config import DraftConfig, ModelConfig, load_draft_config, load_model_config
from ling_local.engine.layout import DRAFT_COPIES, draft_layout, memory_bytes, model_layout
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.shapes import dummy_config, dummy_draft_config
from ling_local.engine.shard import SIZES, largest_size
from ling_local.errors import LingError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
WORKING_BYTES = 4 << 30  # scratch, graphs, mailboxes, a first context


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as CUDA numbers it. capability: (9, 0) is Hopper, (10, 0) Blackwell, (0, 0) unknown."""

    index: int
    name: str
    free: int
    total: int
    capability: tuple[int, int] = (0, 0)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use; none where the driver does not answer."""
    with open_nvml() as nvml:
        return [Gpu(index, *_ask(nvml, number)) for index, number in enumerate(visible(nvml))] if nvml else []


@contextmanager
def open_nvml() -> Iterator[ctypes.CDLL | None]:
    """The driver's management library; None where there is none, or it does not start."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        started = nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        started = False
    if not started:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def visible(nvml: ctypes.CDLL) -> list[int]:
    """The driver's numbers of the GPUs that this process may use, in CUDA's order."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return visible_order(os.environ.get("CUDA_VISIBLE_DEVICES"), count.value)


def gpu_handle(nvml: ctypes.CDLL, number: int) -> ctypes.c_void_p:
    """What the library knows a GPU by."""
    handle = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    return handle


def visible_order(variable: str | None, count: int) -> list[int]:
    """The driver's numbers of the GPUs that CUDA shows, in CUDA's order; all if the variable is not plain numbers."""
    if variable is None:
        return list(range(count))
    numbers: list[int] = []
    for part in variable.split(","):
        if not part.strip().lstrip("-").isdigit():
            return list(range(count)) if variable.strip() else []
        if not 0 <= int(part) < count:
            break  # CUDA ignores the rest, too
        numbers.append(int(part))
    return numbers


def _ask(nvml: ctypes.CDLL, number: int) -> tuple[str, int, int, tuple[int, int]]:
    handle, memory = gpu_handle(nvml, number), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return name.value.decode("utf-8", "replace"), memory.free, memory.total, (major.value, minor.value)


def rank_devices(spec: EngineSpec) -> list[str]:
    """The device of each rank: the GPUs that were named, else as many as the model needs, else as many ranks on the
    CPU as were asked for."""
    if spec.engine != "native":
        return [spec.device]
    if spec.device == "cpu":
        return ["cpu"] * max(spec.ranks, 1)
    gpus = spec.gpus or tuple(range(_default_size(spec, visible_gpus())))
    return [f"cuda:{index}" for index in gpus] if len(gpus) > 1 or spec.gpus else [spec.device]


def _default_size(spec: EngineSpec, gpus: list[Gpu]) -> int:
    """The fewest ranks whose parts fit; where none do, the most that there are: the load then says what is short."""
    if len(gpus) < 2:
        return 1
    try:
        sizes = fitting_sizes(spec, len(gpus))
        fitting = (size for size in sizes if needed_bytes(spec, size) <= min(gpu.free for gpu in gpus[:size]))
        return next(fitting, max(sizes))
    except LingError:
        return 1  # the load says what is wrong with the model


def fitting_sizes(spec: EngineSpec, most: int) -> list[int]:
    """Numbers of ranks, `most` at the utmost, that share the model evenly."""
    config = _config(spec)
    return [size for size in SIZES if size <= most and largest_size(config, size) == size]


def needed_bytes(spec: EngineSpec, size: int) -> int:
    """Memory of one of `size` ranks: weights, the draft's, and room to work in."""
    folder, element = Path(spec.model), ELEMENT_BYTES.get(spec.dtype, 2)
    config = _config(spec)
    needed = memory_bytes(model_layout(config, size), element, size)
    draft = folder / DSPARK_FOLDER
    if spec.dummy and spec.draft in ("auto", "dspark"):
        needed += _draft_bytes(dummy_draft_config(spec.dummy), element, size)
    elif spec.draft in ("auto", "dspark") and (draft / "config.json").exists():
        needed += _draft_bytes(load_draft_config(draft, config), element, size)
    return needed + WORKING_BYTES


def _config(spec: EngineSpec) -> ModelConfig:
    return dummy_config(spec.dummy) if spec.dummy else load_model_config(Path(spec.model))


def _draft_bytes(config: DraftConfig, element: int, size: int) -> int:
    return memory_bytes([s for s in draft_layout(config, size) if s.name not in DRAFT_COPIES], element, size)
