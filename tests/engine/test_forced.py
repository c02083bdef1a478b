"""Forced accept counts: the counts are met, and ids and states are those of decoding without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from ling_local.engine.native import NativeEngine
from ling_local.errors import UsageError
from ling_local.types import SamplingParams, StepResult, TokenRequest
from parity import assert_bits

PROMPT = (5, 9, 2, 7)
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(1.0, 20, 0.9, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forced") / "m", seed=8)


def run(engine: NativeEngine, draft: bool, params: SamplingParams, num: int = 20) -> list[StepResult]:
    request = TokenRequest(PROMPT, sampling=params, max_tokens=num, draft=draft, full_width=draft)
    return list(engine.generate(request))


def ids_of(results: Sequence[StepResult]) -> list[int]:
    return [token for result in results for token in result.ids]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pattern", [(0,), (4,), (3, 0, 4, 1, 2)])
def test_a_pattern_is_kept_and_changes_nothing(folder: Path, pattern: tuple[int, ...], params: SamplingParams) -> None:
    plain = NativeEngine.load(folder, draft="mtp", block=4)
    forced = NativeEngine.load(folder, draft="mtp", block=4, accept=pattern)
    want = run(plain, False, params)
    run(forced, False, params)
    forced._forget()
    got = run(forced, True, params)
    assert ids_of(got) == ids_of(want)
    assert [step.drafted for step in got] == [0] + [4] * (len(got) - 1)
    counts = [step.accepted for step in got[1:-1]]  # the last one is cut by the limit
    assert counts == list(islice(cycle(pattern), len(counts)))
    for name in ("recurrent", "conv", "length", "anchor"):
        assert_bits(getattr(forced._state, name), getattr(plain._state, name), name)
    assert forced.info.forced == pattern
    assert "FORCED" in forced.info.marks[0]
    assert not plain.info.marks


def test_a_pattern_must_fit_the_drafter(folder: Path) -> None:
    with pytest.raises(UsageError, match="makes 2 drafts a step"):
        NativeEngine.load(folder, draft="mtp", block=2, accept=(0, 3))
    with pytest.raises(UsageError, match="there is no drafter"):
        NativeEngine.load(folder, draft="off", accept=(1,))
