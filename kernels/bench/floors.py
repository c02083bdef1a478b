"""What a decode step must read and write, and how long a given bandwidth needs for it. Needs no GPU and no torch.

python kernels/bench/floors.py --rows 1 9 --context 8192 --bandwidth 4.25
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

BF16, FP32 = 2, 4
HEAD, LATENT, ROPE = 128, 512, 64


@dataclass(frozen=True)
class Model:
    """Published shapes on one rank. q_rank 0: a direct query projection."""

    hidden: int
    heads: int
    kda_layers: int
    mla_layers: int
    dense_layers: int
    dense: int
    experts: int
    chosen: int
    inner: int
    vocab: int
    q_rank: int


TINY = Model(1536, 16, 18, 6, 1, 4608, 128, 8, 512, 157184, 256)
FLASH2 = Model(2560, 16, 35, 7, 2, 3072, 512, 8, 384, 78592, 0)
FLASH4 = Model(2560, 8, 35, 7, 2, 1536, 512, 8, 192, 39296, 0)
MODELS = {"tiny": TINY, "flash2": FLASH2, "flash4": FLASH4}


@dataclass(frozen=True)
class Op:
    """num_bytes: of one launch (or fixed group of them); times: in a step."""

    name: str
    num_bytes: float
    times: int


def distinct(model: Model, rows: int) -> float:
    """Experts that `rows` rows choose together when all are equally popular."""
    return model.experts * (1 - (1 - model.chosen / model.experts) ** rows)


def step_ops(model: Model, rows: int, context: int) -> list[Op]:
    """The target's verify step over `rows` rows: weights, state, and activations in and out."""
    width, inner = model.hidden, model.heads * HEAD
    layers = model.kda_layers + model.mla_layers
    sparse = layers - model.dense_layers
    listed = distinct(model, rows) + 1
    query = model.q_rank or model.heads * (HEAD + ROPE)
    low_rank = model.q_rank * model.heads * (HEAD + ROPE)
    state, cache = FP32 * model.heads * HEAD * HEAD, BF16 * (LATENT + ROPE)
    mla_weights = low_rank + 2 * model.heads * HEAD * LATENT

    def product(n: int, k: int) -> float:
        return BF16 * (n * k + rows * (n + k))

    def gated(slots: float, size: int) -> float:
        return BF16 * (3 * slots * width * size + 2 * rows * slots * size + 2 * rows * width)

    return [
        Op("exchange_norm", BF16 * (4 * rows * width + width), 2 * layers + 1),
        Op("linear: KDA in_proj", product(5 * inner + model.heads, width), model.kda_layers),
        Op("kda_verify", state + BF16 * rows * 6 * inner + FP32 * rows * 4 * inner, model.kda_layers),
        Op("linear: MLA in_proj", product(query + LATENT + ROPE + model.heads, width), model.mla_layers),
        Op("mla", BF16 * mla_weights + cache * (context + rows), model.mla_layers),
        Op("linear: out_proj", product(width, inner), layers),
        Op("mlp (dense)", gated(1, model.dense), model.dense_layers),
        Op("route", BF16 * model.experts * width, sparse),
        Op("experts", gated(listed, model.inner), sparse),
        Op("head", product(model.vocab, width) + FP32 * rows * model.vocab, 1),
        Op("kda_commit", model.kda_layers * (2 * state + FP32 * rows * 4 * inner), 1),
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
