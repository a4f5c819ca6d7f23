"""Inputs for the ops of `ddaudit.runtime.kernels`, and what they must come to, slow and obvious, in float64.

As a script, under TRITON_INTERPRET=1: runs the fused kernels on the CPU and prints their errors as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class DeltaCase:
    """A window on gated delta rule layers."""

    num_nodes: int
    shape: str = "tree"
    """`tree`; `chain`; `alike`, a chain of one key, written in full and never fading; `fading`, a tree that forgets."""
    num_heads: int = 4
    num_key_heads: int = 2
    key_size: int = 16
    value_size: int = 24
    batch: int = 1
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class AttentionCase:
    """A window on an attention layer."""

    num_nodes: int
    past: int
    num_new: int = 0
    """Keys; 0 for as many as there are nodes. Any more come first, and every node sees them."""
    window: int = 0
    num_heads: int = 4
    num_key_heads: int = 2
    head_size: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class ProductCase:
    """A window with a weight `[num_rows, num_columns]`."""

    num_nodes: int
    num_rows: int
    num_columns: int
    pieces: int = 1
    dtype: torch.dtype = torch.float32


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error in norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def random_parents(num_nodes: int, shape: str, generator: torch.Generator) -> list[int]:
    """-1 for a root. Of a tree, each node follows one of the six before it, or none."""
    if shape in ("chain", "alike"):
        return list(range(-1, num_nodes - 1))
    back = torch.randint(1, 7, (num_nodes,), generator=generator).tolist()
    return [max(-1, node - step) for node, step in enumerate(back)]


def ancestors_of(parents: list[int]) -> torch.Tensor:
    """`[T, T]`, self included."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return ancestors


def delta_inputs(case: DeltaCase, device: str = "cpu") -> tuple[list[torch.Tensor], list[int]]:
    """The arguments of `tree_delta_rule`, the last three filled with not-a-number, and the parents."""
    generator = torch.Generator().manual_seed(case.num_nodes)
    B, T, H = case.batch, case.num_nodes, case.num_heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = (normal(B, T, case.num_key_heads, case.key_size) for _ in range(2))
    value = normal(B, T, H, case.value_size)
    # Above one as well: OLMo-hybrid doubles β to reach negative eigenvalues.
    g, beta = -0.3 * torch.rand(B, T, H, generator=generator), 2 * torch.rand(B, T, H, generator=generator)
    if case.shape == "alike":
        key, g, beta = key[:, :1].expand_as(key), torch.zeros_like(g), torch.ones_like(beta)
    if case.shape == "fading":
        g = torch.where(torch.rand(T, generator=generator)[:, None] < 0.3, -80.0, g)
    parents = random_parents(T, case.shape, generator)
    state = normal(B, H, case.key_size, case.value_size)
    outs = [torch.full((B, H, T, *size), torch.nan) for size in ((case.key_size,), (case.value_size,), ())]
    rounded = [x.to(case.dtype) for x in (query, key, value)]
    arguments = [*rounded, g, beta.to(case.dtype), state, ancestors_of(parents), *outs]
    return [x.to(device) for x in arguments], parents


def delta_expected(arguments: list[torch.Tensor], parents: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output `[B, T, H, V]` and the state `[B, H, K, V]` after each node, by the recurrence, in float64."""
    query, key, value, g, beta, root = (x.double() for x in arguments[:6])
    groups = value.shape[2] // key.shape[2]
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(groups, dim=2) for x in (query * query.shape[-1] ** -0.5, key))
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for node, parent in enumerate(parents):
        state = g[:, node].exp()[..., None, None] * (root if parent < 0 else states[parent])
        write = beta[:, node, :, None] * (value[:, node] - torch.einsum("bhk,bhkv->bhv", key[:, node], state))
        states.append(state + key[:, node, :, :, None] * write[:, :, None, :])
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, node], states[-1]))
    return torch.stack(outputs, dim=1), states


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def delta_errors(case: DeltaCase, verify: Callable, commit: Callable, device: str = "cpu") -> dict[str, float]:
    """Of the output, and of the states of two layers after committing nodes near both ends; `kept` of none."""
    arguments, parents = delta_inputs(case, device)
    expected, states = delta_expected(arguments, parents)
    read_only = [x.clone() for x in arguments[:7]]
    errors = {"output": error(verify(*arguments), expected)}
    assert all(torch.equal(x, y) for x, y in zip(arguments, read_only, strict=False))
    root = arguments[5]
    for node in sorted({0, case.num_nodes // 2, case.num_nodes - 1}):
        path = path_to(parents, node)
        padded = torch.tensor(path + [0] * (case.num_nodes - len(path)), device=device)
        state = torch.stack([root, torch.zeros_like(root)])
        factors = [torch.stack([x, torch.zeros_like(x)]) for x in arguments[7:]]
        before = state.clone()
        commit(state, *factors, padded, torch.tensor([0], device=device))
        assert torch.equal(state, before)
        commit(state, *factors, padded, torch.tensor([len(path)], device=device))
        errors[f"state after {node}"] = error(state[0], states[node])
        assert not state[1].any()
    return errors


def attention_inputs(case: AttentionCase, device: str = "cpu") -> list[torch.Tensor | float | int]:
    """The arguments of `tree_attention`; what may not be read is not-a-number."""
    generator = torch.Generator().manual_seed(case.num_nodes + case.past)
    B, T, N, Hkv = case.batch, case.num_nodes, case.num_new or case.num_nodes, case.num_key_heads
    parents = random_parents(T, "tree", generator)
    visible = torch.cat([torch.ones(T, N - T, dtype=torch.bool), ancestors_of(parents)], dim=1)
    offsets = torch.tensor([N - T + len(path_to(parents, node)) - 1 for node in range(T)])
    # As projections leave them: heads inside, and the buffers a view of larger ones.
    query = torch.randn(B, T, case.num_heads, case.head_size, generator=generator).transpose(1, 2)
    key, value = (torch.randn(B, N, Hkv, case.head_size, generator=generator).transpose(1, 2) for _ in range(2))
    buffers = torch.randn(2, B, Hkv, case.past + N + 40, case.head_size, generator=generator)
    buffers[..., case.past :, :] = torch.nan
    tensors = [x.to(device, case.dtype) for x in (query, key, value, *buffers[..., : case.past + N + 9, :])]
    start = torch.tensor([case.past])
    return [*tensors, *(x.to(device) for x in (start, visible, offsets)), case.head_size**-0.5, case.window]


def attention_expected(arguments: list) -> torch.Tensor:
    """Each node over what it may see, `[B, T, Hq, D]`, in float64."""
    query, key, value, key_buffer, value_buffer, start, visible, offsets, scale, window = arguments
    past = int(start)
    shape = (key.shape[0], key.shape[1], -1, key.shape[-1])
    outputs = []
    for node in range(query.shape[2]):
        first = max(0, past + int(offsets[node]) - window + 1) if window else 0
        keys = torch.cat([key_buffer[:, :, first:past], key[:, :, visible[node]]], dim=2).double()
        values = torch.cat([value_buffer[:, :, first:past], value[:, :, visible[node]]], dim=2).double()
        weights = (query[:, :, node].reshape(shape).double() @ keys.mT * scale).softmax(dim=-1)
        outputs.append((weights @ values).flatten(1, 2))
    return torch.stack(outputs, dim=1)


def attention_errors(case: AttentionCase, attend: Callable, device: str = "cpu") -> dict[str, float]:
    """Of the output; the buffers must hold the new keys and be as before elsewhere."""
    arguments = attention_inputs(case, device)
    expected = attention_expected(arguments)
    kept = [x.clone() for x in arguments[3:5]]
    for buffer, new in zip(kept, arguments[1:3], strict=True):
        buffer[:, :, case.past : case.past + new.shape[2]] = new
    errors = {"output": error(attend(*arguments), expected)}
    for found, wanted in zip(arguments[3:5], kept, strict=True):
        assert torch.equal(found.nan_to_num(-7.0), wanted.nan_to_num(-7.0))
    return errors


def product_error(case: ProductCase, row_product: Callable, split_product: Callable, device: str = "cpu") -> float:
    """One token goes by `row_product`."""
    generator = torch.Generator().manual_seed(case.num_nodes)
    inputs, weight = (
        torch.randn(rows, case.num_columns + 16, generator=generator)[:, : case.num_columns].to(device, case.dtype)
        for rows in (case.num_nodes, case.num_rows)
    )
    expected = inputs.double() @ weight.double().T
    if case.num_nodes == 1:
        return error(row_product(inputs, weight), expected)
    return error(split_product(inputs, weight, case.pieces).sum(0), expected)


DELTA_CASES = [
    *(DeltaCase(T) for T in (1, 2, 15, 16, 17, 33, 64, 65, 130)),
    DeltaCase(64, "chain"),
    DeltaCase(64, "alike"),
    DeltaCase(65, "alike"),
    DeltaCase(40, "fading"),
    DeltaCase(70, "fading"),
    DeltaCase(33, key_size=128, value_size=128, batch=2),
    DeltaCase(20, num_heads=2, key_size=24, value_size=20, batch=2),
    DeltaCase(1, num_heads=2, key_size=24, value_size=20, batch=2),
    DeltaCase(16, key_size=256, value_size=256),
]
ATTENTION_CASES = [
    *(AttentionCase(T, past=70) for T in (1, 2, 15, 16, 17, 33, 64, 65, 130)),
    AttentionCase(1, past=0),
    AttentionCase(17, past=0),
    AttentionCase(33, past=1),
    AttentionCase(16, past=300, window=40),
    AttentionCase(33, past=300, window=4),
    AttentionCase(64, past=20, window=4096, num_heads=3, num_key_heads=1),
    AttentionCase(16, past=100, num_new=21, batch=2, head_size=256),
    AttentionCase(8, past=150, num_new=90, batch=2, num_heads=6, head_size=80, window=64),
]
PRODUCT_CASES = [
    ProductCase(1, 70, 1000),
    ProductCase(2, 70, 640, pieces=2),
    ProductCase(16, 64, 1000, pieces=3),
    ProductCase(64, 130, 520, pieces=2),
    ProductCase(65, 70, 700, pieces=4),
    ProductCase(80, 70, 700),
]


# Those that walk different ways through the fused kernels: interpreting and compiling take time.
DISTINCT_DELTA_CASES = [case for case in DELTA_CASES if case.num_nodes in (1, 17, 20, 65)]
DISTINCT_ATTENTION_CASES = [case for case in ATTENTION_CASES if case.num_nodes in (1, 8, 17, 33)]


def interpreted() -> dict[str, Any]:
    """Errors of the fused kernels through Triton's interpreter, which has no bfloat16 products."""
    from ddaudit.runtime.kernels import fused_attention, fused_delta_rule, fused_product

    errors: dict[str, Any] = {}
    for case in DISTINCT_DELTA_CASES:
        errors[str(case)] = delta_errors(case, fused_delta_rule.verify, fused_delta_rule.commit)
    for case in DISTINCT_ATTENTION_CASES:
        errors[str(case)] = attention_errors(case, fused_attention.attend)
    for case in PRODUCT_CASES:
        errors[str(case)] = product_error(case, fused_product.row_product, fused_product.split_product)
    return errors


if __name__ == "__main__":
    print(json.dumps(interpreted()))
