"""What slash commands do to the screen, files and the engine: the hands of commands.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from ling_local import paths, sessions
from ling_local.errors import LingError, UsageError
from ling_local.settings import TABLE, Settings
from ling_local.text.clean import visible
from ling_local.tui import figures, transcript
from ling_local.tui.clipboard import code_blocks, copy
from ling_local.tui.commands import Called
from ling_local.tui.events import Cleared, Restored, ThinkShown
from ling_local.tui.talk import Act, Attachment, Do
from ling_local.types import FinishReason, Message, SamplingParams, Stats

if TYPE_CHECKING:
    from ling_local.generate import TextModel
    from ling_local.tui.app import App

T = TypeVar("T")
_BENCH_TOKENS = 128
_GENERATION = "generation_config.json"


def obey(app: App, called: Called) -> bool:
    """Run a command. False: the person leaves. LingError where it cannot be done; nothing has changed then."""
    talk = replace(app.talk, messages=app.state.messages)
    outcome = called.command.run(talk, called.argument)
    app.talk = replace(outcome.talk, messages=())
    if outcome.text:
        app.say(outcome.text, "error" if outcome.failed else "")
    if outcome.act is None:
        return True
    if outcome.act.do is Do.EXIT:
        return False
    _ACTS[outcome.act.do](app, outcome.act)
    return True


def _resend(app: App, act: Act) -> None:
    app.ask(act.value, echo=True, replaces=True)


def _edit(app: App, act: Act) -> None:
    app.edit(act.value, replaces=act.replaces)


def _show_thinking(app: App, act: Act) -> None:
    app.put(ThinkShown(act.value == "on"))


def _undo(app: App, act: Act) -> None:
    app.undo()


def _clear(app: App, act: Act) -> None:
    app.put(Cleared())
    app.attached = ()
    app.keeper.start_anew()


def _read(app: App, act: Act) -> None:
    file = paths.user_path(act.value)
    text = transcript.read_file(file)
    if not text.strip():
        raise UsageError(f"{file} is empty")
    app.attached = (*app.attached, Attachment(file.name, text))
    lines = text.count("\n") + (not text.endswith("\n"))
    size = _token_count(app, text)
    app.say(f"{visible(file.name)}: {lines} lines{size}; it goes with your next question")


def _token_count(app: App, text: str) -> str:
    if app.load.text_model is None:
        return ""
    return f", {len(app.load.text_model.tokens.encode(text))} tokens"


def _save(app: App, act: Act) -> None:
    if not act.value:
        where = app.keeper.file
        app.say(f"kept in {where}" if where else "nothing is kept on disk yet; /save FILE writes a copy")
        return
    if not app.state.turns:
        raise UsageError("there is nothing to save yet")
    file = paths.user_path(act.value)
    transcript.write(file, app.talk.settings["system"], app.state.messages)
    app.say(f"saved: {file}")


def _load(app: App, act: Act) -> None:
    file = paths.user_path(act.value)
    if file.suffix.lower() == ".json":
        system, messages = transcript.read_json(file)
        app.keeper.start_anew()
        app.attached = ()
        app.put(Restored(sessions.turns(messages)))
        if system is not None:
            _set_system(app, system)
        app.say(f"{_turns(len(messages) // 2)} from {file}")
    else:
        app.resume(act.value)


def _set_system(app: App, system: str) -> None:
    settings = app.talk.settings
    values, sources = {**settings.values, "system": system}, {**settings.sources, "system": "/load"}
    app.talk = replace(app.talk, settings=replace(settings, values=values, sources=sources))


def _sessions(app: App, act: Act) -> None:
    listed = sessions.list_sessions()
    if not listed:
        app.say("no earlier talks" + ("" if app.host.settings["history"] else ": history is off"), "")
        return
    now = time.time()
    rows = [
        f"{number:>2}  {item.name}  {_age(now - item.modified_s):>9}  {_turns(item.num_turns):>8}  {item.title}"
        + ("  (this one)" if item.name == app.keeper.name else "")
        for number, item in enumerate(listed, 1)
    ]
    app.say("\n".join([*rows, "/load NUMBER goes on with one"]), "")


def _turns(num: int) -> str:
    return f"{num} turn{'' if num == 1 else 's'}"


def _age(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return "just now"


def _copy(app: App, act: Act) -> None:
    answer = app.state.messages[-1].content
    if act.value == "code":
        blocks = code_blocks(answer)
        if not blocks:
            raise UsageError("the last answer holds no code block")
        text = "\n".join(blocks)
    elif act.value == "all":
        text = transcript.as_markdown(app.talk.settings["system"], app.state.messages)
    else:
        text = answer
    if not copy(text, app.terminal.target):
        raise LingError("that is too long for the terminal's clipboard", "/save FILE writes it to a file.")
    app.say(f"copied: {len(text)} characters")


def _model(app: App, act: Act) -> None:
    here = app.load.model
    if not act.value:
        names = app.host.models()
        app.say("\n".join([f"now: {here.name}", *names, "/model NAME changes to it"]), "")
        return
    _loaded(app)
    settings = _for_model(app.talk.settings, act.value)
    app.host.check(settings)  # a wrong name is said while the engine we have still runs
    here.engine.close()
    try:
        app.open(settings)
        _wait_loaded(app, app.load.model.engine.close)
    except LingError:
        app.say(f"back to {here.name}")
        app.open(here.settings)
        raise
    new = app.load.model
    app.talk = replace(app.talk, settings=_taken(app.talk.settings, new.settings))
    bare = tuple((turn.prompt, replace(turn.message, ids=())) for turn in app.state.turns)
    app.put(Restored(bare, echo=False))  # ids of one model mean nothing to another
    app.keeper.model(new.spec.model)
    app.say(f"now: {new.name}")


def _for_model(settings: Settings, name: str) -> Settings:
    """Settings under another model: what the one at hand had set by itself is open again."""
    own = [key for key, source in settings.sources.items() if source == _GENERATION]
    defaults = {key: TABLE[key].default for key in own}
    values = {**settings.values, **defaults, "model": name}
    sources = {**settings.sources, **dict.fromkeys(own, "default"), "model": "/model"}
    return replace(settings, values=values, sources=sources)


def _taken(talk: Settings, opened: Settings) -> Settings:
    """The talk's settings with the model and its own sampling."""
    keys = ["model", *(key for key, source in opened.sources.items() if source in (_GENERATION, "default"))]
    return replace(
        talk,
        values={**talk.values, **{key: opened.values[key] for key in keys}},
        sources={**talk.sources, **{key: opened.sources[key] for key in keys}},
    )


def _wait_loaded(app: App, on_interrupt: Callable[[], None]) -> None:
    """Show how the load goes until it is over. Raises what it failed with."""
    load = app.load

    def tail() -> str:
        progress = app.box.progress
        share = f" {100 * progress.done // progress.total} %" if progress and progress.total else ""
        return f"loading {load.model.name}{share}"

    app.wait_for(lambda: load.is_over, tail, on_interrupt)
    load.result()


def _loaded(app: App) -> TextModel:
    """The text side of the model, waited for. UsageError where the person does not want to wait."""

    def give_up() -> None:
        raise UsageError("the model is still loading")

    _wait_loaded(app, give_up)
    app.note_load()
    return app.load.result()


class _Stopped(Exception):
    """Ctrl-C during a measurement."""


def _bench(app: App, act: Act) -> None:
    from ling_local.bench import BenchPlan, BenchProgress, run_bench

    text_model = _loaded(app)
    tokens = int(act.value or _BENCH_TOKENS)
    settings = app.talk.settings
    sampling = SamplingParams(settings["temperature"], settings["top_k"], settings["top_p"], 0)
    plan = BenchPlan(tokens=tokens, repetitions=3, sampling=sampling)
    said = ["measuring"]
    stop = threading.Event()

    def note(progress: BenchProgress) -> None:
        if stop.is_set():
            raise _Stopped
        said[0] = f"{progress.stage} {progress.repetition}/{progress.repetitions}: {progress.tokens} tokens"

    work = _Work(lambda: run_bench(app.load.model.engine, text_model, plan, note), app.terminal.wake)
    app.wait_for(lambda: work.over, lambda: f"{said[0]} (Ctrl-C stops it)", stop.set)
    try:
        report = work.result()
    except _Stopped:
        app.say("stopped")
        return
    tpot, ttft = report.tpot_ms, report.ttft_ms
    words = [f"{tokens} tokens x 3, {plan.task}"]
    if ttft is not None:
        words.append(f"TTFT {figures.millis(ttft.mean / 1000)} ms")
    if tpot is not None and tpot.mean:
        words.append(f"TPOT {figures.millis(tpot.mean / 1000)} ms ± {figures.millis((tpot.sd or 0) / 1000)}")
        words.append(f"{figures.rate(1000 / tpot.mean)} tok/s")
    steps = sum(sample.stats.steps for sample in report.samples)
    if any(sample.stats.drafted for sample in report.samples):
        words.append(f"accept {sum(sample.stats.tokens for sample in report.samples) / steps:.2f}")
    app.say(" · ".join(words), "")


class _Work(Generic[T]):
    """A function running in a thread of its own."""

    def __init__(self, work: Callable[[], T], wake: Callable[[], None]) -> None:
        self.over = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._work, self._wake = work, wake
        threading.Thread(target=self._run, name="work", daemon=True).start()

    def result(self) -> T:
        """What the work gave, once it is over. Raises what it raised."""
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self.over = True
        self._wake()


def _tokens(app: App, act: Act) -> None:
    text_model = _loaded(app)
    if act.value:
        num = len(text_model.tokens.encode(act.value))
        app.say(f"{num} tokens, {len(act.value)} characters", "")
        return
    messages = app.state.messages or (Message("user", ""),)
    if messages[-1].role == "assistant":
        messages = (*messages, Message("user", ""))
    num = len(text_model.encode(app.host.request(app.talk.settings, messages)))
    limit = app.load.model.engine.info.context_limit
    waiting = sum(len(text_model.tokens.encode(file.text)) for file in app.attached)
    more = f", and {waiting} in files that wait" if waiting else ""
    share = f"{num} of {limit} tokens ({100 * num / limit:.0f} %)"
    app.say(f"{share} before the next question, {_turns(len(app.state.turns))}{more}", "")


def _stats(app: App, act: Act) -> None:
    turns = app.state.turns
    if not turns:
        raise UsageError("there is no answer yet")
    rows = [_turn_figures(number, turn.stats) for number, turn in enumerate(turns, 1) if turn.stats.tokens]
    tokens = sum(turn.stats.tokens for turn in turns)
    steps = sum(turn.stats.steps for turn in turns)
    total = f"{tokens} tokens in {_turns(len(turns))}"
    if steps:
        total += f", {steps} steps, accept {tokens / steps:.2f}"
    app.say("\n".join([*rows[-10:], total]), "")


def _turn_figures(number: int, stats: Stats) -> str:
    parts = [part.text for part in figures.summary_parts(stats, FinishReason.EOS)]
    if stats.prefill_s is not None:
        parts.append(f"prefill {figures.duration(stats.prefill_s)}")
    if stats.step_s is not None:
        parts.append(f"step {figures.millis(stats.step_s)} ms")
    if stats.drafted:
        rates = " ".join(f"{100 * rate:.0f}" for rate in stats.rate_by_position)
        parts.append(f"{stats.accepted}/{stats.drafted} drafts ({rates} % by position)")
    return f"{number:>3}  " + " · ".join(parts)


_ACTS: dict[Do, Callable[[App, Act], None]] = {
    Do.RESEND: _resend,
    Do.EDIT: _edit,
    Do.SHOW_THINKING: _show_thinking,
    Do.UNDO: _undo,
    Do.CLEAR: _clear,
    Do.READ: _read,
    Do.SAVE: _save,
    Do.LOAD: _load,
    Do.SESSIONS: _sessions,
    Do.COPY: _copy,
    Do.MODEL: _model,
    Do.BENCH: _bench,
    Do.TOKENS: _tokens,
    Do.STATS: _stats,
}
