"""`ling complete`: what comes next in a file, and nothing else on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ling_local import __version__
from ling_local.cli import options as opt
from ling_local.cli.figures import stats_dict, stats_line, usage_dict
from ling_local.cli.opening import Answer, Opened, explained, model_facts, open_model, sampling, sampling_facts, stream
from ling_local.cli.output import Output, read_stdin
from ling_local.cli.pages import Page
from ling_local.errors import UsageError
from ling_local.settings import Settings
from ling_local.text.clean import Cleaned, Newlines, read_argument, read_text
from ling_local.types import Channel, FinishReason, Message, Request, SamplingParams

DEFAULT_MAX_TOKENS = 256
_INSTRUCTION = (
    "Continue the following text from exactly where it ends. Reply with the continuation only: no introduction, "
    "no repetition of what is there, no code fence.\n\n"
)
PAGE = Page(
    "[OPTIONS] [FILE]",
    examples=(
        "ling complete < half.py                  the continuation, to the byte",
        "ling complete half.py -n 64 --stats",
        'ling complete -p "def add(a, b):" --until eof',
        "ling complete half.py --json | jq -r .text",
    ),
    rare=opt.RARE,
    defaults=(("max_tokens", str(DEFAULT_MAX_TOKENS)), ("stats", "false")),
    notes="The text is read as UTF-8: a BOM is dropped, and CRLF text is continued in CRLF. For code the end of "
    "the block that the text left open ends the continuation; prose ends where the model ends it.",
)


@opt.flags("prompt", "model", "max_tokens", "until", "stop", *opt.SAMPLING, "stats", "json", "speculation", *opt.RARE)
def command(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The text; - or nothing: stdin.")] = None,
    instruct: Annotated[
        bool, typer.Option("--instruct", help="Ask a chat model to continue, instead of the raw text.")
    ] = False,
) -> None:
    """Continue a file or a text: prints what comes next, byte for byte, as it is made."""
    settings, output = opt.open_settings(context)
    if explained(settings, output):
        return
    text = _input(file, settings, output)
    answer = Answer()
    if settings["max_tokens"] == 0:  # a value, not "unlimited": nothing is asked for, so nothing is loaded
        if output.json:
            output.print_json({**_head(), "text": "", "finish": FinishReason.LENGTH.value})
        return
    with open_model(settings, output) as opened:
        request = _request(opened.settings, text, instruct, sampling(opened.settings))
        shown = Shown(output, text.crlf)
        try:
            stream(opened, request, answer, shown.take)
        except KeyboardInterrupt:
            answer.finish = FinishReason.CANCELLED.value
            raise
        finally:
            shown.end()
            output.extra["text"] = shown.text
            if output.json and answer.finish:  # without one an error ends the run, and has its own document
                output.print_json(_document(opened, request, answer, shown.text, text.warnings))
        if settings["stats"]:
            output.say(stats_line(answer.stats), "dim")


def _input(file: Path | None, settings: Settings, output: Output) -> Cleaned:
    """The text to continue: FILE, -p or stdin. Raises UsageError where there is none, or two."""
    prompt = settings["prompt"]
    if file is not None and prompt is not None:
        raise UsageError("both FILE and --prompt are given", "Give one of them.")
    if prompt is not None:
        cleaned = read_argument(prompt)
    elif file is not None and str(file) != "-":
        cleaned = read_text(_read_file(file), str(file))
    else:
        cleaned = read_text(read_stdin(output, what="the text on stdin") or b"")
    for warning in cleaned.warnings:
        output.warn(warning)
    if not cleaned.text:
        source = "the prompt" if prompt is not None else "stdin" if file is None or str(file) == "-" else str(file)
        raise UsageError(f"no text to continue: {source} is empty", 'Give a FILE, pipe one in, or use -p "...".')
    return cleaned


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder", "Give a file.") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def _request(settings: Settings, text: Cleaned, instruct: bool, params: SamplingParams) -> Request:
    limit, stop = settings["max_tokens"], settings["stop"]
    if text.crlf:  # the model sees LF only, and so should who looks for the end
        stop = tuple(item.replace("\r\n", "\n") for item in stop)
    return Request(
        prompt=(Message("user", _INSTRUCTION + text.text),) if instruct else text.text,
        sampling=params,
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        stop=stop,
        thinking=False,
        code_stop=settings["until"] == "block" and not instruct,
        draft=settings["speculation"] != "off",
    )


class Shown:
    """Takes the model's text: to stdout at once, or kept for the JSON document."""

    def __init__(self, output: Output, crlf: bool) -> None:
        self.text = ""
        self._parts: list[str] = []
        self._output = output
        self._newlines = Newlines(crlf)

    def take(self, channel: Channel, text: str) -> None:
        """One piece of the stream. With --instruct a model may think all the same: that is no continuation."""
        if channel is Channel.THINKING:
            return
        given_back = self._newlines.push(text)
        self._parts.append(given_back)
        if not self._output.json:
            self._output.write_text(text if self._output.stdout.terminal else given_back)

    def end(self) -> None:
        """Join what came; on a terminal the prompt that follows gets a line of its own."""
        self.text = "".join(self._parts)
        if self._output.stdout.terminal and not self._output.json and not self.text.endswith("\n"):
            self._output.print()


def _head() -> dict[str, Any]:
    return {"schema": 1, "ling": __version__}


def _document(opened: Opened, request: Request, answer: Answer, text: str, warnings: tuple[str, ...]) -> dict[str, Any]:
    return {
        **_head(),
        "model": model_facts(opened),
        "text": text,
        "finish": answer.finish,
        "usage": usage_dict(answer.stats),
        "stats": stats_dict(answer.stats),
        "sampling": sampling_facts(request),
        "warnings": list(warnings),
    }
