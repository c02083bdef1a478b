"""Streamed Markdown cut into blocks: the same for any split, finished as early as can be, linear."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_local.tui.blocks import PART_LINES, Blocks, close, push
from markdown_texts import SOURCES, one_by_one, split, texts


@pytest.mark.parametrize("source", SOURCES)
def test_blocks_are_the_same_character_by_character(source: str) -> None:
    assert one_by_one(source) == split(source)


@settings(max_examples=300, deadline=None)
@given(texts, st.data())
def test_blocks_are_the_same_for_any_split(source: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(source)), max_size=8)))
    assert split(source, *cuts) == split(source)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_sources_of_all_blocks_joined_are_the_text(source: str) -> None:
    joined = "".join(block.text for block in one_by_one(source))
    assert source.startswith(joined)
    assert not source[len(joined) :].strip()


def test_an_older_state_can_be_pushed_again() -> None:
    start, _ = push(Blocks(), "one\n")
    first, _ = push(start, "two")
    second, _ = push(start, "three")
    assert first.tail == "one\ntwo"
    assert second.tail == "one\nthree"
    assert start.tail == "one\n"


@pytest.mark.parametrize(
    ("source", "done", "tail"),
    [
        ("# Head\n", ["# Head\n"], ""),
        ("para\n", [], "para\n"),
        ("para\n\n", ["para\n\n"], ""),
        ("para\n# Head", [], "para\n# Head"),
        ("```\na\n\nb\n", [], "```\na\n\nb\n"),
        ("```\na\n```\n", ["```\na\n```\n"], ""),
        ("- a\n- b", [], "- a\n- b"),
        ("- a\n- b\n", ["- a\n"], "- b\n"),
        ("- a\n\n", [], "- a\n\n"),
        ("| a |\n|---|\n| 1 |\n", [], "| a |\n|---|\n| 1 |\n"),
        ("| a |\n|---|\n| 1 |\n\n", ["| a |\n|---|\n| 1 |\n\n"], ""),
        ("a\n---\n", ["a\n---\n"], ""),
    ],
)
def test_a_block_is_finished_as_soon_as_nothing_can_go_on_with_it(source: str, done: list[str], tail: str) -> None:
    blocks, finished = push(Blocks(), source)
    assert [block.text for block in finished] == done
    assert blocks.tail == tail


def test_a_blank_line_inside_a_fence_does_not_close_it() -> None:
    blocks, done = push(Blocks(), "```python\na = 1\n\n\n- b\n\n# c\n")
    assert done == ()
    assert blocks.fence


def test_a_fence_is_closed_by_its_own_kind_only() -> None:
    blocks, done = push(Blocks(), "````\n```\n~~~~\n   ```` x\n")
    assert (done, bool(blocks.fence)) == ((), True)
    blocks, done = push(blocks, "  `````  \n")
    assert len(done) == 1
    assert not blocks.fence


def test_a_word_with_backticks_is_no_fence() -> None:
    blocks, done = push(Blocks(), "```a`b\ntext\n\n")
    assert [block.text for block in done] == ["```a`b\ntext\n\n"]
    assert not blocks.fence


def test_items_keep_their_numbers_and_gaps() -> None:
    done = one_by_one("7. a\n7. b\n\n7. c\ntext\n\n- d\n- e\n* f\n")
    assert [(block.number, block.gap) for block in done] == [
        (7, False), (8, False), (9, True), (None, True), (None, False), (None, True),
    ]  # fmt: skip


def test_a_long_fence_comes_in_parts_that_begin_at_the_margin() -> None:
    function = "def f():\n    a = 1\n\n    return a\n\n"
    blocks, done = push(Blocks(), "```python\n" + function * 30)
    assert len(done) >= 2
    assert all(len(block.text.splitlines()) <= PART_LINES + 1 for block in done)
    assert all(block.text.startswith("def f()") for block in done[1:])
    assert [block.gap for block in done] == [False] * len(done)
    assert len(blocks.lines) <= PART_LINES
    last = push(blocks, "x\n```\n")[1][-1]
    assert last.fence is not None
    assert last.fence.language == "python"
    assert last.before.endswith("return a\n\n")


def test_a_long_fence_without_blank_lines_is_cut_all_the_same() -> None:
    blocks, done = push(Blocks(), "```\n" + "x\n" * 1000)
    assert len(blocks.lines) <= PART_LINES
    assert sum(block.text.count("x") for block in done) + blocks.tail.count("x") == 1000


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        ("", "word "),
        ("", "word word\n"),
        ("", "\n"),
        ("", "x\n\n"),
        ("", "1. a\n   ```\n   b\n\n"),
        ("> q\n", "> q\n"),
        ("```py\n", "x = 1\n\n"),
        ("| a | b |\n|---|---|\n", "| a | b |\n"),
        ("- a\n  ```\n", "  x\n\n"),
        ("- a\n", "  - n\n"),
    ],
)
def test_cost_per_character_is_flat(start: str, unit: str) -> None:
    def seconds(num_units: int) -> float:
        blocks, _ = push(Blocks(), start)
        began = time.process_time()
        for _ in range(num_units):
            blocks, _ = push(blocks, unit)
        close(blocks)
        return time.process_time() - began

    few, many = (min(seconds(num_units) for _ in range(3)) for num_units in (200, 1600))
    assert many < 8 * 4 * few + 0.1  # eight times the text; quadratic would be 64 times


def test_newest_looks_at_the_end_only() -> None:
    blocks, _ = push(Blocks(), "one\ntwo\nthr")
    blocks, _ = push(blocks, "ee")
    assert blocks.newest(7) == "o\nthree"
    assert blocks.newest(100) == "one\ntwo\nthree"
