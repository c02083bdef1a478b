"""The bundled prompts, and requests made of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from ling_local.engine.protocol import Engine
from ling_local.generate import TextModel
from ling_local.types import Message, TokenRequest

TASKS = ("code", "prose", "chat", "random")
TEXTS = TASKS[:3]  # those with prompts of their own
_FOLDER = Path(__file__).parent.parent / "data" / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One bundled text. task says what it is: code and prose are continued, chat is asked."""

    name: str
    task: str
    text: str


def bundled(task: str) -> tuple[Prompt, ...]:
    """All prompts of a task; the first of them, which has the task's name, is the one that is timed."""
    files = sorted(_FOLDER.glob(f"{task}*.txt"), key=lambda file: (len(file.stem) > len(task), file.stem))
    return tuple(Prompt(file.stem, task, _read(file, task)) for file in files)


def _read(file: Path, task: str) -> str:
    text = file.read_text(encoding="utf-8")
    return text if task == "code" else text.rstrip("\n")


def as_prompt(task: str, text: str) -> str | tuple[Message, ...]:
    """What a Request takes: the text itself, or a question for the chat template."""
    return (Message("user", text),) if task == "chat" else text


def with_first_word(text_model: TextModel, prompt: Prompt, index: int, prompt_tokens: int) -> str:
    """The text after a first word that no other index has, about prompt_tokens long (0: as it is)."""
    words = (_FOLDER / "first_words.txt").read_text(encoding="utf-8").split()  # one for each letter
    turn, letter = divmod(index, len(words))
    word = words[letter] + (str(turn) if turn else "")
    head = f"{word} = {index}\n\n" if prompt.task == "code" else f"{word.capitalize()}.\n\n"
    if not prompt_tokens:
        return head + prompt.text
    num_head = len(text_model.tokens.encode(head))
    return head + last_tokens(text_model, prompt.text, max(1, prompt_tokens - num_head))


def random_ids(text_model: TextModel, seed: int, wanted: int) -> list[int]:
    """Exactly `wanted` ids: a bundled text that the seed picks, begun where the seed says and repeated.

    The tool behind the public record makes its "random" prompts of real texts in this way; ids drawn one by one would
    be no text, and no drafter would guess what follows.
    """
    chance = random.Random(seed)
    texts = [prompt.text for task in TEXTS for prompt in bundled(task)]
    ids = text_model.tokens.encode(chance.choice(texts))
    start = chance.randrange(len(ids))
    turned = [*ids[start:], *ids[:start]]
    return (turned * math.ceil(wanted / len(turned)))[:wanted]


def last_tokens(text_model: TextModel, text: str, wanted: int) -> str:
    """The last `wanted` tokens of the text, repeated where it is shorter: the end is where it wants to go on."""
    ids = text_model.tokens.encode(text)
    return text_model.tokens.decode((ids * math.ceil(wanted / len(ids)))[-wanted:])


def forget(engine: Engine, first_id: int) -> None:
    """Replace what the engine's state holds by one id that the next prompt does not start with."""
    other = 0 if first_id else 1
    for _ in engine.generate(TokenRequest((other,), max_tokens=1)):
        pass
