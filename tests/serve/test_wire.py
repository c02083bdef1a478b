"""Bodies read: what is taken over, what is refused and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ling_local.serve.errors import ApiError
from ling_local.serve.wire import check_model, read_chat, read_completion, read_json
from ling_local.settings import Settings, resolve
from ling_local.types import Message, SamplingParams, ToolCall

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def settings(tmp_path) -> Settings:
    return resolve({"temperature": 0.5, "top_k": 3}, {}, tmp_path / "none.toml")


def chat(settings: Settings, **fields: Any):
    return read_chat(read_json(json.dumps({"messages": USER, **fields}).encode()), settings, 11)


def refusal(settings: Settings, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat(settings, **fields)
    assert raised.value.status == 400
    return raised.value


def test_what_a_request_does_not_say_comes_from_the_settings(settings: Settings) -> None:
    call = chat(settings)
    assert call.request.prompt == (Message("user", "hi"),)
    assert call.request.sampling == SamplingParams(0.5, 3, 1.0, 11)
    assert (call.request.max_tokens, call.request.thinking, call.request.tools) == (None, True, ())
    assert (call.is_chat, call.streams, call.include_usage, call.is_parallel) == (True, False, False, True)


def test_zero_and_empty_are_values_and_null_is_none(settings: Settings) -> None:
    call = chat(settings, temperature=0, top_k=0, seed=0, max_tokens=0, stop="", tools=[], n=None, think_budget=0)
    assert call.request.sampling == SamplingParams(0.0, 0, 1.0, 0)
    assert (call.request.max_tokens, call.request.stop, call.request.think_budget) == (0, ("",), 0)
    assert chat(settings, temperature=None).request.sampling.temperature == 0.5
    within = chat(settings, stream_options={"include_usage": None}, chat_template_kwargs={"enable_thinking": None})
    assert (within.include_usage, within.request.thinking) == (False, True)


def test_a_negative_seed_is_a_seed(settings: Settings) -> None:
    seeds = [chat(settings, seed=seed).request.sampling.seed for seed in (-1, -2, 5, 2**70 + 1)]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[2] == 5


def test_both_names_of_the_limit(settings: Settings) -> None:
    assert chat(settings, max_tokens=5).request.max_tokens == 5
    assert chat(settings, max_completion_tokens=7, max_tokens=5).request.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"think_budget": -1}, "think_budget"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"usage": True}}, "stream_options"),
        ({"reasoning_effort": "immense"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": True}, "n"),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(settings: Settings, fields: dict, param: str) -> None:
    error = refusal(settings, **fields)
    assert error.param == param
    assert error.message


def test_fields_that_ask_for_nothing_are_taken(settings: Settings) -> None:
    chat(
        settings,
        n=1,
        presence_penalty=0.0,
        logprobs=False,
        logit_bias={},
        response_format={"type": "text"},
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_key="x",
    )


def test_an_unknown_field_is_refused_with_the_one_that_was_meant(settings: Settings) -> None:
    assert "did you mean temperature?" in refusal(settings, temprature=1).message
    assert refusal(settings, prompt="x").code == "unknown_parameter"


def test_tools_reach_the_template_whole_and_in_order(settings: Settings) -> None:
    other = {"type": "function", "function": {"name": "é", "strict": True}}
    assert [json.loads(tool) for tool in chat(settings, tools=[TOOL, other]).request.tools] == [TOOL, other]
    assert chat(settings, tools=[TOOL], tool_choice="none").request.tools == ()


def test_results_are_put_in_the_order_of_their_calls(settings: Settings) -> None:
    """The template tells results apart by their order only."""
    calls = [{"id": key, "type": "function", "function": {"name": key, "arguments": "{}"}} for key in "abc"]
    results = [{"role": "tool", "tool_call_id": key, "content": key} for key in ("c", "x", "a", "b")]
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results, *USER]
    prompt = chat(settings, messages=messages).request.prompt
    assert [message.content for message in prompt] == ["hi", "", "a", "b", "c", "x", "hi"]
    assert prompt[1].tool_calls == tuple(ToolCall(key, "{}") for key in "abc")


def test_arguments_that_are_no_object_do_not_end_the_conversation(settings: Settings) -> None:
    for given in ('{"a": "cut', "[1]", "plain"):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
        prompt = chat(settings, messages=[*USER, {"role": "assistant", "tool_calls": [call]}]).request.prompt
        assert json.loads(prompt[1].tool_calls[0].arguments) == {"arguments": given}


def test_what_is_nested_too_deeply_is_said_so(settings: Settings) -> None:
    deep = "[" * 50_000
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": deep}}
    assert "nested too deeply" in refusal(settings, messages=[{"role": "assistant", "tool_calls": [call]}]).message
    with pytest.raises(ApiError, match="nested too deeply"):
        read_json(deep.encode())


def test_lone_surrogates_do_not_get_in(settings: Settings) -> None:
    call = chat(settings, messages=[{"role": "user", "content": "\ud800"}], stop="\udfff")
    assert call.request.prompt[0].content == "\ufffd"
    assert call.request.stop == ("\ufffd",)


def test_a_completion_takes_one_text(settings: Settings) -> None:
    assert read_completion({"prompt": "x"}, settings, 1).request.prompt == "x"
    assert read_completion({"prompt": ["x"]}, settings, 1).request.prompt == "x"
    assert read_completion({"prompt": "x"}, settings, 1).request.max_tokens == 256
    assert read_completion({"prompt": "x", "max_tokens": 3, "echo": False, "best_of": 1}, settings, 1).is_chat is False
    for prompt in (None, 5, [1, 2], ["a", "b"], []):
        with pytest.raises(ApiError, match="prompt"):
            read_completion({"prompt": prompt}, settings, 1)
    for more in ({"echo": True}, {"suffix": "x"}, {"messages": []}):
        with pytest.raises(ApiError):
            read_completion({"prompt": "x", **more}, settings, 1)


def test_the_model_may_be_left_out_and_is_compared_without_case() -> None:
    check_model({}, ("ling-demo",))
    check_model({"model": "Ling-Demo"}, ("ling-demo",))
    for wrong in ("gpt", "", 5):
        with pytest.raises(ApiError, match="ling-demo") as raised:
            check_model({"model": wrong}, ("ling-demo",))
        assert (raised.value.status, raised.value.code) == (404, "model_not_found")
