"""Checkpoint bytes on their way to a GPU: a few threads read spans of files into pinned buffers, which are sent while
the next are read. There is never more of a checkpoint on the host than those buffers.

Reading into a buffer of ours costs one copy out of the page cache, like mapping the file, but no page fault a page,
and the transfer may start from it at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ling_local.engine.checkpoint import Entry
from ling_local.engine.layout import TensorSpec
from ling_local.engine.shard import WHOLE, Shard
from ling_local.errors import ModelError

SPAN_BYTES = 2**24
BUFFERS = 8
READERS = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows first.. of those of a tensor that a rank reads, which lie at byte `at` of a span."""

    spec: TensorSpec
    first: int
    rows: int
    at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one file that are read at once, and the pieces of tensors in them."""

    file: Path
    offset: int
    num_bytes: int
    pieces: tuple[Piece, ...]


def spans_of(
    specs: Sequence[TensorSpec], entries: Mapping[str, Entry], span_bytes: int = SPAN_BYTES, shard: Shard = WHOLE
) -> list[Span]:
    """What a rank needs of the files as spans of about `span_bytes`, in the order of the bytes. A row stays whole."""
    spans: list[Span] = []
    pieces: list[Piece] = []
    file, start, end = Path(), 0, 0

    def close() -> None:
        if pieces:
            spans.append(Span(file, start, end - start, tuple(pieces)))
            pieces.clear()

    for spec in sorted(specs, key=lambda s: (entries[s.name].file, entries[s.name].offset)):
        entry, rows_here = entries[spec.name], shard.rows(spec)
        row_bytes = entry.num_bytes // spec.shape[0]
        count = rows_here.stop - rows_here.start
        first, at = 0, entry.offset + rows_here.start * row_bytes
        while first < count:
            if (entry.file, at) != (file, end) or end - start + row_bytes > span_bytes:
                close()
                file, start, end = entry.file, at, at
            room = max((span_bytes - (end - start)) // row_bytes, 1)
            rows = min(room, count - first)
            pieces.append(Piece(spec, first, rows, end - start, rows * row_bytes))
            end = at = at + rows * row_bytes
            first += rows
    close()
    return spans


def read_spans(spans: Sequence[Span], device: str) -> Iterator[tuple[Span, Tensor]]:
    """Each span with its bytes [num_bytes] uint8, which the caller may copy from until it asks for the next.

    For a GPU the buffers are pinned; one is read into again only when the copies that were queued on the current
    stream have left it. Raises ModelError where a file ends early.
    """
    if not spans:
        return
    on_gpu = device != "cpu"
    num = min(BUFFERS, len(spans))
    size = max(span.num_bytes for span in spans)
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(num)]
    sent: list[torch.cuda.Event | None] = [None] * num
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        reads = deque(pool.submit(_read_into, buffers[i], spans[i], None) for i in range(num))
        for number, span in enumerate(spans):
            reads.popleft().result()
            slot = number % num
            yield span, buffers[slot][: span.num_bytes]
            if on_gpu:
                sent[slot] = torch.cuda.current_stream(device).record_event()
            if number + num < len(spans):
                reads.append(pool.submit(_read_into, buffers[slot], spans[number + num], sent[slot]))


def _read_into(buffer: Tensor, span: Span, sent: torch.cuda.Event | None) -> None:
    if sent is not None:
        sent.synchronize()
    target = memoryview(buffer.numpy())[: span.num_bytes]
    done = 0
    handle = os.open(span.file, os.O_RDONLY)
    try:
        while done < span.num_bytes:
            got = os.preadv(handle, [target[done:]], span.offset + done)
            if not got:
                raise ModelError(f"{span.file}: it ended while it was read", "check the disk, and fetch the file again")
            done += got
    finally:
        os.close(handle)
