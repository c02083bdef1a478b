"""The model card, written from what was measured: the plan, the log, eval.json, the token files, the sources."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import Any

from ling_local.engine.config import draft_config
from ling_local.engine.layout import DRAFT_COPIES, draft_layout, model_layout
from ling_local.errors import ModelError
from ling_local.train.shape import CONTEXT, demo_config
from ling_local.train.sources import SOURCES, UNSEEN
from ling_local.train.vocab import CONTROL_TOKENS, EOS

TEMPLATE = Path(__file__).parent / "tables" / "card.md"
SET_NAMES = {
    "heldout_code": "Python, held-out files of the packages trained on",
    "unseen_code": f"Python, packages never trained on ({', '.join(UNSEEN)})",
    "heldout_prose": "documentation, held-out files",
    "heldout_chat": "conversations, new wordings of known facts",
}


def write_card(work: Path, out: Path, run: Path, machine: str) -> None:
    """Write out/README.md. Raises ModelError naming the step that has not run."""
    plan = _read(run / "plan.json", "target")
    evaluation = _read(run / "eval.json", "eval")
    config = demo_config()
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        parameters=f"{sum(spec.numel for spec in model_layout(config)):,}",
        weight_bytes=f"{sum(path.stat().st_size for path in out.glob('model-*.safetensors')):,}",
        vocab_size=config.vocab_size,
        num_control=len(CONTROL_TOKENS),
        context=f"{CONTEXT:,}",
        machine=machine,
        rate=plan["rate"],
        mtp_weight=plan["mtp_weight"],
        step_tokens=f"{plan['rows'] * plan['length']:,}",
        plan_steps=plan["steps"],
        plan_minutes=plan["minutes"],
        seed=plan["seed"],
        device=evaluation["device"],
        dtype=evaluation["dtype"],
        sets=_sets(work),
        figures=_figures(evaluation),
        samples=_samples(_read(run / "samples.json", "samples")),
        sources=_sources(),
        draft=draft_section(out / "dspark"),
        **_last_line(run / "log.jsonl"),
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def _read(path: Path, command: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: not there", f"run: python -m ling_local.train {command}") from None


def _last_line(log: Path) -> dict[str, str]:
    """What the last line of the log says of the whole run."""
    last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    return {
        "minutes": f"{last['elapsed_s'] / 60:.1f}",
        "tokens": f"{last['tokens']:,}",
        "steps": f"{last['step']:,}",
        "tok_s": f"{last['tok_s']:,}",
        "loss": f"{last['loss']:.3f}",
        "mtp_loss": f"{last['mtp_loss']:.3f}",
    }


def _sets(work: Path) -> str:
    corpus = _read(work / "corpus.json", "corpus")
    rows = []
    for name, figures in corpus.items():
        packed = _read(work / "tokens" / f"{name}.json", "pack")
        rows.append(f"| {name} | {packed['tokens']:,} | {packed['bytes']:,} | {figures['documents']:,} |")
    return "\n".join(rows)


def _figures(evaluation: dict[str, Any]) -> str:
    rows = []
    for key, name in SET_NAMES.items():
        f = evaluation[key]
        shown = (f"{f['top1']:.1%}", f"{f['loss_nats']:.3f}", f"{f['bits_per_byte']:.3f}", f"{f['mtp_top1']:.1%}")
        rows.append(f"| {name} | {' | '.join(shown)} | {f['predicted_tokens']:,} |")
    return "\n".join(rows)


def _samples(samples: list[dict[str, str]]) -> str:
    shown = []
    for number, sample in enumerate(samples, start=1):
        given = sample["prompt"].rpartition("<role>HUMAN</role>")[2]
        thinking = ", thinking on" if given.endswith("<think>") else ""
        given = given.partition(EOS)[0]
        texts = "\n\n".join(f"~~~~text\n{text.rstrip()}\n~~~~" for text in (given, sample["output"]))
        shown.append(f"**{number}. {sample['kind']}{thinking}**\n\n{texts}")
    return "\n\n".join(shown)


def draft_section(folder: Path) -> str:
    """The card's part about the draft beside the model, empty where there is none. Raises ModelError."""
    if not folder.exists():
        return ""
    made = _read(folder / "training.json", "draft")
    evaluation = _read(folder / "eval.json", "draft")
    ablation = _read(folder / "ablation.json", "draft-ablation, and move the ablation.json of its --run there")
    config = draft_config(_read(folder / "config.json", "draft"), demo_config())
    own = [spec for spec in draft_layout(config) if spec.name not in DRAFT_COPIES]
    accept = [
        f"| {SET_NAMES[key]} | **{f['accept_length']:.2f}** | "
        + " | ".join(f"{share:.0%}" for share in f["by_position"])
        + f" | {f['steps']:,} |"
        for key, f in evaluation["accept"].items()
    ]
    pair = [(key, ablation["without"]["accept"][key], ablation["with"]["accept"][key]) for key in evaluation["accept"]]
    return Template((TEMPLATE.parent / "draft_card.md").read_text(encoding="utf-8")).substitute(
        made,
        where=f"{made['machine']}, at commit {made['commit']}" if "commit" in made else made["machine"],
        layers=config.num_layers,
        block=config.block_size,
        taps=", ".join(map(str, config.target_layers)),
        rank=config.markov_rank,
        parameters=f"{sum(spec.numel for spec in own):,}",
        weight_bytes=f"{(folder / 'model.safetensors').stat().st_size:,}",
        text_tokens=f"{made['text_tokens']:,}",
        text_share=f"{made['text_own_share']:.0%}",
        blocks_s=f"{made['blocks_s']:,}",
        positions=" | ".join(str(j + 1) for j in range(config.block_size)),
        rules="---|" * config.block_size,
        accept="\n".join(accept),
        ece_before=evaluation["calibration"]["ece_before"],
        ece_after=evaluation["calibration"]["ece_after"],
        ablation_steps=ablation["steps"],
        length_weight=ablation["with"]["length_weight"],
        ablation="\n".join(
            f"| {SET_NAMES[key]} | {a['accept_length']:.2f} | {b['accept_length']:.2f} |" for key, a, b in pair
        ),
    )


def _sources() -> str:
    rows = []
    for source in sorted(SOURCES, key=lambda s: s.name.lower()):
        remark = "never trained on" if source.name.lower() in UNSEEN else ""
        rows.append(f"| {source.name} | {source.version} | {source.licence} | {remark} |")
    return "\n".join(rows)
