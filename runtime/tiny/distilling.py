"""The drafter: blocks at random places of the target's own texts, the first token known and the others masked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import Qwen3Config

from ddaudit.runtime.drafters.dflash import DFlashDrafter, is_causal_layer
from ddaudit.runtime.tiny.delta_rule import batched_delta_rule
from ddaudit.runtime.tiny.fitting import fit
from ddaudit.runtime.tiny.pretraining import WHOLE_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddaudit.runtime.tiny.recipe import Recipe

_DECAY = 0.8
"""Each further token of a block counts less by this: it is of use only where all before it are right."""
_AT_ONCE = 64
"""Texts whose taps are read together."""


def new_drafter(config: dict[str, Any]) -> DFlashDrafter:
    left_out = ("architectures", "model_type", "dtype")
    return DFlashDrafter(Qwen3Config(**{name: value for name, value in config.items() if name not in left_out}))


def train_drafter(
    recipe: Recipe,
    target: Any,
    texts: torch.Tensor,
    seed: int,
    state: Path,
    progress: Callable[[str], None],
    minutes: float | None = None,
) -> tuple[DFlashDrafter, list[tuple[int, float]]]:
    """A drafter of `target`, which stays as it is, from `texts` `[N, L]`; and its losses."""
    device = texts.device
    torch.manual_seed(seed)
    drafter = new_drafter(recipe.drafter_config()).to(device)
    target.requires_grad_(False)
    _let_last_tap_through(drafter)
    size = recipe.block_size
    # Some places in the prefix, which the target has not written, so that a drafter is of use there too.
    first_anchor, last_anchor = recipe.prefix_length // 2, texts.shape[1] - size
    weights = _DECAY ** torch.arange(size - 1, dtype=torch.float32, device=device)
    with batched_delta_rule(target):
        parts = [read_taps(target, part.long(), drafter.target_layer_ids).bfloat16() for part in texts.split(_AT_ONCE)]
    taps = torch.cat(parts)

    def batch_of(step: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(texts), (recipe.drafter_rows,), generator=generator).to(device)
        shape = (recipe.drafter_rows, recipe.anchors)
        anchors = torch.randint(first_anchor, last_anchor + 1, shape, generator=generator)
        return texts[rows].long(), taps[rows], anchors.to(device)

    def loss_of(ids: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        logits = draft_logits(drafter, target, ids, taps.float(), anchors)
        wanted = _blocks(ids, anchors, size)[..., 1:]
        losses = F.cross_entropy(logits.flatten(0, 2).float(), wanted.flatten(), reduction="none").view(wanted.shape)
        return (losses * weights).sum() / (weights.sum() * anchors.numel())

    return drafter, fit(drafter, batch_of, loss_of, recipe.drafter, state, progress, minutes)


def _let_last_tap_through(drafter: DFlashDrafter) -> None:
    """The last tap, which is nearest to what the target says, passes through at first."""
    with torch.no_grad():
        width = drafter.config.hidden_size
        drafter.fc.weight[:, -width:] += torch.eye(width, device=drafter.fc.weight.device)


def read_taps(target: Any, ids: torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
    """Outputs `[B, L, taps * H]` of the tapped layers. Entry 0 of `hidden_states` is the embedding."""
    with torch.no_grad():
        outputs = target(ids, attention_mask=WHOLE_TEXT, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        states = outputs.hidden_states
        return torch.cat([states[layer_id + 1] for layer_id in layer_ids], dim=-1)


def draft_logits(
    drafter: DFlashDrafter, target: Any, ids: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Logits `[B, A, block - 1, V]` for the tokens after each anchor of `anchors` `[B, A]`.

    What the drafter says when decoding has come to that anchor: it sees the taps of all tokens before the anchor,
    the anchor's token, and masks. All blocks of a text go through at once and see nothing of each other.
    """
    size = drafter.block_size
    blocks = _blocks(ids, anchors, size)
    blocks[..., 1:] = drafter.mask_token_id
    places = (anchors[..., None] + torch.arange(size, device=ids.device)).flatten(1)
    positions = torch.cat([torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1), places], dim=1)
    masks = {
        layer_type: _block_mask(drafter.config, layer_type, anchors, positions, size)
        for layer_type in set(drafter.config.layer_types)
    }
    hidden = drafter(
        position_ids=positions,
        noise_embedding=target.get_input_embeddings()(blocks.flatten(1)),
        target_hidden=taps,
        attention_mask=masks,
    )
    return target.get_output_embeddings()(hidden.unflatten(1, (-1, size))[:, :, 1:])


def _blocks(ids: torch.Tensor, anchors: torch.Tensor, size: int) -> torch.Tensor:
    """`[B, A, size]`: the tokens from each anchor on."""
    places = anchors[..., None] + torch.arange(size, device=ids.device)
    return ids.gather(1, places.flatten(1)).view(places.shape)


def _block_mask(config: Any, layer_type: str, anchors: torch.Tensor, positions: torch.Tensor, size: int) -> Any:
    """`[B, 1, A * size, L + A * size]`, True where a block's token looks: the text before its anchor, its own block."""
    num_blocks = anchors.shape[1]
    length = positions.shape[1] - num_blocks * size
    key_position, query_position = positions[:, None], positions[:, length:, None]
    number = torch.arange(num_blocks, device=anchors.device).repeat_interleave(size)
    is_own_block = F.pad(number[:, None] == number, (length, 0))
    is_context = F.pad(positions[:, None, :length] < anchors.repeat_interleave(size, 1)[..., None], (0, len(number)))
    seen = is_context | is_own_block
    if is_causal_layer(config, layer_type):
        seen = seen & (key_position <= query_position)
    if layer_type == "sliding_attention":
        seen = seen & (query_position - key_position < config.sliding_window)
    return seen[:, None]
