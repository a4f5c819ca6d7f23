"""Caches that verify and go back, against feeding each text alone without a cache."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers
from tiny_models import COMMON, EXACT, RECURRENT, VOCABULARY, gpt2, harden, qwen3, qwen3_5

from ddaudit.runtime import crop_cache, keep_in_cache, make_cache
from ddaudit.runtime.caches.recurrent import LONG_WINDOW
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.caches.window import ROOT, Window

TREE = (ROOT, 0, 0, 1, 1, 2, 3, 6, 7, 5, 9, ROOT, 11)
MODELS: dict[str, torch.nn.Module] = {}


@pytest.fixture(params=list(EXACT))
def model(request):
    return built(request.param)


@pytest.fixture(params=list(RECURRENT))
def hybrid(request):
    return built(request.param)


def built(name):
    if name not in MODELS:
        MODELS[name] = EXACT[name]()
    return MODELS[name]


def text(length, seed):
    return torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fresh(model, ids):
    return model(ids, use_cache=False).logits


@torch.no_grad()
def forward(model, cache, ids, **kwargs):
    return model(ids, use_cache=True, **{cache_argument(model): cache}, **kwargs).logits


def verify_tree(model, cache, nodes, parents=TREE):
    start = cache.get_seq_length()
    window = Window(start, len(parents), parents)
    visible = torch.cat([torch.ones(len(parents), start, dtype=torch.bool), window.ancestors(torch.device("cpu"))], 1)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    positions = start + torch.tensor([window.depths])
    return forward(model, cache, nodes, attention_mask=mask, position_ids=positions)


def path_to(node, parents=TREE):
    return [] if node == ROOT else [*path_to(parents[node], parents), node]


def assert_same(found, expected):
    difference = (found - expected).norm() / expected.norm()
    assert difference < 1e-4, f"relative difference {difference:.1e}"
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_a_prompt_and_single_tokens_are_as_without_a_cache(model):
    ids = text(20, seed=1)
    cache = make_cache(model)
    found = [forward(model, cache, ids[:, :9])]
    found += [forward(model, cache, ids[:, i : i + 1]) for i in range(9, 20)]
    assert_same(torch.cat(found, 1), fresh(model, ids))
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("leaf", [8, 10, 12, 0])
def test_every_node_of_a_tree_is_its_path_alone_and_the_kept_path_goes_on(model, leaf):
    prompt, nodes, more = text(11, seed=2), text(len(TREE), seed=3), text(5, seed=4)
    cache = make_cache(model)
    forward(model, cache, prompt)
    logits = verify_tree(model, cache, nodes)
    for node in range(len(TREE)):
        alone = torch.cat([prompt, nodes[:, path_to(node)]], 1)
        assert_same(logits[:, node], fresh(model, alone)[:, -1])
    kept = path_to(leaf)
    keep_in_cache(cache, 11, kept)
    assert cache.get_seq_length() == 11 + len(kept)
    whole = torch.cat([prompt, nodes[:, kept], more], 1)
    assert_same(forward(model, cache, more), fresh(model, whole)[:, -5:])


@pytest.mark.parametrize("kept", [0, 1, 5, 8])
def test_a_rejected_draft_block_leaves_no_trace(model, kept):
    prompt, block, more = text(10, seed=5), text(8, seed=6), text(4, seed=7)
    cache = make_cache(model)
    forward(model, cache, prompt)
    assert_same(forward(model, cache, block), fresh(model, torch.cat([prompt, block], 1))[:, -8:])
    crop_cache(cache, 10 + kept)
    whole = torch.cat([prompt, block[:, :kept], more], 1)
    assert_same(forward(model, cache, more), fresh(model, whole)[:, -4:])


def test_many_rounds_drift_by_nothing(model):
    """A state error of one round in a thousand parts would be plain after twenty."""
    generator = torch.Generator().manual_seed(8)
    whole = text(7, seed=9)
    cache = make_cache(model)
    forward(model, cache, whole)
    for i in range(20):
        if i % 2:
            nodes = text(len(TREE), seed=100 + i)
            logits = verify_tree(model, cache, nodes)
            kept = path_to(int(torch.randint(0, len(TREE), (1,), generator=generator)))
            keep_in_cache(cache, whole.shape[1], torch.tensor(kept))
            expected = fresh(model, torch.cat([whole, nodes[:, kept]], 1))
            assert_same(logits[:, kept], expected[:, -len(kept) :])
            whole = torch.cat([whole, nodes[:, kept]], 1)
        else:
            block = text(6, seed=100 + i)
            forward(model, cache, block)
            kept = int(torch.randint(0, 7, (1,), generator=generator))
            crop_cache(cache, whole.shape[1] + kept)
            whole = torch.cat([whole, block[:, :kept]], 1)
    more = text(3, seed=10)
    assert_same(forward(model, cache, more), fresh(model, torch.cat([whole, more], 1))[:, -3:])


@pytest.mark.parametrize("length", [LONG_WINDOW, LONG_WINDOW + 1, 3 * LONG_WINDOW])
def test_going_back_into_a_prefill(model, length):
    ids = text(length, seed=11)
    cache = make_cache(model)
    assert_same(forward(model, cache, ids), fresh(model, ids))
    crop_cache(cache, length - 40)
    assert cache.get_seq_length() == length - 40
    assert_same(forward(model, cache, ids[:, -40:-30]), fresh(model, ids)[:, -40:-30])


def test_going_back_over_closed_windows(model):
    ids = text(30, seed=12)
    cache = make_cache(model)
    for start in range(0, 30, 6):
        forward(model, cache, ids[:, start : start + 6])
    crop_cache(cache, 8)
    assert_same(forward(model, cache, ids[:, 8:20]), fresh(model, ids)[:, 8:20])
    crop_cache(cache, 0)
    assert cache.get_seq_length() == 0
    assert_same(forward(model, cache, ids[:, :5]), fresh(model, ids)[:, :5])


def test_a_batch_of_equal_lengths_is_exact(model):
    ids = torch.cat([text(9, seed=13), text(9, seed=14)])
    block = torch.cat([text(6, seed=15), text(6, seed=16)])
    cache = make_cache(model)
    forward(model, cache, ids, attention_mask=torch.ones(2, 9, dtype=torch.long))
    assert_same(forward(model, cache, block), fresh(model, torch.cat([ids, block], 1))[:, -6:])
    crop_cache(cache, 11)
    whole = torch.cat([ids, block[:, :2], block[:, :1]], 1)
    assert_same(forward(model, cache, block[:, :1]), fresh(model, whole)[:, -1:])


def test_a_copied_cache_goes_its_own_way(model):
    prompt, left, right = text(9, seed=17), text(4, seed=18), text(4, seed=19)
    cache = make_cache(model)
    forward(model, cache, prompt)
    branch = copy.deepcopy(cache)
    assert_same(forward(model, branch, left), fresh(model, torch.cat([prompt, left], 1))[:, -4:])
    assert_same(forward(model, cache, right), fresh(model, torch.cat([prompt, right], 1))[:, -4:])


def test_a_reordered_cache_follows_its_rows(hybrid):
    ids, more = torch.cat([text(9, seed=20), text(9, seed=21)]), text(3, seed=22).repeat(2, 1)
    cache = make_cache(hybrid)
    forward(hybrid, cache, ids)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_same(forward(hybrid, cache, more), fresh(hybrid, torch.cat([ids.flip(0), more], 1))[:, -3:])
    crop_cache(cache, 5)
    assert_same(forward(hybrid, cache, more), fresh(hybrid, torch.cat([ids.flip(0)[:, :5], more], 1))[:, -3:])


def test_positions_of_a_tree_are_filled_in_when_none_are_given(hybrid):
    """Transformers would number the nodes one after the other."""
    prompt, nodes = text(6, seed=23), text(3, seed=24)
    cache = make_cache(hybrid)
    forward(hybrid, cache, prompt)
    visible = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    visible[0, 0, :, 6:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    logits = forward(hybrid, cache, nodes, attention_mask=visible)
    assert_same(logits[:, 2], fresh(hybrid, torch.cat([prompt, nodes[:, [0, 2]]], 1))[:, -1])


def test_the_stock_model_is_left_as_it_was(hybrid):
    ids = text(12, seed=25)
    expected = fresh(hybrid, ids)
    make_cache(hybrid)
    assert torch.equal(fresh(hybrid, ids), expected)
    stock = transformers.DynamicCache(config=hybrid.config)
    assert_same(forward(hybrid, stock, ids[:, :11]), expected[:, :11])


def test_inside_and_outside_of_inference_mode(model):
    prompt, block, more = text(9, seed=26), text(6, seed=27), text(2, seed=28)
    cache = make_cache(model)
    with torch.inference_mode():
        model(prompt, use_cache=True, **{cache_argument(model): cache})
        model(block, use_cache=True, **{cache_argument(model): cache})
    keep_in_cache(cache, 9, [0, 1])
    whole = torch.cat([prompt, block[:, :2], more], 1)
    assert_same(forward(model, cache, more), fresh(model, whole)[:, -2:])


def test_the_cache_keeps_no_model_alive():
    model = qwen3_5()
    cache, alive = make_cache(model), weakref.ref(model)
    forward(model, cache, text(4, seed=29))
    del model
    gc.collect()
    assert alive() is None and cache.get_seq_length() == 4


# What cannot be done exactly is refused.


def test_a_tree_must_be_closed_before_the_next_forward(hybrid):
    cache = make_cache(hybrid)
    forward(hybrid, cache, text(6, seed=30))
    verify_tree(hybrid, cache, text(len(TREE), seed=31))
    with pytest.raises(ValueError, match="still open"):
        forward(hybrid, cache, text(1, seed=32))
    crop_cache(cache, 6)
    forward(hybrid, cache, text(1, seed=32))


def test_nodes_that_are_no_path_are_refused_and_nothing_changes(hybrid):
    cache = make_cache(hybrid)
    prompt, nodes, more = text(6, seed=33), text(len(TREE), seed=34), text(2, seed=35)
    forward(hybrid, cache, prompt)
    verify_tree(hybrid, cache, nodes)
    with pytest.raises(ValueError, match="no path"):
        keep_in_cache(cache, 6, [0, 1, 2])
    with pytest.raises(ValueError, match="starts at 6"):
        keep_in_cache(cache, 5, [0])
    keep_in_cache(cache, 6, [0, 2])
    whole = torch.cat([prompt, nodes[:, [0, 2]], more], 1)
    assert_same(forward(hybrid, cache, more), fresh(hybrid, whole)[:, -2:])


def test_padding_is_refused_on_recurrent_layers(hybrid):
    mask = torch.ones(1, 6, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="padding"):
        forward(hybrid, make_cache(hybrid), text(6, seed=36), attention_mask=mask)


def test_a_forward_that_failed_leaves_a_cache_that_says_so(hybrid):
    cache = make_cache(hybrid)
    with pytest.raises(IndexError):
        forward(hybrid, cache, torch.tensor([[VOCABULARY + 5]]))
    with pytest.raises(RuntimeError, match="did not finish"):
        forward(hybrid, cache, text(2, seed=37))
    with pytest.raises(RuntimeError, match="did not finish"):
        crop_cache(cache, 0)


def test_a_forward_that_was_refused_leaves_the_cache_as_it_was(hybrid):
    prompt, nodes = text(6, seed=57), text(3, seed=58)
    cache = make_cache(hybrid)
    forward(hybrid, cache, prompt)
    no_tree = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="not a tree"):
        forward(hybrid, cache, nodes, attention_mask=no_tree)
    assert_same(forward(hybrid, cache, nodes), fresh(hybrid, torch.cat([prompt, nodes], 1))[:, -3:])


def test_going_back_over_embeddings_is_refused(hybrid):
    cache = make_cache(hybrid)
    with torch.no_grad():
        embeds = hybrid.get_input_embeddings()(text(6, seed=38))
        hybrid(inputs_embeds=embeds, use_cache=True, **{cache_argument(hybrid): cache})
    forward(hybrid, cache, text(2, seed=39))
    crop_cache(cache, 7)
    with pytest.raises(ValueError, match="cannot be fed again"):
        crop_cache(cache, 3)


@pytest.mark.parametrize("length", [-1, 9])
def test_a_length_the_cache_does_not_hold_is_refused(model, length):
    cache = make_cache(model)
    forward(model, cache, text(8, seed=40))
    with pytest.raises(ValueError, match=f"cannot keep {length} tokens"):
        crop_cache(cache, length)


def test_a_stock_cache_with_recurrent_layers_is_refused(hybrid):
    cache = transformers.DynamicCache(config=hybrid.config)
    forward(hybrid, cache, text(6, seed=41))
    with pytest.raises(ValueError, match="make_cache"):
        crop_cache(cache, 5)
    with pytest.raises(ValueError, match="make_cache"):
        keep_in_cache(cache, 4, [0])


@pytest.mark.parametrize("made", [transformers.DynamicCache, lambda: transformers.DynamicCache(config=qwen3().config)])
def test_stock_caches_of_attention_models_are_cut_too(made):
    model = built("qwen3")
    cache = made()
    prompt, nodes, more = text(9, seed=42), text(len(TREE), seed=43), text(3, seed=44)
    forward(model, cache, torch.cat([prompt, prompt], 1))
    with pytest.raises(ValueError, match="cannot keep 19 tokens of a cache that holds 18"):
        crop_cache(cache, 19)
    crop_cache(cache, 9)
    verify_tree(model, cache, nodes)
    keep_in_cache(cache, 9, path_to(8))
    whole = torch.cat([prompt, nodes[:, path_to(8)], more], 1)
    assert_same(forward(model, cache, more), fresh(model, whole)[:, -3:])


def test_max_length_is_a_promise():
    model = built("qwen3")
    cache = make_cache(model, max_length=8)
    forward(model, cache, text(8, seed=45))
    with pytest.raises(ValueError, match="max_length=8"):
        forward(model, cache, text(1, seed=46))


def test_flash_attention_with_a_tree_mask_is_refused():
    model = qwen3_5()
    cache = make_cache(model)
    forward(model, cache, text(4, seed=47))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="sdpa"):
        verify_tree(model, cache, text(len(TREE), seed=48))


def test_layers_without_an_exact_method_are_named():
    model = harden(transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**COMMON, num_local_experts=2)))
    with pytest.raises(NotImplementedError, match="layer 1 of MiniMaxForCausalLM"):
        make_cache(model)


def test_a_state_outside_of_the_cache_is_refused():
    config = transformers.RecurrentGemmaConfig(**COMMON, block_types=["recurrent", "attention"], lru_width=64)
    with pytest.raises(NotImplementedError, match="RecurrentGemmaForCausalLM keeps a recurrent state outside"):
        make_cache(transformers.RecurrentGemmaForCausalLM(config))


def test_trees_are_refused_where_positions_cannot_be_given():
    """MPT's ALiBi counts places in the cache, where the branches of a tree stand behind each other."""
    config = transformers.MptConfig(vocab_size=VOCABULARY, d_model=64, n_heads=4, n_layers=2)
    model = harden(transformers.MptForCausalLM(config))
    cache = make_cache(model)
    forward(model, cache, text(4, seed=55))
    with pytest.raises(ValueError, match="one chain at a time"):
        forward(model, cache, text(3, seed=56), attention_mask=torch.ones(1, 1, 3, 7, dtype=torch.bool).tril(4))


def test_crop_of_code_not_yet_ported_takes_a_length_or_a_count(hybrid):
    prompt, block, more = text(6, seed=49), text(5, seed=50), text(2, seed=51)
    for argument in (8, -3):
        cache = make_cache(hybrid)
        forward(hybrid, cache, prompt)
        forward(hybrid, cache, block)
        cache.crop(argument)
        whole = torch.cat([prompt, block[:, :2], more], 1)
        assert_same(forward(hybrid, cache, more), fresh(hybrid, whole)[:, -2:])


def test_a_gpt2_cache_goes_back():
    """Its positions are learned and its submodules named differently."""
    model = gpt2()
    prompt, block, more = text(7, seed=52), text(5, seed=53), text(2, seed=54)
    cache = make_cache(model)
    forward(model, cache, prompt)
    forward(model, cache, block)
    crop_cache(cache, 9)
    whole = torch.cat([prompt, block[:, :2], more], 1)
    assert_same(forward(model, cache, more), fresh(model, whole)[:, -2:])
