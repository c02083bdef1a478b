"""Conversations at the edges: OpenAI-shaped dicts in, and the plain values that a chat template sees out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ling_local.errors import UsageError
from ling_local.text.clean import check_text
from ling_local.types import Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"tool": "tool", "function": "tool"}


def messages_from_openai(items: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """OpenAI-shaped dicts as Messages. UsageError names the message that cannot be read.

    Lists of text parts are joined; arguments may be an object or its JSON text; an assistant's content that
    opens with <think>...</think> is split into reasoning and answer.
    """
    return tuple(_message(item, f"message {number}") for number, item in enumerate(items, 1))


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise UsageError(f"{where}: unknown role {item.get('role')!r}", "use system, user, assistant or tool")
    content = _flatten(item.get("content"), where)
    if role != "assistant":
        return Message(role, content)
    given = item.get("reasoning_content", item.get("reasoning"))
    reasoning = None if given is None else _flatten(given, where)
    if reasoning is None and content.startswith("<think>") and "</think>" in content:
        reasoning, content = content.removeprefix("<think>").split("</think>", 1)
        reasoning, content = reasoning.strip("\n"), content.lstrip("\n")
    calls = tuple(_call(call, where) for call in item.get("tool_calls") or ())
    return Message(role, content, reasoning, calls)


def _flatten(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return check_text(content)
    if not isinstance(content, list | tuple):
        raise UsageError(f"{where}: content is neither text nor a list of text parts")
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UsageError(f"{where}: a content part of type {kind!r} is not supported", "send text parts")
        texts.append(check_text(text))
    return "".join(texts)


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}: a tool call has no function name")
    given = function.get("arguments")
    text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    text = text or "{}"
    json_object(text, f"{where}: arguments of {function['name']!r}")
    return ToolCall(check_text(function["name"]), check_text(text))


def json_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object that a text holds; UsageError, beginning with `what`, where it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} are not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{what} are not a JSON object")
    return value


def template_values(
    messages: Sequence[Message], tools: Sequence[str], thinking: bool, add_generation_prompt: bool
) -> dict[str, Any]:
    """What a template sees, named as by Hugging Face. UsageError for unknown roles and bad JSON."""
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        if message.role not in ("system", "user", "assistant", "tool"):
            raise UsageError(f"message {number}: unknown role {message.role!r}")
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            turn["reasoning_content"] = message.reasoning
        if message.tool_calls:
            turn["tool_calls"] = [_call_values(call, f"message {number}") for call in message.tool_calls]
        turns.append(turn)
    schemas = [json_object(tool, f"tool {number}: its fields") for number, tool in enumerate(tools, 1)]
    values = {
        "messages": turns,
        "tools": schemas or None,
        "add_generation_prompt": add_generation_prompt,
        "enable_thinking": thinking,
        "thinking_option": "on" if thinking else "off",
    }
    return map_strings(values, check_text)


def _call_values(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = json_object(call.arguments, f"{where}: arguments of {call.name!r}")
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON-like value with every string changed, keys too. UsageError where it is nested too deeply."""
    try:
        return _mapped(value, change)
    except RecursionError:
        raise UsageError("the tools or tool arguments are nested too deeply") from None


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value
