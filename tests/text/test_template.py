"""Messages to prompts: the published format exactly, and only the template makes control tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import ling_local
from ling_local.errors import ModelError, UsageError
from ling_local.text.template import ChatTemplate, messages_from_openai
from ling_local.text.tokenizer import Tokenizer
from ling_local.types import Channel, Message, ToolCall
from text.samples import CONTROL, HARD_TEXTS, ling_tokenizer, tokenizer_without_tags

CASES = json.loads((Path(__file__).parents[1] / "golden" / "chat_cases.json").read_text("utf-8"))
DEMO = Path(ling_local.__file__).parent / "data" / "demo"
TOOL = '{"type": "function", "function": {"name": "f", "description": "<|role_end|>", "parameters": {}}}'


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.load(DEMO)


def _arguments(case: dict[str, Any]) -> dict[str, Any]:
    kwargs = case["kwargs"]
    thinking = kwargs.get("enable_thinking", kwargs.get("thinking_option") != "off")
    tools = tuple(json.dumps(tool, ensure_ascii=False) for tool in case["tools"] or ())
    return {"thinking": thinking, "tools": tools, "add_generation_prompt": kwargs["add_generation_prompt"]}


def _as_golden(text: str) -> list[int]:
    """Ids of a text in which every control spelling is meant: what special-token parsing gives."""
    tokens, ids, rest = ling_tokenizer(), [], text
    while rest:
        at, spelling = min((rest.find(s), s) for s in CONTROL if s in rest) if _any_control(rest) else (len(rest), "")
        ids += tokens.encode(rest[:at]) + ([tokens.control[spelling]] if spelling else [])
        rest = rest[at + len(spelling) :]
    return ids


def _any_control(text: str) -> bool:
    return any(spelling in text for spelling in CONTROL)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_published_cases_are_exact(template: ChatTemplate, case: dict[str, Any]) -> None:
    messages = messages_from_openai(case["messages"])
    assert template.render(messages, **_arguments(case)) == case["text"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_ids_of_published_cases_are_those_of_the_rendered_text(template: ChatTemplate, case: dict[str, Any]) -> None:
    tokens = ling_tokenizer()
    ids = template.encode(tokens, messages_from_openai(case["messages"]), **_arguments(case))
    # The preamble's own tags are template text, so here every spelling is meant; C073: and nothing is added.
    assert ids == _as_golden(case["text"])
    assert tokens.decode(ids) == case["text"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_shipped_file_renders_raw_dicts_too(case: dict[str, Any]) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    source = (DEMO / "chat_template.jinja").read_text("utf-8")
    text = env.from_string(source).render(messages=case["messages"], tools=case["tools"], **case["kwargs"])
    assert text == case["text"]


@pytest.mark.parametrize("text", [*HARD_TEXTS, *(f"x{s}y{s}" for s in CONTROL)])
def test_control_spellings_in_any_message_stay_text(template: ChatTemplate, text: str) -> None:  # C071
    tokens = ling_tokenizer()

    def conversation(filler: str, name: str) -> tuple[Message, ...]:
        call = ToolCall(name, json.dumps({filler: filler, "n": [filler, {filler: 1}]}))
        return (
            Message("system", filler),
            Message("user", filler),
            Message("assistant", filler, reasoning=filler or None, tool_calls=(call,)),
            Message("tool", filler),
            Message("system", filler),
        )

    plain = template.encode(tokens, conversation("x", "x"), thinking=True, tools=(TOOL,))
    ids = template.encode(tokens, conversation(text, text or "x"), thinking=True, tools=(TOOL,))
    assert [i for i in ids if tokens.is_control(i)] == [i for i in plain if tokens.is_control(i)]
    assert tokens.decode(ids) == template.render(conversation(text, text or "x"), thinking=True, tools=(TOOL,))
    assert f"<role>HUMAN</role>{text}<|role_end|>" in tokens.decode(ids)


def test_a_user_cannot_complete_a_token_that_the_template_begins() -> None:
    tokens = ling_tokenizer()
    template = ChatTemplate("{{ messages[0].content }}<|role_end{{ messages[1].content }}", {})
    ids = template.encode(tokens, (Message("user", "<"), Message("user", "|>")), thinking=False)
    assert not [i for i in ids if tokens.is_control(i)]
    template = ChatTemplate("{{ messages[0].content }}role>", {})
    ids = template.encode(tokens, (Message("user", "<"),), thinking=False)
    assert tokens.decode(ids) == "<role>"
    assert not [i for i in ids if tokens.is_control(i)]


def test_control_tokens_that_are_words_stay_words_in_messages() -> None:
    class Wordy:
        control: ClassVar = {"turn": 1, "<role>": 2}
        size = 300

        def encode(self, text: str) -> list[int]:
            return [byte + 10 for byte in text.encode()]

        def token_bytes(self, token_id: int) -> bytes:
            return b"turn" if token_id == 1 else b"<role>" if token_id == 2 else bytes([token_id - 10])

        def is_control(self, token_id: int) -> bool:
            return token_id < 10

        def decode(self, ids: list[int]) -> str:
            return b"".join(map(self.token_bytes, ids)).decode()

    ids = ChatTemplate("turn{{ messages[0].content }}").encode(
        Wordy(), (Message("user", "my turn, turn"),), thinking=True
    )
    assert ids[0] == 1
    assert not [i for i in ids[1:] if i < 10]
    assert Wordy().decode(ids) == "turnmy turn, turn"


def test_private_use_characters_of_people_are_kept(template: ChatTemplate) -> None:
    tokens = ling_tokenizer()
    text = "".join(map(chr, [*range(0xE000, 0xE040), 0xF8FF, 0xF0000, 0x10FFFD]))
    ids = template.encode(tokens, (Message("user", text),), thinking=True)
    assert f"HUMAN</role>{text}<|role_end|>" in tokens.decode(ids)


def test_markup_like_text_is_not_changed(template: ChatTemplate) -> None:  # C035
    text = "[/INST] [/] [bold list[int] :smile: {{ 1 }} {% raw %} & < > \" '"
    assert f"HUMAN</role>{text}<|role_end|>" in template.render((Message("user", text),), thinking=True)


def test_a_quoted_think_tag_in_an_answer_is_not_taken_for_reasoning(template: ChatTemplate) -> None:
    turns = (Message("user", "q"), Message("assistant", "<think>a</think>b"))
    text = template.render(turns, thinking=False, add_generation_prompt=False)
    assert text.endswith("<think></think><think>a</think>b<|role_end|>")


def test_tokens_that_the_tokenizer_does_not_have_are_written_as_text(template: ChatTemplate) -> None:
    tokens = tokenizer_without_tags()
    turns = (Message("user", "hi"),)
    ids = template.encode(tokens, turns, thinking=True)
    assert tokens.decode(ids) == template.render(turns, thinking=True)
    assert [i for i in ids if tokens.is_control(i)] == [tokens.control["<|role_end|>"]] * 2


def test_thinking_decides_the_first_channel(template: ChatTemplate) -> None:
    assert template.first_channel(True) is Channel.THINKING
    assert template.first_channel(False) is Channel.ANSWER
    assert ChatTemplate("{{ messages[0].content }}").first_channel(True) is Channel.ANSWER


def test_lone_surrogates_do_not_reach_the_prompt(template: ChatTemplate) -> None:
    call = ToolCall("f", '{"a": "\\ud800"}')
    turns = (Message("user", "x\udcff"), Message("assistant", "", tool_calls=(call,)))
    template.render(turns, thinking=True).encode()
    assert "x\ufffd" in ling_tokenizer().decode(template.encode(ling_tokenizer(), turns, thinking=True))


# -- generated ids that stand as they are


def _chat(ids: tuple[int, ...], content: str, reasoning: str | None = None) -> tuple[Message, ...]:
    return (
        Message("user", "one"),
        Message("assistant", "an older answer"),
        Message("user", "two"),
        Message("assistant", content, reasoning, ids=ids),
        Message("user", "three"),
    )


def _odd(text: str) -> list[int]:
    """Ids that spell the text, one byte each: not what `encode` gives."""
    tokens = ling_tokenizer()
    single = {tokens.token_bytes(i): i for i in range(tokens.size) if len(tokens.token_bytes(i)) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("with_end", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
def test_generated_ids_are_spliced_where_their_text_is_the_templates(
    template: ChatTemplate, thinking: bool, with_end: bool
) -> None:
    tokens = ling_tokenizer()
    end = tokens.control["<|role_end|>"]
    generated = _odd("yes, 🙂")
    if thinking:
        generated = [*_odd("let me see"), tokens.control["</think>"], *generated]
    ids = tuple([*generated, end] if with_end else generated)
    turns = _chat(ids, "yes, 🙂", "let me see" if thinking else None)
    prompt = template.encode(tokens, turns[:3], thinking=thinking)
    following = template.encode(tokens, turns, thinking=thinking)
    expected = [*prompt, *generated, end]
    assert following[: len(expected)] == expected
    assert tokens.decode(following) == template.render(turns, thinking=thinking)


@pytest.mark.parametrize("tokens", [ling_tokenizer(), tokenizer_without_tags()])
def test_a_turn_that_was_cut_in_its_thought_is_spliced_and_the_thought_closed(
    template: ChatTemplate, tokens: Tokenizer
) -> None:
    """Ctrl-C, or the limit: the next prompt must not run on inside of that thought."""
    ids = (*tokens.encode("let"), *tokens.encode(" me see"))
    turns = (Message("user", "q"), Message("assistant", "", "let me see", ids=ids), Message("user", "go on"))
    prompt = template.encode(tokens, turns[:1], thinking=True)
    following = template.encode(tokens, turns, thinking=True)
    assert following[: len(prompt) + len(ids)] == [*prompt, *ids]
    assert tokens.decode(following) == template.render(turns, thinking=True)


def test_a_second_answer_does_not_take_the_place_of_an_equal_first_one(template: ChatTemplate) -> None:
    tokens = ling_tokenizer()
    ids = tuple(_odd("same"))
    turns = (
        Message("user", "a"),
        Message("assistant", "same"),
        Message("user", "b"),
        Message("assistant", "same", ids=ids),
    )
    plain = template.encode(tokens, turns[:2], thinking=False, add_generation_prompt=False)
    both = template.encode(tokens, turns, thinking=False, add_generation_prompt=False)
    assert both[: len(plain)] == plain
    assert tuple(both[-len(ids) - 1 : -1]) == ids


def test_a_tool_call_turn_is_spliced_through_its_end(template: ChatTemplate) -> None:
    tokens = ling_tokenizer()
    call = ToolCall("now", '{"zone": "UTC"}')
    turns = (Message("user", "time?"), Message("assistant", "", "ask", tool_calls=(call,)), Message("tool", "noon"))
    written = template.render(turns, thinking=True)
    prompt = template.render(turns[:1], thinking=True)
    body = written[len(prompt) : written.index("<role>OBSERVATION")]
    ids: list[int] = []
    rest = body
    while rest:
        spelling = next((s for s in CONTROL if rest.startswith(s)), None)
        ids += [tokens.control[spelling]] if spelling else _odd(rest[0])
        rest = rest[len(spelling or rest[0]) :]
    spliced = (turns[0], Message("assistant", "", "ask", (call,), ids=tuple(ids)), turns[2])
    following = template.encode(tokens, spliced, thinking=True)
    assert following[: len(template.encode(tokens, turns[:1], thinking=True)) + len(ids)][-len(ids) :] == ids
    assert tokens.decode(following) == written


def test_a_turn_that_quotes_a_call_is_spliced(template: ChatTemplate) -> None:
    """No tool was offered, and the tags that the model wrote as control tokens are the answer's text."""
    tokens = ling_tokenizer()
    ids = (tokens.control["<tool_call>"], *tokens.encode("opens a call"))
    asked = Message("user", "tags?")
    turns = (asked, Message("assistant", "<tool_call>opens a call", ids=ids), Message("user", "and?"))
    prompt = template.encode(tokens, (asked,), thinking=False)
    assert template.encode(tokens, turns, thinking=False)[: len(prompt) + len(ids)] == [*prompt, *ids]


SPOKEN = "<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("generated", "spliced"),
    [
        (f"look\n\n{SPOKEN}", True),  # the template writes no newline after the last argument, and one before a call
        (f"look\n{SPOKEN}\n", True),
        (f"look\n{SPOKEN.replace('UTC', 'CET')}", False),
        (f"looks\n{SPOKEN}", False),
        (f"look\n{SPOKEN}{SPOKEN}", False),
        (f"look\n{SPOKEN}<tool_call>", False),
    ],
)
def test_a_call_in_the_models_own_spelling_is_spliced_if_it_says_the_same(
    template: ChatTemplate, generated: str, spliced: bool
) -> None:
    tokens = ling_tokenizer()
    ids: list[int] = []
    while generated:
        spelling = next((s for s in CONTROL if generated.startswith(s)), None)
        ids += [tokens.control[spelling]] if spelling else _odd(generated[0])
        generated = generated[len(spelling or generated[0]) :]
    for made in (ids, [*ids, tokens.control["<|role_end|>"]]):
        call = ToolCall("now", '{"zone": "UTC"}')
        turn = Message("assistant", "look" if "\n\n" not in tokens.decode(made) else "look\n", None, (call,))
        turns = (Message("user", "time?"), turn, Message("tool", "noon"))
        plain = template.encode(tokens, turns, thinking=False)
        with_ids = template.encode(tokens, (turns[0], replace(turn, ids=tuple(made)), turns[2]), thinking=False)
        prompt = template.encode(tokens, turns[:1], thinking=False)
        assert (with_ids != plain) == spliced
        if spliced:
            assert with_ids[: len(prompt) + len(ids) + 1] == [*prompt, *ids, tokens.control["<|role_end|>"]]
            after = [tokens.decode(some).partition("<role>OBSERVATION")[2] for some in (with_ids, plain)]
            assert after[0] == after[1] != ""


@pytest.mark.parametrize(
    "generated",
    ["yes", "yes, but", "\nyes, it is", "yes, it is ", "Yes, it is", "yes, it is<|role_end|>x"],
)
def test_ids_of_other_text_are_ignored(template: ChatTemplate, generated: str) -> None:
    tokens = ling_tokenizer()
    without = template.encode(tokens, _chat((), "yes, it is"), thinking=False)
    assert template.encode(tokens, _chat(tuple(_odd(generated)), "yes, it is"), thinking=False) == without


def test_ids_made_with_the_other_thinking_switch_are_ignored(template: ChatTemplate) -> None:
    tokens = ling_tokenizer()
    ids = (*_odd("hm"), tokens.control["</think>"], *_odd("yes"))
    with_ids = template.encode(tokens, _chat(ids, "yes", "hm"), thinking=False)
    assert with_ids == template.encode(tokens, _chat((), "yes", "hm"), thinking=False)


def test_splicing_works_where_tags_are_plain_text(template: ChatTemplate) -> None:
    tokens = tokenizer_without_tags()
    single = {tokens.token_bytes(i): i for i in range(tokens.size) if len(tokens.token_bytes(i)) == 1}
    ids = tuple(single[bytes([byte])] for byte in b"hm</think>yes")
    turns = _chat(ids, "yes", "hm")
    following = template.encode(tokens, turns, thinking=True)
    assert tokens.decode(following) == template.render(turns, thinking=True)
    assert any(tuple(following[i : i + len(ids)]) == ids for i in range(len(following)))


def test_a_growing_conversation_encodes_only_what_is_new(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda tokens, text: encoded.append(text) or encode(tokens, text))
    tokens = ling_tokenizer()
    turns = (Message("system", "Be brief."), *_chat((), "yes"))
    first = template.encode(tokens, turns, thinking=False, tools=(TOOL,))
    encoded.clear()
    assert template.encode(tokens, turns, thinking=False, tools=(TOOL,)) == first
    assert encoded == []
    template.encode(
        tokens, (*turns, Message("assistant", "no"), Message("user", "four")), thinking=False, tools=(TOOL,)
    )
    assert encoded == ["no", "four"]
    other = tokenizer_without_tags()
    assert template.encode(other, turns, thinking=False) == ChatTemplate.load(DEMO).encode(other, turns, thinking=False)


def test_a_long_conversation_encodes_in_linear_time(template: ChatTemplate) -> None:
    from time import perf_counter

    tokens = ling_tokenizer()

    def turns(count: int) -> tuple[Message, ...]:
        one = (Message("user", "line of text\n" * 20), Message("assistant", "yes <b>", ids=tuple(_odd("yes <b>"))))
        return one * count

    def seconds(count: int) -> float:
        messages = turns(count)
        began = perf_counter()
        template.encode(tokens, messages, thinking=False)
        return perf_counter() - began

    seconds(10)
    short = min(seconds(50) for _ in range(3))
    assert min(seconds(400) for _ in range(3)) < 8 * short * 4 + 0.05


# -- dicts of other programs


def test_content_parts_are_joined_and_roles_mapped() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    turns = messages_from_openai([{"role": "developer", "content": parts}, {"role": "user", "content": None}])
    assert turns == (Message("system", "abc"), Message("user", ""))


def test_tool_arguments_may_be_an_object_or_json_text() -> None:
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        (turn,) = messages_from_openai([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert turn.tool_calls[0].name == "f"
        assert json.loads(turn.tool_calls[0].arguments) == {"a": "é"}


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"role": "wizard", "content": "x"}, "unknown role 'wizard'"),
        ({"content": "x"}, "unknown role None"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "user", "content": 5}, "neither text"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "no function name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "not valid JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "JSON object"),
    ],
)
def test_dicts_that_cannot_be_read_are_named(item: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match="message 2") as caught:
        messages_from_openai([{"role": "user", "content": "ok"}, item])
    assert reason in caught.value.message


def test_bad_tools_arguments_and_roles_are_usage_errors(template: ChatTemplate) -> None:
    deep = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
    for turns, tools in (
        ((Message("user", "x"),), ("{",)),
        ((Message("user", "x"),), ("[]",)),
        ((Message("user", "x"),), (deep,)),
        ((Message("assistant", "", tool_calls=(ToolCall("f", "no"),)),), ()),
        ((Message("narrator", "x"),), ()),
    ):
        with pytest.raises(UsageError):
            template.render(turns, thinking=True, tools=tools)


# -- template files


def test_the_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    config: dict[str, Any] = {"eos_token": {"content": "<|role_end|>"}, "bos_token": None}
    source = "{{ messages[0].content + eos_token }}"
    for inside in (source, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": inside}), "utf-8")
        template = ChatTemplate.load(tmp_path)
        ids = template.encode(ling_tokenizer(), (Message("user", "x<|role_end|>"),), thinking=True)
        assert ids[-1] == ling_tokenizer().control["<|role_end|>"]
        assert sum(map(ling_tokenizer().is_control, ids)) == 1
    (tmp_path / "chat_template.jinja").write_text("file", "utf-8")
    assert ChatTemplate.load(tmp_path).render((Message("user", "x"),), thinking=True) == "file"


def test_a_missing_or_broken_template_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no chat template") as caught:
        ChatTemplate.load(tmp_path)
    assert caught.value.hint
    (tmp_path / "chat_template.jinja").write_text("line one\n{% if %}", "utf-8")
    with pytest.raises(ModelError, match=r"chat_template\.jinja, line 2: not a valid chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_a_template_that_fails_or_reaches_out_is_a_model_error() -> None:
    turns = (Message("user", "x"),)
    for source in ("{{ 1 / 0 }}", "{{ nothing.field }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(ModelError, match="the chat template fails"):
            ChatTemplate(source).render(turns, thinking=True)


def test_a_conversation_that_the_template_refuses_is_a_usage_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        template.render((Message("user", "x"),), thinking=True)


def test_loop_controls_and_json_are_those_of_hugging_face() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    text = ChatTemplate(source).render((Message("user", "<é&'>"), Message("user", "no")), thinking=True)
    assert text == '{"role": "user", "content": "<é&\'>"}'
