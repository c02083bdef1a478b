"""The value of every setting in settings_table.py, and where it came from.

Order: flag, LING_ variable, config.toml, the model's generation_config.json, our default. This module and
paths.py are the only ones that read the environment.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ling_local import paths
from ling_local.errors import ConfigError, UsageError
from ling_local.settings_table import KEPT, PREFIX, ROWS, TABLE, Setting, show

__all__ = ["KEPT", "TABLE", "Setting", "Settings", "nearest", "parse", "resolve", "show", "with_model"]

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # of all Hugging Face tools; ours beat them
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list of texts",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved values by name, with the source of each and the warnings that reading them gave."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_default(self, name: str) -> bool:
        return self.sources[name] == "default"

    def changed(self, source: str | None = None, /, **values: Any) -> Settings:
        """These settings with some values that come from source; None: where they came from stays what it was."""
        sources = self.sources if source is None else {**self.sources, **dict.fromkeys(values, source)}
        return replace(self, values={**self.values, **values}, sources=sources)


@dataclass(slots=True)
class _Layer:
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, source: str) -> None:
        if name not in self.values:  # layers are read from the strongest to the weakest
            self.values[name], self.sources[name] = value, source


def nearest(word: str, words: Mapping[str, Any] | tuple[str, ...] | list[str]) -> str:
    """The known word that word was probably meant to be, or "": one that begins with it, else a close one."""
    longer = [known for known in words if len(word) > 1 and known.startswith(word)]
    if longer:
        return min(longer, key=len)
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return matches[0] if matches else ""


def parse(setting: Setting, text: str, where: str = "") -> Any:
    """The value that text spells, for flags, variables and `/set`. Raises UsageError naming where."""
    where = where or setting.flag
    text = text if setting.kind in ("str", "list") else text.strip()
    if setting.kind == "list":
        return (text,)
    if setting.kind == "bool":
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise UsageError(f"{where}: '{text}' is not true or false")
    try:
        value = {"int": int, "float": float}.get(setting.kind, str)(text)
    except ValueError:
        raise UsageError(f"{where}: '{text}' is not {_KINDS[setting.kind]}") from None
    return check(setting, value, where)


def check(setting: Setting, value: Any, where: str) -> Any:
    """value if it lies within the setting's bounds or choices. Raises UsageError naming where."""
    if setting.kind == "choice" and value not in setting.choices:
        meant = nearest(value, setting.choices)
        tail = f" Did you mean '{meant}'?" if meant else ""
        raise UsageError(f"{where}: '{value}' is not one of {', '.join(setting.choices)}.{tail}")
    if setting.kind in ("int", "float") and not setting.low <= value <= setting.high:
        bound = f"at least {setting.low}" if value < setting.low else f"at most {setting.high}"
        if math.isnan(value):
            bound = "a number"
        raise UsageError(f"{where}: {value} is out of range: must be {bound}")
    return value


def resolve(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Join the layers. flags holds what the command line gave (None: not given; texts are parsed here).

    Raises UsageError or ConfigError; both name the flag, the variable, or the file and line.
    """
    environ = os.environ if environ is None else environ
    layer = _Layer()
    for name, value in (flags or {}).items():
        if name in TABLE and value is not None and value not in ([], ()):  # a list flag that was not given is empty
            layer.put(name, _from_flag(TABLE[name], value), f"flag {TABLE[name].flag}")
    _read_environment(layer, environ)
    _read_file(layer, file or paths.config_file())
    for row in ROWS:
        layer.put(row.name, row.default, "default")
    return Settings(layer.values, layer.sources, tuple(layer.warnings))


def _from_flag(setting: Setting, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    return parse(setting, value) if isinstance(value, str) else check(setting, value, setting.flag)


def _read_environment(layer: _Layer, environ: Mapping[str, str]) -> None:
    by_variable = {row.variable: row for row in KEPT.values()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        if variable in by_variable:
            row = by_variable[variable]
            try:
                layer.put(row.name, parse(row, environ[variable], variable), variable)
            except UsageError as error:
                raise ConfigError(error.message, error.hint) from None
        else:
            layer.warnings.append(f"unknown variable {variable}{_did_you_mean(variable, by_variable)}")
    theirs = next((variable for variable in OFFLINE_VARIABLES if environ.get(variable)), "")
    if theirs and environ[theirs].lower() in _TRUE:
        layer.put("offline", True, theirs)


def _did_you_mean(word: str, words: Mapping[str, Any]) -> str:
    meant = nearest(word, words)
    return f"; did you mean {meant}?" if meant else ""


def _read_file(layer: _Layer, file: Path) -> None:
    text = _file_text(file)
    if text is None:
        return
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits and 5,000 brackets are none of its own
        raise ConfigError(f"{file}: not valid TOML: {error}", "Correct that line, or move the file away.") from None
    for key, value in document.items():
        line = _line_of(text, key)
        where = f"{file}:{line}"
        row = KEPT.get(key.replace("-", "_"))
        if row is not None:
            layer.put(row.name, _from_toml(row, value, f"{where}: {key}"), f"config.toml:{line}")
        elif isinstance(value, dict):
            inside = [name for name in value if name.replace("-", "_") in KEPT]
            tail = f"; write {inside[0]} at the top of the file, outside any section" if inside else ""
            layer.warnings.append(f"{where}: unknown section [{key}]{tail}")
        else:
            layer.warnings.append(f"{where}: unknown key {key}{_did_you_mean(key, KEPT)}")


def _file_text(file: Path) -> str | None:
    """The file's text without a BOM, or None where there is no file."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder, not a file", "Move it away.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "Correct its permissions.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8", "Save the file as UTF-8.") from None


def _line_of(text: str, key: str) -> int:
    """The line on which key is set or opens a section; 1 where a rare spelling hides it."""
    name = re.escape(key)
    pattern = re.compile(rf"^\s*(?:\[+\s*)?[\"']?{name}[\"']?\s*(?:=|\.|\])")
    for number, line in enumerate(text.splitlines(), start=1):
        if pattern.match(line):
            return number
    return 1


def _from_toml(row: Setting, value: Any, where: str) -> Any:
    wanted: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
        "str": (str,),
        "choice": (str,),
    }
    if row.kind == "list":
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif isinstance(value, wanted[row.kind]) and (row.kind == "bool" or not isinstance(value, bool)):
        try:
            return check(row, float(value) if row.kind == "float" else value, where)
        except UsageError as error:
            raise ConfigError(error.message) from None
        except OverflowError:  # a whole number that no float holds
            raise ConfigError(f"{where}: {value} is out of range") from None
    kind = _KINDS.get(row.kind) or f"one of {', '.join(row.choices)}"
    raise ConfigError(f"{where} must be {kind}, not {value!r}")


def with_model(settings: Settings, folder: Path) -> Settings:
    """Fill in what nobody chose from the model's generation_config.json: temperature, top_p and top_k.

    `"do_sample": false` means temperature 0. A broken file is a warning and changes nothing.
    """
    file = folder / "generation_config.json"
    try:
        raw = json.loads(file.read_bytes())
        if not isinstance(raw, dict):
            raise ValueError("not an object")
        found = {name: raw[name] for name in ("temperature", "top_p", "top_k") if raw.get(name) is not None}
        if raw.get("do_sample") is False:
            found["temperature"] = 0.0
        found = {name: _from_toml(TABLE[name], value, f"{file}: {name}") for name, value in found.items()}
    except FileNotFoundError:
        return settings
    except (OSError, ValueError, ConfigError) as error:
        return replace(settings, warnings=(*settings.warnings, f"{file} is ignored: {error}"))
    taken = {name: value for name, value in found.items() if settings.is_default(name)}
    return settings.changed("generation_config.json", **taken)


@dataclass(frozen=True, slots=True)
class TerminalHints:
    """What the environment says about the terminal. dumb: no escape sequence of any kind is understood."""

    dumb: bool
    no_color: bool


def terminal_hints(environ: Mapping[str, str] | None = None) -> TerminalHints:
    """Read TERM and NO_COLOR (which counts only if it is not empty)."""
    environ = os.environ if environ is None else environ
    return TerminalHints(
        dumb=environ.get("TERM", "") in ("", "dumb", "unknown"), no_color=bool(environ.get("NO_COLOR"))
    )
