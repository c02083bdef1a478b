"""`ling` with engines that break the promise of speculation: the ids that they draft are not the model's own.

Run as a program, with the arguments of `ling` after the position at which the lie begins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ling_local.engine.protocol import EngineInfo, EngineSpec, ProgressFn
from ling_local.engine.scripted import ScriptedEngine
from ling_local.types import StepResult, TokenRequest


class LyingEngine:
    """A scripted engine whose id number `position` is another one where a sampled request may draft."""

    def __init__(self, inner: ScriptedEngine, position: int) -> None:
        self._inner, self._position = inner, position

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    def generate(self, request: TokenRequest) -> Any:
        generation = self._inner.generate(request)
        lies = request.draft and request.sampling.temperature > 0 and request.max_tokens > self._position
        return _Lie(generation, self._position) if lies else generation

    def close(self) -> None:
        self._inner.close()


class _Lie:
    def __init__(self, inner: Any, position: int) -> None:
        self._inner, self._position = inner, position

    def __iter__(self) -> Iterator[StepResult]:
        done = 0
        for step in self._inner:
            at = self._position - done
            if 0 <= at < len(step.ids):
                step = replace(step, ids=(*step.ids[:at], step.ids[at] + 1, *step.ids[at + 1 :]))
            done += len(step.ids)
            yield step

    def cancel(self) -> None:
        self._inner.cancel()


def main() -> None:
    """Play `ling` with such engines in place of the real ones."""
    import ling_local.engine
    from ling_local.cli.main import run

    position = int(sys.argv[1])

    def open_engine(spec: EngineSpec, progress: ProgressFn | None = None) -> Any:
        return LyingEngine(ScriptedEngine.load(spec, progress), position)

    ling_local.engine.open_engine = open_engine
    sys.exit(run(sys.argv[2:]))


if __name__ == "__main__":
    main()
