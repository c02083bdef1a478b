"""The embedded engine. Front ends use `open_engine` and protocol.py; neither imports torch."""

from __future__ import annotations

from ling_local.engine.protocol import Engine, EngineSpec, ProgressFn
from ling_local.errors import UsageError

ENGINES = ("native", "scripted", "sglang")


def open_engine(spec: EngineSpec, progress: ProgressFn | None = None) -> Engine:
    """Start the engine that spec names, in a process of its own, and return at once while it loads.

    progress is called from a background thread. `info` and `generate` wait for the load and raise its error.
    """
    if spec.engine not in ENGINES:
        raise UsageError(f"no such engine {spec.engine!r}", f"Engines: {', '.join(ENGINES)}.")
    from ling_local.engine.remote import RemoteEngine

    return RemoteEngine(spec, progress)
