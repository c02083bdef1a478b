"""The demo model's tokenizer: GPT-2 style byte-level BPE, trained on the corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ling_local.errors import ModelError

VOCAB_SIZE = 4096
PAD, EOS, MASK = "<|endoftext|>", "<|role_end|>", "<|mask|>"
CONTROL_TOKENS = (
    PAD,
    EOS,
    MASK,
    *("<role>", "</role>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_response>", "</tool_response>", "<tools>", "</tools>"),
    *(f"<|reserved_{i}|>" for i in range(7)),
)
# A newline always stands alone and indentation is one piece of its own, so that a prompt that ends after a line,
# or after its indentation, is cut as the training text was. Digits stand alone.
PIECES = r"\r?\n| ?_*\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of exactly vocab_size entries; control tokens have the ids 0, 1, 2, ..."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path}: not there", "run: python -m ling_local.train tokenizer")
    return Tokenizer.from_file(str(path))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": EOS,
        "pad_token": PAD,
        "mask_token": MASK,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    generation = {
        "do_sample": False,  # a model this small does best with its first choice
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
