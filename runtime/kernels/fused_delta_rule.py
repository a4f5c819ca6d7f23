"""Triton kernels for a window on gated delta rule layers; imported only where Triton is.

The mathematics is that of `ddaudit.runtime.caches.gated_delta`. What differs is the order of the work:

- Products of queries and keys are taken of the values as they came, and the norms multiply the result: bfloat16
  products are exact in float32, so the tensor cores lose nothing. The state is read as three bfloat16 parts.
- The unit lower triangular system is solved by blocks of 4, 16 and 64 rows. With P the inverse of the diagonal blocks,
  N = P L is nilpotent of order 4 at each level, so x <- P b - N x ends exactly after three rounds. The powers of the
  whole matrix would be fewer products, and lose every digit on a chain of alike keys (binomials up to C(62, 31)).

Shapes: B batch, T nodes, H value heads, K key and V value head size, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class VerifyLaunch:
    """How the tree kernel is cut up."""

    block_nodes: int
    """Rows of one triangular system: 16, 32 or 64. More nodes are taken block after block."""
    block_values: int
    """Columns of the state that one program owns."""
    num_warps: int = 4
    block_keys: int = 64
    """Columns of queries, keys and rows of the state that are in registers at once."""
    precision: str = "tf32x3"
    """Of the products of float32 tiles: `tf32`, `tf32x3` or `ieee`."""
    has_head: bool = False
    """Whether the first node is taken by itself, before the blocks."""


@dataclass(frozen=True)
class CommitLaunch:
    """How the commit kernel is cut up."""

    block_keys: int = 32
    num_warps: int = 4
    precision: str = "tf32x3"


def verify_launch(num_nodes: int, dtype: torch.dtype) -> VerifyLaunch:
    """The fastest on one H200 at 27B size: 15 us a layer for 64 nodes, of which two blocks of 64 take 106.

    A tree of a power of two drafts has one node more, its root, which is taken by itself.
    """
    has_head = num_nodes % 16 == 1
    in_blocks = num_nodes - has_head
    block_nodes = 16 if in_blocks > 64 else max(16, triton.next_power_of_2(in_blocks))
    # What was rounded to bfloat16 on the way in, and is on the way out, has no digits that tf32 would lose.
    precision = "tf32" if dtype == torch.bfloat16 else "tf32x3"
    return VerifyLaunch(
        block_nodes, 32, block_keys=128 if block_nodes == 16 else 64, precision=precision, has_head=has_head
    )


@triton.jit
def _compact(square, ROWS: tl.constexpr):
    """The 16x16 diagonal blocks `[ROWS, 16]` of `[ROWS, ROWS]`."""
    if ROWS == 16:
        return square
    blocks = tl.reshape(square, (ROWS, ROWS // 16, 16))
    row = tl.arange(0, ROWS)[:, None, None] // 16
    return tl.sum(tl.where(row == tl.arange(0, ROWS // 16)[None, :, None], blocks, 0.0), axis=1)


@triton.jit
def _expand(compact, ROWS: tl.constexpr):
    """Undo `_compact`, with zeros outside of the blocks."""
    if ROWS == 16:
        return compact
    row = tl.arange(0, ROWS)[:, None, None] // 16
    blocks = tl.where(row == tl.arange(0, ROWS // 16)[None, :, None], compact[:, None, :], 0.0)
    return tl.reshape(blocks, (ROWS, ROWS))


@triton.jit
def _solve(system, right, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)^-1 right, for `system` strictly lower triangular."""
    diagonal = _compact(system, ROWS)
    row, column = tl.arange(0, ROWS)[:, None] % 16, tl.arange(0, 16)[None, :]
    is_near = row // 4 == column // 4
    near = tl.where(is_near, diagonal, 0.0)
    unit = tl.where(row == column, 1.0, 0.0)
    step = _expand(near, ROWS)
    inverse = unit - near
    for _ in tl.static_range(2):
        inverse = unit - tl.dot(step, inverse, input_precision=PRECISION)

    beyond = tl.dot(_expand(inverse, ROWS), tl.where(is_near, 0.0, diagonal), input_precision=PRECISION)
    step = _expand(beyond, ROWS)
    of_fours = inverse
    for _ in tl.static_range(3):
        inverse = of_fours - tl.dot(step, inverse, input_precision=PRECISION)

    of_blocks = _expand(inverse, ROWS)
    first = tl.dot(of_blocks, right, input_precision=PRECISION)
    solution = first
    if ROWS > 16:
        block = tl.arange(0, ROWS) // 16
        below = tl.where(block[:, None] > block[None, :], system, 0.0)
        step = tl.dot(of_blocks, below, input_precision=PRECISION)
        for _ in tl.static_range(ROWS // 16 - 1):
            solution = first - tl.dot(step, solution, input_precision=PRECISION)
    return solution


@triton.jit
def _times_state(rows, state, PRECISION: tl.constexpr):
    """`rows [R, K]` times `state [K, V]` in float32."""
    if rows.dtype == tl.bfloat16:
        high = state.to(tl.bfloat16)
        rest = state - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(rows, low)
        product = tl.dot(rows, middle, acc=product)
        return tl.dot(rows, high, acc=product)
    return tl.dot(rows.to(tl.float32), state, input_precision=PRECISION)


@triton.jit
def _products(rows, columns, PRECISION: tl.constexpr):
    """`rows [R, K]` times `columns [C, K]` transposed, in float32."""
    if rows.dtype == tl.bfloat16:
        return tl.dot(rows, tl.trans(columns))
    return tl.dot(rows.to(tl.float32), tl.trans(columns).to(tl.float32), input_precision=PRECISION)


@triton.jit
def _squares(rows):
    rows = rows.to(tl.float32)
    return tl.sum(rows * rows, axis=1)


@triton.jit
def _verify_head(
    query, key, value, g, beta, state, keys_out, writes_out, decay_out, output, of_value, has_value, of_share,
    K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The first node by itself: its log decay, its key's inverse norm, and its writes `[BV]`."""
    decay = tl.load(g).to(tl.float32)
    ks, qs = tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32)
    k_square, q_square, qk = 0.0, 0.0, 0.0
    for begin in tl.range(0, K, BK, num_stages=1):
        of_key = begin + tl.arange(0, BK)
        has_key = of_key < K
        k = tl.load(key + of_key, mask=has_key, other=0.0).to(tl.float32)
        q = tl.load(query + of_key, mask=has_key, other=0.0).to(tl.float32)
        s = tl.load(
            state + of_key[:, None] * V + of_value[None, :], mask=has_key[:, None] & has_value[None, :], other=0.0
        )
        ks += tl.sum(k[:, None] * s, axis=0)
        qs += tl.sum(q[:, None] * s, axis=0)
        k_square += tl.sum(k * k, axis=0)
        q_square += tl.sum(q * q, axis=0)
        qk += tl.sum(q * k, axis=0)
    k_norm, q_norm = tl.rsqrt(k_square + 1e-6), tl.rsqrt(q_square + 1e-6) * SCALE
    v = tl.load(value + of_value, mask=has_value, other=0.0).to(tl.float32)
    writes = tl.load(beta).to(tl.float32) * (v - ks * (tl.exp(decay) * k_norm))
    tl.store(writes_out + of_value, writes, mask=has_value)
    tl.store(output + of_value, qs * (tl.exp(decay) * q_norm) + writes * (qk * k_norm * q_norm), mask=has_value)
    tl.store(decay_out, decay)
    shared = tl.load(key + of_share, mask=of_share < K, other=0.0).to(tl.float32)
    tl.store(keys_out + of_share, shared * k_norm, mask=of_share < K)
    return decay, k_norm, writes


@triton.jit
def _verify_tree(
    query, key, value, g, beta, state, ancestors, keys_out, writes_out, decay_out, output,
    T, H, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_bb, stride_bt, stride_bh, stride_at,
    stride_kob, stride_koh, stride_kot, stride_wob, stride_woh, stride_wot, stride_dob, stride_doh,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr,
    HEAD: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SHARE: tl.constexpr,
    BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head and `BV` columns of its state: with `HEAD` the first node, then the others in `BLOCKS` of `ROWS`."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    batch = batch.to(tl.int64)
    query += batch * stride_qb + (head // GROUPS) * stride_qh
    key += batch * stride_kb + (head // GROUPS) * stride_kh
    value += batch * stride_vb + head * stride_vh
    g += batch * stride_gb + head * stride_gh
    beta += batch * stride_bb + head * stride_bh
    state += (batch * H + head) * K * V
    keys_out += batch * stride_kob + head * stride_koh
    writes_out += batch * stride_wob + head * stride_woh
    decay_out += batch * stride_dob + head * stride_doh
    output += batch * T * H * V + head * V

    of_value = tl.program_id(1) * BV + tl.arange(0, BV)
    has_value = of_value < V
    # Every program has the keys; each writes a share of their columns.
    of_share = tl.program_id(1) * SHARE + tl.arange(0, SHARE)

    if HEAD:
        head_decay, head_norm, head_writes = _verify_head(
            query, key, value, g, beta, state, keys_out, writes_out, decay_out, output,
            of_value, has_value, of_share, K, V, SCALE, BK, BV,
        )  # fmt: skip

    for block in tl.range(0, BLOCKS, num_stages=1):
        node = HEAD + block * ROWS + tl.arange(0, ROWS)
        is_node = node < T
        in_value = is_node[:, None] & has_value[None, :]
        v = tl.load(value + node[:, None] * stride_vt + of_value[None, :], mask=in_value, other=0.0).to(tl.float32)
        strength = tl.load(beta + node * stride_bt, mask=is_node, other=0.0).to(tl.float32)
        in_square = is_node[:, None] & is_node[None, :]
        comes_after = tl.load(ancestors + node[:, None] * stride_at + node[None, :], mask=in_square, other=0) != 0
        own = tl.load(g + node * stride_gt, mask=is_node, other=0.0).to(tl.float32)
        decay = tl.sum(tl.where(comes_after, own[None, :], 0.0), axis=1)
        if HEAD:
            after_head = tl.load(ancestors + node * stride_at, mask=is_node, other=0) != 0
            decay += tl.where(after_head, head_decay, 0.0)
            head_kk, head_qk = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for earlier in tl.range(0, block, num_stages=1):
            other = HEAD + earlier * ROWS + tl.arange(0, ROWS)
            seen = tl.load(ancestors + node[:, None] * stride_at + other[None, :], mask=is_node[:, None], other=0) != 0
            decay += tl.sum(tl.where(seen, tl.load(g + other * stride_gt).to(tl.float32)[None, :], 0.0), axis=1)

        # Both of keys with keys, of queries with keys, and of either with the state, a few columns at a time.
        kk, qk = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
        ks, qs = tl.zeros([ROWS, BV], tl.float32), tl.zeros([ROWS, BV], tl.float32)
        k_square, q_square = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for begin in tl.range(0, K, BK, num_stages=1):
            of_key = begin + tl.arange(0, BK)
            has_key = of_key < K
            in_key = is_node[:, None] & has_key[None, :]
            k = tl.load(key + node[:, None] * stride_kt + of_key[None, :], mask=in_key, other=0.0)
            q = tl.load(query + node[:, None] * stride_qt + of_key[None, :], mask=in_key, other=0.0)
            s = tl.load(
                state + of_key[:, None] * V + of_value[None, :], mask=has_key[:, None] & has_value[None, :], other=0.0
            )
            k_square += _squares(k)
            q_square += _squares(q)
            kk += _products(k, k, PRECISION)
            qk += _products(q, k, PRECISION)
            ks += _times_state(k, s, PRECISION)
            qs += _times_state(q, s, PRECISION)
            if HEAD:
                head_k = tl.load(key + of_key, mask=has_key, other=0.0).to(tl.float32)
                head_kk += tl.sum(k.to(tl.float32) * head_k[None, :], axis=1)
                head_qk += tl.sum(q.to(tl.float32) * head_k[None, :], axis=1)
        k_norm, q_norm = tl.rsqrt(k_square + 1e-6), tl.rsqrt(q_square + 1e-6) * SCALE
        # Masked before exp: between branches the difference may be any number.
        fading = tl.exp(tl.where(comes_after, decay[:, None] - decay[None, :], float("-inf")))
        system = kk * (strength * k_norm)[:, None] * k_norm[None, :] * fading
        system = tl.where(node[:, None] == node[None, :], 0.0, system)
        reads = qk * q_norm[:, None] * k_norm[None, :] * fading
        from_root = tl.exp(decay)
        right = strength[:, None] * (v - ks * (from_root * k_norm)[:, None])
        result = qs * (from_root * q_norm)[:, None]
        if HEAD:
            from_head = tl.exp(tl.where(after_head, decay - head_decay, float("-inf"))) * head_norm
            right -= (strength * k_norm * head_kk * from_head)[:, None] * head_writes[None, :]
            result += (q_norm * head_qk * from_head)[:, None] * head_writes[None, :]

        for earlier in tl.range(0, block, num_stages=1):
            other = HEAD + earlier * ROWS + tl.arange(0, ROWS)
            seen = tl.load(ancestors + node[:, None] * stride_at + other[None, :], mask=is_node[:, None], other=0) != 0
            before = tl.load(decay_out + other)
            fading = tl.exp(tl.where(seen, decay[:, None] - before[None, :], float("-inf")))
            kk, qk = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
            other_square = tl.zeros([ROWS], tl.float32)
            for begin in tl.range(0, K, BK, num_stages=1):
                of_key = begin + tl.arange(0, BK)
                has_key = of_key < K
                in_key = is_node[:, None] & has_key[None, :]
                k = tl.load(key + node[:, None] * stride_kt + of_key[None, :], mask=in_key, other=0.0)
                q = tl.load(query + node[:, None] * stride_qt + of_key[None, :], mask=in_key, other=0.0)
                other_k = tl.load(key + other[:, None] * stride_kt + of_key[None, :], mask=has_key[None, :], other=0.0)
                other_square += _squares(other_k)
                kk += _products(k, other_k, PRECISION)
                qk += _products(q, other_k, PRECISION)
            fading *= tl.rsqrt(other_square + 1e-6)[None, :]
            written = tl.load(
                writes_out + other[:, None] * stride_wot + of_value[None, :], mask=has_value[None, :], other=0.0
            )
            right -= tl.dot(kk * (strength * k_norm)[:, None] * fading, written, input_precision=PRECISION)
            result += tl.dot(qk * q_norm[:, None] * fading, written, input_precision=PRECISION)

        writes = _solve(system, right, ROWS, PRECISION)
        result += tl.dot(reads, writes, input_precision=PRECISION)
        tl.store(writes_out + node[:, None] * stride_wot + of_value[None, :], writes, mask=in_value)
        tl.store(output + node[:, None] * H * V + of_value[None, :], result, mask=in_value)
        # The same numbers from every program of the head, so that each may read its own back below.
        tl.store(decay_out + node, decay, mask=is_node)
        in_share = is_node[:, None] & (of_share < K)[None, :]
        shared = tl.load(key + node[:, None] * stride_kt + of_share[None, :], mask=in_share, other=0.0)
        tl.store(
            keys_out + node[:, None] * stride_kot + of_share[None, :],
            shared.to(tl.float32) * k_norm[:, None],
            mask=in_share,
        )
        if BLOCKS > 1:
            # The next block reads back what other threads of this program wrote.
            tl.debug_barrier()


@triton.jit
def _verify_one(
    query, key, value, g, beta, state, keys_out, writes_out, decay_out, output,
    H, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh, stride_bb, stride_bh,
    stride_kob, stride_koh, stride_wob, stride_woh, stride_dob, stride_doh,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A single node: no system, and no product large enough for a tensor core."""
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    batch = batch.to(tl.int64)
    of_key = tl.arange(0, BK)
    of_value = tl.program_id(1) * BV + tl.arange(0, BV)
    has_key, has_value = of_key < K, of_value < V
    s = tl.load(
        state + (batch * H + head) * K * V + of_key[:, None] * V + of_value[None, :],
        mask=has_key[:, None] & has_value[None, :],
        other=0.0,
    )
    q = tl.load(query + batch * stride_qb + (head // GROUPS) * stride_qh + of_key, mask=has_key, other=0.0)
    k = tl.load(key + batch * stride_kb + (head // GROUPS) * stride_kh + of_key, mask=has_key, other=0.0)
    v = tl.load(value + batch * stride_vb + head * stride_vh + of_value, mask=has_value, other=0.0).to(tl.float32)
    decay = tl.load(g + batch * stride_gb + head * stride_gh).to(tl.float32)
    strength = tl.load(beta + batch * stride_bb + head * stride_bh).to(tl.float32)
    q, k = q.to(tl.float32), k.to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * SCALE)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    s = s * tl.exp(decay)
    writes = strength * (v - tl.sum(k[:, None] * s, axis=0))
    result = tl.sum(q[:, None] * s, axis=0) + tl.sum(q * k, axis=0) * writes
    tl.store(writes_out + batch * stride_wob + head * stride_woh + of_value, writes, mask=has_value)
    tl.store(output + (batch * H + head) * V + of_value, result, mask=has_value)
    if tl.program_id(1) == 0:
        tl.store(decay_out + batch * stride_dob + head * stride_doh, decay)
        tl.store(keys_out + batch * stride_kob + head * stride_koh + of_key, k, mask=has_key)


@triton.jit
def _commit(
    state, keys, writes, decay, path, num,
    B, H, stride_kl, stride_kb, stride_kh, stride_kt, stride_wl, stride_wb, stride_wh, stride_wt,
    stride_dl, stride_db, stride_dh,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`BK` rows of one head's state of one layer: a contiguous piece, read and written once."""
    count = tl.load(num).to(tl.int32)
    if count > 0:
        head = tl.program_id(0) % H
        batch = (tl.program_id(0) // H % B).to(tl.int64)
        layer = (tl.program_id(0) // H // B).to(tl.int64)
        keys += layer * stride_kl + batch * stride_kb + head * stride_kh
        writes += layer * stride_wl + batch * stride_wb + head * stride_wh
        decay += layer * stride_dl + batch * stride_db + head * stride_dh
        of_key = tl.program_id(1) * BK + tl.arange(0, BK)
        of_value = tl.arange(0, BV)
        has_key, has_value = of_key < K, of_value < V
        place = state + tl.program_id(0).to(tl.int64) * K * V + of_key[:, None] * V + of_value[None, :]
        in_state = has_key[:, None] & has_value[None, :]
        s = tl.load(place, mask=in_state, other=0.0)
        last = tl.load(decay + tl.load(path + count - 1))
        s *= tl.exp(last)
        for begin in range(0, count, 16):
            step = begin + tl.arange(0, 16)
            is_step = step < count
            node = tl.load(path + step, mask=is_step, other=0)
            fading = tl.exp(tl.where(is_step, last - tl.load(decay + node, mask=is_step, other=0.0), float("-inf")))
            k = tl.load(
                keys + node[None, :] * stride_kt + of_key[:, None],
                mask=is_step[None, :] & has_key[:, None],
                other=0.0,
            )
            u = tl.load(
                writes + node[:, None] * stride_wt + of_value[None, :],
                mask=is_step[:, None] & has_value[None, :],
                other=0.0,
            )
            s += tl.dot(k * fading[None, :], u, input_precision=PRECISION)
        tl.store(place, s, mask=in_state)


def verify(
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
    launch: VerifyLaunch | None = None,
) -> torch.Tensor:
    """As the op `ddaudit::tree_delta_rule`, which says the shapes."""
    B, T, H, V = value.shape
    if not state.is_contiguous() or keys_out.stride(-1) != 1 or writes_out.stride(-1) != 1 or decay_out.stride(-1) != 1:
        raise ValueError("`state` must be contiguous, and so must the rows of the factors written")
    query, key, value, ancestors = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, ancestors))
    K = key.shape[-1]
    output = torch.empty(value.shape, dtype=query.dtype, device=query.device)
    launch = launch or verify_launch(T, query.dtype)
    of_head = {"GROUPS": H // key.shape[2], "K": K, "V": V, "SCALE": K**-0.5}
    block_values = max(16, min(launch.block_values, triton.next_power_of_2(V)))
    grid = (B * H, triton.cdiv(V, block_values))
    tensors = (query, key, value, g, beta, state)
    outs = (*keys_out.stride()[:2], *writes_out.stride()[:2], *decay_out.stride()[:2])
    if T == 1:
        by_head = [x.stride(dim) for x in (query, key, value, g, beta) for dim in (0, 2)]
        _verify_one[grid](
            *tensors, keys_out, writes_out, decay_out, output, H, *by_head, *outs,
            **of_head, BK=max(16, triton.next_power_of_2(K)), BV=block_values, num_warps=launch.num_warps,
        )  # fmt: skip
        return output
    block_keys = max(16, min(launch.block_keys, triton.next_power_of_2(K)))
    strides = [stride for x in (query, key, value, g, beta) for stride in x.stride()[:3]]
    _verify_tree[grid](
        *tensors, ancestors.view(torch.uint8), keys_out, writes_out, decay_out, output,
        T, H, *strides, ancestors.stride(0),
        *keys_out.stride()[:3], *writes_out.stride()[:3], *decay_out.stride()[:2],
        **of_head, HEAD=int(launch.has_head), ROWS=launch.block_nodes, BK=block_keys, BV=block_values,
        SHARE=triton.next_power_of_2(triton.cdiv(K, grid[1])),
        BLOCKS=triton.cdiv(T - launch.has_head, launch.block_nodes), PRECISION=launch.precision,
        num_warps=launch.num_warps,
    )  # fmt: skip
    return output


def commit(
    state: torch.Tensor,
    keys: torch.Tensor,
    writes: torch.Tensor,
    decay: torch.Tensor,
    path: torch.Tensor,
    num: torch.Tensor,
    launch: CommitLaunch | None = None,
) -> None:
    """As the op `ddaudit::commit_delta_rule`, which says the shapes."""
    L, B, H, K, V = state.shape
    if not state.is_contiguous() or keys.stride(-1) != 1 or writes.stride(-1) != 1 or decay.stride(-1) != 1:
        raise ValueError("`state` must be contiguous, and so must the rows of the factors")
    launch = launch or CommitLaunch()
    block_keys = max(16, min(launch.block_keys, triton.next_power_of_2(K)))
    _commit[(L * B * H, triton.cdiv(K, block_keys))](
        state, keys, writes, decay, path, num,
        B, H, *keys.stride()[:4], *writes.stride()[:4], *decay.stride()[:3],
        K=K, V=V, BK=block_keys, BV=max(16, triton.next_power_of_2(V)), PRECISION=launch.precision,
        num_warps=launch.num_warps,
    )  # fmt: skip
