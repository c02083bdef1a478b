"""One checkpoint, looked at without loading it: files, every byte of the weights, tokenizer, template, ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ling_local import hub, paths
from ling_local.doctor import weights
from ling_local.doctor.checks import Check, Status
from ling_local.engine.checkpoint import (
    DSPARK_FOLDER,
    Entry,
    check_draft_files,
    check_files,
    hub_repository,
    read_calibration,
)
from ling_local.engine.config import ModelConfig, load_draft_config, load_model_config
from ling_local.engine.layout import draft_layout, model_layout, parameter_count
from ling_local.engine.protocol import EngineSpec
from ling_local.errors import LingError, ModelError
from ling_local.generate import TextModel
from ling_local.published import repository, size_text
from ling_local.types import Message

_SAMPLE = "def naïve(x):\n\treturn [x, '張', \"🙂\"]  # <|role_end|>\r\n"
Show = Callable[[int, int], None]


def check_model(folder: Path, show: Show) -> Iterator[Check]:
    """All checks of a checkpoint folder, each as soon as it is known. show: bytes read, and bytes in all.

    Nothing is loaded, so it works for models of any size on any machine. Raises nothing of ours.
    """
    config, entries = None, {}
    try:
        config = load_model_config(folder)
        yield _config(folder, config)
        specs = model_layout(config)
        entries = check_files(folder, specs)
        yield Check("files", Status.PASS, _size(entries, parameter_count(specs)))
        if (folder / DSPARK_FOLDER).is_dir():
            check, draft = _draft(folder / DSPARK_FOLDER, config)
            yield check
            entries |= draft
    except LingError as error:
        yield _failed("files" if config else "config", error)
    if entries:
        repo = hub_repository(folder.absolute())
        fix = f"ling pull {repo} --verify" if repo else f"Copy the model's files to {folder} again."
        yield from _bytes(entries, show, fix)
    yield from _text(folder, config)


def _config(folder: Path, config: ModelConfig) -> Check:
    mtp = ", an MTP layer" if config.num_mtp_layers else ""
    layers = f"{config.num_layers} layers ({len(config.mla_layers)} MLA, {len(config.kda_layers)} KDA){mtp}"
    shape = f"{layers}, {config.num_experts} experts, width {config.hidden_size}, vocabulary {config.vocab_size:,}"
    return Check("config", Status.PASS, f"{folder}: {shape}, context {config.max_position_embeddings:,}")


def _size(entries: dict[str, Entry], parameters: int) -> str:
    types: dict[str, int] = {}
    for entry in entries.values():
        types[entry.dtype] = types.get(entry.dtype, 0) + 1
    files = len({entry.file for entry in entries.values()})
    kinds = ", ".join(f"{count:,} {dtype.lower()}" for dtype, count in sorted(types.items()))
    total = sum(entry.num_bytes for entry in entries.values())
    what = f"{len(entries):,} tensors ({kinds}) in {files} files, {parameters / 1e6:,.1f} M parameters"
    return f"{what}, {size_text(total)}: names, shapes, types and lengths fit config.json"


def _draft(folder: Path, target: ModelConfig) -> tuple[Check, dict[str, Entry]]:
    """A drafter in the model's folder. A name that the model uses, too, gets the folder's in front."""
    try:
        config = load_draft_config(folder, target)
        specs = draft_layout(config)
        entries = check_draft_files(folder, specs)
        read_calibration(folder, config)
    except LingError as error:
        return _failed("draft", error), {}
    blocks = f"blocks of {config.block_size}"
    detail = f"{len(entries):,} tensors, {config.num_layers} layers, {blocks}; it fits the model"
    return Check("draft", Status.PASS, detail), {f"{folder.name}/{name}": entry for name, entry in entries.items()}


def _bytes(entries: dict[str, Entry], show: Show, fix: str) -> Iterator[Check]:
    try:
        yield from weights.judge(weights.read_bytes(entries, show), fix)
    except OSError as error:
        yield Check("weights", Status.FAIL, f"cannot be read: {error}", fix)


def _text(folder: Path, config: ModelConfig | None) -> Iterator[Check]:
    """Tokenizer, chat template and ends against each other and against the vocabulary."""
    try:
        text = TextModel.load(EngineSpec(str(folder)))
    except LingError as error:
        yield _failed("tokenizer", error)
        return
    yield _tokenizer(text, config)
    yield _ends(text, config)
    try:
        yield _template(text)
    except LingError as error:
        yield _failed("template", error)


def _tokenizer(text: TextModel, config: ModelConfig | None) -> Check:
    tokens = text.tokens
    rows = config.vocab_size if config else tokens.size
    if tokens.size > rows:
        detail = f"tokenizer.json defines ids up to {tokens.size - 1:,}; the model has {rows:,} rows"
        return Check("tokenizer", Status.FAIL, detail, "tokenizer.json and config.json do not belong together.")
    back = tokens.decode(tokens.encode(_SAMPLE))
    if back != _SAMPLE:
        fix = "Text would reach the model changed. Copy tokenizer.json again."
        return Check("tokenizer", Status.FAIL, f"text does not survive it: {_SAMPLE!r} comes back as {back!r}", fix)
    padding = f", {rows - tokens.size:,} rows of padding" if rows > tokens.size else ""
    detail = f"{tokens.size:,} ids{padding}, {len(tokens.control)} of them control tokens; text comes back as it was"
    return Check("tokenizer", Status.PASS, detail)


def _ends(text: TextModel, config: ModelConfig | None) -> Check:
    """What ends an answer: end tokens of the tokenizer, and eos_token_id of config.json and generation_config.json."""
    tokens, ids = text.tokens, sorted(text.stop_ids)
    fix = "Look at eos_token_id in config.json and generation_config.json."
    if not ids:
        return Check("ends", Status.FAIL, "no token ends an answer", fix)
    outside = [id_ for id_ in ids if id_ >= min(tokens.size, config.vocab_size if config else tokens.size) or id_ < 0]
    if outside:
        return Check("ends", Status.FAIL, f"eos_token_id {outside[0]} is no token of this model", fix)
    spelt = [f"{id_} {tokens.decode([id_])!r}" for id_ in ids]
    ordinary = [word for id_, word in zip(ids, spelt, strict=True) if not tokens.is_control(id_)]
    if ordinary:
        return Check("ends", Status.WARN, f"{ordinary[0]} ends an answer, and text can spell it", fix)
    return Check("ends", Status.PASS, f"an answer ends with {' or '.join(spelt)}")


def _template(text: TextModel) -> Check:
    """Render talks of every kind. Raises what the template raises."""
    talk = (Message("system", "Be brief."), Message("user", "2 + 2?"))
    turn = (*talk, Message("assistant", "4"))
    template, tokens = text.template, text.tokens
    lengths = [len(template.encode(tokens, talk, thinking=thinking)) for thinking in (True, False)]
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}'
    template.encode(tokens, talk, thinking=False, tools=(tool,))
    ids = template.encode(tokens, turn, thinking=False, add_generation_prompt=False)
    missing = template.unknown_specials(tokens)
    if missing:
        fix = "tokenizer_config.json and tokenizer.json do not belong together."
        return Check("template", Status.FAIL, f"{', '.join(missing)}: no token of this tokenizer", fix)
    if not text.stop_ids & set(ids):
        fix = "The model learnt another end than the one that is waited for: look at eos_token_id."
        return Check("template", Status.WARN, "it ends a turn with none of the tokens that end an answer", fix)
    detail = f"{lengths[0]} tokens for a short question, {lengths[1]} without thinking; tools and turns work"
    return Check("template", Status.PASS, detail)


def _failed(name: str, error: LingError) -> Check:
    return Check(name, Status.FAIL, error.message, error.hint.replace("\n", "; "))


def folder_of(name: str, *, offline: bool) -> Path:
    """The folder that name stands for, whole or not; a folder's own path is taken as it is. Raises ModelError."""
    path = paths.user_path(name)
    if os.path.isdir(path):  # which has no exception for a folder that may not be looked into
        return path
    try:
        return hub.find_model(name, offline=offline)
    except ModelError:
        part = hub.cached_folder(repository(name))
        if part is None:
            raise
        return part
