"""The releases that rules name, tried on the one installed: a line fails from that release on and works before it.

Run in environments with different releases, the same file holds each fact from both sides.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import pytest

from ddaudit.auditor.facts.names import OLDEST
from ddaudit.auditor.targets.releases import number

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

if TYPE_CHECKING:
    from collections.abc import Callable

INSTALLED = number(transformers.__version__)
IDS = torch.arange(1, 8)[None]
SIZES = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
LLAMA = "transformers.models.llama.modeling_llama"


def model() -> Any:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).eval()


def filled() -> Any:
    cache = transformers.DynamicCache()
    model()(IDS, past_key_values=cache)
    return cache


def crop_takes_a_length() -> bool:
    cache = filled()
    cache.crop(3)
    return bool(cache.get_seq_length() == 3)


def cache_is_a_tuple() -> bool:
    return [len(pair) for pair in filled()] == [2, 2] and filled()[0][0].shape[2] == 7


def output_in_a_dict() -> bool:
    return "past_key_values" in dict(model()(IDS))


def positions_are_read() -> bool:
    here, there = (model()(IDS, cache_position=torch.arange(7) + start).logits for start in (0, 50))
    return not torch.allclose(here, there)


def layer_takes_the_singular() -> bool:
    whole, cache, states = model(), transformers.DynamicCache(), torch.zeros(1, 3, 64)
    angles = whole.model.rotary_emb(states, torch.arange(3)[None])
    whole.model.layers[0](states, position_embeddings=angles, past_key_value=cache)
    return bool(cache.get_seq_length() == 3)


def layer_returns_a_tuple() -> bool:
    seen: list[object] = []
    whole = model()
    whole.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    whole(IDS)
    return isinstance(seen[0], tuple)


def layer_runs_alone() -> bool:
    return model().model.layers[0](torch.zeros(1, 3, 64)) is not None


def template_gives_ids() -> bool:
    base = importlib.import_module("transformers.tokenization_utils_base").PreTrainedTokenizerBase
    return inspect.signature(base.apply_chat_template).parameters["return_dict"].default is False


def rotary_takes_positions() -> bool:
    turn = importlib.import_module(LLAMA).apply_rotary_pos_emb
    return list(inspect.signature(turn).parameters)[4] == "position_ids"


def rotary_is_built_from_sizes() -> bool:
    made = importlib.import_module(LLAMA).LlamaRotaryEmbedding
    return "dim" in inspect.signature(made.__init__).parameters


def has(owner: Callable[[], Any], name: str) -> Callable[[], bool]:
    return lambda: hasattr(owner(), name)


def attention() -> Any:
    return model().model.layers[0].self_attn


def neox() -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=101, **sizes))


def mixin() -> Any:
    return transformers.GenerationMixin


WORKS_BEFORE: list[tuple[str, str, Callable[[], bool]]] = [
    ("5.24", "crop keeps a length", crop_takes_a_length),
    ("5.24", "an output's dict has past_key_values", output_in_a_dict),
    ("5.24", "get_max_cache_shape", has(transformers.DynamicCache, "get_max_cache_shape")),
    ("5.0", "a cache is a tuple of pairs", cache_is_a_tuple),
    ("5.0", "to_legacy_cache", has(transformers.DynamicCache, "to_legacy_cache")),
    ("5.0", "from_legacy_cache", has(transformers.DynamicCache, "from_legacy_cache")),
    ("5.0", "cache_position is read", positions_are_read),
    ("5.0", "a layer takes past_key_value", layer_takes_the_singular),
    ("5.0", "config.rope_theta", lambda: hasattr(model().config, "rope_theta")),
    ("5.0", "rotary positions as the fifth argument", rotary_takes_positions),
    ("5.0", "apply_chat_template gives ids", template_gives_ids),
    ("5.0", "trainer.tokenizer", has(lambda: transformers.Trainer, "tokenizer")),
    ("5.0", "_get_cache", has(mixin, "_get_cache")),
    ("5.0", "GPT-NeoX's embed_out", has(neox, "embed_out")),
    (OLDEST, "key_cache", has(filled, "key_cache")),
    (OLDEST, "seen_tokens", has(filled, "seen_tokens")),
    (OLDEST, "a limit of None", lambda: getattr(filled(), "get_max_cache_shape", lambda: -1)() is None),
    (OLDEST, "a Qwen3 layer returns a tuple", layer_returns_a_tuple),
    (OLDEST, "a layer runs alone", layer_runs_alone),
    (OLDEST, "attention.num_heads", has(attention, "num_heads")),
    (OLDEST, "greedy_search", has(mixin, "greedy_search")),
    ("4.48", "attention.rotary_emb", has(attention, "rotary_emb")),
    ("4.48", "a rotary module is built from sizes", rotary_is_built_from_sizes),
]  # fmt: skip


@pytest.mark.parametrize(("since", "what", "works"), WORKS_BEFORE, ids=[what for _, what, _ in WORKS_BEFORE])
def test_a_line_fails_from_its_release_on(since: str, what: str, works: Callable[[], bool]) -> None:
    try:
        found = works()
    except (AttributeError, TypeError, ValueError, KeyError):
        found = False
    assert found is (number(since) > INSTALLED)


def cache_under_its_new_name() -> bool:
    cache = transformers.DynamicCache()
    output = model()(IDS, cache=cache)
    return bool(cache.get_seq_length() == 7 and output.cache is cache)


EXISTS_FROM: list[tuple[str, str, Callable[[], bool]]] = [
    ("4.56", "DynamicCache(config=)", lambda: len(transformers.DynamicCache(config=model().config).layers) == 2),
    ("4.56", "dtype=", lambda: transformers.AutoModelForCausalLM.from_config(model().config, dtype=torch.bfloat16).dtype
     is torch.bfloat16),
    ("4.46", "processing_class=", lambda: "processing_class" in inspect.signature(transformers.Trainer).parameters),
    ("5.0", "rope_parameters", lambda: hasattr(model().config, "rope_parameters")),
    ("5.24", "cache=", cache_under_its_new_name),
    ("", "get_decoder", lambda: model().get_decoder() is not None),
    ("", "get_text_config", lambda: model().config.get_text_config() is not None),
    ("", "get_seq_length", lambda: filled().get_seq_length() == 7),
]  # fmt: skip


@pytest.mark.parametrize(("since", "what", "exists"), EXISTS_FROM, ids=[what for _, what, _ in EXISTS_FROM])
def test_a_replacement_exists_from_its_release_on(since: str, what: str, exists: Callable[[], bool]) -> None:
    try:
        found = exists()
    except (AttributeError, TypeError):
        found = False
    assert found is (number(since) <= INSTALLED)
