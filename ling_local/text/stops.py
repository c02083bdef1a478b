"""Where a stream of text ends: stop strings. The same text and cut however the stream is split, in linear time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Stops:
    """Ends a stream before the stop string that completes first.

    Of several that complete at the same character the longest wins, which is the one that starts first. Only
    text that could still become a stop is held back. Empty stops are ignored.

    hit  the stop that ended the stream, None so far
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.hit: str | None = None
        self._node = 0
        self._build(list(dict.fromkeys(stop for stop in stops if stop)))

    def _build(self, stops: list[str]) -> None:
        """An Aho-Corasick automaton. A node is a prefix of some stop; node 0 is the empty one."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._text = [""]  # a stop that begins with the node's prefix: what is held back is its start
        self._ends: list[str | None] = [None]  # the longest stop that is a suffix of the node's prefix
        for stop in stops:
            node = 0
            for depth, char in enumerate(stop, 1):
                if char not in self._next[node]:
                    self._next[node][char] = len(self._next)
                    self._next.append({})
                    self._depth.append(depth)
                    self._text.append(stop)
                    self._ends.append(None)
                node = self._next[node][char]
            self._ends[node] = stop
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:  # breadth first: the links of shorter prefixes exist already
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                queue.append(child)
            self._ends[node] = self._ends[node] or self._ends[self._fail[node]]

    def _step(self, node: int, char: str) -> int:
        """The longest prefix of a stop that ends the text, one character on."""
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def push(self, text: str) -> str:
        """Text that is certain to come before any stop. Nothing more once there was a hit."""
        if self.hit is not None:
            return ""
        before, node, used = self._node, self._node, len(text)
        for index, char in enumerate(text, 1):
            node = self._step(node, char)
            if self._ends[node] is not None:
                self.hit, used = self._ends[node], index
                break
        self._node = node
        held = self._depth[node] if self.hit is None else len(self.hit)
        return self._release(before, text, self._depth[before] + used - held)

    def _release(self, before: int, text: str, count: int) -> str:
        """The first `count` characters of what was held back at node `before`, followed by text."""
        old = min(count, self._depth[before])
        return self._text[before][:old] + text[: count - old]

    def close(self) -> str:
        """At the end of the stream: what was still held back, nothing after a hit."""
        if self.hit is not None:
            return ""
        before, self._node = self._node, 0
        return self._release(before, "", self._depth[before])
