"""One slot and its queue: order, bound, clients that leave, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from ling_local.engine.protocol import EngineInfo
from ling_local.errors import EngineDied, LingError
from ling_local.serve.app import make_app
from ling_local.serve.guard import Gate
from ling_local.serve.service import Service
from ling_local.serve.slot import Slot
from program import FULL, Program, group_is_gone
from served import Server, scripted

Write = Callable[..., Path]
STEP_S = 0.05
ENDLESS = {"steps": [{"tokens": ["a"], "delay_ms": 1000 * STEP_S}], "loop": True}


@pytest.fixture
def start(ling: Program, write_script: Write) -> Callable[..., object]:
    def run(*turns, args: tuple[str, ...] = (), env=None, **fields):
        return scripted(ling, write_script(*turns, **fields), *args, env=env)

    return run


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def test_requests_are_answered_one_after_the_other_in_their_order(start) -> None:
    slow = {"steps": [{"tokens": ["slow"], "delay_ms": 300}]}
    with start(slow, ["second"], ["third"]) as server:
        answers: dict[int, str] = {}

        def ask(number: int) -> None:
            answers[number] = server.chat().json["choices"][0]["message"]["content"]

        threads = []
        for number in range(3):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            server.wait_health(busy=True, waiting=number)
        for thread in threads:
            thread.join()
    assert answers == {0: "slow", 1: "second", 2: "third"}


def test_who_waits_in_a_stream_hears_the_position(start) -> None:
    with start(ENDLESS, ["one"], ["two"]) as server:
        running = server.begin(stream=True)
        server.wait_health(busy=True)
        replies = {}

        def ask(number: int) -> None:
            replies[number] = server.chat(stream=True)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for number, thread in enumerate(threads):
            thread.start()
            server.wait_health(waiting=number + 1)
        running.close()
        for thread in threads:
            thread.join()
    assert replies[0].comments == ["waiting, position 1"]
    assert replies[1].comments == ["waiting, position 2", "waiting, position 1"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in replies[1].chunks][-1] == "stop"


def test_a_full_queue_refuses_with_a_time_to_come_back(start) -> None:
    with start(ENDLESS, args=("--queue", "1")) as server:
        held = [server.begin()]
        server.wait_health(busy=True)
        held.append(server.begin(stream=True))
        server.wait_health(waiting=1)
        refused = server.chat()
        assert refused.status == 429
        assert refused.json["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with OpenAI(base_url=server.url, api_key="x", max_retries=0) as api, pytest.raises(openai.RateLimitError):
            api.chat.completions.create(model="script", messages=[{"role": "user", "content": "x"}])
        held[1].close()  # who leaves the queue makes room in it
        server.wait_health(waiting=0)
        held.append(server.begin())
        server.wait_health(waiting=1)
        for connection in held:
            connection.close()
        server.wait_health(busy=False, waiting=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine_within_a_step(start, stream: bool) -> None:
    """C143, while it answers."""
    with start(ENDLESS, ["next"]) as server:
        connection = server.begin(stream=stream)
        if stream:
            read_until(connection, b'"content": "a"')
        server.wait_health(busy=True)
        time.sleep(3 * STEP_S)
        connection.close()
        assert server.wait_health(busy=False) < 20 * STEP_S
        assert server.chat().json["choices"][0]["message"]["content"] == "next"
        server.wait_line("completions left")
        server.wait_line("completions 200")


def test_a_client_that_leaves_in_the_prefill_frees_the_engine(start) -> None:
    with start({"steps": ["never"], "prefill_ms": 60_000}, ["next"]) as server:
        connection = server.begin()
        server.wait_health(busy=True)
        connection.close()
        assert server.wait_health(busy=False) < 5
        assert server.chat().json["choices"][0]["message"]["content"] == "next"


def test_a_client_that_leaves_does_no_harm_to_another(start) -> None:
    answer = {"steps": [{"tokens": ["word "], "delay_ms": 20, "repeat": 30}]}
    with start(answer) as server:
        others = [server.begin(stream=True) for _ in range(3)]
        server.wait_health(busy=True, waiting=2)
        reply = {}
        thread = threading.Thread(target=lambda: reply.update(it=server.chat()))
        thread.start()
        server.wait_health(waiting=3)
        for connection in (others[2], others[0], others[1]):
            connection.close()
        thread.join()
    assert reply["it"].json["choices"][0]["message"]["content"] == "word " * 30


def test_a_client_that_does_not_read_does_not_hold_the_slot(start) -> None:
    with start({"steps": [{"text": "x" * 400_000, "cut": 400}]}, ["next"], context=20_000) as server:
        deaf = server.begin(stream=True)
        data = read_until(deaf, b"role")
        server.wait_health(busy=False)
        assert server.chat().json["choices"][0]["message"]["content"] == "next"
        while b"[DONE]" not in data[-200:]:
            part = deaf.recv(1 << 20)
            assert part
            data += part
        assert data.count(b'"' + b"x" * 400 + b'"') == 1000


def test_a_long_wait_shows_that_the_connection_lives(start) -> None:
    """Nothing else comes for so long only in a long prefill; 10 s is what it takes."""
    with start({"steps": ["late"], "prefill_ms": 11_000}) as server:
        reply = server.chat(stream=True)
    assert reply.comments == ["working"]
    assert reply.chunks[1]["choices"][0]["delta"]["content"] == "late"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_order(start, number: signal.Signals, code: int) -> None:
    with start(ENDLESS, env=FULL) as server:
        running = server.begin(stream=True)
        read_until(running, b'"content": "a"')
        waiting = server.begin()
        server.wait_health(waiting=1)
        begun = time.monotonic()
        assert server.stop(number) == code
        assert time.monotonic() - begun < 5
        assert b'"code": "stopping"' in read_until(running, b"\r\n0\r\n")
        assert b"503" in read_until(waiting, b'"code":"stopping"').split(b"\r\n")[0]
        assert not [line for line in server.lines if "Traceback" in line or "Error" in line]
        assert group_is_gone(server.process.pid)
    assert ("ling: stopped" in server.lines) == (code == 0)


def test_ctrl_c_while_it_loads_ends_it(ling: Program, write_script: Write) -> None:
    script = write_script(["x"], load={"delay_ms": 30_000})
    with scripted(ling, script, ready=False, env=FULL) as server:
        time.sleep(1.5)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 8
        assert group_is_gone(server.process.pid)


def test_an_engine_that_dies_is_said_and_ends_the_server(start) -> None:
    with start(["a", {"exit": 3}]) as server:
        reply = server.chat()
        assert reply.status == 500
        assert "ended with exit code 3" in reply.json["error"]["message"]
        assert server.process.wait(10) == 1
    assert any(line.startswith("ling: the engine process ended with exit code 3") for line in server.lines)


def test_an_engine_that_died_while_nobody_asked_is_no_healthy_server() -> None:
    class Dead:
        @property
        def info(self) -> EngineInfo:
            raise EngineDied("the engine process was killed by SIGKILL")

    ended: list[LingError] = []
    about: Any = {"engine": Dead(), "text_model": None, "settings": {}, "info": object()}
    service = Service(names=("m",), slot=Slot(1), say=print, on_fatal=ended.append, **about)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/health",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(make_app(service, Gate())(scope, None, send))  # type: ignore[arg-type]
    assert (sent[0]["status"], json.loads(sent[1]["body"])["status"]) == (503, "failed")
    assert isinstance(ended[0], EngineDied)


def test_a_load_that_fails_ends_the_server_with_its_reason(ling: Program, write_script: Write) -> None:
    script = write_script(["x"], load={"delay_ms": 200, "fail": {"kind": "OutOfMemory", "message": "too little"}})
    with scripted(ling, script, ready=False) as server:
        assert server.process.wait(20) == 1
    assert server.lines == ["ling: too little"]


def test_while_it_loads_requests_are_told_to_come_back(ling: Program, write_script: Write) -> None:
    script = write_script(["x"], load={"delay_ms": 3000})
    port = free_port()
    with scripted(ling, script, "--port", str(port), ready=False) as server:
        server.host, server.port = "127.0.0.1", port
        wait_open(server)
        health = server.ask("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "loading")
        early = server.chat()
        assert (early.status, early.json["error"]["code"]) == (503, "loading")
        assert early.headers["retry-after"] == "2"
        with OpenAI(base_url=server.url, api_key="x", max_retries=4) as api:  # the client waits and comes back
            assert [model.id for model in api.models.list().data] == ["script"]
        assert server.health()["status"] == "ok"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_open(server: Server) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((server.host, server.port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
