"""The rooms of `ling pull`: one file's transfer, the cache's layout, and the names of what is published."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_server import Hub, digest, serve
from ling_local.errors import DownloadError
from ling_local.published import PUBLISHED, find_published, repository, size_text
from ling_local.pull.remote import RemoteFile
from ling_local.pull.store import Store
from ling_local.pull.transfer import Corrupt, Stopped, fetch

REPO, NAME = "someone/model", "weights.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / NAME).write_bytes(os.urandom(300_000))
    with serve() as hub:
        hub.repos[REPO] = folder
        yield hub


class Transfer:
    """One call of fetch, with what it told."""

    def __init__(self, hub: Hub, part: Path, **changes: object) -> None:
        source = hub.repos[REPO] / NAME
        facts = {"size": source.stat().st_size, "digest": digest(source), **changes}
        self.file = RemoteFile(NAME, url=f"{hub.bytes_url}/bytes/{REPO}/{NAME}", **facts)  # type: ignore[arg-type]
        self.part, self.counted, self.notes, self.stop = part, 0, [], threading.Event()

    def run(self, *waits: float) -> None:
        def count(num_bytes: int) -> None:
            self.counted += num_bytes

        fetch(self.file, self.part, count, self.stop, self.notes.append, waits)


def test_a_file_comes_whole_and_is_counted(hub: Hub, tmp_path: Path) -> None:
    one = Transfer(hub, tmp_path / "blobs" / "part")
    one.run()
    assert one.part.read_bytes() == (hub.repos[REPO] / NAME).read_bytes()
    assert (one.counted, one.notes) == (300_000, [])


@pytest.mark.parametrize("kind", ["break", "status", "other range"])
def test_waits_that_are_used_up_end_it_and_the_part_stays(hub: Hub, tmp_path: Path, kind: str) -> None:
    one = Transfer(hub, tmp_path / "part")
    hub.fail(NAME, "break", 1, 100_000)
    hub.fail(NAME, kind, 99, 503 if kind == "status" else 0)
    with pytest.raises(DownloadError, match="nothing comes from"):
        one.run(0.01, 0.02)
    assert one.part.stat().st_size == one.counted == 100_000
    assert len(one.notes) == 2  # one a wait
    assert len(hub.starts(NAME)) == 3
    hub.faults.clear()
    again = Transfer(hub, one.part)
    again.run()
    assert hub.starts(NAME)[-1] == 100_000
    assert again.counted == 300_000


def test_waits_count_from_the_last_byte_that_came(hub: Hub, tmp_path: Path) -> None:
    hub.fail(NAME, "break", 10, 20_000)
    one = Transfer(hub, tmp_path / "part")
    one.run(0.01)
    assert len(one.notes) == 10


def test_a_server_that_never_answers_is_asked_once_more_than_there_are_waits(hub: Hub, tmp_path: Path) -> None:
    hub.fail(NAME, "status", 99, 500)
    one = Transfer(hub, tmp_path / "part")
    with pytest.raises(DownloadError, match="the server says 500"):
        one.run(0.01, 0.01, 0.01)
    assert len(hub.starts(NAME)) == 4


def test_a_part_that_is_longer_than_the_file_or_wrong_begins_again(hub: Hub, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(bytes(300_001))
    Transfer(hub, part).run()
    part.write_bytes(bytes(1000))
    wrong = Transfer(hub, part)
    with pytest.raises(Corrupt):
        wrong.run()
    assert (part.stat().st_size, wrong.counted) == (0, 0)


@pytest.mark.parametrize("size", [299_999, 300_001])
def test_a_file_of_another_size_than_the_hub_says_is_no_file(hub: Hub, tmp_path: Path, size: int) -> None:
    one = Transfer(hub, tmp_path / "part", size=size)
    with pytest.raises((Corrupt, DownloadError)):
        one.run(0.01)


def test_a_stop_ends_it_at_the_next_piece(hub: Hub, tmp_path: Path) -> None:
    one = Transfer(hub, tmp_path / "part")
    one.stop.set()
    with pytest.raises(Stopped):
        one.run()
    assert 0 < one.part.stat().st_size < 300_000


def test_a_file_under_its_git_id_is_checked_too(hub: Hub, tmp_path: Path) -> None:
    source = hub.repos[REPO] / "config.json"
    source.write_bytes(b'{"a": 1}\r\n')
    url = f"{hub.bytes_url}/bytes/{REPO}/config.json"
    part, told = tmp_path / "part", [].append
    fetch(RemoteFile("config.json", 10, digest(source), url), part, lambda _: None, threading.Event(), told, ())
    assert part.read_bytes() == source.read_bytes()
    with pytest.raises(Corrupt):
        fetch(RemoteFile("config.json", 10, "a" * 40, url), part, lambda _: None, threading.Event(), told, ())


def test_the_store_names_files_as_other_tools_do(tmp_path: Path) -> None:
    store = Store(tmp_path, REPO)
    store.blob("d" * 64).parent.mkdir(parents=True)
    store.blob("d" * 64).write_bytes(b"12")
    assert store.has("c" * 40, NAME, "d" * 64, 2)
    assert not store.has("c" * 40, NAME, "d" * 64, 3)
    store.link("c" * 40, f"sub/{NAME}", "d" * 64)
    pointer = tmp_path / "models--someone--model" / "snapshots" / ("c" * 40) / "sub" / NAME
    assert os.readlink(pointer) == f"../../../blobs/{'d' * 64}"
    store.link("c" * 40, f"sub/{NAME}", "d" * 64)
    assert [entry.name for entry in pointer.parent.iterdir()] == [NAME]
    store.set_ref("main", "c" * 40)
    assert (store.commit_of("main"), store.commit_of("none")) == ("c" * 40, "")
    assert not (store.folder / "refs" / ("c" * 40)).exists()


def test_published_names_are_found_in_any_spelling() -> None:
    assert {find_published(name).repo for name in ("tiny", "Tiny", "ling-tiny", "LING-3.0-TINY")} == {  # type: ignore[union-attr]
        "inclusionAI/Ling-3.0-tiny"
    }
    assert repository("fp4") == repository("flash-fp4") == "inclusionAI/Ling-3.0-flash-fp4"
    assert repository("dspark") == "inclusionAI/Ling-3.0-flash-dspark"
    assert find_published("tin") is None
    assert repository("me/mine") == "me/mine"
    assert len({row.name for row in PUBLISHED}) == len(PUBLISHED)


def test_sizes_are_said_as_disks_are_sold() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 15_786_785_600)] == ["0 B", "999 B", "1.0 kB", "15.8 GB"]
