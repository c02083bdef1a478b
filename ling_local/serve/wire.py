"""Bodies of OpenAI requests as complete `Request`s. Pure; a field without effect here is refused, never swallowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ling_local.errors import UsageError
from ling_local.serve.errors import ApiError, bad_request
from ling_local.settings import TABLE, Settings, check
from ling_local.text.clean import check_text
from ling_local.text.messages import messages_from_openai
from ling_local.types import Message, Request, SamplingParams

COMPLETION_TOKENS = 256  # of a completion whose length nobody chose; a chat may fill the context
MAX_STOPS = 64
_SEED_BITS = 2**63 - 1

_COMMON = {"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls"}
_CHAT |= {"reasoning_effort", "chat_template_kwargs", "think_budget"}
_COMPLETION = _COMMON | {"prompt"}
# They say something about the request, not about the answer.
_REMARKS = {"user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
# What we do not do: accepted with the value that asks for nothing.
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "functions": [],
    "function_call": "none",
    "store": False,
    "verbosity": "medium",
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read. is_parallel: the model may make several tool calls in a turn."""

    request: Request
    is_chat: bool
    streams: bool = False
    include_usage: bool = False
    is_parallel: bool = True


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", None, "invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object", None, "invalid_json")
    return {name: value for name, value in body.items() if value is not None}  # null: not given


def check_model(body: Mapping[str, Any], names: Sequence[str]) -> None:
    """The model of the request, if it names one, is the one served. Raises ApiError."""
    given = body.get("model", names[0])
    if not isinstance(given, str) or given.lower() not in {name.lower() for name in names}:
        message = f"no model {given!r} here; this server has {names[0]!r}"
        raise ApiError(404, message, "model_not_found", "model")


def read_chat(body: Mapping[str, Any], settings: Settings, seed: int) -> Call:
    """A chat completion. seed is taken where the request has none. Raises ApiError."""
    _check_fields(body, _CHAT)
    tools = _tools(body)
    named = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    budget = body.get("think_budget", settings["think_budget"])
    request = Request(
        prompt=_messages(body),
        sampling=_sampling(body, settings, seed),
        max_tokens=_number(named, body[named], "max_tokens") if named in body else settings["max_tokens"],
        stop=_stop(body, settings),
        thinking=_thinking(body, settings["think"]),
        think_budget=None if budget is None else _number("think_budget", budget),
        draft=settings["speculation"] != "off",
        tools=tools,
    )
    is_parallel = _flag(body, "parallel_tool_calls", True)
    return Call(request, True, *_streaming(body), is_parallel=is_parallel)


def read_completion(body: Mapping[str, Any], settings: Settings, seed: int) -> Call:
    """A completion of raw text. seed is taken where the request has none. Raises ApiError."""
    _check_fields(body, _COMPLETION)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise bad_request("prompt is not a text; one prompt a request, and no token ids", "prompt")
    limit = body.get("max_tokens", settings["max_tokens"])
    request = Request(
        prompt=check_text(prompt),
        sampling=_sampling(body, settings, seed),
        max_tokens=COMPLETION_TOKENS if limit is None else _number("max_tokens", limit),
        stop=_stop(body, settings),
        draft=settings["speculation"] != "off",
    )
    return Call(request, False, *_streaming(body))


def _check_fields(body: Mapping[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if name in _NEUTRAL and name not in known:
            neutral = _NEUTRAL[name]
            if value != neutral or isinstance(value, bool) is not isinstance(neutral, bool):
                message = f"{name} is not supported here; leave it out, or give {json.dumps(neutral)}"
                raise bad_request(message, name, "unsupported_value")
        elif name not in known and name not in _REMARKS:
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            tail = f"; did you mean {meant[0]}?" if meant else ""
            raise bad_request(f"unknown field {name!r}{tail}", name, "unknown_parameter")


def _streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """(answer in a stream, with a chunk of usage at its end)"""
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise bad_request("stream_options is not an object", "stream_options")
    if unknown := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        raise bad_request(f"unknown field {unknown[0]!r} in stream_options", "stream_options", "unknown_parameter")
    if _flag(options, "include_obfuscation", False):
        message = "stream_options.include_obfuscation is not supported here"
        raise bad_request(message, "stream_options", "unsupported_value")
    return _flag(body, "stream", False), _flag(options, "include_usage", False)


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_request(f"{name} is neither true nor false", name)
    return value


def _number(name: str, value: Any, setting: str = "") -> Any:
    """A number within the bounds of the setting of that name."""
    row = TABLE[setting or name]
    kinds = int if row.kind == "int" else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise bad_request(f"{name} is not a {'whole ' if row.kind == 'int' else ''}number", name)
    try:
        return check(row, float(value) if row.kind == "float" else value, name)
    except (UsageError, OverflowError) as error:
        raise bad_request(str(error), name) from None


def _sampling(body: Mapping[str, Any], settings: Settings, seed: int) -> SamplingParams:
    given = {name: body.get(name, settings[name]) for name in ("temperature", "top_k", "top_p")}
    asked = body.get("seed", settings["seed"])
    if asked is None:
        asked = seed
    elif isinstance(asked, int) and not isinstance(asked, bool):
        asked &= _SEED_BITS  # a negative one is a seed like any other
    return SamplingParams(
        temperature=_number("temperature", given["temperature"]),
        top_k=_number("top_k", given["top_k"]),
        top_p=_number("top_p", given["top_p"]),
        seed=_number("seed", asked),
    )


def _stop(body: Mapping[str, Any], settings: Settings) -> tuple[str, ...]:
    stop = body.get("stop", settings["stop"])
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else None
    if stops is None or not all(isinstance(item, str) for item in stops):
        raise bad_request("stop is neither a text nor a list of texts", "stop")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop holds {len(stops)} texts, {MAX_STOPS} at most are possible", "stop")
    return tuple(map(check_text, stops))


def _thinking(body: Mapping[str, Any], default: bool) -> bool:
    """chat_template_kwargs.enable_thinking, else reasoning_effort, else the setting."""
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        raise bad_request(f"reasoning_effort is not one of {', '.join(_EFFORTS)}", "reasoning_effort")
    thinking = default if effort is None else effort != "none"
    extra = body.get("chat_template_kwargs", {})
    if not isinstance(extra, dict):
        raise bad_request("chat_template_kwargs is not an object", "chat_template_kwargs")
    if unknown := sorted(set(extra) - {"enable_thinking"}):
        message = f"chat_template_kwargs: only enable_thinking is known, not {unknown[0]!r}"
        raise bad_request(message, "chat_template_kwargs", "unknown_parameter")
    return _flag(extra, "enable_thinking", thinking)


def _tools(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The schemas to offer, as the template takes them; none where tool_choice says so."""
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise bad_request("tools is not a list", "tools")
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise bad_request(f"tool {number} is not of type 'function'", "tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_request(f"tool {number} has no name", "tools")
        schema = function.get("parameters")
        schema = {} if schema is None else schema
        if not isinstance(schema, dict) or not isinstance(schema.get("properties") or {}, dict):
            raise bad_request(f"tool {number}: parameters is not a JSON schema of an object", "tools")
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        message = "tool_choice can be 'auto' or 'none': the model cannot be forced to make a call"
        raise bad_request(message, "tool_choice", "unsupported_value")
    return tuple(json.dumps(tool, ensure_ascii=False) for tool in tools) if choice == "auto" else ()


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    items = body.get("messages")
    if not isinstance(items, list) or not items:
        raise bad_request("messages is not a list with at least one message", "messages")
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise bad_request(f"message {number} is not an object", "messages")
        if not isinstance(item.get("tool_calls") or [], list):
            raise bad_request(f"message {number}: tool_calls is not a list", "messages")
    try:
        return messages_from_openai([_readable(item) for item in _results_in_order(items)])
    except UsageError as error:
        raise bad_request(str(error), "messages") from None
    except RecursionError:
        raise bad_request("messages are nested too deeply", "messages") from None


def _results_in_order(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of a turn's calls in the order of the calls: the template tells them apart by nothing else."""
    ordered: list[dict[str, Any]] = []
    place: dict[Any, int] = {}
    run: list[dict[str, Any]] = []
    for item in [*items, {}]:
        if item.get("role") == "tool":
            run.append(item)
            continue
        ordered += sorted(run, key=lambda result: place.get(str(result.get("tool_call_id")), len(place)))
        run = []
        calls = item.get("tool_calls") or []
        place = {str(call.get("id")): at for at, call in enumerate(calls) if isinstance(call, dict)}
        ordered.append(item)
    return ordered[:-1]


def _readable(item: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have arguments that are an object: a call that the limit cut comes back to us with half a
    JSON text, and the conversation should be able to go on; the text then stands as one argument."""
    calls = item.get("tool_calls")
    if not calls:
        return item
    return {**item, "tool_calls": [_readable_call(call) for call in calls]}


def _readable_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        whole = isinstance(json.loads(function["arguments"] or "{}"), dict)
    except ValueError:
        whole = False
    arguments = function["arguments"] if whole else json.dumps({"arguments": function["arguments"]})
    return {**call, "function": {**function, "arguments": arguments}}
