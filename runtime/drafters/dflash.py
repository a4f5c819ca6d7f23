"""A DFlash block drafter: masked positions attend to each other and to tapped hidden states of the target.

Weight names, configuration fields and call signature are those of the public DFlash drafters, whose hub repositories
ship no code. Embeddings and head are the target's own: the drafter takes embeddings and returns hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import Cache


class DFlashDrafter(PreTrainedModel):
    """Loads a checkpoint of the public layout: `DFlashDrafter.from_pretrained(folder)`."""

    config_class = Qwen3Config
    _supports_sdpa = True

    def __init__(self, config: Qwen3Config) -> None:
        # Not `super()`: a class made of this one and a repository's own must not build that one's weights too.
        PreTrainedModel.__init__(self, config)
        self.block_size: int = drafter_field(config, "block_size")
        self.mask_token_id: int = drafter_field(config, "mask_token_id")
        self.target_layer_ids = list(drafter_field(config, "target_layer_ids"))
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(self.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, eps=eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        position_ids: torch.Tensor,
        noise_embedding: torch.Tensor,
        target_hidden: torch.Tensor,
        attention_mask: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **ignored: Any,
    ) -> torch.Tensor:
        """Hidden states `[B, T, H]` of the block, for the target's head.

        `target_hidden` `[B, C, taps * H]` are the tapped states of the `C` tokens before the block that the cache does
        not hold yet, `noise_embedding` `[B, T, H]` the block's embeddings, `position_ids` `[1 or B, C + T]` the
        positions of both. Keys and values of all of them are added to the cache; the caller crops the block's.

        `attention_mask` `[B, 1, T, keys]` (bool), or one for each layer kind, replaces the configuration's own. An
        `is_causal` in the call is ignored: which layers are causal is a matter of the drafter's training.
        """
        context = self.hidden_norm(self.fc(target_hidden))
        rotation = self.rotary_emb(noise_embedding, position_ids)
        hidden = noise_embedding
        for layer in self.layers:
            mask = attention_mask
            if mask is not None and not isinstance(mask, torch.Tensor):
                mask = mask[layer.self_attn.layer_type]
            hidden = layer(hidden, context, rotation, mask, past_key_values)
        return self.norm(hidden)


def drafter_field(config: Any, name: str) -> Any:
    """A drafter's own field: configurations in use keep it at the top or inside `dflash_config`."""
    nested = getattr(config, "dflash_config", None) or {}
    value = getattr(config, name, None)
    value = nested.get(name) if value is None else value
    if value is None:
        raise ValueError(f"the drafter's configuration has no `{name}`, at the top or in `dflash_config`")
    return value


def is_causal_layer(config: Any, layer_type: str) -> bool:
    """Whether a block's tokens see only those before them: as configured, else in sliding-window layers alone."""
    nested = getattr(config, "dflash_config", None) or {}
    configured = getattr(config, "is_causal", None)
    configured = nested.get("is_causal") if configured is None else configured
    return layer_type == "sliding_attention" if configured is None else bool(configured)


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _GatedMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rotation, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    """Queries from the block; keys and values from the context, whose states no layer changes, and the block."""

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.layer_type: str = config.layer_types[layer_idx]
        self.is_causal = is_causal_layer(config, self.layer_type)
        self.window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def mask(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """`[1, 1, T, keys]`, True where the block, which is last among the keys, may look; None is everywhere."""
        if not self.is_causal and self.window is None:
            return None
        key = torch.arange(num_keys, device=device)
        query = key[num_keys - num_queries :, None]
        seen = key <= query if self.is_causal else torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        if self.window is not None:
            seen &= query - key < self.window
        return seen[None, None]

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        source = torch.cat([context, block], dim=1)
        cos, sin = (part[:, None] for part in rotation)
        query = self.q_norm(self._split_heads(self.q_proj(block)))
        key = self.k_norm(self._split_heads(self.k_proj(source)))
        value = self._split_heads(self.v_proj(source))
        query = _rotate(query, cos[:, :, -block.shape[1] :], sin[:, :, -block.shape[1] :])
        key = _rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if mask is None:
            mask = self.mask(block.shape[1], key.shape[2], key.device)
        mixed, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            self, query, key, value, mask, is_causal=False, sliding_window=self.window
        )
        return self.o_proj(mixed.flatten(2))

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`[B, T, H * K]` to `[B, H, T, K]`."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class _GatedMLP(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    turned: torch.Tensor = states * cos + torch.cat([-second, first], dim=-1) * sin
    return turned
