"""The stages of making a draft, put together: prompts, text, training, export, figures, calibration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ling_local.engine.config import load_model_config
from ling_local.engine.native import NativeEngine
from ling_local.errors import ModelError, UsageError
from ling_local.train.draft_calibrate import Calibration, calibrate, write_calibration
from ling_local.train.draft_evaluate import Traces, evaluate_draft, trace, walk
from ling_local.train.draft_export import DraftShape, check_shape, draft_json, export_draft, read_draft
from ling_local.train.draft_loop import DraftPlan, DraftStep, train_draft
from ling_local.train.draft_net import make_draft_net, new_draft_params
from ling_local.train.draft_prompts import SHARES, Prompts, load_prompts, make_prompts
from ling_local.train.draft_sampler import Rows, Sampler, join
from ling_local.train.draft_target import Target, mask_token_id
from ling_local.train.sources import Say

SAMPLE_PART, EVALUATE_PART = 0.25, 0.15  # of a limited time: for making text at most, and kept for the figures
TEXT = "text.pt"
FIGURES = 64, 128  # what a new draft is measured on: prompts of each held-out set, tokens of each answer


@dataclass(frozen=True)
class TextPlan:
    """How much on-policy text: `waves` times `rows` rows of `length` tokens. heats: (temperature, share) pairs."""

    waves: int = 12
    rows: int = 2048
    length: int = 1024
    heats: tuple[tuple[float, float], ...] = ((0.0, 0.4), (0.6, 0.3), (1.0, 0.3))
    seed: int = 1
    graph: bool = True


def parse_shares(text: str, name: str) -> dict[str, float]:
    """ "a=0.5,b=0.3" as a dict. Raises UsageError naming the flag."""
    try:
        shares = {key.strip(): float(value) for key, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise UsageError(f"{name} {text}: not a list of NAME=SHARE", f"write it as {name} code=0.5,chat=0.5") from None
    if min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise UsageError(f"{name} {text}: shares must not be negative, nor all zero", "give numbers above 0")
    return shares


def open_prompts(
    corpus: Path, model: Path, count: int, heldout: int, seed: int, mix: dict[str, float] | None = None
) -> Prompts:
    """Prompts from a folder of text, or from a file that draft-prompts wrote."""
    if corpus.is_file():
        return load_prompts(corpus)
    if not corpus.is_dir():
        raise ModelError(f"{corpus}: not there", "give a folder of NAME.jsonl, or the file of draft-prompts")
    config = load_model_config(model)
    return make_prompts(corpus, model, config.pad_token_id, count, heldout, seed, mix or SHARES)


def make_text(target: Target, prompts: Prompts, plan: TextPlan, minutes: float, say: Say) -> Rows:
    """Let the target write. minutes 0: no limit. A wave that the limit cuts short is left out, but for the first."""
    if not len(prompts):
        raise UsageError("there are no prompts to train on", "give a corpus with sets that are not held out")
    begun = time.monotonic()
    sampler = Sampler(target, prompts, plan.rows, plan.length, plan.graph)
    shares = np.array([share for _, share in plan.heats])
    heats = torch.tensor([heat for heat, _ in plan.heats])
    parts: list[Rows] = []
    for wave in range(plan.waves):
        rng = np.random.default_rng((plan.seed, wave))
        which = torch.from_numpy(rng.choice(len(heats), plan.rows, p=shares / shares.sum()))
        seeds = torch.from_numpy(rng.integers(2**40, size=plan.rows))
        late = _Limit(begun, minutes) if parts else _Limit(begun, 0.0)
        made = sampler.run(wave * plan.rows * 5, heats[which], seeds, late)
        if late.passed:
            break
        parts.append(Rows(made.tokens.cpu(), made.answered.cpu(), made.temperature.cpu()))
        spent = time.monotonic() - begun
        tokens = len(parts) * plan.rows * plan.length
        say(f"text: wave {wave + 1} of {plan.waves}, {tokens:,} tokens, {tokens / spent:,.0f} tok/s")
        if _Limit(begun, minutes)():
            break
    return join(parts)


class _Limit:
    """True once the time is over, and remembers that it said so."""

    def __init__(self, begun: float, minutes: float) -> None:
        self.end = begun + minutes * 60 if minutes else float("inf")
        self.passed = False

    def __call__(self) -> bool:
        self.passed = time.monotonic() > self.end
        return self.passed


def load_or_make_text(
    target: Target, prompts: Prompts, plan: TextPlan, minutes: float, run: Path, resume: bool, say: Say
) -> Rows:
    """The text of a run; a resumed one goes on with the text that it began with."""
    path = run / TEXT
    if resume and path.exists():
        return Rows(**torch.load(path, weights_only=True))
    text = make_text(target, prompts.trained(), plan, minutes, say)
    run.mkdir(parents=True, exist_ok=True)
    torch.save({"tokens": text.tokens, "answered": text.answered, "temperature": text.temperature}, path)
    return text


@dataclass(frozen=True)
class Job:
    """What is trained: for which target, of which shape, where its state and log go."""

    target: Target
    data: dict[str, Any]  # the draft's config.json
    run: Path
    say: Say


def plan_job(target: Target, shape: DraftShape, mask_id: int, run: Path, say: Say) -> Job:
    """Check the shape and take the mask id from the tokenizer unless one is given (not below 0)."""
    if mask_id < 0:
        mask_id = mask_token_id(target.folder, target.config)
    data = draft_json(shape, target.config, mask_id)
    check_shape(data, target.config)
    return Job(target, data, run, say)


def train(job: Job, text: Rows, plan: DraftPlan, resume: bool) -> dict[str, torch.Tensor]:
    """Train a draft on the text; run/log.jsonl gets the figures. Returns its parameters."""
    target = job.target
    config = check_shape(job.data, target.config)
    draft = make_draft_net(config, text.tokens.shape[1], target.device, target.net.dtype)
    params = {n: v.to(target.device).requires_grad_() for n, v in new_draft_params(config, plan.seed).items()}
    if plan.anchors > text.tokens.shape[1]:
        raise UsageError(f"{plan.anchors} anchors do not fit {text.tokens.shape[1]} tokens", "give fewer --anchors")
    step = DraftStep(target, draft, params, text, plan)
    total = sum(value.numel() for value in params.values())
    share = float(text.answered.float().mean())
    job.say(f"draft: {total:,} parameters; {text.tokens.numel():,} tokens, {share:.0%} of them the target's")
    job.run.mkdir(parents=True, exist_ok=True)
    _write(job.run / "plan.json", asdict(plan))
    with (job.run / "log.jsonl").open("a" if resume else "w", encoding="utf-8") as log:
        for line in train_draft(step, job.run, job.say, resume):
            log.write(json.dumps(line) + "\n")
            log.flush()
            job.say(" ".join(f"{key} {value}" for key, value in line.items()))
    return params


def heldout_traces(target: Target, prompts: Prompts, count: int, answer: int) -> dict[str, Traces]:
    """Greedy answers to held-out prompts, up to `count` of each set."""
    picked = {name: each.take(np.arange(min(count, len(each)))) for name, each in prompts.heldout().items()}
    return {name: trace(target, each, answer) for name, each in picked.items() if len(each)}


def measure(target: Target, folder: Path, traces: dict[str, Traces]) -> dict[str, Any]:
    """Accept lengths of an exported draft, as engines see it: rounded to bf16."""
    config, params = read_draft(folder, target.config)
    params = {name: value.to(target.device) for name, value in params.items()}
    draft = make_draft_net(config, 1, target.device, target.net.dtype)
    return evaluate_draft(target, draft, params, traces)


def calibrate_folder(target: Target, folder: Path, traces: dict[str, Traces]) -> Calibration:
    """Fit and write confidence_calibration.json beside an exported draft."""
    config, params = read_draft(folder, target.config)
    params = {name: value.to(target.device) for name, value in params.items()}
    walks = []
    rows = 0
    for each in traces.values():
        draft = make_draft_net(config, each.tokens.shape[1], target.device, target.net.dtype)
        steps = walk(target, draft, params, each)
        walks.append(steps._replace(row=steps.row + rows))
        rows += len(each.tokens)
    joined = type(walks[0])(*(np.concatenate(parts) for parts in zip(*walks, strict=True)))
    found = calibrate(joined, f"greedy, full-width verification: {', '.join(traces)}")
    write_calibration(found, folder)
    return found


def make_draft(
    job: Job,
    prompts: Prompts,
    text_plan: TextPlan,
    plan: DraftPlan,
    out: Path,
    minutes: float,
    resume: bool,
    command: str = "",
) -> dict[str, Any]:
    """All stages, into `out`. minutes 0: no limit, else all of it fits. Returns the figures of out/eval.json.

    command: what was typed, for out/training.json.
    """
    begun = time.monotonic()
    text = load_or_make_text(job.target, prompts, text_plan, minutes * SAMPLE_PART, job.run, resume, job.say)
    if minutes:  # what the text did not use of its part is training's
        left = minutes * (1 - EVALUATE_PART) - (time.monotonic() - begun) / 60
        plan = replace(plan, minutes=max(left, 0.0) or 1e-3)
    params = train(job, text, plan, resume)
    size = export_draft(params, job.data, job.target.config, out)
    job.say(f"wrote {size:,} bytes to {out}")
    _write(out / "training.json", _training(job, text, plan, command))
    return report(job.target.eager(), prompts, out, *FIGURES, job.say)


def _training(job: Job, text: Rows, plan: DraftPlan, command: str) -> dict[str, Any]:
    """How the draft was made, for the model card."""
    last = json.loads((job.run / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    device = job.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    return {
        "machine": f"one {name}, torch {torch.__version__}" if device.type == "cuda" else name,
        "command": command,
        "text_tokens": text.tokens.numel(),
        "text_own_share": round(float(text.answered.float().mean()), 4),
        "steps": last["step"],
        "rows": plan.rows,
        "anchors": plan.anchors,
        "train_s": last["elapsed_s"],
        "blocks_s": last["blocks_s"],
        "tau": last["tau"],
        "alpha": last["alpha"],
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def report(target: Target, prompts: Prompts, out: Path, count: int, answer: int, say: Say) -> dict[str, Any]:
    """Calibrate an exported draft and measure it on held-out prompts; writes out/eval.json."""
    traces = heldout_traces(target, prompts, count, answer)
    if not traces:
        say("no held-out prompts: neither calibrated nor measured")
        return {}
    found = calibrate_folder(target, out, traces)
    say(f"calibration error {found.ece_before} before, {found.ece_after} after")
    result = {"accept": measure(target, out, traces), "calibration": asdict(found)}
    for name, each in result["accept"].items():
        say(f"{name}: accept length {each['accept_length']:.2f} in {each['steps']} steps")
    _write(out / "eval.json", result)
    return result


def ablate(job: Job, prompts: Prompts, text_plan: TextPlan, plan: DraftPlan) -> dict[str, Any]:
    """The same text, steps and seed with and without the accept-length term; writes run/ablation.json.

    Text that the run's folder holds already is used again. The plan must have no time limit: steps would differ.
    """
    assert not plan.minutes
    text = load_or_make_text(job.target, prompts, text_plan, 0.0, job.run, True, job.say)
    eager = job.target.eager()
    traces = heldout_traces(eager, prompts, *FIGURES)
    result: dict[str, Any] = {"steps": plan.steps, "seed": plan.seed}
    for name, weight in (("without", 0.0), ("with", plan.losses.length)):
        part = replace(job, run=job.run / name)
        params = train(part, text, replace(plan, losses=replace(plan.losses, length=weight)), resume=False)
        export_draft(params, job.data, job.target.config, part.run / "dspark")
        result[name] = {"length_weight": weight, "accept": measure(eager, part.run / "dspark", traces)}
    _write(job.run / "ablation.json", result)
    return result


def ablation_table(result: dict[str, Any]) -> Iterator[str]:
    """Held-out accept lengths as a Markdown table."""
    without, with_term = result["without"]["accept"], result["with"]["accept"]
    yield f"| held-out set | without | length term, weight {result['with']['length_weight']} |"
    yield "|---|---|---|"
    for name in without:
        yield f"| {name} | {without[name]['accept_length']:.3f} | {with_term[name]['accept_length']:.3f} |"


def confirm(folder: Path) -> str:
    """Load model and draft as `ling` does; what the engine says of them."""
    engine = NativeEngine.load(folder, draft="dspark")
    info = engine.info
    engine.close()
    return f"{info.model}: drafter {info.drafter}, block {info.block}"
