"""`ling pull` against a Hub on this machine: the real program, real HTTP, real files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hub_server import LARGE, Hub, digest, serve
from program import COMMAND, ESC, Program, Result, seen, watch

TINY = "inclusionAI/Ling-3.0-tiny"
FLASH = "inclusionAI/Ling-3.0-flash"
GOLDEN = Path(__file__).parents[1] / "golden" / "flashlike"
DEMO = Path(__file__).parents[2] / "ling_local" / "data" / "demo"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAMES = ("config.json", "model.safetensors.index.json", FIRST, SECOND)
SLOW = 250_000.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub that publishes a small checkpoint as tiny, with a file that is of no use to us."""
    folder = tmp_path / "published"
    folder.mkdir()
    for name in NAMES:
        shutil.copy(GOLDEN / name, folder / name)
    (folder / "README.md").write_text("a model\n")
    (folder / "LICENSE").write_text("do what you like\n")
    (folder / "training.bin").write_bytes(bytes(10))
    with serve() as hub:
        hub.repos[TINY] = folder
        yield hub


Pull = Callable[..., Result]


@pytest.fixture
def pull(ling: Program, hub: Hub) -> Pull:
    def run(*args: str, env: dict[str, str | None] | None = None) -> Result:
        return ling("pull", *args, stdin=None, env={"HF_ENDPOINT": hub.url, **(env or {})})

    return run


def repo_folder(ling: Program, repo: str = TINY) -> Path:
    return ling.home / ".cache/huggingface/hub" / f"models--{repo.replace('/', '--')}"


def parts(ling: Program) -> list[Path]:
    return sorted(repo_folder(ling).glob("blobs/*.incomplete"))


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def test_a_published_name_is_fetched_checked_and_found(ling: Program, hub: Hub, pull: Pull) -> None:
    done = pull("tiny")
    assert done.code == 0, done.err
    folder = Path(done.text.strip())
    assert folder == repo_folder(ling) / "snapshots" / hub.commit(TINY)
    assert {file.name for file in folder.iterdir()} == {*NAMES, "README.md", "LICENSE"}
    for file in folder.iterdir():
        assert file.read_bytes() == (hub.repos[TINY] / file.name).read_bytes()
        assert file.resolve().name == digest(hub.repos[TINY] / file.name)
    assert "6 files, 1.0 MB" in done.err
    assert "GB free" in done.err
    assert "sizes and hashes are right" in done.err
    assert parts(ling) == []
    rows = {row["name"]: row for row in ling("models", "--json").json["models"]}
    assert rows[TINY]["usable"] is True
    assert Path(rows[TINY]["folder"]) == folder


def test_every_spelling_means_the_same_and_a_second_pull_transfers_nothing(hub: Hub, pull: Pull) -> None:
    first = pull(TINY)
    sent = hub.sent_bytes
    for name in ("tiny", "ling-tiny", "Ling-3.0-tiny", TINY.lower()):
        again = pull(name)
        assert (again.code, again.out) == (0, first.out)
        assert "is here already" in again.err
    assert hub.sent_bytes == sent


def test_the_demo_from_the_hub_answers_under_its_name(ling: Program, hub: Hub, pull: Pull) -> None:
    hub.repos[TINY] = DEMO
    assert pull("tiny", "--quiet").err == ""
    done = ling("complete", "-p", "def add(a, b):\n", "-n", "4", "-m", "tiny", "--json", "-v")
    assert done.code == 0, done.err
    assert done.json["model"]["id"] == "Ling-3.0-tiny"
    assert done.json["model"]["drafter"] == "dspark"  # its subfolder came along
    assert "loaded Ling-3.0-tiny: 9.7 M parameters, float32 on cpu" in done.err
    assert "ling: model: " in done.err
    assert "loaded" not in ling("complete", "-p", "x", "-n", "1", "-m", "tiny", "--no-verbose").err


@pytest.mark.parametrize(
    ("kind", "at"), [("break", 200_000), ("break", 0), ("status", 503), ("status", 429), ("other range", 0)]
)
def test_what_fails_and_recovers_is_gone_on_with(hub: Hub, pull: Pull, kind: str, at: int) -> None:
    hub.fail(FIRST, "break", 1, 100_000)
    hub.fail(FIRST, kind, 1, at)
    done = pull("tiny", "--json")
    assert done.code == 0, done.err
    assert f"{FIRST}: " in done.err
    assert "going on from 17 %" in done.err
    begun = hub.starts(FIRST)
    assert 100_000 in begun
    assert done.json["received_bytes"] == sum((hub.repos[TINY] / name).stat().st_size for name in NAMES) + 25
    assert done.json["revision"] == hub.commit(TINY)


def test_a_server_that_cannot_continue_is_read_from_the_start(hub: Hub, pull: Pull) -> None:
    hub.ranges = False
    hub.fail(FIRST, "break", 1, 300_000)
    done = pull("tiny")
    assert done.code == 0, done.err
    assert (Path(done.text.strip()) / FIRST).read_bytes() == (hub.repos[TINY] / FIRST).read_bytes()


def test_damaged_bytes_are_fetched_again_and_never_kept(ling: Program, hub: Hub, pull: Pull) -> None:
    hub.fail(SECOND, "corrupt")
    done = pull("tiny")
    assert done.code == 0, done.err
    assert f"{SECOND}: what came is damaged; fetching it again" in done.err
    assert (Path(done.text.strip()) / SECOND).read_bytes() == (hub.repos[TINY] / SECOND).read_bytes()


def test_bytes_that_stay_damaged_are_an_error_and_no_model(ling: Program, hub: Hub, pull: Pull) -> None:
    hub.fail(SECOND, "corrupt", 99)
    done = pull("tiny")
    assert (done.code, done.out) == (1, b"")
    assert f"ling: {SECOND} arrives damaged: its hash is not the one that the Hub gives" in done.err
    assert not (repo_folder(ling) / "snapshots" / hub.commit(TINY) / SECOND).exists()
    listed = {row["name"]: row for row in ling("models", "--json").json["models"]}
    assert listed[TINY]["problem"] in (f"{FIRST} is missing", f"{SECOND} is missing")
    refused = ling("chat", "-p", "hi", "-m", "tiny")
    assert refused.code == 1
    assert f"ling pull {TINY}" in refused.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_stopped_pull_goes_on_where_it_was_three_times(
    ling: Program, hub: Hub, pull: Pull, number: signal.Signals
) -> None:
    hub.bytes_per_s = SLOW
    whole = (hub.repos[TINY] / FIRST).stat().st_size
    part = repo_folder(ling) / "blobs" / f"{digest(hub.repos[TINY] / FIRST)}.incomplete"
    reached = 0
    for _ in range(3):
        child = ling.start("pull", "tiny", env={"HF_ENDPOINT": hub.url})
        goal = reached + whole // 5
        wait_for(lambda goal=goal: part.exists() and part.stat().st_size >= goal)
        os.killpg(child.pid, number)
        _, err = child.communicate(timeout=30)
        assert child.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        if number != signal.SIGKILL:
            assert b"are kept: `ling pull tiny` goes on from there" in err
        assert len(parts(ling)) <= 2  # one for each file, not one for each try
        reached = part.stat().st_size
    listed = ling("models").text
    assert "incomplete" in listed
    assert "`ling pull inclusionAI/Ling-3.0-tiny` goes on" in listed
    hub.bytes_per_s = 0
    before = hub.sent_bytes
    done = pull("tiny")
    assert done.code == 0, done.err
    assert "of it are here, the rest follows" in done.err
    assert hub.starts(FIRST)[-1] >= reached
    assert hub.sent_bytes - before < whole + (hub.repos[TINY] / SECOND).stat().st_size - reached
    assert parts(ling) == []


def test_a_new_version_starts_cleanly_and_the_old_one_works_until_it_is_whole(
    ling: Program, hub: Hub, pull: Pull
) -> None:
    old = Path(pull("tiny").text.strip())
    changed = hub.repos[TINY] / SECOND
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(bytes(data))
    hub.fail(SECOND, "corrupt", 99)
    assert pull("tiny").code == 1
    usable = {row["name"]: row for row in ling("models", "--json").json["models"]}[TINY]
    assert (Path(usable["folder"]), usable["usable"]) == (old, True)
    hub.faults.clear()
    before = hub.sent_bytes
    new = Path(pull("tiny").text.strip())
    assert new != old
    assert (new / SECOND).read_bytes() == bytes(data)
    assert hub.sent_bytes - before <= len(data) + 100_000  # what did not change is not sent again


def test_a_part_of_a_version_that_is_gone_is_removed(ling: Program, hub: Hub, pull: Pull) -> None:
    stale = repo_folder(ling) / "blobs" / f"{'a' * 64}.incomplete"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(bytes(1000))
    other = stale.with_name(f"{'b' * 64}.0123abcd.incomplete")  # of another tool, which may be at work
    other.write_bytes(bytes(10))
    assert pull("tiny").code == 0
    assert not stale.exists()
    assert other.exists()


def test_verify_finds_and_repairs_a_damaged_file(ling: Program, hub: Hub, pull: Pull) -> None:
    folder = Path(pull("tiny").text.strip())
    blob = (folder / FIRST).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(bytes(data))
    assert "is here already" in pull("tiny").err  # sizes agree: only a hash can tell
    done = pull("tiny", "--verify")
    assert done.code == 0, done.err
    assert f"{FIRST} is damaged on this disk; fetching it again" in done.err
    assert (folder / FIRST).read_bytes() == (hub.repos[TINY] / FIRST).read_bytes()
    again = pull("tiny", "--verify", "--json")
    assert again.json["received_bytes"] == 0
    assert "sizes and hashes are right" in again.err


def test_a_short_file_is_fetched_again_without_being_asked(hub: Hub, pull: Pull) -> None:
    folder = Path(pull("tiny").text.strip())
    blob = (folder / FIRST).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    assert pull("tiny").code == 0
    assert (folder / FIRST).read_bytes() == (hub.repos[TINY] / FIRST).read_bytes()


def test_two_pulls_at_once_wait_for_each_other(ling: Program, hub: Hub) -> None:
    hub.bytes_per_s = SLOW / 10  # until the second waits
    env = {"HF_ENDPOINT": hub.url}
    first = ling.start("pull", "tiny", env=env)
    wait_for(lambda: bool(parts(ling)))
    second = ling.start("pull", "tiny", env=env)
    assert second.stderr is not None
    assert any(b"another pull of this model is under way; waiting for it" in line for line in second.stderr)
    hub.bytes_per_s = 0
    texts = [child.communicate(timeout=60)[1].decode() for child in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), texts
    assert len(hub.starts(FIRST)) == 2  # the redirect and the bytes, once


def test_a_format_that_ling_does_not_read_is_refused_with_the_reason(hub: Hub, pull: Pull) -> None:
    for name, words in (("fp8", "fp8"), ("int4", "int4"), ("fp4", "mxfp4"), ("tiny-int4", "int4")):
        done = pull(name)
        assert (done.code, done.out) == (1, b"")
        assert f"its weights are {words}; ling reads bf16 so far" in done.err
    assert hub.asked == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"architectures": 5}, "architectures is 5"),
    ],
)
def test_a_repository_that_ling_could_not_load_is_refused_before_its_weights(
    ling: Program, hub: Hub, pull: Pull, config: dict[str, object], words: str
) -> None:
    file = hub.repos[TINY] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    hub.repos["someone/other"] = hub.repos[TINY]
    done = pull("someone/other")
    assert (done.code, done.out) == (1, b"")
    assert "is not fetched, ling could not use it" in done.err
    assert words in done.err
    assert not repo_folder(ling, "someone/other").exists()
    assert hub.starts(FIRST) == []


@pytest.mark.parametrize("missing", ["config.json", LARGE])
def test_a_repository_without_a_model_is_refused(hub: Hub, pull: Pull, missing: str) -> None:
    for file in hub.repos[TINY].glob(f"*{missing}"):
        file.unlink()
    done = pull("tiny")
    assert done.code == 1
    assert missing in done.err


def test_wrong_names_say_what_is_wrong(hub: Hub, pull: Pull) -> None:
    hub.gated.add(TINY)
    for args, code, words in (
        ([], 2, "pull what?"),
        ([""], 2, "pull what?"),
        (["tny"], 1, "Did you mean tiny?"),
        (["a/b/c"], 2, "'a/b/c' is no name of a repository"),
        (["no/such"], 1, "there is no repository 'no/such'"),
        (["tiny"], 1, "only to accounts that accepted its terms"),
        (["tiny", "--revision", "v9"], 1, "terms"),
    ):
        done = pull(*args)
        assert (done.code, done.out) == (code, b""), done.err
        assert words in done.err
    hub.gated.clear()
    done = pull("tiny", "--revision", "v9")
    assert "has no revision 'v9'" in done.err
    hub.gated.add(TINY)
    assert pull("tiny", env={"HF_TOKEN": "hf_secret"}).code == 0
    assert hub.tokens_leaked == 0


def test_a_commit_can_be_pulled_by_its_id(ling: Program, hub: Hub, pull: Pull) -> None:
    done = pull("tiny", "--revision", hub.commit(TINY))
    assert done.code == 0, done.err
    assert not (repo_folder(ling) / "refs").exists()
    assert ling("models", "--json").json["models"][1]["usable"] is True


@pytest.mark.parametrize(
    ("args", "env", "source"),
    [
        (["--offline"], {}, "--offline"),
        ([], {"LING_OFFLINE": "1"}, "LING_OFFLINE"),
        ([], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ([], {"TRANSFORMERS_OFFLINE": "YES"}, "TRANSFORMERS_OFFLINE"),
    ],
)
def test_offline_asks_nobody(hub: Hub, pull: Pull, args: list[str], env: dict[str, str | None], source: str) -> None:
    done = pull("tiny", *args, env=env)
    assert (done.code, done.out) == (1, b"")
    assert source in done.err
    assert hub.asked == []


def test_a_token_that_cannot_be_read_is_no_matter_of_the_network(hub: Hub, pull: Pull) -> None:
    done = pull("tiny", env={"HF_HOME": "/dev/null/home"})
    assert (done.code, hub.asked) == (1, [])
    assert done.err.startswith("ling: /dev/null/home/token cannot be read: Not a directory")


def test_a_flag_of_ours_beats_the_variable_of_the_hub(pull: Pull) -> None:
    done = pull("tiny", "--online", env={"HF_HUB_OFFLINE": "1"})
    assert done.code == 0, done.err


def test_offline_a_whole_model_is_good_enough(ling: Program, hub: Hub, pull: Pull) -> None:
    folder = pull("tiny").text
    hub.asked.clear()
    done = pull("tiny", "--offline")
    assert (done.code, done.text) == (0, folder)
    assert "not compared with the Hub: offline" in done.err
    assert pull("tiny", "--offline", "--verify").code == 2
    assert hub.asked == []
    away = ling("chat", "-m", "flash", "-p", "x", "--offline")
    assert "offline now" in away.err


def test_a_hub_that_cannot_be_reached_is_one_line(ling: Program) -> None:
    done = ling("pull", "tiny", "--json", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "nothing comes from http://127.0.0.1:9" in done.err
    assert done.json["error"]["kind"] == "DownloadError"


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(ling: Program, hub: Hub, pull: Pull) -> None:
    hub.sizes[SECOND] = 10**16
    done = pull("tiny")
    assert (done.code, done.out) == (1, b"")
    assert "needs 10000000.0 GB more in" in done.err
    assert " are free there" in done.err
    assert not (ling.home / ".cache").exists()
    assert hub.starts(FIRST) == []


def test_a_disk_that_fills_up_midway_keeps_the_part(ling: Program, hub: Hub) -> None:
    env = ling.environment({"HF_ENDPOINT": hub.url})
    script = f"ulimit -f 250; exec {' '.join(COMMAND)} pull tiny"  # no file of more than 250 KiB
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot write to " in done.stderr
    assert "File too large" in done.stderr
    assert "goes on from there" in done.stderr
    assert 0 < max(part.stat().st_size for part in parts(ling)) <= 256_000
    assert ling("pull", "tiny", env={"HF_ENDPOINT": hub.url}).code == 0


def test_a_cache_that_cannot_be_written_is_one_line(ling: Program, hub: Hub, pull: Pull) -> None:
    place = ling.home / "cache"
    place.write_text("a file where the cache should be")
    done = pull("tiny", env={"HF_HUB_CACHE": str(place)})
    assert done.code == 1
    assert f"cannot write to {place}" in done.err
    assert "Traceback" not in done.err


def test_a_whole_model_needs_no_writing(ling: Program, hub: Hub, pull: Pull) -> None:
    first = pull("tiny")
    before = {file: file.lstat().st_mtime_ns for file in (ling.home / ".cache").rglob("*")}
    shutil.rmtree(ling.home / ".cache/huggingface/hub/.locks")
    assert pull("tiny").out == first.out
    after = {file: file.lstat().st_mtime_ns for file in (ling.home / ".cache").rglob("*")}
    assert {file for file in after if before.get(file) != after[file]} == {ling.home / ".cache/huggingface/hub"}
    assert not (ling.home / ".cache/huggingface/hub/.locks").exists()


def test_a_folder_of_ones_own_is_checked_not_fetched(hub: Hub, pull: Pull, tmp_path: Path) -> None:
    folder = tmp_path / "a b 張"
    shutil.copytree(GOLDEN, folder)
    assert pull(str(folder)).text == f"{folder}\n"
    (folder / SECOND).unlink()
    done = pull(str(folder))
    assert done.code == 1
    assert f"{SECOND} is missing" in done.err
    assert hub.asked == []


def test_a_drafter_is_put_beside_its_model(ling: Program, hub: Hub, pull: Pull, tmp_path: Path) -> None:
    model = tmp_path / "flash"
    shutil.copytree(DEMO, model, ignore=shutil.ignore_patterns("dspark"))
    hub.repos |= {FLASH: model, f"{FLASH}-dspark": DEMO / "dspark"}
    done = pull("dspark")
    assert done.code == 0, done.err
    assert f"drafts for {FLASH}, which is not here yet" in done.err
    assert f"{FLASH} drafts with {FLASH}-dspark from now on" in pull("flash").err
    answer = ling("complete", "-p", "def f():\n", "-n", "3", "-m", "flash", "--json")
    assert answer.json["model"]["drafter"] == "dspark"
    refused = ling("complete", "-p", "x", "-m", "dspark")
    assert refused.code == 1
    assert "is a drafter, which cannot answer by itself" in refused.err
    assert "drafter" in next(line for line in ling("models").text.splitlines() if "-dspark" in line)


def test_other_tools_and_ling_share_what_they_fetched(ling: Program, hub: Hub, pull: Pull) -> None:
    code = f"from huggingface_hub import snapshot_download as get; print(get({TINY!r}, local_files_only=ONLY))"
    env = ling.environment({"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"})

    def other(only: bool) -> str:
        command = [sys.executable, "-c", code.replace("ONLY", str(only))]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    theirs = other(False)
    sent = hub.sent_bytes
    assert pull("tiny").text.strip() == theirs
    assert hub.sent_bytes == sent
    shutil.rmtree(repo_folder(ling))
    ours = pull("tiny").text.strip()
    assert other(True) == ours


def test_a_terminal_gets_one_bar_and_it_is_taken_away(ling: Program, hub: Hub) -> None:
    hub.bytes_per_s = SLOW
    text, code = seen(watch(ling, "pull", "tiny", env={"HF_ENDPOINT": hub.url}))
    shown = text.decode()
    assert code == 0
    assert "█" in shown
    assert "kB/s" in shown
    assert shown.rstrip().endswith(hub.commit(TINY))
    assert "░" not in shown.replace("\r\n", "\n").rstrip().rpartition("\n")[2]


def test_a_pipe_gets_lines_now_and_then(ling: Program, hub: Hub, pull: Pull) -> None:
    hub.bytes_per_s = SLOW
    done = pull("tiny", "-v")
    assert done.code == 0
    assert ESC not in done.err.encode()
    assert "\r" not in done.err
    lines = [line for line in done.err.splitlines() if " % " in line]
    assert 2 <= len(lines) <= 12
    assert f"ling: to fetch: {FIRST}, 568.8 kB" in done.err
