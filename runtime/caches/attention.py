"""Taking tokens back from the K and V of attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from ddaudit.runtime.caches.window import node_index

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicLayer


def keep_attention_window(layer: DynamicLayer, length: int, path: tuple[int, ...]) -> None:
    """Keep the nodes of `path` of the last `length` entries of K and V, `[B, H, S, D]`.

    A sliding-window layer that records its past is also cut to what the next forward needs.
    """
    if not layer.is_initialized or layer.keys.numel() == 0:
        return
    past = layer.keys.shape[-2] - length
    layer.keys = _gather(layer.keys, past, path)
    layer.values = _gather(layer.values, past, path)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length += len(path) - length
        excess = layer.keys.shape[-2] - (layer.sliding_window - 1)
        if excess > 0:
            layer.keys, layer.values = layer.keys[..., excess:, :], layer.values[..., excess:, :]


def _gather(states: torch.Tensor, past: int, path: tuple[int, ...]) -> torch.Tensor:
    if path == tuple(range(len(path))):
        return states[..., : past + len(path), :]
    kept = states[..., past:, :].index_select(-2, node_index(path, states.device))
    # In place, so that a round costs the accepted nodes and not the context; a tensor made under inference mode
    # cannot be written outside of it, nor one that autograd watches.
    if states.requires_grad or (states.is_inference() and not torch.is_inference_mode_enabled()):
        return torch.cat([states[..., :past, :], kept], dim=-2)
    states[..., past : past + len(path), :] = kept
    return states[..., : past + len(path), :]
