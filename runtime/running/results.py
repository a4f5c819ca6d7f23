"""Reading what an entry returned: a tensor, a list, a tuple, a dict or any object with an output-like field."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddaudit.runtime.errors import RunError

_ID_FIELDS: tuple[str, ...] = (
    "output_ids",
    "generated_ids",
    "sequences",
    "output_token_ids",
    "generated_tokens",
    "output_tokens",
)
_ID_FIELDS += ("generated", "new_token_ids", "new_tokens", "token_ids", "tokens", "ids", "output", "outputs", "result")
_ACCEPTANCE_FIELDS: tuple[str, ...] = (
    "acceptance_lengths",
    "acceptance_length",
    "accept_lengths",
    "accepted_lengths",
    "accept_lens",
)
_ACCEPTANCE_FIELDS += ("acceptance_lens", "accept_length", "accepted_lens", "mean_acceptance_length")
_STAGE_FIELDS = ("stage_times", "stage_s", "stage_seconds", "timings", "stage_time")


@dataclass(frozen=True)
class Output:
    """What one call of an entry gave back."""

    generated_ids: tuple[int, ...]
    acceptance_lengths: tuple[float, ...]
    """Empty where the entry does not return them."""
    stage_s: dict[str, float]


def drain(returned: Any) -> Any:
    """Run a generator of tokens, or of pieces of text ids, to its end; anything else is left as it is."""
    if not inspect.isgenerator(returned):
        return returned
    return [int(token) for part in returned for token in _pieces(part)]


def read_output(returned: Any, prompt_ids: Sequence[int]) -> Output:
    """The generated ids without the prompt, and the figures that came with them."""
    ids = _find_ids(returned)
    if ids is None:
        raise RunError(
            f"the entry returned {_describe(returned)}, in which no token ids were found",
            "name an entry that returns ids, a tuple that starts with them, or an object with `output_ids`",
        )
    if ids[: len(prompt_ids)] == list(prompt_ids):
        ids = ids[len(prompt_ids) :]
    holders = [returned, *returned] if isinstance(returned, tuple) else [returned]
    lengths = next((v for h in holders if (v := _numbers(_field(h, _ACCEPTANCE_FIELDS)))), ())
    stages = next((s for h in holders if (s := _seconds(_field(h, _STAGE_FIELDS)))), {})
    return Output(tuple(ids), lengths, stages)


def _find_ids(value: Any) -> list[int] | None:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool or value.dim() not in (1, 2):
            return None
        return [int(token) for token in (value[0] if value.dim() > 1 else value).tolist()]
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, numbers.Integral) for item in value):
        return [int(item) for item in value]
    for name in _ID_FIELDS:
        held = _get(value, name)
        if held is not None and (ids := _find_ids(held)) is not None:
            return ids
    if isinstance(value, (list, tuple)):
        return next((ids for item in value if (ids := _find_ids(item)) is not None), None)
    return None


def _pieces(part: Any) -> list[Any]:
    ids = _find_ids(part)
    return [part] if ids is None else ids


def _field(holder: Any, names: Sequence[str]) -> Any:
    return next((value for name in names if (value := _get(holder, name)) is not None), None)


def _get(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    if isinstance(holder, (str, torch.Tensor, list, int, float)):
        return None
    return getattr(holder, name, None)


def _numbers(value: Any) -> tuple[float, ...]:
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    if isinstance(value, numbers.Real):
        value = [value]
    if isinstance(value, (list, tuple)) and all(_is_number(item) for item in value):
        return tuple(float(item) for item in value)
    return ()


def _seconds(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): float(time) for name, time in value.items() if _is_number(time)}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"a `{type(value).__name__}` ({text if len(text) <= 60 else text[:57] + '...'})"
