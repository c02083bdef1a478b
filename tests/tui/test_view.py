"""What is drawn for a state, on a recording console at several widths."""

from __future__ import annotations

import time
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from ling_local.engine.protocol import EngineInfo, Progress
from ling_local.errors import EngineError
from ling_local.tui import view
from ling_local.tui.events import Cut, Failed, Line, Sent, ThinkShown
from ling_local.tui.figures import Part, count, duration, fit, line_width, millis, now, rate
from ling_local.tui.model import ChatState, StepMark, apply
from ling_local.types import Channel, Finish, FinishReason, Stats, StatsEvent, TokenEvent

WIDTHS = (20, 40, 80, 200)
THINKING, ANSWER = Channel.THINKING, Channel.ANSWER
INFO = EngineInfo("ling-demo", "float32", "cpu", 131072, 4096, drafter="mtp", block=3)


def play(*events: object, state: ChatState | None = None) -> ChatState:
    state = state or ChatState()
    for event in events:
        state = apply(state, event)
    return state


def steps(pieces: list[str], channel: Channel = ANSWER, drafted: int = 3, first: int = 1) -> list:
    """One step of 8 ms a piece: two tokens, of which one was a draft that was accepted."""
    events: list = []
    for number, piece in enumerate(pieces, first):
        stats = Stats(
            prompt_tokens=300,
            cached_tokens=100,
            tokens=2 * number,
            thinking_tokens=2 * number if channel is THINKING else 0,
            steps=number,
            drafted=drafted * number,
            accepted=number,
            ttft_s=0.084,
            tpot_s=0.004 if number > 1 else None,
            wall_s=0.084 + 0.008 * (number - 1),
            context_limit=131072,
        )
        events += [TokenEvent(piece, (1, 2), channel), StatsEvent(stats)]
    return events


def shown(renderables: list, width: int = 80, colour: bool = False) -> str:
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=colour, color_system="standard" if colour else None)
    for renderable in renderables:
        console.print(renderable, crop=False)
    return file.getvalue()


def lines(state: ChatState, width: int = 80, height: int = 24, **more: object) -> list[str]:
    return [line.plain for line in view.live_lines(state, width, height, **more)]


LONG = ["Some **words** of prose, `code` and 中文 ", "and more.\n\n- item\n- ", "another ", "item\n\n```python\n"]
LONG += [f"x{number} = {number}  # {'long ' * 20}\n" for number in range(30)]
STATES = {
    "waiting": play(Sent("q")),
    "first": play(Sent("q"), *steps(["Hi"])),
    "thinking": play(Sent("q"), *steps(["so the list 中文 " * 9] * 9, THINKING)),
    "thinking shown": play(ThinkShown(True), Sent("q"), *steps(["so the list " * 30] * 9, THINKING)),
    "answer": play(Sent("q"), *steps(LONG[:3])),
    "code": play(Sent("q"), *steps(LONG)),
    "table": play(Sent("q"), *steps(["| a | b |\n|---|---|\n", *["| one | two |\n"] * 60])),
    "one line": play(Sent("q"), *steps(["word 字" * 50] * 200)),
    "stopping": play(Sent("q"), *steps(LONG[:3]), Cut()),
}


@pytest.mark.parametrize("width", [1, 2, 5, *WIDTHS])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 12, 24])
@pytest.mark.parametrize("name", STATES)
def test_live_lines_are_fewer_than_the_screen_has_and_fit(name: str, width: int, height: int) -> None:
    drawn = view.live_lines(STATES[name], width, height)
    assert len(drawn) <= max(height - 1, 1)
    if width >= 20:  # fewer columns than that cut words and quotes, and the drawer cuts the lines
        assert all(line.cell_len <= width for line in drawn)
    assert not any("\n" in line.plain for line in drawn)


def test_nothing_is_live_between_turns() -> None:
    assert view.live_lines(play(), 80, 24) == []


def test_live_figures_at_80_columns() -> None:
    speed, counts = lines(STATES["answer"])[-2:]
    assert speed == "TPOT 4.00 ms · mean 4.00 ·  250 tok/s · step 8.00 ms · accept 2.00 ▄▄▄"
    assert counts == "   6 tok · TTFT 84 ms · ctx 306/128k · prompt 200 new + 100 cached"


def test_live_figures_at_40_columns_keep_the_strip() -> None:
    assert lines(STATES["answer"], 40)[-2:] == [
        "TPOT 4.00 ms · 250 tok/s · acc 2.00 ▄▄▄",
        "   6 tok · TTFT 84 ms · ctx 306/128k",
    ]


def test_live_figures_at_200_columns_show_all() -> None:
    speed, counts = lines(STATES["code"], 200)[-2:]
    assert speed.endswith("accept 2.00 " + "▄" * 32)
    assert "prompt 200 new + 100 cached" in counts


def test_without_drafts_there_is_neither_strip_nor_accept_length() -> None:
    speed = lines(play(Sent("q"), *steps(["a", "b", "c"], drafted=0)))[-2]
    assert speed == "TPOT 4.00 ms · mean 4.00 ·  250 tok/s"


def test_figures_keep_their_places_while_they_change() -> None:
    one, two = lines(STATES["answer"])[-2], lines(STATES["code"])[-2]
    assert [one.index(word) for word in ("mean", "tok/s", "step", "accept")] == [
        two.index(word) for word in ("mean", "tok/s", "step", "accept")
    ]


def test_current_figures_look_back_one_second() -> None:
    slow, fast = StepMark(3, 0, 1, 0.1), StepMark(3, 3, 4, 0.02)
    assert now([slow] * 20 + [fast] * 60).tpot_s == pytest.approx(0.005)
    assert now([slow] * 20 + [fast] * 60).accept_length == pytest.approx(4)
    assert now([fast] * 60 + [slow] * 30).tpot_s == pytest.approx(0.1)
    assert now([StepMark(0, 0, 1, 0.0)]).tpot_s is None
    assert now([]).tpot_s is None


def test_the_strip_shows_accepted_against_drafted() -> None:
    marks = [StepMark(3, 3), StepMark(3, 0), StepMark(4, 2), StepMark(0, 0), StepMark(15, 1), StepMark(15, 14)]
    assert view.strip(marks, 9).plain == "█▁▅·▂▇"
    assert view.strip(marks, 2).plain == "▂▇"
    styles = [str(span.style) for span in view.strip(marks, 9).spans]
    assert styles == ["green", "red", "yellow", "dim", "yellow", "yellow"]
    assert view.strip(marks, 9, colour=False).spans == []
    assert view.strip(marks, 0).plain == ""


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("waiting", "reading the prompt · 1.2 s"),
        ("stopping", "Some words of prose, code and 中文 and more."),
        ("thinking", "▸ thinking 64 ms, 18 tokens  (/think show)"),
    ],
)
def test_what_is_waited_for_is_said(name: str, first: str) -> None:
    drawn = lines(STATES[name], waited_s=1.23)
    if name == "stopping":
        assert drawn[-2].startswith("stopping · TPOT")
    else:
        assert drawn[0] == first
        if name == "waiting":
            assert lines(STATES[name], waited_s=1.23, load="loading 50 %") == ["loading 50 % · 1.2 s"]


def test_a_folded_thought_shows_its_newest_words_only() -> None:
    drawn = lines(play(Sent("q"), *steps(["one two three " * 40, "four\nfive ", "six"], THINKING)))
    assert drawn[1] == "  five six"
    assert len(drawn) == 4


def test_the_open_code_is_plain_and_its_fence_not_shown() -> None:
    state = play(Sent("q"), *steps(["```python\n", "def f():\n", "    pass"]))
    drawn = view.live_lines(state, 80, 24)
    assert [line.plain for line in drawn[:-2]] == ["def f():", "    pass"]
    assert not drawn[0].spans


def test_only_the_newest_lines_of_a_tall_block_are_live() -> None:
    drawn = lines(STATES["table"], 80, 12)
    assert drawn[:9] == ["| one | two |"] * 9
    assert len(drawn) == 11


def test_drawing_a_long_open_block_costs_no_more_than_a_short_one() -> None:
    def seconds(state: ChatState) -> float:
        began = time.process_time()
        for _ in range(10):
            view.live_lines(state, 80, 24)
        return time.process_time() - began

    short = play(Sent("q"), *steps(["word 字" * 50] * 20))
    assert seconds(play(Sent("q"), *steps(["word 字" * 50] * 2000))) < 5 * seconds(short) + 0.05


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_printed_for_good_and_the_tail_make_up_the_answer(width: int) -> None:
    state = play(Sent("q"))
    printed = ""
    for event in [
        *steps(["# Head\n", "a b\n\n", "- one\n", "- two\n", "\n# 1", "23"]),
        Finish(FinishReason.EOS, Stats()),
    ]:
        before, state = state, apply(state, event)
        printed += shown(view.finished(before, state), width)
    assert printed.split("\n")[:8] == ["Head", "", "a b", "", " • one", " • two", "", "123"]
    assert view.finished(state, state) == []


SUMMARY = Stats(
    prompt_tokens=1700, cached_tokens=1500, tokens=212, thinking_tokens=40, steps=62, drafted=190, accepted=150,
    ttft_s=0.084, tpot_s=0.0021, context_limit=131072,
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (200, "── 212 tok · TTFT 84 ms · TPOT 2.10 ms · 476 tok/s · accept 3.42 · ctx 1.9k/128k · "
              "prompt 200 new + 1.5k cached · 40 thinking ──"),
        (80, "── 212 tok · TTFT 84 ms · TPOT 2.10 ms · 476 tok/s · accept 3.42 · ctx 1.9k/128k"),
        (40, "212 tok · TPOT 2.10 ms · accept 3.42"),
        (10, "212 tok"),
    ],
)  # fmt: skip
def test_the_quiet_line(width: int, line: str) -> None:
    state = play(Sent("q"), TokenEvent("a"))
    after = apply(state, Finish(FinishReason.EOS, SUMMARY, (1,)))
    assert shown(view.finished(state, after)[-1:], width) == line + "\n"


def test_the_quiet_line_says_why_an_answer_is_short() -> None:
    def last(reason: FinishReason, *events: object, **changes: object) -> str:
        state = play(Sent("q"), *events)
        return shown(view.finished(state, apply(state, Finish(reason, replace(SUMMARY, **changes), (1,))))[-1:], 200)

    assert last(FinishReason.CANCELLED, TokenEvent("a")).startswith("── stopped · 212 tok")
    assert last(FinishReason.LENGTH, TokenEvent("a")).startswith("── cut at limit · 212 tok")
    thinking = TokenEvent("hm", (1,), THINKING)
    assert last(FinishReason.LENGTH, thinking).startswith("── no answer: it was still thinking · cut at limit")
    assert last(FinishReason.EOS, TokenEvent("a"), tokens=1, tpot_s=None, ttft_s=None).startswith("── 1 tok · accept")


@pytest.mark.parametrize("width", WIDTHS)
def test_texts_are_literal_everywhere(width: int) -> None:
    nasty = "[/INST] [red]x[/red] :smile: \x1b[2J\x07 <b> \u202e"
    state = play(
        Sent(nasty, echo=True),
        *steps([nasty], THINKING),
        *steps([nasty], first=2),
        Failed(EngineError(nasty, nasty)),
        Line(nasty),
        ThinkShown(True),
        Sent("q"),
        *steps([nasty], THINKING),
    )
    printed = shown([*view.header("0.1", nasty, nasty), *map(view.show, state.log)], width) + "\n".join(
        lines(state, width)
    )
    assert "\x1b" not in printed
    assert "\x07" not in printed
    joined = "".join(printed.split())
    assert joined.count("[/INST][red]x[/red]:smile:␛[2J␇<b><U+202E>") >= 7


def test_header() -> None:
    top = shown(view.header("0.1", "m", "a demo"))
    assert top.startswith("ling 0.1 · m\na demo\n")
    assert "Ctrl-D leaves" in top


def test_status_between_turns() -> None:
    assert view.status(INFO, play()) == "ling-demo · float32 · cpu · context 128k"
    whole = play(Sent("q"), *steps(["a"]), Finish(FinishReason.EOS, SUMMARY, (1,)))
    assert view.status(INFO, whole) == "ling-demo · float32 · cpu · ctx 1.9k/128k"
    assert view.status(INFO, play(Sent("q"), Failed(EngineError("x")), state=whole)).endswith("ctx 1.9k/128k")


def test_how_far_a_load_is() -> None:
    assert view.loading(None) == "loading"
    assert view.loading(Progress("loading weights", 3, 4)) == "loading weights 75 %"
    assert view.loading(Progress("loading weights", 10**9, 4 * 10**9)) == "loading weights 25 % of 4.0 GB"


def test_colours_only_where_they_are_wanted() -> None:
    state = play(Sent("q", echo=True), *steps(LONG), Failed(EngineError("x", "y")))
    assert "\x1b" not in shown([view.show(item) for item in state.log])
    assert "\x1b[" in shown([view.show(item) for item in state.log], colour=True)


def test_errors_and_notices() -> None:
    state = play(Failed(EngineError("out of memory", "try: --ctx 8192")), Line("saved"))
    assert shown([view.show(item) for item in state.log]) == "ling: out of memory\ntry: --ctx 8192\nsaved\n"


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (millis(0.00042), "0.42"), (millis(0.0213), "21.3"), (millis(0.00999), "9.99"), (millis(0.009999), "10.0"),
        (millis(1.5), "1500"), (rate(47.6), "47.6"), (rate(1234.4), "1234"), (rate(99.7), "100"),
        (duration(0.084), "84 ms"), (duration(3.21), "3.2 s"), (duration(125.4), "2 min 5 s"),
        (count(999), "999"), (count(1946), "1.9k"), (count(131072), "128k"), (count(0), "0"),
    ],
)  # fmt: skip
def test_figures_in_words(got: str, wanted: str) -> None:
    assert got == wanted


def test_parts_that_do_not_fit_go_by_weight() -> None:
    parts = [Part("aaaa", 1), Part("bbbb", 3), Part("cccc", 2)]
    assert [part.text for part in fit(parts, 18)] == ["aaaa", "bbbb", "cccc"]
    assert [part.text for part in fit(parts, 17)] == ["bbbb", "cccc"]
    assert [part.text for part in fit(parts, 1)] == ["bbbb"]
    assert line_width(parts) == 18
