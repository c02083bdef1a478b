"""Whether several ranks say what one says: greedy ids of both, with and without drafts, and how far apart they are.

python kernels/bench/ids.py                                          # tiny's shape, 2,000 tokens, 2 GPUs against 1
python kernels/bench/ids.py --model demo                             # the bundled model, whose drafts are its own
python kernels/bench/ids.py --model demo --device cpu --tokens 200   # the same between processes on a CPU

Drafts must change no id on either side. Sums over ranks are taken in another order, so texts may part where two tokens
nearly tie; one rank then scores all that the others said, so each of their ids is judged and not only the first that
differs. Exit code 1 where one of them is no near tie. A dummy's drafts never fit: its accept counts are forced; its
routing is settled (`protocol.Dummy`).
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import torch

from ling_kernels.ops import ROW_TILE
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Dummy, EngineSpec, Progress
from ling_local.engine.remote import RemoteEngine
from ling_local.engine.shapes import MODELS
from ling_local.paths import demo_dir
from ling_local.types import SamplingParams, TokenRequest

PROMPT = tuple(range(5, 69))
ACCEPTED = (6, 0, 3, 1)  # drafts a step, for a dummy
# Standard deviations of a row's logits between the best one and the chosen one that rounding explains. Sums that are
# wrong put several between them.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
DUMMY_NEAR_TIE = 1.0  # in bf16: 24 layers of random weights, against fp32 on one CPU, reach 0.56 within 104 tokens


def main() -> int:
    args = parse()
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    spec = spec_of(args)
    engine = RemoteEngine(spec, Stages())
    try:
        info = engine.info
        say(f"{info.model}, {info.dtype}, {info.ranks} ranks on {spec.device}, drafts by {info.drafter}")
        several = both_ways(engine, args.tokens)
    finally:
        engine.close()
    alone = load_alone(spec)
    say(f"one rank on {alone.info.device}")
    one = both_ways(alone, args.tokens)
    margins = margins_of(alone, several[0])
    lines, same = judge(several, one, margins, near_tie_of(spec))
    for line in lines:
        say(line)
    say("the same" if same else "NOT the same")
    return 0 if same else 1


def spec_of(args: argparse.Namespace) -> EngineSpec:
    """What the ranks load; one rank alone loads the same."""
    on_cpu = args.device == "cpu"
    spec = EngineSpec(
        str(demo_dir()),
        device=args.device,
        dtype="float32" if on_cpu else "bfloat16",
        draft="dspark",
        context=len(PROMPT) + args.tokens,
        gpus=() if on_cpu else tuple(range(args.ranks)),
        ranks=args.ranks if on_cpu else 0,
    )
    if args.model == "demo":
        return spec
    dummy = Dummy(args.model, args.layers, settled=True)
    return replace(spec, model=f"dummy-{args.model}", dummy=dummy, accept=ACCEPTED)


def near_tie_of(spec: EngineSpec) -> float:
    return DUMMY_NEAR_TIE if spec.dummy and spec.dtype == "bfloat16" else NEAR_TIE[spec.dtype]


def load_alone(spec: EngineSpec) -> NativeEngine:
    """The same model on one rank, in this process."""
    return NativeEngine.load(
        spec.model,
        "cpu" if spec.device == "cpu" else "cuda:0",
        spec.dtype,
        spec.draft,
        context=spec.context,
        progress=Stages(),
        dummy=spec.dummy,
        accept=spec.accept,
    )


def both_ways(engine: RemoteEngine | NativeEngine, tokens: int) -> tuple[list[int], list[int]]:
    """Greedy ids without drafts, and with every draft verified."""
    found = []
    for draft in (False, True):
        sampling = SamplingParams(temperature=0.0)
        request = TokenRequest(PROMPT, sampling=sampling, max_tokens=tokens, draft=draft, full_width=draft)
        results = list(engine.generate(request))
        found.append([token for result in results for token in result.ids])
        accepted = sum(result.accepted for result in results)
        say(f"{len(found[-1])} tokens in {len(results)} steps, {accepted} drafts accepted")
    return found[0], found[1]


def margins_of(engine: NativeEngine, ids: Sequence[int]) -> list[float]:
    """How far each of `ids` after PROMPT lies below this engine's choice, in standard deviations of the logits there;
    0 where it is the choice. A window's rows have the bits of single steps."""
    logits = engine.score((*PROMPT, *ids), window=ROW_TILE)[len(PROMPT) - 1 : -1, : engine.vocab]
    chosen = logits.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
    return ((logits.amax(dim=1) - chosen) / logits.std(dim=1)).tolist()


def judge(
    several: tuple[list[int], list[int]], one: tuple[list[int], list[int]], margins: Sequence[float], near_tie: float
) -> tuple[list[str], bool]:
    """What to say, and whether several ranks say what one does. Each side: ids without drafts, and with them; margins:
    of the first of the several ranks' ids."""
    lines = []
    for name, (plain, drafted) in (("several ranks", several), ("one rank", one)):
        if (parted := first_difference(plain, drafted)) is not None:
            lines.append(f"{name}: drafts change the text after {parted} tokens")
    fit = not lines
    (ids, _), (want, _) = several, one
    if len(ids) != len(want):
        return [*lines, f"{len(ids)} ids, {len(want)} of one rank"], False
    if (parted := first_difference(ids, want)) is None:
        return [*lines, f"{len(ids)} ids equal"], fit
    lines.append(f"ids part after {parted} of {len(ids)} tokens, {margins[parted]:.1e} standard deviations from a tie")
    others = sum(margin > 0 for margin in margins)
    lines.append(
        f"{others} of the {len(ids)} are not what one rank says there; the farthest is {max(margins):.1e} standard "
        f"deviations from a tie, {near_tie:g} are allowed"
    )
    return lines, fit and max(margins) <= near_tie


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts part, or one ends; None where they are the same."""
    return next((place for place, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


class Stages:
    """Says what a load is at, each thing once."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._said:
            self._said = progress.stage
            say(progress.stage)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", *MODELS), default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="cut a dummy's depth")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds after which it ends, whatever hangs")
    return parser.parse_args()


BEGUN = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
