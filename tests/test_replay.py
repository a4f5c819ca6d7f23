"""Replayed caches against eager ones: on a CPU the same static code, called instead of captured."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from tiny_models import EXACT, VOCABULARY
from transformers import DynamicCache

from ddaudit.runtime import crop_cache, keep_in_cache
from ddaudit.runtime.caches.cache import VerifiableCache
from ddaudit.runtime.caches.mode import replay_log
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.caches.window import ROOT, Window
from ddaudit.runtime.models.architecture import layer_output
from ddaudit.runtime.replay import regions
from ddaudit.runtime.replay.cache import ReplayedCache
from ddaudit.runtime.replay.drafter import replay_drafter
from ddaudit.runtime.replay.target import graphs_of

TREE = (ROOT, 0, 0, 1, 1, 2, 3, 6, 7, 5, 9, ROOT, 11)
REPLAYED = ["qwen3", "qwen3_5", "qwen3_5-composite", "olmo-hybrid", "qwen3_5-moe", "qwen3-next"]


def as_traced(graph, inputs):
    """Stands for the compiler: the traced program as it is."""
    return graph


def pair(model):
    graphs = graphs_of(model, as_traced)
    return VerifiableCache(model), ReplayedCache(model, None, graphs)


def text(length, seed):
    return torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def feed(model, cache, ids, parents=None):
    start = cache.get_seq_length()
    kwargs = {}
    if parents is not None:
        window = Window(start, len(parents), parents)
        visible = torch.cat([torch.ones(len(parents), start, dtype=torch.bool), window.ancestors(ids.device)], 1)
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        kwargs = {"attention_mask": mask, "position_ids": start + torch.tensor([window.depths])}
    return model(ids, use_cache=True, output_hidden_states=True, **{cache_argument(model): cache}, **kwargs)


def assert_same(ours, eager):
    torch.testing.assert_close(ours.logits, eager.logits, rtol=1e-4, atol=2e-4)
    for mine, theirs in zip(ours.hidden_states, eager.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(layer_output(ours, -1), layer_output(eager, -1), rtol=1e-4, atol=2e-4)


@pytest.fixture(params=REPLAYED)
def model(request):
    return EXACT[request.param]()


def test_rounds_of_all_kinds_are_as_eager(model):
    eager, replayed = pair(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for step, (length, parents, kept) in enumerate(
            [
                (20, None, None),
                (1, None, None),
                (13, TREE, [0, 2, 5, 9]),
                (5, None, 3),
                (13, TREE, [11, 12]),
                (13, TREE, []),
                (1, None, None),
                (16, None, 16),
                (7, None, 0),
                (1, None, None),
            ]
        ):
            ids = text(length, step)
            assert_same(feed(model, replayed, ids, parents), feed(model, eager, ids, parents))
            for cache in (replayed, eager):
                start = cache.window.start
                if parents is not None:
                    keep_in_cache(cache, start, kept)
                elif kept is not None:
                    crop_cache(cache, start + kept)
            assert replayed.get_seq_length() == eager.get_seq_length()
    assert replayed._graphs.holds(replayed)


def test_a_cache_that_another_one_displaced_goes_on(model):
    eager, first = pair(model)
    second = ReplayedCache(model, None, graphs_of(model))
    ids = text(9, 1)
    for cache in (eager, first, second):
        feed(model, cache, ids)
    assert_same(feed(model, first, text(13, 2), TREE), feed(model, eager, text(13, 2), TREE))
    feed(model, second, text(5, 3))  # takes the memory while the first one's tree is open
    for cache in (first, eager):
        keep_in_cache(cache, 9, [0, 1, 3])
    assert_same(feed(model, first, text(1, 4)), feed(model, eager, text(1, 4)))
    assert_same(feed(model, copy.deepcopy(first), text(4, 5)), feed(model, eager, text(4, 5)))


def test_going_further_back_and_starting_again(model):
    eager, replayed = pair(model)
    for cache in (eager, replayed):
        feed(model, cache, text(20, 1))
        feed(model, cache, text(6, 2))
        feed(model, cache, text(3, 3))
        crop_cache(cache, 22)
    assert_same(feed(model, replayed, text(4, 4)), feed(model, eager, text(4, 4)))
    for cache in (eager, replayed):
        cache.reset()
        feed(model, cache, text(7, 5))
    assert_same(feed(model, replayed, text(2, 6)), feed(model, eager, text(2, 6)))


def test_a_mask_that_is_no_tree_is_refused_when_its_window_closes():
    model = EXACT["qwen3_5"]()
    _, cache = pair(model)
    feed(model, cache, text(5, 1))
    # The first window of a size is also read at once, for the eager forward that proves its graph.
    feed(model, cache, text(3, 1))
    crop_cache(cache, 5)
    mask = torch.zeros(1, 1, 3, 8)
    mask[..., 5:] = torch.finfo(torch.float32).min
    with torch.inference_mode():
        model(text(3, 2), attention_mask=mask, use_cache=True, **{cache_argument(model): cache})
    with pytest.raises(ValueError, match="not a tree"):
        keep_in_cache(cache, 5, [0])


def test_a_model_that_attends_in_its_own_way_runs_eagerly():
    """GPT-2's and Mistral's layers are not for fixed memory here; the text must not suffer from it."""
    model = EXACT["mistral"]()
    eager, replayed = pair(model)
    for cache in (eager, replayed):
        feed(model, cache, text(9, 1))
    with pytest.warns(RuntimeWarning, match="run eagerly on MistralForCausalLM: layer 0 .*DynamicSlidingWindowLayer"):
        ours = feed(model, replayed, text(3, 2))
    assert_same(ours, feed(model, eager, text(3, 2)))
    assert_same(feed(model, replayed, text(3, 3)), feed(model, eager, text(3, 3)))


def test_a_program_that_gives_something_else_is_not_used():
    model = EXACT["qwen3_5"]()

    def wrong(graph, inputs):
        return lambda *given: [graph(*given)[0] * 1.001]

    eager, replayed = VerifiableCache(model), ReplayedCache(model, None, graphs_of(model, wrong))
    for cache in (eager, replayed):
        feed(model, cache, text(9, 1))
    with pytest.warns(RuntimeWarning, match="compiled, differs from the stock layer"):
        ours = feed(model, replayed, text(3, 2))
    assert_same(ours, feed(model, eager, text(3, 2)))


def test_projections_of_one_input_become_one_product_and_stay_the_models_own():
    model = EXACT["qwen3_5"]()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    products = []

    def counted(graph, inputs):
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return graph

    cache = ReplayedCache(model, None, graphs_of(model, counted))
    feed(model, cache, text(9, 1))
    feed(model, cache, text(3, 2))
    # In, out, gate and up, down; or query, key and value, out, gate and up, down.
    assert products == [4, 4]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    mlp = model.model.layers[0].mlp
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()


def test_products_by_the_kernels_change_nothing(monkeypatch):
    """As chosen on a GPU: rows alone for one token, pieces whose sum is left to the compiler for more."""
    monkeypatch.setattr(regions, "is_fused", lambda weight: True)
    monkeypatch.setattr(regions, "num_pieces", lambda num_nodes, weight: 3)
    model = EXACT["qwen3_5"]()
    ops = []

    def noted(graph, inputs):
        ops.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    eager, replayed = VerifiableCache(model), ReplayedCache(model, None, graphs_of(model, noted))
    for cache in (eager, replayed):
        feed(model, cache, text(9, 1))
    for length in (1, 3):
        assert_same(feed(model, replayed, text(length, 2)), feed(model, eager, text(length, 2)))
        for cache in (eager, replayed):
            keep_in_cache(cache, cache.window.start, [0])
    ours = torch.ops.ddaudit
    chosen = [[each.count(op.default) for op in (ours.row_product, ours.split_product)] for each in ops]
    assert chosen == [[4, 0], [4, 0], [0, 4], [0, 4]]
    assert not any(torch.ops.aten.mm.default in each for each in ops)


def test_a_layer_that_differs_in_a_number_is_not_served_by_anothers_program():
    model = EXACT["qwen3_5"]()
    model.model.layers[1].input_layernorm.eps = 0.5
    eager, replayed = pair(model)
    for cache in (eager, replayed):
        feed(model, cache, text(9, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert_same(feed(model, replayed, text(3, 2)), feed(model, eager, text(3, 2)))


class OwnDrafter(torch.nn.Module):
    """A block drafter with attention through Transformers' functions, as public ones are written."""

    def __init__(self, is_causal=False):
        super().__init__()
        torch.manual_seed(0)
        self.config = transformers.Qwen3Config(hidden_size=32, attn_implementation="sdpa")
        self.taken, self.is_causal, self.layer_idx = torch.nn.Linear(32, 96), is_causal, 0

    def forward(self, noise_embedding, target_hidden, past_key_values=None):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        queries, _, _ = self.taken(noise_embedding).chunk(3, -1)
        _, keys, values = self.taken(torch.cat([target_hidden, noise_embedding], 1)).chunk(3, -1)
        queries, keys, values = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (queries, keys, values))
        keys, values = past_key_values.update(keys, values, 0)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, queries, keys, values, None, is_causal=self.is_causal)[0].flatten(2)


@torch.inference_mode()
def test_a_drafter_is_replayed_over_its_stock_cache():
    drafter, eager = OwnDrafter(), OwnDrafter()
    replay_drafter(drafter)
    ours, theirs, other = DynamicCache(), DynamicCache(), DynamicCache()
    with replay_log() as log:
        for step, context in enumerate([20, 1, 3, 3, 1, 5]):
            block, hidden = torch.randn(1, 4, 32), torch.randn(1, context, 32)
            for cache in (ours, theirs):
                model = drafter if cache is ours else eager
                output = model(noise_embedding=block, target_hidden=hidden, past_key_values=cache)
                if cache is ours:
                    mine = output
            torch.testing.assert_close(mine, output)
            for cache in (ours, theirs):
                crop_cache(cache, cache.get_seq_length() - 4)
            if step == 3:  # another text in between
                for _ in range(2):
                    drafter(noise_embedding=block, target_hidden=hidden, past_key_values=other)
            torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys)
    assert log.num_graphs == 3
    assert log.refusals == []


@torch.inference_mode()
def test_a_drafter_that_looks_ahead_only_runs_eagerly():
    drafter = OwnDrafter(is_causal=True)
    replay_drafter(drafter)
    cache = DynamicCache()
    block, hidden = torch.randn(1, 4, 32), torch.randn(1, 2, 32)
    drafter(noise_embedding=block, target_hidden=hidden, past_key_values=cache)
    with pytest.warns(RuntimeWarning, match="OwnDrafter drafts eagerly: .*OwnDrafter is causal"):
        drafter(noise_embedding=block, target_hidden=hidden, past_key_values=cache)
    assert cache.get_seq_length() == 12
