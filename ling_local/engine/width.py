"""How many drafts are worth asking for, and worth verifying: least expected time per token.

The host decides from what earlier steps cost and kept, and from the confidence of drafts already made. Any choice is
lossless: a row's token is the target's own draw, keyed by seed and position, whatever is tested beside it, so even
a rule that looks at later drafts only ends a step earlier or later (dspark.md section 6.4 and 7.3b).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

REMEMBERED = 9  # step times kept per kind; their median ignores an interruption
SMOOTHING = 0.9  # of the running acceptance by position: some ten steps
PROBE_AFTER = 24  # plain steps before drafting is tried again, doubled each time it fails, up to:
PROBE_AT_MOST = 384


@dataclass
class WidthRule:
    """For one generation. block: most drafts; survival[j]: running share of steps in which the first j+1 drafts
    held; times: seconds by (width, drafts made after it)."""

    block: int
    survival: list[float] = field(default_factory=list)
    times: dict[tuple[int, int], deque[float]] = field(default_factory=dict)
    rest: int = 0
    patience: int = PROBE_AFTER

    def __post_init__(self) -> None:
        self.survival = [0.8 ** (j + 1) for j in range(self.block)]

    def note(self, width: int, following: int, count: int, seconds: float) -> None:
        """Learn from one step: its width, the drafts made at its end, the tokens it committed, its time."""
        self.times.setdefault((width, following), deque(maxlen=REMEMBERED)).append(seconds)
        for j in range(width - 1):
            held = count > j + 1
            self.survival[j] = SMOOTHING * self.survival[j] + (1 - SMOOTHING) * held

    def following(self) -> int:
        """Drafts to make at the end of the next step: all, or none while plain decoding is faster."""
        if not self.block:
            return 0
        if self.rest:
            self.rest -= 1
            if not self.rest:
                self.survival = [max(s, 0.8 ** (j + 1)) for j, s in enumerate(self.survival)]
            return 0 if self.rest else self.block
        plain, drafted = self._time(1, 0), self._time(self.block + 1, self.block)
        if plain is None or drafted is None or drafted / (1 + sum(self.survival)) <= plain:
            return self.block
        self.rest, self.patience = self.patience, min(2 * self.patience, PROBE_AT_MOST)
        return 0

    def width(self, confidence: Sequence[float], following: int) -> int:
        """Rows to verify, given how sure the drafts are and how many will be made after it."""
        best, rate, reach, expected = 1, 0.0, 1.0, 1.0
        for width in range(1, len(confidence) + 2):
            if width > 1:
                reach *= confidence[width - 2]
                expected += reach
            seconds = self._time(width, following)
            if seconds is None:
                return len(confidence) + 1  # not measured yet: verify all, and learn
            if expected / seconds > rate:
                best, rate = width, expected / seconds
        return best

    def _time(self, width: int, following: int) -> float | None:
        """Measured or interpolated seconds of a step; None before its neighbours were measured."""
        known = {w: median(t) for (w, f), t in self.times.items() if f == following}
        if width in known:
            return known[width]
        below = max((w for w in known if w < width), default=None)
        above = min((w for w in known if w > width), default=None)
        if below is None or above is None:
            return None
        share = (width - below) / (above - below)
        return known[below] + share * (known[above] - known[below])
