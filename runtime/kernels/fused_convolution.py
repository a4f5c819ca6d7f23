"""Triton kernel for the short convolution of a window; imported only where Triton is.

Shapes: B batch, T nodes, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHANNELS = 512
"""Of one program: a node's channels lie side by side, so reads and writes are whole."""


@triton.jit
def _convolve(
    inputs, state, taps, weight, bias, output, inputs_out, T, C,
    stride_ib, stride_it, stride_sb, stride_ob, stride_ot,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one node's channels."""
    node, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < C
    own = tl.load(inputs + batch * stride_ib + node * stride_it + channel, mask=is_channel)
    tl.store(inputs_out + batch * stride_ob + node * stride_ot + channel, own, mask=is_channel)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(KERNEL):
        tap = tl.load(taps + node * KERNEL + step + tl.zeros([BLOCK], tl.int32))
        is_past = tap < KERNEL
        past = tl.load(state + batch * stride_sb + channel * KERNEL + tap, mask=is_channel & is_past, other=0.0)
        in_window = inputs + batch * stride_ib + (tap - KERNEL) * stride_it + channel
        new = tl.load(in_window, mask=is_channel & (is_past == 0), other=0.0)
        of_step = tl.load(weight + channel * KERNEL + step, mask=is_channel, other=0.0)
        total += tl.where(is_past, past, new).to(tl.float32) * of_step.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    # The stock layer convolves in the weight's dtype and applies the activation to that.
    total = total.to(weight.dtype.element_ty).to(tl.float32)
    if HAS_SILU:
        total = (total * tl.sigmoid(total)).to(weight.dtype.element_ty).to(tl.float32)
    tl.store(output + (batch * T + node) * C + channel, total.to(output.dtype.element_ty), mask=is_channel)


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
    _convolve[(T, triton.cdiv(C, block), B)](
        inputs, state, taps, weight, weight if bias is None else bias, output, inputs_out, T, C,
        *inputs.stride()[:2], state.stride(0), *inputs_out.stride()[:2],
        KERNEL=kernel, HAS_BIAS=bias is not None, HAS_SILU=has_silu, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return output
