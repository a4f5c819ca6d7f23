"""One training loop for both models: seeded, resumable, and on a GPU one CUDA graph a step."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    Batch = tuple[torch.Tensor, ...]

_TIMED_STEPS = (20, 100)
"""Within the warm-up, whose learning rates do not depend on how many steps there will be."""
_EAGER_STEPS = 5
"""Before a graph is captured: kernels are tuned, and the optimizer's state is made."""
_CLIP = 1.0
_LAST_SHARE = 0.02
"""Of the peak learning rate, at the end."""


@dataclass(frozen=True)
class Schedule:
    steps: int
    """At most, where the time is limited."""
    peak_lr: float
    warmup_steps: int
    weight_decay: float = 0.1
    log_every: int = 100
    save_every: int = 1000

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to nearly nothing at the last of `steps`."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_lr * (_LAST_SHARE + (1 - _LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def fit(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    loss_of: Callable[..., torch.Tensor],
    schedule: Schedule,
    state_path: Path,
    progress: Callable[[str], None],
    minutes: float | None = None,
) -> list[tuple[int, float]]:
    """Train `model` in place; the mean loss since the last report, by step.

    With `minutes`, early steps are timed and only as many of the schedule's are taken as fit.

    `batch_of(step)` must depend on the step alone: then a run that goes on from `state_path`, which is written every
    `save_every` steps and at the end, takes the very steps that an uninterrupted one takes.
    """
    device = next(model.parameters()).device
    optimizer = _make_optimizer(model, schedule, device)
    start, schedule, losses = _restore(model, optimizer, schedule, state_path, device)
    if start:
        progress(f"goes on from step {start} of {schedule.steps}")
    take_step = _Step(model, optimizer, loss_of, device)
    total, count, since_s = torch.zeros((), device=device), 0, time.perf_counter()
    begin_s = timed_from_s = since_s
    model.train()
    step = start
    while step < schedule.steps:
        _set_learning_rate(optimizer, schedule.learning_rate(step))
        total += take_step(batch_of(step))
        count += 1
        if minutes and step in _TIMED_STEPS:
            float(total)  # waits for the GPU
            now_s = time.perf_counter()
            if step == _TIMED_STEPS[0]:
                timed_from_s = now_s
            elif start <= _TIMED_STEPS[0]:
                step_s = (now_s - timed_from_s) / (_TIMED_STEPS[1] - _TIMED_STEPS[0])
                fitting = step + 1 + int((60 * minutes - (now_s - begin_s)) / step_s)
                schedule = replace(schedule, steps=max(step + 1, min(schedule.steps, fitting)))
                progress(f"{1e3 * step_s:.1f} ms a step: {schedule.steps} steps")
        if (step + 1) % schedule.log_every == 0 or step + 1 == schedule.steps:
            losses.append((step + 1, round(float(total) / count, 4)))
            step_ms = 1e3 * (time.perf_counter() - since_s) / count
            progress(f"step {step + 1} of {schedule.steps}: loss {losses[-1][1]:.4f}, {step_ms:.1f} ms a step")
            total, count, since_s = torch.zeros((), device=device), 0, time.perf_counter()
            if not math.isfinite(losses[-1][1]):
                raise FloatingPointError(f"the loss is {losses[-1][1]} at step {step + 1}: lower the learning rate")
        # Only with a report: the loss since the last one is no part of the state.
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            _save(model, optimizer, schedule, step + 1, losses, state_path)
        step += 1
    model.eval()
    return losses


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 products on a GPU. A cache of converted weights would outlive the graph that fills it."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
    return context


class _Step:
    """One optimizer step. A model this small would otherwise wait for its launches most of the time."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[..., torch.Tensor],
        device: torch.device,
    ) -> None:
        self.model, self.optimizer, self.loss_of, self.device = model, optimizer, loss_of, device
        self.num_eager = 0
        self.graph: Any = None
        self.inputs: Batch = ()
        self.loss = torch.zeros((), device=device)

    def __call__(self, batch: Batch) -> torch.Tensor:
        if self.device.type != "cuda":
            return self._compute(batch)
        if self.num_eager < _EAGER_STEPS:
            self.num_eager += 1
            # Autograd remembers the stream of its first use, and a capture must not meet the default one.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = self._compute(batch)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if self.graph is None:
            self.inputs = tuple(part.clone() for part in batch)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self._compute(self.inputs)
        for static, part in zip(self.inputs, batch, strict=True):
            static.copy_(part)
        self.graph.replay()
        return self.loss

    def _compute(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device):
            loss = self.loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        return loss.detach()


def _make_optimizer(model: nn.Module, schedule: Schedule, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; matrices alone are decayed: not norms, biases and the decay rates of recurrent layers."""
    decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": schedule.weight_decay}, {"params": others, "weight_decay": 0.0}]
    is_cuda = device.type == "cuda"
    # In a graph the learning rate must be a tensor that is written between replays.
    rate = torch.tensor(schedule.peak_lr, device=device) if is_cuda else schedule.peak_lr
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=is_cuda)


def _set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, path: Path, device: torch.device
) -> tuple[int, Schedule, list[tuple[int, float]]]:
    if not path.is_file():
        return 0, schedule, []
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], replace(schedule, steps=state["steps"]), [(step, loss) for step, loss in state["losses"]]


def _save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    step: int,
    losses: list[tuple[int, float]],
    path: Path,
) -> None:
    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # A run that is killed here leaves the state before.
    unfinished = path.with_suffix(".unfinished")
    torch.save({**weights, "step": step, "steps": schedule.steps, "losses": losses}, unfinished)
    unfinished.replace(path)
