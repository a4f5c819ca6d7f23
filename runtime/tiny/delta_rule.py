"""The gated delta rule over whole texts, differentiable, in batched products.

For training alone. Transformers' own torch version solves each chunk row by row; flash-linear-attention's backward
refuses Hopper GPUs with Triton 3.4 to 3.7.0, where its result would be wrong.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_CHUNK = 32


@contextlib.contextmanager
def batched_delta_rule(model: nn.Module) -> Iterator[None]:
    """Within it, the gated delta rule layers of Transformers call `delta_rule` for a whole text."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module_class in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(module_class.forward)
        if not inspect.isfunction(forward):
            continue
        for name in forward.__code__.co_names:
            if name.endswith("chunk_gated_delta_rule"):
                replaced.append((forward.__globals__, name, forward.__globals__[name]))
                forward.__globals__[name] = delta_rule
    try:
        yield
    finally:
        for names, name, original in replaced:
            names[name] = original


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Outputs `[B, T, H, V]` from an empty state; `query`, `key` `[B, T, h, K]`, `value` `[B, T, H, V]`.

    `g` (log decay) and `beta` (write strength) are `[B, T, H]`. The state after the text is not given.
    """
    length, dtype = query.shape[1], query.dtype
    with torch.autocast(query.device.type, enabled=False):
        if use_qk_l2norm_in_kernel:
            query, key = (part.float() * (part.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
                          for part in (query, key))  # fmt: skip
        repeats = value.shape[2] // query.shape[2]
        query, key = (part.repeat_interleave(repeats, dim=2) for part in (query, key))
        query = query * query.shape[-1] ** -0.5
        outputs = _over_chunks(*(_chunks(part.float()) for part in (query, key, value, g[..., None], beta[..., None])))
    return outputs[:, :, :length].transpose(1, 2).to(dtype), None


def _over_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """All in chunks `[B, H, N, C, ...]`; returns `[B, H, N * C, V]`."""
    decay = g.squeeze(-1).cumsum(-1)
    lower = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=query.device).tril()
    # Masked before the exponential: above the diagonal it would overflow, and its gradient be NaN.
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    solved = _unit_lower_inverse((beta * (key @ key.mT) * between).tril(-1))
    writes = solved @ (beta * value)
    reads = solved @ (beta * key * decay.exp()[..., None])
    inner = (query @ key.mT) * between
    query = query * decay.exp()[..., None]
    last = decay[..., -1:]
    key = (key * (last - decay).exp()[..., None]).mT
    kept = last.exp()[..., None]
    num_chunks = query.shape[2]
    query, key, inner, writes, reads, kept = (
        part.flatten(0, 1).unbind(1) for part in (query, key, inner, writes, reads, kept)
    )
    state = writes[0].new_zeros(len(writes[0]), key[0].shape[1], value.shape[-1])
    outputs = []
    for index in range(num_chunks):
        new = torch.baddbmm(writes[index], reads[index], state, alpha=-1)
        outputs.append(torch.baddbmm(inner[index] @ new, query[index], state))
        state = torch.baddbmm(state * kept[index], key[index], new)
    return torch.cat(outputs, dim=1).view(*value.shape[:2], -1, value.shape[-1])


def _unit_lower_inverse(below: torch.Tensor) -> torch.Tensor:
    """`(I + below)^-1` for strictly lower triangular `below` `[..., C, C]`, C a power of two.

    Diagonal blocks are joined in pairs. A series in powers of `below` takes as many products and loses all digits
    where keys repeat, as in text they do.
    """
    size = below.shape[-1]
    place = torch.arange(size, device=below.device)
    inverse = torch.eye(size, device=below.device, dtype=below.dtype).expand_as(below)
    block = 1
    while block < size:
        half = place // block
        joins = (half[:, None] == half + 1) & (half % 2 == 0)
        inverse = inverse - inverse @ (below * joins) @ inverse
        block *= 2
    return inverse


def _chunks(states: torch.Tensor) -> torch.Tensor:
    """`[B, T, H, D]` to `[B, H, N, C, D]`, zeros after the end: they write nothing."""
    padded = F.pad(states.transpose(1, 2), (0, 0, 0, -states.shape[1] % _CHUNK))
    return padded.unflatten(2, (-1, _CHUNK))
