"""Several GPUs as one: exchange latencies, whole steps of a published shape, and jitter, with random weights.

python kernels/bench/ranks.py                                  # 2 GPUs: start-up test and exchange latencies only
python kernels/bench/ranks.py --model flash --draft            # each GPU its part of Flash: steps, breakdown, jitter
python kernels/bench/ranks.py --fallback                       # NCCL in place of peer memory

One process a GPU; nothing waits longer than --deadline seconds. Weights are random: times are real, texts are not.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from by_kernel import print_breakdown
from cold import step_ms

import ling_kernels
from ling_kernels.cuda.exchange import launch_sum
from ling_kernels.exchange import Board
from ling_kernels.ops import ROW_TILE
from ling_local.engine import dummy
from ling_local.engine.capture import CapturedStep
from ling_local.engine.exchange_probe import chain_us
from ling_local.engine.follow import Peers, follow
from ling_local.engine.gpu import GpuOptions
from ling_local.engine.launch import bus_id
from ling_local.engine.native import NativeEngine
from ling_local.engine.pinning import pin_launcher
from ling_local.engine.protocol import Dummy, EngineInfo
from ling_local.engine.shapes import dummy_draft_config
from ling_local.engine.shard import Shard
from ling_local.engine.step import step
from ling_local.paths import cache_dir
from ling_local.types import SamplingParams, TokenRequest

GREEDY = SamplingParams(temperature=0.0)


class Rank:
    """One rank of the benchmark: its ops, and, when they are there, its engine."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.size = args, args.rank, args.ranks
        self.device = f"cuda:{args.rank}"
        torch.cuda.set_device(self.device)
        self.board = Board(args.fds[0], args.rank, args.ranks) if args.ranks > 1 else None
        begun = time.monotonic()
        self.ops = ling_kernels.load(
            self.device,
            cache=args.cache,
            pdl=not args.no_pdl,
            board=self.board,
            peer_memory=not args.fallback,
        )
        self.say(f"kernels after {time.monotonic() - begun:.1f} s; pinned to core {self.pin()}")
        if self.board:
            self.say(f"exchange: {self.ops.exchange.kind} {self.ops.note}")
            self.ops.exchange.set_patience(20.0)  # a profiler that starts on one rank only

    def pin(self) -> int | None:
        return pin_launcher(self.rank, self.size, bus_id(self.device))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def together(self) -> None:
        torch.cuda.synchronize()
        if self.board:
            self.board.share()


def time_exchange(at: Rank, width: int, vocab: int) -> None:
    """Latencies of each exchange, one after the other in a graph: what it adds to a step."""
    ops, where = at.ops, at.device
    x = torch.randn(ROW_TILE, width, device=where).bfloat16()
    weight, total = torch.ones(width, device=where, dtype=torch.bfloat16), torch.empty_like(x)
    part = torch.randn(ROW_TILE, width, device=where).bfloat16()
    table = torch.randn(vocab // at.size, width, device=where).bfloat16()
    ids = torch.arange(ROW_TILE, device=where)
    logits = torch.randn(ROW_TILE, vocab // at.size, device=where)
    best = torch.arange(64 * ROW_TILE, device=where).view(ROW_TILE, 64)
    bad = torch.zeros(ROW_TILE, 64, dtype=torch.int32, device=where)
    at.say(f"\n| exchange of {at.size} ranks, width {width}, us in a graph | 1 row | 9 rows |\n| --- | ---: | ---: |")
    kinds: dict[str, Callable[[int], object]] = {
        "residual and norm alone, no exchange": lambda m: ops.exchange_norm(None, x, weight, 1e-6, m),
        "sum, residual, norm": lambda m: ops.exchange_norm(part, x, weight, 1e-6, m),
        "embedding": lambda m: ops.embed(ids[:m], table),
        "best candidates": lambda m: ops._best(best[:m], bad[:m], None, vocab // at.size),
        "logits of the rows": lambda m: ops.whole(logits[:m]),
    }
    if at.ops.exchange.narrow is not None:
        kinds["sum alone"] = lambda m: launch_sum(ops.device, ops.exchange, part, None, total, m)
    for name, run in kinds.items():
        figures = [chain_us(at.board, lambda m=m, run=run: run(m)) for m in (1, 9)]
        at.say(f"| {name} | {figures[0]:.2f} | {figures[1]:.2f} |")
    at.ops.exchange.check()


def make_engine(at: Rank) -> NativeEngine:
    """This rank's part of the model, behind the engine that real models use."""
    args, shard = at.args, Shard(at.rank, at.size)
    config = dummy.MODELS[args.model]
    if args.layers:
        config = replace(config, num_layers=args.layers)
    begun = time.monotonic()
    with torch.inference_mode():
        weights = dummy.dummy_weights(config, torch.bfloat16, at.device, shard=shard)
        drafter = None
        if args.draft:
            shape = dummy_draft_config(Dummy(args.model, args.layers))
            drafter = dummy.dummy_draft(shape, torch.bfloat16, at.device, shard=shard)
    at.together()
    used = torch.cuda.memory_allocated() / 2**30
    at.say(f"DUMMY {args.model}, {config.num_layers} layers: {used:.1f} GiB a rank in {time.monotonic() - begun:.1f} s")
    info = EngineInfo(
        model=f"dummy-{args.model}",
        dtype="bfloat16",
        device=at.device,
        context_limit=args.context + 30_000,
        vocab_size=config.vocab_size,
        ranks=at.size,
        drafter="dspark" if drafter else "off",
        block=drafter.block if drafter else 0,
    )
    return NativeEngine(weights, info, config.vocab_size, drafter, at.ops, GpuOptions())


def begin(engine: NativeEngine, context: int) -> None:
    """As in step.py: drafts are random, or rows would choose the same experts; on all ranks the same."""
    state = engine._state
    state.reserve(context + 4096)
    state.begin(context, 1, 1 << 40, [], GREEDY)
    state.drafts.random_(state.sampling.vocab, generator=torch.Generator(state.drafts.device).manual_seed(1))


def time_steps(at: Rank, engine: NativeEngine) -> None:
    """Steps in graphs: on the GPU, and as the caller sees them with three under way."""
    captured = CapturedStep(step)
    block = engine.info.block
    kinds = [(1, 0), (9, 0)] + ([(block + 1, block)] if block else [])
    at.say(f"\n| step after {at.args.context} tokens | ms on the GPU | ms at the caller |\n| --- | ---: | ---: |")

    def again() -> None:
        begin(engine, at.args.context)
        at.together()

    for rows, following in kinds:
        run = partial(captured, engine.ops, engine.weights, engine._state, engine.drafter, rows, following)
        with torch.inference_mode():
            again()
            run()
            on_gpu, seen = step_ms(run, again)
            at.together()
            what = f"{rows} rows" + (f" and {following} drafts" if following else "")
            at.say(f"| {what} | {on_gpu:.3f} | {seen:.3f} |")
            if at.size > 1:
                at.ops.exchange.check()
            if at.args.breakdown:
                again()
                breakdown(at, run)


def breakdown(at: Rank, run: Callable[[], None], steps: int = 5) -> None:
    """Launches and microseconds by kernel of one step; profiled on rank 0, so a little slower than it is."""
    if at.rank:
        for _ in range(steps):
            run()
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                run()
            torch.cuda.synchronize()
        print_breakdown(profile, steps)
    at.together()


def gaps_of(engine: NativeEngine, num: int, draft: bool) -> list[float]:
    """Milliseconds between steps of `num` tokens, as the front would see them."""
    request = TokenRequest(tuple(range(5, 69)), sampling=GREEDY, max_tokens=num, draft=draft, full_width=draft)
    times = [result.time_s for result in engine.generate(request)]
    return [1000 * (b - a) for a, b in pairwise(times[8:])]


def lead(at: Rank, engine: NativeEngine) -> None:
    """Rank 0: whole generations through the engine, and their jitter."""
    for draft in (False, True) if engine.drafter else (False,):
        num = at.args.jitter // 5 if draft else at.args.jitter
        ordered = sorted(gaps_of(engine, num, draft))
        middle, late = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
        kind = f"{num} tokens, drafts {'on' if draft else 'off'}"
        at.say(f"{kind}: step median {middle:.3f} ms, p99 {late:.3f} ({late / middle:.3f}), max {ordered[-1]:.3f}")


def run_rank(args: argparse.Namespace) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.deadline - 5, exit=True)
    at = Rank(args)
    if at.size > 1 and not args.no_latency:
        with torch.inference_mode():
            time_exchange(at, 2560, 157184)
    if args.model:
        engine = make_engine(at)
        if not args.no_steps:
            time_steps(at, engine)
        if args.jitter:
            serve(at, engine)
    if at.board:
        at.board.share()


def serve(at: Rank, engine: NativeEngine) -> None:
    pipes = [Connection(fd) for fd in at.args.fds[1:]]
    at.together()
    if at.rank:
        follow(engine, pipes[0])
        return
    if pipes:
        engine.peers = Peers(pipes)
    lead(at, engine)
    if engine.peers:
        engine.peers.close()


def start(args: argparse.Namespace) -> int:
    """Start all ranks, let rank 0 print, and end all when one fails or time is up."""
    board = os.memfd_create("bench-ranks", 0)
    pairs = [socket.socketpair() for _ in range(args.ranks - 1)]
    processes = []
    for rank in range(args.ranks):
        ends = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
        fds = (board, *[end.fileno() for end in ends])
        command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--fds", ",".join(map(str, fds))]
        said = None if rank == 0 else subprocess.PIPE
        processes.append(subprocess.Popen(command, pass_fds=fds, stdout=said, stderr=subprocess.STDOUT))
    for end in (end for pair in pairs for end in pair):
        end.close()
    until = time.monotonic() + args.deadline
    code = None
    while code is None:
        time.sleep(0.1)
        codes = [process.poll() for process in processes]
        if any(codes) or time.monotonic() > until:
            code = 1
        elif all(c == 0 for c in codes):
            code = 0
    for rank, process in enumerate(processes):
        if code and process.poll() is None:
            print(f"rank {rank} is ended", flush=True)
            process.send_signal(signal.SIGKILL)
        if process.stdout:
            tail = process.stdout.read().decode(errors="replace")[-4000:]
            if code and tail:
                print(f"---- rank {rank} said:\n{tail}", flush=True)
        process.wait()
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=dummy.MODELS)
    parser.add_argument("--layers", type=int, default=0, help="cut the depth")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--draft", action="store_true", help="with a 5-layer block-8 DSpark draft")
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--jitter", type=int, default=0, help="tokens to generate through the engine")
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--no-steps", action="store_true")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--fallback", action="store_true", help="NCCL, as where peer memory does not work")
    parser.add_argument("--cache", type=Path, default=cache_dir() / "kernels", help="folder for compiled kernels")
    parser.add_argument("--deadline", type=float, default=240.0)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--fds", type=lambda text: [int(fd) for fd in text.split(",")], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank < 0:
        sys.exit(start(args))
    run_rank(args)


if __name__ == "__main__":
    main()
