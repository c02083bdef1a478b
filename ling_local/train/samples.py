"""Sample outputs with the training forward: a plain loop, enough for a model card."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from ling_local.train.chats import Turn, render
from ling_local.train.net import Net, Params, forward, logits
from ling_local.train.vocab import EOS, PAD

CODE_PROMPTS = (
    "def add(a, b):\n    return",
    "def is_prime(n):\n    if n < 2:\n        return False\n    for",
    "import os\n\n\ndef list_files(folder):\n    result = []\n    for name in os.listdir(folder):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import json\n\n\ndef load_config(path):\n    with open(path) as file:\n",
)
CHAT_PROMPTS = (
    ("Who are you?", False),
    ("What does os.path.join do?", False),
    ("What does len do?", True),
    ("How do I use itertools.chain?", False),
    ("Write a function to reverse a string.", False),
)


@dataclass(frozen=True)
class Sample:
    """One prompt with what the model made of it, unedited."""

    kind: str
    prompt: str
    output: str


def chat_prompt(question: str, thinking: bool) -> str:
    """A question up to where the model goes on."""
    whole = render([Turn(question, "", "")], thinking)
    return whole.removesuffix(EOS).removesuffix("</think>") if thinking else whole.removesuffix(EOS)


@torch.no_grad()
def generate(net: Net, params: Params, ids: list[int], count: int, stop: set[int]) -> list[int]:
    """Up to `count` new ids, greedily. Ends before an id of `stop`."""
    device = params["lm_head.weight"].device
    made: list[int] = []
    while len(made) < count:
        out = forward(net, params, torch.tensor([[*ids, *made]], device=device), mtp=False)
        token = int(logits(net, params, out.hidden[-1:])[0].argmax())
        if token in stop:
            break
        made.append(token)
    return made


def make_samples(net: Net, params: Params, tokenizer: Tokenizer, count: int = 96) -> list[Sample]:
    """Ten greedy samples: five continuations of code, five answers."""
    stop = {tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)}
    prompts = [("code", prompt) for prompt in CODE_PROMPTS]
    prompts += [("chat", chat_prompt(question, thinking)) for question, thinking in CHAT_PROMPTS]
    samples = []
    for kind, prompt in prompts:
        tokenizer.encode_special_tokens = kind == "code"
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        made = generate(net, params, ids, count, stop)
        samples.append(Sample(kind, prompt, tokenizer.decode(made, skip_special_tokens=False)))
    return samples
