"""A list that only grows, as a value: the state of a long answer is kept by thousands of versions at no cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Grown(Generic[T]):
    """An immutable sequence; `add` gives a longer one in time that depends on the new items only.

    Versions share one list, of which each knows how much is its own. Adding to the newest version appends to
    it; adding to an older one copies, so that no version ever sees what another one got.
    """

    __slots__ = ("_items", "_size")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._size = len(self._items)

    def add(self, *items: T) -> Grown[T]:
        """The same sequence with more items at its end."""
        if not items:
            return self
        longer: Grown[T] = Grown.__new__(Grown)
        longer._items = self._items if len(self._items) == self._size else self._items[: self._size]
        longer._items.extend(items)
        longer._size = self._size + len(items)
        return longer

    def after(self, start: int) -> Iterator[T]:
        """The items from index start on."""
        return (self._items[index] for index in range(start, self._size))

    def __getitem__(self, index: int) -> T:
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return self._items[index if index >= 0 else self._size + index]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        return self.after(0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grown) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Grown({list(self)!r})"


def newest_text(pieces: Grown[str], num_chars: int) -> str:
    """The last num_chars characters (or all there are) of a text in pieces, without joining the rest."""
    taken: list[str] = []
    left = num_chars
    for piece in reversed(pieces):
        if left <= 0:
            break
        taken.append(piece[-left:])
        left -= len(piece)
    return "".join(reversed(taken))
