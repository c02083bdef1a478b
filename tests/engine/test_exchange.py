"""What ranks share on a CPU: messages, sums in rank order, and an end to waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from ling_kernels.exchange import SLOT_BYTES, Board, PeerTimeout, SharedExchange
from ling_kernels.ops import KernelError
from ling_kernels.reference.ranks import RankOps
from parity import assert_bits
from ranks import boards


def everywhere(size: int, body: Callable[[Board], object]) -> list:
    """The results of body on every rank, at once."""
    results: list = [None] * size

    def run(board: Board) -> None:
        try:
            results[board.rank] = body(board)
        except BaseException as error:
            results[board.rank] = error

    threads = [threading.Thread(target=run, args=(board,)) for board in boards(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PeerTimeout):
            raise result
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_messages_reach_all_in_rank_order(size: int) -> None:
    def body(board: Board) -> list:
        said = []
        for turn in range(50):
            time.sleep(0.001 * ((turn + board.rank) % 3))
            said.append(board.share(b"%d of %d" % (turn, board.rank)))
        return said

    for said in everywhere(size, body):
        assert said == [[b"%d of %d" % (turn, rank) for rank in range(size)] for turn in range(50)]


def test_parts_arrive_whole_and_in_rank_order_however_large() -> None:
    def body(board: Board) -> list:
        exchange = SharedExchange(board)
        shapes = [(), (3,), (16, 48), (SLOT_BYTES // 4 + 5,), (2, SLOT_BYTES // 8)] * 3
        found = []
        for number, shape in enumerate(shapes):
            dtype = (torch.float32, torch.bfloat16, torch.int64)[number % 3]
            found.append(exchange.gather(torch.full(shape, 3 * number + board.rank, dtype=dtype)))
        return found

    for found in everywhere(2, body):
        for number, whole in enumerate(found):
            assert whole[0].eq(3 * number).all()
            assert whole[1].eq(3 * number + 1).all()


def test_a_sum_has_the_same_bits_on_every_rank_whoever_is_late() -> None:
    def body(board: Board) -> tuple:
        ops = RankOps(SharedExchange(board))
        partial = torch.randn(16, 40, generator=torch.Generator().manual_seed(board.rank)).bfloat16()
        x, weight = torch.randn(16, 40, generator=torch.Generator().manual_seed(9)).bfloat16(), torch.ones(40)
        found = []
        for turn in range(10):
            time.sleep(0.002 * ((turn + board.rank) % 2))
            found.append(ops.exchange_norm(partial, x, weight, 1e-6)[0])
        return found

    first, *others = everywhere(4, body)
    parts = [torch.randn(16, 40, generator=torch.Generator().manual_seed(rank)).bfloat16().float() for rank in range(4)]
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(9)).bfloat16()
    want = (x + (((parts[0] + parts[1]) + parts[2]) + parts[3])).bfloat16()
    for turns in (first, *others):
        for total in turns:
            assert_bits(total, want, "sum")


def test_an_absent_rank_is_named() -> None:
    def body(board: Board) -> object:
        if board.rank == 1:
            return None
        return SharedExchange(board, 0.2).gather(torch.zeros(4))

    begun = time.monotonic()
    late, _, other = everywhere(3, body)
    assert isinstance(late, PeerTimeout)
    assert str(late) == "rank 1 did not answer rank 0 within 0.2 s"
    assert isinstance(other, PeerTimeout)
    assert time.monotonic() - begun < 5


def test_a_board_refuses_what_it_cannot_hold() -> None:
    board = boards(1)[0]
    with pytest.raises(KernelError, match="a message of 5000 bytes"):
        board.share(b"x" * 5000)
    with pytest.raises(KernelError, match="at most 8"):
        boards(9)
