"""How fast a checkpoint comes from the page cache to a GPU: writes one of a given size, then loads it, warm.

python kernels/bench/load.py --gb 16 --folder /tmp/load     # the folder's files are removed at the end

Shards in the published layout with the shapes of Ling-3.0-tiny and as many layers as the size needs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from ling_local.engine.checkpoint import INDEX, check_files
from ling_local.engine.config import ModelConfig
from ling_local.engine.layout import F32, TensorSpec, memory_bytes, model_layout
from ling_local.engine.protocol import Progress
from ling_local.engine.shapes import TINY
from ling_local.engine.weights import load_weights

SHARD_BYTES = 4 * 10**9


def config_of(size: float) -> ModelConfig:
    """Tiny with the number of layers that comes closest to `size` bytes."""
    choices = [replace(TINY, num_layers=layers) for layers in range(1, 120)]
    return min(choices, key=lambda config: abs(memory_bytes(model_layout(config), 2) - size))


def write(folder: Path, specs: Sequence[TensorSpec]) -> int:
    """Write the shards and the index; bytes written."""
    noise = torch.randn(max(spec.numel for spec in specs)).bfloat16()
    index: dict[str, str] = {}
    total, part, size = 0, {}, 0
    for number, spec in enumerate(specs):
        values = noise[: spec.numel].view(spec.shape)
        part[spec.name] = values.float() if spec.dtype == F32 else values.clone()
        size += part[spec.name].nbytes
        if size > SHARD_BYTES or number == len(specs) - 1:
            name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(part, folder / name)
            index.update(dict.fromkeys(part, name))
            total, part, size = total + size, {}, 0
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


def load(folder: Path, config: ModelConfig, device: str, total: int) -> None:
    """One timed load, and a look at the values that arrived."""
    seen: list[Progress] = []
    clock = time.perf_counter()
    entries = check_files(folder, model_layout(config))
    checked = time.perf_counter() - clock
    weights = load_weights(folder, config, torch.bfloat16, device, seen.append)
    if device != "cpu":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - clock - checked
    assert seen[-1].done == seen[-1].total == sum(entry.num_bytes for entry in entries.values())
    assert torch.equal(weights.lm_head, weights.embedding), "both were written with the same values"
    print(
        f"| {total / 1e9:.2f} GB to {device} | {seconds:.2f} s | {total / seconds / 1e9:.2f} GB/s "
        f"| of it checks {checked:.2f} s, {len(seen)} progress messages |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=16)
    parser.add_argument("--folder", type=Path, required=True, help="must not exist yet, or be empty")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--loads", type=int, default=3)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty")
    config = config_of(args.gb * 1e9)
    try:
        total = write(args.folder, model_layout(config))
        print(f"{config.num_layers} layers, {len(list(args.folder.glob('*.safetensors')))} shards")
        for _ in range(args.loads):
            load(args.folder, config, args.device, total)
            if args.device != "cpu":
                torch.cuda.empty_cache()
    finally:
        for file in args.folder.iterdir():
            file.unlink()


if __name__ == "__main__":
    main()
