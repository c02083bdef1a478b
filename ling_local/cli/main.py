"""The `ling` program: commands that load when they are used, and one place where every run ends."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from ling_local import __version__, errors, paths
from ling_local.cli import options
from ling_local.cli.output import Output, ReaderLeft, decide, quiet_stdout, reader_may_leave
from ling_local.cli.pages import LingCommand, Page, render, section
from ling_local.errors import LingError, UsageError

# Typer has carried click inside since 0.2x and used the real one before; its base class is found either way.
ClickException = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

COMMANDS = {
    "complete": "Continue a file or a text.",
    "chat": "Talk with the model, or ask one question.",
    "serve": "Answer other programs: the OpenAI protocol on a local port.",
    "bench": "Measure how fast the model runs here.",
    "doctor": "Check this machine and say what to repair.",
    "models": "List the models on this machine.",
    "pull": "Fetch a model, or go on with one that broke off.",
    "config": "Show every setting and where its value comes from.",
    "help": "Explain a command or a topic.",
}
_BEGINNING = 5  # characters of an option, its dashes included, that are no chance
ALIASES = {"list": "models"}  # words that hands know from other tools
_PAGE = Page(
    "[OPTIONS] COMMAND [ARGUMENTS]",
    examples=(
        "ling complete < half.py          continue a file",
        'ling chat -p "What is a deque?"   ask one question',
        "ling chat                        talk",
        "ling COMMAND --help              one command's flags",
    ),
)


class LingGroup(TyperGroup):
    """Commands are imported when they run, so that help and usage errors stay fast."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ling_local.cli.{cmd_name}")
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(cmd_name, cls=LingCommand, help=module.command.__doc__)(module.command)
        made = typer.main.get_command(app)
        made.page = module.PAGE
        made.context_settings = {"help_option_names": ["-h", "--help"]}
        return made

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        if args[0] not in (*COMMANDS, *ALIASES) and not args[0].startswith("-"):
            meant = difflib.get_close_matches(args[0], COMMANDS, n=1, cutoff=0.5)
            tail = f" Did you mean '{meant[0]}'?" if meant else ""
            raise UsageError(f"no such command '{args[0]}'.{tail}", "" if meant else "See `ling --help`.")
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: typer.Context) -> str:
        width = max(40, min(ctx.obj.columns, 100))
        commands = section("Commands:", list(COMMANDS.items()), width)
        return render(ctx, self.help or "", self.params, _PAGE, commands)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with reader_may_leave():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: typer.Context) -> Any:
        with reader_may_leave():
            return super().invoke(ctx)


app = typer.Typer(
    cls=LingGroup,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Ling-3.0 models on this machine: complete code, chat, measure.",
)


@app.callback()
@options.flags("color", "verbose", "debug", "offline")
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Ling-3.0 models on this machine: complete code, chat, measure."""
    if version:
        ctx.obj.print(f"ling {__version__}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        ctx.obj.print_help(ctx.get_help())


class _Ended(SystemExit):
    """A signal asked us to end; unwinding releases the engine."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended(128 + number)


def run(argv: list[str] | None = None) -> int:
    """Run one command line. Returns the exit code; nothing raised inside comes out, whatever it is."""
    argv = sys.argv[1:] if argv is None else argv
    _occupy_standard_descriptors()
    paths.ensure_home()
    output = decide(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, _end)
    code = _outcome(lambda: _command(argv, output), output)
    if code == errors.EXIT_OK and sys.stdout is not None:  # what is still to be written may find the reader gone
        code = _outcome(lambda: sys.stdout.flush() or code, output)
    return code


def _occupy_standard_descriptors() -> None:
    """Where we were started with one of 0, 1, 2 closed, no file or pipe of ours may come to lie there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free one, which is this


def _command(argv: list[str], output: Output) -> int:
    result = typer.main.get_command(app).main(argv, "ling", standalone_mode=False, obj=output)
    if result is False:  # the command did its work, and its answer is no
        return errors.EXIT_FAILED
    return result if isinstance(result, int) and result is not True else errors.EXIT_OK


def _outcome(work: Callable[[], int], output: Output) -> int:
    """The exit code of work: every way to end has its line here."""
    try:
        try:
            return work()
        except ClickException as error:
            output.error(UsageError(usage_message(error), _usage_hint(error)))
            return errors.EXIT_USAGE
        except LingError as error:
            if output.debug:
                traceback.print_exc()
            output.error(error)
            return error.exit_code
        except KeyboardInterrupt:
            output.clear_progress()
            return errors.EXIT_INTERRUPTED
        except _Ended as end:
            return int(end.code or 0)
        except (ReaderLeft, BrokenPipeError):
            raise ReaderLeft from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                quiet_stdout()
                output.json = False
                output.error(LingError(f"cannot write: {error.strerror}"))
                return errors.EXIT_FAILED
            output.error(LingError(*_unexpected(error, output)))
            return errors.EXIT_FAILED
    except ReaderLeft:
        quiet_stdout()
        return errors.EXIT_BROKEN_PIPE


def _unexpected(error: Exception, output: Output) -> tuple[str, str]:
    """One line for a failure nobody foresaw, and the place of its trace."""
    last = traceback.format_exception_only(error)[-1].strip()
    message = f"something unforeseen went wrong: {last}"
    if output.debug:
        traceback.print_exc()
        return message, ""
    file = paths.state_dir() / "last-failure.txt"
    try:
        with os.fdopen(paths.open_private(file), "w", encoding="utf-8", errors="backslashreplace") as target:
            target.write(f"ling {__version__}, Python {sys.version}\n")
            traceback.print_exc(file=target)
    except OSError:
        return message, "Run it again with --debug to see the trace."
    return message, f"The trace is in {file}"


def usage_message(error: Any) -> str:
    """What the parser has to say, in our words and with the nearest match."""
    context = getattr(error, "ctx", None)
    name = getattr(error, "option_name", "")
    if type(error).__name__ == "NoSuchOption":
        known = _option_names(context)
        # a beginning says more than letters in common: --repeat is --repetitions, not --temperature
        same = [option for option in known if option[:_BEGINNING] == name[:_BEGINNING]]
        meant = difflib.get_close_matches(name, same or known, n=1, cutoff=0.4 if same else 0.6)
        return f"no such option '{name}'." + (f" Did you mean '{meant[0]}'?" if meant else "")
    if type(error).__name__ == "BadOptionUsage":
        return f"option '{name}' " + ("takes no value" if "not take" in error.format_message() else "needs a value")
    text = error.format_message().rstrip(".")
    text = re.sub(r"^Got unexpected extra argument\S* \((.*)\)$", r"unexpected argument: \1", text, flags=re.S)
    return text[:1].lower() + text[1:]


def _usage_hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    if context is None or "Did you mean" in usage_message(error):
        return ""
    return f"See `{context.command_path} --help`."


def _option_names(context: Any) -> list[str]:
    params = context.command.params if context is not None else []
    return [
        "--help",
        *(name for param in params for name in (*param.opts, *param.secondary_opts) if name[:1] == "-"),
    ]
