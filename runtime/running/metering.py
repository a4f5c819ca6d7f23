"""Counting and timing what an entry does with its target and drafter, from outside."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.checks.decoding import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@dataclass
class Meter:
    """Filled while an entry runs under `metered`; read after it has ended."""

    device: torch.device
    prompt_length: int
    rounds: int = 0
    """Forwards of the target after the prompt was read."""
    start_s: float = 0.0
    prefill_end_s: float | None = None
    end_s: float = 0.0
    _num_read: int = 0
    _is_drafting: bool = False
    _spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)

    @property
    def decode_s(self) -> float:
        """From the end of the prefill, or from the start where no prefill was seen."""
        return self.end_s - (self.prefill_end_s if self.prefill_end_s is not None else self.start_s)

    def stage_s(self) -> dict[str, float]:
        """Seconds after the prefill in the target's and the drafter's forwards, and elsewhere."""
        stages = {
            name: sum(
                start.elapsed_time(end) / 1000 if isinstance(start, torch.cuda.Event) else end - start
                for start, end in spans
            )
            for name, spans in self._spans.items()
        }
        stages["other"] = max(0.0, self.decode_s - sum(stages.values()))
        return stages


@contextlib.contextmanager
def metered(target: nn.Module, drafter: nn.Module | None, prompt_length: int, device: torch.device) -> Iterator[Meter]:
    """Hook the target and the drafter for one call of an entry."""
    meter = Meter(device, prompt_length)
    handles = []
    # Code that calls the decoder and the head by hand never calls the whole model, so both are watched.
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    watched = {"target": [target] + ([decoder] if decoder is not None and decoder is not target else [])}
    if drafter is not None:
        watched["draft"] = [drafter]
    for stage, modules in watched.items():
        timer = _Timer(meter, stage)
        for module in modules:
            handles.append(module.register_forward_pre_hook(timer.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(timer.leave, always_call=True))
    meter.start_s = clock(device)
    try:
        yield meter
    finally:
        meter.end_s = clock(device)
        for handle in handles:
            handle.remove()


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The allocator's peak since the last reset, or the process's resident peak where there is no CUDA."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Timer:
    """Spans of one stage's outermost forwards. CUDA events, because synchronising would slow what is timed."""

    def __init__(self, meter: Meter, stage: str) -> None:
        self.meter, self.stage = meter, stage
        self.depth = 0
        self.start: Any = None
        self.length = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A drafter that asks the target is drafting still.
        if self.stage == "target" and self.meter._is_drafting:
            return
        if self.depth == 0:
            self.meter._is_drafting = self.stage == "draft"
            self.start = self._now()
            self.length = _num_tokens(args, kwargs)
        self.depth += 1

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.stage == "target" and self.meter._is_drafting:
            return
        self.depth -= 1
        if self.depth:
            return
        self.meter._is_drafting = False
        meter = self.meter
        if self.stage == "target":
            is_prefill = meter._num_read < meter.prompt_length
            meter._num_read += self.length
            if is_prefill:
                if meter._num_read >= meter.prompt_length:
                    meter.prefill_end_s = clock(meter.device)
                return
            meter.rounds += 1
        meter._spans.setdefault(self.stage, []).append((self.start, self._now()))

    def _now(self) -> Any:
        if self.meter.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()


def _num_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    values = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return int(value.shape[1])
    return 0
