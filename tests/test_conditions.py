"""What else went on during a measurement: other processes, a GPU that is held back, a report from another version."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ling_local.bench.conditions import Conditions, Watch, family, read_gpus, throttles
from ling_local.bench.machine import machine, version

ROOM = sys.modules["ling_local.bench.machine"]  # its package has a function of the same name
SMI = """#!/bin/sh
case "$1" in --query-gpu=uuid,name,*) ;; *) exit 6 ;; esac
echo "GPU-0, NVIDIA H200, 580.65.06, 143771, [N/A], 39, 1755, 1980, 0x0000000000000008"
echo "GPU-1, NVIDIA H200, 580.65.06, 143771, 700.00, 41, 1980, 1980, 0x0000000000000044"
"""


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_work_of_our_own_and_of_our_children_is_not_that_of_others() -> None:
    watch = Watch()
    child = multiprocessing.get_context("spawn").Process(target=spin, args=(0.8,))
    child.start()
    assert {os.getpid(), child.pid} <= family()
    spin(0.8)
    child.join()
    time.sleep(0.3)
    quiet = watch.end()
    assert quiet.others_cpus is not None
    assert quiet.load_1m is not None
    # somebody else's work, though started by us: it leaves our family as its parent ends
    watch = Watch()
    loop = "import os, time\nif os.fork(): os._exit(0)\nwhile time.process_time() < 3: pass"
    subprocess.run([sys.executable, "-c", loop], check=True)
    time.sleep(2)
    busy = watch.end()
    assert busy.others_cpus is not None
    assert busy.others_cpus > 0.2
    assert list(Conditions(1, others_cpus=busy.others_cpus).doubts())


def test_too_short_a_run_tells_nothing() -> None:
    assert Watch().end().others_cpus is None


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000001", []),  # idle
        ("0x0000000000000002", []),  # clocks that somebody chose
        ("0x0000000000000004", ["its power limit"]),
        ("0x0000000000000068", ["its heat", "the board"]),
        ("[N/A]", []),
    ],
)
def test_what_slows_a_gpu_down_is_said_in_words(mask: str, reasons: list[str]) -> None:
    assert throttles(mask) == reasons


@pytest.fixture
def smi(tmp_path: Path) -> str:
    """A driver's tool that knows two GPUs."""
    file = tmp_path / "nvidia-smi"
    file.write_text(SMI)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_the_driver_is_asked_about_the_gpu_in_use(smi: str) -> None:
    facts = read_gpus(("GPU-1",), (smi,))
    assert facts == {
        "name": "NVIDIA H200",
        "driver": "580.65.06",
        "memory_mib": 143771.0,
        "power_w": 700.0,
        "temperature_c": 41.0,
        "clock_mhz": 1980.0,
        "max_clock_mhz": 1980.0,
        "throttled": ["its heat", "its power limit"],
    }
    conditions = Conditions(8, gpu=facts, gpu_after=facts, gpu_free_bytes=139 << 30)
    assert list(conditions.doubts()) == ["the GPU was slowed down by its heat and its power limit"]
    assert conditions.others_on_gpu is False
    crowded = Conditions(8, gpu=facts, gpu_free_bytes=100 << 30)
    assert "other processes were on the GPU" in list(crowded.doubts())


def test_of_several_gpus_the_worst_is_told(smi: str) -> None:
    facts = read_gpus(("GPU-0", "GPU-1"), (smi,))
    assert (facts["temperature_c"], facts["clock_mhz"], facts["power_w"]) == (41.0, 1755.0, 700.0)
    assert facts["throttled"] == ["its heat", "its power limit", "the board"]


def test_a_driver_that_does_not_answer_leaves_nothing_known(smi: str, tmp_path: Path) -> None:
    assert read_gpus(("GPU-1", "GPU-2"), (smi,)) is None
    assert read_gpus(("GPU-1",), (str(tmp_path / "none"),)) is None
    assert read_gpus(("GPU-1",), ("/bin/echo",)) is None
    assert list(Conditions(8).doubts()) == []


def test_the_machine_is_named() -> None:
    facts = machine()
    assert facts["cpus"] >= 1
    assert facts["cpu"]
    assert facts["python"].startswith("3.")


def test_a_clone_tells_its_commit_and_a_folder_inside_another_repository_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    installed = tmp_path / "lib"
    installed.mkdir()
    monkeypatch.setattr(ROOM, "_ROOT", tmp_path)
    assert version() == "0.1.0"
    git("init", "-q")
    (tmp_path / "pyproject.toml").write_text("a")
    git("add", ".")
    git("commit", "-qm", "x")
    commit = git("rev-parse", "HEAD")
    clean = version()
    assert clean.startswith("0.1.0+")
    assert commit.startswith(clean.removeprefix("0.1.0+"))
    (tmp_path / "pyproject.toml").write_text("b")
    assert version() == f"{clean}.changed"
    monkeypatch.setattr(ROOM, "_ROOT", installed)
    assert version() == "0.1.0"
