"""What the Hub says about a repository, and the bytes of its files. The only module that talks to the network.

huggingface_hub finds the endpoint, the token and the proxy. The bytes are asked for here, because its own download
starts from zero after every interruption.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, constants, errors, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ling_local.errors import DownloadError, LingError, ModelError, UsageError

# Its HTTP library has changed before; the root of that library's exceptions is found through the one it inherits.
NetworkError: type[Exception] = next(c for c in errors.HfHubHTTPError.__mro__ if c.__name__ == "HTTPError")
constants.HF_HUB_OFFLINE = False  # whoever comes here may ask: a flag of ours beats its variable
LISTING_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 30.0
_DIGEST = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SUFFIXES = (".safetensors", ".json", ".jinja", ".md", ".txt")
_NAMES = ("LICENSE", "NOTICE")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at one commit. digest: sha256 of its bytes (64 digits), or its git id (40)."""

    name: str
    size: int
    digest: str
    url: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit: the files that a model needs."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


def endpoint() -> str:
    """The Hub that is asked (HF_ENDPOINT)."""
    return constants.ENDPOINT


def list_repo(repo: str, revision: str) -> Listing:
    """The commit that revision means now, and its files with sizes and digests. Raises LingError."""
    with hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=LISTING_TIMEOUT_S)
    commit, files = info.sha or "", []
    if not _COMMIT.fullmatch(commit):
        raise DownloadError(f"{endpoint()} names no commit for {repo}", "Try again later.")
    for sibling in info.siblings or ():
        name = sibling.rfilename
        if not _wanted(name):
            continue
        size = sibling.lfs.size if sibling.lfs else sibling.size
        digest = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
        if not isinstance(size, int) or size < 0 or not _DIGEST.fullmatch(digest):
            raise DownloadError(f"{endpoint()} gives no size or digest for {repo}/{name}", "Try again later.")
        files.append(RemoteFile(name, size, digest, hf_hub_url(repo, name, revision=commit)))
    return Listing(repo, commit, tuple(files))


def _wanted(name: str) -> bool:
    """Weights, configuration, tokenizer and the papers that go with them; at the top or one folder down."""
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") or part.startswith(".") for part in parts) or "\\" in name:
        return False
    return parts[-1].endswith(_SUFFIXES) or parts[-1].startswith(_NAMES)


class Broken(Exception):
    """A connection failed in a way that may pass; its text is the reason."""


def pieces_from(file: RemoteFile, start: int) -> Iterator[tuple[int, bytes]]:
    """The bytes of file from start on, as (position, piece); from 0 if the server cannot continue.

    Raises Broken, or LingError where asking again is of no use.
    """
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # a range of packed bytes would fit nothing here
    if start:
        headers["Range"] = f"bytes={start}-"
    again = False
    try:
        with get_session().stream("GET", file.url, headers=headers, timeout=READ_TIMEOUT_S) as response:
            again = response.status_code == 416 and start > 0
            if not again:
                _check_status(file, response)
                position = _begin(response, start)
                for piece in response.iter_bytes():
                    yield position, piece
                    position += len(piece)
    except (NetworkError, OSError) as error:
        raise Broken(reason(error)) from error
    if again:
        yield from pieces_from(file, 0)


def _check_status(file: RemoteFile, response: Any) -> None:
    if response.status_code >= 500 or response.status_code in (408, 429):
        raise Broken(f"the server says {response.status_code}")
    if response.status_code >= 400:
        response.read()
        with hub_errors(file.name):
            hf_raise_for_status(response)


def _begin(response: Any, start: int) -> int:
    """The place where the bytes of a response begin."""
    if response.status_code != 206:
        return 0
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != start:
        raise Broken("the server sent another range than was asked for")
    return start


def read_small(file: RemoteFile, limit: int = 1 << 20) -> bytes:
    """A small file as bytes. Raises LingError."""
    if file.size > limit:
        raise ModelError(f"{file.name} is {file.size:,} bytes long, which no such file is")
    try:
        return b"".join(piece for _, piece in pieces_from(file, 0))
    except Broken as broken:
        raise unreachable(file.name, str(broken)) from None


@contextmanager
def hub_errors(what: str, revision: str = "main") -> Iterator[None]:
    """Turn what huggingface_hub and the network raise inside into our errors."""
    try:
        yield
    except LingError:
        raise
    except errors.HFValidationError:
        raise UsageError(
            f"'{what}' is no name of a repository", "Give one as OWNER/NAME, or `ling pull tiny`."
        ) from None
    except errors.GatedRepoError:
        hint = f"Accept its terms at {endpoint()}/{what}, then log in with `hf auth login`, or set HF_TOKEN."
        raise DownloadError(f"{what} is given out only to accounts that accepted its terms", hint) from None
    except errors.RepositoryNotFoundError:
        hint = "Look at the spelling; a private one needs `hf auth login` or HF_TOKEN."
        raise ModelError(f"there is no repository '{what}' on {endpoint()}", hint) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{what} has no revision '{revision}'", "Leave out --revision for the newest.") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise DownloadError(f"{what}: {endpoint()} says {status}", "Try again later.") from None
    except (NetworkError, OSError) as error:
        if isinstance(error, OSError) and error.filename:  # the token's
            hint = "Correct its permissions, or set HF_HOME to another folder."
            raise DownloadError(f"{error.filename} cannot be read: {error.strerror}", hint) from None
        raise unreachable(what, reason(error)) from None


def unreachable(what: str, why: str) -> DownloadError:
    """The one wording for a network that does not give."""
    hint = "Look at the network (HF_ENDPOINT and the proxy variables are obeyed), then run it again."
    return DownloadError(f"{what}: nothing comes from {endpoint()}: {why}", hint)


def reason(error: BaseException) -> str:
    """An exception of the network as a phrase."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].partition(" (")[0]
