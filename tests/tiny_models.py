"""Tiny random models on which faults show: strong mixers, slow decay and norms far from one.

Plain random initialisation hides state leaks (fast decay), double norms (weights of one) and padding leaks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import transformers

from ddaudit.runtime.caches.kernels import serve_cpu
from ddaudit.runtime.models.architectures import build_tiny

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

VOCABULARY = 101
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]


def harden(model: nn.Module, seed: int = 0) -> nn.Module:
    """Redraw every weight so that each mechanism moves the logits."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(parameter: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.empty(parameter.shape).uniform_(low, high, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(uniform(parameter, 0.005, 0.05).log())
            elif parameter.dim() == 1:
                # Norms that scale by 1 + weight and by weight are both far from one.
                parameter.copy_(uniform(parameter, 0.3, 0.9))
            elif "conv1d" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    serve_cpu(model)
    return model.eval()


def qwen3_5(seed: int = 0, **changes: object) -> nn.Module:
    config = transformers.Qwen3_5TextConfig(**{**COMMON, **_GATED_DELTA, **_MROPE, **changes})
    return harden(transformers.Qwen3_5ForCausalLM(config), seed)


def qwen3_5_composite() -> nn.Module:
    text = {**COMMON, **_GATED_DELTA, **_MROPE}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=_VISION)
    return harden(transformers.Qwen3_5ForConditionalGeneration(config))


def qwen3_5_moe() -> nn.Module:
    config = transformers.Qwen3_5MoeTextConfig(**{**COMMON, **_GATED_DELTA, **_EXPERTS, **_MROPE})
    return harden(transformers.Qwen3_5MoeForCausalLM(config))


def qwen3_next() -> nn.Module:
    config = transformers.Qwen3NextConfig(**{**COMMON, **_GATED_DELTA, **_EXPERTS, "decoder_sparse_step": 1})
    return harden(transformers.Qwen3NextForCausalLM(config))


def olmo_hybrid() -> nn.Module:
    common = {name: value for name, value in COMMON.items() if name != "head_dim"}
    heads = {**_GATED_DELTA, "linear_num_key_heads": 4}
    config = transformers.OlmoHybridConfig(**{**common, **heads, "layer_types": _LINEAR})
    return harden(transformers.OlmoHybridForCausalLM(config))


def qwen3(**changes: object) -> nn.Module:
    return harden(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**COMMON, **changes})))


def llama() -> nn.Module:
    return harden(transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)))


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**{**COMMON, "sliding_window": 6, "layer_types": _SLIDING})
    return harden(transformers.Gemma3ForCausalLM(config))


def mistral() -> nn.Module:
    return harden(transformers.MistralForCausalLM(transformers.MistralConfig(**{**COMMON, "sliding_window": 6})))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return harden(transformers.GPT2LMHeadModel(config))


GATED_DELTA: dict[str, Callable[[], nn.Module]] = {
    "qwen3_5": qwen3_5,
    "qwen3_5-composite": qwen3_5_composite,
    "qwen3_5-moe": qwen3_5_moe,
    "qwen3-next": qwen3_next,
    "olmo-hybrid": olmo_hybrid,
}
STEPPED: dict[str, Callable[[], nn.Module]] = {
    model_type: partial(build_tiny, model_type)
    for model_type in ("falcon_h1", "jamba", "mamba", "mamba2", "lfm2", "kimi_linear")
}
RECURRENT = {**GATED_DELTA, **STEPPED}
ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "qwen3": qwen3,
    "gemma3": gemma3,
    "mistral": mistral,
    "llama4": partial(build_tiny, "llama4_text"),
}
EXACT = {**RECURRENT, **ATTENTION}
