"""Stages are the entry's own, add up to its decoding, and nothing is counted twice or missed."""

from __future__ import annotations

import pytest
import torch
from tiny_models import qwen3
from torch import nn
from transformers import DynamicCache

from ddaudit.runtime import crop_cache, keep_in_cache, make_cache
from ddaudit.runtime.running.metering import metered

CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 6, 7, 8]])


class Drafter(nn.Module):
    """Asks the target, and cuts its own cache: all of that is drafting."""

    def __init__(self, target):
        super().__init__()
        self._target = [target]

    def forward(self, noise_embedding, past_key_values):
        target = self._target[0]
        target(PROMPT, use_cache=False)
        cache = make_cache(target)
        target(PROMPT, past_key_values=cache, use_cache=True)
        crop_cache(cache, 2)
        return noise_embedding


@pytest.fixture
def model():
    return qwen3()


def stage_names(meter):
    return [stage for stage, _, _ in meter._spans]


@torch.no_grad()
def test_a_round_of_each_stage(model):
    drafter = Drafter(model)
    with metered(model, drafter, 4, CPU) as meter:
        cache, draft_cache = make_cache(model), DynamicCache()
        model(PROMPT, past_key_values=cache, use_cache=True)
        for start in (4, 5):
            hidden = drafter(noise_embedding=torch.zeros(1, 3, 64), past_key_values=draft_cache)
            crop_cache(draft_cache, 0)
            model.get_output_embeddings()(hidden)
            model(PROMPT[:, :3], past_key_values=cache, use_cache=True)
            keep_in_cache(cache, start, [0])
    assert stage_names(meter) == ["draft", "commit", "draft", "verify", "commit"] * 2
    assert (meter.rounds, meter.num_fed) == (2, 6)
    assert (meter.num_drafts, meter.num_draft_heads, meter.num_commits) == (2, 2, 4)
    assert meter.cache is cache and meter.draft_cache is draft_cache
    seconds = meter.stage_s()
    assert list(seconds) == ["draft", "verify", "commit", "host"] and all(value > 0 for value in seconds.values())
    assert sum(seconds.values()) == pytest.approx(meter.decode_s)
    assert meter.start_s < meter.prefill_end_s < meter.end_s


@torch.no_grad()
def test_a_decoder_and_a_head_called_by_hand_are_one_round(model):
    """Some loops never call the whole model; a head counted as a forward would double their rounds."""
    with metered(model, None, 4, CPU) as meter:
        for step in (PROMPT, PROMPT[:, :1], PROMPT[:, :1]):
            state = model.get_decoder()(step).last_hidden_state
            model.get_output_embeddings()(state)
    assert (meter.rounds, meter.num_fed, meter.num_draft_heads) == (2, 2, 0)
    # The first head comes after the prompt was read.
    assert stage_names(meter) == ["verify"] * 5


@torch.no_grad()
def test_a_prefill_in_parts_is_no_round(model):
    with metered(model, None, 4, CPU) as meter:
        cache = make_cache(model)
        for part in PROMPT.split(2, dim=1):
            model(part, past_key_values=cache, use_cache=True)
    assert meter.rounds == 0 and stage_names(meter) == [] and meter.prefill_end_s is not None


@torch.no_grad()
def test_a_forward_that_raises_is_left_again(model):
    """The hook after a forward runs where the hook of the cache before it has raised, without ours having entered."""
    cache = make_cache(model, max_length=5)
    with metered(model, None, 4, CPU) as meter:
        model(PROMPT, past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="max_length"):
            model(PROMPT, past_key_values=cache, use_cache=True)
        model(PROMPT[:, :1], use_cache=False)
    assert meter._inside == [] and meter.rounds >= 1 and stage_names(meter)[-1] == "verify"


@torch.no_grad()
def test_hooks_are_gone_afterwards(model):
    hooks = len(model._forward_hooks), len(model.get_output_embeddings()._forward_hooks)
    with pytest.raises(KeyError), metered(model, None, 4, CPU) as meter:
        raise KeyError
    assert (len(model._forward_hooks), len(model.get_output_embeddings()._forward_hooks)) == hooks
    model(PROMPT)
    assert meter.rounds == 0 and meter.end_s >= meter.start_s
