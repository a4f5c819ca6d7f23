"""The short causal convolution of a window, along parents, as a custom op.

The reference is `gated_delta.convolve`; on CUDA with Triton, `fused_convolution` does the same.
"""

from __future__ import annotations

from typing import Any

import torch

from ddaudit.runtime.caches import gated_delta
from ddaudit.runtime.kernels import has_triton


@torch.library.custom_op("ddaudit::tree_convolution", mutates_args=("inputs_out",))
def tree_convolution(
    inputs: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_silu: bool,
    inputs_out: torch.Tensor,
) -> torch.Tensor:
    """Each node's convolution, reading along its parents instead of its neighbours.

    Args:
        inputs: `[B, T, C]`, of the window.
        state: `[B, C, kernel]`, the last committed inputs.
        taps: `[T, kernel]` int64, from `Window.taps`.
        weight: `[C, kernel]`, depthwise; `bias`: `[C]` or None.
        has_silu: whether SiLU follows.
        inputs_out: `[B, T, C]`, overwritten with the inputs, which a commit needs.

    Returns:
        `[B, T, C]` in the dtype of `inputs`.
    """
    inputs_out.copy_(inputs)
    function = torch.nn.functional.silu if has_silu else None
    convolved = gated_delta.convolve(inputs.transpose(1, 2), state, taps, weight, bias, function)
    return convolved.transpose(1, 2).contiguous()


@tree_convolution.register_fake
def _(inputs: torch.Tensor, *_: Any) -> torch.Tensor:
    return inputs.new_empty(inputs.shape)


if has_triton():

    @tree_convolution.register_kernel("cuda")
    def _(*arguments: Any) -> Any:
        from ddaudit.runtime.kernels import fused_convolution

        return fused_convolution.convolve(*arguments)
