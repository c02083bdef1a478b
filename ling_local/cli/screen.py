"""`ling chat` on a terminal: what the chat screen needs from the command line, and the way into it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ling_local import __version__, hub
from ling_local.cli.chat import chat_request, messages_for
from ling_local.cli.opening import DEMO_NOTE, compare_drafter, model_spec
from ling_local.cli.output import Output
from ling_local.engine.protocol import EngineInfo, Progress, ProgressFn
from ling_local.settings import Settings
from ling_local.types import Message, Request

if TYPE_CHECKING:
    from ling_local.generate import TextModel
    from ling_local.tui.pump import Model


def talk(settings: Settings, output: Output) -> None:
    """Open the chat screen and stay there until the person leaves. Raises what a failed load raises."""
    model_spec(settings)  # a wrong name is said before anything is drawn
    from prompt_toolkit.input import create_input
    from rich.console import Console

    from ling_local.tui.app import App, Host
    from ling_local.tui.glyphs import install
    from ling_local.tui.history import LineHistory, history_file
    from ling_local.tui.input import open_screen

    sys.stdout.reconfigure(errors=install())  # a terminal of another encoding shows what it can
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    host = Host(
        version=__version__,
        name=_short(settings),
        note=DEMO_NOTE.removeprefix("ling: ") if settings["model"] is None and settings["engine"] != "scripted" else "",
        settings=settings,
        colour=output.stdout.colour,
        unicode=unicode,
        open=_open,
        request=_request,
        check=lambda asked: model_spec(asked) and None,
        models=_names,
    )
    console = Console(
        file=sys.stdout,
        force_terminal=True,
        no_color=not output.stdout.colour,
        highlight=False,
        markup=False,
        emoji=False,
    )
    history = LineHistory(history_file() if settings["history"] else None)
    App(host, console, create_input(sys.stdin), open_screen(sys.stdout), history).run()


def _open(settings: Settings, progress: ProgressFn) -> Model:
    """Start to load; come back at once."""
    known = len(settings.warnings)
    spec, settings = model_spec(settings)
    from ling_local.engine import open_engine
    from ling_local.tui.pump import Model

    def warn(text: str) -> None:
        progress(Progress(text, say="warning"))  # printed here it would tear the prompt

    for warning in settings.warnings[known:]:
        warn(warning)
    engine = open_engine(spec, progress)

    def load_text() -> TextModel:
        from ling_local.generate import TextModel

        return TextModel.load(spec)

    def ready() -> EngineInfo:
        warning = compare_drafter(spec, engine.info)
        if warning:
            warn(warning)
        return engine.info

    return Model(engine, spec, settings, _short(settings), load_text, ready)


def _short(settings: Settings) -> str:
    """What a model is called until it has said its name."""
    name = settings["model"] or hub.DEMO
    return os.path.basename(name.rstrip("/")) or name


def _request(settings: Settings, messages: tuple[Message, ...]) -> Request:
    return chat_request(settings, messages_for(settings, *messages))


def _names() -> tuple[str, ...]:
    return tuple(model.name for model in hub.list_models() if not model.problem and not model.draft)
