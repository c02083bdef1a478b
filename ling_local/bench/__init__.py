"""The benchmark and the check of speculation as data: the same line as every other command, its figures kept.

Printing is the CLI's.
"""

from __future__ import annotations

from ling_local.bench.lossless import (
    CheckPlan,
    CheckProgress,
    CheckReport,
    CheckRow,
    Difference,
    check_to_json,
    run_check,
)
from ling_local.bench.machine import machine
from ling_local.bench.measure import (
    BenchPlan,
    BenchProgress,
    BenchReport,
    Lane,
    Sample,
    Summary,
    check,
    run_bench,
    run_lanes,
    summarise,
)
from ling_local.bench.prompts import TASKS, Prompt, bundled
from ling_local.bench.report import modes_to_json, to_json

__all__ = [
    "TASKS",
    "BenchPlan",
    "BenchProgress",
    "BenchReport",
    "CheckPlan",
    "CheckProgress",
    "CheckReport",
    "CheckRow",
    "Difference",
    "Lane",
    "Prompt",
    "Sample",
    "Summary",
    "bundled",
    "check",
    "check_to_json",
    "machine",
    "modes_to_json",
    "run_bench",
    "run_check",
    "run_lanes",
    "summarise",
    "to_json",
]
