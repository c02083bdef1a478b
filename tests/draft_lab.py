"""A tiny corpus, a tokenizer for it and a tiny target that has learnt it: what draft training needs, in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from checkpoints import config_json
from ling_local.engine.config import load_model_config
from ling_local.train.chats import Turn, render
from ling_local.train.net import forward, logits, make_net
from ling_local.train.optim import Optimizer, Recipe
from ling_local.train.vocab import save_tokenizer, train_tokenizer
from ling_local.train.weights import export_checkpoint, new_params

VOCAB, CONTEXT = 320, 256
SHAPE = {
    "num_hidden_layers": 3,
    "layer_group_size": 3,
    "num_experts": 8,
    "num_nextn_predict_layers": 0,
    "expert_swiglu_limit_list": [0, 0, 4],
    "share_expert_swiglu_limit_list": [0, 0, 5],
}
VERBS = ("add", "take", "join", "scale")
NOUNS = ("item", "count", "name", "value")


def make_code(rng: random.Random) -> str:
    """A few functions, of which the names are the only surprise."""
    parts = []
    for _ in range(3):
        verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
        parts.append(f"def {verb}_{noun}(self, {noun}):\n    self.{noun}s.append({noun})\n    return self.{noun}s\n")
    return "\n".join(parts)


def make_chat(rng: random.Random) -> str:
    """A question about one of those functions with its answer."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    thought = f"This is about {verb}_{noun}."
    turn = Turn(f"What does {verb}_{noun} do?", f"It appends the {noun} to self.{noun}s and returns it.", thought)
    return render([turn], thinking=rng.random() < 0.4)


def write_corpus(folder: Path) -> Path:
    """Two sets to train on and two held out."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(4)
    for name, make, count in (
        ("code", make_code, 60),
        ("chat", make_chat, 60),
        ("heldout_code", make_code, 12),
        ("heldout_chat", make_chat, 12),
    ):
        lines = "".join(json.dumps(make(rng)) + "\n" for _ in range(count))
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_target(folder: Path, steps: int = 60) -> Path:
    """Train a tiny model on the corpus and write it as a checkpoint, with its tokenizer."""
    rng = random.Random(5)
    texts = [make(rng) for _ in range(200) for make in (make_code, make_chat)]
    save_tokenizer(train_tokenizer(texts, VOCAB), folder, CONTEXT)
    data = config_json(**SHAPE, vocab_size=VOCAB, pad_token_id=0, eos_token_id=1, max_position_embeddings=CONTEXT)
    (folder / "config.json").write_text(json.dumps(data))
    config = load_model_config(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = [token for text in texts for token in [*tokenizer.encode(text, add_special_tokens=False).ids, 0]]
    tokens = torch.tensor(stream)
    net = make_net(config)
    params = {n: v.requires_grad_(not n.endswith("expert_bias")) for n, v in new_params(config, 1).items()}
    optimizer = Optimizer(params, Recipe())
    generator = torch.Generator().manual_seed(6)
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - 65, (8, 1), generator=generator)
        rows = tokens[starts + torch.arange(65)]
        out = forward(net, params, rows[:, :-1], mtp=False)
        loss = torch.nn.functional.cross_entropy(logits(net, params, out.hidden), rows[:, 1:].flatten())
        for value in optimizer.all:
            value.grad = torch.zeros_like(value)
        loss.backward()
        optimizer.step(torch.tensor(0.02 * min(1.0, 2 * (1 - step / steps))))
    export_checkpoint({name: value.detach() for name, value in params.items()}, config, folder)
    (folder / "loss.json").write_text(json.dumps(loss.item()))
    return folder
