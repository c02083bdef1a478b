"""The table of slash commands, without a screen: what a line is, and what it makes of a talk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ling_local.settings import resolve
from ling_local.tui.acts import _ACTS
from ling_local.tui.commands import ALIASES, CAN_SET, COMMANDS, Called, Mistyped, Said, read_line
from ling_local.tui.talk import Act, Do, Outcome, Talk, block_is_open, unquote_block
from ling_local.types import Message

ASKED = (Message("user", "why?"), Message("assistant", "because"))


@pytest.fixture
def talk() -> Talk:
    settings = resolve({}, environ={}, file=None)
    return Talk(settings, settings)


def run(talk: Talk, line: str) -> Outcome:
    called = read_line(line)
    assert isinstance(called, Called), line
    return called.command.run(talk, called.argument)


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
    assert read_line(line) == Said(text)


@pytest.mark.parametrize("line", ["", " ", "\n \t"])
def test_blank_lines_are_nothing(line: str) -> None:
    assert read_line(line) is None


def test_every_command_and_alias_is_found_in_any_case() -> None:
    for word in (*COMMANDS, *ALIASES):
        for spelling in (word, word.upper()):
            called = read_line(f"/{spelling}  some argument ")
            assert isinstance(called, Called)
            assert called.command is COMMANDS[ALIASES.get(word, word)]
            assert called.argument == "some argument"


@pytest.mark.parametrize(
    ("line", "meant"),
    [("/eixt", "/exit"), ("/hlep", "/help"), ("/sesions", "/sessions"), ("/temp", ""), ("/", ""), ("/xyzzy", "")],
)
def test_a_typo_gets_the_nearest_and_never_goes_to_the_model(line: str, meant: str) -> None:
    mistyped = read_line(line)
    assert isinstance(mistyped, Mistyped)
    assert (f"Did you mean '{meant}'?" in mistyped.message) == bool(meant)


def test_the_issue_s_commands_are_all_there() -> None:
    wanted = (
        "help set show system think stats tokens clear undo regen edit read save load sessions copy model bench exit"
    )
    assert set(wanted.split()) <= set(COMMANDS)


def test_help_fits_eighty_columns_and_names_all(talk: Talk) -> None:
    lines = run(talk, "/help").text.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"/{name}") for line in lines) for name in COMMANDS)
    assert "editor" in run(talk, "/help edit").text
    assert "Did you mean '/exit'?" in run(talk, "/help eixt").text


def test_what_a_command_wants_done_can_be_done() -> None:
    assert set(_ACTS) | {Do.EXIT} == set(Do)


@pytest.mark.parametrize(
    "line",
    [
        *("/set temp 1", "/set temperature abc", "/set temperature -1", "/set max_tokens 1.5", "/set model x"),
        *("/set device cuda", "/show nosuch", "/think maybe", "/think -3", "/undo", "/regen", "/copy"),
        *("/copy sideways", "/bench x", "/bench 0", "/read", "/load"),
    ],
)
def test_a_bad_value_changes_nothing(talk: Talk, line: str) -> None:
    outcome = run(talk, line)
    assert outcome.failed
    assert outcome.text
    assert outcome.talk == talk
    assert outcome.act is None


def test_set_show_and_default(talk: Talk) -> None:
    outcome = run(talk, "/set temperature 0.2")
    assert (outcome.text, outcome.talk.settings["temperature"]) == ("temperature = 0.2", 0.2)
    assert "temperature   0.2  (was 0)" in run(outcome.talk, "/show").text
    assert run(outcome.talk, "/set temperature").text == "temperature = 0.2"
    assert run(outcome.talk, "/set temperature default").talk.settings["temperature"] == 0
    assert run(talk, "/set show-thinking true").act == Act(Do.SHOW_THINKING, "on")
    assert len(run(talk, "/set").text.splitlines()) == len(CAN_SET)


def test_zero_and_empty_are_values(talk: Talk) -> None:
    assert run(talk, "/set max_tokens 0").talk.settings["max_tokens"] == 0
    assert run(talk, "/think 0").talk.settings["think_budget"] == 0


def test_think(talk: Talk) -> None:
    off = run(talk, "/think off").talk
    assert off.settings["think"] is False
    budget = run(off, "/think 300").talk
    assert (budget.settings["think"], budget.settings["think_budget"]) == (True, 300)
    assert run(budget, "/think none").talk.settings["think_budget"] is None
    assert run(talk, "/think show").act == Act(Do.SHOW_THINKING, "on")
    assert run(talk, "/think hide").act == Act(Do.SHOW_THINKING, "off")
    assert "Did you mean 'show'?" in run(talk, "/think shwo").text
    assert "budget 300" in run(budget, "/think").text


def test_system(talk: Talk) -> None:
    outcome = run(talk, '/system """Be\nbrief."""')
    assert outcome.talk.settings["system"] == "Be\nbrief."
    assert "Be\nbrief." in run(outcome.talk, "/system").text
    assert run(outcome.talk, "/system none").talk.settings["system"] is None


def test_undo_regen_edit_on_a_talk(talk: Talk) -> None:
    asked = replace(talk, messages=ASKED)
    assert run(asked, "/undo").act == Act(Do.UNDO)
    assert run(asked, "/regen").act == Act(Do.RESEND, "why?")
    assert "temperature is 0" in run(asked, "/regen").text
    warm = run(asked, "/set temperature 0.8").talk
    assert run(warm, "/regen").text == ""
    assert run(asked, "/edit").act == Act(Do.EDIT, "why?", replaces=True)
    assert run(asked, "/edit new").act == Act(Do.EDIT, "new")
    assert run(talk, "/edit").act == Act(Do.EDIT, "")
    assert run(asked, "/copy").act == Act(Do.COPY, "answer")


def test_blocks() -> None:
    assert block_is_open('"""one\ntwo')
    assert not block_is_open('"""one\ntwo"""')
    assert not block_is_open('one """')
    assert unquote_block('"""\none\n\ntwo\n"""') == "one\n\ntwo"
