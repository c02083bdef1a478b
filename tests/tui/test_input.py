"""The prompt, driven by piped keys."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output

from ling_local.tui.history import LineHistory
from ling_local.tui.input import CommandCompleter, Prompt

PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"
Type = Callable[..., str]


@pytest.fixture
def pipe() -> Iterator[PipeInput]:
    with create_pipe_input() as source, create_app_session(input=source, output=DummyOutput()):
        yield source


@pytest.fixture
def type_in(pipe: PipeInput) -> Type:
    """Type keys, and give what the prompt returns."""

    def run(keys: str, history: LineHistory | None = None, default: str = "") -> str:
        pipe.send_text(keys)
        prompt = Prompt(pipe, DummyOutput(), history or LineHistory(None), toolbar=lambda: "")
        return prompt.read(default)

    return run


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("hello\r", "hello"),
        ("one\ntwo\r", "one\ntwo"),  # Ctrl-J
        ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        ('"""\rone\r\rtwo"""\r', '"""\none\n\ntwo"""'),
        ('say """hi\r', 'say """hi'),  # a block opens at the beginning only
        ("哈哈哈\x7f\x7f\x7fx\r", "x"),  # C011: a wide character is one character
        ("abc\x17\x17new\r", "new"),
        ("👩‍👩‍👧 ok\r", "👩‍👩‍👧 ok"),
        ("\r", ""),
    ],
)
def test_keys_make_a_text(type_in: Type, keys: str, text: str) -> None:
    assert type_in(keys) == text


def test_a_paste_is_one_editable_block(type_in: Type) -> None:
    """C041"""
    lines = "def f():\r\n    x = 1\r    return x"
    assert type_in(f"{PASTE}{lines}{PASTE_END}  # end\r") == "def f():\n    x = 1\n    return x  # end"


def test_a_low_window_shows_what_is_typed() -> None:
    drawn = io.StringIO()
    output = Vt100_Output(drawn, lambda: Size(4, 40), term="xterm")
    with create_pipe_input() as source, create_app_session(input=source, output=output):

        def type_slowly() -> None:
            source.send_text("/se")
            end = time.monotonic() + 10
            while not re.search("/s|too small", drawn.getvalue()) and time.monotonic() < end:
                time.sleep(0.02)
            source.send_text("\r")

        typist = threading.Thread(target=type_slowly)
        typist.start()
        assert Prompt(source, output, LineHistory(None), toolbar=lambda: "below").read() == "/se"
        typist.join()
    assert "too small" not in drawn.getvalue()


def test_a_tab_that_is_pasted_stays_one_and_is_shown_as_blanks() -> None:
    drawn = io.StringIO()
    output = Vt100_Output(drawn, lambda: Size(24, 80), term="xterm")
    with create_pipe_input() as source, create_app_session(input=source, output=output):
        source.send_text(f"{PASTE}if x {{\n\ty();{PASTE_END}\r")
        assert Prompt(source, output, LineHistory(None), toolbar=lambda: "").read() == "if x {\n\ty();"
    assert re.search(r" {4}(\x1b\[[0-9;]*m)*y\(\);", drawn.getvalue())
    assert "^I" not in drawn.getvalue()


def test_a_paste_is_no_command_while_it_is_pasted(type_in: Type) -> None:
    assert type_in(f"{PASTE}/exit\ntext{PASTE_END}\r") == "/exit\ntext"


@pytest.mark.parametrize("size", [200 * 1024, 1 << 20])
def test_a_huge_paste_takes_less_than_two_seconds(size: int) -> None:
    """C043, on a real renderer."""
    output = Vt100_Output(io.StringIO(), lambda: Size(24, 80), term="xterm")
    with create_pipe_input() as source, create_app_session(input=source, output=output):
        prompt = Prompt(source, output, LineHistory(None), toolbar=lambda: "")
        keys = f"{PASTE}{'x' * size}{PASTE_END}y\r"
        threading.Thread(target=source.send_text, args=(keys,)).start()
        begun, cpu = time.monotonic(), time.process_time()
        assert prompt.read() == "x" * size + "y"
        spent = min(time.monotonic() - begun, 2 * (time.process_time() - cpu))
    assert spent < max(2, 150 * _two_million_turns())  # two seconds, and more where Python itself is slow or busy


def _two_million_turns() -> float:
    """CPU seconds of a bare loop: a tenth on a machine of today that has nothing else to do."""
    begun = time.process_time()
    for _ in range(2_000_000):
        pass
    return time.process_time() - begun


def test_ctrl_c_clears_the_line_and_on_an_empty_one_leaves_the_prompt(type_in: Type) -> None:
    assert type_in("half a line\x03whole\r") == "whole"
    with pytest.raises(KeyboardInterrupt):
        type_in("half\x03\x03")


def test_ctrl_d_leaves_on_an_empty_line_only(type_in: Type) -> None:
    assert type_in("ab\x04c\r") == "abc"
    assert type_in("abc\x1b[D\x04x\r") == "abx"  # elsewhere it deletes
    with pytest.raises(EOFError):
        type_in("\x04")


def test_what_stands_in_the_line_can_be_edited(type_in: Type) -> None:
    assert type_in("!\r", default="hello") == "hello!"


def test_history_is_recalled_and_searched(type_in: Type, tmp_path: Path) -> None:
    file = tmp_path / "history"
    for line in ("first question", "second thing", "third\nof two lines"):
        type_in(f"{PASTE}{line}{PASTE_END}\r", LineHistory(file))
    assert type_in("\x1b[A\r", LineHistory(file)) == "third\nof two lines"
    assert type_in("\x12fir\r\r", LineHistory(file)) == "first question"  # Ctrl-R
    assert type_in("\x12FIR\x03kept\r", LineHistory(file)) == "kept"


@pytest.mark.parametrize(("typed", "text"), [("/ex", "/exit"), ("/set temp", "/set temperature"), ("/q", "/q")])
def test_tab_completes_commands_and_settings(pipe: PipeInput, typed: str, text: str) -> None:
    prompt = Prompt(pipe, DummyOutput(), LineHistory(None), toolbar=lambda: "")

    def keys() -> None:
        for key, then in ((typed, typed), ("\t", text)):
            pipe.send_text(key)
            end = time.monotonic() + 10
            while prompt._session.default_buffer.text != then and time.monotonic() < end:
                time.sleep(0.02)
        pipe.send_text("\r")

    typist = threading.Thread(target=keys)
    typist.start()
    assert prompt.read() == text
    typist.join()


def complete(text: str, **words: tuple[str, ...]) -> list[str]:
    completer = CommandCompleter({name: lambda known=known: known for name, known in words.items()})
    return [found.text for found in completer.get_completions(Document(text), None)]  # type: ignore[arg-type]


def test_completion_offers_what_fits() -> None:
    assert complete("/s") == ["set", "show", "system", "stats", "save", "sessions"]
    assert complete("/think s") == ["show"]
    assert complete("/model li", model=("ling-demo", "other")) == ["ling-demo"]
    assert complete("/q") == []
    for text in ("text", "//s", "/set temperature 1 x", "/nosuch x", "/s\n"):
        assert complete(text) == []


def test_completion_of_files(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    assert complete(f"/read {tmp_path}/no") == ["tes.md"]


def test_the_editor_edits_the_line(type_in: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf " and more\\n" >> "$1"\nls -l "$1" > "$0.seen"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    with create_pipe_input() as source, create_app_session(input=source, output=DummyOutput()):
        prompt = Prompt(source, DummyOutput(), LineHistory(None), toolbar=lambda: "")
        seen = tmp_path / "editor.sh.seen"

        def send_after() -> None:
            end = time.monotonic() + 10
            while not seen.exists() and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.3)
            source.send_text("!\r")

        source.send_text("some text\x07")  # Ctrl-G
        threading.Thread(target=send_after).start()
        assert prompt.read() == "some text and more!"
        assert seen.read_text().startswith("-rw-------")


@pytest.mark.parametrize("late", [True, False])
def test_a_failure_ends_the_prompt(pipe: PipeInput, late: bool) -> None:
    """In the middle of it, from another thread, or before it has begun."""
    failure = RuntimeError("the load failed")
    fails = threading.Event()
    prompt = Prompt(
        pipe, DummyOutput(), LineHistory(None), toolbar=lambda: "", failed=lambda: failure if fails.is_set() else None
    )

    def fail() -> None:
        time.sleep(0.3)
        fails.set()
        prompt.refresh()

    if late:
        threading.Thread(target=fail, daemon=True).start()
    else:
        fails.set()
    with pytest.raises(RuntimeError, match="the load failed"):
        prompt.read()


def test_a_refresh_from_another_thread_draws_in_the_thread_that_reads(
    pipe: PipeInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`invalidate` raises in another thread when the read ends halfway through it."""
    prompt = Prompt(pipe, DummyOutput(), LineHistory(None), toolbar=lambda: "")
    monkeypatch.setattr(prompt._session.app, "invalidate", lambda: drawn.append(threading.current_thread()))
    drawn: list[threading.Thread] = []
    prompt.refresh()  # nobody reads yet
    loops = []

    def refresh() -> None:
        end = time.monotonic() + 10
        while not drawn and time.monotonic() < end:
            loops.append(prompt._session.app.loop)
            prompt.refresh()
            time.sleep(0.02)
        pipe.send_text("x\r")

    other = threading.Thread(target=refresh)
    other.start()
    assert prompt.read() == "x"
    other.join()
    assert set(drawn) == {threading.current_thread()}
    prompt._session.app.loop = loops[-1]  # as a thread may still see it
    assert loops[-1].is_closed()
    prompt.refresh()


# --- the history file


def test_the_history_file_is_private_from_the_first_byte_and_tightened(tmp_path: Path) -> None:
    """C139"""
    file = tmp_path / "state" / "history"
    LineHistory(file).store_string("secret")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.chmod(0o644)
    LineHistory(file).store_string("more")
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_broken_off_costs_itself_only(tmp_path: Path) -> None:
    file = tmp_path / "history"
    history = LineHistory(file)
    history.store_string("one")
    with file.open("ab") as target:
        target.write(b'"tw')
    history.store_string("three")
    file.write_bytes(file.read_bytes() + b"\xff\xfe\n")
    assert list(LineHistory(file).load_history_strings()) == ["three", "one"]


def test_blank_and_giant_lines_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "history"
    history = LineHistory(file)
    history.store_string("  ")
    history.store_string("x" * 200_000)
    assert not file.exists()


def test_two_chats_share_the_file(tmp_path: Path) -> None:
    file = tmp_path / "history"
    one, two = LineHistory(file), LineHistory(file)
    for number in range(50):
        (one if number % 2 else two).store_string(f"line {number}")
    assert list(LineHistory(file).load_history_strings()) == [f"line {n}" for n in reversed(range(50))]


def test_a_folder_in_the_place_of_the_file_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    history = LineHistory(tmp_path / "history")
    assert list(history.load_history_strings()) == []
    history.store_string("x")
    assert "history" in history.problem


def test_without_a_file_history_lasts_as_long_as_the_chat(type_in: Type, tmp_path: Path) -> None:
    history = LineHistory(None)
    type_in("one\r", history)
    assert type_in("\x1b[A\r", history) == "one"
    assert list(tmp_path.iterdir()) == []
