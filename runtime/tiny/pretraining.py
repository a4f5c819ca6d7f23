"""The target: next-token training on the library's sources, and its bits per byte on what was held out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ddaudit.runtime.caches.kernels import serve_cpu
from ddaudit.runtime.tiny.delta_rule import batched_delta_rule
from ddaudit.runtime.tiny.fitting import fit
from ddaudit.runtime.tiny.recipe import END_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ddaudit.runtime.tiny.recipe import Recipe

WHOLE_TEXT = {"full_attention": None, "linear_attention": None}
"""Masks for rows without padding. Transformers would look for packed rows, and wait for the GPU to answer."""


def encode_stream(tokenizer: Any, texts: Iterable[str]) -> torch.Tensor:
    """All texts as one row of token ids, an end token before each and after the last."""
    ids = [END_ID]
    for encoded in tokenizer(list(texts), add_special_tokens=False)["input_ids"]:
        ids += encoded
        ids.append(END_ID)
    return torch.tensor(ids, dtype=torch.int16)  # a vocabulary below 32,768


def train_target(
    recipe: Recipe,
    stream: torch.Tensor,
    device: torch.device,
    seed: int,
    state: Path,
    progress: Callable[[str], None],
    minutes: float | None = None,
) -> tuple[Any, list[tuple[int, float]]]:
    """The trained target in float32, and its losses."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**recipe.target_config())
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    serve_cpu(model)
    stream = stream.to(device)
    window = torch.arange(recipe.row_length + 1, device=device)
    rows = RowOrder(len(stream), recipe.row_length, seed)

    def batch_of(step: int) -> tuple[torch.Tensor, ...]:
        starts = rows.starts(step * recipe.rows, recipe.rows).to(device, non_blocking=True)
        return (stream[starts[:, None] + window].long(),)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids[:, :-1], attention_mask=WHOLE_TEXT, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    with batched_delta_rule(model):
        losses = fit(model, batch_of, loss_of, recipe.target, state, progress, minutes)
    return model, losses


class RowOrder:
    """Rows of one stream, epoch after epoch: each epoch shifts the cuts between rows and draws a new order."""

    def __init__(self, stream_length: int, row_length: int, seed: int) -> None:
        self.row_length, self.seed = row_length, seed
        self._drawn: tuple[int, torch.Tensor] = (-1, torch.empty(0))
        # A row less than fit leaves the room for the shift.
        self.num_rows = (stream_length - 1) // row_length - 1
        if self.num_rows < 1:
            raise ValueError(f"{stream_length} tokens are too few for rows of {row_length}")

    def starts(self, first: int, count: int) -> torch.Tensor:
        """Where in the stream the rows `first` to `first + count` of the endless order begin."""
        found = []
        for index in range(first, first + count):
            epoch, place = divmod(index, self.num_rows)
            found.append(self._epoch(epoch)[place])
        return torch.stack(found)

    def _epoch(self, epoch: int) -> torch.Tensor:
        if self._drawn[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shift = torch.randint(self.row_length, (), generator=generator)
            self._drawn = (epoch, torch.randperm(self.num_rows, generator=generator) * self.row_length + shift)
        return self._drawn[1]


def bits_per_byte(model: Any, tokenizer: Any, texts: Sequence[str], window: int = 1024) -> float:
    """What `model` needs for `texts`, their ends included, over their UTF-8 bytes.

    Every token is predicted from at least half a `window` of text before it, or from all that there is.
    """
    device = next(model.parameters()).device
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[END_ID, *tokenizer.encode(text, add_special_tokens=False), END_ID]], device=device)
        for start in range(0, ids.shape[1] - 1, window // 2):
            row = ids[:, max(0, start - window // 2) : start + window // 2 + 1]
            with torch.no_grad(), batched_delta_rule(model):
                logits = model(row[:, :-1], attention_mask=WHOLE_TEXT, use_cache=False).logits[0].float()
            num_new = min(window // 2, ids.shape[1] - 1 - start)
            nats += float(F.cross_entropy(logits[-num_new:], row[0, -num_new:], reduction="sum"))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)
