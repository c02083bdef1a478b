"""Stop strings: the one that completes first, over any split, in linear time."""

from __future__ import annotations

import random
from time import perf_counter

import pytest

from ling_local.text.stops import Stops


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    ends = Stops(stops)
    text = "".join(map(ends.push, pieces)) + ends.close()
    return text, ends.hit


def test_text_before_the_stop_comes_out_and_nothing_after() -> None:
    stops = Stops(["END"])
    assert stops.push("abcE") == "abc"
    assert stops.push("N") == ""
    assert stops.push("Dxyz") == ""
    assert stops.hit == "END"
    assert stops.push("more") == ""
    assert stops.close() == ""


def test_only_what_may_become_a_stop_is_held_back() -> None:
    stops = Stops(["\n\n", "</s>"])
    assert stops.push("a<") == "a"
    assert stops.push("/") == ""
    assert stops.push("b") == "</b"
    assert stops.push("\n") == ""
    assert stops.close() == "\n"
    assert stops.hit is None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "hit"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # bc is complete before abcd
        (["bc", "abc"], "xabc", "x", "abc"),  # both end here: the longer one starts first
        (["c", "bc", "abc"], "xxbc", "xx", "bc"),
        (["aab"], "aaaab", "aa", "aab"),
        (["abab"], "abaababab", "aba", "abab"),
        (["", "x"], "axb", "a", "x"),
        (["🙂"], "ok🙂", "ok", "🙂"),
        (["a"], "a", "", "a"),
        (["stop"], "no st op", "no st op", None),
        ([], "all of it", "all of it", None),
        (["", ""], "all of it", "all of it", None),
        (["x", "x"], "ax", "a", "x"),
    ],
)
def test_the_stop_that_completes_first_wins(stops: list[str], text: str, shown: str, hit: str | None) -> None:
    for size in (1, 2, 3, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert _run(stops, pieces) == (shown, hit)


def _held_back_seconds(length: int) -> float:
    stops = Stops(["a" * length + "b"])
    began = perf_counter()
    for _ in range(length):
        assert stops.push("a") == ""
    assert stops.push("c") == "a" * length + "c"
    return perf_counter() - began


def test_a_long_held_back_text_takes_linear_time() -> None:
    _held_back_seconds(1000)
    short = min(_held_back_seconds(10_000) for _ in range(3))
    assert min(_held_back_seconds(80_000) for _ in range(3)) < 8 * 4 * short + 0.05


def test_many_stops_do_not_slow_the_stream_down() -> None:
    rng = random.Random(1)
    many = ["".join(rng.choices("abcdefgh", k=12)) for _ in range(3000)]
    text = "".join(rng.choices("abcdefgh", k=100_000))

    def seconds(stops: list[str]) -> float:
        ends = Stops(stops)
        began = perf_counter()
        for i in range(0, len(text), 4):
            ends.push(text[i : i + 4])
        return perf_counter() - began

    few = min(seconds(["abcdefghabcdX"]) for _ in range(3))
    assert min(seconds([*many, "x"]) for _ in range(2)) < 10 * few + 0.1
