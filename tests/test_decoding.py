"""Plain decoding is the reference for everything else, so it is held against decoding without any cache."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCABULARY, qwen3, qwen3_5, qwen3_5_composite

from ddaudit.runtime.checks.decoding import decode_plain, read_in_blocks

MODELS = {"qwen3": qwen3, "qwen3_5": qwen3_5, "qwen3_5-composite": qwen3_5_composite}
PROMPT = tuple(range(1, 12))


@pytest.fixture(params=list(MODELS), scope="module")
def model(request):
    return MODELS[request.param]()


@torch.no_grad()
def uncached(model, prompt, count):
    ids = torch.tensor([prompt])
    for _ in range(count):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


def test_it_decodes_as_without_a_cache(model):
    reference = decode_plain(model, PROMPT, 24, keep_logits=10)
    assert list(reference.generated_ids) == uncached(model, PROMPT, 24)
    assert reference.logits.shape == (10, VOCABULARY)
    best = reference.logits.topk(2).values
    assert torch.allclose(torch.tensor(reference.top2_gaps[:10]), best[:, 0] - best[:, 1])


def test_it_ends_with_the_first_stop_token(model):
    free = decode_plain(model, PROMPT, 12).generated_ids
    stopped = decode_plain(model, PROMPT, 12, stop_token_ids=[free[5]]).generated_ids
    assert stopped == free[: free.index(free[5]) + 1]


@pytest.mark.parametrize("block_size", [1, 5, 16, 100])
def test_blocks_choose_the_same_tokens(model, block_size):
    text = decode_plain(model, PROMPT, 23).generated_ids
    logits = torch.cat(list(read_in_blocks(model, PROMPT, text, block_size)))
    assert tuple(logits.argmax(1).tolist()) == text


@pytest.mark.parametrize("length", [1, 2])
def test_very_short_texts_have_one_choice_a_token(model, length):
    assert sum(map(len, read_in_blocks(model, PROMPT, range(1, length + 1), 16))) == length
