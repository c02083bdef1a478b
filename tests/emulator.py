"""The GPU's kernels on a CPU: the sources as they are, compiled as C++ with a header that emulates the machine.

`EmulatedDevice` stands in for `ling_kernels.cuda.driver.Device`, so the host side of the ops runs as well. Each launch
sees copies of its tensors that end at a closed page, and activations are closed until the kernel has waited for its
producer: a read too far, a write to a weight, or an early touch fails with the kernel's name. What may be read
early shows itself as it was before those kernels that may still run.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, UntypedStorage

from built import once
from ling_kernels.cuda.compile import SOURCES, units
from ling_kernels.cuda.driver import Argument, Int64, Properties, packed

HERE = Path(__file__).parent / "kernels" / "emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w")
KERNEL = re.compile(r'extern "C"\s+(?:\[\[\w+\]\]\s+)?void\s+(\w+)\s*\(')

NAMED = re.compile(r"^EMULATED\((\w+)\)", re.MULTILINE)

ORDERS = ("in turn", "backwards", "warp by warp")


class Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("constant", ctypes.c_int),
        ("before", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Unit:
    """One compiled source: its library and the names of its kernels."""

    library: ctypes.CDLL
    kernels: tuple[str, ...]


def load_units(names: Sequence[str], folder: Path) -> list[Unit]:
    """The kernels of these sources, compiled into `folder` or found there; on all cores."""
    emulator = once(folder / "emulator", _compile_emulator) / "emulator.o"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(lambda name: once(folder / name, partial(_compile, name, emulator)), names))
    return [_load(path) for path in built]


def _load(folder: Path) -> Unit:
    loaded = ctypes.CDLL(str(folder / "kernels.so"))
    loaded.emulator_allocate.restype = ctypes.c_void_p
    loaded.emulator_allocate.argtypes = [ctypes.c_size_t]
    loaded.emulator_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    loaded.emulator_launch.restype = ctypes.c_char_p
    return Unit(loaded, tuple(NAMED.findall((folder / "unit.cpp").read_text())))


def _compile_emulator(folder: Path) -> None:
    _run([COMPILER, *FLAGS, "-c", str(HERE / "emulator.cpp"), "-o", str(folder / "emulator.o")])


def _compile(name: str, emulator: Path, folder: Path) -> None:
    """`name`.cu and the emulator as a library in `folder`."""
    for path in (*SOURCES.glob("*.cu*"), *HERE.glob("*.cuh")):  # the emulator's arch.cuh takes the place of the other
        shutil.copy(path, folder)
    source = folder / "unit.cpp"
    source.write_text(f'#include "callable.cuh"\n#include "{name}.cu"\n')
    text = _run([COMPILER, *FLAGS, "-E", "-P", str(source)])
    with source.open("a") as file:
        file.writelines(f"EMULATED({kernel})\n" for kernel in dict.fromkeys(KERNEL.findall(text)))
    _run([COMPILER, *FLAGS, "-shared", str(source), str(emulator), "-o", str(folder / "kernels.so")])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return done.stdout


class EmulatedDevice:
    """Runs launches at once. order: which of ORDERS the threads of a block keep where a barrier leaves the choice."""

    def __init__(
        self, folder: Path, names: Sequence[str] | None = None, num_sms: int = 3, order: str = ORDERS[0]
    ) -> None:
        self.properties = Properties("sm_80", num_sms, 163 * 1024)
        self.pdl = False
        self.order = ORDERS.index(order)
        self.launched: list[str] = []
        self._constants: dict[int, Tensor] = {}
        self._own: set[int] = set()  # settled storages that the next kernel may write
        # storages that kernels wrote which may still run when the next one begins, and what they held before
        self._unsettled: dict[int, tuple[UntypedStorage, bytes]] = {}
        self._units = load_units(names or units(), folder)

    def constant(self, *tensors: Tensor) -> None:
        """Declare weights or tables: no kernel writes them, and they may be read before the wait."""
        self._constants |= {t.untyped_storage().data_ptr(): t for t in tensors}

    def settle(self) -> None:
        """All kernels so far have finished before the next one begins."""
        self._unsettled.clear()

    def resident(self, name: str, block: int, shared: int = 0) -> int:
        return 2 * self.properties.num_sms

    def launch(
        self, name: str, grid: int | Sequence[int], block: int, args: Sequence[Argument], shared: int = 0
    ) -> None:
        unit = next(unit for unit in self._units if name in unit.kernels)
        self._check(unit, name, args)
        self.launched.append(name)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in args if isinstance(t, Tensor)}
        copies = {at: unit.library.emulator_allocate(s.nbytes()) for at, s in storages.items() if s.nbytes()}
        regions = (Region * len(copies))()
        shadows = []
        for region, (at, base) in zip(regions, copies.items(), strict=True):
            ctypes.memmove(base, at, storages[at].nbytes())
            region.base, region.bytes = base, storages[at].nbytes()
            region.constant = 2 if at in self._own else int(at in self._constants)
            if region.constant and at in self._unsettled:
                unsettled = ctypes.create_string_buffer(self._unsettled[at][1], 2 * storages[at].nbytes())
                region.before = ctypes.addressof(unsettled)
                shadows.append(unsettled)
        moved = [_moved(arg, copies) for arg in args]
        values, kinds = packed(moved)
        kept = [kind(value) for value, kind in zip(values, kinds, strict=True)]
        pointers = (ctypes.c_void_p * len(kept))(*[ctypes.addressof(value) for value in kept])
        dims = (grid,) if isinstance(grid, int) else tuple(grid)
        shape = (ctypes.c_uint32 * 5)(*(*dims, 1, 1)[:3], block, self.order)
        run = getattr(unit.library, f"run_{name}")
        error = unit.library.emulator_launch(run, pointers, shape, shared, regions, len(copies))
        if not unit.library.emulator_was_early():
            self.settle()  # some of its threads had waited: all before it have finished when the next one begins
        for at, base in copies.items():
            size = storages[at].nbytes()
            if at in self._own or at not in self._constants:
                held = ctypes.string_at(at, size)
                if held != ctypes.string_at(base, size):
                    self._unsettled.setdefault(at, (storages[at], held))
            ctypes.memmove(at, base, size)
            unit.library.emulator_free(base, size)
        assert error is None, f"{name}: {error.decode()}"

    def _check(self, unit: Unit, name: str, args: Sequence[Argument]) -> None:
        """The kinds of the arguments are the kernel's: a GPU would read on without a word."""
        signature = getattr(unit.library, f"kinds_{name}")
        signature.restype = ctypes.c_char_p
        letters = {ctypes.c_void_p: "p", ctypes.c_int: "i", ctypes.c_longlong: "l", ctypes.c_float: "f"}
        given = "".join(letters[kind] for kind in packed(args)[1])
        assert given == signature().decode(), f"{name} takes {signature().decode()}, was given {given}"


def _moved(arg: Argument, copies: dict[int, int]) -> Argument:
    """A tensor's address within its storage's copy."""
    if not isinstance(arg, Tensor) or not arg.untyped_storage().nbytes():
        return arg
    storage = arg.untyped_storage().data_ptr()
    return _Address(copies[storage] + arg.data_ptr() - storage)


class _Address(Int64):
    """An address that is passed as 64 bits."""
