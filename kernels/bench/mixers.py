"""Cold timings of KDA, MLA, sampling and draft ops at the published shapes, with random weights.

python kernels/bench/mixers.py                      # tiny, 1 and 9 rows, 8,192 tokens of context
python kernels/bench/mixers.py --shape flash4       # one rank of four of flash
python kernels/bench/mixers.py --no-pdl             # launches one after another
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cold import Timing, copies_for, copy_bandwidth, print_table, time_graph, weight
from floors import BF16, FP32, MODELS
from torch import Tensor

import ling_kernels
from ling_kernels.cuda import CudaOps
from ling_kernels.cuda.lazy import Candidates
from ling_kernels.ops import (
    MAX_STOP_IDS,
    RING_HEADER,
    ROW_TILE,
    DraftLayerParams,
    DraftParams,
    KdaParams,
    Limits,
    MlaParams,
    MlpParams,
    Proposal,
    Sampling,
)
from ling_kernels.reference.mla import rope_table

SAMPLINGS = {
    "greedy": (0.0, 0, 1.0),
    "top-k 20, top-p 0.95": (0.8, 20, 0.95),
    "top-p 0.95": (0.8, 0, 0.95),
    "temperature": (0.8, 0, 1.0),
}


def time_kda(ops: CudaOps, heads: int, layers: int, rows: int) -> Iterator[Timing]:
    inner = heads * 128
    params = KdaParams(
        in_proj=weight(8, 8),
        conv=weight(3 * inner, 4),
        a_log=torch.zeros(heads, device="cuda"),
        dt_bias=torch.zeros(inner, device="cuda"),
        o_norm=weight(128),
        out_proj=weight(8, 8),
        num_heads=heads,
        lower_bound=-5.0,
        eps=1e-6,
    )
    proj = weight(ROW_TILE, 5 * inner + heads)
    state = torch.zeros(layers, heads, 128, 128, device="cuda")
    conv = torch.zeros(layers, 3, 3 * inner, dtype=torch.bfloat16, device="cuda")
    count = torch.tensor(rows, device="cuda")
    staged = [ops.kda_verify(proj, conv[i], state[i], params, rows)[1] for i in range(layers)]
    size = FP32 * (inner * 128 + rows * 3 * inner) + BF16 * rows * (9 * inner + heads)
    calls = [_call(ops.kda_verify, proj, conv[i], state[i], params, rows) for i in range(layers)]
    yield Timing("kda_verify", rows, size, time_graph(calls))
    size = layers * FP32 * (2 * inner * 128 + rows * 3 * inner)
    yield Timing("kda_commit", rows, size, time_graph([_call(ops.kda_commit, staged, conv, state, count)] * 4))
    if rows > 1:
        return
    many = 2048
    prompt = weight(many, 5 * inner + heads)
    size = FP32 * inner * 256 + many * (BF16 * (6 * inner + heads) + FP32 * 2 * heads * 516 + FP32 * 2 * inner)
    call = _call(ops.kda_prefill, prompt, conv[0], state[0], params)
    yield Timing(f"kda_prefill, {many} rows", many, size, time_graph([call] * 3))


def time_mla(ops: CudaOps, heads: int, rank: int, context: int, rows: int) -> Iterator[Timing]:
    capacity = context + 128
    table = rope_table(capacity, 64, 6e6, "cuda")
    positions = context + torch.arange(ROW_TILE, device="cuda")
    proj = weight(ROW_TILE, (rank or heads * 192) + 576 + heads)
    size = BF16 * (context * 576 + heads * 256 * 512 + rank * heads * 192 + 2 * rows * heads * 576)
    calls = []
    for _ in range(copies_for(size)):
        up = weight(heads, 256, 512)
        low = (weight(rank), weight(heads * 192, rank)) if rank else (None, None)
        params = MlaParams(up, *low, weight(512), up[:, :128], up[:, 128:], up, heads, 64, 1e-6)
        calls.append(_call(ops.mla, proj, weight(capacity, 576), table, positions, params, rows, capacity))
    yield Timing("mla, all its launches", rows, size, time_graph(calls))


def time_sampling(ops: CudaOps, vocab: int, rows: int) -> Iterator[Timing]:
    logits = torch.randn(ROW_TILE, vocab, device="cuda")
    positions = torch.arange(ROW_TILE, device="cuda")
    whole = torch.zeros(8, dtype=torch.int64, device="cuda")
    limits = Limits(whole[0] + 100, whole.new_full((MAX_STOP_IDS,), -1), torch.tensor(False, device="cuda"), whole[1])
    drafts = torch.zeros(rows - 1, dtype=torch.int64, device="cuda") if rows > 1 else None
    span = 304  # about what a block of the head walks
    parts = torch.nn.functional.pad(logits, (0, -vocab % span), value=-100.0).view(ROW_TILE, -1, span).max(-1)
    ids = (parts.indices + span * torch.arange(parts.values.shape[1], device="cuda")).T.int().contiguous()
    known = Candidates(logits, parts.values.T.contiguous(), ids, span)
    for name, words in SAMPLINGS.items():
        sampling = sampling_of(words, vocab)
        call = _call(ops.verdict, logits, drafts, positions, sampling, limits, rows)
        for ops.candidates in (known, None):
            beside = "beside the head" if ops.candidates else "alone"
            size = FP32 * (rows * vocab if ops.candidates is None else 2 * ids.numel())
            yield Timing(f"verdict {beside}, {name}", rows, size, time_graph([call] * 20))
    verdict = ops.verdict(logits, drafts, positions, sampling_of(SAMPLINGS["greedy"], vocab), limits, rows)
    ring = torch.zeros(8, RING_HEADER + 2 * ROW_TILE, dtype=torch.int64, device="cuda")
    call = _call(ops.advance, verdict, ring, positions, whole[3], limits)
    yield Timing("advance", rows, FP32 * 2 * ring.shape[1], time_graph([call] * 20))
    proposal = Proposal(positions[:7], torch.rand(7, device="cuda"))
    call = _call(ops.expect, proposal, whole.new_zeros(15), ring, limits.step)
    yield Timing("expect, 7 drafts", 7, FP32 * 2 * 21, time_graph([call] * 20))


def sampling_of(words: tuple[float, int, float], vocab: int) -> Sampling:
    numbers = torch.tensor(words, device="cuda")
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    return Sampling(words[0] == 0, numbers[0], numbers[1].long(), numbers[2], seed, vocab)


def draft_params(
    hidden: int, vocab: int, layers: int = 3, heads: int = 16, mlp: int = 4608, rank: int = 512
) -> DraftParams:
    def layer() -> DraftLayerParams:
        return DraftLayerParams(
            weight(hidden),
            weight(3 * heads * 128, hidden),
            weight(128),
            weight(128),
            weight(hidden, heads * 128),
            weight(hidden),
            MlpParams(weight(2 * mlp, hidden), weight(hidden, mlp)),
        )

    return DraftParams(
        fc=weight(hidden, 3 * hidden),
        hidden_norm=weight(hidden),
        layers=tuple(layer() for _ in range(layers)),
        norm=weight(hidden),
        markov_w1=weight(vocab, rank),
        markov_w2=weight(vocab, rank),
        markov_head="vanilla",
        markov_extra=(),
        confidence=weight(1, hidden + rank),
        confidence_bias=weight(1),
        confidence_with_markov=True,
        temperatures=torch.ones(7, device="cuda"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        rope_dim=128,
        neox=True,
        from_anchor=True,
        block_size=7,
        mask_id=0,
        eps=1e-6,
    )


def time_draft(ops: CudaOps, hidden: int, vocab: int, context: int) -> Iterator[Timing]:
    """The draft of kernels/README.md: 3 layers, 16 heads x 128, MLP 4608, block 7, rank 512."""
    params, capacity = draft_params(hidden, vocab), context + 128
    table = rope_table(capacity, 128, 6e6, "cuda")
    cache = weight(len(params.layers), 2, capacity, params.num_kv_heads, 128)
    x, length = weight(7, hidden), torch.tensor(context, device="cuda")
    weights = sum(_bytes(t) for p in params.layers for t in (p.in_proj, p.out_proj, p.mlp.gate_up, p.mlp.down))
    size = weights + _bytes(cache) * context / capacity
    yield Timing("draft_block", 7, size, time_graph([_call(ops.draft_block, x, params, cache, table, length, 0)]))
    base, positions = torch.randn(7, vocab, device="cuda"), torch.arange(7, device="cuda")
    anchor, size = torch.zeros((), dtype=torch.int64, device="cuda"), 7 * _bytes(params.markov_w2) + _bytes(base)
    for name, words in SAMPLINGS.items():
        call = _call(ops.markov_pick, base, x, anchor, params, positions, sampling_of(words, vocab))
        yield Timing(f"markov_pick, 7 picks, {name}", 7, size, time_graph([call]))
    call = _call(ops.markov_pick, base, x, anchor, params, positions, sampling_of(SAMPLINGS["greedy"], vocab))
    for turns, asked in ((True, 2), (False, 2), (True, 0), (False, 0), (True, 4)):
        ops.turns, ops.asked = turns, asked
        yield Timing(f"7 picks, {'to and fro' if turns else 'one way'}, {asked} asked", 7, size, time_graph([call]))
    ops.turns, ops.asked = True, 2
    taps = weight(ROW_TILE, 3 * hidden)
    call = _call(ops.draft_context, taps, params, cache, table, positions.repeat(3)[:ROW_TILE], 9)
    size = _bytes(params.fc) + sum(_bytes(p.in_proj) * 2 / 3 for p in params.layers)
    yield Timing("draft_context", 9, size, time_graph([call]))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _call(op: Callable, *args: object) -> Callable[[], object]:
    return lambda: op(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=MODELS, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--cache", type=Path, help="folder for compiled kernels")
    args = parser.parse_args()
    ops = ling_kernels.load("cuda", cache=args.cache, pdl=not args.no_pdl)
    shape = MODELS[args.shape]
    heads, vocab = shape.num_heads, shape.vocab_size
    timings: list[Timing] = []
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        for rows in args.rows:
            timings += time_kda(ops, heads, len(shape.kda_layers), rows)
            timings += time_mla(ops, heads, shape.q_lora_rank, args.context, rows)
            timings += time_sampling(ops, vocab, rows)
        timings += time_draft(ops, shape.hidden_size, vocab, args.context)
    print_table(timings, bandwidth)


if __name__ == "__main__":
    main()
