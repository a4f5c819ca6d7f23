"""Counting and timing what an entry does with its target, its drafter and its caches, from outside."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.caches.commits import watched_commits
from ddaudit.runtime.checks.decoding import clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

STAGES = ("draft", "verify", "commit")
"""What is timed of a round; the rest is the fork's own work, `host`."""


@dataclass
class Meter:
    """Filled while an entry runs under `metered`; read after it has ended."""

    device: torch.device
    prompt_length: int
    rounds: int = 0
    """Forwards of the target after the prompt was read."""
    num_fed: int = 0
    """Tokens in those forwards, the rejected ones included."""
    num_drafts: int = 0
    """Forwards of the drafter."""
    num_draft_heads: int = 0
    """Calls of the target's head on what the drafter gave."""
    num_commits: int = 0
    cache: Any = None
    """The last one that the target was given."""
    draft_cache: Any = None
    last_forward: str = ""
    """`draft` or `verify`, empty before the first."""
    start_s: float = 0.0
    prefill_end_s: float | None = None
    end_s: float = 0.0
    _num_read: int = 0
    _inside: list[object] = field(default_factory=list)
    """What has been entered and not left. The outermost counts: a drafter that asks the target is drafting still."""
    _stage: str = ""
    _entered: Any = None
    _length: int = 0
    _spans: list[tuple[str, Any, Any]] = field(default_factory=list)

    @property
    def decode_s(self) -> float:
        """From the end of the prefill, or from the start where no prefill was seen."""
        return self.end_s - (self.prefill_end_s if self.prefill_end_s is not None else self.start_s)

    def stage_s(self) -> dict[str, float]:
        """Seconds after the prefill in each stage, and in `host`, all that lies between them: they add up.

        On a GPU these are the device's times. What the fork does while the device is busy costs nothing, so `host`
        is the time for which the device waits for it, or runs its own small operations.
        """
        stages = dict.fromkeys(STAGES, 0.0)
        for stage, start, end in self._spans:
            is_event = isinstance(start, torch.cuda.Event)
            stages[stage] += start.elapsed_time(end) / 1000 if is_event else end - start
        stages["host"] = max(0.0, self.decode_s - sum(stages.values()))
        return stages

    def enter(self, stage: str, what: object, length: int = 0) -> None:
        if not self._inside:
            self._stage, self._entered, self._length = stage, self._now(), length
        self._inside.append(what)

    def leave(self, what: object) -> None:
        # A hook after a forward also runs where a hook before it raised, and `enter` was never reached.
        if not self._inside or self._inside[-1] is not what:
            return
        self._inside.pop()
        if self._inside:
            return
        is_prefill = self._num_read < self.prompt_length
        if self._stage == "verify":
            self._num_read += self._length
            if is_prefill and self._num_read >= self.prompt_length:
                self.prefill_end_s = clock(self.device)
            elif not is_prefill and self._length:
                self.rounds += 1
                self.num_fed += self._length
        if not is_prefill:
            self._spans.append((self._stage, self._entered, self._now()))

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        call = object()
        self.num_commits += not self._inside
        self.enter("commit", call)
        try:
            yield
        finally:
            self.leave(call)

    def enter_head(self, head: nn.Module) -> None:
        """The head called by itself reads what the last forward gave: the drafter's states, or the decoder's."""
        if self.last_forward:
            self.num_draft_heads += self.last_forward == "draft" and not self._inside
            self.enter(self.last_forward, head)

    def _now(self) -> Any:
        if self.device.type == "cuda":
            # Events, because synchronising would slow what is timed.
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()


@contextlib.contextmanager
def metered(target: nn.Module, drafter: nn.Module | None, prompt_length: int, device: torch.device) -> Iterator[Meter]:
    """Hook the target, the drafter and the calls that commit for one call of an entry."""
    meter = Meter(device, prompt_length)
    handles: list[Any] = []

    def before(stage: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not meter._inside:
            cache = next((value for value in kwargs.values() if hasattr(value, "get_seq_length")), None)
            if stage == "verify":
                meter.cache = cache
            else:
                meter.draft_cache = cache
                meter.num_drafts += 1
            meter.last_forward = stage
        meter.enter(stage, module, num_tokens(args, kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        meter.leave(module)

    def watch(modules: Sequence[nn.Module], stage: str) -> None:
        for module in modules:
            handles.append(module.register_forward_pre_hook(partial(before, stage), with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))

    # Code that calls the decoder and the head by hand never calls the whole model, so all are watched.
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    watch([target] + ([decoder] if decoder is not None and decoder is not target else []), "verify")
    if drafter is not None:
        watch([drafter], "draft")
    head = target.get_output_embeddings() if hasattr(target, "get_output_embeddings") else None
    if head is not None:
        handles.append(head.register_forward_pre_hook(lambda module, args: meter.enter_head(module)))
        handles.append(head.register_forward_hook(after, always_call=True))
    meter.start_s = clock(device)
    try:
        with watched_commits(meter.committing):
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


def num_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tokens a model's forward is given, 0 where that cannot be seen."""
    values = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return int(value.shape[1])
    return 0
