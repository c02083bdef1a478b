"""What `--explain` shows: what SGLang would be started with, as a line for the shell with remarks above it."""

from __future__ import annotations

from collections.abc import Sequence

from ling_local.engine.gpus import Gpu, visible_gpus
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.sglang.package import check_version, installed_version
from ling_local.engine.sglang.recipe import as_command, build_recipe
from ling_local.errors import EngineError


def explain(spec: EngineSpec) -> str:
    """Works without SGLang and without a GPU, and says so. Raises as build_recipe does."""
    gpus = visible_gpus()
    recipe = build_recipe(spec, gpus)
    remarks = [_package(), _gpus(gpus), f"drafter: {recipe.drafter}"]
    if recipe.variables:
        remarks.append("a variable that is set already stays as it is")
    return "\n".join([*(f"# {remark}" for remark in remarks), as_command(recipe)])


def _package() -> str:
    try:
        return f"sglang {check_version(installed_version())} is installed"
    except EngineError as error:
        return f"{error.message}: {error.hint}"


def _gpus(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "no NVIDIA GPU answers here: on one, --attention-backend and --tp-size may differ"
    names = {f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})" for gpu in gpus}
    return f"{len(gpus)} x {', '.join(sorted(names))}"
