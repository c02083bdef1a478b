"""From settings to a running engine, and from a request to the answer that was streamed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ling_local import hub, paths
from ling_local.cli.output import Output
from ling_local.engine.protocol import Dummy, Engine, EngineInfo, EngineSpec, Progress
from ling_local.errors import UsageError
from ling_local.settings import Settings, with_model
from ling_local.types import Channel, Finish, Request, SamplingParams, Stats, StatsEvent, TokenEvent

if TYPE_CHECKING:
    from ling_local.generate import TextModel

DEMO_NOTE = (
    "ling: answering with ling-demo, the small demo model that ships with ling, on the CPU; "
    "-m FOLDER or -m inclusionAI/Ling-3.0-tiny uses a real one"
)
DTYPE_OF = {"cpu": "float32", "cuda": "bfloat16"}
_LARGE_BYTES = 1 << 30
_BAR = 20


@dataclass(frozen=True, slots=True)
class Opened:
    """A model ready to be asked, with the settings that it completed.

    loading   set while a load may be shown
    checked   set once the drafter was compared with what was asked for
    """

    engine: Engine
    text_model: TextModel
    settings: Settings
    spec: EngineSpec
    output: Output
    loading: threading.Event = field(default_factory=threading.Event)
    checked: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Answer:
    """What a generation has given so far; finish is None while it runs."""

    parts: dict[Channel, list[str]] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish: str | None = None

    def text(self, *channels: Channel) -> str:
        return "".join("".join(self.parts.get(channel, ())) for channel in channels)


def model_spec(settings: Settings) -> tuple[EngineSpec, Settings]:
    """Find the model and let its own defaults fill in what nobody chose. Raises ModelError, UsageError."""
    name = settings["model"]
    dummy = None
    if settings["dummy"]:
        dummy = dummy_of(settings)
        folder = Path(f"dummy-{dummy.shape}")
    elif settings["engine"] == "scripted":
        if name is None:
            raise UsageError("the scripted engine needs a script", "Give one with -m script.json.")
        folder = paths.user_path(name)
    else:
        folder = hub.find_model(name, offline=settings["offline"])
        settings = with_model(settings, folder)
    sglang = settings["engine"] == "sglang"
    if sglang and name is None and dummy is None:
        raise UsageError("--engine sglang needs a model", "Give one, as in -m inclusionAI/Ling-3.0-tiny.")
    if settings["sglang_arg"] and not sglang and settings.sources["sglang_arg"].startswith("flag"):
        raise UsageError("--sglang-arg is for --engine sglang", "Give both, or none.")
    device = "cuda" if sglang and settings.is_default("device") else settings["device"]
    spec = EngineSpec(
        model=str(folder),
        engine=settings["engine"],
        device=device,
        dtype=settings["dtype"] or DTYPE_OF[device],
        draft=settings["speculation"],
        block=settings["block"] or 0,
        context=settings["ctx"],
        threads=settings["threads"],
        gpus=gpu_numbers(settings["gpus"]),
        dummy=dummy,
        accept=accept_pattern(settings, settings["speculation"]),
        passed=settings["sglang_arg"] if sglang else (),
    )
    return spec, settings


def explained(settings: Settings, output: Output) -> bool:
    """Print what would be started where --explain asks for it; False where it does not. Raises as model_spec does."""
    if not settings["explain"]:
        return False
    if settings["engine"] != "sglang":
        raise UsageError("--explain is for --engine sglang", "Give both, or none.")
    from ling_local.engine.sglang.explain import explain

    output.print(explain(model_spec(settings)[0]))
    return True


def gpu_numbers(text: str | None) -> tuple[int, ...]:
    """What --gpus names; () where nobody did. Raises UsageError."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise UsageError(f"--gpus {text}: not a list of different numbers", "Give their numbers, as in --gpus 0,1.")
    return tuple(int(part) for part in parts)


def dummy_of(settings: Settings) -> Dummy:
    """The dummy that the settings ask for. Raises UsageError."""
    if settings["model"] is not None and settings.sources["model"].startswith("flag"):
        raise UsageError("both --dummy and --model are given", "Give one of them.")
    return Dummy(settings["dummy"], settings["layers"], settings["shard"])


def accept_pattern(settings: Settings, draft: str) -> tuple[int, ...]:
    """Accept counts to force on that drafter, () for none. Raises UsageError."""
    text = settings["accept_pattern"]
    if text is None or draft == "off":
        return ()
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (-1,)
    if min(counts) < 0:
        raise UsageError(f"--accept-pattern: '{text}' is not a list of counts", "Write it like 3,0,8.")
    return counts


@contextmanager
def open_model(settings: Settings, output: Output, *, background: bool = False) -> Iterator[Opened]:
    """The engine and the tokenizer of the chosen model; both are released on every way out.

    background: come back while weights still load; `Opened.loading` switches the progress line on and off.
    """
    known = len(settings.warnings)
    spec, settings = model_spec(settings)
    from ling_local.engine import open_engine  # after the model is found: a wrong name is said at once
    from ling_local.generate import TextModel

    for warning in settings.warnings[known:]:
        output.warn(warning)
    output.detail(f"model: {spec.model}")
    if settings["model"] is None and spec.dummy is None:
        output.note(DEMO_NOTE if spec.device == "cpu" else DEMO_NOTE.replace("on the CPU", "on the GPU"), "dim")
    loading = threading.Event()
    if not background:
        loading.set()
    engine = open_engine(spec, _show_progress(output, loading))  # first: it starts while the tokenizer is read
    try:
        yield Opened(engine, TextModel.load(spec), settings, spec, output, loading)
    finally:
        output.clear_progress()
        engine.close()


def wait_loaded(opened: Opened) -> None:
    """Come back when the weights are in, with a progress line meanwhile. Raises what the load failed with."""
    opened.loading.set()
    check_drafter(opened)
    opened.loading.clear()


def check_drafter(opened: Opened) -> None:
    """Wait for the load, and compare the drafter there is with what was asked for, once; a warning is said."""
    info, spec = opened.engine.info, opened.spec
    if opened.checked.is_set():
        return
    opened.output.detail(_describe(info))
    warning = compare_drafter(spec, info)
    if warning:
        opened.output.warn(warning)
    opened.checked.set()


def _describe(info: EngineInfo) -> str:
    """What was loaded, on one line."""
    drafts = f"drafts with {info.drafter}, {info.block} a step" if info.drafter != "off" else "no drafts"
    size = f"{info.parameters / 1e6:,.1f} M parameters, " if info.parameters else ""
    return f"loaded {info.model}: {size}{info.dtype} on {info.device}, context {info.context_limit:,}, {drafts}"


def compare_drafter(spec: EngineSpec, info: EngineInfo) -> str:
    """Compare the drafter there is with what was asked for: UsageError where it is another one or its block is
    smaller; a warning where --block finds no drafter, else ""."""
    if spec.draft in ("dspark", "mtp") and info.drafter != spec.draft:
        there = f"drafts with {info.drafter}" if info.drafter != "off" else "has no drafter"
        raise UsageError(f"--speculation {spec.draft}: {info.model} {there}", "Use --speculation auto or off.")
    if spec.draft != "off" and 0 < info.block < spec.block:
        reason = f"--block {spec.block}: the drafter of {info.model} makes blocks of {info.block}"
        raise UsageError(reason, f"Give 1 to {info.block}.")
    if spec.draft != "off" and spec.block and info.drafter == "off":
        return f"--block {spec.block} has no effect: {info.model} has no drafter"
    return ""


@contextmanager
def open_other(opened: Opened, draft: str, block: int = 0) -> Iterator[Engine]:
    """A second engine of the same model with another drafter, loaded when this comes back; released at the end.

    block 0: the drafter's own size. Raises what the load fails with.
    """
    from ling_local.engine import open_engine

    other = replace(opened.spec, draft=draft, block=block, accept=accept_pattern(opened.settings, draft))
    opened.loading.set()
    engine = open_engine(other, _show_progress(opened.output, opened.loading))
    try:
        compare_drafter(other, engine.info)
        opened.loading.clear()
        opened.output.clear_progress()
        yield engine
    finally:
        opened.loading.clear()
        engine.close()


def _show_progress(output: Output, loading: threading.Event) -> Callable[[Progress], None]:
    told: set[str] = set()
    begun = time.monotonic()

    def show(progress: Progress) -> None:
        if progress.say == "warning":
            output.warn(progress.stage)
        elif progress.say and output.stderr.terminal:
            output.note(f"ling: {progress.stage}", "dim")
        if progress.say or not loading.is_set():
            return
        if output.stderr.live:
            output.progress(progress_text(progress, time.monotonic() - begun))
        elif progress.unit not in told and (progress.unit != "bytes" or progress.total > _LARGE_BYTES):
            told.add(progress.unit)
            what = f"loading {progress.total / 1e9:.1f} GB" if progress.unit == "bytes" else progress.stage
            output.note(f"ling: {what}")

    return show


def progress_text(progress: Progress, seconds: float) -> str:
    """One line for a load: a bar, and for much data how much of it and how fast since `seconds` ago."""
    if not progress.total:
        return f"loading: {progress.stage}"
    full = _BAR * progress.done // progress.total
    text = f"loading: {progress.stage} [{'#' * full}{'.' * (_BAR - full)}] {100 * progress.done // progress.total} %"
    if progress.unit != "bytes":
        return f"{text}, {progress.done} of {progress.total} {progress.unit}"
    if progress.total < _LARGE_BYTES:
        return text
    rate = f", {progress.done / seconds / 1e9:.1f} GB/s" if seconds > 0.5 else ""
    return f"{text}, {progress.done / 1e9:.1f} of {progress.total / 1e9:.1f} GB{rate}"


def sampling(settings: Settings) -> SamplingParams:
    """The sampling that the settings ask for; a seed is drawn where none is set."""
    seed = settings["seed"]
    if seed is None:
        seed = random.SystemRandom().getrandbits(31)
    return SamplingParams(settings["temperature"], settings["top_k"], settings["top_p"], seed)


def stream(opened: Opened, request: Request, answer: Answer, show: Callable[[Channel, str], None]) -> None:
    """Generate, hand every piece of text to show as it comes, and collect all of it in answer.

    However this ends (an exception in show, Ctrl-C), the engine is cancelled and answer holds what came.
    """
    from ling_local.generate import generate

    opened.loading.set()
    check_drafter(opened)
    with closing(generate(opened.engine, opened.text_model, request)) as events:
        for event in events:
            if isinstance(event, TokenEvent):
                answer.ids.extend(event.ids)
                if event.text:
                    opened.loading.clear()
                    answer.parts.setdefault(event.channel, []).append(event.text)
                    show(event.channel, event.text)
            elif isinstance(event, StatsEvent | Finish):
                answer.stats = event.stats
                if isinstance(event, Finish):
                    answer.finish = event.reason.value


def model_facts(opened: Opened) -> dict[str, str | int] | None:
    """What a JSON document says about the model that answered; None where Ctrl-C ended the load."""
    if not opened.checked.is_set():
        return None
    info = opened.engine.info
    drafting = opened.spec.draft != "off"
    return {
        "id": info.model,
        "folder": opened.spec.model,
        "dtype": info.dtype,
        "device": info.device,
        "drafter": info.drafter if drafting else "off",
        "block": info.block if drafting else 0,
    }


def sampling_facts(request: Request) -> dict[str, float | int | None]:
    """Enough to ask the same again."""
    params = request.sampling
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "seed": params.seed,
        "max_tokens": request.max_tokens,
    }
