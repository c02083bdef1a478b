"""Muon for the matrices, AdamW for the rest, as plain tensor code that a CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Learning rates as shares of the schedule's, by what the name holds; the first match counts.
ADAM_SHARES = (("word_embeddings", 1.0), ("lm_head", 0.3), ("", 0.4))
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MIN_MATRIX = 16


@dataclass(frozen=True)
class Recipe:
    """Settings of the optimiser; rates are shares of the schedule's learning rate."""

    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.97)
    decay: float = 0.05
    clip: float = 1.0
    bias_rate: float = 0.1


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Nearly the orthogonal factor of each matrix [.., out, in], by Newton-Schulz. -> fp32

    A GPU does it in bf16, which is accurate enough; a CPU in fp32, in which it multiplies several times faster.
    """
    a, b, c = NEWTON_SCHULZ
    x = update.to(torch.bfloat16 if update.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


def is_matrix(name: str, value: Tensor) -> bool:
    """True for what Muon updates: hidden weights, not tables, router, convolution or narrow projections."""
    tables = ("word_embeddings", "lm_head", "mlp.gate.", "conv1d")
    return value.ndim >= 2 and value.shape[-2] >= MIN_MATRIX and not any(word in name for word in tables)


class Optimizer:
    """Holds momenta for `params` (fp32 leaves with .grad) and updates them in place."""

    def __init__(self, params: Mapping[str, Tensor], recipe: Recipe) -> None:
        self.recipe = recipe
        trained = {name: value for name, value in params.items() if value.requires_grad}
        self.all = list(trained.values())
        self.groups: list[list[Tensor]] = []
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        adam: list[tuple[float, Tensor]] = []
        for name, value in trained.items():
            if is_matrix(name, value):
                by_shape.setdefault((value.shape[-2], value.shape[-1]), []).append(value)
            else:
                adam.append((next(share for word, share in ADAM_SHARES if word in name), value))
        self.groups = list(by_shape.values())
        self.momenta = [
            torch.zeros(sum(_count(p) for p in group), *group[0].shape[-2:], device=group[0].device)
            for group in self.groups
        ]
        self.adam = [value for _, value in adam]
        self.shares = [share for share, _ in adam]
        self.first = [torch.zeros_like(value) for value in self.adam]
        self.second = [torch.zeros_like(value) for value in self.adam]
        self.count = torch.zeros((), device=self.all[0].device)
        self.norm = torch.zeros((), device=self.all[0].device)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        return {"momenta": self.momenta, "first": self.first, "second": self.second, "count": self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take in what state() gave, in place."""
        for name in ("momenta", "first", "second"):
            for mine, saved in zip(getattr(self, name), state[name], strict=True):
                mine.copy_(saved)
        self.count.copy_(state["count"])

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        """One update with the learning rate `rate` (a scalar tensor). Clips the gradients; leaves them set."""
        grads = [value.grad for value in self.all]
        norms = torch._foreach_norm(grads)
        self.norm.copy_(torch.stack(norms).norm())
        torch._foreach_mul_(grads, (self.recipe.clip / (self.norm + 1e-6)).clamp(max=1.0))
        self.count += 1
        self._step_adam(rate)
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            self._step_muon(group, momentum, rate)

    def _step_adam(self, rate: Tensor) -> None:
        b1, b2 = self.recipe.betas
        grads = [value.grad for value in self.adam]
        torch._foreach_lerp_(self.first, grads, 1 - b1)
        torch._foreach_mul_(self.second, b2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - b2)
        size = torch._foreach_sqrt(self.second)
        torch._foreach_mul_(size, torch.rsqrt(1 - b2**self.count))
        torch._foreach_add_(size, 1e-10)
        update = torch._foreach_div(self.first, size)
        torch._foreach_mul_(update, rate / (1 - b1**self.count))
        torch._foreach_mul_(update, self.shares)
        torch._foreach_sub_(self.adam, update)

    def _step_muon(self, group: list[Tensor], momentum: Tensor, rate: Tensor) -> None:
        grad = torch.cat([value.grad.reshape(-1, *value.shape[-2:]) for value in group])
        momentum.lerp_(grad, 1 - self.recipe.momentum)
        update = orthogonal(torch.lerp(grad, momentum, self.recipe.momentum))
        # the scale makes an entry's step about 0.2 of the rate, as AdamW's is
        scaled = update * (0.2 * max(update.shape[-2:]) ** 0.5) * rate
        torch._foreach_mul_(group, 1 - self.recipe.decay * rate)
        parts = scaled.split([_count(value) for value in group])
        torch._foreach_sub_(group, [part.view_as(value) for part, value in zip(parts, group, strict=True)])


def _count(value: Tensor) -> int:
    return value.numel() // (value.shape[-2] * value.shape[-1])
