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


class GroupedAttention:
    """As Transformers' `sdpa`, which under a mask copies keys and values for each query head (up to 5.24): six times
    as much, at Qwen3.6-27B's size. Here the query heads that share a K/V head take turns, or flash attention serves
    them at once, where the mask says no more than that each token sees itself and those before it.
    """

    def __init__(self) -> None:
        self._seen: tuple[torch.Tensor, bool] | None = None
        """The mask met last, and whether it is causal: the layers of a forward share one."""

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention `[B, T, Hq, D]` of `query` `[B, Hq, T, D]` to `key` and `value` `[B, Hkv, S, D]`."""
        is_plain = not dropout and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
        if attention_mask is None or attention_mask.shape[1] != 1 or not is_plain:
            stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
            return stock
        groups = query.shape[1] // key.shape[1]
        is_half = query.element_size() == 2 and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_SIZE
        if query.is_cuda and is_half and self._is_causal(attention_mask):
            mask: Any = causal_lower_right(query.shape[2], key.shape[2])
            mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=groups > 1)
        else:
            turns = [
                F.scaled_dot_product_attention(query[:, turn::groups], key, value, attention_mask, scale=scaling)
                for turn in range(groups)
            ]
            mixed = torch.stack(turns, dim=2).flatten(1, 2)
        return mixed.transpose(1, 2).contiguous(), None

    def _is_causal(self, mask: torch.Tensor) -> bool:
        if self._seen is None or self._seen[0] is not mask:
            self._seen = (mask, is_causal_mask(mask))
        return self._seen[1]


def is_causal_mask(mask: torch.Tensor) -> bool:
    """Whether `[..., T, S]`, boolean or additive, lets the last T of S tokens see themselves and all before them."""
    length, num_keys = mask.shape[-2:]
    visible = torch.ones(length, num_keys, dtype=torch.bool, device=mask.device).tril(num_keys - length)
    if mask.dtype == torch.bool:
        return bool((mask == visible).all())
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    # A number other than zero is a bias.
    return bool(torch.where(visible, mask == 0, hidden).all())
