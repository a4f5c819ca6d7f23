"""The kernels as operators that a trace takes for one step each, whatever they do inside.

They write to memory that the trace does not see: the new rows of keys and values, and what a commit needs. Nothing
else in a trace touches that memory, and declaring the writes would let the compiler hand a kernel a copy of the one
row that stands for all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from ddaudit.runtime.kernels.attention import tree_attention
from ddaudit.runtime.kernels.convolution import tree_convolution
from ddaudit.runtime.kernels.delta_rule import tree_delta_rule


@torch.library.custom_op("ddaudit::window_attention", mutates_args=())
def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_key: torch.Tensor,
    first_value: torch.Tensor,
    start: torch.Tensor,
    visible: torch.Tensor,
    offsets: torch.Tensor | None,
    scale: float,
    sliding_window: int,
) -> torch.Tensor:
    """Attention `[B, T, Hq, D]` of a window's queries to the `start` rows before it and what each node sees of it.

    `first_key` and `first_value`, `[B, H, 1, D]`, are the first row of the layer's memory; the others follow by its
    stride. The window's own rows are written behind the `start` first. `offsets` are the nodes' places after `start`,
    None where there is no `sliding_window`, which is 0 then.
    """
    places = start.expand(query.shape[2]) if offsets is None else offsets
    rows = min(_num_rows(first_key), _num_rows(first_value))
    if not start.is_cuda:
        # The plain version looks at every row that it is given.
        rows = min(rows, int(start) + key.shape[2])
    keys, values = (
        first.as_strided((*first.shape[:2], rows, first.shape[3]), first.stride()) for first in (first_key, first_value)
    )
    return tree_attention(query, key, value, keys, values, start, visible, places, scale, sliding_window)


@window_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, length, size = query.shape
    return query.new_empty(batch, length, heads, size)


def _num_rows(first: torch.Tensor) -> int:
    """As many rows as the memory behind `first` has from there on."""
    held = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    rows: int = (held - (first.shape[1] - 1) * first.stride(1) - first.shape[3]) // first.stride(2) + 1
    return rows


@torch.library.custom_op("ddaudit::window_delta_rule", mutates_args=())
def window_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    visible: torch.Tensor,
    keys: torch.Tensor,
    writes: torch.Tensor,
    log_decay: torch.Tensor,
) -> torch.Tensor:
    """The gated delta rule `[B, T, H, V]` at every node of a window, as `gated_delta.verify`, which also says the
    shapes; the factors go to `keys`, `writes` and `log_decay`."""
    return tree_delta_rule(query, key, value, g, beta, state, visible, keys, writes, log_decay)


@window_delta_rule.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(value.shape)


@torch.library.custom_op("ddaudit::window_convolution", mutates_args=())
def window_convolution(
    inputs: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_silu: bool,
    kept: torch.Tensor,
) -> torch.Tensor:
    """The short convolution `[B, T, C]` at every node of a window; its inputs go to `kept`."""
    return tree_convolution(inputs, state, taps, weight, bias, has_silu, kept)


@window_convolution.register_fake
def _(inputs: torch.Tensor, *_: Any) -> torch.Tensor:
    return inputs.new_empty(inputs.shape)
