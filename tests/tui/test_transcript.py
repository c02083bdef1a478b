"""A talk as a file, and what goes to the clipboard."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path

import pytest
from prompt_toolkit.data_structures import Size
from prompt_toolkit.output.vt100 import Vt100_Output

from ling_local.errors import LingError, UsageError
from ling_local.tui import transcript
from ling_local.tui.blocks import code_blocks
from ling_local.tui.clipboard import copy
from ling_local.types import Message, ToolCall

TALK = (
    Message("user", "q [bold]"),
    Message("assistant", "a <b>", "hm", (ToolCall("look", '{"x": 1}'),)),
    Message("user", "哈"),
    Message("assistant", "\nmore\n"),
)


def test_json_goes_round(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    transcript.write(file, "Be brief.", TALK)
    assert transcript.read_json(file) == ("Be brief.", TALK)
    transcript.write(tmp_path / "bare.json", None, TALK[:2])
    assert transcript.read_json(tmp_path / "bare.json") == (None, TALK[:2])


def test_an_object_with_messages_is_taken_too(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": json.loads(transcript.as_json(None, TALK))}))
    assert transcript.read_json(file)[1] == TALK


def test_markdown_is_to_be_read() -> None:
    text = transcript.as_markdown("Be brief.", TALK)
    assert text.startswith("## System\n\nBe brief.\n\n## You\n\nq [bold]\n\n## Ling\n\na <b>\n\n    look(")
    assert "hm" not in text


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    os.umask(0o022)
    file = tmp_path / "talk.md"
    transcript.write(file, None, TALK)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LingError, match="is there already"):
        transcript.write(file, None, TALK)
    with pytest.raises(LingError, match="no folder"):
        transcript.write(tmp_path / "no" / "x.md", None, TALK)


@pytest.mark.parametrize(
    "text",
    ["", "{", "3", '{"messages": 3}', "[1]", '[{"role": "user", "content": "x"}]', '[{"role": "boss", "content": "x"}]',
     '[{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]', "[" * 100_000],
)  # fmt: skip
def test_a_file_that_is_no_talk_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(UsageError):
        transcript.read_json(file)


def test_text_files_are_read_as_the_model_gets_them(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert transcript.read_file(file).text == "one\ntwo\n"
    file.write_bytes(b"a\x00b")
    os.mkfifo(tmp_path / "pipe")
    for bad in (file, tmp_path, tmp_path / "nosuch", tmp_path / "pipe"):
        with pytest.raises(LingError):
            transcript.read_file(bad)
    file.write_bytes(b"x" * ((8 << 20) + 1))
    with pytest.raises(LingError, match="8 MiB"):
        transcript.read_file(file)


def test_names_of_files() -> None:
    assert transcript.named("~/a b.md") == Path.home() / "a b.md"
    assert transcript.named("~nobody-of-that-name/a.md") == Path("~nobody-of-that-name/a.md")
    with pytest.raises(UsageError, match="NUL"):
        transcript.named("a\0b")


def test_code_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n\ny\n```\nb\n~~~\nz\n~~~\n````md\n```\ninner\n```\n````\n"
    listed = "1. In a list:\n\n   ```\n   if x:\n       y\n   ```\n\n```\nopen"
    assert code_blocks(text) == ["x = 1\n\ny\n", "z\n", "```\ninner\n```\n"]
    assert code_blocks(listed) == ["if x:\n    y\n", "open"]
    assert code_blocks("no code") == []


def test_the_terminal_is_asked_where_no_program_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    written = io.StringIO()
    output = Vt100_Output(written, lambda: Size(24, 80))
    assert copy("hé\x1b", output)
    assert written.getvalue() == f"\x1b]52;c;{base64.b64encode('hé'.encode() + bytes([27])).decode()}\x07"
    assert not copy("x" * 200_000, output)


def test_a_program_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "wl-copy"
    program.write_text(f"#!/bin/sh\n/bin/cat > {tmp_path}/got\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    written = io.StringIO()
    assert copy("text", Vt100_Output(written, lambda: Size(24, 80)))
    assert (tmp_path / "got").read_text() == "text"
    assert written.getvalue() == ""
