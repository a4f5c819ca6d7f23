"""Products of a window with a weight where a library's are slower, as custom ops.

One token reads each row of the weight once, which a sum over rows does faster than a tile of a tensor core. The down
projection of an MLP, far wider than tall, has fewer tiles of rows than a GPU has multiprocessors, so that its columns
are divided too. cuBLAS does that in two kernels; here the pieces are left to the sum that follows, which the compiler
fuses with the residual connection. On CUDA with Triton, `fused_product` does the same as the references here.
"""

from __future__ import annotations

from typing import Any

import torch

from ddaudit.runtime.kernels import has_triton

LARGEST_WINDOW = 80
"""Nodes of which a product goes in pieces."""
_TILE = 64
_RESIDENT = 512
"""Tiles that one H200 works on at a time, four on a multiprocessor."""


def is_fused(weight: torch.Tensor) -> bool:
    """Whether there are kernels for a product with `weight`, `[N, K]`."""
    return weight.is_cuda and has_triton() and weight.element_size() == 2


def num_pieces(num_nodes: int, weight: torch.Tensor) -> int:
    """Into how many pieces the columns of `weight`, `[N, K]`, should go; 1 where a library's product is as fast.

    Measured on one H200 in bfloat16, N = 5,120: K = 17,408 takes 46 us in six pieces and 52 by cuBLAS for 16 nodes,
    50 in three and 52 for 64; K = 6,144 and a tall weight gain nothing.
    """
    rows, columns = len(weight), weight.shape[1]
    if not 1 < num_nodes <= LARGEST_WINDOW or columns < 2 * rows or not is_fused(weight):
        return 1
    resident = _RESIDENT if num_nodes <= 32 else _RESIDENT // 2
    pieces: int = min(resident // -(-rows // _TILE), columns // 512)
    return max(1, pieces)


@torch.library.custom_op("ddaudit::row_product", mutates_args=())
def row_product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`inputs @ weight.T`, `[1, N]` in their dtype, for `inputs` `[1, K]` and `weight` `[N, K]`."""
    return inputs @ weight.T


@row_product.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return inputs.new_empty(1, weight.shape[0])


@torch.library.custom_op("ddaudit::split_product", mutates_args=())
def split_product(inputs: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
    """`inputs @ weight.T` in pieces `[P, T, N]`, float32, whose sum is the product.

    Args:
        inputs: `[T, K]`; `weight`: `[N, K]`.
        pieces: P, of the columns K.
    """
    parts = zip(inputs.float().tensor_split(pieces, 1), weight.float().tensor_split(pieces, 1), strict=True)
    return torch.stack([mine @ its.T for mine, its in parts])


@split_product.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
    return inputs.new_empty(pieces, inputs.shape[0], weight.shape[0], dtype=torch.float32)


if has_triton():

    @row_product.register_kernel("cuda")
    def _(*arguments: Any) -> Any:
        from ddaudit.runtime.kernels import fused_product

        return fused_product.row_product(*arguments)

    @split_product.register_kernel("cuda")
    def _(*arguments: Any) -> Any:
        from ddaudit.runtime.kernels import fused_product

        return fused_product.split_product(*arguments)
