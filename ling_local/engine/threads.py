"""How many CPU threads a small model gets, step by step.

Its parallel regions are so short that on a quiet machine two threads save a fifth of a step, while one busy core
elsewhere makes the other thread wait for a time slice: 6 ms became 300. A row's bits do not depend on the number of
threads, so it may change between steps.
"""

from __future__ import annotations

from collections.abc import Hashable

ALONE_FIRST = 3  # steps on one thread before more are tried: there must be something to beat
SLOWER = 1.25  # than the best known step of its kind: more threads get in each other's way
STRIKES = 2  # slow steps in a row that send the engine back to one thread
PROVEN = 64  # steps on more threads after which they have earned a short pause again
PAUSE, LONGEST_PAUSE = 64, 2048  # steps until more are tried again, doubled each time that it fails


class ThreadRule:
    """`now` is the number of threads for the next step, 1 or `most`. Lives as long as the engine."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.now = 1
        self.best: dict[Hashable, float] = {}
        self.waited, self.pause = 0, ALONE_FIRST
        self.strikes = self.held = 0

    def note(self, kind: Hashable, seconds: float) -> None:
        """Learn from one step, run on `now` threads; steps of one kind take about the same time."""
        best = self.best.setdefault(kind, seconds)
        if self.now == 1:
            self.waited += 1
            if self.waited >= self.pause and self.most > 1:
                self.now, self.strikes, self.held = self.most, 0, 0
        else:
            self.held += 1
            self.strikes = self.strikes + 1 if seconds > SLOWER * best else 0
            if self.held == PROVEN:
                self.pause = PAUSE
            if self.strikes == STRIKES:
                self.now, self.waited = 1, 0
                self.pause = max(PAUSE, min(2 * self.pause, LONGEST_PAUSE))
        self.best[kind] = min(best, seconds)
