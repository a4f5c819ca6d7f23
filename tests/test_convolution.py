"""The window's convolution: the op against one root path at a time, and its Triton kernel through the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddaudit.runtime.caches.window import ROOT, Window
from ddaudit.runtime.kernels import has_triton
from ddaudit.runtime.kernels.convolution import tree_convolution

TREE = (ROOT, 0, 0, 1, ROOT, 4, 5, 2)


@pytest.mark.parametrize("parents", [(ROOT,), TREE])
@pytest.mark.parametrize("has_silu", [True, False])
def test_each_node_is_convolved_along_its_own_path(parents, has_silu):
    torch.manual_seed(0)
    length, channels, kernel = len(parents), 12, 4
    # A part of a wider product, as merged projections give it.
    inputs = torch.randn(2, length, channels + 5)[..., 3 : 3 + channels]
    state, weight, bias = torch.randn(2, channels, kernel), torch.randn(channels, kernel), torch.randn(channels)
    kept = torch.full((2, length, channels), torch.nan)
    taps = Window(9, length, parents).taps(kernel, torch.device("cpu"))
    output = tree_convolution(inputs, state, taps, weight, bias, has_silu, kept)
    assert torch.equal(kept, inputs)
    for node in range(length):
        path, at = [], node
        while at != ROOT:
            path.insert(0, at)
            at = parents[at]
        fed = torch.cat([state, inputs[:, path].transpose(1, 2)], dim=-1)[..., -kernel:]
        expected = (fed * weight).sum(-1) + bias
        expected = torch.nn.functional.silu(expected) if has_silu else expected
        torch.testing.assert_close(output[:, node], expected)


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_the_kernel_agrees_through_the_interpreter():
    code = """
import torch
from ddaudit.runtime.caches.window import ROOT, Window
from ddaudit.runtime.kernels import fused_convolution
from ddaudit.runtime.kernels.convolution import tree_convolution

torch.manual_seed(0)
for parents, channels in (((ROOT,), 40), ((ROOT, 0, 0, 1, ROOT, 4, 5), 600), ((ROOT, *range(32)), 40)):
    length = len(parents)
    taps = Window(9, length, parents).taps(4, torch.device("cpu"))
    inputs, state = torch.randn(2, length, channels + 13)[..., 5 : 5 + channels], torch.randn(2, channels, 4)
    weight = torch.randn(channels, 4)
    for bias in (None, torch.randn(channels)):
        kept, expected_kept = torch.zeros(2, 2, length, channels)
        ours = fused_convolution.convolve(inputs, state, taps, weight, bias, bias is None, kept)
        expected = tree_convolution(inputs, state, taps, weight, bias, bias is None, expected_kept)
        torch.testing.assert_close(ours, expected)
        assert torch.equal(kept, expected_kept)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
