"""The protocol as the `openai` client sees it, on the scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from program import Program
from served import THOUGHT, Server, scripted, tool_call

Write = Callable[..., Path]
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "mode": {"type": "integer"}}},
    },
}


@pytest.fixture
def client(ling: Program, write_script: Write) -> Callable[..., Any]:
    """A server on a script of these turns, and a client of it."""

    @contextmanager
    def start(*turns: Any, args: tuple[str, ...] = (), **fields: Any) -> Iterator[tuple[OpenAI, Server]]:
        with (
            scripted(ling, write_script(*turns, **fields), *args) as server,
            OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=60) as made,
        ):
            yield made, server

    return start


def joined(chunks: list[ChatCompletionChunk], name: str) -> str:
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return "".join(getattr(delta, name, None) or "" for delta in deltas)


# --- whole answers


def test_an_answer_with_its_thinking_apart(client) -> None:
    with client(["let me ", "see", THOUGHT, "The ", "answer"], args=("--think",)) as (api, _):
        answer = api.chat.completions.create(model="script", messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "The answer", "stop")
    assert choice.message.reasoning_content == "let me see"
    assert choice.message.tool_calls is None
    assert answer.object == "chat.completion"
    assert answer.model == "script"
    assert answer.id.startswith("chatcmpl-")


def test_usage_has_the_cached_tokens_and_the_accept_figures(client) -> None:
    with client([["a", "b", "c"], ["d", "e"]], block=3) as (api, _):
        first = api.chat.completions.create(model="script", messages=HELLO).usage
        again = api.chat.completions.create(model="script", messages=HELLO).usage
    assert first.completion_tokens == 6  # the end of the turn is a token, too
    assert first.total_tokens == first.prompt_tokens + 6
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details.cached_tokens == first.prompt_tokens - 1
    assert first.completion_tokens_details.reasoning_tokens == 0
    assert {name: first.ling[name] for name in ("steps", "drafted", "accepted")} == {
        "steps": 3,
        "drafted": 9,
        "accepted": 3,
    }
    assert first.ling["accept_length"] == 2.0
    assert first.ling["ttft_ms"] > 0


def test_the_limit_inside_thinking_leaves_the_answer_empty(client) -> None:
    """C153."""
    with client({"steps": ["hm "], "loop": True}, args=("--think",)) as (api, _):
        choice = api.chat.completions.create(model="script", messages=HELLO, max_tokens=5).choices[0]
        chunks = list(api.chat.completions.create(model="script", messages=HELLO, max_tokens=5, stream=True))
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.reasoning_content == "hm " * 5
    assert (joined(chunks, "content"), joined(chunks, "reasoning_content")) == ("", "hm " * 5)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_tool_calls_have_a_field_of_their_own(client) -> None:
    turn = ["I write.\n", *tool_call("write_file", ("path", 'a "b".txt'), ("mode", "420"))]
    with client(turn) as (api, _):
        choice = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I write."
    (call,) = choice.message.tool_calls
    assert call.function.name == "write_file"
    assert call.function.arguments == '{"path": "a \\"b\\".txt", "mode": 420}'
    assert call.id.startswith("call_")


def test_a_call_opened_inside_thinking_still_counts(client) -> None:
    """C157."""
    with client(["I should write", *tool_call("write_file", ("path", "x"))], args=("--think",)) as (api, _):
        choice = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "I should write"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == '{"path": "x"}'


def test_arguments_may_spell_what_utf8_cannot(client) -> None:
    with client(tool_call("write_file", ("mode", '"\\ud83d"'))) as (api, _):
        (call,) = (
            api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL]).choices[0].message.tool_calls
        )
    assert call.function.arguments == '{"mode": "\ud83d"}'


def test_several_calls_or_one_as_the_client_wants(client) -> None:
    turn = [*tool_call("write_file", ("path", "a")), "\n", *tool_call("write_file", ("path", "b"))]
    with client(turn) as (api, _):
        both = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL]).choices[0]
        one = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL], parallel_tool_calls=False)
        after = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL]).choices[0]
    assert [call.function.arguments for call in both.message.tool_calls] == ['{"path": "a"}', '{"path": "b"}']
    assert len({call.id for call in both.message.tool_calls}) == 2
    assert [call.function.arguments for call in one.choices[0].message.tool_calls] == ['{"path": "a"}']
    assert one.choices[0].finish_reason == "tool_calls"
    assert len(after.message.tool_calls) == 2


def test_without_tools_what_looks_like_a_call_is_content(client) -> None:
    with client(tool_call("f", ("a", "1"))) as (api, _):
        choice = api.chat.completions.create(model="script", messages=HELLO).choices[0]
        chosen = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL], tool_choice="none").choices[
            0
        ]
    for message in (choice.message, chosen.message):
        assert message.tool_calls is None
        assert message.content.startswith("<tool_call>f\n<arg_key>a</arg_key>")
    assert choice.finish_reason == "stop"


def test_a_call_that_the_limit_cut_cannot_be_taken_for_a_whole_one(client) -> None:
    turn = tool_call("write_file", ("path", "a very long name of a file"))
    with client(turn, [THOUGHT, "ok"]) as (api, _):
        choice = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL], max_tokens=10).choices[0]
        assert choice.finish_reason == "length"
        (call,) = choice.message.tool_calls
        assert call.function.arguments == '{"path": "a very lo'
        # and the conversation can go on, though the client sends it back
        told = {"role": "tool", "tool_call_id": call.id, "content": "not valid JSON"}
        again = [*HELLO, choice.message.model_dump(exclude_none=True), told]
        assert (
            api.chat.completions.create(model="script", messages=again, tools=[TOOL]).choices[0].message.content == "ok"
        )


def test_stop_strings_end_the_answer(client) -> None:
    with client(["one ", "two ", "three"]) as (api, _):
        answer = api.chat.completions.create(model="script", messages=HELLO, stop=["two", "never"])
    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].finish_reason == "stop"


# --- streams


def test_a_stream_is_what_strict_clients_want(client) -> None:
    """C145: the openai client's own models check each chunk; here is what they leave open."""
    with client(["hm", THOUGHT, "an", "swer"], args=("--think",)) as (api, server):
        chunks = list(api.chat.completions.create(model="script", messages=HELLO, stream=True))
        raw = server.chat(stream=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert (joined(chunks, "reasoning_content"), joined(chunks, "content")) == ("hm", "answer")
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert all("finish_reason" in choice for chunk in raw.chunks for choice in chunk["choices"])
    assert all("usage" not in chunk for chunk in raw.chunks)
    assert raw.body.endswith(b"data: [DONE]\n\n")


def test_usage_comes_in_a_last_chunk_if_it_is_asked_for(client) -> None:
    with client(["a", "b"]) as (api, server):
        options = {"include_usage": True}
        stream = api.chat.completions.create(model="script", messages=HELLO, stream=True, stream_options=options)
        chunks = list(stream)
        raw = server.chat(stream=True, stream_options=options).chunks
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all("usage" in chunk for chunk in raw)
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_calls_stream_as_they_are_made(client) -> None:
    turn = ["ok", *tool_call("write_file", ("path", "name " * 20), ("mode", "7")), *tool_call("write_file")]
    with client(turn) as (api, _):
        whole = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL]).choices[0].message
        stream = api.chat.completions.create(model="script", messages=HELLO, tools=[TOOL], stream=True)
        chunks = list(stream)
        with api.chat.completions.stream(model="script", messages=HELLO, tools=[TOOL]) as helper:
            gathered = helper.get_final_completion().choices[0].message
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    for index, call in enumerate(whole.tool_calls):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.function.arguments for piece in mine) == call.function.arguments
        assert mine[0].function.name == "write_file"
        assert mine[0].id
        assert all(piece.id is None for piece in mine[1:])
    assert len([piece for piece in pieces if piece.index == 0]) > 20
    assert [call.function.arguments for call in gathered.tool_calls] == [
        call.function.arguments for call in whole.tool_calls
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_with_tools_a_plain_answer_streams_like_without(client) -> None:
    """C147."""
    with client({"steps": [{"tokens": ["word "], "delay_ms": 1, "repeat": 30}]}) as (api, _):
        counts = []
        for tools in ([], [TOOL]):
            more = {"tools": tools} if tools else {}
            stream = api.chat.completions.create(model="script", messages=HELLO, stream=True, **more)
            counts.append(sum(bool(chunk.choices[0].delta.content) for chunk in stream))
    assert counts[0] == counts[1] == 30


def test_a_rune_that_spans_tokens_comes_once_and_whole(client) -> None:
    """C001."""
    with client([{"hex": "f09f8c8de2988e", "cut": 1}, "\u2028line"]) as (api, server):
        chunks = list(api.chat.completions.create(model="script", messages=HELLO, stream=True))
        raw = server.chat(stream=True)
    assert joined(chunks, "content") == "🌍☎\u2028line"
    assert raw.body.isascii()


# --- completions and models


def test_a_completion_of_raw_text(client) -> None:
    with client(["def f", "(x):", "\n    return", " x"]) as (api, _):
        answer = api.completions.create(model="script", prompt="# a function\n", stop="return")
        chunks = list(api.completions.create(model="script", prompt=["# a function\n"], stream=True))
        cut = api.completions.create(model="script", prompt="x", max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
            api.completions.create(model="script", prompt="", stream=True)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("def f(x):\n    ", "stop")
    assert answer.usage.prompt_tokens == len("# a function\n")
    assert "".join(chunk.choices[0].text for chunk in chunks) == "def f(x):\n    return x"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert cut.choices[0].finish_reason == "length"


def test_a_completion_has_a_limit_of_its_own_and_a_chat_may_fill_the_context(client) -> None:
    with client({"steps": ["a"], "loop": True}, context=600) as (api, _):
        completion = api.completions.create(model="script", prompt="x").usage
        chat = api.chat.completions.create(model="script", messages=HELLO).usage
    assert completion.completion_tokens == 256
    assert chat.total_tokens == 600


def test_the_list_of_models(client) -> None:
    with client(["x"]) as (api, _):
        (model,) = api.models.list().data
        assert (model.id, model.object, model.owned_by) == ("script", "model", "ling")
        assert model.context_length == 8192
        assert api.models.retrieve("script").id == "script"
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("gpt-99")


# --- errors


@pytest.mark.parametrize(
    ("fields", "error", "code", "param"),
    [
        ({"model": "gpt-99"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"messages": [{"role": "user", "content": "x" * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            None,
        ),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        ({"temperature": 999}, openai.BadRequestError, None, "temperature"),
        ({"n": 2}, openai.BadRequestError, "unsupported_value", "n"),
        ({"tool_choice": "required"}, openai.BadRequestError, "unsupported_value", "tool_choice"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "unknown_parameter", "temprature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_request_is_said(client, fields, error, code, param, stream: bool) -> None:
    asked = {"model": "script", "messages": HELLO, "stream": stream, **fields}
    with client(["x"]) as (api, _):
        with pytest.raises(error) as raised:
            api.chat.completions.create(**asked)
        assert api.chat.completions.create(model="script", messages=HELLO).choices[0].message.content == "x"
    assert (raised.value.code, raised.value.param) == (code, param)
    assert raised.value.type == "invalid_request_error"
    assert raised.value.body["message"]


def test_an_engine_that_fails_is_a_500_and_the_next_request_is_answered(client) -> None:
    with client(["a", {"fail": "nan"}], ["a", {"fail": "nan"}], ["fine"]) as (api, server):
        with pytest.raises(openai.InternalServerError, match="NaN or Inf"):
            api.chat.completions.create(model="script", messages=HELLO)
        got = []
        with pytest.raises(openai.APIError, match="NaN or Inf"):  # noqa: PT012
            for chunk in api.chat.completions.create(model="script", messages=HELLO, stream=True):
                got.append(chunk)
        assert joined(got, "content") == "a"
        assert api.chat.completions.create(model="script", messages=HELLO).choices[0].message.content == "fine"
        server.wait_line("ling: logits of step 2")


def test_thinking_is_switched_by_request(client) -> None:
    with client(["x"], args=("--think",)) as (api, _):

        def tokens(**fields: Any) -> int:
            return api.chat.completions.create(model="script", messages=HELLO, **fields).usage.prompt_tokens

        on = tokens()
        assert tokens(reasoning_effort="none") != on
        assert tokens(reasoning_effort="low") == on
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert tokens(extra_body=off) == tokens(reasoning_effort="none")


def test_a_thinking_budget_closes_the_thinking(client) -> None:
    with client({"steps": ["hm "], "loop": True}, ["answer"], args=("--think",)) as (api, _):
        choice = api.chat.completions.create(model="script", messages=HELLO, extra_body={"think_budget": 4}).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("hm " * 4, "answer")
