"""Transformers' attention functions, replaced for a while; and one of ours for stock code over a long past."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FLASH_HEAD_SIZE = 256
"""At most."""


@contextmanager
def attending(implementation: str, attend: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, Transformers' attention of the name `implementation` is `attend`."""
    overridden = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = overridden.get(implementation)
    overridden[implementation] = attend
    try:
        yield
    finally:
        del overridden[implementation]
        if before is not None:
            overridden[implementation] = before


def attend_by_group(
    is_chain: bool,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As Transformers' `sdpa`, which under a mask copies keys and values for each query head (up to 5.24), or six
    times at Qwen3.6-27B's size; here the heads that share a K/V head take turns.

    Args:
        is_chain: the mask says no more than that each token sees those before it.
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, S, D]`; Hkv divides Hq.

    Returns:
        `[B, T, Hq, D]`.
    """
    groups = query.shape[1] // key.shape[1]
    if attention_mask is None or attention_mask.shape[1] != 1 or dropout or kwargs.get("position_bias") is not None:
        stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return stock
    is_half = query.element_size() == 2 and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_SIZE
    if is_chain and query.is_cuda and is_half:
        mask: Any = causal_lower_right(query.shape[2], key.shape[2])
        mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=groups > 1)
    else:
        turns = [
            F.scaled_dot_product_attention(query[:, turn::groups], key, value, attention_mask, scale=scaling)
            for turn in range(groups)
        ]
        mixed = torch.stack(turns, dim=2).flatten(1, 2)
    return mixed.transpose(1, 2).contiguous(), None
