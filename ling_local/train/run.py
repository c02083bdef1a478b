"""What the commands do, put together: nets on devices, training, export, figures."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from ling_local.engine.config import load_model_config
from ling_local.errors import EngineError
from ling_local.train.batches import Sampler
from ling_local.train.corpus import HELDOUT_SETS, TRAIN_SETS, load_tokens
from ling_local.train.evaluate import evaluate
from ling_local.train.kda import kda_chunked
from ling_local.train.loop import Plan, Step, train
from ling_local.train.net import Net, Params, make_net
from ling_local.train.optim import Optimizer, Recipe
from ling_local.train.samples import make_samples
from ling_local.train.shape import CONTEXT, DEMO, demo_config, save_config
from ling_local.train.sources import Say
from ling_local.train.stepping import check_device, compiler
from ling_local.train.vocab import read_tokenizer
from ling_local.train.weights import export_checkpoint, new_params, read_checkpoint


def build_net(device: str, compiled: bool) -> Net:
    """The demo net: bf16 products on CUDA, fp32 on the CPU. compiled: for training only."""
    check_device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if not compiled:
        return make_net(demo_config(), device, dtype)
    torch.set_float32_matmul_precision("high")  # TF32 for KDA's products
    wrap = compiler()
    return make_net(demo_config(), device, dtype, kda=functools.partial(kda_chunked, wrap=wrap), wrap=wrap)


def on_device(params: Params, device: str, trained: bool) -> dict[str, torch.Tensor]:
    """Leaves on the device; the router's selection bias is no trained parameter."""
    return {
        name: value.to(device).requires_grad_(trained and not name.endswith("expert_bias"))
        for name, value in params.items()
    }


def train_target(work: Path, run: Path, plan: Plan, net: Net, device: str, say: Say, resume: bool) -> Params:
    """Train the demo model on work/tokens; run/log.jsonl gets the figures. Returns the parameters."""
    sampler = Sampler({name: load_tokens(work / "tokens", name) for name in TRAIN_SETS}, plan.seed)
    tokens = torch.from_numpy(sampler.joined().astype("int16")).to(device)
    params = on_device(new_params(net.config, plan.seed), device, trained=True)
    total = sum(value.numel() for value in params.values())
    say(f"{total:,} parameters, {len(tokens):,} tokens, {plan.steps} steps of {plan.tokens_per_step:,}")
    step = Step(net, params, Optimizer(params, Recipe()), tokens, DEMO["pad_token_id"])
    run.mkdir(parents=True, exist_ok=True)
    (run / "plan.json").write_text(json.dumps(asdict(plan), indent=1), encoding="utf-8")
    with (run / "log.jsonl").open("a" if resume else "w", encoding="utf-8") as log:
        for line in train(step, sampler, plan, run, say, resume):
            log.write(json.dumps(line) + "\n")
            log.flush()
            say(" ".join(f"{key} {value}" for key, value in line.items()))
    return params


def report(work: Path, folder: Path, run: Path, net: Net, device: str, say: Say) -> dict[str, object]:
    """Held-out figures of the exported model in `folder`; writes run/eval.json."""
    params = on_device(load_model(folder), device, trained=False)
    result: dict[str, object] = {"device": device, "dtype": str(net.dtype).removeprefix("torch.")}
    for name in HELDOUT_SETS:
        begun = time.monotonic()
        result[name] = asdict(evaluate(net, params, load_tokens(work / "tokens", name), CONTEXT))
        say(f"{name} ({time.monotonic() - begun:.0f} s): {result[name]}")
    _write(run / "eval.json", result)
    return result


def sample(folder: Path, run: Path, say: Say) -> list[dict[str, str]]:
    """Ten greedy samples of the exported model in `folder`, in fp32 on the CPU; writes run/samples.json."""
    tokenizer = read_tokenizer(folder)
    samples = [asdict(made) for made in make_samples(build_net("cpu", compiled=False), load_model(folder), tokenizer)]
    for made in samples:
        say(f"--- {made['prompt']!r}\n{made['output']}")
    _write(run / "samples.json", samples)
    return samples


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def load_state(run: Path) -> Params:
    """The parameters of a saved training state, on the CPU."""
    path = run / "state.pt"
    if not path.exists():
        raise EngineError(f"{path}: not there", "run: python -m ling_local.train target")
    return torch.load(path, map_location="cpu", weights_only=True)["params"]


def load_model(folder: Path) -> Params:
    """The parameters of an exported model, as engines see them: rounded to bf16."""
    load_model_config(folder)
    return read_checkpoint(folder)


def export(params: Params, folder: Path) -> int:
    """Write shards, index and config.json."""
    save_config(folder)
    return export_checkpoint(params, demo_config(), folder)
