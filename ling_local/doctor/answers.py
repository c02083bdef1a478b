"""What a loaded model knows: how often it guesses the next token of a fixed text, and three continuations.

Damage that no look at the files shows (rows in a wrong order, scales that were lost, a kernel that is wrong on this
GPU) shows here. The engine's door gives ids, not probabilities, so the figure is a share of right guesses in place of a
perplexity; in return every guess takes the way that answers take, on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ling_local.doctor.checks import Check, Status
from ling_local.engine.protocol import Engine
from ling_local.generate import TextModel
from ling_local.types import TokenRequest

_TEXT = Path(__file__).parents[1] / "data" / "prompts" / "code.txt"
_FIRST, _EVERY = 48, 5  # what stands before the first guess, in tokens; not every position is worth the time
GOOD, POOR = 0.4, 0.2  # share of right guesses; the demo has 0.7, a model without sense none
KNOWN = (  # text, and what any model of code goes on with
    ("import numpy as", " np"),
    ("def add(a, b):\n    return a", " + b"),
    ("for i in", " range("),
)
_FIX = "Check the files (hashes above, or `ling pull NAME --verify`); on a GPU compare with --device cpu."


def check_answers(engine: Engine, text: TextModel, show: Callable[[int, int], None]) -> Iterator[Check]:
    """Ask a loaded engine. show: guesses made, and guesses in all. Raises what the engine fails with."""
    ids = text.tokens.encode(_TEXT.read_text(encoding="utf-8"))
    places = range(_FIRST, len(ids), _EVERY)
    right = 0
    for number, place in enumerate(places):
        show(number, len(places))
        right += _next(engine, ids[:place], 1) == ids[place : place + 1]
    share = right / len(places)
    status = Status.PASS if share >= GOOD else Status.WARN if share >= POOR else Status.FAIL
    detail = f"{right} of {len(places)} next tokens of a fixed text of Python guessed right ({100 * share:.0f} %"
    yield Check("guesses", status, f"{detail}; expected: {100 * GOOD:.0f} % or more)", "" if share >= GOOD else _FIX)
    wrong = []
    for before, after in KNOWN:
        made = text.tokens.decode(_next(engine, text.tokens.encode(before), 8))
        if not made.startswith(after):
            wrong.append(f"{before + after!r} came as {before + made!r}")
    status = Status.PASS if not wrong else Status.WARN if len(wrong) < len(KNOWN) else Status.FAIL
    said = f"{len(KNOWN) - len(wrong)} of {len(KNOWN)} known continuations"
    yield Check("answers", status, "; ".join([said, *wrong]), _FIX if wrong else "")


def _next(engine: Engine, ids: list[int], count: int) -> list[int]:
    """The next ids, greedy and without drafts."""
    request = TokenRequest(tuple(ids), max_tokens=count, draft=False)
    return [token for step in engine.generate(request) for token in step.ids]
