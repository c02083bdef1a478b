"""SGLang's offline engine in this process; its schedulers are child processes that end with it."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ling_local.engine.config import model_config, read_config
from ling_local.engine.gpus import Gpu, visible_gpus
from ling_local.engine.layout import model_layout, parameter_count
from ling_local.engine.protocol import EngineInfo, EngineSpec, Progress, ProgressFn
from ling_local.engine.sglang.package import INSTALL, check_version, installed_version
from ling_local.engine.sglang.recipe import Recipe, build_recipe, file_bytes
from ling_local.engine.sglang.results import ChunkReader, sampling_params
from ling_local.errors import EngineBusy, EngineError, LingError, UsageError, context_too_long
from ling_local.types import FinishReason, StepResult, TokenRequest

_DRAFTERS = {None: "off", "DSPARK": "dspark", "EAGLE": "mtp"}  # NEXTN is another name of EAGLE


class SGLangEngine:
    """One request at a time on `offline`, an sglang Engine. Requests must come from the thread that made it."""

    def __init__(self, offline: Any, info: EngineInfo) -> None:
        self.offline = offline
        self._info = info
        self._current: weakref.ref[SGLangGeneration] | None = None
        self._closed = False
        self._closing = threading.Lock()

    @classmethod
    def load(
        cls, spec: EngineSpec, progress: ProgressFn | None = None, gpus: Sequence[Gpu] | None = None
    ) -> SGLangEngine:
        """Start SGLang as the recipe says, with the environment that this needs. gpus: None asks the driver.

        Raises EngineError without the package, a version that knows the model, or a GPU; UsageError for its flags.
        """
        found = check_version(installed_version())
        gpus = visible_gpus() if gpus is None else gpus
        if not gpus:
            raise EngineError(
                "SGLang needs an NVIDIA GPU, and no driver answers here",
                "Install the driver (nvidia-smi shows it), or leave out --engine sglang.",
            )
        recipe = build_recipe(spec, gpus)
        for name, value in recipe.variables:
            os.environ.setdefault(name, value)
        if progress:
            progress(Progress(f"starting SGLang {found}", unit="engines"))
        offline = _start(recipe, found)
        return cls(offline, _info(spec, offline.get_server_info(), found))

    @property
    def info(self) -> EngineInfo:
        return self._info

    def generate(self, request: TokenRequest) -> SGLangGeneration:
        """Check the request; SGLang gets it when the generation is iterated."""
        if self._closed:
            raise EngineError("the engine is closed", "Open it again.")
        current = self._current() if self._current else None
        if current is not None and not current.over:
            raise EngineBusy("the engine is busy with another request", "Wait for it to end, or cancel it.")
        if not request.ids or request.max_tokens < 1:
            raise UsageError("a request needs at least one id and a positive max_tokens")
        if min(request.ids) < 0 or max(request.ids) >= self._info.vocab_size:
            raise UsageError(f"token ids must lie in 0..{self._info.vocab_size - 1}", "Use this model's tokenizer.")
        if len(request.ids) >= self._info.context_limit:
            raise context_too_long(len(request.ids), self._info.context_limit)
        generation = SGLangGeneration(self, request)
        self._current = weakref.ref(generation)
        return generation

    def close(self) -> None:
        """End SGLang's processes and wait until they are gone. From any thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            current = self._current() if self._current else None
            if current is not None:
                current.cancel()
            self.offline.shutdown()


class SGLangGeneration:
    """One request under way. It can be iterated once."""

    def __init__(self, engine: SGLangEngine, request: TokenRequest) -> None:
        self._engine = engine
        self._request = request
        self._rid = uuid.uuid4().hex
        self._cancelled = False
        self._begun = self._over = False

    @property
    def over(self) -> bool:
        """No longer in the way of another request."""
        return self._over or self._cancelled

    def cancel(self) -> None:
        """Ask SGLang to end it, from any thread: its loop does so while steps are waited for."""
        self._cancelled = True
        if self._begun and not self._over:
            self._abort()

    def _abort(self) -> None:
        offline = self._engine.offline
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the request
            offline.loop.call_soon_threadsafe(lambda: offline.tokenizer_manager.abort_request(rid=self._rid))

    def __iter__(self) -> Iterator[StepResult]:
        if self._begun or self._over:
            return
        if self._cancelled or self._engine._closed:
            self._over = True
            yield StepResult((), time_s=time.monotonic(), finish=FinishReason.CANCELLED)
            return
        self._begun = True
        chunks = self._chunks()
        try:
            yield from self._steps(chunks)
        finally:
            if not self._over:  # left early: the slot is free once SGLang has ended the request
                self.cancel()
                for _ in chunks:
                    pass
                self._over = True

    def _steps(self, chunks: Iterator[dict[str, Any]]) -> Iterator[StepResult]:
        started_s = time.monotonic()
        reader = ChunkReader(len(self._request.ids), self._engine.info.block, started_s)
        for chunk in chunks:
            for step in reader.steps(chunk, time.monotonic()):
                self._over = step.finish is not None
                yield step
            if self._over:
                return

    def _chunks(self) -> Iterator[dict[str, Any]]:
        """What SGLang sends. A cancel that came before it knew the request is asked again with each chunk."""
        request, info = self._request, self._engine.info
        try:
            for chunk in self._engine.offline.generate(
                input_ids=list(request.ids),
                sampling_params=sampling_params(request, info.context_limit - len(request.ids)),
                stream=True,
                rid=self._rid,
            ):
                if self._cancelled:
                    self._abort()
                yield chunk
        except ValueError as error:  # how it says that a request is not possible
            raise UsageError(f"SGLang refuses the request: {error}") from error


def _start(recipe: Recipe, found: str) -> Any:
    """The running Engine of sglang. Raises EngineError, UsageError."""
    try:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import prepare_server_args
    except ImportError as error:
        message = f"sglang {found} is installed but cannot be imported: {error}"
        raise EngineError(message, f"Install it with all that it needs: {INSTALL}") from error
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = prepare_server_args(list(recipe.words))
    except SystemExit:
        last = (said.getvalue().strip().splitlines() or ["no reason given"])[-1].partition("error: ")
        hint = "Correct --sglang-arg; `ling complete --engine sglang --explain` shows all flags."
        raise UsageError(f"sglang {found} refuses its flags: {last[2] or last[0]}", hint) from None
    try:
        return Engine(server_args=arguments)
    except ValueError as error:  # flags that do not go together, or not with this model or GPU
        hint = "`ling complete --engine sglang --explain` shows the flags; --sglang-arg changes them."
        raise EngineError(f"sglang {found} cannot start like this: {error}", hint) from error


def _info(spec: EngineSpec, server: dict[str, Any], found: str) -> EngineInfo:
    """What runs, from SGLang's own account of it after it has filled in its defaults."""
    folder = Path(spec.model)
    config = read_config(folder)
    algorithm = server["speculative_algorithm"]
    drafts = server["speculative_num_draft_tokens"] - 1 if algorithm else 0
    drafter = _DRAFTERS.get(algorithm, str(algorithm).lower())
    # NEXTN keeps room for its drafts behind the answer; other algorithms do not.
    reserved = drafts + 1 if drafter == "mtp" else 0
    quantised = (config.get("quantization_config") or {}).get("quant_method")
    return EngineInfo(
        model=folder.resolve().name,
        dtype=quantised or "bfloat16",
        device="cuda",
        context_limit=server["max_req_input_len"] - reserved,
        vocab_size=config["vocab_size"],
        ranks=server["tp_size"],
        drafter=drafter,
        block=drafts,
        parameters=_parameters(config),
        weight_bytes=file_bytes(folder),
        torch=_version_of("torch"),
        engine=f"sglang {found}",
    )


def _parameters(config: dict[str, Any]) -> int:
    """0 for a checkpoint whose layout is not ours, as in 8 or 4 bits."""
    try:
        return parameter_count(model_layout(model_config(config)))
    except LingError:
        return 0


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
