"""Attention of a window over a preallocated past, as one custom op.

On CUDA with Triton, `fused_attention` does the same.
"""

from __future__ import annotations

from typing import Any

import torch

from ddaudit.runtime.kernels import has_triton


@torch.library.custom_op("ddaudit::tree_attention", mutates_args=("key_buffer", "value_buffer"))
def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    start: torch.Tensor,
    visible: torch.Tensor,
    offsets: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Each node over the past and the new keys it may see; the new keys and values are appended to the buffers.

    Args:
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, N, D]`, the new ones; Hkv divides Hq.
        key_buffer, value_buffer: `[B, Hkv, C, D]`: rows before `start` are the past, rows `start` to `start + N - 1`
            are overwritten, the others are not read.
        start: `[1]` int64.
        visible: `[T, N]` boolean, the new keys each node sees: at least one.
        offsets: `[T]` int64; node i stands at `start + offsets[i]`.
        scale: of the scores.
        window: a node sees the past less than this far back; 0 for all of it.

    Returns:
        `[B, T, Hq, D]` in the dtype of `query`.
    """
    B, Hq, T, D = query.shape
    Hkv, N = key.shape[1:3]
    new = start + torch.arange(N, device=key.device)
    key_buffer.index_copy_(2, new, key)
    value_buffer.index_copy_(2, new, value)

    column = torch.arange(key_buffer.shape[2], device=key.device)
    is_seen = (column < start).expand(T, -1)
    if window:
        is_seen = is_seen & ((start + offsets)[:, None] - column < window)
    is_new = (column >= start) & (column < start + N)
    is_seen = is_seen | (is_new & visible[:, (column - start).clamp(0, N - 1)])
    # What lies beyond may be anything, and nothing times not-a-number is not nothing.
    values = value_buffer.float().masked_fill(~(column < start + N)[:, None], 0.0)
    grouped = query.float().view(B, Hkv, Hq // Hkv, T, D) * scale
    scores = (grouped @ key_buffer.float().mT[:, :, None]).masked_fill(~is_seen, -torch.inf)
    output = scores.softmax(dim=-1) @ values[:, :, None]
    return output.view(B, Hq, T, D).transpose(1, 2).to(query.dtype).contiguous()


@tree_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    B, Hq, T, D = query.shape
    return query.new_empty(B, T, Hq, D)


if has_triton():

    @tree_attention.register_kernel("cuda")
    def _(*arguments: Any) -> Any:
        from ddaudit.runtime.kernels import fused_attention

        return fused_attention.attend(*arguments)
