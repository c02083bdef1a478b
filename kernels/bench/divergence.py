"""Greedy text of the demo model on the GPU in bf16 beside the CPU in fp32: where they part, and by what margin.

python kernels/bench/divergence.py --tokens 200

A parting is a near-tie when the CPU's two best logits are closer than bf16 can tell apart there.
"""

from __future__ import annotations

import argparse

import torch

from ling_local.bench import TEXTS, bundled
from ling_local.engine.native import NativeEngine
from ling_local.paths import demo_dir
from ling_local.text.tokenizer import Tokenizer
from ling_local.types import TokenRequest


def answer(engine: NativeEngine, prompt: tuple[int, ...], num: int) -> list[int]:
    return [i for step in engine.generate(TokenRequest(prompt, max_tokens=num, draft=False)) for i in step.ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    tokens = Tokenizer.load(demo_dir())
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    tested = NativeEngine.load(demo_dir(), args.device, dtype, context=4096)
    reference = NativeEngine.load(demo_dir(), context=4096)
    print("| prompt | same tokens | of | margin of the CPU's two best | in standard deviations | GPU's rank there |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for prompt in (p for task in TEXTS for p in bundled(task)):
        ids = tuple(tokens.encode(prompt.text))
        got, want = answer(tested, ids, args.tokens), answer(reference, ids, args.tokens)
        same = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if same is None:
            print(f"| {prompt.name} | all | {len(want)} | - | - | - |", flush=True)
            continue
        with torch.inference_mode():
            logits = reference.score((*ids, *want[:same]))[-1, : tokens.size]
        margin = logits[want[same]] - logits[got[same]]
        rank = int((logits > logits[got[same]]).sum()) + 1
        print(
            f"| {prompt.name} | {same} | {len(want)} | {margin:.4f} | {margin / logits.std():.4f} | {rank} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
