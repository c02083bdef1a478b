"""Scripts of the scripted engine, read and checked, and the tokens they define. Format: scripted.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ling_local import errors
from ling_local.errors import EngineError, LingError, ModelError, NonFinite

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|role_end|>",
    "<role>",
    "</role>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<|mask|>",
)
_NUM_BYTES = 256
_HINT = "`ling help scripted` describes the format."
_ACTIONS = ("fail", "exit", "kill", "hang")
_CONTENT = ("tokens", "text", "hex")
_STEP_KEYS = {*_CONTENT, *_ACTIONS, "cut", "per_step", "drafted", "delay_ms", "repeat", "stderr"}
_NAMES = {"model", "eos", "stderr", "template", "clock"}
_FILE_KEYS = {*_NAMES, "context", "block", "prefill_ms", "load", "turns"}


@dataclass(frozen=True, slots=True)
class Failure:
    """What goes wrong, and how: kind is a name of errors.py, of a built-in exception, or "nan"."""

    kind: str
    message: str = ""
    hint: str = ""

    def exception(self, step: int, position: int) -> BaseException:
        """The exception to raise. step counts from 1, position is the index of the token that was due."""
        if self.kind == "nan":
            message = f"logits of step {step} (position {position}) hold NaN or Inf"
            return NonFinite(message, "Try again; if it stays, check the model's files.")
        message = self.message or f"the script fails at step {step}"
        kind = getattr(errors, self.kind, None)
        if kind is not None:
            return kind(message, self.hint)
        return _BUILTINS[self.kind](message)


_BUILTINS: dict[str, type[BaseException]] = {
    kind.__name__: kind for kind in (MemoryError, OSError, RuntimeError, ValueError)
}


@dataclass(frozen=True, slots=True)
class Step:
    """One scripted step: the ids it would commit, or an action instead of them."""

    ids: tuple[int, ...] = ()
    drafted: int = 0
    delay_s: float = 0.0
    repeat: int = 1
    stderr: str = ""
    fail: Failure | None = None
    exit: int | None = None
    kill: str | None = None
    hang: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request plays. loop: without an end of turn, over and over."""

    steps: tuple[Step, ...]
    loop: bool = False
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """A whole script file, checked, its tokens numbered."""

    model: str
    context: int
    block: int
    virtual: bool
    eos: int
    load_s: float
    load_failure: Failure | None
    stderr: str
    template: str | None
    turns: tuple[Turn, ...]
    pieces: tuple[bytes, ...]

    @property
    def vocab_size(self) -> int:
        """Bytes, control tokens and pieces."""
        return _NUM_BYTES + len(CONTROL_TOKENS) + len(self.pieces)


@dataclass(frozen=True)
class ScriptedTokens:
    """The tokens of a script: ids 0-255 are bytes, then the control tokens, then the script's own pieces.

    Text is encoded a byte an id, so that encoding what a script said gives other ids than it said, as a real
    tokenizer may.
    """

    pieces: tuple[bytes, ...] = ()
    control: Mapping[str, int] = field(
        default_factory=lambda: {text: _NUM_BYTES + i for i, text in enumerate(CONTROL_TOKENS)}
    )

    @classmethod
    def load(cls, path: Path) -> ScriptedTokens:
        """The tokens of a script file. Raises ModelError."""
        return cls(read_script(path).pieces)

    @property
    def size(self) -> int:
        return _NUM_BYTES + len(CONTROL_TOKENS) + len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Never a control id. Lone surrogates become U+FFFD."""
        return list(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode())

    def token_bytes(self, token_id: int) -> bytes:
        """b"" for an id past the end."""
        if 0 <= token_id < _NUM_BYTES:
            return bytes([token_id])
        if self.is_control(token_id):
            return CONTROL_TOKENS[token_id - _NUM_BYTES].encode()
        index = token_id - _NUM_BYTES - len(CONTROL_TOKENS)
        return self.pieces[index] if 0 <= index < len(self.pieces) else b""

    def is_control(self, token_id: int) -> bool:
        return _NUM_BYTES <= token_id < _NUM_BYTES + len(CONTROL_TOKENS)

    def decode(self, ids: Sequence[int]) -> str:
        """All bytes at once, control tokens spelt out."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def read_script(path: Path) -> Script:
    """Read and check a script file. Raises ModelError with the place in the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"script {path}: {error.strerror or error}", _HINT) from None
    except ValueError as error:
        raise ModelError(f"script {path} is not JSON: {error}", _HINT) from None
    try:
        return _Reader().script(data, Path(path).stem)
    except _Bad as bad:
        raise ModelError(f"script {path}: {bad}", _HINT) from None


class _Bad(Exception):
    """A fault in a script, said from the inside out: each level puts its place in front."""


class _Reader:
    """Numbers the pieces in the order in which the file names them."""

    def __init__(self) -> None:
        self.pieces: dict[bytes, int] = {}
        self.block = 0

    def script(self, data: Any, name: str) -> Script:
        data = {"turns": [data]} if isinstance(data, list) else _object(data, _FILE_KEYS)
        self.block = _number(data, "block", 0, whole=True)
        if data.get("clock", "real") not in ("real", "virtual"):
            raise _Bad('"clock" is "real" or "virtual"')
        for key in _NAMES & set(data):
            if not isinstance(data[key], str):
                raise _Bad(f'"{key}" should be a string')
        load = _object(data.get("load", {}), {"delay_ms", "fail"})
        turns = tuple(self.turn(turn, index, data) for index, turn in enumerate(_list(data, "turns"), 1))
        if not turns:
            raise _Bad('"turns" is empty')
        return Script(
            model=data.get("model", name),
            context=_number(data, "context", 8192, whole=True),
            block=self.block,
            virtual=data.get("clock") == "virtual",
            eos=self.token({"control": data.get("eos", "<|role_end|>")}),
            load_s=_number(load, "delay_ms", 0) / 1000,
            load_failure=_failure(load["fail"]) if "fail" in load else None,
            stderr=data.get("stderr", ""),
            template=data.get("template"),
            turns=turns,
            pieces=tuple(self.pieces),
        )

    def turn(self, data: Any, index: int, defaults: dict[str, Any]) -> Turn:
        data = {"steps": data} if isinstance(data, list) else data
        prefill_ms = _number(defaults, "prefill_ms", 0)
        try:
            data = _object(data, {"steps", "loop", "prefill_ms"})
            steps: list[Step] = []
            for number, step in enumerate(_list(data, "steps"), 1):
                try:
                    steps.extend(self.step(step))
                except _Bad as bad:
                    raise _Bad(f"step {number}: {bad}") from None
            loop = bool(data.get("loop", False))
            if loop and not any(step.ids for step in steps):
                raise _Bad("it loops, but no step has a token")
            return Turn(tuple(steps), loop, _number(data, "prefill_ms", prefill_ms) / 1000)
        except _Bad as bad:
            raise _Bad(f"turn {index}: {bad}") from None

    def step(self, data: Any) -> Iterator[Step]:
        if isinstance(data, str):
            data = {"tokens": [data]}
        elif isinstance(data, list):
            data = {"tokens": data}
        elif isinstance(data, dict) and len(data) == 1 and {"control", "id"} & set(data):
            data = {"tokens": [data]}
        data = _object(data, _STEP_KEYS)
        if sum(key in data for key in (*_CONTENT, *_ACTIONS)) != 1:
            raise _Bad(f"needs exactly one of {', '.join((*_CONTENT, *_ACTIONS))}")
        delay_s = _number(data, "delay_ms", 0) / 1000
        stderr = str(data.get("stderr", ""))
        if any(key in data for key in _ACTIONS):
            fail = _failure(data["fail"]) if "fail" in data else None
            code = _number(data, "exit", 0, whole=True) if "exit" in data else None
            kill = data.get("kill")
            if kill is not None and kill not in signal.Signals.__members__:
                raise _Bad(f"{kill!r} is no signal; SIGKILL is one")
            yield Step((), 0, delay_s, 1, stderr, fail, code, kill, bool(data.get("hang")))
            return
        groups = [tuple(map(self.token, _list(data, "tokens")))] if "tokens" in data else self.cut(data)
        repeat = _number(data, "repeat", 1, whole=True)
        steps = []
        for ids in groups:
            if not ids:
                raise _Bad("has no tokens")
            drafted = _number(data, "drafted", max(self.block, len(ids) - 1), whole=True)
            if drafted < len(ids) - 1:
                raise _Bad(f"{drafted} drafted, but {len(ids)} tokens need at least {len(ids) - 1}")
            steps.append(Step(ids, drafted, delay_s, 1, stderr))
        if len(steps) == 1:
            only = steps[0]
            yield Step(only.ids, only.drafted, delay_s, repeat, stderr)
        else:
            for _ in range(repeat):
                yield from steps

    def cut(self, data: dict[str, Any]) -> list[tuple[int, ...]]:
        """Ids of a text or of bytes, cut into tokens of `cut` characters or bytes, `per_step` to a step."""
        whole: str | bytes = _text(data["text"]) if "text" in data else _hex(data["hex"])
        size = _number(data, "cut", max(1, len(whole)), whole=True)
        per_step = _number(data, "per_step", 1, whole=True)
        if size < 1 or per_step < 1:
            raise _Bad('"cut" and "per_step" are at least 1')
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        ids = [self.piece(part.encode() if isinstance(part, str) else part) for part in parts]
        return [tuple(ids[i : i + per_step]) for i in range(0, len(ids), per_step)]

    def token(self, data: Any) -> int:
        if isinstance(data, str):
            return self.piece(_text(data).encode())
        match data:
            case {"hex": value}:
                return self.piece(_hex(value))
            case {"control": str(spelling)} if spelling in CONTROL_TOKENS:
                return _NUM_BYTES + CONTROL_TOKENS.index(spelling)
            case {"control": other}:
                raise _Bad(f"{other!r} is no control token; known: {' '.join(CONTROL_TOKENS)}")
            case {"id": int(token_id)} if token_id >= 0:
                return token_id
        raise _Bad(f"{data!r} is no token: a string, hex, control or id is")

    def piece(self, data: bytes) -> int:
        if not data:
            raise _Bad("an empty token")
        if len(data) == 1:
            return data[0]
        return self.pieces.setdefault(data, _NUM_BYTES + len(CONTROL_TOKENS) + len(self.pieces))


def _object(data: Any, keys: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Bad(f"{data!r} where an object with {', '.join(sorted(keys))} should be")
    if unknown := sorted(set(data) - keys):
        raise _Bad(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(keys))}")
    return data


def _list(data: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(data.get(key), list):
        raise _Bad(f'"{key}" should be a list')
    return data[key]


def _number(data: dict[str, Any], key: str, default: float, *, whole: bool = False) -> Any:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < 0:
        raise _Bad(f'"{key}" should be a {"whole " if whole else ""}number, not negative')
    return value


def _text(data: Any) -> str:
    if not isinstance(data, str) or any("\ud800" <= char <= "\udfff" for char in data):
        raise _Bad(f"{data!r} should be text (bytes that are no text: hex)")
    return data


def _hex(data: Any) -> bytes:
    try:
        return bytes.fromhex(data)
    except (TypeError, ValueError):
        raise _Bad(f"{data!r} should be hex digits") from None


def _failure(data: Any) -> Failure:
    data = {"kind": data} if isinstance(data, str) else _object(data, {"kind", "message", "hint"})
    kind = data.get("kind", EngineError.__name__)
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    known = ["nan", *_BUILTINS, *(value.__name__ for value in classes if issubclass(value, LingError))]
    if kind not in known:
        raise _Bad(f"{kind!r} is no kind of failure; known: {' '.join(known)}")
    return Failure(kind, str(data.get("message", "")), str(data.get("hint", "")))
