"""The step path never reads a device value on the host: run on the meta device, watched, and searched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints import config_json, write_checkpoint, write_draft
from ling_kernels.reference import ReferenceOps
from ling_local.engine.config import ModelConfig, model_config
from ling_local.engine.drafter import Drafter
from ling_local.engine.drafts import load_dspark
from ling_local.engine.layout import field_specs, model_layout
from ling_local.engine.native import NativeEngine
from ling_local.engine.nextn import Nextn
from ling_local.engine.state import SequenceState
from ling_local.engine.step import step
from ling_local.engine.weights import assemble
from ling_local.types import SamplingParams, TokenRequest

ROOT = Path(__file__).parents[2]
STEP_FILES = tuple(f"engine/{name}.py" for name in ("step", "model", "state", "drafter", "dspark", "nextn"))
READS = re.compile(r"\.(item|tolist|cpu|numpy)\(|(?<!\.)\b(int|float)\(|nonzero|masked_select|\.unique\(")
# `_grouped` runs in prefill chunks only, where the host may look
ALLOWED = {"for expert in routing.experts.unique().tolist():", "row, slot = (routing.experts == expert).nonzero("}


def meta_drafter(name: str, config: ModelConfig, tmp_path: Path) -> Drafter | None:
    """A drafter whose tensors are on the meta device."""
    if name != "dspark":
        return Nextn(3) if name == "mtp" else None
    folder = write_draft(tmp_path / "draft", write_checkpoint(tmp_path / "m"))
    return load_dspark(folder, config, torch.float32, "meta")


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("experts", [16, 64])
@pytest.mark.parametrize("draft", ["off", "mtp", "dspark"])
def test_a_step_runs_where_no_value_exists(tmp_path: Path, experts: int, sampled: bool, draft: str) -> None:
    config = model_config(config_json(num_experts=experts))
    fields = {
        f.name: torch.empty(f.shape, dtype=torch.float32, device="meta") for f in field_specs(model_layout(config))
    }
    weights = assemble(config, fields)
    state = SequenceState(config, 256, torch.float32, "meta", config.vocab_size)
    state.sampling = state.sampling._replace(greedy=not sampled)
    drafter = meta_drafter(draft, config, tmp_path)
    if drafter:
        drafter.attach(state, weights)
    step(ReferenceOps(), weights, state, drafter, 1, 3 if drafter else 0)
    step(ReferenceOps(), weights, state, drafter, 4 if drafter else 1, 3 if drafter else 0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        state.length.item()  # the guard itself: a read would have raised


class NoHostReads(TorchDispatchMode):
    """Raises on every operation that makes the host wait for a value."""

    BANNED = ("_local_scalar_dense", "nonzero", "masked_select", "equal.default", "unique", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        indices = args[1] if name.startswith("aten.index") and isinstance(args[1], list | tuple) else ()
        masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
        if masks or any(banned in name for banned in self.BANNED):
            raise AssertionError(f"{name} reads a device value")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, 20, 0.9, 3)])
@pytest.mark.parametrize("draft", ["off", "mtp", "dspark"])
def test_a_step_asks_for_no_value(tmp_path: Path, params: SamplingParams, draft: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    write_draft(folder / "dspark", folder)
    engine = NativeEngine.load(folder, draft=draft)
    generation = engine.generate(TokenRequest((1, 2, 3), sampling=params, max_tokens=20))
    results = iter(generation)
    next(results)
    with NoHostReads(), torch.inference_mode():
        for width, following in ((1, 0), (1, engine.info.block), (engine.info.block + 1, engine.info.block)):
            step(engine.ops, engine.weights, engine._state, engine.drafter, width, following)
    with pytest.raises(AssertionError, match="reads a device value"), NoHostReads():
        engine._state.length.item()


def test_step_files_hold_no_reading_call() -> None:
    files = [ROOT / "ling_local" / name for name in STEP_FILES]
    files += (ROOT / "kernels/ling_kernels/reference").glob("*.py")
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            code = line.split("#")[0]
            if READS.search(code) and not any(code.strip().startswith(known) for known in ALLOWED):
                pytest.fail(f"{file.name}:{number} reads a device value: {line.strip()}")
