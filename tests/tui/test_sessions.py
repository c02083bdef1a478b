"""Talks on disk: what is written, what a kill leaves, who may write."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ling_local import sessions
from ling_local.errors import LingError, UsageError
from ling_local.sessions import SessionFile, read
from ling_local.tui.keeper import Keeper
from ling_local.types import Channel, Message, TokenEvent, ToolCall


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ling" / "sessions"


def turn(session: SessionFile, question: str, answer: str, ids: tuple[int, ...] = (1, 2)) -> None:
    session.asked(question)
    session.part(Channel.ANSWER, answer, ids)
    session.done("eos")


def test_a_talk_is_read_as_it_was(home: Path) -> None:
    session = SessionFile.create("some/model")
    session.system("Be brief.")
    session.asked("q\n\u2028 [bold] 😀 哈")
    session.part(Channel.THINKING, "hm", (7,))
    session.part(Channel.ANSWER, "an", (8, 9))
    session.part(Channel.ANSWER, "swer", ())
    session.done("eos", [ToolCall("f", "{}")])
    session.close()
    saved = read(session.file)
    assert saved.system == "Be brief."
    assert saved.model == "some/model"
    assert saved.lost == 0
    question, answer = saved.messages
    assert question == Message("user", "q\n\u2028 [bold] 😀 哈")
    assert answer == Message("assistant", "answer", "hm", (ToolCall("f", "{}"),), (7, 8, 9))


def test_undo_failed_and_adopted_turns() -> None:
    session = SessionFile.create("m")
    turn(session, "one", "1")
    turn(session, "two", "2")
    session.undo()
    session.asked("three")
    session.part(Channel.ANSWER, "broken", (5,))
    session.failed()
    session.adopt([Message("user", "old"), Message("assistant", "answer", "hm")])
    session.undo()
    turn(session, "four", "4")
    assert [m.content for m in read(session.file).messages] == ["one", "1", "four", "4"]


def test_an_answer_without_an_end_is_kept_as_far_as_it_came() -> None:
    session = SessionFile.create("m")
    turn(session, "one", "1")
    session.asked("two")
    session.part(Channel.ANSWER, "half", (3,))
    assert [m.content for m in read(session.file).messages] == ["one", "1", "two", "half"]
    lonely = SessionFile.create("m")
    lonely.asked("nobody answered")
    saved = read(lonely.file)
    assert (saved.messages, saved.unasked, saved.title) == ((), "nobody answered", "nobody answered")


def test_files_are_private_from_the_first_byte(home: Path) -> None:
    os.umask(0o022)
    session = SessionFile.create("m")
    assert session.file.stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    session.close()
    session.file.chmod(0o644)
    SessionFile.resume(session.file)[0].close()
    assert session.file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "broken",
    [b'{"kind":"us', b'{"kind":"user","text":"x"', b"\xff\xfe\x00", b'{"kind":"part"}', b'{"kind":"open","pid":1e999}'],
)
def test_what_was_broken_off_costs_itself_only(broken: bytes) -> None:
    session = SessionFile.create("m")
    turn(session, "one", "1")
    session.close()
    with session.file.open("ab") as target:
        target.write(broken)
    again, saved = SessionFile.resume(session.file)
    assert [m.content for m in saved.messages] == ["one", "1"]
    assert saved.lost == 1
    turn(again, "two", "2")
    again.close()
    saved = read(session.file)
    assert [m.content for m in saved.messages] == ["one", "1", "two", "2"]
    assert saved.lost == 1


def test_any_prefix_of_a_file_can_be_read() -> None:
    session = SessionFile.create("m")
    for number in range(5):
        turn(session, f"question {number} 哈", f"answer {number}")
    data = session.file.read_bytes()
    seen = set()
    for size in range(len(data)):
        session.file.write_bytes(data[:size])
        saved = read(session.file)
        assert saved.lost <= 1
        seen.add(len(saved.messages))
    assert seen == {0, 2, 4, 6, 8, 10}


_WRITER = """
import sys, time
from ling_local.sessions import SessionFile
from ling_local.types import Channel
session, _ = SessionFile.resume(__import__("pathlib").Path(sys.argv[1]))
print("open", flush=True)
number = 0
while True:
    session.asked(f"question {number}")
    for _ in range(20):
        session.part(Channel.ANSWER, "word " * 50, range(50))
    session.done("eos")
    number += 1
"""


def test_killed_at_random_points_it_always_goes_on() -> None:
    """C141"""
    session = SessionFile.create("m")
    session.close()
    rng = random.Random(5)
    before = 0
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(session.file)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        saved = read(session.file)
        assert saved.lost <= 12
        assert len(saved.messages) >= before
        before = len(saved.messages)
        assert all(m.content.startswith("question") for m in saved.messages[::2])
    assert before > 12


def test_two_processes_cannot_write_one_session() -> None:
    session = SessionFile.create("m")
    turn(session, "one", "1")
    code = (
        "import sys, pathlib; from ling_local.sessions import SessionFile; from ling_local.errors import LingError\n"
        "try: SessionFile.resume(pathlib.Path(sys.argv[1]))\nexcept LingError as error: print(error)"
    )
    run = [sys.executable, "-c", code, str(session.file)]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert f"is open in another ling (process {os.getpid()})" in said
    session.close()
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == ""


def test_finding_by_name_number_beginning_and_last() -> None:
    names = []
    for number in range(3):
        session = SessionFile.create("m")
        turn(session, f"talk {number}", "x")
        session.close()
        os.utime(session.file, (1000 + number, 1000 + number))
        names.append(session.name)
    assert sessions.find("last").stem == names[2]
    assert sessions.find("1").stem == names[2]
    assert sessions.find("3").stem == names[0]
    assert sessions.find(names[1]).stem == names[1]
    assert sessions.find(str(sessions.find(names[1]))).stem == names[1]  # as /save says where a talk is kept
    assert sessions.find(names[1][:-1] if names[1][:-1] not in names[0] + names[2] else names[1]).stem == names[1]
    assert [item.title for item in sessions.list_sessions()] == ["talk 2", "talk 1", "talk 0"]
    assert sessions.names() == tuple(reversed(names))
    with pytest.raises(UsageError, match="beginning of 3"):
        sessions.find(names[0][:8])
    for wrong in ("nosuch", "9", "", "../../etc/passwd"):
        with pytest.raises(UsageError, match="no session"):
            sessions.find(wrong)


def test_the_last_talk_is_one_in_which_something_was_said() -> None:
    session = SessionFile.create("m")
    turn(session, "a talk", "x")
    session.close()
    stopped = SessionFile.create("m")  # Ctrl-C before the first word of its only answer
    stopped.asked("never mind")
    stopped.failed()
    stopped.close()
    os.utime(session.file, (1000, 1000))
    assert sessions.find("last") == session.file


def test_a_link_to_nothing_hides_no_session(home: Path) -> None:
    session = SessionFile.create("m")
    turn(session, "a talk", "x")
    (home / f".#{session.file.name}").symlink_to("someone@host.1234")  # as Emacs locks a file that it edits
    assert sessions.find("last") == session.file
    assert len(sessions.list_sessions()) == 1


def test_without_any_session() -> None:
    assert sessions.list_sessions() == ()
    with pytest.raises(UsageError, match="no session yet"):
        sessions.find("last")


def test_a_long_title_is_cut_to_a_line() -> None:
    session = SessionFile.create("m")
    session.asked("many\nwords " * 50)
    assert len(read(session.file).title) == 60
    assert "\n" not in read(session.file).title


# --- the keeper


def test_nothing_is_written_before_the_first_question(home: Path) -> None:
    keeper = Keeper(True)
    keeper.undo()
    keeper.take(TokenEvent("x"))
    keeper.close()
    assert not home.exists()


def test_the_keeper_writes_pieces_and_marks_the_end() -> None:
    keeper = Keeper(True)
    keeper.asked("q", "sys", "m", ())
    for number in range(2000):
        keeper.take(TokenEvent(f"{number} ", (number,), Channel.THINKING if number < 50 else Channel.ANSWER))
    keeper.ended("eos")
    file = keeper.file
    assert file is not None
    saved = read(file)
    assert saved.messages[1].content == "".join(f"{n} " for n in range(50, 2000))
    assert saved.messages[1].ids == tuple(range(2000))
    assert saved.system == "sys"
    assert len(file.read_text().splitlines()) < 20  # not a record a token
    keeper.close()


def test_ids_of_another_model_are_dropped_on_resume() -> None:
    keeper = Keeper(True)
    keeper.asked("q", None, "one model", ())
    keeper.take(TokenEvent("a", (4,)))
    keeper.ended("eos")
    file = keeper.file
    assert file is not None
    keeper.close()
    same = Keeper(True)
    assert same.resume(file, "one model").messages[1].ids == (4,)
    same.close()
    other = Keeper(True)
    assert other.resume(file, "another").messages[1] == Message("assistant", "a")
    other.close()


def test_ids_from_before_a_change_of_the_model_are_dropped() -> None:
    session = SessionFile.create("one model")
    turn(session, "one", "1", ids=(8, 9))
    session.asked("two")
    session.part(Channel.ANSWER, "cut", (10,))
    session.model("another")
    turn(session, "three", "3", ids=(1,))
    saved = read(session.file)
    assert [(m.content, m.ids) for m in saved.messages[1::2]] == [("1", ()), ("cut", ()), ("3", (1,))]


def test_a_full_disk_leaves_no_empty_session_and_no_lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = SessionFile.create("m")
    turn(session, "one", "1")
    session.close()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for refused in (lambda: SessionFile.create("m"), lambda: SessionFile.resume(session.file)):
            with pytest.raises(OSError, match="No space"):
                refused()
    assert list(home.iterdir()) == [session.file]
    again, saved = SessionFile.resume(session.file)
    again.close()
    assert len(saved.messages) == 2


def test_a_session_that_cannot_be_taken_leaves_the_one_at_hand() -> None:
    taken = SessionFile.create("m")
    keeper = Keeper(True)
    keeper.asked("q", None, "m", ())
    name = keeper.name
    with pytest.raises(LingError):
        keeper.resume(taken.file, "m")
    assert keeper.name == name
    with pytest.raises(UsageError, match="at hand"):
        keeper.resume(keeper.file, "m")  # type: ignore[arg-type]
    keeper.ended("eos")
    keeper.close()


def test_a_disk_that_refuses_is_told_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(True)
    keeper.asked("q", None, "m", ())

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    keeper.take(TokenEvent("a", (1,)))
    keeper.ended("eos")
    assert "No space left" in keeper.problem
    keeper.problem = ""
    keeper.asked("q2", None, "m", ())
    keeper.ended("eos")
    assert keeper.problem == ""


def test_wanted_false_writes_nothing(home: Path) -> None:
    keeper = Keeper(False)
    keeper.asked("q", None, "m", ())
    keeper.ended("eos")
    assert not home.exists()


def test_with_history_off_a_session_is_read_and_not_touched() -> None:
    session = SessionFile.create("m")
    turn(session, "one", "1")
    before = session.file.read_bytes()
    keeper = Keeper(False)
    assert [m.content for m in keeper.resume(session.file, "m").messages] == ["one", "1"]
    keeper.asked("two", None, "m", ())
    keeper.close()
    assert session.file.read_bytes() == before


def _append(file: str, worker: int) -> None:
    try:
        session, _ = SessionFile.resume(Path(file))
    except LingError:
        return
    session.asked(f"by {worker}")
    time.sleep(0.1)
    session.failed()
    session.close()


def test_of_many_at_once_one_wins() -> None:
    session = SessionFile.create("m")
    session.close()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append, args=(str(session.file), n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    kinds = [json.loads(line)["kind"] for line in session.file.read_text().splitlines()]
    inside = False
    for kind in kinds:
        if kind == "user":
            assert not inside
        inside = kind == "user" or (inside and kind not in ("failed",))
