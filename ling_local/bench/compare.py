"""Two reports side by side: ratios, and what was not the same in the two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ling_local.bench.report import Document
from ling_local.errors import UsageError

FIGURES = {
    "tok/s": ("decode", "tok_s"),
    "TPOT ms median": ("decode", "tpot_ms", "median"),
    "TPOT ms p99": ("decode", "tpot_ms", "p99"),
    "step ms median": ("decode", "step_ms", "median"),
    "GPU step ms": ("decode", "gpu_step_ms"),
    "TTFT ms median": ("ttft_ms", "median"),
    "prefill tok/s median": ("prefill", "tok_s", "median"),
    "accept length": ("speculation", "accept_length"),
}
_TIMES = ("tok/s", "TPOT", "step", "GPU")  # what the spread of TPOT says something about
_SAME = (
    ("ling",),
    ("model", "id"),
    ("model", "engine"),
    ("model", "dtype"),
    ("machine", "device"),
    ("machine", "cpu"),
    ("machine", "cpus"),
    ("machine", "gpu"),
    ("machine", "driver"),
    ("machine", "power_w"),
    ("machine", "torch"),
    ("machine", "ranks"),
    ("run", "task"),
    ("run", "prompt_tokens"),
    ("run", "tokens"),
    ("run", "temperature"),
    ("run", "top_k"),
    ("run", "top_p"),
    ("run", "seed"),
    ("run", "thinking"),
    ("run", "full_width"),
    ("run", "context_limit"),
    ("marks",),
)


def read_reports(file: Path) -> tuple[Document, ...]:
    """The reports of a file that `ling bench --save` or `--json` wrote. Raises UsageError."""
    try:
        document = json.loads(file.read_text(encoding="utf-8-sig"))
        reports = document.get("reports", [document])
        if not reports or document["schema"] != 1 or not all(report["samples"] for report in reports):
            raise ValueError
        compare(reports, reports, "")  # whatever is missing is missed now, not after the run
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, or not ours
        raise UsageError(f"{file} is not a report of ling bench", "Write one with --save FILE.") from None
    return tuple(reports)


def compare(now: Sequence[Document], then: Sequence[Document], file: str) -> dict[str, Any]:
    """Ratios now / then of each mode that both have, with what else differs between the runs."""
    several = any(len({_engine(document) for document in documents}) > 1 for documents in (now, then))

    def mode(document: Document) -> str:
        """With its engine where there are several on a side; else two engines may be compared with each other."""
        return f"{_engine(document)} {_mode(document)}" if several else _mode(document)

    before = {mode(document): document for document in then}
    modes = [document for document in now if mode(document) in before]
    differs: list[str] = []
    for document in modes:
        differs += _differences(document, before[mode(document)])
    return {
        "file": file,
        "differs": list(dict.fromkeys(differs)),
        "only_in_one": sorted({*map(mode, now)} ^ set(before)),
        "modes": [
            {"mode": mode(document), "figures": list(_ratios(document, before[mode(document)]))} for document in modes
        ],
    }


def _engine(document: Document) -> str:
    """Without its version; a report of a time when there was one engine does not name it."""
    return document["model"].get("engine", "native").partition(" ")[0]


def _mode(document: Document) -> str:
    model = document["model"]
    return f"{model['drafter']}/{model['block']}" if model["block"] else model["drafter"]


def _differences(now: Document, then: Document) -> Iterator[str]:
    for path in _SAME:
        new, old = _at(now, path), _at(then, path)
        if new != old:
            yield f"{path[-1]}: {_said(old)} then, {_said(new)} now"


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _ratios(now: Document, then: Document) -> Iterator[dict[str, Any]]:
    """Figures that both have. within_spread: the ratio is no further from 1 than twice what repetitions differ by."""
    spread = math.hypot(_spread(now), _spread(then))
    for name, path in FIGURES.items():
        new, old = _at(now, path), _at(then, path)
        if new is not None and old:
            ratio = new / old
            noise = abs(ratio - 1) <= 2 * spread if name.startswith(_TIMES) else None
            yield {"figure": name, "now": new, "then": old, "ratio": ratio, "within_spread": noise}


def _spread(document: Document) -> float:
    tpot = document["decode"]["tpot_ms"]
    return tpot["sd"] / tpot["mean"] if tpot["sd"] is not None and tpot["mean"] else 0.0


def _at(document: Any, path: Sequence[str]) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document
