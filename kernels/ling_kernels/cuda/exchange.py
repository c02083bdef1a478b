"""How ranks reach each other's GPUs: mailboxes in peer memory, tried out at the start, or NCCL where they do not work.

Peer memory is claimed by boards that never deliver a byte, so it is believed only after an exchange of known values on
every rank. What all ranks see on the board decides for all of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Device
from ling_kernels.exchange import MAX_RANKS, PATIENCE_S, STARTING_S, Board, PeerTimeout
from ling_kernels.ops import ROW_TILE, KernelError

MAX_WIDTH, MAX_VOCAB = 4096, 163840
BLOCKS, ROWS_BLOCKS, ROWS_THREADS = 256, 128, 256  # of a launch that exchanges activations, and logits
SIZES = (2, 4, 8)  # as the kernels come
HANDLE_BYTES = 64
TRIAL_S = 1.0
TRIALS = 24


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of one kind of mail: blocks of a launch, and packets of 16 bytes (8 of data) of a block from each rank."""

    blocks: int
    packets: int

    def num_bytes(self, size: int) -> int:
        return 2 * size * self.blocks * self.packets * 16


def geometries(size: int) -> tuple[Geometry, Geometry]:
    """For activations: a row a block. For logits: a window's, MAX_VOCAB rows of the vocabulary over all ranks."""
    units = ROW_TILE * -(-MAX_VOCAB // size) // 4
    rounds = -(-units // (ROWS_BLOCKS * ROWS_THREADS))
    return Geometry(BLOCKS, MAX_WIDTH // 4), Geometry(ROWS_BLOCKS, rounds * 2 * ROWS_THREADS)


def mail_words(
    boxes: list[int], numbers: int, error: int, host_error: int, rank: int, geometry: Geometry, seconds: float
) -> list[int]:
    """struct Mail of exchange.cuh as 64-bit words; boxes and the others are addresses."""
    padded = boxes + [0] * (MAX_RANKS - len(boxes))
    return [*padded, numbers, error, host_error, round(seconds * 1e9), rank, geometry.blocks, geometry.packets]


class PeerExchange:
    """Mailboxes on every GPU, written by the others over the links between them.

    narrow, wide: addresses of the Mail for activations and for logits. Raises KernelError where memory cannot be
    shared; every rank then hears of it and raises.
    """

    kind = "peer memory"

    def __init__(self, device: Device, board: Board, seconds: float = PATIENCE_S) -> None:
        if board.size not in SIZES:
            raise KernelError(f"{board.size} ranks: the kernels come for {', '.join(map(str, SIZES))}")
        self.rank, self.size = board.rank, board.size
        self._device, self._board, self._seconds = device, board, seconds
        self._geometries = geometries(self.size)
        self._opened: list[int] = []
        self._own = 0
        self._where = f"cuda:{device.index}"
        self._error = torch.zeros(1, dtype=torch.int32, device=self._where)
        self._host_error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        blocks = [geometry.blocks for geometry in self._geometries]
        self._numbers = [torch.zeros(count, dtype=torch.int32, device=self._where) for count in blocks]
        boxes = self._open_boxes()
        self._mails = [self._mail(boxes, which, seconds) for which in range(2)]
        torch.cuda.synchronize(self._where)
        self.narrow, self.wide = (mail.data_ptr() for mail in self._mails)

    def check(self) -> None:
        """Raise PeerTimeout where a wait on the device has ended in vain. Reads host memory only."""
        if missing := int(self._host_error[0]):
            raise PeerTimeout(self.rank, missing - 1, self._seconds)

    def set_patience(self, seconds: float) -> None:
        """How long a wait on the device may take from now on."""
        torch.cuda.synchronize(self._where)
        self._seconds = seconds
        for mail in self._mails:
            mail[MAX_RANKS + 3] = round(seconds * 1e9)
        torch.cuda.synchronize(self._where)

    def close(self) -> None:
        """Give the mailboxes back; no rank may still use them."""
        driver = self._device.driver
        torch.cuda.synchronize(self._where)
        for address in self._opened:
            driver.cuIpcCloseMemHandle(driver.CUdeviceptr(address))
        self._opened.clear()
        if self._own:
            driver.cuMemFree(driver.CUdeviceptr(self._own))
            self._own = 0

    def _open_boxes(self) -> list[int]:
        """Addresses of all ranks' mailboxes as this GPU sees them."""
        reason, handle = b"", b""
        try:
            handle = self._allocate()
        except KernelError as error:
            reason = str(error).encode()
        handles = self._board.share(handle)
        boxes: list[int] = []
        try:
            boxes = [self._own if rank == self.rank else self._peer(rank, h) for rank, h in enumerate(handles)]
        except KernelError as error:
            reason = reason or str(error).encode()
        said = self._board.share(reason[:1000])
        for rank, words in enumerate(said):
            if words:
                self.close()
                raise KernelError(f"rank {rank}: {words.decode(errors='replace')}")
        return boxes

    def _allocate(self) -> bytes:
        driver, size = self._device.driver, sum(g.num_bytes(self.size) for g in self._geometries)
        status, address = driver.cuMemAlloc(size)
        self._device.check(status, f"no {size >> 20} MiB for mailboxes")
        self._own = int(address)
        (status,) = driver.cuMemsetD8(address, 0, size)
        self._device.check(status, "mailboxes cannot be cleared")
        torch.cuda.synchronize(self._where)
        status, handle = driver.cuIpcGetMemHandle(address)
        self._device.check(status, "mailboxes cannot be shared with other processes")
        return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

    def _peer(self, rank: int, packed: bytes) -> int:
        if len(packed) != HANDLE_BYTES:
            raise KernelError(f"rank {rank} shares no mailbox")
        driver = self._device.driver
        handle = driver.CUipcMemHandle()
        ctypes.memmove(int(handle.getPtr()), packed, HANDLE_BYTES)
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        status, address = driver.cuIpcOpenMemHandle(handle, lazily)
        self._device.check(status, f"the mailbox of rank {rank} cannot be opened")
        self._opened.append(int(address))
        return int(address)

    def _mail(self, boxes: list[int], which: int, seconds: float) -> Tensor:
        geometry = self._geometries[which]
        offset = self._geometries[0].num_bytes(self.size) if which else 0
        places = [box + offset for box in boxes]
        pointers = [self._numbers[which].data_ptr(), self._error.data_ptr(), self._host_error.data_ptr()]
        words = mail_words(places, *pointers, self.rank, geometry, seconds)
        return torch.tensor(words, dtype=torch.int64, device=self._where)


class NcclExchange:
    """The fallback: NCCL's all-gather, which a graph can hold too; sums are then taken by the same kernels."""

    kind = "NCCL"
    narrow = wide = None

    def __init__(self, device: Device, board: Board, seconds: float = 60.0) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        self.rank, self.size = board.rank, board.size
        wait = timedelta(seconds=seconds)
        if not dist.is_available() or not dist.is_nccl_available():
            raise KernelError("peer memory does not work between these GPUs, and this torch has no NCCL")
        leads = board.rank == 0
        store = dist.TCPStore("127.0.0.1", 0, board.size, True, wait, wait_for_workers=False) if leads else None
        port = board.share(b"%d" % store.port if store else b"")[0]
        store = store or dist.TCPStore("127.0.0.1", int(port), board.size, False, wait)
        where = torch.device("cuda", device.index)
        dist.init_process_group(
            "nccl", store=store, rank=board.rank, world_size=board.size, timeout=wait, device_id=where
        )
        self._dist = dist
        part = torch.full((4,), float(board.rank), device=where)
        found = self.gather(part)[:, 0].tolist()
        if found != [float(rank) for rank in range(board.size)]:
            raise KernelError(f"NCCL delivers wrong values between these GPUs: {found}")

    def gather(self, part: Tensor) -> Tensor:
        """part [...] -> [N, ...] in rank order."""
        whole = part.new_empty(self.size, *part.shape)
        self._dist.all_gather_into_tensor(whole, part.contiguous())
        return whole

    def check(self) -> None:
        """Nothing to ask: NCCL's own watch ends the process."""

    def set_patience(self, seconds: float) -> None:
        """Nothing to set."""

    def close(self) -> None:
        self._dist.destroy_process_group()


CudaExchange = PeerExchange | NcclExchange


def open_exchange(device: Device, board: Board, peer_memory: bool = True) -> tuple[CudaExchange, str]:
    """The fastest way that works on every rank, and why it is not peer memory, "" where it is.

    peer_memory: whether to try it; the same on every rank.
    """
    if not peer_memory:
        return NcclExchange(device, board), "peer memory was not wanted"
    try:
        exchange = PeerExchange(device, board, TRIAL_S)
    except KernelError as error:
        return NcclExchange(device, board), str(error)
    reason = try_out(device, board, exchange)
    if reason:
        exchange.close()
        return NcclExchange(device, board), reason
    exchange.set_patience(STARTING_S)
    return exchange, ""


def try_out(device: Device, board: Board, exchange: PeerExchange) -> str:
    """Sums of known values over all ranks, each of which must be right; what was wrong on the first rank that saw
    something wrong."""
    where, width = f"cuda:{device.index}", MAX_WIDTH
    wrong = b""
    for trial in range(TRIALS):
        parts = [_pattern(trial, rank, where) for rank in range(board.size)]
        total = torch.empty(ROW_TILE, width, dtype=torch.bfloat16, device=where)
        launch_sum(device, exchange, parts[board.rank], None, total, ROW_TILE)
        want = sum(part.float() for part in parts).bfloat16()
        torch.cuda.synchronize(where)
        if missing := int(exchange._host_error[0]):
            wrong = b"nothing arrives from rank %d" % (missing - 1)
            break
        if not torch.equal(total, want):
            wrong = b"wrong values arrive"
            break
    said = board.share(wrong)
    bad = next((rank for rank, words in enumerate(said) if words), None)
    return "" if bad is None else f"peer memory fails the start-up test: on rank {bad} {said[bad].decode()}"


def _pattern(trial: int, rank: int, where: str) -> Tensor:
    """Small whole numbers: their sums are exact in bf16."""
    place = torch.arange(ROW_TILE * MAX_WIDTH, device=where)
    return ((place * 7 + trial * 5 + rank * 3) % 16).bfloat16().view(ROW_TILE, MAX_WIDTH)


def launch_sum(
    device: Device, exchange: PeerExchange, partial: Tensor, x: Tensor | None, total: Tensor, rows: int
) -> None:
    """total = x + sum of partial over ranks, without a norm."""
    from ling_kernels.cuda.driver import Int64

    width = partial.shape[1]
    args = [Int64(exchange.narrow), partial, 0, 0, x, None, total, None, width, 0.0, 0]
    device.launch(f"exchange_norm_{exchange.size}", rows, -(-width // 256) * 32, args)
