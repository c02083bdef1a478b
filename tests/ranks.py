"""Two or more ranks in the threads of one process, and what ranks say beside what one does, for tests of both."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ling_kernels.exchange import Board
from ling_kernels.ops import ROW_TILE
from ling_local.engine.follow import Peers, follow
from ling_local.engine.native import NativeEngine
from ling_local.engine.remote import RemoteEngine
from ling_local.types import SamplingParams, TokenRequest


def boards(size: int) -> list[Board]:
    """What `size` ranks share."""
    fd = os.memfd_create("test-ranks", 0)
    try:
        return [Board(fd, rank, size) for rank in range(size)]
    finally:
        os.close(fd)


def ids_of(
    engine: NativeEngine | RemoteEngine, prompt: tuple[int, ...], num: int, draft: bool, params: SamplingParams
) -> list[int]:
    """The ids of an answer."""
    request = TokenRequest(prompt, sampling=params, max_tokens=num, draft=draft)
    return [token for result in engine.generate(request) for token in result.ids]


def assert_same_up_to_a_near_tie(
    got: list[int], want: list[int], alone: NativeEngine, prompt: tuple[int, ...], near: float = 1e-4
) -> None:
    """Sums over ranks are taken in another order: only where two logits nearly tie may the texts part. near: standard
    deviations of the logits."""
    parted = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    if parted is not None:
        logits = alone.score((*prompt, *want[:parted]), window=ROW_TILE)[-1]
        best = logits.topk(2).values
        margin = ((best[0] - best[1]) / logits.std()).item()
        assert margin < near, f"parted after {parted} tokens, {margin:.1e} standard deviations from a tie"


@contextmanager
def ranks_of(folder: Path, size: int = 2, **options: Any) -> Iterator[list[NativeEngine]]:
    """The engines of all ranks; rank 0's is the one to ask. The others follow from threads until the end."""
    engines: list[NativeEngine | None] = [None] * size
    errors: list[BaseException] = []
    options = {"threads": 1, **options}
    collects = gc.isenabled()  # not where others run beside these

    def load(board: Board) -> None:
        try:
            engines[board.rank] = NativeEngine.load(folder, board=board, **options)
        except BaseException as error:
            errors.append(error)

    _together([lambda board=board: load(board) for board in boards(size)])
    if errors:
        raise errors[0]
    pipes = [Pipe() for _ in range(size - 1)]

    def lead(rank: int) -> None:
        try:
            follow(engines[rank], pipes[rank - 1][1])
        except BaseException as error:
            errors.append(error)

    engines[0].peers = Peers([ours for ours, _ in pipes])
    threads = [threading.Thread(target=lead, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        yield engines  # type: ignore[misc]
    finally:
        engines[0].close()
        for thread in threads:
            thread.join(20)
    assert not errors, errors
    assert gc.isenabled() == collects  # ranks run without collections, and leave no process without them


def _together(bodies: list[Any]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
