"""SGLang's flags for one person who waits: the published low-latency recipe for Ling-3.0. Pure; no torch, no sglang.

With drafts: DSPARK where the model has such a draft, else NEXTN with its own layer; every draft verified (ragged
verify "static"), the fused KDA verify kernel. trtllm_mla on Blackwell data-centre GPUs; elsewhere SGLang chooses.
Prefix cache off. One request at a time, token ids in and out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling_local.engine.checkpoint import DSPARK_FOLDER
from ling_local.engine.config import read_config
from ling_local.engine.gpus import Gpu
from ling_local.engine.protocol import EngineSpec
from ling_local.errors import ModelError, UsageError

NEXTN_STEPS = 5  # of the published recipe for one request at a time
_SIZES = (1, 2, 4, 8)
_ROOM = 0.8  # of a GPU, that its share of the files may fill
_OWN = ("--model-path", "--model", "--skip-tokenizer-init", "--incremental-streaming-output")
_DRAFT_VARIABLES = (("SGLANG_OPT_FUSED_KDA_VERIFY", "1"), ("SGLANG_RAGGED_VERIFY_MODE", "static"))

Flags = dict[str, tuple[str, ...]]  # words after each flag; () for a switch


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to start SGLang with. drafter: "off", "mtp" or "dspark".

    words      its command line
    variables  its environment, where a variable is not set already
    """

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    drafter: str


def build_recipe(spec: EngineSpec, gpus: Sequence[Gpu]) -> Recipe:
    """The recipe for this model on these GPUs (none: as for one that is unknown).

    Raises UsageError for what SGLang cannot be asked for, ModelError for a model without the drafter.
    """
    _check(spec)
    config = read_config(Path(spec.model))
    drafter = _drafter(spec, config)
    size, places = _placement(spec, gpus)
    first = spec.gpus[0] if spec.gpus else 0
    major = next((gpu.capability[0] for gpu in gpus if gpu.index == first), 0)
    flags: Flags = {"--model-path": (spec.model,), "--tp-size": (str(size),), **places}
    if major == 10:
        flags["--attention-backend"] = ("trtllm_mla",)
    if size > 1 and major in (9, 10):
        flags["--flashinfer-allreduce-fusion-backend"] = ("auto",)
    flags |= _draft_flags(drafter, spec)
    flags |= {"--disable-radix-cache": (), "--max-running-requests": ("1",)}
    if spec.context:
        flags["--context-length"] = (str(spec.context),)
    flags |= {"--skip-tokenizer-init": (), "--incremental-streaming-output": (), "--log-level": ("error",)}
    flags = with_passed(flags, spec.passed)
    words = tuple(word for name, values in flags.items() for word in (name, *values))
    return Recipe(words, () if drafter == "off" else _DRAFT_VARIABLES, drafter)


def with_passed(flags: Flags, passed: Sequence[str]) -> Flags:
    """flags with what --sglang-arg gave: KEY=VALUE; KEY or KEY=true for a switch, KEY=false to take one away.

    A KEY given more than once is one flag with several words. Raises UsageError.
    """
    given: dict[str, list[str]] = {}
    for text in passed:
        key, equals, value = text.partition("=")
        name = "--" + key.strip().lstrip("-").replace("_", "-")
        if name == "--" or not all(part.isalnum() for part in name.strip("-").split("-")):
            raise UsageError(f"--sglang-arg {text}: not a flag of SGLang", "Write it like tp_size=4.")
        if name in _OWN:
            raise UsageError(f"--sglang-arg {text}: ling sets {name} itself", "Leave it out.")
        given.setdefault(name, []).append(value if equals else "true")
    result = dict(flags)
    for name, values in given.items():
        switch = values[-1].strip().lower()
        if switch == "false":
            result.pop(name, None)
        else:
            result[name] = () if switch == "true" else tuple(values)
    return result


def as_command(recipe: Recipe) -> str:
    """The same as a line for the shell, which starts SGLang's own server with it."""
    variables = [f"{name}={value}" for name, value in recipe.variables]
    lines = ["python -m sglang.launch_server"]
    for word in recipe.words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join([" ".join([*variables, lines[0]]), *lines[1:]])


def _check(spec: EngineSpec) -> None:
    if spec.device != "cuda":
        raise UsageError("SGLang runs these models on GPUs only", "Leave out --device cpu, or --engine sglang.")
    if spec.dtype == "float32":
        raise UsageError("SGLang does not compute these models in float32", "Leave out --dtype.")
    if spec.dummy or spec.accept:
        what = "--dummy" if spec.dummy else "--accept-pattern"
        raise UsageError(f"{what} is for the native engine", "Leave it out, or --engine sglang.")


def _drafter(spec: EngineSpec, config: dict[str, Any]) -> str:
    """Which drafter to ask for. Raises ModelError where it is not there."""
    folder = Path(spec.model)
    has_dspark = (folder / DSPARK_FOLDER / "config.json").exists()
    has_mtp = bool(config.get("num_nextn_predict_layers"))
    if spec.draft == "dspark" and not has_dspark:
        raise ModelError(f"{folder}: there is no draft in {DSPARK_FOLDER}/", "Fetch one with `ling pull dspark`.")
    if spec.draft == "mtp" and not has_mtp:
        raise ModelError(f"{folder}: this model has no MTP layer", "Use --speculation off.")
    if spec.draft == "auto":
        return "dspark" if has_dspark else "mtp" if has_mtp else "off"
    return spec.draft


def _draft_flags(drafter: str, spec: EngineSpec) -> Flags:
    if drafter == "dspark":
        folder = Path(spec.model) / DSPARK_FOLDER
        trained = read_config(folder).get("block_size", 0)
        if trained and spec.block > trained:
            message = f"--block {spec.block}: this draft was trained on blocks of {trained}"
            raise UsageError(message, f"Give 1 to {trained}.")
        flags: Flags = {"--speculative-algorithm": ("DSPARK",), "--speculative-draft-model-path": (str(folder),)}
        if spec.block:
            flags["--speculative-dspark-block-size"] = (str(spec.block),)
        return flags
    if drafter == "mtp":
        steps = spec.block or NEXTN_STEPS
        return {
            "--speculative-algorithm": ("NEXTN",),
            "--speculative-num-steps": (str(steps),),
            "--speculative-eagle-topk": ("1",),
            "--speculative-num-draft-tokens": (str(steps + 1),),
        }
    return {}


def _placement(spec: EngineSpec, gpus: Sequence[Gpu]) -> tuple[int, Flags]:
    """Ranks, and the flags for GPUs that are not the first ones. Raises UsageError."""
    if not spec.gpus:
        return _default_size(spec, gpus), {}
    size, base = len(spec.gpus), spec.gpus[0]
    if size not in _SIZES:
        raise UsageError(f"--gpus names {size} GPUs", f"Give {', '.join(map(str, _SIZES[:-1]))} or {_SIZES[-1]}.")
    step = spec.gpus[1] - base if size > 1 else 1
    if step < 1 or spec.gpus != tuple(base + step * rank for rank in range(size)):
        listed = ",".join(map(str, spec.gpus))
        raise UsageError(
            f"--gpus {listed}: SGLang takes GPUs upwards in equal steps",
            f"Set CUDA_VISIBLE_DEVICES={listed} and leave out --gpus.",
        )
    places: Flags = {"--base-gpu-id": (str(base),)} if base else {}
    if step > 1:
        places["--gpu-id-step"] = (str(step),)
    return size, places


def _default_size(spec: EngineSpec, gpus: Sequence[Gpu]) -> int:
    """The fewest ranks whose shares of the files fit; where none do, the most there are: SGLang says what is short.

    By files, not by the model's shape: SGLang also reads checkpoints in 8 and 4 bits.
    """
    needed = file_bytes(Path(spec.model))
    sizes = [size for size in _SIZES if size <= len(gpus)]
    fitting = (size for size in sizes if needed / size <= _ROOM * min(gpu.total for gpu in gpus[:size]))
    return next(fitting, sizes[-1] if sizes else 1)


def file_bytes(folder: Path) -> int:
    """Weights on disk, the draft's among them."""
    files = (*folder.glob("*.safetensors"), *(folder / DSPARK_FOLDER).glob("*.safetensors"))
    return sum(file.stat().st_size for file in files if file.is_file())
