"""A talk as a file for people or programs: Markdown, or OpenAI-shaped JSON; and read back from the latter."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ling_local import paths
from ling_local.errors import LingError, UsageError
from ling_local.text.clean import Cleaned, read_text
from ling_local.text.messages import messages_from_openai
from ling_local.types import Message

_MOST_BYTES = 8 << 20


def named(text: str) -> Path:
    """The file that a person names. UsageError."""
    if "\0" in text:
        raise UsageError("a file name holds no NUL")
    return paths.user_path(text)


def write(file: Path, system: str | None, messages: Sequence[Message]) -> None:
    """Write the talk, 0600; `.json` by the file's ending, Markdown else. LingError; nothing is overwritten."""
    text = as_json(system, messages) if file.suffix.lower() == ".json" else as_markdown(system, messages)
    try:
        if not file.parent.is_dir():
            raise LingError(f"there is no folder {file.parent}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(file, flags, paths.PRIVATE_FILE_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as target:
            target.write(text)
    except FileExistsError:
        raise LingError(f"{file} is there already", "Give another name.") from None
    except OSError as error:
        raise LingError(f"{file} cannot be written: {error.strerror}") from None


def as_json(system: str | None, messages: Sequence[Message]) -> str:
    """A list of messages as model servers take them."""
    items: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            item["reasoning_content"] = message.reasoning
        if message.tool_calls:
            item["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        items.append(item)
    return json.dumps(items, ensure_ascii=False, indent=2) + "\n"


def as_markdown(system: str | None, messages: Sequence[Message]) -> str:
    """The talk to be read; thinking is left out."""
    parts = [] if system is None else [f"## System\n\n{system}"]
    for message in messages:
        calls = "\n\n".join(f"    {call.name}({call.arguments})" for call in message.tool_calls)
        body = "\n\n".join(part for part in (message.content.strip("\n"), calls) if part)
        parts.append(f"## {'You' if message.role == 'user' else 'Ling'}\n\n{body}")
    return "\n\n".join(parts) + "\n"


def read_json(file: Path) -> tuple[str | None, tuple[Message, ...]]:
    """System message and turns of a JSON file: a list, or an object with "messages". LingError, UsageError."""
    try:
        data = json.loads(read_file(file).text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    items = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UsageError(f"{file} holds no list of messages")
    messages = messages_from_openai(items)
    system = messages[0].content if messages and messages[0].role == "system" else None
    talk = messages[1:] if system is not None else messages
    roles = [message.role for message in talk]
    if len(roles) % 2 or any(role != ("user", "assistant")[at % 2] for at, role in enumerate(roles)):
        raise UsageError(f"{file}: question and answer must take turns, from the first question to the last answer")
    return system, talk


def read_file(file: Path) -> Cleaned:
    """A text file's content, as the model gets it. LingError, UsageError."""
    try:
        if file.exists() and not file.is_file():  # to open a pipe would wait for who writes to it
            raise LingError(f"{file} is {'a folder' if file.is_dir() else 'no regular file'}", "Give a file.")
        with open(file, "rb") as source:
            data = source.read(_MOST_BYTES + 1)
    except OSError as error:
        raise LingError(f"{file} cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise LingError(f"{file} is larger than {_MOST_BYTES >> 20} MiB", "Give a part of it.")
    return read_text(data, str(file))
