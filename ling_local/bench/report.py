"""Reports as documents that hold enough to run them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import ling_local
from ling_local.bench.measure import BenchReport, Sample, Summary
from ling_local.engine.protocol import EngineInfo
from ling_local.types import Stats


def head() -> dict[str, Any]:
    """What every document begins with."""
    return {"schema": 1, "ling": ling_local.__version__}


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
        "gpu_free_bytes": info.free_bytes or None,
    }


def modes_to_json(reports: Sequence[BenchReport], interleaved: bool) -> dict[str, Any]:
    """Several ways to decode side by side; each report is a document of its own."""
    return {
        **head(),
        "order": "interleaved" if interleaved else "one after the other",
        "reports": [to_json(report) for report in reports],
    }


def to_json(report: BenchReport) -> dict[str, Any]:
    """The report as a document, schema 1. Undefined figures are None."""
    plan, info, tpot = report.plan, report.info, report.tpot_ms
    return {
        **head(),
        "model": model_facts(info, plan.draft),
        "machine": machine_facts(report.machine, info),
        "marks": list(info.marks),
        "run": {
            "task": plan.task,
            "prompt_tokens": report.samples[0].stats.prompt_tokens,
            "tokens": plan.tokens,
            "repetitions": plan.repetitions,
            "warmup": plan.warmup,
            "temperature": plan.sampling.temperature,
            "top_k": plan.sampling.top_k,
            "top_p": plan.sampling.top_p,
            "seed": plan.sampling.seed,
            "thinking": plan.thinking if plan.task == "chat" else None,
            "full_width": plan.full_width,
            "context_limit": info.context_limit,
            "exact": report.exact,
        },
        "ttft_ms": _summary(report.ttft_ms),
        "prefill": {"tok_s": _summary(report.prefill_tok_s), "cached_tokens": report.total.cached_tokens},
        "decode": {
            "tpot_ms": _summary(tpot),
            "step_ms": _summary(report.step_ms),
            "tok_s": 1000 / tpot.mean if tpot and tpot.mean else None,
            "peak_tok_s": 1000 / tpot.min if tpot and tpot.min else None,
            **_gpu_facts(report),
        },
        "speculation": speculation(report.total),
        "samples": [_sample(sample) for sample in report.samples],
        "warnings": list(report.warnings),
    }


def _gpu_facts(report: BenchReport) -> dict[str, float | None]:
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
