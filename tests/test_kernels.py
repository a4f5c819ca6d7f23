"""Models on the CPU beside flash-linear-attention, whose kernels need a GPU."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from tiny_models import VOCABULARY, qwen3_5

from ddaudit.runtime.caches.kernels import serve_cpu


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Globals of Qwen3.5's modelling module in which each kernel is Triton's, as where that package imports."""
    model = qwen3_5()
    mixer = next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))
    forward_globals = inspect.unwrap(type(mixer).forward).__globals__
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
        reference = inspect.unwrap(forward_globals[name])

        @functools.wraps(reference)
        def triton(*args: object, **kwargs: object) -> None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")

        monkeypatch.setitem(forward_globals, name, triton)
    return forward_globals


def test_a_second_call_changes_nothing(kernels: dict) -> None:
    model = qwen3_5()
    served = {name: value for name, value in kernels.items() if callable(value)}
    serve_cpu(model)
    assert {name: kernels[name] for name in served} == served


def test_triton_kernels_are_not_called_on_the_cpu(kernels: dict) -> None:
    """With Triton installed and the model on the CPU, every forward of a hybrid raised."""
    ids = torch.randint(0, VOCABULARY, (1, 9))
    model = qwen3_5()
    assert torch.isfinite(model(ids).logits).all()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > 9
