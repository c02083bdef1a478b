"""Runs the real `ling` program in a home of its own, for tests of what a person or a script sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import forks

Environment = Mapping[str, str | None]
FULL: Environment = {"LC_ALL": "C.UTF-8"}  # what it is anyway, and the sign that a run is to start in full
COMMAND = [sys.executable, "-m", "ling_local"]
ESC = b"\x1b"


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended: exit code, the bytes on stdout, the text on stderr."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode("utf-8")

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True, slots=True)
class Program:
    """`ling` with an empty home folder and none of the caller's settings."""

    home: Path

    def environment(self, more: Environment | None = None) -> dict[str, str]:
        """The variables of a run; None in `more` takes one away."""
        dropped = ("LING_", "HF_", "XDG_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        env.pop("NO_COLOR", None)
        env |= {"HOME": str(self.home), "TERM": "xterm-256color", "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
        for name, value in (more or {}).items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env

    def __call__(
        self,
        *args: str | bytes | Path,
        stdin: bytes | None = b"",
        env: Environment | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
    ) -> Result:
        """Run to the end. stdin None: /dev/null. In full where the variables are of Python's own start (forks.py)."""
        variables = self.environment(env)
        if starts_in_full(env):
            source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
            done = subprocess.run(
                [*COMMAND, *args], capture_output=True, env=variables, cwd=cwd, timeout=timeout, **source
            )
        else:
            done = forks().run([*map(os.fsdecode, args)], variables, str(cwd or Path.cwd()), stdin, timeout)
        return Result(done.returncode, done.stdout, done.stderr.decode("utf-8"))

    def start(
        self, *args: str | Path, env: Environment | None = None, command: Sequence[str] = COMMAND, **pipes: Any
    ) -> subprocess.Popen:
        """Start in a process group of its own, all three streams piped unless `pipes` says otherwise."""
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
        return subprocess.Popen([*command, *args], env=self.environment(env), start_new_session=True, **streams)

    def config(self, text: str | bytes) -> Path:
        """Write config.toml and return its path."""
        file = self.home / ".config" / "ling" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file


def starts_in_full(env: Environment | None) -> bool:
    """Whether these variables are of Python's own start, so that a fork would not heed them (forks.py)."""
    return any(name.startswith(("PYTHON", "LC_")) for name in env or ())


def command(env: Environment | None = None) -> Sequence[str]:
    """`ling` as a program that takes signals and may sit at a terminal, in a fork where the variables allow it."""
    return COMMAND if starts_in_full(env) else forks().command


def group_is_gone(group: int) -> bool:
    """No process of that group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def watch(program: Program, *args: str | Path, env: Environment | None = None, width: int = 80) -> Any:
    """Start `ling` in a pseudo-terminal; a pexpect child that speaks bytes."""
    import pexpect

    first, *rest = (*command(env), *map(str, args))
    return pexpect.spawn(first, rest, env=program.environment(env), timeout=30, dimensions=(24, width))


def seen(child: Any) -> tuple[bytes, int | None]:
    """All that the terminal shows until the program ends, and its exit code (None: ended by a signal)."""
    import pexpect

    child.expect(pexpect.EOF)
    child.close()
    return child.before, child.exitstatus
