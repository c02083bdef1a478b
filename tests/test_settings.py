"""Where a setting comes from, what is refused, and what is only warned about."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ling_local import settings
from ling_local.errors import ConfigError, UsageError
from ling_local.settings import KEPT, TABLE, parse, resolve, terminal_hints, with_model


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_a_flag_beats_the_variable_beats_the_file_beats_the_default(config: Path) -> None:
    config.write_text("temperature = 0.3\ntop_k = 7\ntop_p = 0.5\n")
    found = resolve({"temperature": "0.1"}, {"LING_TEMPERATURE": "0.2", "LING_TOP_K": "9"}, config)
    assert (found["temperature"], found["top_k"], found["top_p"], found["ctx"]) == (0.1, 9, 0.5, 0)
    assert found.sources["temperature"] == "flag --temperature"
    assert found.sources["top_k"] == "LING_TOP_K"
    assert found.sources["top_p"] == "config.toml:3"
    assert found.sources["ctx"] == "default"


def test_the_model_fills_in_only_what_nobody_chose(tmp_path: Path, config: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20}))
    chosen = resolve({"temperature": "0"}, {}, config)
    found = with_model(chosen, tmp_path)
    assert (found["temperature"], found["top_p"], found["top_k"]) == (0.0, 0.95, 20)
    assert found.sources["top_p"] == "generation_config.json"


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path, config: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    assert with_model(resolve({}, {}, config), tmp_path)["temperature"] == 0.0


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}', '{"top_k": -4}'])
def test_a_broken_generation_config_is_said_and_changes_nothing(tmp_path: Path, config: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    before = resolve({}, {}, config)
    after = with_model(before, tmp_path)
    assert after.values == before.values
    assert len(after.warnings) == 1
    assert "generation_config.json" in after.warnings[0]


@pytest.mark.parametrize("name", sorted(KEPT))
def test_every_kept_setting_has_a_variable_that_works(name: str, config: Path) -> None:
    row = KEPT[name]
    other = {"int": "3", "float": "0.25", "bool": "0" if row.default else "1", "str": "word", "list": "END"}
    text = row.choices[-1] if row.choices else other[row.kind]
    found = resolve({}, {row.variable: text}, config)
    assert found.sources[name] == row.variable
    assert found[name] == parse(row, text)
    assert found[name] != row.default


def test_unknown_variable_is_one_warning_with_the_nearest_name(config: Path) -> None:
    found = resolve({}, {"LING_TEMPRATURE": "1", "LINGUA": "x"}, config)
    assert found.warnings == ("unknown variable LING_TEMPRATURE; did you mean LING_TEMPERATURE?",)


def test_unknown_key_is_one_warning_with_line_and_nearest_name_and_other_keys_are_kept(config: Path) -> None:
    config.write_text("# mine\ntemprature = 0.2\ntop_k = 5\n")
    found = resolve({}, {}, config)
    assert found.warnings == (f"{config}:2: unknown key temprature; did you mean temperature?",)
    assert found["top_k"] == 5


def test_a_section_is_unknown_and_says_where_its_key_belongs(config: Path) -> None:
    config.write_text("top_k = 5\n\n[sampling]\ntemperature = 0.2\n")
    found = resolve({}, {}, config)
    assert len(found.warnings) == 1
    assert f"{config}:3: unknown section [sampling]" in found.warnings[0]
    assert "temperature" in found.warnings[0]
    assert found["temperature"] == 0.0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('temperature = "hot"', "temperature must be a number"),
        ("temperature = true", "temperature must be a number"),
        ("top_k = 1.5", "top_k must be a whole number"),
        ("top_p = 1.5", "out of range"),
        ("think = 1", "think must be true or false"),
        ("stop = [1]", "stop must be a list of texts"),
        ('device = "gpu"', "not one of cpu, cuda"),
        (f"temperature = 1{400 * '0'}", "out of range"),
        (f"top_k = {2**31}", "must be at most 2147483647"),
    ],
)
def test_a_wrong_value_in_the_file_names_file_and_line(config: Path, line: str, words: str) -> None:
    config.write_text(f"seed = 1\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, config)
    assert words in caught.value.message
    assert f"{config}:2" in caught.value.message
    assert caught.value.exit_code == 2


def test_bom_crlf_and_tabs_lose_no_key(config: Path) -> None:
    config.write_bytes(b"\xef\xbb\xbftemperature = 0.5\r\n\ttop_k\t= 4\r\nstop = ['a',\r\n 'b']\r\n")
    found = resolve({}, {}, config)
    assert (found["temperature"], found["top_k"], found["stop"]) == (0.5, 4, ("a", "b"))
    assert found.warnings == ()


def test_dashes_in_keys_are_understood_and_an_int_serves_as_a_number(config: Path) -> None:
    config.write_text("max-tokens = 12\ntemperature = 1\n")
    found = resolve({}, {}, config)
    assert found["max_tokens"] == 12
    assert isinstance(found["temperature"], float)


def test_an_empty_or_missing_file_is_no_trouble(config: Path) -> None:
    assert resolve({}, {}, config).warnings == ()
    config.write_bytes(b"")
    assert resolve({}, {}, config).warnings == ()


@pytest.mark.parametrize(
    "content",
    [
        b"temperature = \n",
        b"temperature = 0.1\ntop_k = = 2\n",
        b"\xff\xfe",
        b"seed = " + 5000 * b"1",
        b"a = " + 5000 * b"[",
    ],
    ids=len,
)
def test_a_file_that_is_no_toml_is_refused_whole(config: Path, content: bytes) -> None:
    config.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, config)
    assert str(config) in caught.value.message


def test_a_folder_in_place_of_the_file_is_said(config: Path) -> None:
    config.mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        resolve({}, {}, config)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "abc"),
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("top_p", "2"),
        ("max_tokens", "-1"),
        ("max_tokens", "1.5"),
        ("seed", "x"),
        ("tokens", "0"),
        ("until", "blok"),
    ],
)
def test_a_bad_flag_value_names_its_flag(name: str, text: str, config: Path) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({name: text}, {}, config)
    assert caught.value.message.startswith(TABLE[name].flag)


def test_a_bad_variable_names_itself(config: Path) -> None:
    with pytest.raises(ConfigError, match="LING_THINK: 'maybe' is not true or false"):
        resolve({}, {"LING_THINK": "maybe"}, config)


def test_zero_and_empty_are_values(config: Path) -> None:
    found = resolve({"max_tokens": "0", "prompt": "", "system": ""}, {"LING_SEED": "0"}, config)
    assert (found["max_tokens"], found["prompt"], found["system"], found["seed"]) == (0, "", "", 0)


def test_every_row_is_complete_and_its_default_is_allowed() -> None:
    for row in TABLE.values():
        assert row.help, row.name
        assert row.flag.startswith("--"), row.name
        if row.default is not None:
            assert settings.check(row, row.default, row.name) == row.default


@pytest.mark.parametrize(
    ("environ", "dumb", "no_color"),
    [
        ({}, True, False),
        ({"TERM": ""}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, False, False),
    ],
)
def test_terminal_hints(environ: dict[str, str], dumb: bool, no_color: bool) -> None:
    assert terminal_hints(environ) == settings.TerminalHints(dumb, no_color)


def test_a_user_without_a_home_lives_in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    from ling_local import paths

    monkeypatch.setenv("HOME", "somewhere")  # a relative one counts as none
    paths.ensure_home()
    assert Path.home() == Path("/")
    assert paths.config_file().is_absolute()


def test_an_empty_xdg_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ling_local import paths

    monkeypatch.setenv("HOME", str(tmp_path / "a b 張"))
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(variable, "")
    places = (paths.config_file(), paths.state_dir(), paths.cache_dir(), paths.models_dir(), paths.hugging_face_cache())
    assert all(place.is_relative_to(tmp_path / "a b 張") for place in places)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert paths.config_file() == tmp_path / "xdg" / "ling" / "config.toml"


def test_private_files_are_0600_from_the_start_and_loose_ones_are_tightened(tmp_path: Path) -> None:
    from ling_local import paths

    old_mask = os.umask(0o022)
    try:
        file = tmp_path / "state" / "words.txt"
        with os.fdopen(paths.open_private(file), "w") as target:
            assert file.stat().st_mode & 0o777 == 0o600
            target.write("x")
        assert file.parent.stat().st_mode & 0o777 == 0o700
        file.chmod(0o644)
        file.parent.chmod(0o755)
        os.close(paths.open_private(file))
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert file.read_text() == ""
    finally:
        os.umask(old_mask)
