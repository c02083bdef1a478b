"""What ranks share on one machine: a board of words and messages, and the exchange of the CPU.

Both live in one block of memory that all ranks map (a file descriptor that their parent hands to each of them), so that
nothing is left behind when they end, however they end.

Board: each rank has a page that it alone writes, with numbered messages that the others wait for. It carries what is
needed to set up faster ways (addresses of mailboxes), and barriers.

SharedExchange: `gather` is the one primitive, every rank's part on every rank, in rank order; sums and choices are then
taken on each rank from the same bits. A rank writes part number s into one of two slots and then says so. It may: to
have finished gather s - 1 it saw every rank's part s - 1, and each sent that only after it had taken part s - 2.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Protocol

import torch
from torch import Tensor

from ling_kernels.ops import KernelError

MAX_RANKS = 8
PAGE = 4096
SLOT_BYTES = 4 << 20
MESSAGE_BYTES = PAGE - 64
PATIENCE_S = 3.0  # that a rank waits for another in the middle of a step
STARTING_S = 20.0  # the same while models load and steps are captured
SETTLING_S = 60.0  # that it waits where the other may still compile or import
_NUMBER, _LENGTH, _MESSAGE = 8, 16, 64
_SPINS = 50
_NAP_S = 20e-6
_LONGEST_COUNTED_S = 0.2  # between two looks: a longer gap is this process's own, stopped or starved


class PeerTimeout(KernelError):
    """Rank `rank` waited for rank `peer` in vain."""

    def __init__(self, rank: int, peer: int, seconds: float) -> None:
        super().__init__(f"rank {peer} did not answer rank {rank} within {seconds:g} s")
        self.rank, self.peer, self.seconds = rank, peer, seconds


class Exchange(Protocol):
    """Something that brings ranks together. rank of size."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, part: Tensor) -> Tensor:
        """part [...] -> [N, ...] in rank order, the same bits on every rank. All ranks call it alike."""
        ...

    def set_patience(self, seconds: float) -> None:
        """How long a wait may take from now on."""
        ...

    def check(self) -> None:
        """Raise PeerTimeout where a wait on the device has ended in vain."""
        ...


class Waiting:
    """Counts the seconds that one rank has waited for another; `look` raises PeerTimeout when it is too long."""

    def __init__(self, rank: int, peer: int, seconds: float) -> None:
        self.rank, self.peer, self.seconds = rank, peer, seconds
        self.looks, self.waited, self.last = 0, 0.0, time.monotonic()

    def look(self) -> None:
        """Between two looks at what is waited for."""
        self.looks += 1
        if self.looks < _SPINS:
            time.sleep(0)
            return
        time.sleep(_NAP_S)
        now = time.monotonic()
        self.waited += min(now - self.last, _LONGEST_COUNTED_S)
        self.last = now
        if self.waited > self.seconds:
            raise PeerTimeout(self.rank, self.peer, self.seconds)


def board_bytes(size: int) -> int:
    """Of the shared block: pages of the board, then two slots for each rank."""
    return size * (PAGE + 2 * SLOT_BYTES)


class Board:
    """One rank's view of the block of memory behind `fd`, a file that may still be empty."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        if not 0 <= rank < size <= MAX_RANKS:
            raise KernelError(f"rank {rank} of {size}: at most {MAX_RANKS} ranks")
        self.rank, self.size = rank, size
        if os.fstat(fd).st_size < board_bytes(size):  # it may hold more than a board
            os.ftruncate(fd, board_bytes(size))
        self.memory = mmap.mmap(fd, board_bytes(size))
        self._number = 0

    def share(self, message: bytes = b"", seconds: float = SETTLING_S) -> list[bytes]:
        """Every rank's message, in rank order, when all have come: a barrier too. All ranks call it alike."""
        if len(message) > MESSAGE_BYTES // 2:
            raise KernelError(f"a message of {len(message)} bytes: at most {MESSAGE_BYTES // 2}")
        self._number += 1
        at = self.rank * PAGE + _MESSAGE + self._number % 2 * (MESSAGE_BYTES // 2)
        self.memory[at : at + len(message)] = message
        self._put(_LENGTH + 8 * (self._number % 2), len(message))
        self._put(_NUMBER, self._number)
        return [self._message(rank, seconds) for rank in range(self.size)]

    def _message(self, rank: int, seconds: float) -> bytes:
        waiting = Waiting(self.rank, rank, seconds)
        while self._get(rank, _NUMBER) < self._number:
            waiting.look()
        at = rank * PAGE + _MESSAGE + self._number % 2 * (MESSAGE_BYTES // 2)
        return self.memory[at : at + self._get(rank, _LENGTH + 8 * (self._number % 2))]

    def _put(self, word: int, value: int) -> None:
        struct.pack_into("<q", self.memory, self.rank * PAGE + word, value)

    def _get(self, rank: int, word: int) -> int:
        return struct.unpack_from("<q", self.memory, rank * PAGE + word)[0]


class SharedExchange:
    """Exchange between processes, or threads, over a board's memory. For the CPU."""

    _POSTED = 32  # word of a rank's page: number of its last part

    def __init__(self, board: Board, seconds: float = STARTING_S) -> None:
        self.board, self.seconds = board, seconds
        self.rank, self.size = board.rank, board.size
        self._number = 0

    def gather(self, part: Tensor) -> Tensor:
        flat = part.contiguous().view(-1).view(torch.uint8)
        done = torch.empty(self.size, flat.shape[0], dtype=torch.uint8)
        for at in range(0, flat.shape[0], SLOT_BYTES):
            self._gather(flat[at : at + SLOT_BYTES], done[:, at : at + SLOT_BYTES])
        return done.view(part.dtype).view(self.size, *part.shape)

    def set_patience(self, seconds: float) -> None:
        """How long a wait may take from now on."""
        self.seconds = seconds

    def check(self) -> None:
        """Nothing to ask: `gather` itself raises."""

    def _gather(self, part: Tensor, done: Tensor) -> None:
        self._number += 1
        self._slot(self.rank, part.shape[0]).copy_(part)
        self.board._put(self._POSTED, self._number)
        for rank in range(self.size):
            waiting = Waiting(self.rank, rank, self.seconds)
            while self.board._get(rank, self._POSTED) < self._number:
                waiting.look()
            done[rank].copy_(self._slot(rank, part.shape[0]))

    def _slot(self, rank: int, num_bytes: int) -> Tensor:
        at = self.size * PAGE + (2 * rank + self._number % 2) * SLOT_BYTES
        return torch.frombuffer(self.board.memory, dtype=torch.uint8, count=num_bytes, offset=at)
