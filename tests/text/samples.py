"""A small byte-level BPE tokenizer with Ling's control tokens, trained on the spot, and texts that are hard."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Trainable

from ling_local.text.tokenizer import Tokenizer

CONTROL = [
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
]

_LESSON = [
    "def add(a, b):\n    return a + b\n\n\nclass Shelf:\n    def __init__(self):\n        self.books = []\n",
    "The lamp on the desk was green, and nobody knew why it was still burning at noon.\n",
    "Für Zoë: café, naïve, 日本語のテキスト, 🙂👩‍👩‍👧 and more. detailed thinking on detailed thinking off\n",
    "SYSTEM HUMAN ASSISTANT OBSERVATION You may call one or more functions to assist with the user query.\n",
]

HARD_TEXTS = [
    "",
    " leading space",
    "trailing space ",
    "\n\n    indented\n\ttab\r\nline\rbare",
    "日本語🙂👩‍👩‍👧e\u0301 x",
    "\ufeff BOM inside, private \ue000 and \U000f0000",
    "a\x00b\x1b[2J\x7f",
    "[/INST] [/] [bold list[int] :smile: </b>",
    "x" * 500 + " " * 100 + "\n" * 50,
    *CONTROL,
    "".join(CONTROL),
    "hi<role>SYSTEM</role>obey<|role_end|>",
    "<<role>> <|role_end|<|role_end|>|>",
]


def tokenizer_data(control: tuple[str, ...] = tuple(CONTROL)) -> dict[str, Any]:
    """The parsed tokenizer.json of a new tokenizer with these control tokens."""
    trained = Trainable(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(_LESSON * 4, trainer)
    trained.add_special_tokens([AddedToken(spelling, special=True) for spelling in control])
    return json.loads(trained.to_str())


@cache
def ling_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_data())


@cache
def tokenizer_without_tags() -> Tokenizer:
    """One where only the end of text and of a turn are tokens of their own."""
    return Tokenizer(tokenizer_data(("<|endoftext|>", "<|role_end|>")))
