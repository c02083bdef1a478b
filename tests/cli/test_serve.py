"""`ling serve` on the command line: its flags, what it says, and every way not to start."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ling_local.errors import LingError
from ling_local.serve.server import _Log, _not_bound, bind
from program import Program
from served import scripted, serving

Write = Callable[..., Path]


@pytest.fixture
def refused(ling: Program, write_script: Write) -> Callable[..., str]:
    """Run `ling serve` with arguments that it should refuse; what it says."""

    def run(*args: str, code: int) -> str:
        script = write_script(["x"], load={"delay_ms": 60_000})
        done = ling("serve", "--engine", "scripted", "-m", script, *args, stdin=None, timeout=20)
        assert (done.code, done.out) == (code, b"")
        return done.err

    return run


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_is_one_sentence_before_anything_is_loaded(refused, taken: int) -> None:
    """C151: the script would load for a minute."""
    said = refused("--port", str(taken), code=1)
    assert said.startswith(f"ling: port {taken} is in use by another program.")
    assert "--port 0" in said
    assert len(said.splitlines()) == 1


def test_two_servers_do_not_share_a_port(ling: Program, write_script: Write) -> None:
    script = write_script(["x"])
    with scripted(ling, script) as first:
        second = ling("serve", "--engine", "scripted", "-m", script, "--port", str(first.port), stdin=None)
        assert second.code == 1
        assert "in use" in second.err
        assert first.chat().status == 200


def test_a_port_is_taken_before_the_server_runs() -> None:
    """C151: two at once."""
    with bind("127.0.0.1", 0) as first, pytest.raises(LingError, match="in use by another program"):
        bind("127.0.0.1", first.getsockname()[1])


def test_the_log_has_the_trace_of_what_nobody_foresaw_and_no_word_of_what_the_end_cut() -> None:
    lines: list[str] = []
    log = _Log(lines.append)
    for error in (ZeroDivisionError("here"), asyncio.CancelledError()):
        log.emit(logging.LogRecord("uvicorn", logging.ERROR, "", 0, "Exception\n", (), (type(error), error, None)))
    assert lines == ["ling: Exception\nZeroDivisionError: here"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--port", "70000"), "--port: 70000 is out of range"),
        (("--port", "http"), "--port: 'http' is not a whole number"),
        (("--queue", "-1"), "--queue: -1 is out of range"),
        (("--host", "0.0.0.0", "--port", "0"), "LING_API_KEY"),
        (("--host", "::", "--port", "0"), "without a key"),
        (("--host", "203.0.113.7"), "no address of this machine"),
        (("--host", "256.1.1.1"), "--host 256.1.1.1"),
        (("--api-key", " "), "the API key is empty"),
        (("--allow-origin", "*"), "every web page"),
        (("--allow-origin", "localhost:3000"), "http://localhost:3000"),
        (("--speculation", "mtp", "--port", "0"), "has no drafter"),
    ],
)
def test_what_cannot_be_served_is_refused(
    ling: Program, write_script: Write, args: tuple[str, ...], words: str
) -> None:
    done = ling("serve", "--engine", "scripted", "-m", write_script(["x"]), *args, stdin=None, timeout=20)
    assert (done.code, done.out) == (2, b"")
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_port_for_administrators_is_said() -> None:
    assert "--port" in _not_bound("127.0.0.1", 80, OSError(errno.EACCES, "Permission denied")).hint
    assert "Too many" in _not_bound("127.0.0.1", 80, OSError(errno.EMFILE, "Too many open files")).message


def test_a_model_that_is_not_here_is_said_at_once(ling: Program) -> None:
    done = ling("serve", "-m", "nosuch", "--port", "0", stdin=None, timeout=20)
    assert done.code == 1
    assert "model 'nosuch' is not on this machine" in done.err


def test_it_says_when_it_is_ready_and_a_line_for_each_request(ling: Program, write_script: Write) -> None:
    with scripted(ling, write_script([["a", "b"]], block=1), "--api-key", "k") as server:
        assert server.lines == [f"ling: script is ready at {server.url} (Ctrl-C ends it)"]
        server.health()
        server.ask("GET", "/v1/models\x1b[2J".replace("\x1b", "%1b"), authorization="Bearer k")
        server.ask("GET", "/v1/models")
        body = {"messages": [{"role": "user", "content": "secret words"}]}
        server.ask("POST", "/v1/chat/completions", body, authorization="Bearer k")
        server.wait_line("chat/completions")
        assert server.stop() == 0
        server.wait_line("stopped")
    assert len(server.log) == 3
    assert "\x1b" not in server.log[0]
    assert " GET /v1/models 401 " in server.log[1]
    assert "(0 cached) · 3 out · TTFT" in server.log[2]
    assert server.log[2].endswith("accept 1.50")
    assert not any("secret" in line for line in server.lines)


def test_quiet_leaves_the_line_that_it_is_ready(ling: Program, write_script: Write) -> None:
    with scripted(ling, write_script(["x"]), "--quiet") as server:
        assert server.chat().status == 200
        assert server.stop() == 0
    assert len(server.lines) == 1


def test_other_interfaces_with_a_key(ling: Program, write_script: Write) -> None:
    args = ("--host", "0.0.0.0", "--allow-host", "box.lan")
    with scripted(ling, write_script(["x"]), *args, env={"LING_API_KEY": "k"}) as server:
        key = {"authorization": "Bearer k"}
        assert server.ask("GET", "/v1/models").status == 401
        assert server.ask("GET", "/v1/models", host="192.0.2.7:1", **key).status == 200
        assert server.ask("GET", "/v1/models", host="box.lan", **key).status == 200
        assert server.ask("GET", "/v1/models", host="evil.test", **key).status == 403


def test_ipv6(ling: Program, write_script: Write) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:  # a machine without IPv6: then that is what it says
        assert ling("serve", "--host", "::1", "--port", "0", stdin=None).code in (1, 2)
        return
    with scripted(ling, write_script(["x"]), "--host", "::1") as server:
        assert server.ask("GET", "/v1/models").status == 200


def test_flags_are_the_defaults_of_requests(ling: Program, write_script: Write) -> None:
    turn = {"steps": ["a", "b", "c"], "loop": True}
    with scripted(ling, write_script(turn), "--max-tokens", "5", "--stop", "never") as server:
        assert server.chat().json["usage"]["completion_tokens"] == 5
        assert server.chat(max_tokens=2).json["usage"]["completion_tokens"] == 2
        assert server.chat(stop="c").json["choices"][0]["message"]["content"] == "ab"


def test_the_demo_is_served_under_its_name(ling: Program) -> None:
    with serving(ling, env={"OMP_NUM_THREADS": "1"}) as server:
        assert server.ask("GET", "/v1/models").json["data"][0]["id"] == "ling-demo"
        assert server.chat(model="ling-demo", max_tokens=4).status == 200
    assert server.lines[0].startswith("ling: answering with ling-demo")
