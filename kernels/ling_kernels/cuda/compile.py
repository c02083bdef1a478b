"""CUDA sources to machine code through NVRTC: no nvcc and no host compiler; kept in a cache folder.

Each `.cu` file in `csrc` is one unit, and all `.cuh` files are its headers. A cubin is keyed by everything that it
depends on, so a stale one is never found and nothing has to be cleared.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ling_kernels.ops import KernelError

SOURCES = Path(__file__).parent / "csrc"
# what the code is tested to compile for; other architectures from sm_80 on are compiled just the same
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--generate-line-info")

ProgressFn = Callable[[str, int, int], None]
"""Called with (unit, units done, units in all) before each unit that has to be compiled."""


def units() -> list[str]:
    """Names of the compilation units, in a fixed order."""
    return sorted(path.stem for path in SOURCES.glob("*.cu"))


def build(arch: str, cache: Path | None, progress: ProgressFn | None = None) -> dict[str, bytes]:
    """Cubins of all units for an architecture such as "sm_90", from the cache where they are there.

    cache None: compile and keep nothing. Raises KernelError with the compiler's first complaint.
    """
    nvrtc = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    names, built = units(), {}
    for number, unit in enumerate(names):
        path = None if cache is None else cache / f"{unit}-{arch}-{_key(unit, arch, f'{major}.{minor}')}.cubin"
        if path is not None and path.exists():
            built[unit] = path.read_bytes()
            continue
        if progress:
            progress(unit, number, len(names))
        built[unit], _ = compile_unit(unit, arch)
        if path is not None:
            _keep(path, built[unit])
    return built


def compile_unit(unit: str, arch: str) -> tuple[bytes, str]:
    """Compile one unit: its cubin and the compiler's log (registers and spills per kernel)."""
    nvrtc = _nvrtc()
    headers = sorted(SOURCES.glob("*.cuh"))
    texts, names = [h.read_bytes() for h in headers], [h.name.encode() for h in headers]
    source = (SOURCES / f"{unit}.cu").read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(source, f"{unit}.cu".encode(), len(headers), texts, names)
    _check(nvrtc, status, "cannot start")
    try:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            first = next((line for line in log.splitlines() if "error" in line), log.strip()[:200])
            raise KernelError(f"the CUDA compiler refused {unit}.cu for {arch}: {first or status.name}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log.strip("\0\n")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        status, *_ = nvrtc.nvrtcVersion()
    except Exception as error:  # a missing package, library or symbol: each library version raises its own kind
        text = str(error).strip().splitlines()
        raise KernelError(
            f"the CUDA run-time compiler (NVRTC, package cuda-bindings) cannot be used: {text[0] if text else error!r}"
        ) from None
    _check(nvrtc, status, "gives no version")
    return nvrtc


def _check(nvrtc, status, what: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"the CUDA run-time compiler {what}: {status.name}")


def _read(size_of: Callable, get: Callable, program: object) -> bytes:
    _, size = size_of(program)
    buffer = b"\0" * size
    get(program, buffer)
    return buffer


def _key(unit: str, arch: str, version: str) -> str:
    digest = hashlib.sha256("\0".join((arch, version, *OPTIONS)).encode())
    for path in (SOURCES / f"{unit}.cu", *sorted(SOURCES.glob("*.cuh"))):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _keep(path: Path, cubin: bytes) -> None:
    """Written aside and renamed: another process finds a whole file or none. A full disk only costs a compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(aside, path)
    except OSError:
        return
