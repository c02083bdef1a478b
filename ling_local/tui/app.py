"""The chat screen's loop: reads a line, sends it or obeys it, draws what comes back, until the person leaves.

It joins the other rooms and decides nothing: model.py says what is known, view.py what it looks like, commands.py
what a line means, acts.py what a command does. Events of a generation arrive in a queue; a frame takes all of them
and draws the newest state, so the engine never waits for the terminal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from prompt_toolkit.input import Input
from prompt_toolkit.output import Output
from rich.console import Console, NewLine
from rich.text import Text

from ling_local import sessions
from ling_local.engine.protocol import Progress, ProgressFn
from ling_local.errors import EngineDied, LingError
from ling_local.settings import Settings
from ling_local.text.clean import check_text, visible
from ling_local.tui import view
from ling_local.tui.commands import Talk, read_line
from ling_local.tui.events import Cut, Failed, Kept, Line, Restored, ScreenEvent, Sent
from ling_local.tui.figures import turn_count
from ling_local.tui.history import LineHistory
from ling_local.tui.input import Prompt
from ling_local.tui.keeper import Keeper
from ling_local.tui.model import ChatState, apply
from ling_local.tui.pane import Pane
from ling_local.tui.pump import Load, Model, Pump
from ling_local.tui.terminal import Terminal
from ling_local.tui.wrap import clip
from ling_local.types import Message, Request

FRAME_S = 1 / 15
_DEAF_S = 2.0  # an engine that has not ended an answer by then does not hear; a second Ctrl-C ends the engine
_LEAVE = "Ctrl-D or /exit leaves"


@dataclass(frozen=True, slots=True)
class Host:
    """What the command line brings along.

    name      the model as the person named it; note: what to know about it
    open      starts to load the model that settings name; ModelError, UsageError
    request   a complete request for the next turn of a talk
    check     raises ModelError or UsageError where `open` would, before anything is closed
    models    the models that can be named here
    """

    version: str
    name: str
    note: str
    settings: Settings
    colour: bool
    unicode: bool
    open: Callable[[Settings, ProgressFn], Model]
    request: Callable[[Settings, tuple[Message, ...]], Request]
    check: Callable[[Settings], None]
    models: Callable[[], Sequence[str]]


class App:
    """One chat, from its header to the line that says how to come back."""

    def __init__(self, host: Host, console: Console, source: Input, target: Output, history: LineHistory) -> None:
        self.host = host
        self.terminal = Terminal(source, target)
        self.pane = Pane(console)
        self.keeper = Keeper(host.settings["history"])
        self.history = history
        self.talk = Talk(host.settings, host.settings)
        self.state = ChatState(think_shown=host.settings["show_thinking"])
        self.attached: tuple[str, ...] = ()  # files that go with the next question
        self.load: Load
        self.progress: Progress | None = None  # of the load
        self._sentences: deque[Line] = deque()  # that it said, and that are not printed yet
        self._line: str = ""  # stands in the next prompt to begin with
        self._in_editor = False
        self._replaces = False  # the next question takes the place of the last one
        self._dead = False  # the engine
        words = {"load": sessions.names, "model": host.models}
        mark = "› " if host.unicode else "> "
        self.prompt = Prompt(
            source,
            target,
            history,
            toolbar=self._status,
            failed=lambda: self.load.error,
            words=words,
            colour=host.colour,
            mark=mark,
        )

    def run(self) -> None:
        """Talk until the person leaves. Raises what ends the program: a failed load, KeyboardInterrupt during one."""
        with self.terminal:
            try:
                self.open(self.host.settings)
                try:
                    self._talk()
                finally:
                    self.load.model.engine.close()
            finally:
                self.keeper.close()

    def _talk(self) -> None:
        self.talk = Talk(self.load.model.settings, self.load.model.settings)
        if not self.host.settings["quiet"]:
            self.pane.draw(view.header(self.host.version, self.host.name, self.host.note))
        if self.host.settings["resume"] is not None:
            self.resume(self.host.settings["resume"])
        while self._turn():
            pass
        if self.keeper.name:
            self.say(f"to go on with this talk: ling chat --resume {self.keeper.name}")

    # --- what acts use as well

    def put(self, event: ScreenEvent) -> None:
        """Take an event in, and print what it has finished."""
        before, self.state = self.state, apply(self.state, event)
        self.pane.draw(view.finished(before, self.state, self.talk.settings["stats"]))

    def say(self, text: str, style: str = "dim") -> None:
        """A line, or lines, of ours."""
        self.put(Line(text, style))

    def open(self, settings: Settings) -> None:
        """Start to load the model of settings. The one before must be closed. ModelError, UsageError."""
        self.progress = None
        self.load = Load(self.host.open(settings, self._take_progress), self._refresh)
        self._dead = False

    def reopen_if_dead(self) -> None:
        """After the engine's death the next question starts a new one; the talk is all here."""
        if self._dead:
            self.load.model.engine.close()
            self.say("the engine is started again")
            self.open(self.load.model.settings)

    def check_load(self) -> None:
        """Raise what the load failed with, if it has."""
        if self.load.error is not None:
            raise self.load.error

    def resume(self, name: str) -> None:
        """Go on with a saved talk. LingError."""
        model = self.load.model.spec.model
        try:
            saved = self.keeper.resume(sessions.find(name), model)
        except OSError as error:
            raise LingError(f"session '{name}' cannot be opened: {error.strerror}") from None
        pairs = sessions.turns(saved.messages)
        self.put(Restored(pairs))
        if self.talk.settings.sources["system"] in ("default", "session"):
            self.talk = replace(self.talk, settings=self.talk.settings.changed("session", system=saved.system))
        lost = f"; {saved.lost} broken lines left out" if saved.lost else ""
        self.say(f"\nsession {saved.name}: {turn_count(len(pairs))}{lost}")
        if saved.unasked and not self._line:
            self._line = saved.unasked
        self._replaces = False

    def undo(self) -> None:
        """Take the last turn back, here and on disk."""
        self.put(Kept(self.state.turns[:-1]))
        self.keeper.undo()

    def edit(self, text: str, replaces: bool) -> None:
        """The next prompt opens in the editor with this text; replaces: the last turn goes when it is sent."""
        self._line, self._in_editor, self._replaces = text, True, replaces

    def wait_for(self, is_over: Callable[[], bool], tail: Callable[[], str], on_interrupt: Callable[[], None]) -> None:
        """Show a line of text until something is over."""
        with self.terminal.watching():
            while not is_over():
                if self.terminal.interrupted:
                    self.terminal.interrupted = False
                    on_interrupt()
                self._suspend_if_asked()
                columns, _ = self.pane.resize()
                self.pane.draw([], [Text(clip(tail(), columns), "dim")])
                self.terminal.wait(FRAME_S)
            self.pane.erase()

    def ask(self, text: str, replaces: bool = False, again: bool = False) -> None:
        """Send a question and draw its answer. Ctrl-C keeps what came; an error leaves the talk as it was.

        replaces: it takes the last turn's place; again: as that turn's question, so that nothing new goes with it.
        """
        self.reopen_if_dead()
        taken = self.state.turns[-1:] if replaces or again else ()
        if taken:
            self.undo()
        attached = () if again else self.attached
        content = "\n\n".join([text, *attached])
        request = self.host.request(self.talk.settings, (*self.state.messages, Message("user", content)))
        self.keeper.asked(content, self.talk.settings["system"], self.load.model.spec.model, self.state.messages)
        num_turns = len(self.state.turns)
        self.put(Sent(content, echo=again))
        pump = Pump(self.load, request, self.terminal.wake)
        try:
            with self.terminal.watching():
                self._draw(pump)
        except BaseException:
            pump.cancel()
            with suppress(OSError):  # the terminal may be what went away
                self.pane.erase()
            raise
        kept = len(self.state.turns) > num_turns
        if kept:
            last = self.state.turns[-1]
            self.attached = self.attached[len(attached) :]
            self.keeper.ended(last.reason.value if last.reason else "")
        else:
            self.keeper.failed()
            if taken:  # the answer that was to be replaced is better than none
                self.put(Kept((*self.state.turns, *taken)))
                self.keeper.restore(self.state.messages[-2:])
        self._tell()

    # --- the loop

    def _turn(self) -> bool:
        """One line. False: the person leaves."""
        self.check_load()
        self._tell()
        self.pane.draw([NewLine()])
        line, in_editor, self._line, self._in_editor = self._line, self._in_editor, "", False
        try:
            text = check_text(self.prompt.read(line, in_editor))
        except KeyboardInterrupt:
            self._replaces = False
            self.say(_LEAVE)
            return True
        except EOFError:
            return False
        if self.prompt.was_erased:
            self.pane.draw([view.typed(text)])
        self.check_load()
        self._tell()
        replaces, self._replaces = self._replaces and not self.prompt.was_cleared, False
        try:
            said = read_line(text)
            if isinstance(said, str):
                self.ask(said, replaces=replaces)
            elif said is not None:
                from ling_local.tui.acts import obey

                return obey(self, *said)
        except EOFError:  # nobody types any more
            return False
        except LingError as error:
            if error is self.load.error:
                raise
            self._dead = self._dead or isinstance(error, EngineDied)
            self.put(Failed(error))
        return True

    def _draw(self, pump: Pump) -> None:
        """Draw until the answer is over."""
        before, began, stopped_s = self.state, time.monotonic(), None
        due = began
        while True:
            events, over = pump.take()
            self.check_load()  # a load that failed ends the program, and is said there
            for event in events:
                self.state = apply(self.state, event)
                self.keeper.take(event)
            if self.terminal.interrupted and not over:
                self.terminal.interrupted = False
                stopped_s = self._stop(pump, stopped_s)
            self._suspend_if_asked()
            now = time.monotonic()
            if over or now >= due:
                done = view.finished(before, self.state, self.talk.settings["stats"])
                self.pane.draw(done, [] if over else self._tail(now - began))
                before, due = self.state, time.monotonic() + FRAME_S
            if over:
                break
            self.terminal.wait(due - time.monotonic())
        if pump.crash is not None:
            raise pump.crash
        self._dead = self._dead or isinstance(pump.error, EngineDied)

    def _tail(self, waited_s: float) -> list[Text]:
        columns, rows = self.pane.resize()
        typed = visible(self.terminal.typed)
        load = "" if self.load.is_over else view.loading(self.progress)
        lines = view.live_lines(self.state, columns, rows - 1 if typed else rows, self.host.colour, waited_s, load)
        if typed:
            lines.append(Text("› " + clip(" ".join(typed.split("\n")), columns - 2), "dim"))
        return lines

    def _stop(self, pump: Pump, stopped_s: float | None) -> float:
        """Ctrl-C while an answer is due or comes; when it was first pressed."""
        now = time.monotonic()
        if not self.load.is_over:
            self.pane.erase()
            raise KeyboardInterrupt
        if stopped_s is not None and now - stopped_s > _DEAF_S:
            self.load.model.engine.close()  # what waits for it gets an EngineError
            self._dead = True
        pump.cancel()
        self.state = apply(self.state, Cut())
        return now if stopped_s is None else stopped_s

    def _suspend_if_asked(self) -> None:
        if self.terminal.suspended:
            self.pane.erase()
            self.terminal.suspend()
            self.pane.forget()

    # --- the model that loads

    def _take_progress(self, progress: Progress) -> None:
        """From a thread of the engine, or of the load."""
        if progress.say and not self.host.settings["quiet"]:
            self._sentences.append(Line(progress.stage, "warning" if progress.say == "warning" else "dim"))
        elif not progress.say:
            self.progress = progress
            self._refresh()

    def _refresh(self) -> None:
        """From the loader's thread: draw how far it is, or take in that it has ended."""
        self.prompt.refresh()
        self.terminal.wake()

    def _tell(self) -> None:
        """Print what has come up beside the talk."""
        while self._sentences:
            self.put(self._sentences.popleft())
        for source in (self.keeper, self.history):
            if source.problem:
                self.say(source.problem, "warning")
                source.problem = ""

    def _status(self) -> str:
        """The toolbar under the prompt: how the load goes, else what the model is and how full its context."""
        if not self.load.is_over:
            text = view.loading(self.progress)
        else:
            text = view.status(self.load.info, self.state) if self.load.info else ""
        return clip(text, self.pane.resize()[0])
