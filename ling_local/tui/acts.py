"""What slash commands do to the screen, files and the engine: the hands of commands.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ling_local import sessions
from ling_local.errors import LingError, UsageError
from ling_local.settings import TABLE, Settings
from ling_local.text.clean import visible
from ling_local.tui import figures, transcript, view
from ling_local.tui.blocks import code_blocks
from ling_local.tui.clipboard import copy
from ling_local.tui.commands import COMMANDS, KEYS_HELP, Command, Talk, help_text
from ling_local.tui.events import Kept, Restored, ThinkShown
from ling_local.tui.model import Turn
from ling_local.tui.pump import Job
from ling_local.types import FinishReason, Message, SamplingParams, Stats

if TYPE_CHECKING:
    from ling_local.generate import TextModel
    from ling_local.tui.app import App

_BENCH_TOKENS = 128
_GENERATION = "generation_config.json"


def obey(app: App, command: Command, argument: str) -> bool:
    """Run a command. False: the person leaves. LingError where it cannot be done; nothing has changed then."""
    if command.name == "exit":
        return False
    if command.run is None:
        ACTS[command.name](app, argument)
        return True
    settings, text = command.run(app.talk, argument)
    app.talk = replace(app.talk, settings=settings)
    app.put(ThinkShown(settings["show_thinking"]))
    app.say(text, "")
    return True


def _help(app: App, argument: str) -> None:
    app.say(help_text(argument, keys=KEYS_HELP), "")


def _last_turn(app: App, none: str) -> Turn:
    if not app.state.turns:
        raise UsageError(none)
    return app.state.turns[-1]


def _regen(app: App, argument: str) -> None:
    question = _last_turn(app, "there is no answer to make again").prompt
    if not app.talk.settings["temperature"]:
        app.say("temperature is 0, so the answer will be the same; try /set temperature 0.7", "")
    app.ask(question, again=True)


def _edit(app: App, argument: str) -> None:
    turns = app.state.turns
    if argument or not turns:
        app.edit(argument, replaces=False)
    else:
        app.edit(turns[-1].prompt, replaces=True)


def _undo(app: App, argument: str) -> None:
    line = " ".join(_last_turn(app, "there is nothing to undo").prompt.split())
    app.undo()
    app.say(f"taken back: {line if len(line) <= 50 else line[:49] + '…'}", "")


def _clear(app: App, argument: str) -> None:
    app.put(Kept(()))
    app.attached = ()
    app.keeper.start_anew()
    app.say("a new talk begins", "")


def _read(app: App, argument: str) -> None:
    if not argument:
        raise UsageError("/read needs a file")
    file = transcript.named(argument)
    cleaned = transcript.read_file(file)
    text = cleaned.text
    if not text.strip():
        raise UsageError(f"{file} is empty")
    for warning in cleaned.warnings:
        app.say(warning, "warning")
    app.attached = (*app.attached, f"{file.name}:\n\n{text}")
    lines = text.count("\n") + (not text.endswith("\n"))
    size = _token_count(app, text)
    app.say(f"{visible(file.name)}: {lines} lines{size}; it goes with your next question")


def _token_count(app: App, text: str) -> str:
    if app.load.text_model is None:
        return ""
    return f", {len(app.load.text_model.tokens.encode(text))} tokens"


def _save(app: App, argument: str) -> None:
    if not argument:
        where = app.keeper.file
        app.say(f"kept in {where}" if where else "nothing is kept on disk yet; /save FILE writes a copy")
        return
    if not app.state.turns:
        raise UsageError("there is nothing to save yet")
    file = transcript.named(argument)
    transcript.write(file, app.talk.settings["system"], app.state.messages)
    app.say(f"saved: {file}")


def _load(app: App, argument: str) -> None:
    if not argument:
        raise UsageError("/load needs a session (/sessions lists them) or a .json file")
    file = transcript.named(argument)
    if file.suffix.lower() == ".json":
        system, messages = transcript.read_json(file)
        app.keeper.start_anew()
        app.attached = ()
        app.put(Restored(sessions.turns(messages)))
        if system is not None:
            app.talk = replace(app.talk, settings=app.talk.settings.changed("/load", system=system))
        app.say(f"{figures.turn_count(len(messages) // 2)} from {file}")
    else:
        app.resume(argument)


def _sessions(app: App, argument: str) -> None:
    listed = sessions.list_sessions()
    if not listed:
        app.say("no earlier talks" + ("" if app.host.settings["history"] else ": history is off"), "")
        return
    now = time.time()
    rows = []
    for number, item in enumerate(listed, 1):
        age, turns = _age(now - item.modified_s), figures.turn_count(item.num_turns)
        mark = "  (this one)" if item.name == app.keeper.name else ""
        rows.append(f"{number:>2}  {item.name}  {age:>9}  {turns:>8}  {item.title}{mark}")
    app.say("\n".join([*rows, "/load NUMBER goes on with one"]), "")


def _age(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return "just now"


def _copy(app: App, argument: str) -> None:
    what = argument.lower() or "answer"
    if what not in COMMANDS["copy"].words:
        raise UsageError(f"/copy: '{argument}' is none of {', '.join(COMMANDS['copy'].words)}")
    text = _last_turn(app, "there is no answer yet").message.content
    if what == "code":
        blocks = code_blocks(text)
        if not blocks:
            raise UsageError("the last answer holds no code block")
        text = "\n".join(blocks)
    elif what == "all":
        text = transcript.as_markdown(app.talk.settings["system"], app.state.messages)
    if not copy(text, app.terminal.target):
        raise LingError("that is too long for the terminal's clipboard", "/save FILE writes it to a file.")
    app.say(f"copied: {len(text)} characters")


def _model(app: App, argument: str) -> None:
    here = app.load.model
    if not argument:
        names = app.host.models()
        app.say("\n".join([f"now: {here.name}", *names, "/model NAME changes to it"]), "")
        return
    _loaded(app)
    settings = _for_model(app.talk.settings, argument)
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
    app.talk = Talk(_taken(app.talk.settings, new.settings), _taken(app.talk.started, new.settings))
    app.put(Kept(tuple(replace(turn, ids=()) for turn in app.state.turns)))  # one model's ids mean nothing to another
    app.keeper.model(new.spec.model)
    app.say(f"now: {new.name}")


def _for_model(settings: Settings, name: str) -> Settings:
    """Settings under another model: what the one at hand had set by itself is open again."""
    own = {key: TABLE[key].default for key, source in settings.sources.items() if source == _GENERATION}
    return settings.changed("default", **own).changed("/model", model=name)


def _taken(talk: Settings, opened: Settings) -> Settings:
    """The talk's settings with the model and its own sampling."""
    for key, source in opened.sources.items():
        if key == "model" or source in (_GENERATION, "default"):
            talk = talk.changed(source, **{key: opened[key]})
    return talk


def _wait_loaded(app: App, on_interrupt: Callable[[], None]) -> TextModel:
    """Show how the load goes until it is over; its text side. Raises what it failed with."""
    load = app.load

    def tail() -> str:
        return f"{load.model.name}: {view.loading(app.progress)}"

    app.wait_for(lambda: load.is_over, tail, on_interrupt)
    return load.result()


def _loaded(app: App) -> TextModel:
    """The text side of the model, waited for. UsageError where the person does not want to wait."""

    def give_up() -> None:
        raise UsageError("the model is still loading")

    app.reopen_if_dead()
    return _wait_loaded(app, give_up)


class _Stopped(Exception):
    """Ctrl-C during a measurement."""


def _bench(app: App, argument: str) -> None:
    from ling_local.bench import BenchPlan, BenchProgress, run_bench

    if argument and not (argument.isascii() and argument.isdigit() and 0 < int(argument) <= 100_000):
        raise UsageError(f"/bench: '{argument}' is not a number of tokens from 1 to 100000")
    text_model = _loaded(app)
    tokens = int(argument or _BENCH_TOKENS)
    settings = app.talk.settings
    sampling = SamplingParams(settings["temperature"], settings["top_k"], settings["top_p"], 0)
    plan = BenchPlan(tokens=tokens, repetitions=3, sampling=sampling)
    said = ["measuring"]
    stop = threading.Event()

    def note(progress: BenchProgress) -> None:
        if stop.is_set():
            raise _Stopped
        said[0] = f"{progress.stage} {progress.repetition}/{progress.repetitions}: {progress.tokens} tokens"

    work = Job(lambda: run_bench(app.load.model.engine, text_model, plan, note), app.terminal.wake)
    app.wait_for(lambda: work.is_over, lambda: f"{said[0]} (Ctrl-C stops it)", stop.set)
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


def _tokens(app: App, argument: str) -> None:
    text_model = _loaded(app)
    if argument:
        num = len(text_model.tokens.encode(argument))
        app.say(f"{num} tokens, {len(argument)} characters", "")
        return
    messages = (*app.state.messages, Message("user", ""))
    num = len(text_model.encode(app.host.request(app.talk.settings, messages)))
    limit = app.load.model.engine.info.context_limit
    waiting = sum(len(text_model.tokens.encode(text)) for text in app.attached)
    more = f", and {waiting} in files that wait" if waiting else ""
    share = f"{num} of {limit} tokens ({100 * num / limit:.0f} %)"
    app.say(f"{share} before the next question, {figures.turn_count(len(app.state.turns))}{more}", "")


def _stats(app: App, argument: str) -> None:
    turns = [(number, turn.stats) for number, turn in enumerate(app.state.turns, 1) if turn.stats.tokens]
    if not turns:
        raise UsageError("there is no answer yet" if not app.state.turns else "these answers are from an earlier chat")
    rows = [_turn_figures(number, stats) for number, stats in turns]
    tokens, steps = sum(stats.tokens for _, stats in turns), sum(stats.steps for _, stats in turns)
    total = f"{tokens} tokens in {figures.turn_count(len(turns))}"
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


ACTS: dict[str, Callable[[App, str], None]] = {
    "help": _help,
    "stats": _stats,
    "tokens": _tokens,
    "clear": _clear,
    "undo": _undo,
    "regen": _regen,
    "edit": _edit,
    "read": _read,
    "save": _save,
    "load": _load,
    "sessions": _sessions,
    "copy": _copy,
    "model": _model,
    "bench": _bench,
}
