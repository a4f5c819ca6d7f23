"""Replayed caches against eager ones: on a CPU the same static code, called instead of captured."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import transformers
from tiny_models import EXACT, VOCABULARY
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ddaudit.runtime import crop_cache, keep_in_cache
from ddaudit.runtime.caches.cache import VerifiableCache
from ddaudit.runtime.caches.mode import replay_log
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.caches.window import ROOT, Window
from ddaudit.runtime.models.architecture import layer_output
from ddaudit.runtime.replay import memory, passes, prefill, target
from ddaudit.runtime.replay.attending import GroupedAttention, attending, is_causal_mask
from ddaudit.runtime.replay.cache import ReplayedCache
from ddaudit.runtime.replay.drafter import replay_drafter
from ddaudit.runtime.replay.target import LARGEST_WINDOW, graphs_of, padded

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
def feed(model, cache, ids, parents=None, **given):
    start = cache.get_seq_length()
    kwargs = dict(given)
    if parents is not None:
        window = Window(start, len(parents), parents)
        visible = torch.cat([torch.ones(len(parents), start, dtype=torch.bool), window.ancestors(ids.device)], 1)
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        kwargs |= {"attention_mask": mask, "position_ids": start + torch.tensor([window.depths])}
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


@pytest.mark.parametrize("length", [1, 9, 63, 64, 65, 66, 72, 80, 128, 129])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_trees_of_all_sizes_are_as_eager(name, length):
    model = EXACT[name]()
    eager, replayed = pair(model)
    parents = tuple((node - 1) // 2 if node else ROOT for node in range(length))
    path = [length - 1]
    while parents[path[0]] != ROOT:
        path.insert(0, parents[path[0]])
    for cache in (eager, replayed):
        feed(model, cache, text(5, 1))
    with replay_log() as log:
        for step in range(2):
            assert_same(*(feed(model, cache, text(length, step), parents) for cache in (replayed, eager)))
            for cache in (replayed, eager):
                keep_in_cache(cache, cache.window.start, path)
    assert (log.num_graphs, log.refusals) == (2, [])
    assert_same(feed(model, replayed, text(1, 4)), feed(model, eager, text(1, 4)))


def test_windows_are_filled_up_by_little():
    sizes = {length: padded(length) for length in range(1, LARGEST_WINDOW + 1)}
    assert all(length <= size for length, size in sizes.items())
    assert {length: sizes[length] for length in (1, 16, 17, 64, 65, 129)} == {
        1: 1, 16: 16, 17: 17, 64: 64, 65: 65, 129: 129
    }  # fmt: skip
    assert len(set(sizes.values())) <= 12


def test_a_window_above_the_largest_runs_eagerly():
    model = EXACT["qwen3_5"]()
    eager, replayed = pair(model)
    with replay_log() as log:
        for step, length in enumerate([5, LARGEST_WINDOW + 1, 3]):
            assert_same(feed(model, replayed, text(length, step)), feed(model, eager, text(length, step)))
    assert log.num_graphs == 2


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
    # A window that was still open.
    replayed.reset()
    for other in pair(model):
        feed(model, other, text(9, 7))
        feed(model, other, text(2, 8))


def test_a_mask_that_is_no_tree_is_refused_and_the_cache_is_as_before():
    model = EXACT["qwen3_5"]()
    eager, cache = pair(model)
    for each in (eager, cache):
        feed(model, each, text(5, 1))
        # The first window of a size is also read for the eager forward that proves its graph.
        feed(model, each, text(3, 1))
        crop_cache(each, 5)
    mask = torch.zeros(1, 1, 3, 8)
    mask[..., 5:] = torch.finfo(torch.float32).min
    with torch.inference_mode(), pytest.raises(ValueError, match="not a tree"):
        model(text(3, 2), attention_mask=mask, use_cache=True, **{cache_argument(model): cache})
    assert cache.get_seq_length() == 5
    assert_same(feed(model, cache, text(4, 3)), feed(model, eager, text(4, 3)))


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


def test_a_model_without_a_head_and_a_decoder_alone_run_eagerly(monkeypatch):
    monkeypatch.setattr(prefill, "PIECE", 150)
    monkeypatch.setattr(target, "PIECE", 150)
    model = EXACT["qwen3_5"]()
    whole = pair(model)
    alone = pair(model.model)
    for caches, told in ((whole, "forwards of Qwen3_5TextModel alone run eagerly"), (alone, "it has no head")):
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            for length in (400, 1, 4, 4):
                given = {"input_ids": text(length, length), "use_cache": True}
                eager, replayed = (model.model(**given, **{cache_argument(model.model): each}) for each in caches)
                torch.testing.assert_close(replayed.last_hidden_state, eager.last_hidden_state)
        messages = [str(each.message) for each in caught if each.category is RuntimeWarning]
        assert len(messages) == 1 and told in messages[0]


def test_the_forward_that_proves_a_graph_copies_no_keys(monkeypatch):
    model = EXACT["qwen3_5"]()
    eager, replayed = pair(model)
    for cache in (eager, replayed):
        feed(model, cache, text(9, 1))
    taken = []
    whole = torch.cat

    def counted(tensors, *args, **kwargs):
        result = whole(tensors, *args, **kwargs)
        taken.extend([result.shape] if result.dim() == 4 and result.shape[-2] == 12 else [])
        return result

    expected = feed(model, eager, text(3, 2))
    monkeypatch.setattr(torch, "cat", counted)
    assert_same(feed(model, replayed, text(3, 2)), expected)
    assert taken == []
    assert all("update" not in vars(layer) for layer in replayed.layers)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_5-composite"])
@pytest.mark.parametrize("logits_to_keep", [0, 1, 10])
def test_a_long_prompt_is_fed_in_pieces(monkeypatch, name, logits_to_keep):
    monkeypatch.setattr(prefill, "PIECE", 150)
    monkeypatch.setattr(target, "PIECE", 150)
    model = EXACT[name]()
    eager, replayed = pair(model)
    fed = []
    model.get_decoder().register_forward_pre_hook(lambda module, args: fed.append(None))
    ids = text(400, 1)
    ours = feed(model, replayed, ids, logits_to_keep=logits_to_keep)
    assert len(fed) == 3
    assert_same(ours, feed(model, eager, ids, logits_to_keep=logits_to_keep))
    assert len(fed) == 4
    memory = replayed._graphs._key_values
    # A chain is kept by the next forward; the second long one goes on where the first was written.
    for length, parents in ((13, TREE), (300, None), (5, None)):
        ids = text(length, length)
        assert_same(feed(model, replayed, ids, parents), feed(model, eager, ids, parents))
        for layer, held in zip(replayed.layers, range(len(replayed.layers)), strict=True):
            if type(layer) is DynamicLayer:
                assert layer.keys.data_ptr() == memory.held(held, 1)[0].data_ptr()
        for cache in (eager, replayed):
            if parents:
                keep_in_cache(cache, cache.window.start, [0, 2, 5])
    for cache in (eager, replayed):
        crop_cache(cache, 200)
    assert_same(feed(model, replayed, text(3, 3)), feed(model, eager, text(3, 3)))


def test_a_long_prompt_with_padding_or_images_is_fed_whole(monkeypatch):
    monkeypatch.setattr(prefill, "PIECE", 8)
    monkeypatch.setattr(target, "PIECE", 8)
    model = EXACT["qwen3"]()
    eager, replayed = pair(model)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :3] = 0
    fed = []
    model.get_decoder().register_forward_pre_hook(lambda module, args: fed.append(None))
    given = {"attention_mask": mask, "logits_to_keep": 5}
    assert_same(feed(model, replayed, text(20, 1), **given), feed(model, eager, text(20, 1), **given))
    assert len(fed) == 2
    eager, replayed = pair(model)
    given["attention_mask"] = torch.ones(1, 20, dtype=torch.long)
    assert_same(feed(model, replayed, text(20, 1), **given), feed(model, eager, text(20, 1), **given))
    assert len(fed) == 6


def test_no_program_keeps_the_memory_of_before(monkeypatch):
    """Keys and values grow; the graphs of before, and what they read, are gone."""
    monkeypatch.setattr(memory, "ROOM", 256)
    model = EXACT["qwen3_5"]()
    _, replayed = pair(model)
    for length in (20, 1, 16):
        feed(model, replayed, text(length, length))
    graphs = replayed._graphs
    before = [weakref.ref(graphs._key_values.memory), *(weakref.ref(each.window) for each in graphs._stages.values())]
    while graphs._key_values.capacity == 256:
        feed(model, replayed, text(60, 1))
    # Elsewhere than on a GPU a graph is a function that knows its owner.
    gc.collect()
    assert [each() for each in before] == [None] * 3


@pytest.mark.parametrize("fits", [True, False])
def test_keys_wait_on_the_host_where_both_memories_do_not_fit(monkeypatch, fits):
    monkeypatch.setattr(memory, "ROOM", 256)
    model = EXACT["qwen3_5"]()
    eager, replayed = pair(model)
    for cache in (eager, replayed):
        feed(model, cache, text(20, 1))
    assert_same(feed(model, replayed, text(5, 2)), feed(model, eager, text(5, 2)))
    failures, zeros = [], torch.zeros

    def short(shape, *args, **kwargs):
        if isinstance(shape, tuple) and len(shape) == 5 and len(failures) < 2 - fits:
            failures.append(shape)
            raise torch.OutOfMemoryError("no memory left")
        return zeros(shape, *args, **kwargs)

    monkeypatch.setattr(torch, "zeros", short)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if fits else "ignore", RuntimeWarning)
        for step in range(4):
            ids = text(60, step)
            assert_same(feed(model, replayed, ids), feed(model, eager, ids))
    assert len(failures) == 2 - fits


def test_windows_of_all_sizes_share_what_a_commit_needs():
    model = EXACT["qwen3_5"]()
    _, replayed = pair(model)
    feed(model, replayed, text(20, 1))
    for length in (1, 16, 64):
        feed(model, replayed, text(length, length))
    windows = [stage.window for stage in replayed._graphs._stages.values()]
    for each in (lambda window: window.factors.writes, lambda window: window.inputs[0]):
        assert len({each(window).data_ptr() for window in windows}) == 1


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_attention_by_group_is_stock_attention(kind):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    visible = torch.ones(5, 9, dtype=torch.bool).tril(4)[None, None]
    mask = visible if kind == "bool" else torch.zeros(1, 1, 5, 9).masked_fill(~visible, -torch.inf)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    for given in ({}, {"scaling": 0.3}):
        stock, _ = sdpa_attention_forward(module, query, key, value, mask, **given)
        ours, _ = GroupedAttention()(module, query, key, value, mask, **given)
        torch.testing.assert_close(ours, stock)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("past", [0, 300])
def test_a_causal_mask_is_flash_attentions_on_a_gpu(past):
    torch.manual_seed(0)
    given = {"device": "cuda", "dtype": torch.bfloat16}
    query, key, value = (
        torch.randn(1, heads, past * kept + 70, 64, **given) for heads, kept in ((6, 0), (2, 1), (2, 1))
    )
    mask = torch.ones(1, 1, 70, past + 70, dtype=torch.bool, device="cuda").tril(past)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    expected, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask)
    ours, _ = GroupedAttention()(module, query, key, value, mask)
    assert (ours - expected).norm() < 1e-2 * expected.norm()


def test_a_mask_that_says_more_than_causal_is_known():
    visible = torch.ones(1, 1, 5, 9, dtype=torch.bool).tril(4)
    additive = torch.zeros(1, 1, 5, 9).masked_fill(~visible, torch.finfo(torch.float32).min)
    assert is_causal_mask(visible) and is_causal_mask(additive)
    for mask, place, value in ((visible, 3, False), (visible, 8, True), (additive, 3, -0.5), (additive, 8, 0.0)):
        other = mask.clone()
        other[0, 0, 2, place] = value
        assert not is_causal_mask(other)


def test_a_graph_that_is_refused_leaves_the_eager_forwards_keys():
    model = EXACT["qwen3_5"]()
    eager, replayed = pair(model)
    replayed._graphs.prove = lambda *_: False
    for cache in (eager, replayed):
        feed(model, cache, text(9, 1))
    for step in range(2):
        assert_same(feed(model, replayed, text(3, step)), feed(model, eager, text(3, step)))
        for mine, theirs in zip(replayed.layers, eager.layers, strict=True):
            if type(mine) is DynamicLayer:
                torch.testing.assert_close(mine.keys, theirs.keys)


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
    monkeypatch.setattr(passes, "is_fused", lambda weight: True)
    monkeypatch.setattr(passes, "num_pieces", lambda num_nodes, weight: 3)
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


class OwnLayer(torch.nn.Module):
    def __init__(self, config, layer_idx, is_causal, sliding_window):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, is_causal
        self.sliding_window = sliding_window
        self.taken = torch.nn.Linear(32, 96)

    def forward(self, hidden, context, places, past_key_values=None):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        queries, _, _ = self.taken(hidden).chunk(3, -1)
        _, keys, values = self.taken(torch.cat([context, hidden], 1)).chunk(3, -1)
        queries, keys, values = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (queries, keys, values))
        queries, keys = queries + places[..., -queries.shape[2] :, :], keys + places
        keys, values = past_key_values.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        window = self.sliding_window
        return attend(self, queries, keys, values, None, is_causal=self.is_causal, sliding_window=window)[0].flatten(2)


class OwnDrafter(torch.nn.Module):
    """A block drafter with attention through Transformers' functions, as public ones are written."""

    def __init__(self, is_causal=False, sliding_window=None):
        super().__init__()
        torch.manual_seed(0)
        self.config = transformers.Qwen3Config(hidden_size=32, num_hidden_layers=2, attn_implementation="sdpa")
        layers = (OwnLayer(self.config, index, is_causal, sliding_window) for index in range(2))
        self.layers = torch.nn.ModuleList(layers)
        self.places = torch.nn.Embedding(256, 16)

    def context(self, target_hidden):
        return target_hidden

    def forward(self, noise_embedding, target_hidden, position_ids, past_key_values=None):
        hidden, context = noise_embedding, self.context(target_hidden)
        places = self.places(position_ids)[:, None]
        for layer in self.layers:
            hidden = layer(hidden, context, places, past_key_values=past_key_values)
        return hidden


def draft(drafter, cache, block, hidden):
    start = cache.get_seq_length()
    positions = torch.arange(start, start + hidden.shape[1] + block.shape[1])[None]
    return drafter(noise_embedding=block, target_hidden=hidden, position_ids=positions, past_key_values=cache)


@torch.inference_mode()
def test_a_drafter_is_replayed_over_its_stock_cache():
    drafter, eager = OwnDrafter(), OwnDrafter()
    replay_drafter(drafter, as_traced)
    ours, theirs, other = DynamicCache(), DynamicCache(), DynamicCache()
    with replay_log() as log:
        for step, context in enumerate([20, 4, 4, 1, 3, 16, 1, 5, 4, 2]):
            block, hidden = torch.randn(1, 4, 32), torch.randn(1, context, 32)
            torch.testing.assert_close(draft(drafter, ours, block, hidden), draft(eager, theirs, block, hidden))
            for index in range(2):
                torch.testing.assert_close(ours.layers[index].keys, theirs.layers[index].keys)
                torch.testing.assert_close(ours.layers[index].values, theirs.layers[index].values)
            for cache in (ours, theirs):
                crop_cache(cache, cache.get_seq_length() - 4)
            if step == 4:  # another text in between
                for _ in range(2):
                    draft(drafter, other, block, hidden)
    assert log.num_graphs == 1
    assert log.refusals == []


@torch.inference_mode()
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_drafters_layers_are_compiled_once_unless_they_come_out_otherwise(factor):
    programs = []

    def compiled(graph, inputs):
        programs.append(graph)
        return lambda *given: [graph(*given)[0] * factor]

    drafter, eager = OwnDrafter(), OwnDrafter()
    replay_drafter(drafter, compiled)
    ours, theirs = DynamicCache(), DynamicCache()
    with replay_log() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for context in [20, 4, 1, 3]:
            block, hidden = torch.randn(1, 4, 32), torch.randn(1, context, 32)
            torch.testing.assert_close(draft(drafter, ours, block, hidden), draft(eager, theirs, block, hidden))
            for cache in (ours, theirs):
                crop_cache(cache, cache.get_seq_length() - 4)
    assert log.num_graphs == 1
    assert len(programs) == 1
    told = ["OwnDrafter drafts by layers as they are: layer 0, compiled, differs from the stock layer by 1.0e-02"]
    assert log.refusals == ([] if factor == 1 else told)


@torch.inference_mode()
def test_a_drafter_whose_context_is_longer_than_usual_has_a_graph_of_its_own():
    drafter, eager = OwnDrafter(), OwnDrafter()
    replay_drafter(drafter, as_traced)
    ours, theirs = DynamicCache(), DynamicCache()
    with replay_log() as log:
        for context in [9, 2, 17, 31, 100]:
            block, hidden = torch.randn(1, 3, 32), torch.randn(1, context, 32)
            torch.testing.assert_close(draft(drafter, ours, block, hidden), draft(eager, theirs, block, hidden))
            for cache in (ours, theirs):
                crop_cache(cache, cache.get_seq_length() - 3)
    assert log.num_graphs == 3
    assert log.refusals == []


@torch.inference_mode()
def test_a_drafter_that_is_always_given_as_much_is_replayed_at_that_shape():
    drafter, eager = OwnDrafter(), OwnDrafter()
    replay_drafter(drafter, as_traced)
    ours, theirs = DynamicCache(), DynamicCache()
    with replay_log() as log:
        for _ in range(3):
            block, hidden = torch.randn(1, 4, 32), torch.randn(1, 2, 32)
            torch.testing.assert_close(draft(drafter, ours, block, hidden), draft(eager, theirs, block, hidden))
    assert log.num_graphs == 1


class SummingDrafter(OwnDrafter):
    """Mixes the context's tokens before any of them is a key, so that rows before them are felt."""

    def context(self, target_hidden):
        return target_hidden - target_hidden.sum(1, keepdim=True) - target_hidden.shape[1]


@torch.inference_mode()
def test_a_drafter_that_feels_the_rows_before_its_context_runs_eagerly():
    drafter, eager = SummingDrafter(), SummingDrafter()
    replay_drafter(drafter, as_traced)
    ours, theirs = DynamicCache(), DynamicCache()
    for step, context in enumerate([9, 16, 2, 3]):
        block, hidden = torch.randn(1, 4, 32), torch.randn(1, context, 32)
        expected = draft(eager, theirs, block, hidden)
        if step == 1:  # this context fills the graph, which must be right for shorter ones too
            with pytest.warns(RuntimeWarning, match="SummingDrafter drafts eagerly: its graph gives something else"):
                found = draft(drafter, ours, block, hidden)
        else:
            found = draft(drafter, ours, block, hidden)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours.layers[1].keys, theirs.layers[1].keys)
        for cache in (ours, theirs):
            crop_cache(cache, cache.get_seq_length() - 4)


def as_flash(module, query, key, value, attention_mask, is_causal, sliding_window, **kwargs):
    """What flash attention gives: causal from the last key, a window to both sides."""
    queries, keys = query.shape[2], key.shape[2]
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = behind.abs() < (sliding_window or keys)
    seen &= (behind >= 0) | (not is_causal)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen)
    return mixed.transpose(1, 2), None


@torch.inference_mode()
@pytest.mark.parametrize(("is_causal", "sliding_window"), [(True, None), (False, 3), (True, 3), (False, 9), (True, 9)])
def test_a_drafters_own_windows_are_kept(is_causal, sliding_window):
    drafter, eager = OwnDrafter(is_causal, sliding_window), OwnDrafter(is_causal, sliding_window)
    for each in (drafter, eager):
        each.config._attn_implementation = "flash_attention_2"
    replay_drafter(drafter, as_traced)
    ours, theirs = DynamicCache(), DynamicCache()
    with replay_log() as log, attending("flash_attention_2", as_flash):
        for context in [2, 1, 3, 3, 5, 2]:
            block, hidden = torch.randn(1, 4, 32), torch.randn(1, context, 32)
            torch.testing.assert_close(draft(drafter, ours, block, hidden), draft(eager, theirs, block, hidden))
            for cache in (ours, theirs):
                crop_cache(cache, cache.get_seq_length() - 4)
    assert (log.num_graphs, log.refusals) == (1, [])


@torch.inference_mode()
def test_a_sliding_window_that_only_the_config_knows_is_no_window():
    """`sdpa` without a mask sees everything, and so does the graph."""
    drafter, eager = OwnDrafter(sliding_window=3), OwnDrafter(sliding_window=3)
    replay_drafter(drafter, as_traced)
    ours, theirs = DynamicCache(), DynamicCache()
    with replay_log() as log:
        for context in [2, 1, 3, 3]:
            block, hidden = torch.randn(1, 4, 32), torch.randn(1, context, 32)
            torch.testing.assert_close(draft(drafter, ours, block, hidden), draft(eager, theirs, block, hidden))
    assert (log.num_graphs, log.refusals) == (1, [])


@torch.inference_mode()
def test_a_drafter_that_looks_ahead_only_runs_eagerly():
    drafter = OwnDrafter(is_causal=True)
    replay_drafter(drafter, as_traced)
    cache = DynamicCache()
    block, hidden = torch.randn(1, 4, 32), torch.randn(1, 2, 32)
    draft(drafter, cache, block, hidden)
    with pytest.warns(RuntimeWarning, match="OwnDrafter drafts eagerly: a layer is causal without a mask"):
        draft(drafter, cache, block, hidden)
    assert cache.get_seq_length() == 12
