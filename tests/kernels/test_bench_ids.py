"""The command that compares several ranks' ids with one's: it ends well on equal and nearly tied ids only."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "kernels" / "bench" / "ids.py"
TEXT, OTHER = [1, 2, 3, 4], [1, 2, 7, 4]


@pytest.fixture(scope="module")
def ids() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_ids", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_processes_say_what_one_does() -> None:
    run = [sys.executable, FILE, "--model", "demo", "--device", "cpu", "--tokens", "20", "--deadline", "60"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on cpu" in done.stdout
    assert "20 ids equal" in done.stdout or "standard deviations from a tie" in done.stdout


@pytest.mark.parametrize(
    ("several", "one", "margins", "same", "words"),
    [
        ((TEXT, TEXT), (TEXT, TEXT), [0, 0, 0, 0], True, "4 ids equal"),
        ((OTHER, OTHER), (TEXT, TEXT), [0, 0, 0.01, 0], True, "part after 2 of 4 tokens, 1.0e-02 standard deviations"),
        ((OTHER, OTHER), (TEXT, TEXT), [0, 0, 0.3, 0], False, "1 of the 4 are not what one rank says"),
        ((OTHER, OTHER), (TEXT, TEXT), [0, 0, 0.01, 2], False, "the farthest is 2.0e+00"),
        ((TEXT, OTHER), (TEXT, TEXT), [0, 0, 0, 0], False, "several ranks: drafts change the text after 2 tokens"),
        ((TEXT, TEXT), (TEXT, TEXT[:3]), [0, 0, 0, 0], False, "one rank: drafts change the text after 3 tokens"),
        ((TEXT[:3], TEXT[:3]), (TEXT, TEXT), [0, 0, 0], False, "3 ids, 4 of one rank"),
    ],
)
def test_only_near_ties_may_part_texts(
    ids: ModuleType, several: tuple, one: tuple, margins: list[float], same: bool, words: str
) -> None:
    lines, judged = ids.judge(several, one, margins, 0.1)
    assert judged is same
    assert any(words in line for line in lines), lines


def test_an_id_is_as_far_from_a_tie_as_its_logit_is_from_the_best(ids: ModuleType) -> None:
    engine = ids.load_alone(ids.EngineSpec(str(ids.demo_dir()), draft="off"))
    request = ids.TokenRequest(ids.PROMPT, sampling=ids.SamplingParams(temperature=0.0), max_tokens=20)
    said = [token for result in engine.generate(request) for token in result.ids]
    assert ids.margins_of(engine, said) == [0.0] * 20
    changed = [*said[:7], (said[7] + 1) % 4000, *said[8:]]
    margins = ids.margins_of(engine, changed)
    assert margins[:7] == [0.0] * 7
    assert margins[7] > 0.01
