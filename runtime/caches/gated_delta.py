"""Exact verification and commit of a tree of tokens on a gated delta rule layer.

The recurrence is that of Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464):

    S_t = exp(g_t) S_{t-1} + β_t k_t (v_t - exp(g_t) k_tᵀ S_{t-1})ᵀ,    o_t = S_tᵀ q_t

Unrolled along the path of each node, all nodes of a tree share one unit lower triangular system and the state
S_0 before the window, so nothing is copied per node and nothing is computed again on commit. A chain is a tree.

Shapes: B batch, T nodes, H value heads, K key and V value head size, C convolution channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class WindowFactors:
    """What a verified window adds to the state: each node's key, its write, and the decay along its path."""

    keys: torch.Tensor
    """`[B, H, T, K]`, unit length."""
    writes: torch.Tensor
    """`[B, H, T, V]`: the u of the system, what the node writes at its key."""
    log_decay: torch.Tensor
    """`[B, H, T]`: G, the sum of g from the first node of its path to the node."""


def verify(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    ancestors: torch.Tensor,
) -> tuple[torch.Tensor, WindowFactors]:
    """The layer's output at every node, each as if its root path had been fed alone.

    Args:
        query, key: `[B, T, H or fewer, K]`, not yet normalised.
        value: `[B, T, H, V]`.
        g, beta: `[B, T, H]`, log decay (at most 0) and write strength.
        state: `[B, H, K, V]` before the window, None for zeros.
        ancestors: `[T, T]` boolean, self included, parents first.

    Returns:
        Output `[B, T, H, V]` in the dtype of `query`, and the factors that `commit` needs.
    """
    dtype = query.dtype
    groups = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (query, key))
    query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    query = _unit(query) * query.shape[-1] ** -0.5
    key = _unit(key)

    log_decay = torch.einsum("ij,bhj->bhi", ancestors.float(), g)
    decay = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~ancestors, -torch.inf).exp()
    system = beta[..., None] * (key @ key.mT) * decay
    writes = beta[..., None] * value
    output = torch.zeros_like(value)
    if state is not None:
        from_root = log_decay.exp()[..., None]
        writes = writes - beta[..., None] * from_root * (key @ state)
        output = from_root * (query @ state)
    # `unitriangular` reads only what lies below the diagonal, so the diagonal of `system` need not be cleared.
    writes = torch.linalg.solve_triangular(system, writes, upper=False, unitriangular=True)
    output = output + ((query @ key.mT) * decay) @ writes
    return output.transpose(1, 2).to(dtype), WindowFactors(key, writes, log_decay)


def commit(state: torch.Tensor | None, factors: WindowFactors, path: torch.Tensor) -> torch.Tensor:
    """The state `[B, H, K, V]` after feeding the nodes of `path` (indices `[P]`, P at least 1) alone."""
    log_decay = factors.log_decay[..., path]
    keys, writes = factors.keys[..., path, :], factors.writes[..., path, :]
    last = log_decay[..., -1:]
    added = (keys * (last - log_decay).exp()[..., None]).mT @ writes
    return added if state is None else last[..., None].exp() * state + added


def convolve(
    inputs: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """The short causal convolution `[B, C, T]`, each node reading along its parents instead of its neighbours.

    Args:
        inputs: `[B, C, T]`, the window.
        state: `[B, C, kernel]`, the last committed inputs.
        taps: `[T, kernel]`, from `Window.taps`.
        weight: `[C, kernel]`, depthwise; `bias`: `[C]`.
    """
    read = torch.cat([state, inputs], dim=-1)[..., taps]
    output = (read.float() * weight.float()[:, None, :]).sum(dim=-1)
    if bias is not None:
        output = output + bias.float()[:, None]
    # The stock layer convolves in the weight's dtype and applies the activation to that.
    output = output.to(weight.dtype)
    return (output if activation is None else activation(output)).to(inputs.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    # Inside the root, as Transformers and flash-linear-attention do; 1e-6 is their constant.
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
