"""Triton kernel for the short convolution of a window; imported only where Triton is.

Shapes: B batch, T nodes, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHANNELS = 512
"""Of one program: a node's channels lie side by side, so reads and writes are whole."""
_NODES = 4
"""Of one program, in larger windows: the weights are read once for all of them."""


@triton.jit
def _convolve(
    inputs, state, taps, weight, bias, output, inputs_out, T, C,
    stride_ib, stride_it, stride_sb, stride_ob, stride_ot,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the channels of a few nodes."""
    batch = tl.program_id(2).to(tl.int64)
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_node, is_channel = node < T, channel < C
    in_tile = is_node[:, None] & is_channel[None, :]
    inputs += batch * stride_ib + channel[None, :]
    own = tl.load(inputs + node[:, None] * stride_it, mask=in_tile, other=0.0)
    tl.store(inputs_out + batch * stride_ob + node[:, None] * stride_ot + channel[None, :], own, mask=in_tile)
    total = tl.zeros([NODES, BLOCK], tl.float32)
    for step in tl.static_range(KERNEL):
        tap = tl.load(taps + node * KERNEL + step, mask=is_node, other=0)[:, None]
        is_past = tap < KERNEL
        past = tl.load(state + batch * stride_sb + channel[None, :] * KERNEL + tap, mask=in_tile & is_past, other=0.0)
        new = tl.load(inputs + (tap - KERNEL) * stride_it, mask=in_tile & (is_past == 0), other=0.0)
        of_step = tl.load(weight + channel * KERNEL + step, mask=is_channel, other=0.0)
        total += tl.where(is_past, past, new).to(tl.float32) * of_step.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    # The stock layer convolves in the weight's dtype and applies the activation to that.
    total = total.to(weight.dtype.element_ty).to(tl.float32)
    if HAS_SILU:
        total = (total * tl.sigmoid(total)).to(weight.dtype.element_ty).to(tl.float32)
    place = output + (batch * T + node[:, None]) * C + channel[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=in_tile)


def convolve(
    inputs: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_silu: bool,
    inputs_out: torch.Tensor,
) -> torch.Tensor:
    """As the op `ddaudit::tree_convolution`, which says the shapes; rows of C are contiguous."""
    B, T, C = inputs.shape
    kernel = weight.shape[-1]
    output = torch.empty(B, T, C, dtype=inputs.dtype, device=inputs.device)
    block = min(_CHANNELS, triton.next_power_of_2(C))
    nodes = _NODES if T >= 32 else 1
    _convolve[(triton.cdiv(T, nodes), triton.cdiv(C, block), B)](
        inputs, state, taps, weight, weight if bias is None else bias, output, inputs_out, T, C,
        *inputs.stride()[:2], state.stride(0), *inputs_out.stride()[:2],
        KERNEL=kernel, HAS_BIAS=bias is not None, HAS_SILU=has_silu, NODES=nodes, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return output
