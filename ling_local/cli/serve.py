"""`ling serve`: the OpenAI protocol on a local port."""

from __future__ import annotations

import socket
from pathlib import Path

import typer

from ling_local import hub
from ling_local.cli import options as opt
from ling_local.cli.opening import Opened, check_drafter, explained, open_model
from ling_local.cli.output import Output
from ling_local.cli.pages import Page
from ling_local.engine.protocol import EngineInfo
from ling_local.errors import UsageError
from ling_local.settings import Settings

PAGE = Page(
    "[OPTIONS]",
    examples=(
        "ling serve                                 http://127.0.0.1:5464/v1, with any key",
        "ling serve -m inclusionAI/Ling-3.0-tiny    another model",
        "ling serve --port 0                        a free port; the line on stderr names it",
        "LING_API_KEY=... ling serve --host 0.0.0.0",
        "curl http://127.0.0.1:5464/v1/models",
    ),
    rare=("allow_host", "allow_origin", "stop", *opt.RARE),
    defaults=(("max_tokens", "256 for a completion; a chat may fill the context"),),
    notes="Chat completions, completions, models, and /health. One request is answered at a time, others wait in line. "
    "A conversation that grows is read from where it grew. Temperature and the like are the defaults of requests that "
    "name none. stderr gets a line when it is ready and one for each request; --quiet leaves only the first. Ctrl-C "
    "ends it.",
)


@opt.flags(
    "model host port api_key queue allow_host allow_origin think think_budget max_tokens stop",
    *opt.SAMPLING,
    "speculation",
    *opt.RARE,
)
def command(context: typer.Context) -> None:
    """Answer other programs: the OpenAI protocol on a local port."""
    settings, output = opt.open_settings(context)
    if explained(settings, output):
        return
    _check(settings)
    from ling_local.serve.server import address_of, bind, is_local

    with bind(settings["host"], settings["port"]) as bound:
        if settings["api_key"] is None and not is_local(bound):
            message = f"--host {settings['host']} lets other machines in, and without a key anyone on them"
            raise UsageError(message, "Set one: LING_API_KEY=... or --api-key.")
        address = address_of(bound)
        with open_model(settings, output, background=True) as opened:
            _serve(opened, output, bound, address)
    output.note("ling: stopped", "dim")


def _check(settings: Settings) -> None:
    if settings["api_key"] is not None and not settings["api_key"].strip():
        raise UsageError("the API key is empty", "Give one that is hard to guess, or none.")
    for origin in settings["allow_origin"]:
        if origin == "*":
            raise UsageError("--allow-origin '*' would let every web page use the model", "Name the pages' origins.")
        if "://" not in origin:
            raise UsageError(f"--allow-origin {origin}: not an origin", "Write it like http://localhost:3000.")


def _serve(opened: Opened, output: Output, bound: socket.socket, address: str) -> None:
    from ling_local.serve.app import make_app
    from ling_local.serve.guard import Gate
    from ling_local.serve.server import Host, is_local
    from ling_local.serve.service import Service
    from ling_local.serve.slot import Slot

    settings = opened.settings
    names = _names(settings)
    service = Service(
        engine=opened.engine,
        text_model=opened.text_model,
        settings=settings,
        names=names,
        slot=Slot(settings["queue"]),
        say=lambda line: output.note(line, "dim"),
    )
    gate = Gate((settings["host"], *settings["allow_host"]), is_local(bound), settings["api_key"])
    app = make_app(service, gate, settings["allow_origin"])

    def load() -> EngineInfo:
        opened.loading.set()
        check_drafter(opened)
        opened.loading.clear()
        return opened.engine.info

    def ready(info: EngineInfo) -> None:
        output.say(f"ling: {names[0]} is ready at {address}/v1 (Ctrl-C ends it)")

    Host(service, app, bound).run(load, ready)


def _names(settings: Settings) -> tuple[str, ...]:
    """What requests may call the model; our name for it first."""
    given = settings["model"]
    if given is None:
        return (hub.DEMO,)
    path = Path(given).expanduser()
    if path.exists():
        return (path.resolve().stem if path.is_file() else path.resolve().name,)
    return (given, given.rpartition("/")[2])
