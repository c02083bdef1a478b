"""The sglang package: whether it is here, and whether its version knows these models. Imports nothing of it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ling_local.errors import EngineError

FIRST_VERSION = "0.5.19"  # the first release with this model family
RUN_VERSION = "0.5.23"  # the newest that was seen to run it
INSTALL = "pip install 'ling-local[sglang]'"


def installed_version() -> str | None:
    """The version of sglang in this Python, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def check_version(found: str | None) -> str:
    """found, if these models can run on it. Raises EngineError that says what to install."""
    if found is None:
        raise EngineError("SGLang is not installed", f"Install it with {INSTALL}, or leave out --engine sglang.")
    if _numbers(found) < _numbers(FIRST_VERSION):
        raise EngineError(
            f"sglang {found} is installed; Ling-3.0 needs {FIRST_VERSION} or newer",
            f"Install a newer one with pip install 'sglang>={FIRST_VERSION}', or leave out --engine sglang.",
        )
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """`0.5.23.post1` as (0, 5, 23): what is behind the release says nothing about models."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
