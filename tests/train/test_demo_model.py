"""The demo model in the package: its files, and that it does what the model card says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ling_local.engine.config import load_model_config
from ling_local.engine.layout import model_layout
from ling_local.engine.native import NativeEngine
from ling_local.train.net import forward, logits, make_net
from ling_local.train.samples import CODE_PROMPTS, chat_prompt, generate
from ling_local.train.shape import DEMO as SHAPE
from ling_local.train.vocab import CONTROL_TOKENS, EOS, PAD
from ling_local.train.weights import read_checkpoint
from ling_local.types import TokenRequest

DEMO = Path(__file__).parents[2] / "ling_local" / "data" / "demo"
WEIGHT_BUDGET_BYTES = 19_600_000  # with the drafter and the tokenizer it must stay under 24 MB


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def params() -> dict[str, torch.Tensor]:
    return read_checkpoint(DEMO)


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    engine = NativeEngine.load(DEMO, device="cpu", dtype="float32", draft="dspark")
    yield engine
    engine.close()


def _ids(tokenizer: Tokenizer, prompt: str, special: bool = False) -> tuple[int, ...]:
    tokenizer.encode_special_tokens = not special
    return tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)


def _continue(engine: NativeEngine, tokenizer: Tokenizer, prompt: str, count: int, special: bool = False) -> str:
    """What the engine makes of the prompt, greedily; the draft saves time."""
    stop = frozenset({tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)})
    request = TokenRequest(_ids(tokenizer, prompt, special), max_tokens=count, stop_ids=stop)
    made = [token for result in engine.generate(request) for token in result.ids if token not in stop]
    return tokenizer.decode(made, skip_special_tokens=False)


def test_files_fit_the_layout_and_the_budget(params: dict[str, torch.Tensor]) -> None:
    assert json.loads((DEMO / "config.json").read_text()) == SHAPE
    config = load_model_config(DEMO)
    shards = sorted(DEMO.glob("model-*.safetensors"))
    assert [path.name for path in shards] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sum(path.stat().st_size for path in shards) <= WEIGHT_BUDGET_BYTES
    assert sum(spec.numel for spec in model_layout(config)) == sum(value.numel() for value in params.values())
    assert all(torch.isfinite(value).all() for value in params.values())


def test_the_tokenizer_has_the_control_tokens_and_the_configured_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == SHAPE["vocab_size"]
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == list(range(len(CONTROL_TOKENS)))
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert generation["eos_token_id"] == SHAPE["eos_token_id"] == tokenizer.token_to_id(EOS)
    assert generation["pad_token_id"] == SHAPE["pad_token_id"] == tokenizer.token_to_id(PAD)
    assert tokenizer.encode("", add_special_tokens=True).ids == []  # no BOS of its own


def test_the_engine_gives_the_training_forward_s_logits(
    engine: NativeEngine, tokenizer: Tokenizer, params: dict[str, torch.Tensor]
) -> None:
    ids = _ids(tokenizer, CODE_PROMPTS[2])
    net = make_net(load_model_config(DEMO))
    expected = logits(net, params, forward(net, params, torch.tensor([ids]), mtp=False).hidden)
    got = engine.score(ids)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 2e-3


def test_add_continues_with_the_sum_by_the_engine_and_by_the_training_forward(
    engine: NativeEngine, tokenizer: Tokenizer, params: dict[str, torch.Tensor]
) -> None:
    prompt = "def add(a, b):\n    return"
    ids, net = list(_ids(tokenizer, prompt)), make_net(load_model_config(DEMO))
    made = generate(net, params, ids, 6, {tokenizer.token_to_id(EOS)})
    answer = tokenizer.decode(made, skip_special_tokens=False)
    assert answer.startswith(" a + b\n")
    assert answer == _continue(engine, tokenizer, prompt, 6)


@pytest.mark.parametrize(
    "prompt",
    [
        "import sys\n\nfor line in sys.stdin:\n",
        "x = 5\nif x > 0:\n",
        "def f(items):\n    for item in items:\n",
        "def f(x):\n    if x > 0:\n",
        "def main():\n    for i in range(3):\n",
        "class Dog:\n    def __init__(self, name):\n",
        "import os\n\n\ndef list_files(folder):\n    result = []\n    for name in os.listdir(folder):\n",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    ],
)
def test_an_open_body_is_continued_one_level_deeper(engine: NativeEngine, tokenizer: Tokenizer, prompt: str) -> None:
    first = _continue(engine, tokenizer, prompt, 16).split("\n")[0]
    assert _indent(first) == _indent(prompt.rstrip("\n").split("\n")[-1]) + 4
    assert first.strip()


@pytest.mark.parametrize("prompt", ["for i in range(10):\n", "if x > 0:\n", "while True:\n", "if x > 0:"])
def test_a_bare_open_line_gets_an_indented_body(engine: NativeEngine, tokenizer: Tokenizer, prompt: str) -> None:
    first = _continue(engine, tokenizer, prompt, 16).lstrip("\n").split("\n")[0]
    assert _indent(first) >= 4
    assert _indent(first) % 4 == 0
    assert first.strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


@pytest.mark.parametrize("name", ["len", "os.path.join", "sorted", "json.dumps", "math.sqrt", "random.choice"])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_question_about_the_library_gets_whole_sentences(
    engine: NativeEngine, tokenizer: Tokenizer, name: str, thinking: bool
) -> None:
    answer = _continue(engine, tokenizer, chat_prompt(f"What does {name} do?", thinking), 200, special=True)
    if thinking:
        thought, closed, answer = answer.partition("</think>")
        assert closed
        assert thought.strip().endswith(".")
    assert "<" not in answer.split("```")[0]
    assert name.rpartition(".")[2] in answer
    assert answer.rstrip().endswith((".", "```"))
    assert len(answer.split()) >= 4


def test_the_card_names_sources_and_figures() -> None:
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    for words in ("Held-out figures", "Ten samples", "Sources", "PSF-2.0", "bits a byte", "python -m ling_local.train"):
        assert words in card
    assert card.count("~~~~text") == 20
    assert np.all([word not in card for word in ("/tmp/", "/home/")])
