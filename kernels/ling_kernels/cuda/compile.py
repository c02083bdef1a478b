"""CUDA sources to machine code through NVRTC: no nvcc and no host compiler; kept in a cache folder.

Each `.cu` file in `csrc` is one unit, and all `.cuh` files are its headers. A cubin is keyed by everything that it
depends on, so a stale one is never found and nothing has to be cleared.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ling_kernels.ops import KernelError

SOURCES = Path(__file__).parent / "csrc"
# what the code is tested to compile for; other architectures from sm_80 on are compiled just the same
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--generate-line-info")

ProgressFn = Callable[[str, int, int], None]
"""Called with (a unit under way, units done, units in all): at the start, and while there are more, after each unit."""


def units() -> list[str]:
    """Names of the compilation units, in a fixed order."""
    return sorted(path.stem for path in SOURCES.glob("*.cu"))


def build(arch: str, cache: Path | None, progress: ProgressFn | None = None) -> dict[str, bytes]:
    """Cubins of all units for an architecture such as "sm_90", from the cache where they are there.

    cache None: compile and keep nothing. Raises KernelError with the compiler's first complaint.
    """
    nvrtc = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    names = units()
    paths = {u: cache / f"{u}-{arch}-{_key(u, arch, f'{major}.{minor}')}.cubin" for u in names} if cache else {}
    built = {unit: path.read_bytes() for unit, path in paths.items() if path.exists()}
    missing = [unit for unit in names if unit not in built]
    if progress and missing:
        progress(missing[0], len(built), len(names))
    for unit, cubin in _compile_all(missing, arch):
        built[unit] = cubin
        if unit in paths:
            _keep(paths[unit], cubin)
        left = [name for name in missing if name not in built]
        if progress and left:
            progress(left[0], len(built), len(names))
    return {unit: built[unit] for unit in names}


def _compile_all(names: list[str], arch: str) -> Iterator[tuple[str, bytes]]:
    """Units with their cubins as they get ready. The compiler works without Python's lock, so threads are enough."""
    if not names:
        return
    pool = ThreadPoolExecutor(min(len(names), os.cpu_count() or 1))
    try:
        under_way = {pool.submit(compile_unit, unit, arch): unit for unit in names}
        for done in as_completed(under_way):
            yield under_way[done], done.result()[0]
    finally:
        pool.shutdown(cancel_futures=True)


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
