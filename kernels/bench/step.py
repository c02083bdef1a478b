"""The whole decode step of a published shape with random weights: unprofiled medians, then a table by kernel.

python kernels/bench/step.py                         # tiny, 1 and 9 rows after 8,192 tokens, and an 8,192-token prefill
python kernels/bench/step.py --draft                 # with the 3-layer DSpark draft at the end of the step
python kernels/bench/step.py --model flash --shard 4 # one rank of four, without exchange
python kernels/bench/step.py --breakdown             # microseconds by kernel of one step

Weights are random: times are real, texts and acceptance are not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from by_kernel import breakdown
from cold import step_ms

import ling_kernels
from ling_kernels.cuda import CudaOps
from ling_local.engine import dummy
from ling_local.engine.capture import CapturedStep
from ling_local.engine.dspark import DSpark
from ling_local.engine.model import forward
from ling_local.engine.state import SequenceState
from ling_local.engine.step import step
from ling_local.engine.weights import Weights
from ling_local.types import SamplingParams

WARM_S = 0.5


def begin(state: SequenceState, context: int) -> None:
    """As if `context` tokens had been through the model, and without end. Drafts are random: equal rows would
    choose the same experts."""
    state.reserve(context + 2048)
    state.begin(context, 1, 1 << 40, [], SamplingParams(temperature=0.0))
    state.drafts.random_(state.sampling.vocab)


def milliseconds(run: Callable[[], None], begin: Callable[[], None]) -> tuple[float, float]:
    """On the GPU and at the caller, after half a second of runs: a GPU that was idle begins with slower clocks (3 %
    of a step)."""
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        run()
        torch.cuda.synchronize()
    return step_ms(run, begin)


def time_steps(
    ops: CudaOps, weights: Weights, state: SequenceState, drafter: DSpark | None, args: argparse.Namespace
) -> None:
    captured = CapturedStep(step)
    following = drafter.block if drafter else 0
    again = partial(begin, state, args.context)
    for rows in args.rows:
        again()
        run = partial(captured, ops, weights, state, drafter, rows, following)
        run()  # warm-up and capture
        on_gpu, seen = milliseconds(run, again)
        what = f"{rows} rows" + (f" and {following} drafts" if following else "")
        print(f"| {what} | {on_gpu:.3f} ms on the GPU | {seen:.3f} ms seen by the caller |", flush=True)
        if args.breakdown:
            again()
            breakdown(run)


def time_prefill(
    ops: CudaOps, weights: Weights, state: SequenceState, tokens: int, chunk: int, table: bool = False
) -> None:
    ids = torch.randint(0, weights.config.vocab_size, (tokens,), device="cuda")

    def run() -> None:
        state.rewind()
        for first in range(0, tokens, chunk):
            positions = torch.arange(first, min(first + chunk, tokens), device="cuda")
            forward(ops, weights, state, ids[first : first + chunk], positions, None)

    spans = []
    for _ in range(3):
        torch.cuda.synchronize()
        clock = time.perf_counter()
        run()
        torch.cuda.synchronize()
        spans.append(1000 * (time.perf_counter() - clock))
    finite = bool(state.recurrent.isfinite().all() & state.latent.isfinite().all())
    what = f"prefill of {tokens} tokens in chunks of {chunk}"
    print(f"| {what} | {min(spans):.1f} ms | state finite: {finite} |", flush=True)
    if table:
        breakdown(run, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=dummy.MODELS, default="tiny")
    parser.add_argument("--shard", type=int, default=1, help="compute one rank's part of so many, without exchange")
    parser.add_argument("--layers", type=int, default=0, help="cut the depth")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prefill", type=int, default=8192, help="tokens; 0: none")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--late-norm", action="store_true", help="exchange_norm waits before it lets the next one in")
    parser.add_argument("--norms-alone", action="store_true", help="one row: no norm in the kernel that comes after")
    parser.add_argument("--gate-fp32", action="store_true", help="routers with weights in fp32")
    parser.add_argument("--cache", type=Path, help="folder for compiled kernels")
    args = parser.parse_args()
    ops = ling_kernels.load("cuda", cache=args.cache, pdl=not args.no_pdl, gate_fp32=args.gate_fp32)
    ops.early_norm, ops.norm_in_next = not args.late_norm, not args.norms_alone
    config = dummy.shard_of(dummy.MODELS[args.model], args.shard)
    if args.layers:
        config = replace(config, num_layers=args.layers)
    with torch.inference_mode():
        weights = dummy.dummy_weights(config, torch.bfloat16, "cuda")
        drafter = dummy.dummy_draft(dummy.draft_for(config), torch.bfloat16, "cuda") if args.draft else None
        room = max(args.context, args.prefill) + 20_000
        state = SequenceState(config, room, torch.bfloat16, "cuda", config.vocab_size)
        if drafter:
            drafter.attach(state, weights)
        print(
            f"DUMMY weights, {args.model}, shard {args.shard}, {config.num_layers} layers, after {args.context} tokens"
        )
        time_steps(ops, weights, state, drafter, args)
        if args.prefill:
            time_prefill(ops, weights, state, args.prefill, args.chunk, args.breakdown)


if __name__ == "__main__":
    main()
