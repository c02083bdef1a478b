"""The chat template: messages to the ids of a prompt. Only the template's own text becomes control ids.

How people's text is kept apart: in everything that people, files and tools wrote, each character that a
control token may begin or end with is fenced by a private-use character which occurs nowhere else. The
template is rendered, its control tokens (unfenced by nature) are turned into one private character each, the
fences are removed, and what lies between control characters is encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ling_local.errors import LingError, ModelError, UsageError
from ling_local.text.channels import reads_as
from ling_local.text.messages import json_object, map_strings, messages_from_openai, template_values
from ling_local.text.tokenizer import Tokens
from ling_local.types import Channel, Message

__all__ = ["ChatTemplate", "messages_from_openai"]

FILE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
_REPAIR = "fetch the model again, or put the model's chat_template.jinja into that folder"
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
_PRIVATE = [range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)]
_PROBE = "probe"


class _Refused(Exception):
    """The template called raise_exception: it does not accept this conversation."""


class ChatTemplate:
    """One checkpoint's template, compiled in a sandbox."""

    def __init__(self, source: str, specials: Mapping[str, str] | None = None, name: str = FILE_NAME) -> None:
        """From Jinja text; specials are variables such as eos_token. ModelError where it is no template."""
        self.name = name
        self._source = source
        self._specials = dict(specials or {})
        self._shapes: dict[bool, tuple[str, str]] = {}
        self._last: tuple[Tokens | None, dict[str, list[int]]] = (None, {})  # texts of the last prompt, with their ids
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f"{name}, line {line}" if line else name
            raise ModelError(f"{where}: not a valid chat template: {error.message}", _REPAIR) from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """chat_template.jinja of a checkpoint, else "chat_template" in its tokenizer_config.json.

        ModelError with file, reason and repair where there is none or it is broken.
        """
        folder = Path(folder)
        path, config_path = folder / FILE_NAME, folder / CONFIG_NAME
        config = _read_config(config_path)
        specials = {key: text for key in _SPECIALS if isinstance(text := _spelling(config.get(key)), str)}
        source = _read(path)
        if source is not None:
            return cls(source, specials, str(path))
        inside = config.get("chat_template")
        if isinstance(inside, list):  # several named ones
            named = {item.get("name"): item.get("template") for item in inside if isinstance(item, dict)}
            inside = named.get("default")
        if not isinstance(inside, str):
            raise ModelError(f"{folder} has no chat template: neither {FILE_NAME} nor one in {CONFIG_NAME}", _REPAIR)
        return cls(inside, specials, str(config_path))

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool,
        tools: Sequence[str] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text, to read; `encode` is the one to give to a model.

        UsageError for an unknown role, for tools or arguments that are no JSON objects, and for a
        conversation that the template refuses; ModelError where the template itself fails.
        """
        values = template_values(messages, tools, thinking, add_generation_prompt)
        fence = next(_free_characters(json.dumps(values, ensure_ascii=False) + self._source))
        return self._run(_fenced(values, _edges(()), fence)).replace(fence, "")

    def encode(
        self,
        tokens: Tokens,
        messages: Sequence[Message],
        *,
        thinking: bool,
        tools: Sequence[str] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of the prompt; nothing is added that the template did not write. Errors as in `render`.

        `Message.ids` of an assistant turn stand as they are where their text is what the template writes, or says
        the same in another spelling (blanks between the arguments of a call).
        """
        values = template_values(messages, tools, thinking, add_generation_prompt)
        free = _free_characters(json.dumps(values, ensure_ascii=False) + self._source)
        fence = next(free)
        last_tokens, known = self._last
        coder = _Coder(tokens, free, known if last_tokens is tokens else {})
        coded = coder.code(self._run(_fenced(values, _edges(tokens.control), fence))).replace(fence, "")
        ids: list[int] = []
        done = 0
        for start, end, spliced in self._splices(coder, coded, messages, tools, thinking, add_generation_prompt):
            ids += coder.encode(coded[done:start])
            ids += spliced
            done = end
        ids += coder.encode(coded[done:])
        self._last = tokens, coder.encoded
        return ids

    def first_channel(self, thinking: bool) -> Channel:
        """Where generated text starts: in the reasoning if the generation prompt leaves one open."""
        prompt, _ = self._shape(thinking)
        return Channel.THINKING if prompt.rfind("<think>") > prompt.rfind("</think>") else Channel.ANSWER

    def unknown_specials(self, tokens: Tokens) -> list[str]:
        """Special tokens that the checkpoint names and its tokenizer does not have, as `name spelling`."""
        names = ("bos_token", "eos_token", "pad_token")
        return [f"{name} {text}" for name in names if (text := self._specials.get(name)) and text not in tokens.control]

    def _run(self, values: Mapping[str, Any]) -> str:
        try:
            return self._template.render(**self._specials, **values)
        except _Refused as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error
        except Exception as error:  # the template is foreign code and may fail in any way
            raise ModelError(f"{self.name}: the chat template fails: {error}", _REPAIR) from error

    def _shape(self, thinking: bool) -> tuple[str, str]:
        """The generation prompt, and what the template writes after the text of an assistant turn."""
        if thinking not in self._shapes:
            probes = (Message("user", _PROBE),), (Message("user", _PROBE), Message("assistant", _PROBE))
            asked, answered = (self._run(template_values(p, (), thinking, False)) for p in probes)
            prompted = self._run(template_values(probes[0], (), thinking, True))
            prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
            self._shapes[thinking] = prompt, answered.rpartition(_PROBE)[2]
        return self._shapes[thinking]

    def _splices(
        self,
        coder: _Coder,
        coded: str,
        messages: Sequence[Message],
        tools: Sequence[str],
        thinking: bool,
        prompted: bool,
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Spans of the coded prompt that a turn's generated ids stand for: (start, end, ids), in order."""
        turns = [m for m in messages if m.role == "assistant"]
        if not any(turn.ids for turn in turns):
            return
        prompt, end = map(coder.code, self._shape(thinking))
        # Every assistant turn starts like the generation prompt as far as both modes of it agree.
        head = _common_start(prompt, coder.code(self._shape(not thinking)[0]))
        starts = [m.start() for m in re.finditer(re.escape(head), coded)] if head else []
        if not end or len(starts) != len(turns) + prompted:
            return
        closing = coder.through_first_control(end)
        for start, turn in zip(starts, turns, strict=False):
            text = coder.decode(turn.ids) if turn.ids else None
            if text is None:
                continue
            body = text.removesuffix(closing)
            begin = start + len(prompt)
            if coded.startswith(prompt + body + end, start):
                yield begin, begin + len(text), turn.ids
            elif coded.startswith(prompt, start) and coder.has_control(closing):
                stop = coded.find(closing, begin)  # of the template: people's text holds no control character
                ends_in = reads_as(coder.spell(body), self.first_channel(thinking), turn, tools) if stop >= 0 else None
                if ends_in is Channel.THINKING:  # it was cut there: the template's </think> has to stay
                    close = coded.find(coder.code("</think>"), begin, stop)
                    if close >= 0 and body == text:
                        yield begin, close, turn.ids
                elif ends_in:
                    yield begin, stop + len(text) - len(body), turn.ids


class _Coder:
    """Text with its control tokens as one private character each, and back to ids."""

    def __init__(self, tokens: Tokens, free: Iterator[str], known: Mapping[str, list[int]]) -> None:
        """free yields characters that the text to be coded does not hold; one is taken per control token.

        known: texts that need not be encoded again. A talk is sent whole with each question, and grows; `encoded`
        holds the texts of this prompt.
        """
        self.encoded: dict[str, list[int]] = {}
        self._known = known
        self._tokens = tokens
        self._char = {spelling: next(free) for spelling in tokens.control}
        self._id = {self._char[spelling]: token_id for spelling, token_id in tokens.control.items()}
        longest_first = sorted(filter(None, self._char), key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._coded = re.compile("([" + "".join(self._id) + "])" if self._id else r"((?!))")

    def code(self, text: str) -> str:
        return self._spelt.sub(lambda found: self._char[found[0]], text)

    def encode(self, coded: str) -> list[int]:
        ids: list[int] = []
        for piece in self._coded.split(coded):
            if piece in self._id:
                ids.append(self._id[piece])
            elif piece:
                made = self._known.get(piece)
                self.encoded[piece] = made = self._tokens.encode(piece) if made is None else made
                ids += made
        return ids

    def decode(self, ids: Sequence[int]) -> str | None:
        """Coded text of generated ids; None where their plain text holds one of our private characters."""
        pieces: list[str] = []
        for is_control, run in groupby(ids, self._tokens.is_control):
            text = b"".join(map(self._tokens.token_bytes, run)).decode("utf-8", "replace")
            if is_control:
                pieces.append(self.code(text))
            elif self._coded.search(text):
                return None
            else:
                pieces.append(text)
        return "".join(pieces)

    def spell(self, coded: str) -> str:
        """Coded text with its control tokens spelt out."""
        spelling = {char: text for text, char in self._char.items()}
        return self._coded.sub(lambda found: spelling[found[0]], coded)

    def has_control(self, coded: str) -> bool:
        return self._coded.search(coded) is not None

    def through_first_control(self, coded: str) -> str:
        """The text up to and with its first control token; all of it where there is none."""
        found = self._coded.search(coded)
        return coded[: found.end()] if found else coded


def _free_characters(used: str) -> Iterator[str]:
    """Private-use characters that do not occur in the text."""
    taken = set(re.findall("[\ue000-\uf8ff\U000f0000-\U0010ffff]", used))
    return (char for codes in _PRIVATE for char in map(chr, codes) if char not in taken)


def _edges(control: Mapping[str, int] | tuple[()]) -> re.Pattern[str]:
    """Matches the characters in people's text that could be the first or last of a control token.

    Letters are left alone, or templates could no longer recognise words; a token that both begins and ends
    with one is matched where it is spelt in full.
    """
    ends = {char for spelling in control if spelling for char in (spelling[0], spelling[-1])}
    marks = {char for char in ends if not char.isalnum() and not char.isspace()} | {"<", ">"}
    wordy = [s for s in control if s and s[0] not in marks and s[-1] not in marks]
    whole = [rf"(?s:(?={re.escape(spelling)}).)" for spelling in wordy]
    return re.compile("|".join(["[" + "".join(map(re.escape, sorted(marks))) + "]", *whole]))


def _fenced(values: dict[str, Any], edges: re.Pattern[str], fence: str) -> dict[str, Any]:
    """The same values with fences in all strings; field names and roles have no edge, so they stay."""
    return map_strings(values, lambda text: edges.sub(rf"{fence}\g<0>{fence}", text))


def _common_start(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON as Hugging Face writes it; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", _REPAIR) from error


def _read_config(path: Path) -> dict[str, Any]:
    text = _read(path)
    if text is None:
        return {}
    try:
        return json_object(text, f"{path}: its contents")
    except LingError as error:
        raise ModelError(error.message, _REPAIR) from error


def _spelling(special: Any) -> Any:
    return special.get("content") if isinstance(special, dict) else special
