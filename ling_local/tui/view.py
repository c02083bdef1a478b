"""The chat state as Rich renderables: the live lines, what is printed for good, the header.

Print what `finished` gives with `console.print(..., crop=False)`: code lines may be longer than the screen, and
are left to the terminal. Every text of a person, a model or a file is literal here: `Text`, never markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from ling_local.engine.protocol import EngineInfo, Progress
from ling_local.text.clean import visible
from ling_local.tui import figures
from ling_local.tui.blocks import Block, code_of
from ling_local.tui.events import Fold, Item, Line, Question, Summary, Thought
from ling_local.tui.figures import SEPARATOR, Part
from ling_local.tui.grown import newest_text
from ling_local.tui.markdown import Rendered, open_lines
from ling_local.tui.model import ChatState, StepMark, Turn
from ling_local.tui.wrap import clip, fold, wrap
from ling_local.types import Channel

MIN_STRIP, MAX_STRIP = 3, 32
_NARROW = 60
_STYLES = {"dim": "dim", "warning": "yellow", "error": "red", "": ""}
_LEVELS = "▂▃▄▅▆▇"


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that wrap at the width they are printed at; first stands before the first one, blanks before the rest."""

    text: Text
    first: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in wrap_after(self.text, self.first, options.max_width):
            yield from line.render(console, end="\n")


def header(version: str, model: str, note: str) -> list[RenderableType]:
    """What stands at the top: version and model, a note where there is one, the keys to know."""
    keys = "/help · Alt-Enter for a new line · Ctrl-C stops an answer · Ctrl-D leaves"
    lines = [Lines(Text(visible(f"ling {version}{SEPARATOR}{model}"), "bold"))]
    if note:
        lines.append(Lines(Text(visible(note), "dim")))
    return [*lines, Lines(Text(keys, "dim"))]


def finished(before: ChatState, after: ChatState, quiet: bool = True) -> list[RenderableType]:
    """What has become final between two states, in order, to be printed once. quiet: with the quiet lines."""
    items = after.log.after(len(before.log))
    return [show(item) for item in items if quiet or not isinstance(item, Summary)]


def typed(text: str) -> RenderableType:
    """A question as it stood in the prompt."""
    return Lines(Text(visible(text)), "› ")


def show(item: Item) -> RenderableType:
    """One item of the log."""
    match item:
        case Block():
            return Rendered(item)
        case Question():
            return Lines(Text(visible(item.text), "bold"), "› ")
        case Fold():
            spent = f"for {figures.duration(item.time_s)}, " if item.time_s is not None else ""
            cut = ", cut off" if item.cut else ""
            return Lines(Text(f"thought {spent}{item.tokens} tokens{cut}", "dim"), "▸ ")
        case Thought():
            return Lines(Text(item.text, "dim italic"), "  ")
        case Summary():
            return Quiet(item)
        case Line():
            return _line(item)
    raise TypeError(f"the screen cannot show {item!r}")


@dataclass(frozen=True, slots=True)
class Quiet:
    """The quiet line after an answer, as full as the width allows; first a word where there was no answer."""

    summary: Summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        item = self.summary
        parts = figures.summary_parts(item.stats, item.reason)
        if not item.answered and item.stats.thinking_tokens:
            parts.insert(0, Part("no answer: it was still thinking", 11))
        yield quiet_line(parts, options.max_width)


def live_lines(
    state: ChatState,
    width: int,
    height: int,
    colour: bool = True,
    waited_s: float | None = None,
    load: str = "",
) -> list[Text]:
    """What stands under the printed text while a turn runs: the open tail and the figures. [] between turns.

    Fewer lines than height and none wider than width; the work does not grow with the answer. Until the first token
    comes, waited_s (since the question was sent, by the drawer's clock) and load (how far the model is that it waits
    for, "" once it is there) are shown.
    """
    turn = state.turn
    if turn is None:
        return []
    room = max(height - 1, 1)
    if turn.stats.steps:
        foot = _figures(turn, width, colour)[-room:]
    else:
        what = "stopping" if turn.stopping else load or "reading the prompt"
        foot = [Text(clip(what if waited_s is None else f"{what} · {waited_s:.1f} s", width), "dim")]
    body = _body(state, turn, width, room - len(foot))
    return [*body[len(body) - max(room - len(foot), 0) :], *foot] if body else foot


def status(info: EngineInfo, state: ChatState) -> str:
    """One line for between the turns: what the model is and how full its context."""
    parts = [info.model, info.dtype, info.device, f"context {figures.count(info.context_limit)}"]
    last = state.turns[-1] if state.turns else None
    if last and last.ids and last.stats.context_limit:
        parts[-1] = figures.context(last.stats)
    return visible(SEPARATOR.join(parts))


def loading(progress: Progress | None) -> str:
    """How far a load is, in words: `loading weights 43 % of 61.2 GB`."""
    if progress is None:
        return "loading"
    share = f" {100 * progress.done // progress.total} %" if progress.total else ""
    size = f" of {progress.total / 1e9:.1f} GB" if progress.total >= 1e9 else ""
    return f"{visible(progress.stage)}{share}{size}"


def strip(marks: Sequence[StepMark], width: int, colour: bool = True) -> Text:
    """One glyph a step, the newest last: how much of what it drafted was accepted. █ all, ▁ nothing, · no drafts."""
    text = Text()
    for mark in marks[-width:] if width else ():
        share = mark.accepted / mark.drafted if mark.drafted else 0.0
        if not mark.drafted:
            glyph, style = "·", "dim"
        elif mark.accepted >= mark.drafted:
            glyph, style = "█", "green"
        elif mark.accepted:
            glyph, style = _LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)], "yellow"
        else:
            glyph, style = "▁", "red"
        text.append(glyph, style if colour else "")
    return text


def quiet_line(parts: Sequence[Part], width: int) -> Text:
    """`── 212 tok · TPOT 2.10 ms ──`, without the rules where the width is short."""
    rules = width >= 50
    kept = figures.fit(parts, width - 3 if rules else width)
    line = SEPARATOR.join(part.text for part in kept)
    if not rules:
        return Text(clip(line, width), "dim")
    end = " ──" if figures.line_width(kept) + 6 <= width else ""
    return Text(f"── {line}{end}", "dim")


def wrap_after(text: Text, first: str, width: int) -> list[Text]:
    """The text wrapped, with first before its first line and as many blanks before the others."""
    lines = wrap(text, max(width - len(first), 1))
    blank = " " * len(first)
    return [Text.assemble((blank if index else first, "dim"), line) for index, line in enumerate(lines)]


def _figures(turn: Turn, width: int, colour: bool) -> list[Text]:
    speed = figures.fit(figures.speed_parts(turn, width < _NARROW), width)
    if turn.stopping:
        speed = figures.fit([Part("stopping", 10, "yellow"), *speed], width)
    first = _joined(speed)
    room = min(width - first.cell_len - 1, MAX_STRIP)
    if turn.stats.drafted and room >= MIN_STRIP:
        first.append(" ")
        first.append_text(strip(turn.marks, room, colour))
    counts = figures.fit(figures.count_parts(turn, figures.thinking_time_s(turn)), width)
    second = _joined(counts)
    second.stylize("dim")
    return [first, second]


def _joined(parts: Sequence[Part]) -> Text:
    text = Text()
    for index, part in enumerate(parts):
        text.append(SEPARATOR if index else "", "dim")
        text.append(part.text, part.style)
    return text


def _body(state: ChatState, turn: Turn, width: int, room: int) -> list[Text]:
    """What is not finished, its newest room lines."""
    if room <= 0:
        return []
    if turn.channel is Channel.THINKING:
        return _thinking(state, turn, width)
    lines = _tail(turn, width, room)
    if turn.blocks.opened.gap and lines:
        lines.insert(0, Text())
    return lines[-room:]


def _thinking(state: ChatState, turn: Turn, width: int) -> list[Text]:
    newest = newest_text(turn.open_thought, 4 * width)
    if state.think_shown:
        return [Text(line, "dim italic") for line in fold(newest, width - 2)[-4:]] if newest.strip() else []
    seconds = figures.thinking_time_s(turn)
    spent = f" {figures.duration(seconds)}," if seconds is not None else ""
    head = Text(clip(f"▸ thinking{spent} {turn.stats.thinking_tokens} tokens  (/think show)", width), "dim")
    return [head, Text(f"  {_end_of(newest.strip(), width - 2)}", "dim italic")]


def _end_of(text: str, width: int) -> str:
    """The text's last cells, as many as fit."""
    if width < 2 or cell_len(text) <= width:
        return text[: max(width, 0)]
    kept = text[-width:]
    while cell_len(kept) >= width:
        kept = kept[1:]
    return "…" + kept


def _tail(turn: Turn, width: int, room: int) -> list[Text]:
    """The open block. However long it has become, only about a screenful of it is looked at."""
    limit = room * max(width, 1)
    source = turn.blocks.newest(limit + 1)
    whole = len(source) <= limit
    fence = turn.blocks.fence
    if fence is not None:
        if whole:
            source = code_of(Block(source, fence=turn.blocks.opened.fence), fence)
        return [Text(line) for line in fold(source.removesuffix("\n"), width)] if source else []
    if not source.strip():
        return []
    return (
        open_lines(replace(turn.blocks.opened, text=source), width) if whole else wrap(Text(source.strip("\n")), width)
    )


def _line(item: Line) -> RenderableType:
    text = Text(visible(item.text), _STYLES.get(item.style, ""))
    if item.style == "error":
        text = Text.assemble(("ling: ", "bold red"), visible(item.text))
    if item.hint:
        text.append("\n" + visible(item.hint), "dim")
    return Lines(text)
