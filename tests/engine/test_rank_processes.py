"""A process for each rank: they load at once, follow, and end together, with a message that names the one at fault.

The processes are forks of one that has torch already (forks.py), but for those that outlive their front.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints import write_checkpoint, write_draft
from forks import forked_workers
from ling_kernels.exchange import PATIENCE_S
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import EngineSpec, Progress
from ling_local.engine.pulse import Pulse, make_pulse
from ling_local.engine.ranks import SILENT_S, Crew
from ling_local.engine.remote import RemoteEngine
from ling_local.errors import EngineDied, EngineError, ExchangeTimeout, UsageError
from ling_local.paths import demo_dir
from ling_local.types import FinishReason, SamplingParams, TokenRequest
from ranks import assert_same_up_to_a_near_tie, ids_of

PROMPT = tuple((37 * i + 11) % 4000 for i in range(30))
GREEDY = SamplingParams(temperature=0.0)
DEMO = EngineSpec(str(demo_dir()), ranks=2)
# Waits that make tests end on machines of any speed; what is promised of the time is what the messages say of it.
LONG_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[..., RemoteEngine]]:
    opened: list[RemoteEngine] = []

    def open_one(spec: EngineSpec = DEMO, progress: Callable[[Progress], None] | None = None) -> RemoteEngine:
        opened.append(RemoteEngine(spec, progress))
        return opened[-1]

    with forked_workers():
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


def wait_gone(pids: tuple[int, ...]) -> bool:
    end = time.monotonic() + LONG_S
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_running, pids))


def endless(engine: RemoteEngine) -> Iterator:
    steps = iter(engine.generate(TokenRequest(PROMPT, sampling=GREEDY, max_tokens=7000)))
    for _ in range(3):
        next(steps)
    return steps


def test_two_processes_answer_cancel_and_answer_again(start: Callable[..., RemoteEngine]) -> None:
    seen: list[Progress] = []
    engine = start(progress=seen.append)
    assert engine.info.ranks == 2
    assert len(engine.pids) == 2
    assert seen[0] == Progress("starting on cpu, cpu")
    weights = [p for p in seen if p.stage == "loading weights"]
    assert [p.done for p in weights] == sorted(p.done for p in weights)
    assert weights[-1].done == weights[-1].total
    request = TokenRequest(PROMPT, sampling=GREEDY, max_tokens=8)
    first = [token for step in engine.generate(request) for token in step.ids]
    generation = engine.generate(TokenRequest(PROMPT, sampling=GREEDY, max_tokens=5000))
    steps = iter(generation)
    next(steps)
    generation.cancel()
    assert list(steps)[-1].finish is FinishReason.CANCELLED
    assert [token for step in engine.generate(request) for token in step.ids] == first
    engine.close()
    assert not any(map(is_running, engine.pids))


def test_four_processes_say_what_one_rank_does_and_end_with_one_of_them(
    start: Callable[..., RemoteEngine], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "m", num_attention_heads=4, num_key_value_heads=4)
    write_draft(folder / "dspark", folder, num_attention_heads=4, num_key_value_heads=4)
    engine = start(EngineSpec(str(folder), draft="dspark", ranks=4))
    alone = NativeEngine.load(folder, draft="dspark", threads=1)
    assert engine.info.ranks == 4
    prompt = tuple(range(5, 25))
    plain = ids_of(engine, prompt, 12, False, GREEDY)
    assert ids_of(engine, prompt, 12, True, GREEDY) == plain
    assert_same_up_to_a_near_tie(plain, ids_of(alone, prompt, 12, False, GREEDY), alone, prompt)
    steps = iter(engine.generate(TokenRequest(prompt, sampling=GREEDY, max_tokens=7000)))
    next(steps)
    os.kill(engine.pids[3], signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"^rank 3 \(cpu\) was killed by SIGKILL"):
        list(steps)
    assert wait_gone(engine.pids)


def test_bytes_of_all_ranks_are_one_load_and_other_work_is_told_as_it_is() -> None:
    fd = make_pulse(2)
    crew = Crew([None, None], Pulse(fd, 2))  # their number is enough
    os.close(fd)
    assert crew.whole(0, Progress("loading weights", 3, 10)) == Progress("loading weights", 3, 20)
    assert crew.whole(1, Progress("loading weights", 9, 10)) == Progress("loading weights", 12, 20)
    compiling = Progress("compiling GPU kernels (mla)", 4, 9, "units")
    assert crew.whole(0, compiling) == compiling
    assert [crew.one_more_is_loaded(), crew.one_more_is_loaded()] == [False, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_all_end(start: Callable[..., RemoteEngine], rank: int) -> None:
    engine = start()
    steps = endless(engine)
    os.kill(engine.pids[rank], signal.SIGKILL)
    with pytest.raises(EngineDied, match=rf"^rank {rank} \(cpu\) was killed by SIGKILL"):
        list(steps)
    assert wait_gone(engine.pids)
    with pytest.raises(EngineError):
        engine.generate(TokenRequest(PROMPT))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stuck_rank_is_named_within_five_seconds_and_all_end(start: Callable[..., RemoteEngine], rank: int) -> None:
    engine = start()
    steps = endless(engine)
    os.kill(engine.pids[rank], signal.SIGSTOP)
    with pytest.raises(ExchangeTimeout, match=rf"^rank {rank} .* (within {PATIENCE_S:g}|for {SILENT_S:g}) s"):
        list(steps)
    assert max(PATIENCE_S, SILENT_S) < 5
    assert wait_gone(engine.pids)


def test_a_rank_that_is_stuck_while_nobody_asks_is_noticed_too(start: Callable[..., RemoteEngine]) -> None:
    engine = start()
    assert engine.info
    os.kill(engine.pids[1], signal.SIGSTOP)
    assert wait_gone(engine.pids)
    with pytest.raises(ExchangeTimeout, match=r"rank 1 \(cpu\) has given no sign of life"):
        engine.generate(TokenRequest(PROMPT))


def test_an_idle_rank_that_is_killed_ends_all(start: Callable[..., RemoteEngine]) -> None:
    engine = start()
    assert engine.info
    os.kill(engine.pids[1], signal.SIGTERM)
    assert wait_gone(engine.pids)
    with pytest.raises(EngineDied, match=r"rank 1 \(cpu\) was killed by SIGTERM"):
        engine.generate(TokenRequest(PROMPT))


def test_a_load_that_fails_is_told_once_and_leaves_nothing(start: Callable[..., RemoteEngine]) -> None:
    engine = start(EngineSpec(str(demo_dir()), ranks=4))
    with pytest.raises(UsageError, match="4 GPUs do not share 2 attention heads evenly"):
        _ = engine.info
    assert wait_gone(engine.pids)


def test_ctrl_c_in_the_whole_group_ends_nothing_by_itself(start: Callable[..., RemoteEngine]) -> None:
    engine = start()
    for pid in engine.pids:
        os.kill(pid, signal.SIGINT)
    assert engine.info
    for pid in engine.pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTSTP)
    steps = list(engine.generate(TokenRequest(PROMPT, sampling=GREEDY, max_tokens=5)))
    assert sum(len(step.ids) for step in steps) == 5


@pytest.mark.parametrize(
    ("moment", "number"), [("load", signal.SIGINT), ("load", signal.SIGKILL), ("decode", signal.SIGKILL)]
)
def test_a_front_that_ends_leaves_no_rank(moment: str, number: signal.Signals) -> None:
    lines = [
        "import sys",
        "from ling_local.engine.remote import RemoteEngine",
        "from ling_local.engine.protocol import EngineSpec",
        "from ling_local.types import TokenRequest",
        "engine = RemoteEngine(EngineSpec(sys.argv[1], ranks=2))",
    ]
    told = "print(*engine.pids, flush=True)"
    ask = "for n, step in enumerate(engine.generate(TokenRequest(tuple(range(9)), max_tokens=8000))):"
    lines += [told, "engine.info"] if moment == "load" else [ask, f"    if n == 3: {told}"]
    front = subprocess.Popen([sys.executable, "-c", "\n".join(lines), DEMO.model], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    pids = tuple(map(int, front.stdout.readline().split()))
    assert len(pids) == 2
    assert all(map(is_running, pids))
    front.send_signal(number)
    front.wait(LONG_S)
    assert wait_gone(pids)
    front.stdout.close()
