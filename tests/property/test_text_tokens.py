"""Arbitrary text through tokenizer and template: bytes kept, control ids only from the template."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import ling_local
from ling_local.text.channels import parse_tool_call
from ling_local.text.stream import StreamText
from ling_local.text.template import ChatTemplate
from ling_local.types import Message, ToolCall
from text.samples import CONTROL, ling_tokenizer, tokenizer_without_tags

TEMPLATE = ChatTemplate.load(Path(ling_local.__file__).parent / "data" / "demo")
FRAGMENTS = [
    *CONTROL,
    "<",
    ">",
    "|>",
    "<|",
    "role",
    "role>",
    "</",
    "\n",
    " ",
    "detailed thinking on",
    "\ue000",
    "\U000f0000",
]

nasty = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


@given(nasty)
def test_text_round_trips_through_ids(text: str) -> None:
    for tokens in (ling_tokenizer(), tokenizer_without_tags()):
        ids = tokens.encode(text)
        assert not any(map(tokens.is_control, ids))
        assert tokens.decode(ids) == text
        assert b"".join(map(tokens.token_bytes, ids)) == text.encode()


@given(st.lists(st.integers(min_value=0, max_value=ling_tokenizer().size + 3), max_size=30))
def test_streamed_tokens_equal_decode_of_all_ids(ids: list[int]) -> None:
    tokens, stream = ling_tokenizer(), StreamText()
    streamed = "".join(stream.push(tokens.token_bytes(i)) for i in ids) + stream.close()
    assert streamed == tokens.decode(ids)


@given(st.lists(nasty, min_size=5, max_size=5), st.booleans())
@settings(max_examples=150)
def test_no_message_gives_a_control_id(texts: list[str], thinking: bool) -> None:
    def conversation(texts: list[str]) -> tuple[Message, ...]:
        system, user, answer, key, result = texts
        call = ToolCall(key or "f", json.dumps({key: answer, key + "n": [system]}))
        return (
            Message("system", system),
            Message("user", user),
            Message("assistant", answer or "x", tool_calls=(call,)),
            Message("tool", result),
            Message("user", answer),
        )

    tokens = ling_tokenizer()
    tools = (json.dumps({"name": texts[0], "parameters": {texts[1]: texts[2]}}),)
    ids = TEMPLATE.encode(tokens, conversation(texts), thinking=thinking, tools=tools)
    plain = TEMPLATE.encode(tokens, conversation(["x"] * 5), thinking=thinking, tools=tools)
    assert [i for i in ids if tokens.is_control(i)] == [i for i in plain if tokens.is_control(i)]
    assert tokens.decode(ids) == TEMPLATE.render(conversation(texts), thinking=thinking, tools=tools)


@given(nasty, nasty, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_splicing_changes_no_text_but_the_lines_around_the_thinking(
    answer: str, reasoning: str, with_end: bool, rng: object
) -> None:
    tokens = ling_tokenizer()
    ids = [*tokens.encode(reasoning), tokens.control["</think>"], *tokens.encode(answer)]
    ids += [tokens.control["<|role_end|>"]] * with_end
    turns = (Message("user", "q"), Message("assistant", answer, reasoning, ids=tuple(ids)), Message("user", "r"))
    encoded = TEMPLATE.encode(tokens, turns, thinking=True)
    prompt = TEMPLATE.encode(tokens, turns[:1], thinking=True)
    if tokens.decode(encoded) != TEMPLATE.render(turns, thinking=True):
        assert reasoning != reasoning.strip("\n")
        assert encoded[: len(prompt) + len(ids)] == [*prompt, *ids]  # what was generated stands as it was
    if reasoning == reasoning.strip("\n") and reasoning and answer == answer.lstrip("\n"):
        assert encoded[: len(prompt) + len(ids)] == [*prompt, *ids]


@given(st.dictionaries(st.text("abc_", min_size=1), st.text(max_size=30) | st.integers() | st.none() | st.booleans()))
def test_a_written_call_parses_back(arguments: dict[str, object]) -> None:
    arguments = {k: v for k, v in arguments.items() if not isinstance(v, str) or "<" not in v}
    call = ToolCall("name", json.dumps(arguments))
    fields = {k: {"type": "string" if isinstance(v, str) else "number"} for k, v in arguments.items()}
    tool = json.dumps({"name": "name", "parameters": {"properties": fields}})
    text = TEMPLATE.render((Message("assistant", "", tool_calls=(call,)),), thinking=True, add_generation_prompt=False)
    written = text[text.index("<tool_call>") : text.rindex("<|role_end|>")]
    assert json.loads(parse_tool_call(written, [tool]).arguments) == arguments
