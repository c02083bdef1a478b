"""What a setting is: one row of the table in settings_table.py, and how its value is shown."""

from __future__ import annotations

import json
import math
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


def show(value: Any) -> str:
    """A setting's value as a person writes it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False)
    return f"{value:.15g}" if isinstance(value, float) else str(value)
