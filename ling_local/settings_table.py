"""The one table of settings: name, type, default, flag, LING_ variable, help. Values are settled in settings.py."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "LING_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    kind      "int", "float", "bool", "str", "choice" or "list" (of str)
    flags     its options on the command line; a bool may give "--yes/--no"
    low, high bounds, both allowed; shown: the default in words where the value says little
    kept      may stand in config.toml and in a LING_ variable; else it is a flag only
    secret    its value is never shown
    """

    name: str
    kind: str
    default: Any
    flags: tuple[str, ...]
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    shown: str = ""
    kept: bool = True
    secret: bool = False

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The long option, as a message names it."""
        return next(part for part in self.flags[0].split("/") if part.startswith("--"))

    @property
    def default_text(self) -> str:
        """The default as a person reads it."""
        return self.shown or show(self.default)


ROWS = (
    Setting(
        "model",
        "str",
        None,
        ("--model", "-m"),
        "Checkpoint folder, or a name that `ling models` lists.",
        "NAME",
        shown="ling-demo, which ships with ling",
    ),
    Setting(
        "max_tokens",
        "int",
        None,
        ("--max-tokens", "-n"),
        "Tokens to generate at most; 0 generates nothing.",
        "N",
        low=0,
        shown="256 for complete, 1024 for chat; serve: 256, and what the context holds",
    ),
    Setting("temperature", "float", 0.0, ("--temperature", "-t"), "0 is greedy.", "X", low=0, high=100),
    Setting("top_p", "float", 1.0, ("--top-p",), "Nucleus sampling; 1 is off.", "X", low=0, high=1),
    Setting("top_k", "int", 0, ("--top-k",), "Sample from the K best tokens; 0 is off.", "K", low=0),
    Setting(
        "seed",
        "int",
        None,
        ("--seed",),
        "The same seed gives the same text.",
        "N",
        low=0,
        high=2**63 - 1,
        shown="a fresh one each run",
    ),
    Setting(
        "stop",
        "list",
        (),
        ("--stop",),
        "End before this text; may be given more than once.",
        "TEXT",
        shown="none",
    ),
    Setting(
        "until",
        "choice",
        "block",
        ("--until",),
        "block: end where the code block that the text left open ends; eof: only the model ends it.",
        choices=("block", "eof"),
    ),
    Setting("system", "str", None, ("--system", "-s"), "System message of a chat.", "TEXT", shown="none"),
    Setting("think", "bool", True, ("--think/--no-think",), "Let the model think before it answers."),
    Setting(
        "think_budget",
        "int",
        None,
        ("--think-budget",),
        "Thinking that has taken this many tokens is closed, and the answer begins.",
        "N",
        low=0,
        shown="none",
    ),
    Setting(
        "show_thinking",
        "bool",
        None,
        ("--show-thinking/--hide-thinking",),
        "Write the thinking to stderr.",
        shown="on a terminal only",
    ),
    Setting(
        "stats",
        "bool",
        None,
        ("--stats/--no-stats",),
        "One line of figures on stderr at the end.",
        shown="in an interactive chat only",
    ),
    Setting("plain", "bool", False, ("--plain/--screen",), "Talk line by line, without redrawing anything."),
    Setting(
        "history",
        "bool",
        True,
        ("--history/--no-history",),
        "Keep talks and typed lines on disk, for you alone to read.",
    ),
    Setting(
        "resume",
        "str",
        None,
        ("--resume", "-r"),
        "Go on with an earlier talk: its name, or last.",
        "NAME",
        shown="none",
        kept=False,
    ),
    Setting(
        "stdin_wait",
        "float",
        1.5,
        ("--stdin-wait",),
        "Seconds to wait for data on a silent stdin beside -p; 0 leaves stdin alone, inf waits for its end.",
        "SECONDS",
        low=0,
    ),
    Setting(
        "speculation",
        "choice",
        "auto",
        ("--speculation",),
        "Drafter; auto: the best that the model has. The text is the same with each (`ling help speculation`).",
        choices=("auto", "dspark", "mtp", "off"),
    ),
    Setting(
        "block",
        "int",
        None,
        ("--block",),
        "Drafts per step, at most the drafter's block size.",
        "N",
        low=1,
        shown="the drafter's own",
    ),
    Setting("device", "choice", "cpu", ("--device",), "Where to run.", choices=("cpu", "cuda")),
    Setting(
        "gpus",
        "str",
        None,
        ("--gpus",),
        "GPUs to use as one, by number; 1, 2, 4 or 8 of them.",
        "0,1,...",
        shown="as many as the model needs",
    ),
    Setting(
        "dtype",
        "choice",
        None,
        ("--dtype",),
        "Type to compute in; a GPU computes in bfloat16.",
        choices=("float32", "bfloat16"),
        shown="float32 on a CPU, bfloat16 on a GPU",
    ),
    Setting(
        "ctx",
        "int",
        0,
        ("--ctx",),
        "Tokens of context to hold.",
        "N",
        low=0,
        shown="0, the model's own limit, or on a GPU what fits",
    ),
    Setting("threads", "int", 0, ("--threads",), "CPU threads.", "N", low=0, high=1024, shown="0, chosen by ling"),
    Setting(
        "engine",
        "choice",
        "native",
        ("--engine",),
        "native; sglang: a second engine, for GPUs; scripted: play a script (`ling help scripted`).",
        choices=("native", "sglang", "scripted"),
    ),
    Setting(
        "sglang_arg",
        "list",
        (),
        ("--sglang-arg",),
        "With --engine sglang: a flag of SGLang's own; may be given more than once.",
        "KEY=VALUE",
        shown="none",
    ),
    Setting(
        "explain",
        "bool",
        False,
        ("--explain",),
        "With --engine sglang: show what would be started, and end.",
        kept=False,
    ),
    Setting(
        "engines",
        "str",
        None,
        ("--engine",),
        "Engine to measure, or several with commas: native, sglang, scripted.",
        "LIST",
        shown="native",
        kept=False,
    ),
    Setting(
        "color",
        "choice",
        "auto",
        ("--color",),
        "Colour on stdout and stderr.",
        choices=("auto", "always", "never"),
    ),
    Setting("quiet", "bool", False, ("--quiet/--no-quiet", "-q"), "No notices and warnings on stderr, errors only."),
    Setting(
        "verbose",
        "bool",
        False,
        ("--verbose/--no-verbose", "-v"),
        "More lines on stderr: which model, from where, how it runs.",
    ),
    Setting("debug", "bool", False, ("--debug/--no-debug",), "Show the trace of a failure."),
    Setting(
        "offline",
        "bool",
        False,
        ("--offline/--online",),
        "Use what is on this machine, fetch nothing. HF_HUB_OFFLINE does the same.",
    ),
    Setting("prompt", "str", None, ("--prompt", "-p"), "The prompt.", "TEXT", shown="none", kept=False),
    Setting("json", "bool", False, ("--json",), "JSON on stdout.", kept=False),
    Setting(
        "revision",
        "str",
        "main",
        ("--revision",),
        "Branch, tag or commit of the repository.",
        "NAME",
        kept=False,
    ),
    Setting(
        "verify",
        "bool",
        False,
        ("--verify",),
        "Hash the files that are here already, too, and fetch the damaged ones again.",
        kept=False,
    ),
    Setting(
        "timeout",
        "float",
        60.0,
        ("--timeout",),
        "Seconds that torch and the driver may take to answer.",
        "SECONDS",
        low=0.1,
        kept=False,
    ),
    Setting("all", "bool", False, ("--all", "-a"), "List what can be fetched, too.", kept=False),
    Setting(
        "format",
        "choice",
        "table",
        ("--format",),
        "What stdout gets.",
        choices=("table", "json", "csv", "md"),
        kept=False,
    ),
    Setting(
        "prompt_tokens",
        "int",
        0,
        ("--prompt-tokens",),
        "Tokens of prompt, about.",
        "N",
        low=0,
        shown="0, the task's own prompt",
        kept=False,
    ),
    Setting("tokens", "int", 128, ("--tokens",), "Tokens per repetition.", "N", low=1, kept=False),
    Setting("repetitions", "int", 5, ("--repetitions", "-r"), "Timed runs.", "N", low=1, kept=False),
    Setting("warmup", "int", 1, ("--warmup",), "Runs before the timed ones.", "N", low=0, kept=False),
    Setting(
        "task",
        "choice",
        "code",
        ("--task",),
        "What is generated.",
        choices=("code", "prose", "chat"),
        kept=False,
    ),
    Setting(
        "modes",
        "str",
        None,
        ("--modes",),
        "Drafters to measure side by side, with commas: off, auto, mtp, dspark.",
        "LIST",
        shown="off and the model's drafter",
        kept=False,
    ),
    Setting(
        "full_width",
        "bool",
        False,
        ("--full-width",),
        "Verify every draft of every step, also where plain steps would be faster.",
        kept=False,
    ),
    Setting(
        "dummy",
        "choice",
        None,
        ("--dummy",),
        "Random weights in a published shape in place of a model: times are real, the text is not.",
        choices=("tiny", "flash"),
        shown="none",
        kept=False,
    ),
    Setting(
        "layers", "int", 0, ("--layers",), "With --dummy: only so many layers.", "N", low=1, shown="all", kept=False
    ),
    Setting(
        "shard",
        "int",
        1,
        ("--shard",),
        "With --dummy: one rank's part of so many, without the exchange between them.",
        "N",
        low=1,
        kept=False,
    ),
    Setting(
        "accept_pattern",
        "str",
        None,
        ("--accept-pattern",),
        "Force how many drafts each step accepts, with commas, and from the beginning again.",
        "LIST",
        shown="none",
        kept=False,
    ),
    Setting(
        "breakdown",
        "bool",
        False,
        ("--breakdown",),
        "With --dummy: time each op of a step instead, cold, beside its floor.",
        kept=False,
    ),
    Setting(
        "check",
        "bool",
        False,
        ("--check",),
        "Compare the ids with and without drafts on every bundled prompt; exit code 1 if one differs.",
        kept=False,
    ),
    Setting(
        "check_blocks",
        "choice",
        "own",
        ("--check-blocks",),
        "Block sizes that --check tries: the one in force, or all from 1 up.",
        choices=("own", "all"),
        kept=False,
    ),
    Setting(
        "host",
        "str",
        "127.0.0.1",
        ("--host",),
        "Address to listen on; one that other machines reach needs a key.",
        "HOST",
    ),
    Setting("port", "int", 5464, ("--port",), "Port to listen on; 0 takes a free one.", "N", low=0, high=65535),
    Setting(
        "api_key",
        "str",
        None,
        ("--api-key",),
        "Clients have to show this key. A flag can be seen by others here: rather use the variable.",
        "KEY",
        shown="none",
        secret=True,
    ),
    Setting("queue", "int", 8, ("--queue",), "Requests that may wait; more are refused.", "N", low=0, high=10_000),
    Setting(
        "allow_host",
        "list",
        (),
        ("--allow-host",),
        "Another name that this server is reached by; may be given more than once.",
        "NAME",
        shown="none",
    ),
    Setting(
        "allow_origin",
        "list",
        (),
        ("--allow-origin",),
        "Web pages of this origin may read the answers; may be given more than once.",
        "URL",
        shown="none",
    ),
)

TABLE: Mapping[str, Setting] = {row.name: row for row in ROWS}
KEPT: Mapping[str, Setting] = {row.name: row for row in ROWS if row.kept}


def show(value: Any) -> str:
    """A setting's value as a person writes it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) else str(value)
