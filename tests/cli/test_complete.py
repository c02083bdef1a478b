"""`ling complete` as a script sees it: bytes in, the continuation out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from program import Program, Result

Write = Callable[..., Path]
RUNE = "🌍"


@pytest.fixture
def complete(ling: Program, write_script: Write) -> Callable[..., Result]:
    """Run `ling complete` against a script of one turn."""

    def run(turn: list, *args: str | Path, stdin: bytes = b"x = 1\n", **more) -> Result:
        fields = {name: more.pop(name) for name in ("context", "block", "eos") if name in more}
        script = write_script(turn, **fields)
        return ling("complete", "--engine", "scripted", "-m", script, *args, stdin=stdin, **more)

    return run


def test_the_continuation_comes_to_the_byte(complete) -> None:
    done = complete(["\n", "    return", " 1\n"], stdin=b"def f():")
    assert (done.code, done.out, done.err) == (0, b"\n    return 1\n", "")


def test_leading_and_trailing_space_is_kept_and_nothing_is_added(complete) -> None:
    assert complete([" = bar", "  "], stdin=b"foo").out == b" = bar  "


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_empty_input_is_refused(complete, data: bytes) -> None:
    done = complete(["x"], stdin=data)
    assert (done.code, done.out) == (2, b"")
    assert done.err.startswith("ling: no text to continue: stdin is empty.")


def test_an_empty_prompt_is_a_value_and_not_stdin(complete) -> None:
    done = complete(["x"], "-p", "", stdin=b"text on stdin")
    assert done.code == 2
    assert "the prompt is empty" in done.err


def test_zero_tokens_means_none(complete) -> None:
    done = complete(["never"], "--max-tokens", "0")
    assert (done.code, done.out) == (0, b"")
    done = complete(["never"], "-n", "0", "--json")
    assert (done.json["text"], done.json["finish"]) == ("", "length")


def test_file_argument_prompt_flag_and_stdin_are_three_ways(complete, tmp_path: Path) -> None:
    file = tmp_path / "half file 張.py"
    file.write_text("y = ")
    assert complete(["2"], file, "--json").json["usage"]["prompt_tokens"] == 4
    assert complete(["2"], "-p", "abc", "--json").json["usage"]["prompt_tokens"] == 3
    assert complete(["2"], "-", "--json", stdin=b"ab").json["usage"]["prompt_tokens"] == 2
    done = complete(["2"], file, "-p", "abc")
    assert (done.code, "both FILE and --prompt" in done.err) == (2, True)


@pytest.mark.parametrize("name", ["no-such.py", "."])
def test_a_file_that_cannot_be_read_is_named(complete, name: str) -> None:
    done = complete(["2"], name)
    assert done.code == 2
    assert done.err.startswith(f"ling: {name} ")


def test_bytes_that_are_no_utf8_are_marked_and_warned_about(complete) -> None:
    done = complete(["ok"], stdin=b"a\xff\xfeb")
    assert (done.code, done.out) == (0, b"ok")
    assert done.err.count("\n") == 1
    assert "byte offset 1" in done.err


def test_a_nul_byte_is_refused_with_its_offset(complete) -> None:
    done = complete(["ok"], stdin=b"a\xff\xfeb\x00c")
    assert (done.code, done.out) == (2, b"")
    assert "NUL byte at offset 4" in done.err


def test_broken_bytes_in_a_prompt_argument_are_replaced_with_a_warning(complete) -> None:
    done = complete(["ok"], "-p", b"a\xff\xfeb", "--json")
    assert (done.code, done.json["text"]) == (0, "ok")
    assert "the prompt is not valid UTF-8 in 2 places, the first at byte offset 1" in done.err


def test_crlf_input_is_continued_in_crlf(complete) -> None:
    lf = complete(["a\n", "b\r\n", "c\n"], "--json", stdin=b"x\ny\n").json
    crlf = complete(["a\n", "b\r\n", "c\n"], "--json", stdin=b"x\r\ny\r\n").json
    assert lf["text"] == "a\nb\r\nc\n"
    assert crlf["text"] == "a\r\nb\r\nc\r\n"
    assert lf["usage"] == crlf["usage"]  # the model saw the same prompt
    assert complete(["a\n"], stdin=b"x\r\ny\r\n").out == b"a\r\n"
    given = complete(["a\n", "b\n"], "-p", "x\r\ny\r\n", "--stop", "\r\n", "--json").json  # as an editor would say it
    assert (given["text"], given["usage"]["prompt_tokens"]) == ("a", lf["usage"]["prompt_tokens"])


def test_a_rune_split_across_tokens_comes_whole(complete) -> None:
    done = complete([{"hex": RUNE.encode().hex(), "cut": 1}])
    assert done.out == RUNE.encode()
    assert complete([{"hex": "f09f"}, {"hex": "8c8d"}], "--json").json["text"] == RUNE


def test_any_split_of_a_text_gives_the_same_bytes(complete) -> None:
    text = "def 名前(x):  # 🌍🏳️‍🌈\n\treturn x\n" * 4
    data = text.encode()
    rng = random.Random(7)
    for _ in range(3):
        cuts = sorted(rng.sample(range(1, len(data)), 40))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        turn = [{"hex": piece.hex()} for piece in pieces]
        assert complete(turn, "--until", "eof").out == data


def test_a_stop_text_ends_before_itself_across_tokens_and_may_be_given_twice(complete) -> None:
    turn = [["ab", "EN"], ["D", "cd"], "more"]
    done = complete(turn, "--stop", "END", "--stop", "zzz", "--json").json
    assert (done["text"], done["finish"], done["usage"]["completion_tokens"]) == ("ab", "stop", 3)
    assert complete(turn, "--stop", "zzz", "--stop", "dmo").out == b"abENDc"


def test_the_open_block_ends_the_continuation_unless_told_otherwise(complete) -> None:
    turn = ["    return 1\n", "\n\n", "print(2)\n"]
    block = complete(turn, stdin=b"def f():\n")
    assert b"return 1" in block.out
    assert b"print" not in block.out
    assert complete(turn, "--until", "eof", stdin=b"def f():\n").out == b"    return 1\n\n\nprint(2)\n"
    assert complete(turn, stdin=b"def f():\n", env={"LING_UNTIL": "eof"}).out.endswith(b"print(2)\n")


def test_max_tokens_ends_with_reason_length(complete) -> None:
    done = complete([["a", "b", "c"], "d"], "-n", "2", "--json").json
    assert (done["text"], done["finish"], done["usage"]["completion_tokens"]) == ("ab", "length", 2)


def test_there_is_a_sane_limit_by_default(complete) -> None:
    done = complete([{"tokens": ["word "], "repeat": 2000}], "--json").json
    assert (done["finish"], done["usage"]["completion_tokens"]) == ("length", 256)


def test_stats_are_one_line_on_stderr(complete) -> None:
    done = complete([["a", "b"], {"tokens": ["c"], "delay_ms": 5}], "--stats", block=1)
    assert done.out == b"abc"
    assert done.err.count("\n") == 1
    assert all(word in done.err for word in ("4 tok", "TTFT", "TPOT", "accept", "ctx"))
    assert complete(["a"], "--no-stats", env={"LING_STATS": "1"}).err == ""


def test_sampling_flags_arrive(complete) -> None:
    flags = ["-t", "0.7", "--top-p", "0.9", "--top-k", "5", "--seed", "42", "-n", "9"]
    assert complete(["a"], *flags, "--json").json["sampling"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 42,
        "max_tokens": 9,
    }
    seeds = {complete(["a"], "--json").json["sampling"]["seed"] for _ in range(2)}
    assert len(seeds) == 2  # without --seed each run draws its own


def test_instruct_asks_in_a_chat(complete) -> None:
    raw = complete(["a"], "--json", stdin=b"text").json["usage"]["prompt_tokens"]
    asked = complete(["a"], "--json", "--instruct", stdin=b"text").json["usage"]["prompt_tokens"]
    assert (raw, asked > 100) == (4, True)
    turn = [["hidden", {"control": "</think>"}], " shown"]
    assert complete([" = 2"], "--instruct", stdin=b"x").out == b" = 2"
    assert b"shown" in complete(turn, "--instruct", stdin=b"x").out


def test_a_prompt_over_the_context_is_refused_with_both_numbers(complete) -> None:
    for size in (65, 256):
        done = complete(["x"], stdin=b"s" * size, context=64)
        assert (done.code, done.out) == (2, b"")
        assert f"{size} tokens" in done.err
        assert "64" in done.err
    assert complete(["x"], stdin=b"s" * 60, context=64).code == 0
    assert complete(["x"], "--ctx", "32", stdin=b"s" * 60, context=64).code == 2


def test_a_failure_after_partial_text_flushes_it_and_fails(complete) -> None:
    done = complete(["partial", {"fail": {"kind": "EngineError", "message": "it broke"}}])
    assert (done.code, done.out) == (1, b"partial")
    assert "it broke" in done.err
    assert "Traceback" not in done.err
    done = complete(["partial", {"fail": "nan"}], "--json")
    assert (done.code, done.json["text"], done.json["error"]["kind"]) == (1, "partial", "NonFinite")
    assert "step 2" in done.json["error"]["message"]


def test_an_engine_process_that_dies_is_a_message(complete) -> None:
    done = complete(["partial", {"kill": "SIGKILL"}])
    assert (done.code, done.out) == (1, b"partial")
    assert "killed by SIGKILL" in done.err
    assert "Traceback" not in done.err


def test_control_characters_go_through_a_pipe_untouched(complete) -> None:
    raw = "\x1b[2J\x1b]0;t\x07\x1bc\x08\ra\u0085".encode()
    assert complete([{"hex": raw.hex()}]).out == raw


@pytest.mark.parametrize("text", ["if 0<foo or foo>10: Vec<int>", "<b>x</b>", "[/INST] [/] [bold list[int] :smile:"])
def test_text_that_looks_like_markup_is_literal(complete, text: str) -> None:
    assert complete([text]).text == text


def test_the_document_names_model_and_version(complete) -> None:
    from ling_local import __version__

    document = complete(["a"], "--json").json
    assert (document["schema"], document["ling"], document["model"]["id"]) == (1, __version__, "script")
    assert document["stats"]["steps"] == 2
    assert document["warnings"] == []
    assert "not valid UTF-8" in complete(["a"], "--json", stdin=b"\xff").json["warnings"][0]


def test_what_libraries_write_in_the_engine_never_reaches_stdout(ling: Program, write_script: Write) -> None:
    script = write_script([{"text": "a", "stderr": "UserWarning: noise"}], stderr="driver banner")
    done = ling("complete", "--engine", "scripted", "-m", script, "--json", stdin=b"x")
    assert (done.json["text"], done.err) == ("a", "")
