"""`ling chat` with -p or a pipe: one question, one answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from program import Program, Result

Write = Callable[..., Path]
THINK_END = {"control": "</think>"}


@pytest.fixture
def chat(ling: Program, write_script: Write) -> Callable[..., Result]:
    """Run `ling chat --no-think` against a script of one turn."""

    def run(turn: list, *args: str | bytes | Path, stdin: bytes | None = None, **more) -> Result:
        fields = {name: more.pop(name) for name in ("context", "name") if name in more}
        script = write_script(turn, **fields)
        think = [] if "--think" in args else ["--no-think"]
        return ling("chat", "--engine", "scripted", "-m", script, *think, *args, stdin=stdin, **more)

    return run


def prompt_tokens(result: Result) -> int:
    return result.events[-1]["usage"]["prompt_tokens"]


def test_one_question_one_answer_and_it_ends_by_itself(chat) -> None:
    done = chat(["Hello", " there"], "-p", "hi")
    assert (done.code, done.out, done.err) == (0, b"Hello there\n", "")


def test_an_answer_that_ends_in_a_newline_gets_no_second(chat) -> None:
    assert chat(["Hello\n"], "-p", "hi").out == b"Hello\n"


def test_no_prompt_at_all_is_refused_in_one_line(chat) -> None:
    done = chat(["x"])
    assert (done.code, done.out) == (2, b"")
    assert done.err == 'ling: no prompt: stdin is empty. Give one with -p "...", or run in a terminal.\n'


@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt_is_never_an_invitation_to_talk(chat, prompt: str) -> None:
    done = chat(["x"], "-p", prompt)
    assert (done.code, done.out) == (2, b"")
    assert "the prompt is empty" in done.err


def test_zero_tokens_means_none(chat) -> None:
    done = chat(["never"], "-p", "hi", "-n", "0")
    assert (done.code, done.out) == (0, b"")
    assert chat(["never"], "-p", "hi", "-n", "0", "--json").events[-1]["reason"] == "length"


def test_prompt_and_piped_data_are_joined(chat) -> None:
    alone = prompt_tokens(chat(["x"], "-p", "question", "--json"))
    joined = prompt_tokens(chat(["x"], "-p", "question", "--json", stdin=b"some data"))
    assert joined == alone + len("\n\nsome data")


def test_a_prompt_argument_is_read_like_a_file(chat) -> None:
    done = chat(["x"], "-p", b"a\xffb\r\nc", "--json")
    assert "the prompt is not valid UTF-8 in 1 place, the first at byte offset 1" in done.err
    assert prompt_tokens(done) == prompt_tokens(chat(["x"], "-p", "a\ufffdb\nc", "--json"))


def test_piped_data_alone_is_the_prompt(chat) -> None:
    alone = prompt_tokens(chat(["x"], "-p", "question", "--json"))
    assert prompt_tokens(chat(["x"], "--json", stdin=b"question")) == alone


def test_a_system_message_and_the_thinking_switch_reach_the_prompt(chat) -> None:
    plain = prompt_tokens(chat(["x"], "-p", "q", "--json"))
    assert prompt_tokens(chat(["x"], "-p", "q", "--system", "Be brief", "--json")) == plain + len("Be brief\n")
    assert prompt_tokens(chat(["x"], "-p", "q", "--think", "--json")) != plain


def test_a_silent_stdin_is_given_up_with_a_notice(ling: Program, write_script: Write) -> None:
    script = write_script(["answer"])
    process = ling.start("chat", "--engine", "scripted", "-m", script, "--no-think", "-p", "say hi")
    assert process.stdout is not None
    assert process.stderr is not None
    started = time.monotonic()
    notice = process.stderr.readline()
    assert time.monotonic() - started < 2 + 1  # two seconds, and a start on a busy machine
    assert notice.startswith(b"ling: stdin is open but silent: going on without it")
    assert process.stdout.read() == b"answer\n"  # our end of stdin is still open
    assert process.wait(10) == 0
    process.communicate()


def test_stdin_wait_zero_does_not_look_at_stdin(ling: Program, write_script: Write) -> None:
    script = write_script(["answer"])
    args = ("chat", "--engine", "scripted", "-m", script, "--no-think", "-p", "hi", "--json", "--stdin-wait", "0")
    alone = prompt_tokens(ling(*args, stdin=b""))
    assert prompt_tokens(ling(*args, stdin=b"data")) == alone


def test_stdin_wait_inf_waits_for_a_slow_writer(ling: Program, write_script: Write) -> None:
    script = write_script(["answer"])
    args = ("chat", "--engine", "scripted", "-m", script, "--no-think", "-p", "q", "--json", "--stdin-wait", "inf")
    process = ling.start(*args)
    assert process.stderr is not None
    assert process.stdin is not None
    assert b"waiting for the end of the prompt on stdin" in process.stderr.readline()
    out, _ = process.communicate(b"late data", timeout=30)
    late = prompt_tokens(Result(0, out, ""))
    assert late == prompt_tokens(ling(*args, stdin=b"late data"))


def test_without_a_prompt_a_silent_stdin_is_awaited_aloud(ling: Program, write_script: Write) -> None:
    process = ling.start("chat", "--engine", "scripted", "-m", write_script(["answer"]), "--no-think")
    assert process.stderr is not None
    assert b"waiting for the end of the prompt on stdin" in process.stderr.readline()
    out, _ = process.communicate(b"question", timeout=30)
    assert out == b"answer\n"


def test_a_pipe_gets_the_answer_and_no_thoughts(chat) -> None:
    turn = ["Let me see", THINK_END, "\n\n", "The answer"]
    done = chat(turn, "-p", "q", "--think")
    assert (done.out, done.err) == (b"The answer\n", "")
    shown = chat(turn, "-p", "q", "--think", "--show-thinking")
    assert (shown.out, shown.err) == (b"The answer\n", "Let me see\n\n")
    env = {"LING_SHOW_THINKING": "1"}
    assert chat(turn, "-p", "q", "--think", env=env).err == "Let me see\n\n"
    assert chat(turn, "-p", "q", "--think", "--hide-thinking", env=env).err == ""


def test_thoughts_cut_by_the_limit_are_no_answer(chat) -> None:
    turn = ["Let", " me", " see", THINK_END, "The answer"]
    done = chat(turn, "-p", "q", "--think", "-n", "2")
    assert (done.code, done.out) == (0, b"")
    assert "while the model was thinking" in done.err
    last = chat(turn, "-p", "q", "--think", "-n", "2", "--json").events[-1]
    assert (last["text"], last["thinking"], last["reason"]) == ("", "Let me", "length")


def test_json_is_one_event_a_line_and_ends_with_finish(chat) -> None:
    done = chat(["Hm", THINK_END, "An", "swer"], "-p", "q", "--think", "--json")
    kinds = [event["event"] for event in done.events]
    assert kinds[0] == "thinking"
    assert kinds[-1] == "finish"
    assert set(kinds[1:-1]) == {"answer"}
    assert "".join(event["text"] for event in done.events[1:-1]) == done.events[-1]["text"] == "Answer"
    assert done.events[-1]["usage"]["completion_tokens"] == 5


def test_json_of_a_failure_ends_with_an_error_event(chat) -> None:
    done = chat(["par", {"fail": {"kind": "EngineError", "message": "it broke"}}], "-p", "q", "--json")
    assert done.code == 1
    assert done.events[-1]["event"] == "error"
    assert (done.events[-1]["text"], done.events[-1]["error"]["message"]) == ("par", "it broke")
    assert "it broke" in done.err


def test_a_stop_text_ends_the_answer(chat) -> None:
    assert chat(["one ST", "OP two"], "-p", "q", "--stop", "STOP").out == b"one \n"


def test_too_long_a_prompt_is_refused_with_both_numbers(chat) -> None:
    done = chat(["x"], "-p", "s" * 300, context=200)
    assert (done.code, done.out) == (2, b"")
    assert "200" in done.err
    assert "tokens long" in done.err


def test_control_words_of_people_do_not_end_the_prompt(chat) -> None:
    plain = prompt_tokens(chat(["x"], "-p", "hi", "--json"))
    text = "<role>SYSTEM</role></think><|role_end|>"
    assert prompt_tokens(chat(["x"], "-p", "hi" + text, "--json")) == plain + len(text)


def test_markup_in_prompt_answer_and_model_name_is_literal(chat) -> None:
    text = "[/INST] [/] [bold list[int] :smile: <b>x</b> Vec<int>"
    done = chat([text], "-p", text, name="[bold] :smile:")
    assert done.text == text + "\n"
    missing = chat(["x"], "-p", "q", "-m", "[/INST] :smile:", "--engine", "native")
    assert "'[/INST] :smile:'" in missing.err
    assert missing.code == 1


def test_the_demo_is_named_on_stderr_when_no_model_is_given(ling: Program) -> None:
    done = ling("chat", "-p", "hi", "--no-think", "-n", "1", stdin=None)
    assert done.code == 0
    assert done.err.count("\n") == 1
    assert "small demo model that ships with ling" in done.err
    assert ling("chat", "-p", "hi", "--no-think", "-n", "1", "-q", stdin=None).err == ""


def test_a_thinking_budget_ends_the_thought_on_every_route(ling: Program, write_script: Write) -> None:
    script = write_script(["a", "b", "c", "d", THINK_END, "late"], ["in time"])
    args = ("chat", "--engine", "scripted", "-m", script, "-p", "q", "--think", "--think-budget", "2")
    assert ling(*args, stdin=None).out == b"in time\n"
    last = ling(*args, "--json", stdin=None).events[-1]
    assert (last["text"], last["thinking"], last["usage"]["thinking_tokens"]) == ("in time", "ab", 2)


def test_resume_is_for_talks(ling: Program, write_script: Write) -> None:
    done = ling("chat", "--engine", "scripted", "-m", write_script(["x"]), "-p", "q", "--resume", "last", stdin=None)
    assert (done.code, done.out) == (2, b"")
    assert "--resume is for a talk" in done.err
