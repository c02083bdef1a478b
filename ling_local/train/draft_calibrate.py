"""Sequential temperature scaling: confidence by position that means what it says (dspark.md section 6.2)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ling_local.engine.checkpoint import CALIBRATION
from ling_local.train.draft_evaluate import Walk

GRID = np.logspace(-1, 1, 41)
BINS = 15


@dataclass(frozen=True)
class Calibration:
    """temperatures by position; the errors are means over positions, of blocks that were not fitted on."""

    temperatures: tuple[float, ...]
    dataset: str
    num_samples: int
    ece_before: float
    ece_after: float


def calibration_error(chance: np.ndarray, happened: np.ndarray) -> float:
    """Expected calibration error of chances [n] in 15 bins of equal width."""
    if not len(chance):
        return 0.0
    place = np.minimum((chance * BINS).astype(np.int64), BINS - 1)
    gap = np.bincount(place, weights=chance - happened, minlength=BINS)
    return float(np.abs(gap).sum() / len(chance))


def survival(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Estimated chance [n, k] that the first k drafts are all accepted."""
    return np.cumprod(1 / (1 + np.exp(-logits / temperatures)), axis=1)


def fit(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Temperatures [k], left to right, each the best of the grid with those before it fixed.

    logits [n, k]; accepted [n]: how many drafts full-width verification kept.
    """
    found = np.ones(logits.shape[1])
    before = np.ones(len(logits))
    for k in range(logits.shape[1]):
        happened = (accepted > k).astype(np.float64)
        tried = [before / (1 + np.exp(-logits[:, k] / t)) for t in GRID]
        errors = [calibration_error(chance, happened) for chance in tried]
        # between equals the one nearest to 1: a position with few samples should not be moved by chance
        best = min(range(len(GRID)), key=lambda i: (errors[i], abs(np.log(GRID[i]))))
        found[k], before = GRID[best], tried[best]
    return found


def mean_error(logits: np.ndarray, accepted: np.ndarray, temperatures: np.ndarray) -> float:
    """Calibration error, mean over positions."""
    chances = survival(logits, temperatures)
    return float(np.mean([calibration_error(chances[:, k], accepted > k) for k in range(chances.shape[1])]))


def calibrate(steps: Walk, dataset: str) -> Calibration:
    """Fit on the blocks of even rows; errors are of the odd rows'. Blocks that the answer's end cuts are left out:
    their tails were never verified."""
    kept = steps.whole & np.isfinite(steps.confidence).all(axis=1)
    logits, accepted = steps.confidence[kept].astype(np.float64), steps.accepted[kept]
    even = steps.row[kept] % 2 == 0
    temperatures = fit(logits[even], accepted[even])
    rest = logits[~even], accepted[~even]
    before, after = mean_error(*rest, np.ones_like(temperatures)), mean_error(*rest, temperatures)
    shown = tuple(round(float(t), 4) for t in temperatures)
    return Calibration(shown, dataset, int(even.sum()), round(before, 4), round(after, 4))


def write_calibration(calibration: Calibration, folder: Path) -> Path:
    """Put it beside the draft, where the engine looks for it."""
    path = folder / CALIBRATION
    path.write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
    return path
