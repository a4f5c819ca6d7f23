"""What the pair is and how it is trained, at the shipped size and at one that a CPU can train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddaudit.runtime.tiny.fitting import Schedule

END_ID, MASK_ID = 0, 1
ROPE_THETA = 100_000
"""Far from the 10,000 that code falls back to when it loses the drafter's own."""


@dataclass(frozen=True)
class Recipe:
    """Sizes are in tokens, rows and layers."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    head_dim: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_drafter_layers: int
    drafter_intermediate_size: int
    rows: int
    row_length: int
    target: Schedule
    num_greedy_texts: int
    num_sampled_texts: int
    texts_at_once: int
    prefix_length: int
    text_length: int
    drafter_rows: int
    anchors: int
    """Draft blocks of each row of a drafter's batch."""
    drafter: Schedule
    num_prompts: int
    """Held-out prompts on which acceptance is measured."""

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    def target_config(self) -> dict[str, Any]:
        """Qwen3.5's text decoder: three gated delta rule layers, then one of full attention, and so on."""
        return {
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "full_attention_interval": 4,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads // 2,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.num_heads // 2,
            "linear_num_value_heads": self.num_heads,
            "linear_key_head_dim": self.head_dim,
            "linear_value_head_dim": self.head_dim,
            "linear_conv_kernel_dim": 4,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": _sections(self.head_dim // 4),
            },
            "tie_word_embeddings": True,
            "eos_token_id": END_ID,
            "bos_token_id": None,
            "pad_token_id": None,
        }

    def drafter_config(self) -> dict[str, Any]:
        """The fields of the public DFlash drafters, so that code written for those loads this one."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.drafter_intermediate_size,
            "num_hidden_layers": self.num_drafter_layers,
            "num_target_layers": self.num_layers,
            "layer_types": ["full_attention"] * self.num_drafter_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads // 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": 4096,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(self.target_layer_ids)},
        }


def _sections(num_pairs: int) -> list[int]:
    """Rotary pairs for time, height and width; a text has the same position in all three."""
    return [num_pairs - 2 * (num_pairs // 3), num_pairs // 3, num_pairs // 3]


FULL = Recipe(
    vocab_size=2048,
    hidden_size=256,
    num_layers=8,
    intermediate_size=416,
    head_dim=64,
    block_size=8,
    target_layer_ids=(1, 4, 6),
    num_drafter_layers=3,
    drafter_intermediate_size=320,
    rows=64,
    row_length=512,
    target=Schedule(steps=8000, peak_lr=2e-3, warmup_steps=200),
    num_greedy_texts=12288,
    num_sampled_texts=4096,
    texts_at_once=4096,
    prefix_length=128,
    text_length=512,
    drafter_rows=64,
    anchors=64,
    drafter=Schedule(steps=8000, peak_lr=1.5e-3, warmup_steps=200),
    num_prompts=64,
)

SMALL = Recipe(
    vocab_size=512,
    hidden_size=64,
    num_layers=4,
    intermediate_size=128,
    head_dim=16,
    block_size=8,
    target_layer_ids=(0, 2),
    num_drafter_layers=1,
    drafter_intermediate_size=128,
    rows=4,
    row_length=128,
    target=Schedule(steps=200, peak_lr=3e-3, warmup_steps=20, log_every=20, save_every=100),
    num_greedy_texts=32,
    num_sampled_texts=16,
    texts_at_once=16,
    prefix_length=32,
    text_length=96,
    drafter_rows=8,
    anchors=16,
    drafter=Schedule(steps=200, peak_lr=3e-3, warmup_steps=20, log_every=20, save_every=100),
    num_prompts=4,
)
