"""The pump over scripted tokens: channels and their figures, and every way to end."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from ling_local.engine import script
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.remote import RemoteEngine
from ling_local.errors import EngineBusy, NonFinite
from ling_local.generate import CancelToken, TextModel, generate
from ling_local.types import Channel, Event, FinishReason, Message, Request
from played import CHAT, EOS, Played, Write, opened, play

# --- channels


def test_thinking_and_answer_are_told_apart_and_counted(write_script: Write) -> None:
    path = write_script(["let me ", ["see", {"control": "</think>"}], "\n\n", ["The ", "answer"], EOS])
    played = play(path, CHAT)
    assert played.text(Channel.THINKING) == "let me see"
    assert played.text() == "The answer"
    assert played.finish is not None
    assert (played.finish.stats.tokens, played.finish.stats.thinking_tokens) == (7, 3)
    assert played.reason is FinishReason.EOS


def test_first_token_and_first_answer_are_timed_apart(write_script: Write) -> None:
    """C093: five seconds of thinking, then a second of answer."""
    thought = {"tokens": ["hm"], "delay_ms": 500, "repeat": 10}
    answer = {"tokens": ["yes"], "delay_ms": 500, "repeat": 2}
    path = write_script([thought, {"control": "</think>"}, answer, EOS], clock="virtual", prefill_ms=100)
    stats = play(path, CHAT).finish.stats  # type: ignore[union-attr]
    assert stats.ttft_s == pytest.approx(0.6, abs=0.2)
    assert stats.ttfa_s == pytest.approx(5.6, abs=0.2)
    assert stats.ttft_s is not None
    assert stats.ttfa_s is not None
    assert stats.ttfa_s - stats.ttft_s == pytest.approx(5.0)


def test_without_thinking_both_times_are_the_same(write_script: Write) -> None:
    for prompt in ("go", CHAT):
        stats = play(write_script(["hi", EOS]), prompt, thinking=False).finish.stats  # type: ignore[union-attr]
        assert stats.ttft_s == stats.ttfa_s is not None
        assert stats.thinking_tokens == 0


def test_four_tokens_every_20_ms_are_5_ms_a_token(write_script: Write) -> None:
    """C091, through the whole pump."""
    turn = {"steps": [{"tokens": ["a", "b", "c", "d"], "delay_ms": 20}], "loop": True}
    stats = play(write_script(turn, block=3, clock="virtual"), max_tokens=200).finish.stats  # type: ignore[union-attr]
    assert stats.tpot_s == pytest.approx(0.005)
    assert stats.step_s == pytest.approx(0.020)
    assert stats.accept_length == 4


def test_the_limit_inside_thinking_leaves_the_answer_empty(write_script: Write) -> None:
    """C153."""
    played = play(write_script([{"text": "a long thought", "cut": 2}]), CHAT, max_tokens=4)
    assert (played.text(Channel.THINKING), played.text()) == ("a long t", "")
    assert played.reason is FinishReason.LENGTH
    assert played.finish is not None
    assert played.finish.stats.thinking_tokens == 4
    assert played.finish.stats.ttfa_s is None


CALL = [
    {"control": "<tool_call>"}, "get_", "time\n", {"control": "<arg_key>"}, "zone", {"control": "</arg_key>"},
    "\n", {"control": "<arg_value>"}, "UTC", {"control": "</arg_value>"}, "\n", {"control": "</tool_call>"},
]  # fmt: skip
TOOLS = ('{"name": "get_time"}',)
CALL_TEXT = "<tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call>"


def test_a_tool_call_opened_inside_thinking_is_delivered(write_script: Write) -> None:
    """C157."""
    played = play(write_script(["I need the time", CALL, EOS]), CHAT, tools=TOOLS)
    assert played.text(Channel.THINKING).strip() == "I need the time"
    assert played.text(Channel.TOOL).strip() == CALL_TEXT
    assert played.text() == ""
    assert played.reason is FinishReason.EOS


def test_after_tool_calls_only_more_calls_may_follow(write_script: Write) -> None:
    steps = [{"control": "</think>"}, "Wait.", CALL, "\n", CALL, "\n", "It is noon.", "more", EOS]
    played = play(write_script(steps), CHAT, tools=TOOLS)
    assert played.text().strip() == "Wait."
    assert played.text(Channel.TOOL).count(CALL_TEXT) == 2
    assert "noon" not in "".join(event.text for event in played.tokens)
    assert played.reason is FinishReason.STOP


def test_where_no_tool_was_offered_the_tags_of_a_call_are_text(write_script: Write) -> None:
    """Someone asked how calls are written: the thought stays a thought, and the answer goes on after the example."""
    steps = [{"text": "A <tool_call>."}, {"control": "</think>"}, "So:\n", CALL, "\nThat is all.", EOS]
    played = play(write_script(steps), CHAT)
    assert played.text(Channel.THINKING) == "A <tool_call>."
    assert played.text() == f"So:\n{CALL_TEXT}\nThat is all."
    assert played.reason is FinishReason.EOS


def test_stop_strings_are_for_the_answer(write_script: Write) -> None:
    steps = ["a # thought", {"control": "</think>"}, "an", "swer # more", EOS]
    played = play(write_script(steps), CHAT, stop=("#",))
    assert played.text(Channel.THINKING) == "a # thought"
    assert (played.text(), played.reason) == ("answer ", FinishReason.STOP)


def test_text_that_could_become_a_stop_is_not_lost_before_a_call(write_script: Write) -> None:
    played = play(write_script([{"control": "</think>"}, "one ST", CALL, EOS]), CHAT, stop=("STOP",), tools=TOOLS)
    assert played.text() == "one ST"
    assert CALL_TEXT in played.text(Channel.TOOL)


# --- ends


def test_a_failure_comes_after_what_was_made_before_it(write_script: Write) -> None:
    """C121: the text that waited comes too, then the error; the next request is clean."""
    engine, text_model = opened(write_script(["a", "b ST", {"fail": "nan"}], ["ok"]))
    got: list[Event] = []
    with pytest.raises(NonFinite, match="step 3"):  # noqa: PT012
        for event in generate(engine, text_model, Request("go", stop=("STOP",))):
            got.append(event)
    assert Played(got).text() == "ab ST"
    assert Played(list(generate(engine, text_model, Request("go", max_tokens=1)))).text() == "ok"


def test_ctrl_c_while_the_engine_is_waited_for_comes_after_text_that_waited(
    write_script: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text_model = opened(write_script(["a", "b ST", {"fail": "RuntimeError"}]))
    monkeypatch.setattr(script.Failure, "exception", lambda *_: KeyboardInterrupt())
    got: list[Event] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for event in generate(engine, text_model, Request("go", stop=("STOP",))):
            got.append(event)
    assert Played(got).text() == "ab ST"


@pytest.mark.parametrize("events", [1, 2, 3, 5])
def test_closing_the_iterator_frees_the_engine(write_script: Write, events: int) -> None:
    engine, text_model = opened(write_script(["a", "b", "c", "d", EOS]))
    running = generate(engine, text_model, Request("go"))
    for _ in range(events):
        next(running)
    running.close()  # type: ignore[attr-defined]
    assert Played(list(generate(engine, text_model, Request("go")))).text() == "abcd"


def test_a_second_generation_meanwhile_is_refused(write_script: Write) -> None:
    engine, text_model = opened(write_script(["a", "b", "c", EOS]))
    running = generate(engine, text_model, Request("go"))
    got: list[Event] = [next(running)]
    with pytest.raises(EngineBusy):
        list(generate(engine, text_model, Request("go")))
    got += running
    assert Played(got).text() == "abc"


def test_a_cancel_token_ends_it_with_cancelled_and_keeps_the_text(write_script: Write) -> None:
    spec = EngineSpec(str(write_script({"steps": [{"tokens": ["a"], "delay_ms": 2}], "loop": True})), "scripted")
    engine, token = RemoteEngine(spec), CancelToken()
    try:
        got: list[Event] = []
        for event in generate(engine, TextModel.load(spec), Request("go"), token):
            got.append(event)
            if len(got) == 4:
                threading.Thread(target=token.cancel).start()
        played = Played(got)
    finally:
        engine.close()
    assert played.reason is FinishReason.CANCELLED
    assert played.finish is not None
    assert played.text() == "a" * played.finish.stats.tokens != ""


def test_a_cancel_token_used_before_the_start(write_script: Write) -> None:
    engine, text_model = opened(write_script(["a", "b", EOS]))
    token = CancelToken()
    token.cancel()
    assert Played(list(generate(engine, text_model, Request("go"), token))).reason is FinishReason.CANCELLED
    assert Played(list(generate(engine, text_model, Request("go")))).text() == "ab"


def test_ctrl_c_inside_the_pump_goes_through_and_frees_the_engine(write_script: Write) -> None:
    turn = {"steps": [{"tokens": ["a"], "delay_ms": 20}], "loop": True}
    spec = EngineSpec(str(write_script(turn, ["ok"])), "scripted")
    engine, text_model = RemoteEngine(spec), TextModel.load(spec)
    got: list[Event] = []
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for event in generate(engine, text_model, Request("go")):
                got.append(event)
                if len(got) == 4:
                    signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert set(Played(got).text()) == {"a"}
        assert Played(list(generate(engine, text_model, Request("go", max_tokens=1)))).text() == "ok"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        engine.close()


def test_the_next_turn_of_a_chat_extends_the_state(write_script: Write) -> None:
    """The ids of a turn stand in the next prompt as they are: only what is new is computed."""
    engine, text_model = opened(write_script([["think", "ing", {"control": "</think>"}], "an", "swer", EOS], ["ok"]))
    first = Played(list(generate(engine, text_model, Request(CHAT))))
    assert first.finish is not None
    turn = Message("assistant", first.text(), first.text(Channel.THINKING), ids=first.finish.ids)
    again = Request((*CHAT, turn, Message("user", "more")))
    second = Played(list(generate(engine, text_model, again)))
    assert second.finish is not None
    held = first.finish.stats.prompt_tokens + first.finish.stats.tokens - 1
    assert second.finish.stats.cached_tokens == held


def test_the_cost_of_a_token_does_not_grow(write_script: Write) -> None:
    path = write_script({"steps": [{"text": "word " * 50, "cut": 3, "per_step": 4}], "loop": True}, context=60_000)
    engine, text_model = opened(path)

    def cost(num: int) -> float:
        begun = time.process_time()
        for _ in generate(engine, text_model, Request("go", max_tokens=num, stop=("worse", "wordy"))):
            pass
        return time.process_time() - begun

    cost(500)
    assert cost(40_000) < 20 * 2.5 * cost(2000)
