"""Triton kernels for products with few nodes; imported only where Triton is.

The weight's rows are the rows of the tensor cores' tiles and the nodes their columns, of which eight are enough: a
window of few nodes wastes nothing.

Shapes: T nodes, N rows and K columns of the weight, P pieces of the columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _row_product(
    inputs, weight, output, N, K, stride_wn, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """`ROWS` rows of the weight with one token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    # Out of range a row repeats the last one, which is cheaper than a mask in the loop.
    weight += tl.minimum(row, N - 1).to(tl.int64)[:, None] * stride_wn + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, K, COLUMNS, num_stages=STAGES):
        has_column = begin + column < K
        # The weights are read once and should not push out of the cache what is read again.
        w = tl.load(weight + begin, mask=has_column[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(inputs + begin + column, mask=has_column, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(output + row, tl.sum(total, axis=1), mask=row < N)


@triton.jit
def _split_product(
    inputs, weight, output, T, N, K, stride_it, stride_wn,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NODES: tl.constexpr, MORE: tl.constexpr, PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of the weight over one piece of its columns, with `NODES` nodes and `MORE` behind them."""
    piece = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    node, later = tl.arange(0, NODES), NODES + tl.arange(0, 16)
    weight += tl.minimum(row, N - 1).to(tl.int64)[:, None] * stride_wn + column[None, :]
    steps = tl.cdiv(tl.cdiv(K, COLUMNS), PIECES)
    total, of_later = tl.zeros([ROWS, NODES], tl.float32), tl.zeros([ROWS, 16], tl.float32)
    for step in tl.range(piece * steps, tl.minimum((piece + 1) * steps, tl.cdiv(K, COLUMNS)), num_stages=STAGES):
        begin = step * COLUMNS
        has_column = begin + column < K
        w = tl.load(weight + begin, mask=has_column[None, :], other=0.0, eviction_policy="evict_first")
        place = inputs + (begin + column)[:, None]
        x = tl.load(place + node[None, :] * stride_it, mask=(node < T)[None, :] & has_column[:, None], other=0.0)
        total = tl.dot(w, x, acc=total)
        if MORE:
            x = tl.load(place + later[None, :] * stride_it, mask=(later < T)[None, :] & has_column[:, None], other=0.0)
            of_later = tl.dot(w, x, acc=of_later)
    output += piece.to(tl.int64) * T * N + row[:, None]
    tl.store(output + node[None, :] * N, total, mask=(row < N)[:, None] & (node < T)[None, :])
    if MORE:
        tl.store(output + later[None, :] * N, of_later, mask=(row < N)[:, None] & (later < T)[None, :])


def row_product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the op `ddaudit::row_product`, which says the shapes."""
    inputs, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs, weight))
    N, K = weight.shape
    output = torch.empty(1, N, dtype=inputs.dtype, device=inputs.device)
    _row_product[(triton.cdiv(N, 8),)](
        inputs, weight, output, N, K, weight.stride(0), ROWS=8, COLUMNS=512, STAGES=3, num_warps=4
    )  # fmt: skip
    return output


def split_product(inputs: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
    """As the op `ddaudit::split_product`, which says the shapes; at most 80 nodes."""
    inputs, weight = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs, weight))
    (T, K), N = inputs.shape, weight.shape[0]
    output = torch.empty(pieces, T, N, dtype=torch.float32, device=inputs.device)
    nodes = min(64, max(16, triton.next_power_of_2(T)))
    stages = 4 if nodes <= 32 else 6 if nodes == T else 5
    _split_product[(triton.cdiv(N, 64), pieces)](
        inputs, weight, output, T, N, K, inputs.stride(0), weight.stride(0),
        ROWS=64, COLUMNS=128, NODES=nodes, MORE=nodes < T, PIECES=pieces, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return output
