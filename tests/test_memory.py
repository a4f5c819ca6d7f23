"""What an open window weighs at the size of Qwen3.6-27B, counted on the meta device: no weights, no GPU."""

from __future__ import annotations

import torch
import transformers

from ddaudit.runtime import crop_cache, make_cache
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.models.profile import load_profile

NUM_NODES = 64
LIMIT = 400 * 10**6


def tensors(value, seen):
    """Every tensor reachable from a cache through attributes and containers, the model left out."""
    if id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part, seen)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from tensors(part, seen)
    elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] in ("ddaudit", "transformers"):
        yield from tensors(vars(value), seen)


def weight(cache):
    """Bytes of all storages held, each once: a view keeps the whole of what it is cut from."""
    storages = [tensor.untyped_storage() for tensor in tensors(cache, set())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_verifying_64_nodes_of_27b_holds_less_than_400_mb():
    config = load_profile("qwen3.6-27b").config
    text = transformers.Qwen3_5Config(**{k: v for k, v in config.items() if k != "model_type"}).get_text_config()
    with torch.device("meta"), torch.no_grad():
        model = transformers.Qwen3_5ForCausalLM._from_config(text, dtype=torch.bfloat16).eval()
        cache = make_cache(model)

        def feed(length):
            ids = torch.zeros(1, length, dtype=torch.long)
            model(ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})

        feed(32)
        crop_cache(cache, 32)
        before = weight(cache)
        feed(NUM_NODES)
        added = weight(cache) - before
    recurrent = [kind == "linear_attention" for kind in text.layer_types]
    assert (len(recurrent), sum(recurrent)) == (64, 48)
    # Of each recurrent layer the window's inputs (bf16), keys and writes (fp32) at least; of the others K and V.
    heads, size = text.linear_num_value_heads, text.linear_value_head_dim
    channels = heads * size + 2 * text.linear_num_key_heads * text.linear_key_head_dim
    least = 48 * NUM_NODES * (2 * channels + 4 * 2 * heads * size)
    least += 16 * NUM_NODES * 2 * 2 * text.num_key_value_heads * text.head_dim
    assert least <= added <= LIMIT
