"""What each stage of a round has to move, and how long the device takes to move that, measured in the same run."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.record import Floor, StageCost
from ddaudit.runtime.checks.decoding import clock
from ddaudit.runtime.models.architecture import decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddaudit.runtime.running.metering import Meter

_COPIED_BYTES = {"cuda": 2 * 2**30, "cpu": 2**28}
"""Far more than any cache holds."""
_LARGE_BYTES = 2**20
"""Smaller tensors take as long to launch as to read, and together are nothing."""
_REPEATS = 5
_WIDE = {2: torch.float32, 1: torch.float32}
"""What weights of so many bytes an element are read as in one of the trials: fewer elements, the same bytes."""


def measure_floor(model: Any) -> Floor:
    """The device's speed in copying, and the time of reading the target's weights once, the best of several ways:
    sums over them, or as many bytes at the copying speed, which is the faster one on an H200."""
    device, weights = model.device, weights_read(model)
    size = _COPIED_BYTES.get(device.type, _COPIED_BYTES["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    copy_bytes_per_s = 2 * (size // 2) / _copy_s(size // 2, device)
    total = num_bytes(weights)
    large = [weight for weight in weights if num_bytes([weight]) >= _LARGE_BYTES] or weights
    read_s = min(_best(partial(_each, read, large), device) for read in _READERS)
    return Floor(
        copy_bytes_per_s=copy_bytes_per_s,
        weight_bytes=total,
        weight_read_s=min(read_s * total / num_bytes(large), total / copy_bytes_per_s),
    )


def _copy_s(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    return _best(partial(torch.empty_like(source).copy_, source), device)


def weights_read(model: Any) -> list[torch.Tensor]:
    """The weights that every forward reads: the decoder's and the head's, each once.

    A table of embeddings is looked up in, not read, unless it is the head too. Of experts all are counted.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    found = {id(parameter): parameter for parameter in decoder(model).parameters()}
    found.pop(id(table.weight), None)
    if head is not None:
        found[id(head.weight)] = head.weight
    return [parameter.detach() for parameter in found.values()]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def kv_bytes(cache: Any, length: int) -> int:
    """K and V of `length` tokens, or of as many as a sliding window keeps, over all layers."""
    total = 0
    for layer in getattr(cache, "layers", ()):
        held = min(length, getattr(layer, "sliding_window", None) or length)
        for states in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(states, torch.Tensor) and states.dim() == 4:
                batch, heads, _, width = states.shape
                total += batch * heads * held * width * states.element_size()
    return total


def state_bytes(cache: Any) -> int:
    """Recurrent and convolution states over all layers."""
    kept = [
        getattr(layer, name, None) or {}
        for layer in getattr(cache, "layers", ())
        for name in ("recurrent_states", "conv_states")
    ]
    return num_bytes(state for states in kept for state in states.values() if isinstance(state, torch.Tensor))


def moved_bytes(meter: Meter, target: Any, drafter: Any, num_new: int) -> dict[str, int]:
    """Bytes that the stages of one text had to move, beyond the target's weights in `verify`.

    verify: K/V of the context and the recurrent state read, K/V of the window, embeddings and logits. commit: the
    state read and written, K/V of the accepted tokens likewise. draft: the drafter's weights and context, and the
    head where it was called on the drafter's states.
    """
    context = meter.prompt_length + num_new // 2
    head = target.get_output_embeddings().weight
    table = target.get_input_embeddings().weight
    a_token = num_bytes([table[:1]]) + head.shape[0] * head.element_size() + kv_bytes(meter.cache, 1)
    state = state_bytes(meter.cache)
    drafter_bytes = num_bytes(drafter.parameters()) if isinstance(drafter, torch.nn.Module) else 0
    return {
        "draft": meter.num_drafts * (drafter_bytes + kv_bytes(meter.draft_cache, context))
        + meter.num_draft_heads * num_bytes([head]),
        "verify": meter.rounds * (kv_bytes(meter.cache, context) + state) + meter.num_fed * a_token,
        "commit": meter.num_commits and meter.rounds * 2 * state + 2 * kv_bytes(meter.cache, num_new),
    }


def stage_costs(
    seconds: Mapping[str, float], moved: Mapping[str, int], rounds: int, floor: Floor
) -> tuple[StageCost, ...]:
    """Each stage of the mean round beside its floor, then the round."""
    costs = []
    for name, total in seconds.items():
        extra = moved.get(name, 0) // rounds
        weights = floor.weight_bytes if name == "verify" else 0
        floor_s = extra / floor.copy_bytes_per_s + (floor.weight_read_s if weights else 0.0)
        costs.append(StageCost(name, total / rounds, extra + weights, floor_s))
    whole = StageCost(
        "round",
        sum(cost.seconds for cost in costs),
        sum(cost.bytes for cost in costs),
        sum(cost.floor_s for cost in costs),
    )
    return (*costs, whole)


def token_costs(model: Any, cache: Any, context: int, seconds: float, floor: Floor) -> tuple[StageCost, ...]:
    """One token of plain decoding, as `verify` and `round`: weights, K/V, the state read and written, its logits."""
    head = model.get_output_embeddings().weight
    moved = kv_bytes(cache, context) + 2 * state_bytes(cache) + head.shape[0] * head.element_size()
    return stage_costs({"verify": seconds}, {"verify": moved}, 1, floor)


def _each(read: Callable[[torch.Tensor], Any], weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        read(weight)


def _sum(weight: torch.Tensor) -> torch.Tensor:
    return weight.sum(dtype=torch.float32)


def _sum_wide(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.reshape(-1)
    wide = _WIDE.get(weight.element_size())
    if wide is None or flat.numel() * flat.element_size() % 4 or weight.storage_offset() % 4:
        return flat.sum(dtype=torch.float32)
    return flat.view(wide).sum()


def _product(weight: torch.Tensor) -> torch.Tensor:
    """With one vector, as decoding one token does."""
    rows = weight.flatten(1) if weight.dim() > 1 else weight[None]
    return rows @ rows.new_zeros(rows.shape[1])


_READERS = (_sum, _sum_wide, _product)


def _best(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of several calls, after one that may have to compile or allocate."""
    with torch.no_grad():
        work()
        times = []
        for _ in range(_REPEATS):
            start = clock(device)
            work()
            times.append(clock(device) - start)
    return max(min(times), time.get_clock_info("perf_counter").resolution)
