"""The training loop: one step as a function of static tensors, replayed as a CUDA graph where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ling_local.errors import EngineError, NonFinite
from ling_local.train.batches import Sampler
from ling_local.train.net import Net, Output, forward, linear
from ling_local.train.optim import Optimizer

Say = Callable[[str], None]


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


def schedule(plan: Plan, step: int, done: float) -> float:
    """Learning rate: warm-up by step, flat, then linear to zero as `done` goes to 1."""
    fall = min(1.0, (1.0 - done) / (1.0 - plan.flat))
    return plan.rate * min(1.0, (step + 1) / plan.warmup) * max(fall, 0.0)


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
        """A function of starts [rows] that runs one step; captured after eager runs on a side stream if `graph`."""
        for value in self.optimizer.all:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        if not graph:
            return lambda starts: self._body(starts, length)
        static = torch.zeros(rows, dtype=torch.long, device=self.tokens.device)
        warm = torch.cuda.Stream()
        captured: list[torch.cuda.CUDAGraph] = []
        runs = 0

        def run(starts: Tensor) -> None:
            nonlocal runs
            static.copy_(starts)
            if runs < 3:  # real steps, run eagerly: kernels compile and allocate outside the capture
                warm.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(warm):
                    self._body(static, length)
                torch.cuda.current_stream().wait_stream(warm)
                runs += 1
                return
            if not captured:
                torch.cuda.synchronize()
                captured.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(captured[0]):
                    self._body(static, length)
            captured[0].replay()

        return run


def train(
    step: Step, sampler: Sampler, plan: Plan, folder: Path, say: Say, resume: bool = False
) -> Iterator[dict[str, float]]:
    """Run the plan, yielding a line of figures about every five seconds. Saves folder/state.pt now and then.

    Raises NonFinite if the loss is no number, EngineError if a saved state belongs to another plan.
    """
    device = step.tokens.device
    first, seen, spent = _load(step, plan, folder) if resume else (0, {}, 0.0)
    begun = time.monotonic() - spent
    said = saved = time.monotonic()
    done_steps = 0
    run: Callable[[Tensor], None] | None = None
    length = 0
    last = first
    pace = _Pace(device)
    for number in range(first, plan.steps):
        elapsed = time.monotonic() - begun
        done = max(number / plan.steps, elapsed / (plan.minutes * 60) if plan.minutes else 0.0)
        if done >= 1.0:
            break
        wanted = plan.long_length if done >= 1.0 - plan.long_part else plan.length
        rows = plan.tokens_per_step // wanted
        if wanted != length:
            length, run = wanted, step.prepare(rows, wanted, plan.graph and device.type == "cuda")
        step.rate.fill_(schedule(plan, number, done))
        step.mtp_weight.fill_(plan.mtp_weight)
        drawn = seen.get(length, 0)
        starts = torch.from_numpy(sampler.starts(drawn, rows, length))
        seen[length] = drawn + rows
        assert run is not None
        pace.wait()
        run(starts.to(device))
        pace.mark()
        last = number + 1
        done_steps += 1
        now = time.monotonic()
        if now - said >= 5 or number + 1 == plan.steps:
            yield _figures(step, plan, number + 1, done, now - begun, done_steps / max(time.monotonic() - said, 1e-9))
            said, done_steps = time.monotonic(), 0
        if now - saved >= plan.save_minutes * 60:
            _save(step, plan, folder, number + 1, seen, now - begun)
            saved = now
            say(f"saved {folder / 'state.pt'}")
    _save(step, plan, folder, last, seen, time.monotonic() - begun)


class _Pace:
    """Keeps the host at most one step ahead of the device, so that clock and schedule mean something."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def mark(self) -> None:
        if self.event is not None:
            self.event.record()


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


def _save(step: Step, plan: Plan, folder: Path, number: int, seen: dict[int, int], spent: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "plan": asdict(plan),
        "step": number,
        "seen": seen,
        "spent_s": spent,
        "params": {name: value.detach() for name, value in step.params.items()},
        "optimizer": step.optimizer.state(),
    }
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").replace(folder / "state.pt")


def _load(step: Step, plan: Plan, folder: Path) -> tuple[int, dict[int, int], float]:
    path = folder / "state.pt"
    if not path.exists():
        raise EngineError(f"{path}: nothing to resume from", "start without --resume")
    state = torch.load(path, map_location=step.tokens.device, weights_only=True)
    if state["plan"]["seed"] != plan.seed or state["plan"]["steps"] != plan.steps:
        raise EngineError(f"{path} is of another plan: {state['plan']}", "give the same --steps and --seed")
    with torch.no_grad():
        for name, value in step.params.items():
            value.copy_(state["params"][name])
    step.optimizer.load_state(state["optimizer"])
    return state["step"], state["seen"], state["spent_s"]
