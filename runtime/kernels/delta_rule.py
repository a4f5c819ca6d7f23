"""Verification and commit of a window on gated delta rule layers, as two custom ops.

The reference is `ddaudit.runtime.caches.gated_delta`; on CUDA with Triton, `fused_delta_rule` does the same.
"""

from __future__ import annotations

from typing import Any

import torch

from ddaudit.runtime.caches import gated_delta
from ddaudit.runtime.kernels import has_triton


@torch.library.custom_op("ddaudit::tree_delta_rule", mutates_args=("keys_out", "writes_out", "decay_out"))
def tree_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    ancestors: torch.Tensor,
    keys_out: torch.Tensor,
    writes_out: torch.Tensor,
    decay_out: torch.Tensor,
) -> torch.Tensor:
    """The layer's output at every node of a tree, each as if its root path had been fed alone.

    Args:
        query, key: `[B, T, Hk, K]`, not yet normalised; Hk divides H.
        value: `[B, T, H, V]`.
        g, beta: `[B, T, H]`, log decay (at most 0) and write strength.
        state: `[B, H, K, V]`, float32 and contiguous; before the window, only read.
        ancestors: `[T, T]` boolean, self included, parents first.
        keys_out, writes_out, decay_out: `[B, H, T, K]`, `[B, H, T, V]` and `[B, H, T]`, float32: overwritten with
            the factors that `commit_delta_rule` takes.

    Returns:
        `[B, T, H, V]` in the dtype of `query`.
    """
    output, factors = gated_delta.verify(query, key, value, g, beta, state, ancestors)
    keys_out.copy_(factors.keys)
    writes_out.copy_(factors.writes)
    decay_out.copy_(factors.log_decay)
    return output.contiguous()


@tree_delta_rule.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(value.shape)


@torch.library.custom_op("ddaudit::commit_delta_rule", mutates_args=("state",))
def commit_delta_rule(
    state: torch.Tensor,
    keys: torch.Tensor,
    writes: torch.Tensor,
    decay: torch.Tensor,
    path: torch.Tensor,
    num: torch.Tensor,
) -> None:
    """Feed the first `num` nodes of `path` to the state of every layer; with 0 it stays bit for bit.

    Args:
        state: `[L, B, H, K, V]`, float32 and contiguous, changed in place.
        keys, writes, decay: `[L, B, H, T, K]`, `[L, B, H, T, V]` and `[L, B, H, T]`, from `tree_delta_rule`.
        path: `[T]` int64, nodes from the root on; from `num` on any valid indices.
        num: `[1]` int64.
    """
    step = torch.arange(path.shape[0], device=path.device)
    # A node beyond `num` repeats the last one and writes nothing.
    path = path[torch.minimum(step, (num - 1).clamp(min=0))]
    kept = (step < num).to(writes.dtype)[:, None]
    flat = [x.flatten(0, 1) for x in (state, keys, writes, decay)]
    factors = gated_delta.WindowFactors(flat[1][..., path, :], flat[2][..., path, :] * kept, flat[3][..., path])
    committed = gated_delta.commit(flat[0], factors, step)
    state.copy_(torch.where(num > 0, committed.view_as(state), state))


@commit_delta_rule.register_fake
def _(*_: Any) -> None:
    return None


if has_triton():

    @tree_delta_rule.register_kernel("cuda")
    def _(*arguments: Any) -> Any:
        from ddaudit.runtime.kernels import fused_delta_rule

        return fused_delta_rule.verify(*arguments)

    @commit_delta_rule.register_kernel("cuda")
    def _(*arguments: Any) -> Any:
        from ddaudit.runtime.kernels import fused_delta_rule

        return fused_delta_rule.commit(*arguments)
