"""Every causal architecture of the installed Transformers, built tiny from its configuration class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ddaudit.runtime.models.initializing import make_faults_visible

if TYPE_CHECKING:
    from torch import nn

VOCABULARY = 101
MAX_PARAMETERS = 20_000_000
# Sizes by the names that configurations give them. A field that a configuration does not have is left out.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "embed_dim": 64,
    "attention_hidden_size": 64,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2,
    "head_dim": 16, "kv_channels": 16, "attention_head_dim": 16, "global_head_dim": 16, "swa_head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "d_ff": 96, "ffn_hidden_size": 96, "decoder_ffn_dim": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "intermediate_size_mlp": 96,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "zero_expert_num": 0,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_head_dim": 16, "linear_num_heads": 4,
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_n_heads": 8,
    "mamba_head_dim": 16, "mamba_d_head": 16, "mamba_headdim": 16,
    "mamba_n_groups": 1, "mamba_ngroups": 1, "mamba_d_ssm": 128, "n_groups": 1,
    "mamba_expand": 2, "expand": 2, "chunk_size": 8, "mamba_chunk_size": 8, "mamba_dt_rank": 8, "time_step_rank": 8,
    "lru_width": 64, "block_multiple_of": 8, "use_mamba_kernels": False,
    "sliding_window": 6, "sliding_window_size": 6, "attention_chunk_size": 6,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_layers")
# What the names do not tell: ratios and lists that must fit together.
_CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [2]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "zamba2": {
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "attention_head_dim": 32, "n_mamba_heads": 8,
        "attention_hidden_size": 128, "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def causal_architectures() -> list[str]:
    """The model types that `AutoModelForCausalLM` can build, in alphabetical order."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING))


def build_tiny(model_type: str, seed: int = 0) -> nn.Module:
    """A random model of that type with a few layers, one of each kind it has, on which faults show."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    # The text-only class of a composite type takes the nested configuration.
    config = _shrink(model_class.config_class or CONFIG_MAPPING[model_type], _CHANGES.get(model_type, {}))
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"its smallest known configuration has {num_parameters / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = model_class(config)
    make_faults_visible(model, seed)
    return model.eval().requires_grad_(False)


def _shrink(config_class: Any, changes: dict[str, Any]) -> Any:
    default = config_class()
    fields = default.to_dict()
    small = {name: value for name, value in _SIZES.items() if name in fields}
    if "kv_lora_rank" in fields:
        # Latent attention rotates a part of its own, and has as many key heads as query heads.
        small |= {name: value for name, value in {"head_dim": 8, "num_key_value_heads": 4}.items() if name in fields}
    pattern = next((fields[name] for name in _PATTERNS if fields.get(name)), None)
    chosen = _some_of_each(pattern) if pattern else range(4)
    for name in _LAYERS:
        if name in fields:
            small[name] = len(chosen)
    for name in _PATTERNS:
        if fields.get(name):
            small[name] = [fields[name][index] for index in chosen]
    for name, part in config_class.sub_configs.items():
        if name in fields and name.startswith(("text", "decoder")):
            small[name] = _shrink(part, {}).to_dict()
    return config_class(**{**small, **changes})


def _some_of_each(pattern: list[str]) -> list[int]:
    """Four places or more of a layer pattern in which every kind occurs, as near to its start as can be."""
    kinds = dict.fromkeys(pattern)
    first = [pattern.index(kind) for kind in kinds]
    rest = [index for index in range(len(pattern)) if index not in first]
    return sorted(first + rest[: max(0, 4 - len(first))])
