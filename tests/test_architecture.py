from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import EXACT, gpt2, llama, qwen3, qwen3_5, qwen3_5_composite

from ddaudit.runtime import (
    decoder_layers,
    final_norm,
    layer_output,
    make_cache,
    stop_token_ids,
    text_config,
)

MODELS = {**EXACT, "llama": llama, "gpt2": gpt2}


@pytest.fixture(params=list(MODELS))
def model(request):
    return MODELS[request.param]()


@torch.no_grad()
def states(model, **kwargs):
    return model(torch.arange(1, 10)[None], output_hidden_states=True, **kwargs)


def watched(layers):
    """The list that each layer's output will be appended to."""
    seen = []
    for layer in layers:
        layer.register_forward_hook(lambda m, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    return seen


def test_layers_and_norm_are_those_the_forward_uses(model):
    layers = decoder_layers(model)
    assert len(layers) == text_config(model).num_hidden_layers
    seen = []
    for layer in layers:
        layer.register_forward_hook(
            lambda m, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
    final_norm(model).register_forward_hook(lambda m, args, output: seen.append(output))
    output = states(model)
    assert len(seen) == len(layers) + 1
    assert torch.equal(seen[-1], output.hidden_states[-1])
    assert any(torch.equal(seen[0], state) for state in output.hidden_states[:2])


def test_layer_output_is_the_residual_stream_of_every_layer(model):
    make_cache(model)
    seen = []
    for layer in decoder_layers(model):
        layer.register_forward_hook(
            lambda m, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
    output = states(model)
    for index, expected in enumerate(seen):
        assert torch.equal(layer_output(output, index), expected)
        assert torch.equal(layer_output(output.hidden_states, index - len(seen)), expected)
    assert not torch.equal(layer_output(output, -1), output.hidden_states[-1])


def test_the_last_layer_is_refused_when_its_residual_was_not_kept():
    model = qwen3()
    output = states(model)
    assert layer_output(output, 0) is output.hidden_states[1]
    with pytest.raises(ValueError, match="after the final norm"):
        layer_output(output, -1)


@pytest.mark.parametrize("layer_id", [4, -5])
def test_a_layer_that_is_not_there_is_refused(layer_id):
    with pytest.raises(ValueError, match="4 decoder layers"):
        layer_output(states(qwen3()), layer_id)


def test_an_output_without_hidden_states_is_refused():
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        layer_output(qwen3()(torch.tensor([[1]])), 0)


def test_wrappers_are_seen_through():
    model = qwen3_5()
    wrapped = torch.nn.DataParallel(model)
    assert decoder_layers(wrapped) is decoder_layers(model)
    assert text_config(torch.compile(model)) is text_config(model)


def test_the_text_config_of_a_composite_model_is_the_nested_one():
    model = qwen3_5_composite()
    assert text_config(model) is model.config.text_config


def test_stop_tokens_come_from_every_config():
    model = qwen3_5_composite()
    model.generation_config.eos_token_id = [7, 3]
    model.config.text_config.eos_token_id = 5
    assert stop_token_ids(model) == [3, 5, 7]
    assert stop_token_ids(model, SimpleNamespace(eos_token_id=2)) == [2, 3, 5, 7]


def test_a_model_without_end_tokens_has_none():
    model = qwen3()
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model) == []
