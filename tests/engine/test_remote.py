"""The two sides of the door: what crosses it, and what happens when one side goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ling_local.engine import open_engine
from ling_local.engine.protocol import EngineSpec, Progress
from ling_local.engine.remote import RemoteEngine
from ling_local.engine.worker import to_error
from ling_local.errors import EngineDied, EngineError, ModelError, OutOfMemory, UsageError
from ling_local.types import FinishReason, TokenRequest

Open = Callable[..., RemoteEngine]
ENDLESS = {"steps": [{"tokens": ["a"], "delay_ms": 5}], "loop": True}


@pytest.fixture
def start(write_script: Callable[..., Path]) -> Iterator[Open]:
    """Open an engine on a script made of turns and fields; closed at the end."""
    opened: list[RemoteEngine] = []

    def open_one(*turns: Any, progress: Any = None, **fields: Any) -> RemoteEngine:
        path = write_script(*turns, name=f"script{len(opened)}", **fields)
        opened.append(RemoteEngine(EngineSpec(str(path), "scripted"), progress))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def is_running(pid: int) -> bool:
    """False also for a process that nobody has waited for yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


def test_it_loads_in_the_background_and_forwards_progress(start: Open) -> None:
    seen: list[Progress] = []
    begun = time.monotonic()
    engine = start(["a"], load={"delay_ms": 400}, progress=seen.append)
    assert not engine.is_ready
    info = engine.wait_ready()
    assert engine.is_ready
    assert info.model == "script0"
    assert time.monotonic() - begun >= 0.4
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert len(seen) > 2
    assert seen[-1].done == seen[-1].total


def test_waiting_can_have_an_end(start: Open) -> None:
    engine = start(["a"], load={"delay_ms": 5000})
    with pytest.raises(TimeoutError):
        engine.wait_ready(0.05)


def test_close_during_a_load_does_not_wait_for_it(start: Open) -> None:
    engine = start(["a"], load={"delay_ms": 60_000})
    time.sleep(0.2)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 1.5
    assert not is_running(engine.pid)
    with pytest.raises(EngineError, match="closed"):
        _ = engine.info


def test_close_leaves_no_process_and_no_thread(start: Open) -> None:
    before = threading.active_count()
    engine = start(["a"])
    assert engine.info
    engine.close()
    assert not is_running(engine.pid)
    deadline = time.monotonic() + 2
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_close_ends_a_worker_that_hears_nothing(start: Open) -> None:
    engine = start(["a", {"hang": True}])
    steps = iter(engine.generate(TokenRequest((1,))))
    assert next(steps).ids == (97,)
    engine.close()
    assert not is_running(engine.pid)
    with pytest.raises(EngineError, match="closed"):
        next(steps)


def test_a_progress_function_that_fails_is_reported_by_the_wait(start: Open) -> None:
    def broken(_: Progress) -> None:
        raise ZeroDivisionError("in the display")

    with pytest.raises(ZeroDivisionError):
        _ = start(["a"], progress=broken).info


def test_a_killed_worker_is_told_with_its_signal_and_its_last_words(start: Open) -> None:
    engine = start(["a", {"tokens": ["b"], "stderr": "CUDA said something"}, {"kill": "SIGKILL"}])
    got = []
    with pytest.raises(EngineDied) as caught:  # noqa: PT012
        for step in engine.generate(TokenRequest((1,))):
            got.append(step.ids)
    assert got == [(97,), (98,)]
    assert "SIGKILL" in caught.value.message
    assert "CUDA said something" in caught.value.message
    assert "memory" in caught.value.hint
    with pytest.raises(EngineDied):
        engine.generate(TokenRequest((1,)))
    with pytest.raises(EngineDied):
        _ = engine.info


def test_a_worker_killed_while_idle(start: Open) -> None:
    engine = start(["a"])
    assert engine.info
    os.kill(engine.pid, signal.SIGTERM)
    assert wait_gone(engine.pid)
    with pytest.raises(EngineDied, match="SIGTERM"):
        list(engine.generate(TokenRequest((1,), max_tokens=1)))


def test_a_worker_that_exits_is_told_with_its_code(start: Open) -> None:
    engine = start([{"exit": 7}])
    with pytest.raises(EngineDied, match="exit code 7"):
        list(engine.generate(TokenRequest((1,))))


def test_output_of_the_worker_does_not_mix_with_ours_and_is_bounded(
    start: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    warning = "a library warns at length " * 40
    engine = start({"steps": [{"tokens": ["a"], "stderr": warning}], "loop": True}, stderr="loading")
    list(engine.generate(TokenRequest((1,), max_tokens=200)))
    engine.close()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    tail = engine.output_tail()
    assert warning in tail
    assert "loading" not in tail
    assert len(tail) <= 64 * 1024


def test_an_unknown_exception_becomes_an_engine_error_with_its_trace(start: Open) -> None:
    engine = start([{"fail": {"kind": "ValueError", "message": "shapes differ"}}], ["a"])
    with pytest.raises(EngineError) as caught:
        list(engine.generate(TokenRequest((1,))))
    assert "ValueError: shapes differ" in caught.value.message
    assert "--debug" in caught.value.hint
    assert any("Traceback" in note and "_play" in note for note in caught.value.__notes__)
    assert [s.ids for s in engine.generate(TokenRequest((1,), max_tokens=1))] == [(97,)]


def test_memory_errors_become_one_sentence(start: Open) -> None:
    engine = start([{"fail": "MemoryError"}])
    with pytest.raises(OutOfMemory, match="not enough memory for this request"):
        list(engine.generate(TokenRequest((1,))))
    loading = start(["a"], load={"fail": "MemoryError"})
    with pytest.raises(OutOfMemory, match="not enough memory to load"):
        _ = loading.info


def test_how_torch_says_that_memory_is_short() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch names its own."""

    cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    for error in (OutOfMemoryError("CUDA out of memory. Tried to allocate 38.00 MiB"), cpu):
        assert type(to_error(error, "run")) is OutOfMemory
    assert type(to_error(RuntimeError("size mismatch"), "run")) is EngineError
    missing = to_error(ModuleNotFoundError("No module named 'torch'"), "load")
    assert "No module named 'torch'" in missing.message
    assert "ling doctor" in missing.hint


def test_an_error_that_cannot_travel_still_arrives() -> None:
    error = ModelError("the message", "the hint")
    error.handle = threading.Lock()  # type: ignore[attr-defined]
    sent = to_error(error, "load")
    assert type(sent) is EngineError
    assert "the message" in sent.message


def test_sigint_is_not_for_the_worker(start: Open) -> None:
    """Ctrl-C reaches the whole process group; also while the worker starts up."""
    engine = start(["a", "b"])
    os.kill(engine.pid, signal.SIGINT)
    assert engine.info
    os.kill(engine.pid, signal.SIGINT)
    assert len(list(engine.generate(TokenRequest((1,), max_tokens=2)))) == 2


def test_ctrl_c_while_waiting_for_the_load_ends_the_worker(write_script: Any) -> None:
    path = write_script(["a"], load={"delay_ms": 60_000})
    front = _front(
        "engine = RemoteEngine(EngineSpec(sys.argv[1], 'scripted'))",
        "print(engine.pid, flush=True)",
        "try:",
        "    engine.info",
        "except KeyboardInterrupt:",
        "    print('interrupted', flush=True)",
        path=path,
    )
    assert front.stdout is not None
    worker = int(front.stdout.readline())
    time.sleep(0.2)
    front.send_signal(signal.SIGINT)
    assert front.stdout.readline().strip() == "interrupted"
    assert wait_gone(worker)
    assert front.wait(5) == 0
    front.stdout.close()


@pytest.mark.parametrize("state", ["load", "decode", "hang"])
def test_a_front_that_is_killed_leaves_no_worker(write_script: Any, state: str) -> None:
    turn = ["a", {"hang": True}] if state == "hang" else ENDLESS
    path = write_script(turn, load={"delay_ms": 60_000 if state == "load" else 0})
    loading = ["print(engine.pid, flush=True)", "engine.info"]
    lines = ["for step in engine.generate(TokenRequest((1,), max_tokens=8000)):", "    print(engine.pid, flush=True)"]
    front = _front(
        "engine = RemoteEngine(EngineSpec(sys.argv[1], 'scripted'))",
        *(loading if state == "load" else lines),
        path=path,
    )
    assert front.stdout is not None
    worker = int(front.stdout.readline())
    time.sleep(0.2)
    assert is_running(worker)
    front.kill()
    front.wait()
    assert wait_gone(worker)
    front.stdout.close()


def test_cancel_is_heard_in_the_middle_of_a_long_step(start: Open) -> None:
    engine = start(["a", {"tokens": ["b"], "delay_ms": 60_000}], ["c"])
    generation = engine.generate(TokenRequest((1,)))
    steps = iter(generation)
    assert next(steps).ids == (97,)
    begun = time.monotonic()
    generation.cancel()
    assert [step.finish for step in steps] == [FinishReason.CANCELLED]
    assert time.monotonic() - begun < 1
    assert [s.ids for s in engine.generate(TokenRequest((1,), max_tokens=1))] == [(99,)]


def test_a_cancelled_request_is_waited_out_even_if_nobody_reads_it(start: Open) -> None:
    engine = start(ENDLESS, ["c"])
    first = engine.generate(TokenRequest((1,), max_tokens=8000))
    first.cancel()
    assert [s.ids for s in engine.generate(TokenRequest((1,), max_tokens=1))] == [(99,)]
    assert list(first)[-1].finish is FinishReason.CANCELLED


def test_cancel_from_a_signal_handler(start: Open) -> None:
    engine = start(ENDLESS)
    generation = engine.generate(TokenRequest((1,), max_tokens=8000))
    before = signal.signal(signal.SIGALRM, lambda *_: generation.cancel())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert list(generation)[-1].finish is FinishReason.CANCELLED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_worker_does_not_wait_for_its_reader(start: Open) -> None:
    """The engine's figures do not change because the front draws slowly."""
    turn = {"steps": [{"tokens": ["a"], "delay_ms": 1}], "loop": True}
    engine = start(turn)
    steps = iter(engine.generate(TokenRequest((1,), max_tokens=300)))
    times = [next(steps).time_s]
    time.sleep(1.5)
    times += [step.time_s for step in steps]
    assert len(times) == 300
    assert times[-1] - times[0] < 1.2


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
def test_threads_of_the_worker_sleep_while_they_wait_unless_the_person_says_otherwise(
    start: Open, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    engine = start(["a"])
    engine.wait_ready()
    assert f"OMP_WAIT_POLICY={policy or 'PASSIVE'}\0".encode() in Path(f"/proc/{engine.pid}/environ").read_bytes()


def test_a_file_of_the_working_directory_is_no_module_of_the_worker(
    start: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('wrong random')")
    (tmp_path / "json.py").write_text("raise SystemExit('wrong json')")
    monkeypatch.chdir(tmp_path)
    assert start(["a"]).info


def test_an_engine_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="vllm"):
        open_engine(EngineSpec("x", "vllm"))


def test_neither_side_imports_torch_for_a_script(write_script: Any) -> None:
    path = write_script(["a"])
    front = _front(
        "engine = RemoteEngine(EngineSpec(sys.argv[1], 'scripted'))",
        "list(engine.generate(TokenRequest((1,), max_tokens=1)))",
        "maps = open(f'/proc/{engine.pid}/maps').read()",
        "print('torch' in sys.modules, 'libtorch' in maps)",
        "engine.close()",
        path=path,
    )
    assert front.communicate(timeout=20)[0].split() == ["False", "False"]


def _front(*lines: str, path: Path) -> subprocess.Popen[str]:
    head = [
        "import sys",
        "from ling_local.engine.remote import RemoteEngine",
        "from ling_local.engine.protocol import EngineSpec",
        "from ling_local.types import TokenRequest",
    ]
    code = "\n".join([*head, *lines])
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
