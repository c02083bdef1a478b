"""`ling chat`: one question and its answer, or a talk."""

from __future__ import annotations

from typing import Any

import typer

from ling_local.cli import options as opt
from ling_local.cli.figures import stats_dict, stats_line, usage_dict
from ling_local.cli.opening import Answer, Opened, explained, model_facts, open_model, sampling, sampling_facts, stream
from ling_local.cli.output import Output, read_stdin
from ling_local.cli.pages import Page
from ling_local.errors import UsageError
from ling_local.settings import Settings
from ling_local.text.clean import read_argument, read_text
from ling_local.types import Channel, FinishReason, Message, Request

DEFAULT_MAX_TOKENS = 1024
PAGE = Page(
    "[OPTIONS]",
    examples=(
        "ling chat                                           talk; /help lists the commands",
        "ling chat --resume last                             go on with the last talk",
        'ling chat -p "What is a deque?"                     one answer',
        'git diff | ling chat -p "write a commit message"    prompt and data joined',
        'ling chat -p "2+2?" --json | jq -r "select(.event == \\"finish\\").text"',
    ),
    rare=("stdin_wait", "plain", "history", *opt.RARE),
    defaults=(("max_tokens", str(DEFAULT_MAX_TOKENS)),),
    events=True,
    notes="stdout gets the answer and nothing else. Thinking goes to stderr: dim on a terminal, elsewhere only with "
    "--show-thinking. With -p, a stdin that is open but silent is given up after --stdin-wait seconds. "
    "--json writes one event a line: thinking, answer, and at the end finish or error.\n\n"
    "Without a prompt, on a terminal, the chat screen opens; /help there lists its commands. --plain, and a terminal "
    "that cannot redraw, talk line by line. Talks and typed lines are kept in $XDG_STATE_HOME/ling, for you alone.",
)


@opt.flags(
    "prompt system model think think_budget show_thinking max_tokens stop",
    *opt.SAMPLING,
    "stats resume plain history json stdin_wait speculation",
    *opt.RARE,
)
def command(context: typer.Context) -> None:
    """Talk with the model, or ask one question with -p or on stdin."""
    settings, output = opt.open_settings(context)
    if explained(settings, output):
        return
    if settings["prompt"] is None and output.stdin.terminal:
        if output.json:
            raise UsageError("--json needs a prompt", 'Give one with -p "...", or pipe one in.')
        _talk(settings, output)
        return
    if settings["resume"] is not None:
        raise UsageError("--resume is for a talk in a terminal", "Leave it out, or leave out -p and the pipe.")
    text = _prompt(settings, output)
    if settings["max_tokens"] == 0:
        if output.json:
            output.print_json({"event": "finish", "reason": FinishReason.LENGTH.value, "text": ""}, one_line=True)
        return
    with open_model(settings, output) as opened:
        _ask(opened, output, text)


def _talk(settings: Settings, output: Output) -> None:
    """On the screen where it can be drawn, else line by line."""
    on_screen = output.stdout.live and not settings["plain"]
    # what a talk does where nobody chose; a value, so that /show tells it
    own = {"max_tokens": DEFAULT_MAX_TOKENS, "stats": True, "show_thinking": output.stderr.terminal and not on_screen}
    settings = settings.changed("default", **{name: own[name] for name in own if settings[name] is None})
    if on_screen:
        from ling_local.cli.screen import talk
    else:
        if settings["resume"] is not None:
            raise UsageError("--resume needs the chat screen", "Leave out --plain, or use another terminal.")
        from ling_local.cli.plain import talk
    talk(settings, output)


def _prompt(settings: Settings, output: Output) -> str:
    """-p and what is piped in, joined. Raises UsageError where both are empty."""
    given = settings["prompt"]
    data: bytes | None = None
    if not output.stdin.terminal:
        wait = settings["stdin_wait"] if given is not None else None
        data = read_stdin(output, wait_s=None if wait == float("inf") else wait, what="the prompt on stdin")
    asked, cleaned = read_argument(given or ""), read_text(data or b"")
    for warning in (*asked.warnings, *cleaned.warnings):
        output.warn(warning)
    piped = cleaned.text if cleaned.text.strip() else ""
    if given is None and not piped:
        raise UsageError("no prompt: stdin is empty", 'Give one with -p "...", or run in a terminal.')
    if not piped and not asked.text.strip():
        raise UsageError("the prompt is empty", 'Give some text: -p "...".')
    return "\n\n".join(part for part in (asked.text, piped) if part)


def messages_for(settings: Settings, *talk: Message) -> tuple[Message, ...]:
    """The conversation with its system message, if there is one."""
    system = settings["system"]
    return talk if system is None else (Message("system", system), *talk)


def chat_request(settings: Settings, messages: tuple[Message, ...]) -> Request:
    """A complete request for the next turn of messages."""
    limit = settings["max_tokens"]
    return Request(
        prompt=messages,
        sampling=sampling(settings),
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        stop=settings["stop"],
        thinking=settings["think"],
        think_budget=settings["think_budget"],
        draft=settings["speculation"] != "off",
    )


class Screen:
    """Takes the pieces of one answer: the answer to stdout, thinking to stderr or nowhere."""

    def __init__(self, output: Output, show_thinking: bool | None) -> None:
        self._output = output
        self._thinking = output.stderr.terminal if show_thinking is None else show_thinking
        self._open_thought = False
        self._last = "\n"

    def take(self, channel: Channel, text: str) -> None:
        """One piece of the stream."""
        if channel is Channel.THINKING:
            if self._thinking:
                self._output.say(text, "dim", end="")
                self._open_thought = True
            return
        self._close_thought()
        self._last = text[-1]
        self._output.write_text(text)

    def end(self) -> None:
        """Lines of ours follow: finish the ones that are open."""
        self._close_thought()
        if self._last != "\n":
            self._output.write_text("\n")
            self._last = "\n"

    def _close_thought(self) -> None:
        if self._open_thought:
            self._output.say("\n")
            self._open_thought = False


def _ask(opened: Opened, output: Output, text: str) -> None:
    settings = opened.settings
    request = chat_request(settings, messages_for(settings, Message("user", text)))
    answer = Answer()
    if output.json:
        _ask_json(opened, output, request, answer)
    else:
        screen = Screen(output, settings["show_thinking"])
        try:
            stream(opened, request, answer, screen.take)
        finally:
            screen.end()
        if not answer.text(Channel.ANSWER) and answer.finish == FinishReason.LENGTH.value:
            output.warn("no answer: the limit came while the model was thinking (--max-tokens, --no-think)")
    if settings["stats"]:
        output.say(stats_line(answer.stats), "dim")


def _ask_json(opened: Opened, output: Output, request: Request, answer: Answer) -> None:
    def line(channel: Channel, text: str) -> None:
        output.print_json({"event": channel.value, "text": text}, one_line=True)

    try:
        stream(opened, request, answer, line)
    except KeyboardInterrupt:
        answer.finish = FinishReason.CANCELLED.value
        raise
    finally:
        output.extra["text"] = answer.text(Channel.ANSWER)
        if answer.finish:  # without one an error ends the run, with an event of its own
            output.print_json(_finish_event(opened, request, answer), one_line=True)


def _finish_event(opened: Opened, request: Request, answer: Answer) -> dict[str, Any]:
    return {
        "event": "finish",
        "reason": answer.finish,
        "text": answer.text(Channel.ANSWER),
        "thinking": answer.text(Channel.THINKING),
        "model": model_facts(opened),
        "usage": usage_dict(answer.stats),
        "stats": stats_dict(answer.stats),
        "sampling": sampling_facts(request),
    }
