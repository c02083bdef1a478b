"""The training loop: one step as a function of static tensors, replayed as a CUDA graph where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ling_local.errors import NonFinite
from ling_local.train.batches import Sampler
from ling_local.train.net import Net, Output, forward, linear
from ling_local.train.optim import Optimizer
from ling_local.train.sources import Say
from ling_local.train.stepping import Pace, Replayed, load_state, save_state, schedule


@dataclass(frozen=True)
class Plan:
    """How long and how fast. rows * length tokens a step; the last `long_part` of the steps have long_length.

    minutes  0: no limit; else the schedule is squeezed so that it ends in time, with the rate decayed to zero
    """

    steps: int
    rows: int = 128
    length: int = 1024
    long_length: int = 4096
    long_part: float = 0.06
    rate: float = 6e-3
    warmup: int = 150
    flat: float = 0.35
    mtp_weight: float = 0.2
    seed: int = 1
    minutes: float = 0.0
    save_minutes: float = 4.0
    graph: bool = True

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.length


def lm_loss(dtype: torch.dtype, hidden: Tensor, head: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the rows where counted is 1."""
    scores = linear(hidden.to(dtype), head).float()
    return (F.cross_entropy(scores, targets, reduction="none") * counted).sum() / counted.sum()


class Step:
    """One training step on static tensors; `run` sets the inputs and replays."""

    def __init__(self, net: Net, params: dict[str, Tensor], optimizer: Optimizer, tokens: Tensor, end_id: int) -> None:
        self.net, self.params, self.optimizer, self.tokens, self.end_id = net, params, optimizer, tokens, end_id
        device = tokens.device
        self.rate, self.mtp_weight = torch.zeros((), device=device), torch.zeros((), device=device)
        self.sums = torch.zeros(3, device=device)  # main loss, mtp loss, steps
        layers = [name for name in params if name.endswith("expert_bias")]
        self.biases = {int(name.split(".")[2]): params[name] for name in layers}
        self.loads = {layer: torch.zeros_like(bias) for layer, bias in self.biases.items()}

    def _body(self, starts: Tensor, length: int) -> None:
        rows = self.tokens[starts[:, None] + torch.arange(length + 1, device=starts.device)].long()
        ids = rows[:, :-1]
        known = (ids != self.end_id).float()  # what follows the end of a document cannot be known
        out = forward(self.net, self.params, ids)
        loss_fn = self.net.wrap(lm_loss)
        head = self.params["lm_head.weight"]
        main = loss_fn(self.net.dtype, out.hidden, head, rows[:, 1:].reshape(-1), known.reshape(-1))
        loss = main
        drafted = torch.zeros_like(main)
        if out.mtp is not None:
            after = F.pad(rows[:, 2:], (0, 1)).reshape(-1)
            counted = known * F.pad(known[:, 1:], (0, 1))
            drafted = loss_fn(self.net.dtype, out.mtp, head, after, counted.reshape(-1))
            loss = main + self.mtp_weight * drafted
        torch._foreach_zero_([value.grad for value in self.optimizer.all])
        loss.backward()
        self.optimizer.step(self.rate)
        self._balance(out)
        self.sums += torch.stack((main.detach(), drafted.detach(), torch.ones_like(main)))

    @torch.no_grad()
    def _balance(self, out: Output) -> None:
        """Experts with less than their share become likelier to be chosen, without a loss (by sign, as published)."""
        for layer, load in out.loads.items():
            share = load / load.sum()
            self.loads[layer].lerp_(share, 0.02)
            self.biases[layer] += self.optimizer.recipe.bias_rate * self.rate * torch.sign(share.mean() - share)

    def prepare(self, rows: int, length: int, graph: bool) -> Callable[[Tensor], None]:
        """A function of starts [rows] that runs one step, from a graph where there is a GPU and `graph` says so."""
        for value in self.optimizer.all:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        static = torch.zeros(rows, dtype=torch.long, device=self.tokens.device)
        replayed = Replayed(lambda: self._body(static, length), self.tokens.device, graph)

        def run(starts: Tensor) -> None:
            static.copy_(starts)
            replayed()

        return run


def train(
    step: Step, sampler: Sampler, plan: Plan, folder: Path, say: Say, resume: bool = False
) -> Iterator[dict[str, float]]:
    """Run the plan, yielding a line of figures about every five seconds. Saves folder/state.pt now and then.

    Raises NonFinite if the loss is no number, EngineError if a saved state belongs to another plan.
    """
    device = step.tokens.device
    state = load_state(step, plan, folder, ("seed", "steps", "rows"), device) if resume else {}
    first, seen, spent = state.get("step", 0), state.get("seen", {}), state.get("spent_s", 0.0)
    begun = time.monotonic() - spent
    said = saved = time.monotonic()
    done_steps = 0
    run: Callable[[Tensor], None] | None = None
    length = 0
    last = first
    pace = Pace(device)
    for number in range(first, plan.steps):
        elapsed = time.monotonic() - begun
        done = max(number / plan.steps, elapsed / (plan.minutes * 60) if plan.minutes else 0.0)
        if done >= 1.0:
            break
        wanted = plan.long_length if done >= 1.0 - plan.long_part else plan.length
        rows = plan.tokens_per_step // wanted
        if wanted != length:
            length, run = wanted, step.prepare(rows, wanted, plan.graph)
        step.rate.fill_(schedule(plan, number, done))
        step.mtp_weight.fill_(plan.mtp_weight)
        drawn = seen.get(length, 0)
        starts = torch.from_numpy(sampler.starts(drawn, rows, length))
        seen[length] = drawn + rows
        assert run is not None
        pace.wait()
        run(starts)
        pace.mark()
        last = number + 1
        done_steps += 1
        now = time.monotonic()
        if now - said >= 5 or number + 1 == plan.steps:
            yield _figures(step, plan, number + 1, done, now - begun, done_steps / max(time.monotonic() - said, 1e-9))
            said, done_steps = time.monotonic(), 0
        if now - saved >= plan.save_minutes * 60:
            save_state(step, plan, folder, number + 1, now - begun, seen=seen)
            saved = now
            say(f"saved {folder / 'state.pt'}")
    save_state(step, plan, folder, last, time.monotonic() - begun, seen=seen)


def _figures(step: Step, plan: Plan, number: int, done: float, elapsed: float, speed: float) -> dict[str, float]:
    main, drafted, count = step.sums.tolist()
    main, drafted = main / max(count, 1), drafted / max(count, 1)
    step.sums.zero_()
    if not count or main != main:
        raise NonFinite(f"the loss is {main} at step {number}", "resume from the last state with a lower --rate")
    worst = max((float(load.max() * load.numel()) for load in step.loads.values()), default=0.0)
    return {
        "step": number,
        "done": round(done, 4),
        "loss": round(main, 4),
        "mtp_loss": round(drafted, 4),
        "rate": round(float(step.rate), 6),
        "grad_norm": round(float(step.optimizer.norm), 3),
        "busiest_expert": round(worst, 2),
        "tok_s": round(speed * plan.tokens_per_step),
        "tokens": number * plan.tokens_per_step,
        "elapsed_s": round(elapsed, 1),
    }
