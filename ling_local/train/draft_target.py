"""The frozen target of a draft: opened from a checkpoint, and its tapped hidden states over whole sequences."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ling_local.engine.config import ModelConfig, load_model_config
from ling_local.engine.layout import BF16, model_layout
from ling_local.engine.source import tokenizer_size
from ling_local.errors import EngineError
from ling_local.train.kda import kda_chunked
from ling_local.train.net import Net, Params, make_net, residuals, rms
from ling_local.train.stepping import check_device, compiler
from ling_local.train.weights import read_checkpoint


@dataclass(frozen=True)
class Target:
    """A model that is never trained here.

    params    on the device, none of them requires a gradient
    vocab     ids that the tokenizer defines; logits past it are padding
    stop_ids  what ends an answer; end_id: stands between documents, or None
    """

    folder: Path
    net: Net
    params: Params
    vocab: int
    stop_ids: tuple[int, ...]
    end_id: int | None

    def eager(self) -> Target:
        """The same without compiled regions: for a few passes in shapes of their own."""
        return replace(self, net=replace(self.net, kda=kda_chunked, wrap=lambda function: function))

    @property
    def config(self) -> ModelConfig:
        return self.net.config

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        return self.params["model.word_embeddings.weight"]

    @property
    def head(self) -> Tensor:
        return self.params["lm_head.weight"]


def open_target(folder: Path, device: str = "cpu", compiled: bool = False) -> Target:
    """Read a checkpoint folder for sampling and features: bf16 products on CUDA, fp32 on the CPU.

    Raises ModelError for the files, EngineError for a device that is not there.
    """
    check_device(device)
    config = load_model_config(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    wrap = compiler() if compiled else lambda function: function
    if device == "cuda":
        # heads and losses stay in fp32 but need no more than TF32's products: their inputs were bf16
        torch.set_float32_matmul_precision("high")
    narrow = {spec.name.split(".experts.")[0] for spec in model_layout(config) if spec.dtype == BF16}
    params = {
        name: value.to(device, dtype if name.split(".experts.")[0] in narrow else torch.float32)
        for name, value in read_checkpoint(folder).items()
    }
    stops = config.eos_token_ids + ((config.pad_token_id,) if config.pad_token_id is not None else ())
    net = make_net(config, device, dtype, kda=functools.partial(kda_chunked, wrap=wrap), wrap=wrap)
    return Target(folder, net, params, tokenizer_size(folder, config.vocab_size), stops, config.pad_token_id)


def mask_token_id(folder: Path, config: ModelConfig) -> int:
    """The id of the tokenizer's reserved `<|mask|>`. A pad or end id in its place would be a meaningful embedding.

    Raises EngineError where the tokenizer has no such token.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
        for token in added:
            if token["content"] == "<|mask|>" and token["id"] < config.vocab_size:
                return token["id"]
    raise EngineError(f"{path}: no <|mask|> token", "name an id that stands for nothing with --mask-id")


@torch.no_grad()
def features(target: Target, ids: Tensor, tapped: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Run ids [B, T] from an empty state: taps [B, T, taps * D] and hidden [B, T, D], both fp32.

    A tap is the residual stream after that layer, before any norm, -1 for the embedding; hidden is after the final
    norm: what the head reads (dspark.md section 2).
    """
    found = []
    for layer, x in enumerate(residuals(target.net, target.params, ids, {}), -1):
        if layer in tapped:
            found.append(x)
    hidden = rms(x, target.params["model.norm.weight"], target.config.rms_norm_eps)
    return torch.cat(found, -1).view(*ids.shape, -1), hidden.view(*ids.shape, -1)


def scores(hidden: Tensor, head: Tensor) -> Tensor:
    """Logits of hidden [.., D] in fp32: rounded to bf16, whole groups of tokens would tie."""
    return F.linear(hidden.float(), head.float())
