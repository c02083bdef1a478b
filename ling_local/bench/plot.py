"""A report as a picture: tokens over time, and how many drafts steps accepted. SVG, written here: no library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from ling_local.bench.figures import Sample, accept_histogram
from ling_local.bench.result import BenchReport

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 800, 300, 70, 20, 88, 88
COLOURS = ("#4c6ef5", "#e8590c", "#2b8a3e", "#ae3ec9")  # told apart on white and on black
_POINTS = 600  # of one line; more are not seen
_TICKS = 5
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#868e96}.title{font-size:14px;font-weight:600}"
    ".axis{stroke:#868e96;stroke-opacity:.6}.grid{stroke:#868e96;stroke-opacity:.2}.line{fill:none;stroke-width:1.6}"
)


def plot(reports: Sequence[BenchReport], names: Sequence[str], title: str) -> str:
    """The picture. Of each report the repetition of median length is a line, the others are faint."""
    height = TOP + 2 * PANEL + 2 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{_text(title)}</text>',
        *_legend(names),
        *_time_panel(reports, TOP),
        *_accept_panel(reports, TOP + PANEL + GAP),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    return escape("".join(c if c.isprintable() else "�" for c in text))


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = LEFT
    for name, colour in zip(names, _colours(names), strict=True):
        yield f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="46">{_text(name)}</text>'
        x += 40 + 8 * len(name)


def _colours(items: Sequence[object]) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(items))]


def _time_panel(reports: Sequence[BenchReport], top: int) -> Iterator[str]:
    samples = [sample for report in reports for sample in report.samples]
    end_s = _round_up(max(sample.times_s[-1] for sample in samples))
    most = _round_up(max(sum(sample.counts) for sample in samples))
    yield from _frame(top, "tokens over time", "seconds since the request was taken", end_s, most)
    for report, colour in zip(reports, _colours(reports), strict=True):
        ordered = sorted(report.samples, key=lambda sample: sample.times_s[-1])
        middle = ordered[len(ordered) // 2]
        for sample in (*(other for other in ordered if other is not middle), middle):
            points = " ".join(f"{_x(t, end_s):.1f},{_y(n, most, top):.1f}" for t, n in _thinned(sample))
            faint = "" if sample is middle else ' stroke-opacity="0.25"'
            yield f'<polyline class="line" stroke="{colour}"{faint} points="{points}"/>'


def _thinned(sample: Sample) -> list[tuple[float, int]]:
    """Time and tokens so far after each step, or after every so many where there are more than can be seen."""
    done, points = 0, []
    for time_s, count in zip(sample.times_s, sample.counts, strict=True):
        done += count
        points.append((time_s, done))
    every = max(1, math.ceil(len(points) / _POINTS))
    return [*points[:-1:every], points[-1]]


def _accept_panel(reports: Sequence[BenchReport], top: int) -> Iterator[str]:
    shares = [[steps / report.total.steps for steps in accept_histogram(report.samples)] for report in reports]
    num = max(len(row) for row in shares)
    most = _round_up(max(max(row) for row in shares))
    label = "drafts accepted in a step"
    yield from _frame(top, "share of steps", label, num, most, per_cent=True, bars=True)
    slot = (WIDTH - LEFT - RIGHT) / num
    bar = 0.8 * slot / len(reports)
    for index, (row, colour) in enumerate(zip(shares, _colours(reports), strict=True)):
        for accepted, share in enumerate(row):
            x, y = LEFT + (accepted + 0.1) * slot + index * bar, _y(share, most, top)
            shape = f'x="{x:.1f}" y="{y:.1f}" width="{bar:.1f}" height="{top + PANEL - y:.1f}"'
            yield f'<rect {shape} fill="{colour}"><title>{accepted}: {100 * share:.1f} %</title></rect>'


def _frame(
    top: int, title: str, label: str, x_max: float, y_max: float, *, per_cent: bool = False, bars: bool = False
) -> Iterator[str]:
    """Axes, grid and their numbers; bars: a number below each slot instead of along a scale."""
    bottom, right = top + PANEL, WIDTH - RIGHT
    yield f'<text x="{LEFT}" y="{top - 8}">{title}</text>'
    for tick in range(_TICKS + 1):
        value = y_max * tick / _TICKS
        y = _y(value, y_max, top)
        said = f"{100 * value:.3g} %" if per_cent else f"{value:,.6g}"
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>'
    slots = [(index, index + 0.5) for index in range(int(x_max))]
    marks = slots if bars else [(x_max * tick / _TICKS,) * 2 for tick in range(_TICKS + 1)]
    for value, place in marks:
        yield f'<text x="{_x(place, x_max):.1f}" y="{bottom + 18}" text-anchor="middle">{value:.4g}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield f'<text x="{(LEFT + right) / 2:.0f}" y="{bottom + 38}" text-anchor="middle">{label}</text>'


def _x(value: float, most: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / most


def _y(value: float, most: float, top: int) -> float:
    return top + PANEL * (1 - value / most)


def _round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))
