"""A talk on the chat screen: turns, figures, thinking, and what is typed when."""

from __future__ import annotations

import termios
import time

from screen import THINK_END, Start, records

# --- the talk


def test_two_turns_with_figures_and_ctrl_d(talk: Start) -> None:
    seen = talk(["first ", "answer"], ["second ", "answer"]).ready()
    assert seen.text.startswith("ling ")
    assert "first answer" in seen.ask("one")
    shown = seen.ask("two")
    assert "second answer" in shown
    assert "TPOT" in shown.splitlines()[-1]
    assert seen.leave() == 0
    assert "ling chat --resume" in seen.text


def test_the_prompt_is_there_before_the_model_and_an_early_message_waits(talk: Start) -> None:
    begun = time.monotonic()
    seen = talk(["ANSWER"], load={"delay_ms": 6000}).ready()
    assert time.monotonic() - begun < 5
    seen.until("script 10 %")
    seen.send("early\r").until("script 90 %")
    assert "ANSWER" not in seen.text
    seen.until("ANSWER")
    seen.ready()
    assert "script 90" not in seen.text


def test_what_a_load_has_to_say_stays_on_the_screen(talk: Start) -> None:
    seen = talk(["ANSWER"], args=("--no-think", "--block", "3"), columns=100)
    for line in ("q", "q2"):
        assert "ANSWER" in seen.ask(line)
    assert seen.text.count("--block 3 has no effect") == 1  # above the first question or below


def test_live_figures_move_while_tokens_come_and_one_quiet_line_stays(talk: Start) -> None:
    turn = [{"tokens": ["w ", "x ", "y "], "repeat": 60, "delay_ms": 50, "drafted": 4}]
    seen = talk(turn, block=4).ready()
    seen.send("go\r")
    for part in ("TPOT", "mean", "tok/s", "step 50", "accept 3.0", "TTFT", "ctx", "% kept"):
        seen.until(lambda s, part=part: any(part in line for line in s.visible[-3:]))
    counts = set()
    seen.until(lambda s: counts.update(line for line in s.visible if "TTFT" in line) or len(counts) > 5)
    assert any(glyph in seen.text for glyph in "▂▃▄▅▆▇")  # three of five tokens a step, as a strip
    seen.ready()
    assert seen.text.count("TPOT") == 1
    assert "TPOT 16.6 ms" in seen.text or "TPOT 16.7 ms" in seen.text


def test_thinking_is_folded_and_unfolded(talk: Start) -> None:
    turn = ["Let me ", "see ", "now", THINK_END, "The answer"]
    seen = talk(turn, args=())
    shown = seen.ask("q")
    assert "▸ thought for" in shown
    assert "4 tokens" in shown
    assert "Let me see" not in shown
    seen.ask("/think show")
    assert "Let me see now" in seen.ask("q2")
    seen.ask("/think hide")
    assert "Let me" not in seen.ask("q3")


def test_a_thinking_budget_by_flag_and_by_command(talk: Start) -> None:
    thought = ["a", "b", "c", "d", "e", "f", THINK_END, "late"]
    seen = talk(thought, ["in time"], thought, ["in time"], args=("--think-budget", "3"))
    shown = seen.ask("q")
    assert "3 tokens" in shown
    assert "in time" in shown
    assert "may think for 2 tokens" in seen.ask("/think 2")
    assert "2 tokens" in seen.ask("q2")


def test_the_tags_of_a_tool_call_are_text_like_any_other(talk: Start) -> None:
    call = [{"control": "<tool_call>"}, "look_up\n", {"control": "</tool_call>"}, " is how it is written"]
    shown = talk(call).ask("q")
    assert "<tool_call>look_up" in shown
    assert "</tool_call> is how it is written" in shown


def test_a_second_turn_reads_only_what_is_new(talk: Start) -> None:
    seen = talk(["x" * 200], ["y"], columns=200)
    seen.ask("q" * 300)
    shown = seen.ask("more")
    new, cached = shown.split("prompt ")[1].split(" · ")[0].replace(" ──", "").split(" + ")
    assert int(new.split()[0]) < 100
    assert int(cached.split()[0]) > 300


# --- keys


def test_a_bracketed_paste_is_one_message(talk: Start) -> None:
    seen = talk(["FIRST"], ["SECOND"])
    seen.ready().send("\x1b[200~def f():\r    return 1\rf()\x1b[201~")
    seen.until("f()")
    assert "FIRST" not in seen.text
    seen.send("\r").until("FIRST").ready()
    assert "SECOND" not in seen.text
    kept = records(seen)
    assert [r["text"] for r in kept if r["kind"] == "user"] == ["def f():\n    return 1\nf()"]


def test_keys_typed_during_an_answer_are_kept_for_the_prompt(talk: Start) -> None:
    seen = talk([{"tokens": ["word "], "repeat": 30, "delay_ms": 50}], ["AGAIN"])
    seen.ready().send("go\r").until("word word").send("\x1b[200~next\rquest\x1b[201~x\x7fion")
    seen.until("› next question")  # shown under the figures while the answer goes on
    seen.until(lambda s: "› next" in s.visible and "  question" in s.visible)
    seen.send("?\r").until("AGAIN")
    texts = records(seen)
    assert [r["text"] for r in texts if r["kind"] == "user"] == ["go", "next\nquestion?"]
    answers = "".join(r["text"] for r in texts if r["kind"] == "part")
    assert "quest" not in answers


def test_a_whole_line_typed_ahead_is_sent_by_itself(talk: Start) -> None:
    seen = talk([{"tokens": ["word "], "repeat": 30, "delay_ms": 30}], ["AGAIN"])
    seen.ready().send("go\r").until("word word").send("second\r")
    seen.until("AGAIN").ready()
    assert "› second" in seen.text


def test_what_is_typed_before_the_program_is_up_is_not_lost(talk: Start) -> None:
    seen = talk(["answer"], ["AGAIN"])
    seen.send("early bird\r")
    seen.until("answer").ready()
    assert "› early bird" in seen.text


def test_a_wide_character_goes_whole_where_the_terminal_erases_bytes(talk: Start) -> None:
    """C017"""
    seen = talk(["ANSWER"])
    attributes = termios.tcgetattr(seen.child.child_fd)
    attributes[0] &= ~0o40000  # stty -iutf8
    termios.tcsetattr(seen.child.child_fd, termios.TCSANOW, attributes)
    seen.ready().send("能\x7fx能").until(lambda s: s.prompt == "x能")
    seen.send("\r").until("ANSWER").ready()
    assert [r["text"] for r in records(seen) if r["kind"] == "user"] == ["x能"]


def test_empty_lines_send_nothing(talk: Start) -> None:
    seen = talk(["ANSWER"])
    seen.ready()
    for keys in ("\r", "\r", "   \r", "\r"):
        seen.send(keys).read(0.2)
    seen.ready()
    assert "ANSWER" not in seen.text


def test_history_comes_back_in_the_next_chat(talk: Start) -> None:
    seen = talk(["a"])
    seen.ask("the first question")
    assert seen.leave() == 0
    again = talk(["b"]).ready()
    again.send("\x1b[A").until("› the first question")
    again.send("\x03").ready()
    again.send("\x12first").until("the first question")


def test_a_question_higher_than_the_screen_stays_whole(talk: Start) -> None:
    lines = [f"line {number} of it" for number in range(1, 20)]
    for rows in (8, 40):
        seen = talk(["ANSWER"], rows=rows).ready()
        seen.send("\x1b[200~" + "\r".join(lines) + "\x1b[201~")
        seen.until(lines[-1]).send("\r")
        seen.until("ANSWER").ready()
        found = [line.strip(" ›") for line in seen.text.splitlines() if " of it" in line]
        assert found == lines
