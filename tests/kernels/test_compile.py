"""Every CUDA source compiles for every architecture, without a GPU; and the cache of compiled kernels."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ling_kernels import KernelError, load
from ling_kernels.cuda import compile as compiling
from ling_kernels.cuda.driver import Int64, packed, read_properties

Compiled = Callable[[str, str], tuple[bytes, str]]
SPILLS = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads", re.DOTALL)
SMALL = '#include "h.cuh"\nextern "C" __global__ void small(float* x) { x[threadIdx.x] = FACTOR; }\n'


@pytest.mark.parametrize("arch", compiling.ARCHITECTURES)
@pytest.mark.parametrize("unit", compiling.units())
def test_every_source_compiles_for_every_architecture(compiled: Compiled, unit: str, arch: str) -> None:
    cubin, log = compiled(unit, arch)
    assert cubin.startswith(b"\x7fELF")
    spilled = {name: max(int(stores), int(loads)) for name, stores, loads in SPILLS.findall(log)}
    assert spilled, "the compiler said nothing about registers"
    assert not {name for name, count in spilled.items() if count}, "spilled registers"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.cu").write_text(SMALL)
    (folder / "h.cuh").write_text("#define FACTOR 1.0f\n")
    monkeypatch.setattr(compiling, "SOURCES", folder)
    return folder


def test_what_was_compiled_is_found_again_until_something_changes(tmp_path: Path, sources: Path) -> None:
    asked: list[tuple[str, int, int]] = []
    cache = tmp_path / "cache"

    def build(arch: str = "sm_90") -> bytes:
        return compiling.build(arch, cache, lambda *step: asked.append(step))["small"]

    first = build()
    assert asked == [("small", 0, 1)]
    assert build() == first
    assert len(asked) == 1
    assert build("sm_80") != first
    assert len(asked) == 2
    (sources / "h.cuh").write_text("#define FACTOR 2.0f\n")
    assert build() != first
    assert len(asked) == 3
    assert sorted(p.suffix for p in cache.iterdir()) == [".cubin"] * 3  # nothing half-written is left


def test_what_is_missing_is_compiled_at_the_same_time(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.build("sm_90", tmp_path)
    names = ("other", "third", "small")
    for name in names[:2]:
        (sources / f"{name}.cu").write_text(SMALL.replace("small", name))
    asked: list[tuple[str, int, int]] = []
    both, real = threading.Barrier(2, timeout=20), compiling.compile_unit

    def compile_unit(unit: str, arch: str) -> tuple[bytes, str]:
        both.wait()  # for the other one, which must be under way too
        return real(unit, arch)

    monkeypatch.setattr(compiling, "compile_unit", compile_unit)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    built = compiling.build("sm_90", tmp_path, lambda *step: asked.append(step))
    assert list(built) == sorted(names)
    assert all(name.encode() in built[name] for name in names)
    assert [step[1:] for step in asked] == [(1, 3), (2, 3)]
    assert asked[0][0] == "other"


def test_a_cache_that_cannot_be_written_costs_a_compilation_only(tmp_path: Path, sources: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compiling.build("sm_90", blocked / "cache")["small"].startswith(b"\x7fELF")


def test_a_source_that_does_not_compile_is_named(sources: Path) -> None:
    (sources / "small.cu").write_text("this is no CUDA\n")
    with pytest.raises(KernelError, match=r"refused small\.cu for sm_90: small\.cu\(1\): error"):
        compiling.build("sm_90", None)


def test_an_unknown_architecture_is_refused(sources: Path) -> None:
    with pytest.raises(KernelError, match=r"refused small\.cu for sm_1"):
        compiling.build("sm_1", None)


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(KernelError, match="NVRTC") as caught:
        compiling.build("sm_90", None)
    assert "\n" not in str(caught.value)


def test_arguments_are_passed_as_the_kernels_declare_them() -> None:
    tensor = torch.zeros(3)
    values, kinds = packed([tensor, None, 7, 2.5, Int64(1 << 40), True])
    assert values == (tensor.data_ptr(), 0, 7, 2.5, 1 << 40, 1)
    pointer = ctypes.c_void_p
    assert kinds == (pointer, pointer, ctypes.c_int, ctypes.c_float, ctypes.c_longlong, ctypes.c_int)


def test_no_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(index: int) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nCheck that you have one")

    monkeypatch.setattr(torch.cuda, "get_device_properties", none)
    with pytest.raises(KernelError, match=r"no usable CUDA device: Found no NVIDIA driver on your system\.$"):
        read_properties(0)


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="Tesla V100", major=7, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    with pytest.raises(KernelError, match="Tesla V100 is sm_70"):
        read_properties(0)


def test_a_device_without_kernels_is_named() -> None:
    with pytest.raises(KernelError, match="no kernels for device 'tpu'"):
        load("tpu")
