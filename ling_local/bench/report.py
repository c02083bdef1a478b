"""Reports as documents that hold enough to run them again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from ling_local.bench.figures import CHECKED, Sample, Summary, accept_histogram
from ling_local.bench.machine import version
from ling_local.bench.public import ANSWER_TOKENS, RECORD, RECORD_MACHINE
from ling_local.bench.result import BenchReport
from ling_local.engine.protocol import EngineInfo
from ling_local.types import Stats

Document = Mapping[str, Any]


def head(command: str = "") -> dict[str, Any]:
    """What every document begins with. command: what to type to have it again."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema": 1, "ling": version(), "at": when, "command": command or None}


def model_facts(info: EngineInfo, draft: bool) -> dict[str, Any]:
    """The model, and the drafter where drafts are made."""
    return {
        "id": info.model,
        "engine": info.engine,
        "dtype": info.dtype,
        "drafter": info.drafter if draft else "off",
        "block": info.block if draft else 0,
        "parameters": info.parameters,
        "weight_bytes": info.weight_bytes,
        "state_bytes": info.state_bytes,
    }


def machine_facts(machine: dict[str, Any], info: EngineInfo) -> dict[str, Any]:
    """The machine, and what of it the engine uses."""
    return {
        **machine,
        "device": info.device,
        "ranks": info.ranks,
        "torch": info.torch or None,
        "gpu": info.device_name or None,
        "gpu_free_bytes": info.free_bytes or None,
    }


def modes_to_json(reports: Sequence[BenchReport], order: str, command: str = "") -> dict[str, Any]:
    """Several ways to decode side by side; each report is a document of its own. order: in words."""
    return {
        **head(command),
        "order": order,
        "reports": [to_json(report, command) for report in reports],
    }


def to_json(report: BenchReport, command: str = "") -> dict[str, Any]:
    """The report as a document, schema 1. Undefined figures are None."""
    plan, info, tpot = report.plan, report.info, report.tpot_ms
    document = {
        **head(command),
        "model": model_facts(info, plan.draft),
        "machine": {**machine_facts(report.machine, info), **_gpu_state(report)},
        "marks": list(report.marks),
        "run": _run(report),
        "ttft_ms": _summary(report.ttft_ms),
        "wall_s": _summary(report.wall_s),
        "prefill": {"tok_s": _summary(report.prefill_tok_s), "cached_tokens": report.total.cached_tokens},
        "decode": {
            "tpot_ms": _summary(tpot),
            "step_ms": _summary(report.step_ms),
            "tok_s": 1000 / tpot.mean if tpot and tpot.mean else None,
            "peak_tok_s": 1000 / tpot.min if tpot and tpot.min else None,
            **_gpu_step(report),
        },
        "speculation": {**speculation(report.total), "accept_histogram": list(accept_histogram(report.samples))},
        "answer": _answer(report),
        "samples": [_sample(sample) for sample in report.samples],
        "trust": {"believe": not report.warnings, "spread": report.spread, **_load(report)},
        "warnings": list(report.warnings),
        "checked": list(CHECKED),
    }
    decode = document["decode"]
    assert decode["tok_s"] is None or decode["peak_tok_s"] >= decode["tok_s"]
    return document


def _run(report: BenchReport) -> dict[str, Any]:
    plan = report.plan
    return {
        "task": plan.task,
        "prompt_tokens": report.samples[0].stats.prompt_tokens,
        "tokens": plan.tokens,
        "repetitions": plan.repetitions,
        "warmup": plan.warmup,
        **asdict(plan.sampling),
        "thinking": plan.thinking if plan.task == "chat" else None,
        "full_width": plan.full_width,
        "context_limit": report.info.context_limit,
        "exact": report.exact,
    }


def _answer(report: BenchReport) -> dict[str, Any]:
    """An answer of 5,000 tokens here, and what it takes at the published speeds."""
    return {
        "tokens": ANSWER_TOKENS,
        "seconds": report.answer_s,
        "measured": report.answer_measured,
        "record": {"machine": RECORD_MACHINE, "rows": [asdict(row) for row in RECORD]},
    }


def _gpu_state(report: BenchReport) -> dict[str, Any]:
    """What the driver says of the GPU, before and after; None where there is none, or no answer."""
    before, after = report.conditions.gpu, report.conditions.gpu_after
    if before is None:
        return {"driver": None, "power_w": None, "others_on_gpu": None, "gpu_before": None, "gpu_after": None}
    return {
        "driver": before["driver"],
        "power_w": before["power_w"],
        "others_on_gpu": report.conditions.others_on_gpu,
        "gpu_before": before,
        "gpu_after": after,
    }


def _load(report: BenchReport) -> dict[str, float | None]:
    conditions = report.conditions
    return {
        "load_1m": conditions.load_1m,
        "others_cpus": conditions.others_cpus,
        "stolen": conditions.stolen,
    }


def _gpu_step(report: BenchReport) -> dict[str, float | None]:
    """A step by the GPU's own clock, and what the caller's exceeds it; medians over the repetitions."""
    pairs = [(s.stats.gpu_step_s, s.stats.step_s) for s in report.samples if s.stats.gpu_step_s and s.stats.step_s]
    if not pairs:
        return {"gpu_step_ms": None, "host_gap_ms": None}
    return {
        "gpu_step_ms": 1000 * median(gpu for gpu, _ in pairs),
        "host_gap_ms": 1000 * median(seen - gpu for gpu, seen in pairs),
    }


def speculation(stats: Stats) -> dict[str, Any]:
    """rate_by_position: share of all steps in which at least that many drafts were accepted, so that 1 + their sum
    is the accept length; rate_given_previous: of the steps that accepted all before it, the share that went on."""
    return {
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "rate": stats.rate,
        "accept_length": stats.accept_length,
        "rate_by_position": list(stats.rate_by_position),
        "rate_given_previous": list(stats.rate_given_previous),
    }


def _sample(sample: Sample) -> dict[str, Any]:
    stats = sample.stats
    return {
        "tokens": stats.tokens,
        "finish": sample.finish.value,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "ttft_ms": _ms(stats.ttft_s),
        "tpot_ms": _ms(stats.tpot_s),
        "step_ms": _ms(stats.step_s),
        "prefill_ms": _ms(stats.prefill_s),
        "wall_ms": _ms(stats.wall_s),
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accept_length": stats.accept_length,
    }


def _summary(summary: Summary | None) -> dict[str, float | None]:
    names = ("mean", "sd", "median", "p99", "min", "max")
    return asdict(summary) if summary else dict.fromkeys(names)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
