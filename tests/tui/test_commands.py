"""The table of slash commands, without a screen: what a line is, and what it makes of a talk."""

from __future__ import annotations

import pytest

from ling_local.errors import UsageError
from ling_local.settings import Settings, resolve
from ling_local.tui.acts import ACTS
from ling_local.tui.commands import (
    ALIASES,
    CAN_SET,
    COMMANDS,
    Talk,
    block_is_open,
    help_text,
    read_line,
    unquote_block,
)


@pytest.fixture
def talk() -> Talk:
    settings = resolve({}, environ={}, file=None)
    return Talk(settings, settings)


def run(talk: Talk, line: str) -> tuple[Settings, str]:
    command, argument = read_line(line)
    return command.run(talk, argument)


def after(talk: Talk, *lines: str) -> Talk:
    for line in lines:
        talk = Talk(run(talk, line)[0], talk.started)
    return talk


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("hello", "hello"),
        ("  indented", "  indented"),
        ("/usr/bin/env fails why?", "/usr/bin/env fails why?"),
        ("/home/x/.zshrc", "/home/x/.zshrc"),
        ("//literal", "/literal"),
        ("//", "/"),
        (" /exit", " /exit"),
        ('"""\n/exit\n"""', "/exit"),
        ('"""one"""', "one"),
        ('"""', '"""'),
        ('say """x"""', 'say """x"""'),
    ],
)
def test_text_goes_to_the_model(line: str, text: str) -> None:
    assert read_line(line) == text


@pytest.mark.parametrize("line", ["", " ", "\n \t"])
def test_blank_lines_are_nothing(line: str) -> None:
    assert read_line(line) is None


def test_every_command_and_alias_is_found_in_any_case() -> None:
    for word in (*COMMANDS, *ALIASES):
        for spelling in (word, word.upper()):
            command = COMMANDS[ALIASES.get(word, word)]
            assert read_line(f"/{spelling} ") == (command, "")
            if command.argument:
                assert read_line(f"/{spelling}  some argument ") == (command, "some argument")
            else:
                with pytest.raises(UsageError, match="takes nothing after it"):
                    read_line(f"/{spelling} 2")


@pytest.mark.parametrize(
    ("line", "meant"),
    [("/eixt", "/exit"), ("/hlep", "/help"), ("/sesions", "/sessions"), ("/temp", ""), ("/", ""), ("/xyzzy", "")],
)
def test_a_typo_gets_the_nearest_and_never_goes_to_the_model(line: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_line(line)
    assert (f"Did you mean '{meant}'?" in caught.value.message) == bool(meant)


def test_where_few_commands_can_be_used_no_other_is_known() -> None:
    assert read_line("/q", ("help", "exit")) == (COMMANDS["exit"], "")
    with pytest.raises(UsageError, match="no such command"):
        read_line("/undo", ("help", "exit"))
    assert len(help_text("", ("help", "exit"), ("a key",)).splitlines()) == 4


def test_the_issue_s_commands_are_all_there() -> None:
    wanted = (
        "help set show system think stats tokens clear undo regen edit read save load sessions copy model bench exit"
    )
    assert set(wanted.split()) <= set(COMMANDS)


def test_help_fits_eighty_columns_and_names_all() -> None:
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"/{name}") for line in lines) for name in COMMANDS)
    assert "editor" in help_text("edit")
    assert help_text("/status").startswith("/stats")
    with pytest.raises(UsageError, match="Did you mean '/exit'"):
        help_text("eixt")


def test_what_is_no_setting_is_an_act() -> None:
    assert set(ACTS) | {"exit"} == {name for name, command in COMMANDS.items() if command.run is None}


@pytest.mark.parametrize(
    "line",
    [
        *("/set temp 1", "/set temperature abc", "/set temperature -1", "/set max_tokens 1.5", "/set model x"),
        *("/set device cuda", "/set temperature none", "/show nosuch", "/think maybe", "/think -3"),
    ],
)
def test_a_bad_value_is_refused(talk: Talk, line: str) -> None:
    with pytest.raises(UsageError):
        run(talk, line)


def test_set_show_and_default(talk: Talk) -> None:
    assert run(talk, "/set temperature 0.2")[1] == "temperature = 0.2"
    warm = after(talk, "/set temperature 0.2")
    assert warm.settings["temperature"] == 0.2
    assert "temperature   0.2  (was 0)" in run(warm, "/show")[1]
    assert run(warm, "/set temperature")[1] == "temperature = 0.2"
    assert after(warm, "/set temperature default").settings["temperature"] == 0
    assert after(talk, "/set show-thinking true").settings["show_thinking"] is True
    assert len(run(talk, "/set")[1].splitlines()) == len(CAN_SET)


def test_zero_and_none_are_values(talk: Talk) -> None:
    assert after(talk, "/set max_tokens 0").settings["max_tokens"] == 0
    assert after(talk, "/think 0").settings["think_budget"] == 0
    for name, text in (("seed", "7"), ("think_budget", "9"), ("system", "x"), ("stop", "END")):
        assert after(talk, f"/set {name} {text}", f"/set {name} none").settings[name] == talk.settings[name]


def test_think(talk: Talk) -> None:
    off = after(talk, "/think off")
    assert off.settings["think"] is False
    budget = after(off, "/think 300")
    assert (budget.settings["think"], budget.settings["think_budget"]) == (True, 300)
    assert after(budget, "/think none").settings["think_budget"] is None
    assert after(talk, "/think show").settings["show_thinking"] is True
    assert after(talk, "/think hide").settings["show_thinking"] is False
    with pytest.raises(UsageError, match="Did you mean 'show'"):
        run(talk, "/think shwo")
    assert "budget 300" in run(budget, "/think")[1]


def test_system(talk: Talk) -> None:
    brief = after(talk, '/system """Be\nbrief."""')
    assert brief.settings["system"] == "Be\nbrief."
    assert "Be\nbrief." in run(brief, "/system")[1]
    assert after(brief, "/system none").settings["system"] is None


def test_blocks() -> None:
    assert block_is_open('"""one\ntwo')
    assert not block_is_open('"""one\ntwo"""')
    assert not block_is_open('one """')
    assert unquote_block('"""\none\n\ntwo\n"""') == "one\n\ntwo"
