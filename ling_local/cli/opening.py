"""From settings to a running engine, and from a request to the answer that was streamed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ling_local import hub
from ling_local.cli.output import Output
from ling_local.engine.protocol import Engine, EngineSpec, Progress
from ling_local.errors import UsageError
from ling_local.settings import Settings, with_model
from ling_local.types import Channel, Finish, Request, SamplingParams, Stats, StatsEvent, TokenEvent

if TYPE_CHECKING:
    from ling_local.generate import TextModel

_DEMO_NOTE = (
    "ling: answering with ling-demo, the small demo model that ships with ling, on the CPU; "
    "-m FOLDER or -m inclusionAI/Ling-3.0-tiny uses a real one"
)
_LARGE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Opened:
    """A model ready to be asked, with the settings that it completed. loading is set while a load may be shown."""

    engine: Engine
    text_model: TextModel
    settings: Settings
    spec: EngineSpec
    loading: threading.Event


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
    if settings["engine"] == "scripted":
        if name is None:
            raise UsageError("the scripted engine needs a script", "Give one with -m script.json.")
        folder = Path(name).expanduser()
    else:
        folder = hub.find_model(name)
        settings = with_model(settings, folder)
    spec = EngineSpec(
        model=str(folder),
        engine=settings["engine"],
        device=settings["device"],
        dtype=settings["dtype"],
        context=settings["ctx"],
        threads=settings["threads"],
    )
    return spec, settings


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
    if settings["model"] is None:
        output.note(_DEMO_NOTE, "dim")
    loading = threading.Event()
    if not background:
        loading.set()
    engine = open_engine(spec, _show_progress(output, loading))  # first: it starts while the tokenizer is read
    try:
        yield Opened(engine, TextModel.load(spec), settings, spec, loading)
    finally:
        output.clear_progress()
        engine.close()


def wait_loaded(opened: Opened) -> None:
    """Come back when the weights are in, with a progress line meanwhile. Raises what the load failed with."""
    opened.loading.set()
    _ = opened.engine.info
    opened.loading.clear()


def _show_progress(output: Output, loading: threading.Event) -> Callable[[Progress], None]:
    told = threading.Event()

    def show(progress: Progress) -> None:
        if not loading.is_set():
            return
        if output.stderr.live:
            share = f" {100 * progress.done // progress.total} %" if progress.total else ""
            output.progress(f"loading: {progress.stage}{share}")
        elif progress.total > _LARGE_BYTES and not told.is_set():
            told.set()
            output.note(f"ling: loading {progress.total / 1e9:.1f} GB")

    return show


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


def model_facts(opened: Opened) -> dict[str, str]:
    """What a JSON document says about the model that answered."""
    info = opened.engine.info
    return {"id": info.model, "folder": opened.spec.model, "dtype": info.dtype, "device": info.device}


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
