"""Where a model comes from: a checkpoint folder, or random weights in a published shape. One interface for both."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from ling_local.engine.checkpoint import check_files, model_name
from ling_local.engine.config import ModelConfig, load_model_config
from ling_local.engine.drafter import Drafter
from ling_local.engine.drafts import open_drafter
from ling_local.engine.dspark import DSpark
from ling_local.engine.dummy import dummy_draft, dummy_weights
from ling_local.engine.layout import memory_bytes, model_layout
from ling_local.engine.nextn import MAX_DEPTH, Nextn
from ling_local.engine.protocol import Dummy, ProgressFn
from ling_local.engine.shapes import dummy_config, dummy_draft_config, dummy_marks
from ling_local.engine.shard import WHOLE, Shard, check_size
from ling_local.engine.weights import Weights, blank_weights, check_memory, load_weights
from ling_local.errors import ModelError, UsageError


class Source(Protocol):
    """config: the model's numbers; shard: the part of it that is wanted; name: what it is called; vocab: ids that mean
    something; marks: for reports."""

    config: ModelConfig
    shard: Shard
    name: str
    marks: tuple[str, ...]

    @property
    def vocab(self) -> int: ...

    def check(self) -> None:
        """Say now what would fail a load later. Raises ModelError."""

    def weights(self, dtype: torch.dtype, device: str, progress: ProgressFn | None) -> Weights:
        """The part's weights on `device`. Raises ModelError or OutOfMemory."""
        ...

    def drafter(self, weights: Weights, draft: str, block: int) -> Drafter | None:
        """The drafter that was asked for, on the device of `weights`; on "meta" nothing is read. Raises as
        `open_drafter` does."""
        ...

    def ghost(self, dtype: torch.dtype) -> Weights:
        """The weights' shapes on the meta device."""
        ...


class FolderSource:
    """A checkpoint in the published layout."""

    marks: tuple[str, ...] = ()

    def __init__(self, path: str | Path, shard: Shard = WHOLE) -> None:
        self.folder = Path(path)
        self.shard = shard
        self.config = load_model_config(self.folder)
        self.name = model_name(self.folder)

    @property
    def vocab(self) -> int:
        return tokenizer_size(self.folder, self.config.vocab_size)

    def check(self) -> None:
        check_size(self.config, self.shard.size)
        check_files(self.folder, model_layout(self.config))

    def weights(self, dtype: torch.dtype, device: str, progress: ProgressFn | None) -> Weights:
        return load_weights(self.folder, self.config, dtype, device, progress, self.shard)

    def drafter(self, weights: Weights, draft: str, block: int) -> Drafter | None:
        return open_drafter(self.folder, weights, draft, block)

    def ghost(self, dtype: torch.dtype) -> Weights:
        return blank_weights(self.config, dtype, self.shard)


class DummySource:
    """Random weights, and a draft of the size that is published for the shape."""

    def __init__(self, dummy: Dummy, draft: str, shard: Shard = WHOLE) -> None:
        self.dummy = dummy
        self.shard = shard
        self.config = dummy_config(dummy, mtp=draft == "mtp")
        self.name = f"dummy-{dummy.shape}"
        self.marks = dummy_marks(dummy)

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    def check(self) -> None:
        """Nothing of it can be damaged."""
        check_size(self.config, self.shard.size)

    def weights(self, dtype: torch.dtype, device: str, progress: ProgressFn | None) -> Weights:
        if device == "cpu":
            size = self.shard.size
            check_memory(self.name, memory_bytes(model_layout(self.config, size), dtype.itemsize, size) * size, dtype)
        settled = self.dummy.settled
        return dummy_weights(self.config, dtype, device, shard=self.shard, progress=progress, settled=settled)

    def drafter(self, weights: Weights, draft: str, block: int) -> Drafter | None:
        if draft == "off":
            return None
        if draft == "mtp":
            if block > MAX_DEPTH:
                raise UsageError(f"--block {block}: MTP drafts at most {MAX_DEPTH} tokens", f"give 1 to {MAX_DEPTH}")
            return Nextn(block or 1)
        made = self._draft(weights)
        if block > made.block:
            raise UsageError(f"--block {block}: this draft makes blocks of {made.block}", f"give 1 to {made.block}")
        return made.limited(block) if block else made

    def _draft(self, weights: Weights) -> DSpark:
        config = dummy_draft_config(self.dummy)
        check_size(self.config, self.shard.size, config)
        return dummy_draft(config, weights.dtype, str(weights.embedding.device), shard=self.shard)

    def ghost(self, dtype: torch.dtype) -> Weights:
        return blank_weights(self.config, dtype, self.shard)


def open_source(path: str | Path, dummy: Dummy | None, draft: str, shard: Shard = WHOLE) -> Source:
    """One rank's part of a folder, or of a dummy in its place. Raises ModelError, UsageError."""
    return DummySource(dummy, draft, shard) if dummy else FolderSource(path, shard)


def tokenizer_size(folder: Path, vocab_size: int) -> int:
    """Ids that the tokenizer defines; logits past it are padding. The whole vocabulary without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return vocab_size
    from tokenizers import Tokenizer

    try:
        highest = max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values())
    except Exception as error:  # the library raises plain Exception for a broken file
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}", "download this file again") from None
    return min(highest + 1, vocab_size)
