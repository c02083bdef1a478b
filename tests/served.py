"""`ling serve` as a real process on a free port, and ways to talk to it: the openai client, and bytes on a socket."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from program import Program, command

READY = re.compile(r"is ready at http://([0-9.]+|\[[0-9a-f:]+\]):(\d+)/v1")
THOUGHT = {"control": "</think>"}


def tool_call(name: str, *arguments: tuple[str, str], gap: str = "\n") -> list[Any]:
    """Steps that spell a call as the model does, with its tags as control tokens."""
    steps: list[Any] = [{"control": "<tool_call>"}, f"{name}\n"]
    for key, value in arguments:
        steps += [{"control": "<arg_key>"}, key, {"control": "</arg_key>"}, "\n", {"control": "<arg_value>"}]
        steps += [{"text": value, "cut": 3}, {"control": "</arg_value>"}, *([gap] * bool(gap))]
    return [*steps, {"control": "</tool_call>"}]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON documents of an event stream, which has to end with [DONE] or an error."""
        lines = [line for line in self.body.decode("ascii").split("\n\n") if line.startswith("data: ")]
        documents = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
        assert (lines[-1] == "data: [DONE]") != ("error" in documents[-1])
        return documents

    @property
    def comments(self) -> list[str]:
        return [line[2:] for line in self.body.decode("ascii").split("\n\n") if line.startswith(": ")]


@dataclass(slots=True)
class Server:
    """A running `ling serve`."""

    process: subprocess.Popen[bytes]
    host: str = ""
    port: int = 0
    lines: list[str] = field(default_factory=list)
    _is_read: bool = False
    _seen: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    @property
    def log(self) -> list[str]:
        """Lines about requests."""
        return [line for line in self.lines if re.match(r"\d\d:\d\d:\d\d ", line)]

    def read(self) -> None:
        """Body of a thread: collect stderr."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._seen:
                self.lines.append(line.decode().rstrip("\n"))
                self._seen.notify_all()
        self._is_read = True

    def wait_line(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """The first line on stderr that holds the pattern."""
        deadline = time.monotonic() + timeout
        with self._seen:
            while True:
                found = next((match for line in self.lines if (match := re.search(pattern, line))), None)
                if found:
                    return found
                over = self.process.poll() is not None and self._is_read
                assert not over, f"it ended without a line with {pattern!r}: {self.lines}"
                assert time.monotonic() < deadline, f"no line with {pattern!r} in {self.lines}"
                self._seen.wait(0.1)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request. body: a document, or bytes as they are."""
        connection = HTTPConnection(self.host, self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {} if data is None or "content-type" in given else {"content-type": "application/json"}
        try:
            connection.request(method, path, data, {**kind, **given})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def chat(self, text: str = "hi", **fields: Any) -> Reply:
        """A chat completion of one message."""
        return self.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def begin(self, **fields: Any) -> socket.socket:
        """Send a chat completion and do not read the answer."""
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = socket.create_connection((self.host, self.port), timeout=30)
        connection.sendall(head.encode() + body)
        return connection

    def health(self) -> dict[str, Any]:
        return self.ask("GET", "/health").json

    def wait_health(self, timeout: float = 20, **wanted: Any) -> float:
        """Wait until /health says that; seconds it took."""
        begun = time.monotonic()
        while True:
            health = self.health()
            if wanted.items() <= health.items():
                return time.monotonic() - begun
            assert time.monotonic() - begun < timeout, health
            time.sleep(0.01)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send the signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(20)


@contextmanager
def serving(ling: Program, *args: str | Path, ready: bool = True, **more: Any) -> Iterator[Server]:
    """`ling serve --port 0` with these arguments; ready False: do not wait for the model."""
    pipes = {"command": command(more.get("env")), "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **more}
    process = ling.start("serve", "--port", "0", *args, **pipes)
    server = Server(process)
    reader = threading.Thread(target=server.read, daemon=True)
    reader.start()
    try:
        if ready:
            found = server.wait_line(READY.pattern)
            server.host, server.port = found[1].strip("[]"), int(found[2])
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(5)
        assert process.stderr is not None
        process.stderr.close()


def scripted(ling: Program, script: Path, *args: str, **more: Any) -> Any:
    """A server on a script, without thinking unless args say so."""
    think = () if "--think" in args else ("--no-think",)
    return serving(ling, "--engine", "scripted", "-m", script, *think, *args, **more)
