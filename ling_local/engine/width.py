"""How many drafts are worth making, and how many worth verifying: least expected time per token.

The host decides from what steps cost on this machine, what drafting brought so far, and the confidence of drafts
already made. Any choice is lossless: a row's token is the target's own draw, keyed by seed and position, whatever
is tested beside it, so even a rule that looks at later drafts only ends a step earlier or later (dspark.md sections
6.4 and 7.3b).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

PIECE = 8  # rows that a product of a window sees at once, on the CPU and on a GPU
REMEMBERED = 15  # step times kept per kind; their median ignores an interruption
PLAIN_FIRST = 3  # plain steps timed before drafting begins: there must be something to beat
SMOOTHING = 0.92  # of what drafting brings: some dozen steps
TRIAL = 4  # drafting steps before it is judged
PROVEN = 30  # drafting steps after which it has earned a short pause again
REFRESH = 128  # drafting steps after which plain ones are timed again: a machine gets busy, and idle
PLAIN_AGAIN = 2  # how many
PAUSE, LONGEST_PAUSE = 32, 512  # plain steps until it is tried again: doubled each time that it fails


def _piece(width: int) -> int:
    """Which piece of rows the last row of a window is in; time jumps from one to the next."""
    return -(-width // PIECE)


class StepTimes:
    """Measured seconds of a step by its width and whether it drafts at its end; shared by an engine's requests.

    The first step of a kind touches memory and code that no step has touched before: it is not counted.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, bool], deque[float]] = {}

    def note(self, width: int, drafting: bool, seconds: float) -> None:
        known = self.kept.setdefault((width, drafting), deque(maxlen=REMEMBERED + 1))
        if len(known) == known.maxlen:
            del known[1]  # the place of the first one stays taken
        known.append(seconds)

    def samples(self, width: int, drafting: bool) -> int:
        return max(len(self.kept.get((width, drafting), ())) - 1, 0)

    def seconds(self, width: int, drafting: bool) -> float | None:
        """The median, or a straight line between the nearest measured widths of the same piece; None outside."""
        known = {w: median(list(t)[1:]) for (w, d), t in self.kept.items() if d == drafting and len(t) > 1}
        if width in known:
            return known[width]
        near = [w for w in known if _piece(w) == _piece(width)]
        below = max((w for w in near if w < width), default=None)
        above = min((w for w in near if w > width), default=None)
        if below is None or above is None:
            return None
        share = (width - below) / (above - below)
        return known[below] + share * (known[above] - known[below])


@dataclass
class WidthRule:
    """For one generation. block: most drafts a step; times: the engine's table; full: always all of them."""

    block: int
    times: StepTimes = field(default_factory=StepTimes)
    full: bool = False
    tokens: float = 0.0  # of drafting steps, smoothed; seconds likewise: their ratio is what drafting brings
    seconds: float = 0.0
    tried: int = 0
    rest: int = 0
    pause: int = PAUSE

    def note(self, width: int, following: int, count: int, seconds: float) -> None:
        """Learn from one step: its width, the drafts made at its end, the tokens it committed, its time."""
        self.times.note(width, following > 0, seconds)
        usual = self.times.seconds(width, following > 0)  # the median: an interruption is nobody's fault
        if (width > 1 or following) and usual is not None:
            self.tokens = SMOOTHING * self.tokens + count
            self.seconds = SMOOTHING * self.seconds + usual
            self.tried += 1
            if self.tried == PROVEN:
                self.pause = PAUSE

    def following(self) -> int:
        """Drafts to make at the end of the next step: all, or none while plain decoding is faster."""
        if self.full:
            return self.block
        if not self.block or self.times.samples(1, False) < PLAIN_FIRST:
            return 0
        if self.rest:
            self.rest -= 1
            return 0
        plain = self.times.seconds(1, False)
        if self.tried < TRIAL or self.seconds <= self.tokens * plain:
            if self.tried and not self.tried % REFRESH:
                self.tried += 1  # once; this step still verifies drafts, the two after it are plain
                self.rest = PLAIN_AGAIN
                return 0
            return self.block
        self.rest, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
        self.tokens = self.seconds = 0.0
        self.tried = 0
        return 0

    def width(self, confidence: Sequence[float], following: int) -> int:
        """Rows to verify, given how sure the drafts are and whether more will be made after it."""
        if self.full:
            return len(confidence) + 1
        best, rate, reach, expected = 1, 0.0, 1.0, 1.0
        for width in range(1, len(confidence) + 2):
            if width > 1:
                reach *= confidence[width - 2]
                expected += reach
            seconds = self.times.seconds(width, following > 0)
            if seconds is None:  # not measured yet: verify as many as cost the same, and learn
                return min(_piece(width) * PIECE, len(confidence) + 1)
            if expected / seconds > rate:
                best, rate = width, expected / seconds
        return best
