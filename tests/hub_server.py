"""A small Hugging Face Hub on this machine: real HTTP with what huggingface_hub and `ling pull` ask for.

It serves folders as repositories, large files through a redirect as the real one does, continues ranges, and can be
told to fail: break off, ignore ranges, send damaged bytes, answer slowly or with an error.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"  # what the Hub keeps apart and names by sha256; all else is named by its git id
_PIECE = 1 << 14


@dataclass(slots=True)
class Fault:
    """What goes wrong with a file, so many times.

    kind  "break" after `at` bytes of the body, "corrupt" one byte, "status" (`at` is the code), "other range"
    """

    kind: str
    times: int
    at: int = 0


@dataclass(slots=True)
class Hub:
    """Repositories by name, what was asked, and what is to fail."""

    repos: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # what the listing says instead of the truth
    ranges: bool = True
    bytes_per_s: float = 0.0
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # (method, path, Range)
    sent_bytes: int = 0
    url: str = ""
    bytes_url: str = ""  # where large files are: another host, which must not see the token
    tokens_leaked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, repo: str) -> str:
        """The one commit of a repository: it changes when a file does."""
        whole = hashlib.sha1()
        for name, file in self.files(repo).items():
            whole.update(f"{name} {digest(file)}\n".encode())
        return whole.hexdigest()

    def files(self, repo: str) -> dict[str, Path]:
        folder = self.repos[repo]
        return {str(f.relative_to(folder)): f for f in sorted(folder.rglob("*")) if f.is_file()}

    def fail(self, name: str, kind: str, times: int = 1, at: int = 0) -> None:
        """Let the next requests for the file's bytes fail."""
        self.faults.setdefault(name, []).append(Fault(kind, times, at))

    def take_fault(self, name: str) -> Fault | None:
        with self.lock:
            for fault in self.faults.get(name, []):
                if fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def starts(self, name: str) -> list[int]:
        """Where each request for the file began; a large one is asked for twice, at its redirect and at its place."""
        found = []
        for _, path, header in self.asked:
            if path.endswith(f"/{name}"):
                match = re.match(r"bytes=(\d+)-", header)
                found.append(int(match[1]) if match else 0)
        return found


def digest(file: Path) -> str:
    data = file.read_bytes()
    if file.name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            self._api(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*found.groups(), body)
        elif found := re.fullmatch(r"/bytes/([^/]+/[^/]+)/(.+)", path):
            self.hub.tokens_leaked += "Authorization" in self.headers
            self._send_file(found[2], self.hub.files(found[1])[found[2]], body, {})
        else:
            self._error(404, "EntryNotFound")

    def _known(self, repo: str, revision: str) -> bool:
        if repo not in self.hub.repos:
            self._error(401, "RepoNotFound")
        elif repo in self.hub.gated and not self.headers.get("Authorization"):
            self._error(403, "GatedRepo")
        elif revision not in ("main", self.hub.commit(repo)):
            self._error(404, "RevisionNotFound")
        else:
            return True
        return False

    def _api(self, repo: str, kind: str, revision: str) -> None:
        if not self._known(repo, revision):
            return
        rows: list[dict[str, Any]] = []
        for name, file in self.hub.files(repo).items():
            size, oid = self.hub.sizes.get(name, file.stat().st_size), digest(file)
            if kind == "tree":
                row = {"type": "file", "path": name, "size": size, "oid": oid}
            else:
                row = {"rfilename": name, "size": size, "blobId": oid}
            if name.endswith(LARGE):
                short = hashlib.sha1(oid.encode()).hexdigest()
                row |= {"lfs": {"oid": oid, "sha256": oid, "size": size, "pointerSize": 135}}
                row |= {"oid": short} if kind == "tree" else {"blobId": short}
            rows.append(row)
        document = {"id": repo, "modelId": repo, "sha": self.hub.commit(repo), "private": False, "siblings": rows}
        data = json.dumps(rows if kind == "tree" else document).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def _resolve(self, repo: str, revision: str, name: str, body: bool) -> None:
        if not self._known(repo, revision):
            return
        file = self.hub.files(repo).get(name)
        if file is None:
            self._error(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": self.hub.commit(repo)}
        if name.endswith(LARGE):
            size = str(file.stat().st_size)
            headers |= {"X-Linked-Etag": f'"{digest(file)}"', "X-Linked-Size": size, "Content-Length": "0"}
            self._head(302, {**headers, "Location": f"{self.hub.bytes_url}/bytes/{repo}/{name}"})
        else:
            self._send_file(name, file, body, {**headers, "ETag": f'"{digest(file)}"'})

    def _send_file(self, name: str, file: Path, body: bool, headers: dict[str, str]) -> None:
        fault = self.hub.take_fault(name) if body else None
        data, start = file.read_bytes(), 0
        if fault and fault.kind == "status":
            self._error(fault.at, "")
            return
        if fault and fault.kind == "corrupt":
            data = bytes([data[0] ^ 255]) + data[1:]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and self.hub.ranges:
            start = int(asked[1])
            if start >= len(data):
                self._error(416, "")
                return
            told = start + (1 if fault and fault.kind == "other range" else 0)
            headers = {**headers, "Content-Range": f"bytes {told}-{len(data) - 1}/{len(data)}"}
        self._head(206 if asked and self.hub.ranges else 200, {**headers, "Content-Length": str(len(data) - start)})
        if body:
            self._send(data[start : start + fault.at if fault and fault.kind == "break" else None])
            self.close_connection = bool(fault)

    def _send(self, data: bytes) -> None:
        for place in range(0, len(data), _PIECE):
            piece = data[place : place + _PIECE]
            if self.hub.bytes_per_s:
                time.sleep(len(piece) / self.hub.bytes_per_s)
            self.wfile.write(piece)
            with self.hub.lock:
                self.hub.sent_bytes += len(piece)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _error(self, status: int, code: str) -> None:
        self._head(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, address: Any) -> None:
        """A client that leaves in the midst is what these tests are about."""


@contextmanager
def serve() -> Iterator[Hub]:
    """A Hub on a free port of this machine, for as long as the block runs."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.bytes_url = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
