"""Which layers are worth tapping, and what a prompt costs in cache."""

import torch
from transformers import PreTrainedModel
from ddaudit.runtime import final_norm


@torch.inference_mode()
def layer_agreement(target: PreTrainedModel, input_ids):
    """Share of positions whose next token each layer but the last already names, read through the head."""
    out = target(input_ids, output_hidden_states=True, use_cache=False)
    final = out.logits.argmax(-1)
    shares = []
    for layer in range(len(target.get_decoder().layers) - 1):
        state = final_norm(target)(out.hidden_states[layer + 1])
        shares.append((target.get_output_embeddings()(state).argmax(-1) == final).float().mean().item())
    return shares


@torch.inference_mode()
def cache_bytes(target: PreTrainedModel, input_ids):
    """Bytes of keys and values after a prefill."""
    cache = target(input_ids, use_cache=True, logits_to_keep=1).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
