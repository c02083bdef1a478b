"""What the loop stands on: a pump in a thread, a pane that redraws, and a state that survives every Ctrl-C."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest
from rich.console import Console
from rich.text import Text

from engines import another
from ling_local import paths
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.remote import RemoteEngine
from ling_local.errors import NonFinite
from ling_local.generate import CancelToken, TextModel, generate
from ling_local.settings import resolve
from ling_local.tui.events import Failed
from ling_local.tui.pane import Pane
from ling_local.tui.pump import Load, Model, Pump
from ling_local.types import Channel, Finish, FinishReason, Message, Request, Stats, StatsEvent, TokenEvent

Write = Callable[..., Path]
QUESTION = Message("user", "Write a function that adds two numbers.")


# --- after a Ctrl-C the next turn is that of a talk which never held more than what was kept (C053)


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel.load(EngineSpec(str(paths.demo_dir())))


@pytest.fixture(scope="module", params=["off", "auto"])
def demo(request: pytest.FixtureRequest) -> NativeEngine:
    return NativeEngine.load(paths.demo_dir(), draft=request.param)


def answer(engine: NativeEngine, text_model: TextModel, talk: tuple[Message, ...], stop_at: int | None = None):
    """The turn as a message, and its figures; cut after stop_at tokens."""
    token = CancelToken()
    parts: dict[Channel, str] = {Channel.THINKING: "", Channel.ANSWER: "", Channel.TOOL: ""}
    seen, finish = 0, None
    for event in generate(engine, text_model, Request(talk, max_tokens=28, think_budget=8), token):
        if isinstance(event, TokenEvent):
            parts[event.channel] += event.text
            seen += len(event.ids)
            if stop_at is not None and seen >= stop_at:
                token.cancel()
        elif isinstance(event, Finish):
            finish = event
    assert finish is not None
    message = Message("assistant", parts[Channel.ANSWER], parts[Channel.THINKING] or None, ids=finish.ids)
    return message, finish


@pytest.mark.parametrize("stop_at", [3, 18])  # in the thoughts, in the answer
def test_the_turn_after_a_cut_is_that_of_a_fresh_engine(
    demo: NativeEngine, text_model: TextModel, stop_at: int
) -> None:
    engine = another(demo)
    cut, finish = answer(engine, text_model, (QUESTION,), stop_at)
    assert finish.reason is FinishReason.CANCELLED
    assert bool(cut.content) == (stop_at > 8)
    talk = (QUESTION, cut, Message("user", "And now multiply them."))
    after, second = answer(engine, text_model, talk)
    fresh, clean = answer(another(demo), text_model, talk)
    assert second.ids == clean.ids
    assert after == fresh
    assert second.stats.cached_tokens > 0
    assert clean.stats.cached_tokens == 0


def test_undo_and_regen_go_back_to_a_snapshot(demo: NativeEngine, text_model: TextModel) -> None:
    engine = another(demo)
    first, _ = answer(engine, text_model, (QUESTION,))
    talk = (QUESTION, first, Message("user", "Why?"))
    one, _ = answer(engine, text_model, talk)
    again, finish = answer(engine, text_model, talk)  # /regen
    assert again == one
    assert finish.stats.prompt_tokens - finish.stats.cached_tokens <= 1
    back, finish = answer(engine, text_model, (QUESTION,))  # /undo, twice, and the first question anew
    assert back == first
    assert finish.stats.prompt_tokens - finish.stats.cached_tokens <= 1


# --- the pump


def loaded(path: Path, on_end: Callable[[], None] = lambda: None) -> Load:
    spec = EngineSpec(str(path), "scripted")
    engine = RemoteEngine(spec)
    settings = resolve({}, environ={}, file=None)
    return Load(Model(engine, spec, settings, "x", lambda: TextModel.load(spec), lambda: engine.info), on_end)


def drain(pump: Pump, limit_s: float = 60) -> list:
    events, over, end = [], False, time.monotonic() + limit_s
    while not over:
        assert time.monotonic() < end
        more, over = pump.take()
        events += more
        time.sleep(0.005)
    return events


def test_events_come_in_order_and_the_end_wakes(write_script: Write) -> None:
    load = loaded(write_script(["a", "b", "c"]))
    woken = threading.Event()
    events = drain(Pump(load, Request((QUESTION,), thinking=False), woken.set))
    assert isinstance(events[-1], Finish)
    assert "".join(e.text for e in events if isinstance(e, TokenEvent)) == "abc"
    assert woken.is_set()
    load.model.engine.close()


def test_a_request_waits_for_the_load_and_a_cancel_before_it_holds(write_script: Write) -> None:
    turn = [{"tokens": ["a"], "repeat": 2000, "delay_ms": 10}]
    load = loaded(write_script(turn, load={"delay_ms": 500}))
    pump = Pump(load, Request((QUESTION,), thinking=False), lambda: None)
    pump.cancel()
    events = drain(pump)
    assert isinstance(events[-1], Finish)
    assert events[-1].reason is FinishReason.CANCELLED
    load.model.engine.close()


def test_errors_come_as_events_and_a_failed_load_too(write_script: Write) -> None:
    load = loaded(write_script(["a", {"fail": "nan"}]))
    pump = Pump(load, Request((QUESTION,), thinking=False), lambda: None)
    events = drain(pump)
    assert isinstance(events[-1], Failed)
    assert isinstance(pump.error, NonFinite)
    load.model.engine.close()
    ended = threading.Event()
    failing = loaded(write_script(["a"], load={"fail": "OutOfMemory"}, name="bad"), ended.set)
    pump = Pump(failing, Request((QUESTION,)), lambda: None)
    assert isinstance(drain(pump)[-1], Failed)
    assert ended.wait(60)
    assert pump.error is failing.error
    failing.model.engine.close()


def test_an_engine_never_waits_for_who_draws(write_script: Write) -> None:
    """Nobody takes an event before the last was made: all the same their times are the engine's own."""
    turn = [{"tokens": ["w "], "repeat": 2000, "delay_ms": 0.5}]
    load = loaded(write_script(turn, context=20_000, clock="virtual"))
    made = threading.Event()
    pump = Pump(load, Request((QUESTION,), thinking=False, max_tokens=2000), made.set)
    assert made.wait(60)
    events, over = pump.take()
    assert over
    last = [event.stats for event in events if isinstance(event, StatsEvent)][-1]
    assert isinstance(last, Stats)
    assert last.tokens == 2000
    assert last.tpot_s == pytest.approx(0.0005)
    load.model.engine.close()


# --- the pane


class Terminal:
    """An emulated terminal with a pane on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int = 40, rows: int = 8) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
        self.screen.set_mode(pyte.modes.LNM)
        self.stream = pyte.Stream(self.screen)
        self.file = io.StringIO()
        self.size = (columns, rows)
        self.console = Console(file=self.file, force_terminal=True, _environ={}, highlight=False)
        self.pane = Pane(self.console)
        monkeypatch.setattr(Pane, "resize", self._resize)

    def _resize(self, *_: object) -> tuple[int, int]:
        from rich.console import ConsoleDimensions

        self.console.size = ConsoleDimensions(*self.size)
        return self.size

    def draw(self, above: list, tail: str | None) -> None:
        self.pane.draw([Text(line) for line in above], [Text(line) for line in tail.split("\n")] if tail else [])
        self.stream.feed(self.file.getvalue())
        self.file.seek(0)
        self.file.truncate()

    @property
    def lines(self) -> list[str]:
        width = range(self.screen.columns)
        past = ["".join(line[x].data for x in width).rstrip() for line in self.screen.history.top]
        shown = "\n".join(line.rstrip() for line in self.screen.display).rstrip("\n").split("\n")
        return [*past, *shown]


def test_what_is_printed_above_stays_once_and_the_tail_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    for number in range(30):
        terminal.draw([f"line {number}"] if number % 3 else [], f"tail {number}\nfigures {number}")
        assert terminal.lines[-2:] == [f"tail {number}", f"figures {number}"]
    terminal.draw(["the end"], None)
    assert terminal.lines == [*(f"line {n}" for n in range(30) if n % 3), "the end"]


def test_a_tail_that_shrinks_and_grows_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    for height in (1, 6, 2, 7, 1, 3):
        terminal.draw([], "\n".join(f"row {n} of {height}" for n in range(height)))
        assert terminal.lines == [f"row {n} of {height}" for n in range(height)]
    terminal.draw([], None)
    assert terminal.lines == [""]


def test_a_tail_taller_than_the_screen_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    for _ in range(5):
        terminal.draw([], "\n".join(f"row {n}" for n in range(50)))
    terminal.draw(["done"], None)
    assert terminal.lines == ["done"]


def test_lines_longer_than_the_screen_above_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    terminal.draw([], "x" * 39 + "\n" + "y" * 39 + "\n" + "z" * 39)
    terminal.draw(["a" * 60], "tail")
    assert terminal.lines == ["a" * 40, "a" * 20, "tail"]


def test_a_tail_that_fills_its_line_to_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    for char in "abc":
        terminal.draw([], char * 40 + "\n" + char * 40)
        assert terminal.lines == [char * 40, char * 40]
    terminal.draw(["end"], None)
    assert terminal.lines == ["end"]
