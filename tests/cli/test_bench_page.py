"""What a report of `ling bench` says besides its figures: when, in which context, and what was checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ling_local.bench.figures import CHECKED
from program import Program

TURN = {"steps": [{"tokens": ["a", "b"], "delay_ms": 1}], "loop": True}
Write = Callable[..., Path]


@pytest.fixture
def bench(ling: Program, write_script: Write) -> Callable[..., object]:
    script = write_script(TURN, clock="virtual")
    return lambda *args: ling("bench", "--engine", "scripted", "-m", script, "--tokens", "6", "-r", "2", *args)


@pytest.mark.parametrize("flag", ["--format=table", "--md"])
def test_a_page_says_when_in_which_context_and_what_was_checked(bench: Callable[..., object], flag: str) -> None:
    page = bench(flag).text
    assert re.search(r"^ling .*, context 8,192 *$", page, re.MULTILINE)
    assert re.search(r"^at: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC *$", page, re.MULTILINE)
    assert f"checked: {'; '.join(CHECKED)}" in page


def test_documents_hold_the_time_and_the_checks(bench: Callable[..., object]) -> None:
    document = bench("--json").json
    measured = datetime.fromisoformat(document["at"])
    assert timedelta(0) <= datetime.now(UTC) - measured < timedelta(minutes=1)
    assert document["checked"] == list(CHECKED)
    head, *rows = bench("--csv").text.splitlines()
    assert all(row.split(",")[head.split(",").index("at")].endswith("Z") for row in rows)
    assert all(row.split(",")[head.split(",").index("command")].startswith("ling bench --model ") for row in rows)


def test_a_misspelt_option_gets_the_one_that_begins_alike(ling: Program) -> None:
    for given, meant in (("--repeat", "--repetitions"), ("--fromat", "--format"), ("--accept", "--accept-pattern")):
        done = ling("bench", given)
        assert (done.code, done.err) == (2, f"ling: no such option '{given}'. Did you mean '{meant}'?\n")
