"""The ops of the decoding step against the recurrence and against attention written out node by node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import kernel_cases
import pytest
import torch
from kernel_cases import ATTENTION_CASES, DELTA_CASES, AttentionCase, DeltaCase

from ddaudit.runtime.kernels import has_triton
from ddaudit.runtime.kernels.attention import tree_attention
from ddaudit.runtime.kernels.delta_rule import commit_delta_rule, tree_delta_rule
from ddaudit.runtime.kernels.product import row_product, split_product

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
"""What the output's own dtype allows."""
STATE_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""The state is float32 whatever the inputs are, but on a GPU bfloat16 ones are multiplied in tf32."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tolerance(case: DeltaCase | AttentionCase, of: str) -> float:
    exact = (STATE_ROUNDING if of.startswith("state") else ROUNDING)[case.dtype]
    # The decay between two nodes is a difference of sums that are large where tokens forget everything.
    return max(exact, 1e-4) if getattr(case, "shape", "") == "fading" else exact


def in_bfloat16(case: DeltaCase | AttentionCase) -> DeltaCase | AttentionCase:
    return replace(case, dtype=torch.bfloat16)


def assert_small(errors: dict[str, float], case: DeltaCase | AttentionCase) -> None:
    assert {of: found for of, found in errors.items() if not found <= tolerance(case, of)} == {}


@pytest.mark.parametrize("case", DELTA_CASES, ids=str)
def test_the_delta_rule_is_the_recurrence_along_each_path(case: DeltaCase) -> None:
    assert_small(kernel_cases.delta_errors(case, tree_delta_rule, commit_delta_rule), case)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_is_that_of_each_node_alone(case: AttentionCase) -> None:
    assert_small(kernel_cases.attention_errors(case, tree_attention), case)


def test_compilers_are_told_the_truth_about_the_ops() -> None:
    """An op that changed an argument it does not name would be reordered by `torch.compile`."""
    arguments, _ = kernel_cases.delta_inputs(DeltaCase(5))
    torch.library.opcheck(tree_delta_rule, arguments)
    num = torch.tensor([2])
    factors = [torch.zeros(1, *x.shape) for x in arguments[7:]]
    torch.library.opcheck(commit_delta_rule, (arguments[5][None].clone(), *factors, torch.arange(5), num))
    inputs = kernel_cases.attention_inputs(AttentionCase(5, past=3))
    for buffer in inputs[3:5]:
        buffer.nan_to_num_(0.0)
    torch.library.opcheck(tree_attention, inputs)


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_the_pieces_of_a_product_add_up(pieces: int) -> None:
    inputs, weight = torch.randn(5, 50, dtype=torch.float64), torch.randn(9, 50, dtype=torch.float64)
    parts = split_product(inputs.float(), weight.float(), pieces)
    assert parts.shape == (pieces, 5, 9)
    assert kernel_cases.error(parts.sum(0), inputs @ weight.T) <= ROUNDING[torch.float32]
    assert kernel_cases.error(row_product(inputs[:1], weight), inputs[:1] @ weight.T) <= 1e-12


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", kernel_cases.PRODUCT_CASES, ids=str)
def test_products_on_a_gpu(case: kernel_cases.ProductCase) -> None:
    case = replace(case, dtype=torch.bfloat16)
    assert kernel_cases.product_error(case, row_product, split_product, "cuda") <= ROUNDING[torch.bfloat16]


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_the_fused_kernels_compute_the_same_when_interpreted() -> None:
    """In a process of its own: Triton decides at import whether kernels are interpreted."""
    run = subprocess.run(
        [sys.executable, kernel_cases.__file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout)
    cases = [*kernel_cases.DISTINCT_DELTA_CASES, *kernel_cases.DISTINCT_ATTENTION_CASES]
    assert list(errors) == [str(case) for case in [*cases, *kernel_cases.PRODUCT_CASES]]
    for case in cases:
        assert_small(errors[str(case)], case)
    for case in kernel_cases.PRODUCT_CASES:
        assert errors[str(case)] <= ROUNDING[torch.float32]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [*kernel_cases.DISTINCT_DELTA_CASES, *map(in_bfloat16, DELTA_CASES)], ids=str)
def test_the_delta_rule_on_a_gpu(case: DeltaCase) -> None:
    assert_small(kernel_cases.delta_errors(case, tree_delta_rule, commit_delta_rule, "cuda"), case)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [*kernel_cases.DISTINCT_ATTENTION_CASES, *map(in_bfloat16, ATTENTION_CASES)], ids=str)
def test_attention_on_a_gpu(case: AttentionCase) -> None:
    assert_small(kernel_cases.attention_errors(case, tree_attention, "cuda"), case)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_follows_what_its_buffers_hold() -> None:
    """A length or a path read on the host would be frozen into the graph."""
    case = AttentionCase(17, past=300, window=90)
    arguments = kernel_cases.attention_inputs(case, "cuda")
    shorter = kernel_cases.attention_inputs(replace(case, past=230), "cuda")
    tree_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = tree_attention(*arguments)
    for buffer in arguments[3:5]:
        buffer.fill_(torch.nan)
    for mine, new in zip(arguments[:8], shorter[:8], strict=True):
        mine[(..., *map(slice, new.shape[-2:]))] = new
    expected = kernel_cases.attention_expected(arguments)
    graph.replay()
    assert kernel_cases.error(output, expected) <= ROUNDING[torch.float32]

    delta = DeltaCase(20)
    inputs, parents = kernel_cases.delta_inputs(delta, "cuda")
    _, states = kernel_cases.delta_expected(inputs, parents)
    tree_delta_rule(*inputs)
    state, factors = inputs[5][None].clone(), [x[None] for x in inputs[7:]]
    path, num = torch.zeros(20, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    commit_delta_rule(state, *factors, path, num)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        commit_delta_rule(state, *factors, path, num)
    for node in (0, 19, 8):
        state.copy_(inputs[5][None])
        accepted = torch.tensor(kernel_cases.path_to(parents, node), device="cuda")
        path[: len(accepted)] = accepted
        num.fill_(len(accepted))
        graph.replay()
        assert kernel_cases.error(state[0], states[node]) <= ROUNDING[torch.float32]
