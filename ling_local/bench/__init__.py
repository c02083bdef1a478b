"""The benchmark and the check of speculation as data: the same line as every other command, its figures kept.

Printing is the CLI's.
"""

from __future__ import annotations

from ling_local.bench.compare import compare, read_reports
from ling_local.bench.figures import Sample, Summary, summarise
from ling_local.bench.lossless import (
    CheckPlan,
    CheckProgress,
    CheckReport,
    CheckRow,
    Difference,
    check_to_json,
    run_check,
)
from ling_local.bench.machine import machine, version
from ling_local.bench.measure import BenchProgress, Lane, run_bench, run_lanes
from ling_local.bench.plot import plot
from ling_local.bench.prompts import TASKS, TEXTS, Prompt, bundled
from ling_local.bench.report import modes_to_json, to_json
from ling_local.bench.result import RANDOM_IN, RANDOM_OUT, BenchPlan, BenchReport

__all__ = [
    "RANDOM_IN",
    "RANDOM_OUT",
    "TASKS",
    "TEXTS",
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
    "check_to_json",
    "compare",
    "machine",
    "modes_to_json",
    "plot",
    "read_reports",
    "run_bench",
    "run_check",
    "run_lanes",
    "summarise",
    "to_json",
    "version",
]
