"""What stands before the requests: Host, key, size and type of the body, other origins."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from starlette.datastructures import Headers

from ling_local.serve.errors import ApiError
from ling_local.serve.guard import MAX_BODY_BYTES, Gate
from program import Program
from served import Server, scripted

Write = Callable[..., Path]
EVIL = "http://evil.test"


@pytest.fixture
def start(ling: Program, write_script: Write) -> Callable[..., AbstractContextManager[Server]]:
    return lambda *args, **more: scripted(ling, write_script(["x"]), *args, **more)


@pytest.fixture
def server(start) -> Iterator[Server]:
    with start() as running:
        yield running


def lets_in(gate: Gate, host: str) -> bool:
    try:
        gate.check("/v1/models", Headers({"host": host}))
    except ApiError as error:
        return error.status != 403
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:5464", "127.0.0.1:80", "127.1.2.3", "[::1]:5464", "localhost."]
)
def test_names_of_this_machine_are_answered(host: str) -> None:
    assert lets_in(Gate(), host)


@pytest.mark.parametrize(
    "host",
    ["evil.test", "localhost.evil.test", "", "evil.test:5464", "10.0.0.1", "[::2]", "127.0.0.1.evil.test", "[::1"],
)
def test_foreign_names_are_refused(host: str) -> None:
    assert lets_in(Gate(), host) == (host == "[::1")  # an unclosed bracket is still the loopback and nothing else


def test_other_names_and_addresses_where_they_are_allowed() -> None:
    assert lets_in(Gate(hosts=("box.lan",)), "Box.LAN:5464")
    assert not lets_in(Gate(hosts=("box.lan",)), "10.0.0.1")
    assert lets_in(Gate(is_local=False), "10.0.0.1:5464")
    assert not lets_in(Gate(is_local=False), "evil.test")
    assert lets_in(Gate(hosts=("box.lan:5464",)), "Box.lan:5464")
    assert not lets_in(Gate(hosts=("box.lan:5464", "::")), "")


def test_a_key_is_bytes_without_the_blanks_around_it() -> None:
    for key in (" k\u00e9 ", b" k\xff\n".decode("utf-8", "surrogateescape")):
        sent = key.strip().encode("utf-8", "surrogateescape").decode("latin-1")  # as headers are read
        Gate(key=key).check("/v1/models", Headers({"host": "localhost", "authorization": f"Bearer {sent}"}))
        with pytest.raises(ApiError):
            Gate(key=key).check("/v1/models", Headers({"host": "localhost", "authorization": "Bearer k"}))


def test_a_foreign_host_header_is_refused_before_anything_is_done(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    for path in ("/v1/models", "/health", "/nowhere"):
        reply = server.ask("GET", path, host="evil.test")
        assert (reply.status, reply.json["error"]["code"]) == (403, "foreign_host")
    assert server.ask("POST", "/v1/chat/completions", body, host="evil.test").status == 403
    assert server.ask("GET", "/v1/models", host=f"localhost:{server.port}").status == 200


def test_no_other_origin_may_read_by_default(server: Server) -> None:
    """C149."""
    for reply in (
        server.ask("GET", "/v1/models", origin=EVIL),
        server.ask("OPTIONS", "/v1/chat/completions", origin=EVIL, access_control_request_method="POST"),
        server.ask("POST", "/v1/chat/completions", b"{}", origin=EVIL),
    ):
        assert not [name for name in reply.headers if name.startswith("access-control")]
    assert server.ask("OPTIONS", "/v1/chat/completions", origin=EVIL).status == 405


def test_what_a_page_may_send_without_being_asked_is_refused(server: Server) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        reply = server.ask("POST", "/v1/chat/completions", body, content_type=kind)
        assert (reply.status, reply.json["error"]["code"]) == (415, "unsupported_media_type")
    typed = server.ask("POST", "/v1/chat/completions", body, content_type="Application/JSON; charset=utf-8")
    assert typed.status == 200


def test_origins_that_were_named_may_read(start) -> None:
    with start("--allow-origin", "http://page.test/") as server:
        asked = {"origin": "http://page.test", "access_control_request_method": "POST"}
        asked["access_control_request_headers"] = "authorization,content-type,x-stainless-os"  # as the openai client
        preflight = server.ask("OPTIONS", "/v1/chat/completions", **asked)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.test"
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
        answer = server.ask("GET", "/v1/models", origin="http://page.test")
        assert answer.headers["access-control-allow-origin"]
        assert answer.headers["access-control-expose-headers"] == "Retry-After"
        assert "access-control-allow-origin" not in server.ask("GET", "/v1/models", origin=EVIL).headers


def test_a_key_is_asked_for_everywhere_but_at_the_health(start) -> None:
    with start("--api-key", "s3cret") as server:
        assert server.ask("GET", "/v1/models").status == 401
        assert server.ask("GET", "/v1/models").headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer", "Bearer x", "Basic s3cret", "Bearer s3cretx", "Bearer sécret"):
            assert server.ask("GET", "/v1/models", authorization=wrong.encode("utf-8").decode("latin-1")).status == 401
        assert server.health()["status"] == "ok"
        with OpenAI(base_url=server.url, api_key="s3cret") as api:
            assert api.models.list().data
        with OpenAI(base_url=server.url, api_key="wrong") as api, pytest.raises(openai.AuthenticationError) as raised:
            api.models.list()
        assert raised.value.code == "invalid_api_key"
    assert not any("s3cret" in line for line in server.lines)


def test_the_key_comes_from_a_variable_and_is_not_shown(start, ling: Program) -> None:
    with start(env={"LING_API_KEY": "s3cret"}) as server:
        assert server.ask("GET", "/v1/models").status == 401
    shown = ling("config", env={"LING_API_KEY": "s3cret"})
    assert "s3cret" not in shown.text
    assert "(set)" in shown.text
    assert ling("config", "--json", env={"LING_API_KEY": "s3cret"}).json["settings"]["api_key"]["value"] == "(set)"
    assert ling("config", "--json").json["settings"]["api_key"]["value"] is None


def test_a_body_that_is_too_large_is_refused_by_its_word_and_by_its_bytes(server: Server) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
        try:
            for _ in range(MAX_BODY_BYTES // (1 << 20) + 2):
                connection.sendall(chunk)
        except OSError:
            pass  # it was refused while we were still sending
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    assert server.ask("GET", "/v1/models").status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"null", b"[" * 100_000, b'{"messages": ' + b"[" * 50_000]
)
def test_a_body_that_is_no_json_object_is_a_400(server: Server, body: bytes) -> None:
    reply = server.ask("POST", "/v1/chat/completions", body)
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_json")


def test_half_a_surrogate_pair_in_a_name_is_a_400(server: Server) -> None:
    reply = server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "\ud83d": 1})
    assert (reply.status, reply.json["error"]["param"]) == (400, "\ud83d")


def test_the_log_is_one_short_line_a_request_whatever_comes(server: Server) -> None:
    server.ask("GET", "/" + "x" * 30_000)
    assert server.ask("GET", "/v1/models", connection="Upgrade, HTTP2-Settings", upgrade="h2c").status == 200
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
    server.wait_line("POST /v1/completions left")
    assert len(server.lines) == 4
    assert max(map(len, server.lines)) < 300


def test_unknown_paths_and_methods_are_errors_in_the_same_shape(server: Server) -> None:
    nowhere = server.ask("GET", "/v1/embeddings")
    assert nowhere.status == 404
    assert "/v1/chat/completions" in nowhere.json["error"]["message"]
    wrong = server.ask("GET", "/v1/chat/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json["error"]["type"] == "invalid_request_error"
