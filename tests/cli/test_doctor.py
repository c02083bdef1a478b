"""`ling doctor` on machines that this one is not: a torch of our own stands in for broken and busy ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ling_local.doctor import Status, run_checks
from program import Program

TORCH = """
import os, time
__version__ = "2.12.0+cu130"
def get_num_threads(): return 8
def ones(count, device): return Numbers(count)
class Numbers(float):
    def sum(self): return self
class version: cuda = "13.0"
class Props:
    name, major, minor, multi_processor_count = "Big GPU", 9, 0, 132
class cuda:
    def get_arch_list(): return ["sm_90"]
    def init(): pass
    def device_count(): return 1
    def get_device_properties(index): return Props
    def mem_get_info(index): return (139 << 30, 140 << 30)
    def can_device_access_peer(a, b): return True
"""
Doctor = Callable[..., dict[str, list[dict[str, str]]]]


@pytest.fixture
def doctor(ling: Program, tmp_path: Path) -> Doctor:
    """Run it with a torch that has the given lines at its end; the checks by name, and the exit code as `code`."""

    def run(*lines: str, args: tuple[str, ...] = (), nvrtc: bool = True) -> dict[str, Any]:
        place = tmp_path / "python"
        (place / "cuda" / "bindings").mkdir(parents=True)
        (place / "torch.py").write_text(TORCH + "\n".join(lines) + "\n")
        (place / "cuda" / "__init__.py").write_text("")
        maker = "class nvrtcResult: NVRTC_SUCCESS = 0\ndef nvrtcVersion(): return 0, 13, 1\n"
        (place / "cuda" / "bindings" / "__init__.py").write_text("")
        (place / "cuda" / "bindings" / "nvrtc.py").write_text(maker if nvrtc else "raise ImportError('no libnvrtc')\n")
        done = ling("doctor", "--json", *args, env={"PYTHONPATH": str(place)})
        assert "Traceback" not in done.err
        rows: dict[str, Any] = {"code": done.code, "ok": done.json["ok"]}
        for row in done.json["checks"]:
            rows.setdefault(row["name"], []).append(row)
        assert "terminal" in rows  # it came to its end
        return rows

    return run


def test_a_machine_with_a_gpu_passes(doctor: Doctor) -> None:
    rows = doctor()
    assert (rows["code"], rows["ok"]) == (0, True)
    assert rows["gpu"][0]["status"] == "pass"
    assert "GPU 0: Big GPU (sm_90, 132 SMs), 139.0 of 140.0 GiB free" in rows["gpu"][0]["detail"]
    assert "NVRTC 13.1; 0 compiled in " in rows["kernels"][0]["detail"]
    assert "links" not in rows


def test_several_gpus_get_a_line_each_and_one_about_their_links(doctor: Doctor) -> None:
    rows = doctor("cuda.device_count = lambda: 3", "cuda.can_device_access_peer = lambda a, b: 2 not in (a, b)")
    assert len(rows["gpu"]) == 3
    assert rows["links"][0]["status"] == "warn"
    assert rows["links"][0]["detail"] == "3 GPUs; these pairs do not reach each other: 0-2, 1-2"
    assert rows["code"] == 0


def test_linked_gpus_pass(doctor: Doctor) -> None:
    rows = doctor("cuda.device_count = lambda: 2")
    assert rows["links"][0]["detail"] == "2 GPUs, each reaches the memory of every other"
    assert rows["links"][0]["status"] == "pass"
    # what is pretended reaches no memory: an exchange is tried all the same, and ends with a reason
    assert rows["exchange"][0]["status"] == "warn"
    assert rows["exchange"][0]["detail"].startswith("2 GPUs cannot work as one: rank ")


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("cuda.mem_get_info = lambda index: (10 << 30, 140 << 30)", "warn", "10.0 of 140.0 GiB free"),
        ("Props.major = 7", "warn", "sm_70"),
        ("def ones(*args, **more): raise RuntimeError('unspecified launch failure')", "fail", "unspecified launch"),
        ("Numbers.sum = lambda self: 0.0", "fail", "it gives a wrong sum"),
    ],
)
def test_a_gpu_that_cannot_be_used_well_says_why(doctor: Doctor, line: str, status: str, words: str) -> None:
    rows = doctor(line)
    assert rows["gpu"][0]["status"] == status
    assert words in rows["gpu"][0]["detail"]
    assert rows["gpu"][0]["fix"]
    assert rows["code"] == (1 if status == "fail" else 0)


@pytest.mark.parametrize(
    ("line", "name", "words"),
    [
        ("time.sleep(600)", "torch", "importing it takes longer than 2 s"),
        ("cuda.init = lambda: time.sleep(600)", "gpu", "gives no answer within 2 s"),
        ("cuda.init = lambda: os.abort()", "gpu", "asking for it crashes: exit code -6"),
        ("os.abort()", "torch", "torch cannot be imported: exit code -6"),
        ("raise SystemExit('not today')", "torch", "torch cannot be imported: not today"),
    ],
)
def test_a_driver_that_hangs_or_crashes_is_a_line(doctor: Doctor, line: str, name: str, words: str) -> None:
    started = time.monotonic()
    rows = doctor(line, args=("--timeout", "2"))
    assert time.monotonic() - started < 30
    assert rows["code"] == 1
    assert rows[name][0]["status"] == "fail"
    assert words in rows[name][0]["detail"]


def test_no_gpu_is_a_note_and_a_failure_only_where_one_is_asked_for(ling: Program, doctor: Doctor) -> None:
    rows = doctor(
        "def none(): raise RuntimeError('Found no NVIDIA driver')", "cuda.init = none", args=("--device", "cuda")
    )
    assert rows["code"] == 1
    assert "--device cuda is asked for" in rows["gpu"][0]["detail"]
    here = {row["name"]: row for row in ling("doctor", "--json", "--device", "cpu").json["checks"]}
    assert here["gpu"]["status"] != "fail"


def test_a_gpu_without_a_compiler_for_its_kernels_fails(doctor: Doctor) -> None:
    rows = doctor(nvrtc=False)
    assert rows["code"] == 1
    assert "no NVRTC: no libnvrtc" in rows["kernels"][0]["detail"]
    assert "ling-local[gpu]" in rows["kernels"][0]["fix"]


def test_a_folder_that_is_no_whole_model_is_named(ling: Program) -> None:
    folder = ling.home / ".local/share/ling/models/half"
    folder.mkdir(parents=True)
    rows = [
        row for row in ling("doctor", "--json", "-m", str(folder)).json["checks"] if row["name"] in ("models", "model")
    ]
    assert [row["status"] for row in rows] == ["warn", "fail"]
    assert "config.json is missing" in rows[0]["detail"]


def test_memory_is_compared_with_the_chosen_model(ling: Program, tmp_path: Path) -> None:
    folder = tmp_path / "huge"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with open(folder / "model.safetensors", "wb") as file:
        file.truncate(1 << 40)  # a sparse file
    rows = {
        row["name"]: row for row in ling("doctor", "--json", "-m", str(folder), "--dtype", "bfloat16").json["checks"]
    }
    assert rows["memory"]["status"] == "warn"
    assert "needs 1024.0 GiB" in rows["memory"]["detail"]


def test_offline_and_the_time_of_each_check_are_said(ling: Program) -> None:
    done = ling("doctor", "--offline", "-v")
    assert "offline by flag --offline" in done.text
    assert "ling: python: after " in done.err


def test_a_closed_stdout_is_no_broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ling_local.doctor.gpu.check", lambda *_: iter(()))
    monkeypatch.setattr(sys, "stdout", None)
    assert {check.status for check in run_checks(None, False) if check.name == "terminal"} == {Status.PASS}
