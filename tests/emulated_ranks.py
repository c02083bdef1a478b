"""One rank of several on emulated GPUs, in a process that test_emulated_exchange forks.

Mailboxes lie in memory that the processes share, and each check is run by all ranks at once, against the reference's
ops for the same ranks. Whatever fails ends the process with its reason.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from device_checks import Place, assert_near
from emulator import ORDERS
from ling_kernels.cuda.compile import units
from ling_kernels.cuda.exchange import MAX_RANKS, Geometry, mail_words
from ling_kernels.cuda.ranks import CudaRankOps
from ling_kernels.exchange import Board, PeerTimeout, SharedExchange, board_bytes
from ling_kernels.ops import ROW_TILE, DraftParams, Limits, Sampling
from ling_kernels.reference.ranks import RankOps
from ling_local.engine.native import NativeEngine
from ling_local.types import SamplingParams, TokenRequest
from parity import assert_bits
from settled import SettledDevice

VOCAB = 104  # a tokenizer's ids, in 2 parts of 56 or 4 of 28 rows: the last part is cut


class EmulatedExchange:
    """As PeerExchange, in shared memory."""

    def __init__(self, board: Board, fd: int, seconds: float = 20.0) -> None:
        self.rank, self.size, self.seconds = board.rank, board.size, seconds
        kinds = (Geometry(80, 256), Geometry(8, 2048))
        sizes = [kind.num_bytes(board.size) for kind in kinds]
        start = board_bytes(board.size)
        board.share()  # its memory is there on every rank: none makes the file shorter
        os.ftruncate(fd, start + board.size * sum(sizes))
        self._memory = mmap.mmap(fd, start + board.size * sum(sizes))
        first = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() + start
        self.words = torch.zeros(2, dtype=torch.int32)
        self.numbers = [torch.zeros(kind.blocks, dtype=torch.int32) for kind in kinds]
        self.mails = []
        for which, kind in enumerate(kinds):
            boxes = [first + rank * sum(sizes) + which * sizes[0] for rank in range(board.size)]
            words = [self.numbers[which].data_ptr(), self.words.data_ptr(), self.words.data_ptr() + 4]
            made = mail_words(boxes, *words, board.rank, kind, seconds)
            self.mails.append(torch.tensor(made, dtype=torch.int64))
        self.narrow, self.wide = (mail.data_ptr() for mail in self.mails)

    def check(self) -> None:
        if missing := int(self.words[1]):
            raise PeerTimeout(self.rank, missing - 1, self.seconds)


class GatheredExchange(SharedExchange):
    """As NcclExchange."""

    narrow = wide = None


class Rank:
    """What a check works with: the emulated ops and the reference's."""

    def __init__(self, rank: int, size: int, fd: int, folder: Path, gathered: bool) -> None:
        self.board = Board(fd, rank, size)
        self.rank, self.size, self.folder = rank, size, folder
        self.device = SettledDevice(folder, units())
        self.reference = RankOps(SharedExchange(self.board, 60.0))
        self.exchange = GatheredExchange(self.board, 60.0) if gathered else EmulatedExchange(self.board, fd)
        if gathered:  # one count of the parts that went over the board
            self.reference.exchange = self.exchange
        self.ops = CudaRankOps(self.device, self.exchange)
        self.place = Place(self.ops, "cpu", self.device.constant)

    def rand(self, *shape: int, seed: int, own: bool = False) -> Tensor:
        """The same on every rank, or each rank's own."""
        return self.place.rand(*shape, seed=100 * seed + (1 + self.rank if own else 0))


def check_activations(at: Rank) -> None:
    for width, rows in ((8, 1), (264, 9), (48, ROW_TILE)):
        x, partial = at.rand(ROW_TILE, width, seed=1), at.rand(ROW_TILE, width, seed=2, own=True)
        weight = at.rand(width, seed=3)
        at.device.constant(weight)
        for _ in range(3):
            total, h = at.ops.exchange_norm(partial, x, weight, 1e-6, rows)
            want_total, want = at.reference.exchange_norm(partial, x, weight, 1e-6, rows)
            assert_bits(total[:rows], want_total[:rows], "residual stream")
            assert_near(h[:rows], want[:rows], "norm")
        assert_near(at.ops.exchange_norm(None, x, weight, 1e-6, rows)[1][:rows], at_norm(at, x, weight)[:rows], "h")
    x, partial = at.rand(70, 16, seed=4), at.rand(70, 16, seed=5, own=True)
    even = x.new_ones(16)
    at.device.constant(even)
    total, _ = at.ops.exchange_norm(partial, x, even, 1e-6)
    assert_bits(total, at.reference.exchange_norm(partial, x, even, 1e-6)[0], "residual stream of a chunk")
    table = at.rand(28, 48, seed=6, own=True)
    at.device.constant(table)
    ids = torch.arange(28 * at.size).flip(0)[: ROW_TILE + 4]
    assert_bits(at.ops.embed(ids, table), at.reference.embed(ids, table), "embedding")
    args = (torch.tensor(30), torch.tensor(5), table, 4, 7)
    for got, want in zip(at.ops.draft_embed(*args), at.reference.draft_embed(*args), strict=True):
        assert_bits(got, want, "a draft's embedding and positions")


def at_norm(at: Rank, x: Tensor, weight: Tensor) -> Tensor:
    return at.reference.exchange_norm(None, x, weight, 1e-6)[1]


def sampling(greedy: bool) -> Sampling:
    words = torch.tensor([5, 3], dtype=torch.int64)
    reals = torch.tensor([0.8, 0.9])
    return Sampling(greedy, reals[0], words[0], reals[1], words[1], VOCAB)


def check_choices(at: Rank) -> None:
    count = 112 // at.size
    for greedy in (True, False):
        for rows in (1, 9):
            logits = at.rand(ROW_TILE, count, seed=7 + rows, own=True).float()
            logits[0, 3] = 9.0  # on every rank: the lowest id wins
            if rows > 1 and at.rank == 1:
                logits[4, 1] = torch.nan
            positions = torch.arange(20, 20 + ROW_TILE)
            drafts = torch.full((rows - 1,), 3) if rows > 1 else None
            words = [torch.tensor(v) for v in (100, False, 5)]
            limits = Limits(words[0], torch.full((16,), -1), words[1], words[2])
            got = at.ops.verdict(logits, drafts, positions, sampling(greedy), limits, rows)
            want = at.reference.verdict(logits, drafts, positions, sampling(greedy), limits, rows)
            known = [r for r in range(rows) if r != 4]
            assert got.tokens[known].tolist() == want.tokens[known].tolist()
            assert got.count.item() == want.count.item()
            assert got.entry[:6].tolist() == want.entry[:6].tolist()
        some = at.rand(4, count, seed=30, own=True).float()
        got, want = (ops.pick(some, positions[:4], sampling(greedy)) for ops in (at.ops, at.reference))
        assert got.drafts.tolist() == want.drafts.tolist()
        assert_near(got.confidence, want.confidence, "confidence", 1e-5)
    logits = at.rand(20, count, seed=40, own=True).float()
    assert_bits(at.ops.whole(logits), at.reference.whole(logits), "whole logits")


def check_picks(at: Rank) -> None:
    count, rank, width = 112 // at.size, 16, 24
    w1 = at.rand(112, rank, seed=50)
    w2 = at.rand(count, rank, seed=51, own=True)
    sure, bias = at.rand(1, width + rank, seed=52), at.rand(1, seed=53)
    at.device.constant(w1, w2, sure, bias)
    one = torch.ones(3)
    at.device.constant(one)
    params = DraftParams(
        w1, w1, (), w1, w1, w2, "vanilla", (), sure, bias, True, one, 1, 1, 128, 128, True, True, 3, 4, 1e-6
    )
    base, h = at.rand(3, count, seed=54, own=True).float(), at.rand(3, width, seed=55)
    positions = torch.arange(9, 12)
    for greedy in (True, False):
        args = (base, h, torch.tensor(70), params, positions, sampling(greedy))
        got, want = at.ops.markov_pick(*args), at.reference.markov_pick(*args)
        assert got.drafts.tolist() == want.drafts.tolist()
        assert_near(got.confidence, want.confidence, "confidence", 1e-4)


def check_ops(at: Rank) -> None:
    check_activations(at)
    check_choices(at)
    check_picks(at)


def check_silence(at: Rank) -> None:
    """Rank 1 stays away: rank 0 gives up once, names it, and the exchanges after that do not wait at all."""
    if at.rank == 1:
        at.board.share()
        return
    for mail in at.exchange.mails:
        mail[MAX_RANKS + 3] = 300_000_000
    x, even = at.rand(ROW_TILE, 16, seed=60), at.rand(16, seed=61)
    at.device.constant(even)
    begun = time.monotonic()
    for _ in range(20):
        at.ops.exchange_norm(x, x, even, 1e-6, 2)
    assert 0.25 < time.monotonic() - begun < 3
    with pytest.raises(PeerTimeout) as caught:
        at.exchange.check()
    assert caught.value.peer == 1
    at.board.share()


def check_engine(at: Rank) -> None:
    """A whole engine of this rank's part: tokens as one CPU engine has them, with and without drafts."""
    engine = NativeEngine.load(
        at.folder / "model", dtype="bfloat16", draft="dspark", context=64, threads=1, board=at.board
    )
    engine.ops = at.ops
    at.device.constant(*_tensors(engine.weights), *_tensors(engine.drafter.params))
    at.device.constant(engine._state.rope, engine._state.draft_rope)
    at.device.constant(*[at.ops._gate(layer.mlp.gate) for layer in engine.weights.layers if hasattr(layer.mlp, "gate")])
    found = []
    for params in (SamplingParams(temperature=0.0), SamplingParams(0.8, 30, 0.9, 3)):
        for draft in (False, True):
            request = TokenRequest((3, 10, 17, 24, 31), sampling=params, max_tokens=4, draft=draft, full_width=True)
            found.append([token for result in _steps(at, engine, request) for token in result.ids])
    assert found[0] == found[1]
    assert found[2] == found[3]
    (at.folder / f"ids{at.rank}").write_text(repr(found))


def _steps(at: Rank, engine: NativeEngine, request: TokenRequest) -> list:
    """All ranks run the request as rank 0 would: what depends on time is switched off by full_width."""
    return list(engine.generate(request))


def _tensors(value: object) -> list[Tensor]:
    import dataclasses

    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in _tensors(getattr(value, field.name))]
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple) else []


CHECKS: dict[str, Callable[[Rank], None]] = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}


def run(check: str, rank: int, size: int, fd: int, folder: Path, gathered: bool, orders: Sequence[str]) -> None:
    """What a rank's process does. fd: of the memory that the ranks share; orders: of threads, some of ORDERS."""
    torch.set_num_threads(1)
    at = Rank(rank, size, fd, folder, gathered)
    with torch.inference_mode(), at.device.in_order():
        for order in orders:
            at.device.order = ORDERS.index(order)
            CHECKS[check](at)
