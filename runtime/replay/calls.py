"""What a forward is called for, and the answer that is made of a graph's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.models.architecture import marked, residual_of

if TYPE_CHECKING:
    from torch import nn

_SETTINGS = {"use_cache", "output_hidden_states", "logits_to_keep", "return_dict", "output_attentions"}


def is_plain(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether one text is fed as ids, and nothing is asked for but logits and hidden states."""
    ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    if not isinstance(ids, torch.Tensor) or ids.shape[0] != 1 or (torch.is_grad_enabled() and _trains(model)):
        return False
    known = {"input_ids", "position_ids", "attention_mask", cache_argument(model)} | _SETTINGS
    if any(value is not None for name, value in kwargs.items() if name not in known):
        return False
    if kwargs.get("output_attentions") or kwargs.get("return_dict") is False or kwargs.get("use_cache") is False:
        return False
    if not isinstance(kwargs.get("logits_to_keep", 0), int):
        return False
    if any(getattr(model.config, name, None) for name in ("output_attentions", "output_router_logits")):
        return False
    return positions is None or (positions.dim() == 2 and positions.shape[0] == 1)


def _trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


@dataclass(frozen=True)
class Replayed:
    """What a forward's graph gives; overwritten by its next replay."""

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]
    together: torch.Tensor | None
    """The hidden states, `[L + 1, 1, T, D]`, where they are alike: one copy brings all to the caller."""


def answer(model: nn.Module, cache: Any, kwargs: dict[str, Any], replayed: Replayed, length: int) -> Any:
    """The output that was asked for in `kwargs`, copied, for the first `length` nodes."""
    kept = kwargs.get("logits_to_keep", 0)
    logits = replayed.logits[:, :length][:, -kept:].clone()
    wanted = kwargs.get("output_hidden_states")
    if wanted is None:
        wanted = getattr(model.config, "output_hidden_states", False)
    states: tuple[torch.Tensor | None, ...] | None = None
    if wanted:
        # A list of indices (Transformers 5.24): the others are None.
        num_states = len(replayed.hidden_states)
        chosen = set(range(num_states)) if wanted is True else {index % num_states for index in wanted}
        if len(chosen) == num_states and replayed.together is not None:
            copies = replayed.together[:, :, :length].clone().unbind()
        else:
            copies = tuple(
                state[:, :length].clone() if index in chosen else None
                for index, state in enumerate(replayed.hidden_states)
            )
        states = tuple(
            None if copied is None else _marked_like(state, copied, length)
            for state, copied in zip(replayed.hidden_states, copies, strict=True)
        )
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache, hidden_states=states)


def _marked_like(state: torch.Tensor, copy: torch.Tensor, length: int) -> torch.Tensor:
    residual = residual_of(state)
    return marked(copy, state, None if residual is None else residual[:, :length].clone())
