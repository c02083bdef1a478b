"""`python -m ling_local.train draft ...`: flags of the draft's stages. Imports torch only inside the commands."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ling_local.train.draft_prompts import Prompts
    from ling_local.train.draft_run import Job, TextPlan
    from ling_local.train.draft_target import Target

TargetDir = Annotated[Path, typer.Option("--target", help="folder of the model that the draft is for")]
Corpus = Annotated[Path, typer.Option(help="folder of NAME.jsonl, or the file that draft-prompts wrote")]
RunDir = Annotated[Path, typer.Option(help="folder for text, training state and log")]
Device = Annotated[str, typer.Option(help="cuda or cpu")]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="compile regions with torch.compile")]
Seed = Annotated[int, typer.Option(help="of prompts, text, weights and order")]
Count = Annotated[int, typer.Option(min=1, help="prompts to cut for training")]
Heldout = Annotated[int, typer.Option(min=0, help="prompts to cut of each held-out set")]
Steps = Annotated[int, typer.Option(min=1, help="training steps")]
StepRows = Annotated[int, typer.Option(min=1, help="sequences a training step")]
Anchors = Annotated[int, typer.Option(min=1, help="blocks a sequence and step")]
Rate = Annotated[float, typer.Option(help="peak learning rate")]
Waves = Annotated[int, typer.Option(min=1, help="waves of on-policy text")]
TextRows = Annotated[int, typer.Option(min=1, help="rows that the target writes at once")]
Length = Annotated[int, typer.Option(min=16, help="tokens a row")]
Heats = Annotated[str, typer.Option(help="temperatures of the text with their shares")]
LengthWeight = Annotated[float, typer.Option(help="weight of the accept-length term")]
Minutes = Annotated[float, typer.Option(help="squeeze everything into this time; 0: no limit")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the saved text and state")]
TapList = Annotated[str, typer.Option(help="target layers to read, as 1,2,4; empty: evenly spaced")]


@dataclass(frozen=True)
class Defaults:
    """What the commands share."""

    run: Path = Path("runs/draft")
    heats: str = "0=0.4,0.6=0.3,1=0.3"
    prompts: int = 60_000


def register(app: typer.Typer) -> None:
    """Add the draft's commands to the trainer's program."""
    for name, command in (
        ("draft-prompts", draft_prompts),
        ("draft", draft),
        ("draft-eval", draft_eval),
        ("draft-ablation", draft_ablation),
    ):
        app.command(name)(command)


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def draft_prompts(
    target: TargetDir,
    corpus: Corpus,
    out: Annotated[Path, typer.Option(help="file to write")],
    count: Count = Defaults.prompts,
    heldout: Heldout = 96,
    mix: Annotated[str, typer.Option(help="shares of the training sets, as code=0.5,chat=0.5")] = "",
    seed: Seed = 1,
) -> None:
    """Cut prompts from a corpus into one small file, to take to a GPU machine."""
    from ling_local.train.draft_prompts import save_prompts
    from ling_local.train.draft_run import open_prompts, parse_shares

    found = open_prompts(corpus, target, count, heldout, seed, parse_shares(mix, "--mix") if mix else None)
    say(f"{len(found):,} prompts, {len(found.tokens):,} tokens, {save_prompts(found, out):,} bytes in {out}")


def draft(
    target: TargetDir,
    corpus: Corpus,
    out: Annotated[Path, typer.Option(help="folder to write, normally TARGET/dspark")],
    run: RunDir = Defaults.run,
    minutes: Minutes = 0.0,
    steps: Steps = 10_000,
    rows: StepRows = 48,
    anchors: Anchors = 128,
    rate: Rate = 8e-3,
    waves: Waves = 12,
    text_rows: TextRows = 2048,
    length: Length = 1024,
    heats: Heats = Defaults.heats,
    layers: Annotated[int, typer.Option(min=1, help="draft layers")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="attention heads")] = 2,
    kv_heads: Annotated[int, typer.Option(min=0, help="key and value heads; 0: as many as heads")] = 0,
    head_dim: Annotated[int, typer.Option(min=2, help="size of a head")] = 128,
    mlp: Annotated[int, typer.Option(min=1, help="inner width of the MLP")] = 384,
    block: Annotated[int, typer.Option(min=1, max=15, help="drafts a block")] = 8,
    taps: TapList = "",
    rank: Annotated[int, typer.Option(min=1, help="of the Markov head")] = 64,
    markov: Annotated[str, typer.Option(help="Markov head: vanilla, gated or rnn")] = "vanilla",
    mask_id: Annotated[int, typer.Option(help="id of a mask; -1: the tokenizer's <|mask|>")] = -1,
    ce_weight: Annotated[float, typer.Option(help="weight of the cross-entropy")] = 0.1,
    tv_weight: Annotated[float, typer.Option(help="weight of the total variation")] = 0.9,
    confidence_weight: Annotated[float, typer.Option(help="weight of the confidence loss")] = 1.0,
    length_weight: LengthWeight = 0.1,
    decay: Annotated[float, typer.Option(help="g of the weights exp(-(k-1)/g); 0: the block size")] = 0.0,
    reach: Annotated[bool, typer.Option("--reach", help="weigh the confidence loss by reach")] = False,
    coolest: Annotated[float, typer.Option(min=0.05, max=1.0, help="least temperature of the TV loss")] = 1.0,
    seed: Seed = 1,
    count: Count = Defaults.prompts,
    heldout: Heldout = 96,
    device: Device = "cuda",
    compiled: Compiled = False,
    graph: Annotated[bool, typer.Option("--graph/--no-graph", help="replay CUDA graphs")] = True,
    resume: Resume = False,
) -> None:
    """Train a draft: the target writes text, the draft learns it, is exported, calibrated and measured."""
    from ling_local.train import draft_run as rooms
    from ling_local.train.draft_export import DraftShape
    from ling_local.train.draft_loop import DraftPlan
    from ling_local.train.draft_losses import LossWeights
    from ling_local.train.draft_target import open_target

    shape = DraftShape(layers, heads, kv_heads, head_dim, mlp, block, parse_taps(taps), rank, markov)
    weights = LossWeights(ce_weight, tv_weight, confidence_weight, length_weight, decay, reach, coolest=coolest)
    plan = DraftPlan(steps, rows, anchors, rate, seed=seed, graph=graph, losses=weights)
    text = rooms.TextPlan(waves, text_rows, length, parse_heats(heats), seed, graph)
    opened = open_target(target, device, compiled)
    prompts = rooms.open_prompts(corpus, target, count, heldout, seed)
    job = rooms.plan_job(opened, shape, mask_id, run, say)
    command = f"python -m ling_local.train {shlex.join(sys.argv[1:])}"
    rooms.make_draft(job, prompts, text, plan, out, minutes, resume, command)
    if out.name == "dspark" and out.parent.resolve() == target.resolve():
        say(rooms.confirm(target))


def draft_eval(
    target: TargetDir,
    corpus: Corpus,
    out: Annotated[Path, typer.Option(help="folder of the draft")],
    prompts: Annotated[int, typer.Option(min=1, help="prompts of each held-out set")] = 96,
    answer: Annotated[int, typer.Option(min=2, help="tokens of each answer")] = 128,
    heldout: Heldout = 96,
    seed: Seed = 1,
    device: Device = "cuda",
) -> None:
    """Calibrate an exported draft and measure its accept lengths on held-out prompts; writes eval.json."""
    from ling_local.train import draft_run as rooms
    from ling_local.train.draft_target import open_target

    opened = open_target(target, device)
    found = rooms.open_prompts(corpus, target, 1, heldout, seed)
    print(json.dumps(rooms.report(opened, found, out, prompts, answer, say), indent=1))


def draft_ablation(
    target: TargetDir,
    corpus: Corpus,
    run: RunDir = Defaults.run,
    steps: Steps = 1500,
    rows: StepRows = 48,
    anchors: Anchors = 128,
    rate: Rate = 8e-3,
    waves: Waves = 4,
    text_rows: TextRows = 2048,
    length: Length = 1024,
    heats: Heats = Defaults.heats,
    length_weight: LengthWeight = 0.1,
    taps: TapList = "",
    mask_id: Annotated[int, typer.Option(help="id of a mask; -1: the tokenizer's <|mask|>")] = -1,
    seed: Seed = 1,
    count: Count = Defaults.prompts,
    heldout: Heldout = 96,
    device: Device = "cuda",
    compiled: Compiled = False,
) -> None:
    """Train twice with equal text, steps and seed, with and without the accept-length term; prints a table."""
    from ling_local.train import draft_run as rooms
    from ling_local.train.draft_export import DraftShape
    from ling_local.train.draft_loop import DraftPlan
    from ling_local.train.draft_losses import LossWeights
    from ling_local.train.draft_target import open_target

    opened: Target = open_target(target, device, compiled)
    prompts: Prompts = rooms.open_prompts(corpus, target, count, heldout, seed)
    job: Job = rooms.plan_job(opened, DraftShape(taps=parse_taps(taps)), mask_id, run, say)
    text: TextPlan = rooms.TextPlan(waves, text_rows, length, parse_heats(heats), seed)
    plan = DraftPlan(steps, rows, anchors, rate, seed=seed, losses=LossWeights(length=length_weight))
    for line in rooms.ablation_table(rooms.ablate(job, prompts, text, plan)):
        print(line)


def parse_taps(text: str) -> tuple[int, ...]:
    """Layer numbers separated by commas. Raises UsageError."""
    from ling_local.errors import UsageError

    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"--taps {text}: not layer numbers", "write them as --taps 1,2,4") from None


def parse_heats(text: str) -> tuple[tuple[float, float], ...]:
    """TEMPERATURE=SHARE pairs. Raises UsageError."""
    from ling_local.errors import UsageError
    from ling_local.train.draft_run import parse_shares

    try:
        heats = tuple((float(heat), share) for heat, share in parse_shares(text, "--heats").items())
    except ValueError:
        heats = ((-1.0, 1.0),)
    if min(heat for heat, _ in heats) < 0:
        raise UsageError(f"--heats {text}: temperatures must be numbers from 0 up", "write it as --heats 0=0.4,1=0.6")
    return heats
