"""`python -m ling_local.train COMMAND`: how the demo model was made, step by step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ling_local.errors import LingError
from ling_local.train import draft_commands
from ling_local.train.draft_commands import say

DEMO_FOLDER = Path(__file__).parents[1] / "data" / "demo"

app = typer.Typer(
    help="Make the demo model: corpus, tokenizer, pack, target, export, eval, samples, card.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Work = Annotated[Path, typer.Option(help="folder for downloads, text and tokens")]
Out = Annotated[Path, typer.Option(help="folder of the model")]
Run = Annotated[Path, typer.Option(help="folder for the training state and its log")]
Device = Annotated[str, typer.Option(help="cuda or cpu")]
WORK, RUN = Path("runs/demo"), Path("runs/demo/target")


@app.command()
def corpus(work: Work = WORK) -> None:
    """Fetch the sources, clean and split them, make conversations."""
    from ling_local.train.corpus import build

    build(work, say)


@app.command()
def tokenizer(work: Work = WORK, out: Out = DEMO_FOLDER) -> None:
    """Train the tokenizer on a part of the corpus."""
    from ling_local.train.corpus import tokenizer_texts
    from ling_local.train.shape import CONTEXT
    from ling_local.train.vocab import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(tokenizer_texts(work)), out, CONTEXT)
    say(f"wrote {out / 'tokenizer.json'}")


@app.command()
def pack(
    work: Work = WORK,
    out: Out = DEMO_FOLDER,
    code_mb: Annotated[int, typer.Option(help="code to keep, in MB; 270 leaves 46 MB of tokens")] = 270,
) -> None:
    """Encode the corpus into compressed token files, small enough to send to a GPU machine."""
    from ling_local.train.corpus import HELDOUT_SETS, TRAIN_SETS, save_tokens
    from ling_local.train.corpus import pack as pack_set
    from ling_local.train.vocab import read_tokenizer

    encoder = read_tokenizer(out)
    for name in (*TRAIN_SETS, *HELDOUT_SETS):
        tokens = pack_set(work, encoder, name, code_mb * 1_000_000 if name == "code" else None)
        size = save_tokens(tokens, work / "tokens", name)
        say(f"{name}: {len(tokens.tokens):,} tokens of {tokens.text_bytes:,} bytes, {size:,} bytes on disk")


@app.command()
def target(
    steps: Annotated[int, typer.Option(min=1, help="training steps of 131,072 tokens")],
    work: Work = WORK,
    run: Run = RUN,
    minutes: Annotated[float, typer.Option(help="squeeze the schedule into this time; 0: no limit")] = 0.0,
    rate: Annotated[float, typer.Option(help="peak learning rate")] = 6e-3,
    rows: Annotated[int, typer.Option(help="rows of 1,024 tokens a step")] = 128,
    seed: Annotated[int, typer.Option(help="of weights and order")] = 1,
    device: Device = "cuda",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="compile regions with torch.compile")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the saved state")] = False,
) -> None:
    """Train the model. The same seed gives the same order of text; --resume goes on after an interruption."""
    from ling_local.train import run as rooms
    from ling_local.train.loop import Plan

    plan = Plan(steps=steps, minutes=minutes, rate=rate, rows=rows, seed=seed)
    net = rooms.build_net(device, compiled)
    rooms.train_target(work, run, plan, net, device, say, resume)


@app.command()
def export(run: Run = RUN, out: Out = DEMO_FOLDER) -> None:
    """Write the trained weights in the published checkpoint layout, with config.json."""
    from ling_local.train import run as rooms

    size = rooms.export(rooms.load_state(run), out)
    say(f"wrote {size:,} bytes of tensors to {out}")


@app.command("eval")
def evaluate(work: Work = WORK, out: Out = DEMO_FOLDER, run: Run = RUN, device: Device = "cuda") -> None:
    """Held-out figures of the exported weights; writes eval.json beside the log. Slow without a GPU."""
    from ling_local.train import run as rooms

    print(json.dumps(rooms.report(work, out, run, rooms.build_net(device, compiled=False), device, say), indent=1))


@app.command()
def samples(out: Out = DEMO_FOLDER, run: Run = RUN) -> None:
    """Ten greedy samples of the exported weights, on the CPU; writes samples.json beside the log."""
    from ling_local.train import run as rooms

    rooms.sample(out, run, say)


@app.command()
def card(
    work: Work = WORK,
    out: Out = DEMO_FOLDER,
    run: Run = RUN,
    machine: Annotated[str, typer.Option(help="what it was trained on")] = "One NVIDIA H200, torch 2.11 with CUDA 13",
) -> None:
    """Write the model card, README.md, from the sources, the log and eval.json."""
    from ling_local.train.card import write_card

    write_card(work, out, run, machine)
    say(f"wrote {out / 'README.md'}")


draft_commands.register(app)


def main() -> None:
    """Run a command; what a person can mend is said in two lines."""
    try:
        app()
    except LingError as error:
        say(f"error: {error.message}")
        if error.hint:
            say(f"  {error.hint}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
