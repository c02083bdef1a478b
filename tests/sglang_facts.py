"""What our SGLang engine relies on, read from the real package and kept in sglang_facts.json for tests without it.

    python tests/sglang_facts.py           compare the file with the sglang of this Python; exit code 1 if they differ
    python tests/sglang_facts.py --write   write the file anew

Run it from the repository, with a Python that has ling_local and sglang. Neither a GPU nor weights are needed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("sglang_facts.json")
META = ("completion_tokens", "cached_tokens", "finish_reason")
RESOLVED = (
    "context_length",
    "disable_radix_cache",
    "incremental_streaming_output",
    "max_running_requests",
    "skip_tokenizer_init",
    "speculative_algorithm",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "tp_size",
)
SPECS: Mapping[str, dict[str, Any]] = {
    "plain": {"draft": "off"},
    "dspark": {"draft": "dspark"},
    "dspark, block 4": {"draft": "dspark", "block": 4, "context": 256},
    "nextn": {"draft": "mtp"},
    "nextn, block 3": {"draft": "mtp", "block": 3},
    "four GPUs": {"draft": "dspark", "gpus": (0, 1, 2, 3)},
}


def recipes(folder: Path, capability: tuple[int, int] = (9, 0)) -> dict[str, Any]:
    """Our recipe for each of SPECS, for a small checkpoint that is written to folder."""
    from checkpoints import write_checkpoint, write_draft
    from ling_local.engine.gpus import Gpu
    from ling_local.engine.protocol import EngineSpec
    from ling_local.engine.sglang.recipe import build_recipe

    model = write_checkpoint(folder / "model", num_nextn_predict_layers=1)
    write_draft(model / "dspark", model, model_type="qwen3")
    gpus = [Gpu(index, "GPU", 1 << 36, 1 << 36, capability) for index in range(4)]
    return {
        name: build_recipe(EngineSpec(str(model), "sglang", "cuda", "bfloat16", **spec), gpus)
        for name, spec in SPECS.items()
    }


def options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What each flag takes: "none", "one", "optional" or "many" words, and the choices that there are."""
    kinds = {0: "none", None: "one", "?": "optional"}
    found: dict[str, str] = {}
    for action in parser._actions:
        kind = kinds.get(action.nargs, "many")
        choices = "|".join(sorted(map(str, action.choices))) if action.choices else ""
        found |= {name: f"{kind} {choices}".strip() for name in action.option_strings if name.startswith("--")}
    return dict(sorted(found.items()))


def read_facts() -> dict[str, Any]:
    """Everything, from the package that is installed."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.environ import envs
    from sglang.srt.managers import schedule_batch, scheduler, tokenizer_manager
    from sglang.srt.models import bailing_moe_v3
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    manager = inspect.getsource(tokenizer_manager.TokenizerManager)
    batch = inspect.getsource(schedule_batch)
    reasons = {
        "eos": schedule_batch.FINISH_MATCHED_TOKEN(7),
        "nan": schedule_batch.FINISH_MATCHED_STR("NaN happened"),
        "length": schedule_batch.FINISH_LENGTH(9),
        "cancelled": schedule_batch.FINISH_ABORT(),
        "failed": schedule_batch.FINISH_ABORT("Out of memory", 500, "InternalServerError"),
    }
    variables = ("SGLANG_OPT_FUSED_KDA_VERIFY", "SGLANG_RAGGED_VERIFY_MODE")
    return {
        "version": version("sglang"),
        "architectures": [kind.__name__ for kind in bailing_moe_v3.EntryClass],
        "options": options(parser),
        "variables": {name: getattr(envs, name).get() for name in variables},
        "generate": list(inspect.signature(Engine.generate).parameters),
        "abort_request": list(inspect.signature(tokenizer_manager.TokenizerManager.abort_request).parameters),
        "engine": [name for name in ("loop", "tokenizer_manager") if f"self.{name} = " in inspect.getsource(Engine)],
        "methods": [name for name in ("get_server_info", "shutdown") if hasattr(Engine, name)],
        "sampling": sorted(inspect.signature(SamplingParams).parameters),
        "meta_info": [name for name in META if f'"{name}":' in manager],
        "server_info": [name for name in ("max_req_input_len",) if f'"{name}":' in inspect.getsource(scheduler)],
        "finish": {name: reason.to_json() for name, reason in reasons.items()},
        "nan_is_said": 'FINISH_MATCHED_STR(matched="NaN happened")' in batch,
        "resolved": resolved(),
    }


def resolved() -> dict[str, dict[str, Any]]:
    """What SGLang makes of our recipes; it goes through all its checks for CUDA, also where there is no GPU."""
    from sglang.srt.server_args import prepare_server_args

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in recipes(Path(folder)).items():
            arguments = prepare_server_args([*recipe.words, "--device", "cuda"])
            arguments.resolve_once()
            values = arguments.resolved_dict()
            found[name] = {key: values[key] for key in RESOLVED}
    return found


def differences(kept: Any, found: Any, where: str = "") -> list[str]:
    """Where two documents part, a line each."""
    if isinstance(kept, dict) and isinstance(found, dict):
        keys = sorted({*kept, *found})
        return [line for key in keys for line in differences(kept.get(key), found.get(key), f"{where}/{key}")]
    return [] if kept == found else [f"{where}: kept {kept!r}, found {found!r}"]


def main() -> int:
    """Compare or write; see the top of this file."""
    warnings.simplefilter("ignore")
    found = json.loads(json.dumps(read_facts()))
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    lines = differences(json.loads(FILE.read_text(encoding="utf-8")), found)
    print("\n".join(lines) or f"sglang {found['version']}: everything is as it is kept")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
