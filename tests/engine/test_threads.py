"""The thread rule: more threads where they help, one where another program is busy."""

from __future__ import annotations

import torch

from checkpoints import write_checkpoint
from ling_local.engine.native import NativeEngine
from ling_local.engine.threads import ThreadRule
from ling_local.types import TokenRequest


def simulate(rule: ThreadRule, alone: float, together: float, steps: int) -> tuple[float, int]:
    """Seconds for so many steps, and how many ran on more than one thread."""
    seconds, many = 0.0, 0
    for _ in range(steps):
        took = alone if rule.now == 1 else together
        many += rule.now > 1
        rule.note("step", took)
        seconds += took
    return seconds, many


def test_a_quiet_machine_gets_all_its_threads() -> None:
    seconds, many = simulate(ThreadRule(2), 8.0, 6.2, 500)
    assert many >= 495
    assert seconds < 500 * 6.3


def test_a_busy_machine_costs_a_few_steps_only() -> None:
    rule = ThreadRule(2)
    seconds, many = simulate(rule, 11.0, 250.0, 4000)
    assert many <= 2 * 7
    assert seconds < 4000 * 11.0 * 1.1
    assert rule.now == 1


def test_a_machine_that_gets_busy_and_quiet_again_is_noticed() -> None:
    rule = ThreadRule(2)
    simulate(rule, 8.0, 6.2, 300)
    assert rule.now == 2
    simulate(rule, 11.0, 250.0, 100)
    assert rule.now == 1
    simulate(rule, 8.0, 6.2, 2500)
    assert rule.now == 2


def test_one_core_never_tries() -> None:
    assert simulate(ThreadRule(1), 8.0, 1.0, 200)[1] == 0


def test_the_engine_follows_the_rule_and_a_given_number_is_fixed(tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    before = torch.get_num_threads()
    try:
        engine = NativeEngine.load(folder)
        engine.threads = ThreadRule(2)
        made = [t for r in engine.generate(TokenRequest((1, 2, 3), max_tokens=12)) for t in r.ids]
        assert engine.threads.best, "the rule was told of no step"
        fixed = NativeEngine.load(folder, threads=1)
        assert fixed.threads is None
        assert torch.get_num_threads() == 1
        assert [t for r in fixed.generate(TokenRequest((1, 2, 3), max_tokens=12)) for t in r.ids] == made
    finally:
        torch.set_num_threads(before)
