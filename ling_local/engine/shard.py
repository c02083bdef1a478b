"""One rank's part of a model: which slices of a checkpoint it reads, and the sizes that it computes with. No torch.

The rule for each tensor stands in layout.py (`TensorSpec.shard`): heads, expert widths and vocabulary rows are split
evenly and in order; latent projections, routers, norms, the draft's input projection and its Markov embedding are on
every rank (ling3-model.md section 8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ling_local.engine.config import DraftConfig, ModelConfig
from ling_local.engine.layout import TensorSpec
from ling_local.errors import UsageError

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> slice:
        """This rank's share of `count` things."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def rows(self, spec: TensorSpec) -> slice:
        """The rows of a tensor on disk that this rank reads."""
        return self.slices(spec)[0]

    def slices(self, spec: TensorSpec) -> tuple[slice, ...]:
        """What of a tensor on disk this rank holds, one slice a dimension."""
        return tuple(self.part(n) if i == spec.shard else slice(0, n) for i, n in enumerate(spec.shape))


WHOLE = Shard()


def check_size(config: ModelConfig, size: int, draft: DraftConfig | None = None) -> None:
    """UsageError where `size` ranks cannot share a model, or its draft, evenly."""
    if size not in SIZES:
        raise UsageError(f"{size} GPUs: a model is split over 1, 2, 4 or 8", "name so many with --gpus")
    counts = _counts(config) if draft is None else _draft_counts(draft)
    for what, count in counts.items():
        if count % size:
            raise UsageError(
                f"{size} GPUs do not share {count} {what} evenly", f"use {largest_size(config, size, draft)} GPUs"
            )


def largest_size(config: ModelConfig, most: int, draft: DraftConfig | None = None) -> int:
    """The most ranks, `most` at the utmost, that share a model and its draft evenly."""
    counts = [*_counts(config).values(), *(_draft_counts(draft).values() if draft else ())]
    return max(size for size in SIZES if size <= max(most, 1) and all(count % size == 0 for count in counts))


def _counts(config: ModelConfig) -> dict[str, int]:
    return {
        "attention heads": config.num_heads,
        "rows of the dense MLP": config.intermediate_size,
        "rows of an expert": config.moe_intermediate_size,
        "rows of the shared expert": config.shared_intermediate_size,
        "rows of the vocabulary": config.vocab_size,
    }


def _draft_counts(draft: DraftConfig) -> dict[str, int]:
    return {
        "heads of the draft": draft.num_heads,
        "key heads of the draft": draft.num_kv_heads,
        "rows of the draft's MLP": draft.intermediate_size,
        "rows of the vocabulary": draft.vocab_size,
    }


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes that one of `size` ranks computes with. The vocabulary stays whole: ids mean the same everywhere."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        intermediate_size=config.intermediate_size // size,
        moe_intermediate_size=config.moe_intermediate_size // size,
        shared_intermediate_size=config.shared_intermediate_size // size,
    )


def rank_draft(config: DraftConfig, size: int) -> DraftConfig:
    """The same for a draft."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )
