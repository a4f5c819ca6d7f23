"""Triton kernels for attention of a window over a long past; imported only where Triton is.

Flash decoding (Dao, Haziza, Massa and Sizov, 2023): the past is cut into a fixed number of shares, one program each,
and a second kernel joins what they found. The query heads that share a K/V head are rows of one product, so K and V
are read once for all of them. Where the past ends is read on the device: a captured graph serves any length.

Shapes: B batch, T nodes, N new keys, C capacity, Hq query and Hkv key heads, D head size.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_SHARES = 64
"""At most; what the second kernel reads grows with it."""


@dataclass(frozen=True)
class AttentionLaunch:
    """How the two kernels are cut up."""

    block_rows: int
    """Rows, nodes times the query heads of one K/V head, of one program."""
    block_keys: int
    shares: int
    """Programs among which the past is divided; one more takes the new keys."""
    num_warps: int = 4
    num_stages: int = 2
    precision: str = "tf32x3"
    """Of float32 inputs; others use their own dtype and add up in float32."""


def attention_launch(query: torch.Tensor, key_buffer: torch.Tensor) -> AttentionLaunch:
    """What fits in registers and shared memory, so that every multiprocessor has a program, and few have two."""
    B, Hq, T, D = query.shape
    Hkv, capacity = key_buffer.shape[1:3]
    rows, is_half = T * Hq // Hkv, query.element_size() == 2
    block_rows = min(128 if is_half else max(16, 4096 // D), max(16, triton.next_power_of_2(rows)), 128)
    block_keys = 64 if is_half and D <= 128 else 32
    multiprocessors, shared_memory = _device(query.device)
    num_stages = 3 if is_half else 1
    while (block_rows + 2 * block_keys * num_stages) * D * query.element_size() > shared_memory and block_rows > 16:
        num_stages, block_rows = (num_stages - 1, block_rows) if num_stages > 1 else (1, block_rows // 2)
    programs = B * Hkv * triton.cdiv(rows, block_rows)
    shares = max(1, min(_SHARES, multiprocessors // programs - 1, triton.cdiv(capacity, block_keys)))
    return AttentionLaunch(block_rows, block_keys, shares, 8 if block_rows * D >= 2**14 else 4, num_stages)


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of memory that a program may share."""
    if device.type != "cuda":
        # Triton's interpreter.
        return 16, 2**17
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


@triton.jit
def _load_tile(rows, column, end, stride, IS_WHOLE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """The rows `column`, those before `end` where the tile is not whole. A mask costs a quarter of the whole loop."""
    of_head = tl.arange(0, BD)
    at = rows + column[:, None] * stride + of_head[None, :]
    if not IS_WHOLE:
        tile = tl.load(at, mask=(column < end)[:, None] & (of_head < D)[None, :], other=0.0)
    elif D < BD:
        tile = tl.load(at, mask=(of_head < D)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _take_in(q, k, v, is_seen, most, total, mixed, scale, SEES_ALL: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of keys into the running maximum, sum and weighted values; the softmax is of base 2."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if not SEES_ALL:
        scores = tl.where(is_seen, scores, float("-inf"))
    now_most = tl.maximum(most, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no maximum to subtract.
    shift = tl.where(now_most == float("-inf"), 0.0, now_most)
    weights = tl.exp2(scores - shift[:, None])
    fading = tl.exp2(most - shift)
    total = total * fading + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(v.dtype), v, acc=mixed * fading[:, None], input_precision=PRECISION)
    return now_most, total, mixed


@triton.jit
def _attend(
    query, key, value, key_buffer, value_buffer, start, visible, offsets, most_out, total_out, mixed_out,
    T, N, HKV, shares, scale, window,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_kbb, stride_kbh, stride_kbc, stride_vbb, stride_vbh, stride_vbc, stride_st,
    GROUPS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows over one share of the past, or over the new keys, which the first block also stores."""
    share = tl.program_id(1)
    batch, head = (tl.program_id(2) // HKV).to(tl.int64), tl.program_id(2) % HKV
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < T * GROUPS
    node = row // GROUPS
    of_head = tl.arange(0, BD)
    has_head = of_head < D
    past = tl.load(start).to(tl.int32)
    q = tl.load(
        query + batch * stride_qb + ((head * GROUPS + row % GROUPS) * stride_qh + node * stride_qt)[:, None] + of_head,
        mask=is_row[:, None] & has_head[None, :],
        other=0.0,
    )
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BD], tl.float32)
    key_buffer += batch * stride_kbb + head * stride_kbh
    value_buffer += batch * stride_vbb + head * stride_vbh

    if share < shares:
        first = 0
        if HAS_WINDOW:
            place = past + tl.load(offsets + node, mask=is_row, other=0).to(tl.int32)
            first = tl.maximum(0, past - window + 1)
        size = tl.cdiv(tl.cdiv(past - first, shares), KEYS) * KEYS
        first += share * size
        end = tl.minimum(first + size, past)
        whole = first + tl.maximum(end - first, 0) // KEYS * KEYS
        for begin in tl.range(first, whole, KEYS):
            column = begin + tl.arange(0, KEYS)
            k = _load_tile(key_buffer, column, end, stride_kbc, True, D, BD)
            v = _load_tile(value_buffer, column, end, stride_vbc, True, D, BD)
            is_seen = (column < end)[None, :]
            if HAS_WINDOW:
                is_seen = place[:, None] - column[None, :] < window
            most, total, mixed = _take_in(q, k, v, is_seen, most, total, mixed, scale, not HAS_WINDOW, PRECISION)
        if whole < end:
            column = whole + tl.arange(0, KEYS)
            k = _load_tile(key_buffer, column, end, stride_kbc, False, D, BD)
            v = _load_tile(value_buffer, column, end, stride_vbc, False, D, BD)
            is_seen = (column < end)[None, :]
            if HAS_WINDOW:
                is_seen = is_seen & (place[:, None] - column[None, :] < window)
            most, total, mixed = _take_in(q, k, v, is_seen, most, total, mixed, scale, False, PRECISION)
    else:
        key += batch * stride_kb + head * stride_kh
        value += batch * stride_vb + head * stride_vh
        for begin in tl.range(0, N, KEYS):
            column = begin + tl.arange(0, KEYS)
            is_key = column < N
            in_tile = is_key[:, None] & has_head[None, :]
            k = _load_tile(key, column, N, stride_kn, False, D, BD)
            v = _load_tile(value, column, N, stride_vn, False, D, BD)
            if tl.program_id(0) == 0:
                kept = (past + column)[:, None]
                tl.store(key_buffer + kept * stride_kbc + of_head[None, :], k, mask=in_tile)
                tl.store(value_buffer + kept * stride_vbc + of_head[None, :], v, mask=in_tile)
            is_seen = tl.load(
                visible + node[:, None] * stride_st + column[None, :], mask=is_row[:, None] & is_key[None, :], other=0
            )
            most, total, mixed = _take_in(q, k, v, is_seen != 0, most, total, mixed, scale, False, PRECISION)

    found = (tl.program_id(2) * (shares + 1) + share).to(tl.int64) * (T * GROUPS) + row
    tl.store(most_out + found, most, mask=is_row)
    tl.store(total_out + found, total, mask=is_row)
    # A row that saw nothing leaves nothing, and the second kernel reads nothing for it.
    has_seen = is_row & (most > float("-inf"))
    tl.store(mixed_out + found[:, None] * D + of_head[None, :], mixed, mask=has_seen[:, None] & has_head[None, :])


@triton.jit
def _join(
    most_in, total_in, mixed_in, output, T, HKV, shares,
    GROUPS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: what its `shares + 1` programs found, weighted by their sums."""
    row, head = tl.program_id(0), tl.program_id(1)
    share = tl.arange(0, BLOCK)
    found = (head * (shares + 1) + share).to(tl.int64) * (T * GROUPS) + row
    is_share = share <= shares
    most = tl.load(most_in + found, mask=is_share, other=float("-inf"))
    weight = tl.exp2(most - tl.max(most, axis=0))
    total = tl.sum(weight * tl.load(total_in + found, mask=is_share, other=0.0), axis=0)
    of_head = tl.arange(0, BD)
    has_seen = most > float("-inf")
    mixed = tl.load(
        mixed_in + found[:, None] * D + of_head[None, :], mask=has_seen[:, None] & (of_head < D)[None, :], other=0.0
    )
    result = tl.sum(mixed * weight[:, None], axis=0) / total
    batch, head = head // HKV, head % HKV
    place = ((batch * T + row // GROUPS) * HKV + head).to(tl.int64) * GROUPS + row % GROUPS
    tl.store(output + place * D + of_head, result, mask=of_head < D)


def attend(
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
    launch: AttentionLaunch | None = None,
) -> torch.Tensor:
    """As the op `ddaudit::tree_attention`, which says the shapes; rows of D are contiguous."""
    B, Hq, T, D = query.shape
    Hkv, N = key.shape[1:3]
    if key_buffer.stride(-1) != 1 or value_buffer.stride(-1) != 1:
        raise ValueError(f"rows of the K/V buffers must be contiguous, found strides {key_buffer.stride()}")
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    launch = launch or attention_launch(query, key_buffer)
    groups = Hq // Hkv
    of_head = {"GROUPS": groups, "D": D, "BD": max(16, triton.next_power_of_2(D))}
    output = query.new_empty(B, T, Hq, D)
    found = (B * Hkv, launch.shares + 1, T * groups)
    most, total = (torch.empty(found, dtype=torch.float32, device=query.device) for _ in range(2))
    mixed = torch.empty(*found, D, dtype=torch.float32, device=query.device)
    tensors = (query, key, value, key_buffer, value_buffer)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    _attend[(triton.cdiv(T * groups, launch.block_rows), launch.shares + 1, B * Hkv)](
        *tensors, start, visible.view(torch.uint8), offsets, most, total, mixed,
        T, N, Hkv, launch.shares, scale * math.log2(math.e), window, *strides, visible.stride(0),
        **of_head, ROWS=launch.block_rows, KEYS=launch.block_keys, HAS_WINDOW=window > 0, PRECISION=launch.precision,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    _join[(T * groups, B * Hkv)](
        most, total, mixed, output, T, Hkv, launch.shares, **of_head, BLOCK=triton.next_power_of_2(launch.shares + 1)
    )
    return output
