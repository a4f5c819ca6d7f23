"""The block drafter: masked positions attend to each other and to tapped hidden states of the target."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class BlockDrafterConfig(PretrainedConfig):
    model_type = "sapling_drafter"

    def __init__(
        self,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=3,
        num_attention_heads=16,
        rope_base=1_000_000.0,
        block_size=8,
        mask_token_id=0,
        target_layer_ids=(1, 2, 3),
        **kwargs,
    ):
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.rope_base = rope_base
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.target_layer_ids = list(target_layer_ids)
        super().__init__(**kwargs)


def rotate(x, angles):
    """x [B, H, T, K] turned by angles [B, 1, T, K / 2]."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class DrafterLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        width = config.hidden_size
        self.attn_norm = nn.RMSNorm(width, eps=1e-6)
        self.to_query = nn.Linear(width, width, bias=False)
        self.to_key = nn.Linear(width, width, bias=False)
        self.to_value = nn.Linear(width, width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)

    def split_heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, block, context, angles, past_key_values=None):
        normed = self.attn_norm(block)
        source = torch.cat([context, normed], dim=1)
        query = rotate(self.split_heads(self.to_query(normed)), angles[:, :, -block.shape[1] :])
        key = rotate(self.split_heads(self.to_key(source)), angles)
        value = self.split_heads(self.to_value(source))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        mixed = F.scaled_dot_product_attention(query, key, value)
        block = block + self.to_out(mixed.transpose(1, 2).flatten(2))
        return block + self.down(F.silu(self.up(self.mlp_norm(block))))


class BlockDrafter(PreTrainedModel):
    config_class = BlockDrafterConfig

    def __init__(self, config):
        super().__init__(config)
        self.block_size = config.block_size
        self.mask_token_id = config.mask_token_id
        self.target_layer_ids = config.target_layer_ids
        self.fuse = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.context_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.post_init()

    def forward(self, noise_embedding, target_hidden, position_ids, past_key_values=None):
        """Hidden states of the block, for the target's head. position_ids cover the new context, then the block."""
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        powers = torch.arange(half, device=position_ids.device, dtype=torch.float32) / half
        angles = (position_ids[..., None] * self.config.rope_base**-powers).unsqueeze(1)
        context = self.context_norm(self.fuse(target_hidden))
        block = noise_embedding
        for layer in self.layers:
            block = layer(block, context, angles, past_key_values)
        return self.norm(block)


def new_drafter(target: PreTrainedModel, mask_token_id, num_layers=3, num_heads=16, block_size=8):
    """An untrained drafter of the target's width, its taps spread evenly over the target's depth."""
    depth = target.config.get_text_config().num_hidden_layers
    taps = [round((i + 1) * (depth - 2) / (num_layers + 1)) for i in range(num_layers)]
    config = BlockDrafterConfig(
        hidden_size=target.config.get_text_config().hidden_size,
        intermediate_size=3 * target.config.get_text_config().hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
    )
    return BlockDrafter(config).to(device=target.device, dtype=target.dtype).eval()
