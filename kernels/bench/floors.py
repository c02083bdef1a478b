"""What a decode step must read and write, and how long a given bandwidth needs for it. Needs no GPU and no torch.

python kernels/bench/floors.py --rows 1 9 --context 8192 --bandwidth 4.25
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ling_local.engine.config import ModelConfig
from ling_local.engine.shapes import FLASH, TINY, shard_of

BF16, FP32 = 2, 4
HEAD, LATENT, ROPE = 128, 512, 64


# published shapes, and what one rank of several has of them
MODELS = {"tiny": TINY, "flash2": shard_of(FLASH, 2), "flash4": shard_of(FLASH, 4)}


@dataclass(frozen=True)
class Op:
    """num_bytes: of one launch (or fixed group of them); times: in a step."""

    name: str
    num_bytes: float
    times: int


def distinct(model: ModelConfig, rows: int) -> float:
    """Experts that `rows` rows choose together when all are equally popular."""
    return model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** rows)


def step_ops(model: ModelConfig, rows: int, context: int) -> list[Op]:
    """The target's verify step over `rows` rows: weights, state, and activations in and out."""
    width, heads, inner = model.hidden_size, model.num_heads, model.num_heads * HEAD
    layers, kda, mla = model.num_layers, len(model.kda_layers), len(model.mla_layers)
    sparse = layers - model.first_k_dense
    listed = distinct(model, rows) + 1
    query = model.q_lora_rank or heads * (HEAD + ROPE)
    low_rank = model.q_lora_rank * heads * (HEAD + ROPE)
    state, cache = FP32 * heads * HEAD * HEAD, BF16 * (LATENT + ROPE)
    mla_weights = low_rank + 2 * heads * HEAD * LATENT

    def product(n: int, k: int) -> float:
        return BF16 * (n * k + rows * (n + k))

    def gated(slots: float, size: int) -> float:
        return BF16 * (3 * slots * width * size + 2 * rows * slots * size + 2 * rows * width)

    return [
        Op("exchange_norm", BF16 * (4 * rows * width + width), 2 * layers + 1),
        Op("linear: KDA in_proj", product(5 * inner + heads, width), kda),
        Op("kda_verify", state + BF16 * rows * 6 * inner + FP32 * rows * 4 * inner, kda),
        Op("linear: MLA in_proj", product(query + LATENT + ROPE + heads, width), mla),
        Op("mla", BF16 * mla_weights + cache * (context + rows), mla),
        Op("linear: out_proj", product(width, inner), layers),
        Op("mlp (dense)", gated(1, model.intermediate_size), model.first_k_dense),
        Op("route", BF16 * model.num_experts * width, sparse),
        Op("experts", gated(listed, model.moe_intermediate_size), sparse),
        Op("head", product(model.vocab_size, width) + FP32 * rows * model.vocab_size, 1),
        Op("kda_commit", kda * (2 * state + FP32 * rows * 4 * inner), 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=MODELS, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--context", type=int, default=8192, help="tokens in the latent cache")
    parser.add_argument("--bandwidth", type=float, default=4.25, help="TB/s that a stream reaches")
    args = parser.parse_args()
    model = MODELS[args.shape]
    for rows in args.rows:
        ops = step_ops(model, rows, args.context)
        print(f"\n{args.shape}, {rows} rows, {distinct(model, rows):.1f} distinct experts, {args.context} tokens\n")
        print("| op | times | MB each | floor us each | floor us a step |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for op in ops:
            each = op.num_bytes / args.bandwidth / 1e6
            print(f"| {op.name} | {op.times} | {op.num_bytes / 1e6:.3f} | {each:.2f} | {each * op.times:.1f} |")
        total = sum(op.num_bytes * op.times for op in ops)
        print(f"| all | | {total / 1e6:.1f} | | {total / args.bandwidth / 1e6:.0f} |")


if __name__ == "__main__":
    main()
