"""Short conversations of our own writing: who the model is, greetings, what `ling` can do, what it cannot."""

from __future__ import annotations

import random

from ling_local.train.snippets import read_table


def conversations(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """`count` random (question, answer, thought) triples."""
    blocks = []
    for line in read_table("persona.txt"):
        questions, answers, thought = line.split(" => ")
        options = [answers] if "```" in answers else answers.split("/")  # one of code, or several of text
        blocks.append((questions.split("/"), options, thought))
    chosen = []
    for _ in range(count):
        questions, answers, thought = rng.choice(blocks)
        chosen.append((rng.choice(questions), rng.choice(answers), thought))
    return chosen
