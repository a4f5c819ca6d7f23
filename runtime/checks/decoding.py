"""Plain decoding: stock Transformers with its stock cache, greedy, one token at a time. The reference."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ddaudit.runtime.caches.takeover import cache_argument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Reference:
    """What plain decoding generated for one prompt."""

    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    top2_gaps: tuple[float, ...]
    """Best minus second-best logit of each choice."""
    logits: torch.Tensor
    """`[N, V]`, those of the first N choices: what the noise is measured against."""
    decode_s: float
    """From the first generated token to the last."""


def decode_plain(
    model: Any,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    keep_logits: int = 0,
) -> Reference:
    """Greedy decoding of one prompt, up to and with the first stop token."""
    stock = _Stock(model)
    step = torch.tensor([list(prompt_ids)], dtype=torch.long, device=model.device)
    position = 0
    tokens, gaps, kept = [], [], []
    start_s = 0.0
    for index in range(max_new_tokens):
        logits = stock.forward(step, position, last_only=True)[0, -1].float()
        best = logits.topk(2)
        if index < keep_logits:
            kept.append(logits)
        gaps.append(best.values[0] - best.values[1])
        token = int(best.indices[0])
        if index == 0:
            start_s = clock(model.device)
        tokens.append(token)
        if token in stop_token_ids:
            break
        position += step.shape[1]
        step = best.indices[:1].view(1, 1)
    decode_s = clock(model.device) - start_s
    vocabulary = logits.shape[-1] if tokens else 0
    stacked = torch.stack(kept) if kept else torch.zeros(0, vocabulary, device=model.device)
    return Reference(tuple(prompt_ids), tuple(tokens), tuple(torch.stack(gaps).tolist()), stacked, decode_s)


def decode_cached(
    model: Any, cache: Any, prompt_ids: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int] = ()
) -> tuple[tuple[int, ...], float]:
    """The same greedy text through a `cache` of `make_cache`, one token a forward, and the seconds after the first.

    Nothing is read back from the device between the tokens, unless there are stop tokens to look for.
    """
    stock = _Stock(model, cache)
    step = torch.tensor([list(prompt_ids)], dtype=torch.long, device=model.device)
    position = 0
    chosen: list[torch.Tensor] = []
    start_s = 0.0
    for index in range(max_new_tokens):
        # Copied: a replayed graph writes its logits where the last ones stand.
        best = stock.forward(step, position, last_only=True)[:, -1].argmax(-1, keepdim=True).clone()
        if index == 0:
            start_s = clock(model.device)
        chosen.append(best)
        if stop_token_ids and int(best) in stop_token_ids:
            break
        position += step.shape[1]
        step = best
    decode_s = clock(model.device) - start_s
    return tuple(torch.cat(chosen, dim=1)[0].tolist()), decode_s


def stock_cache(model: Any, prompt_ids: Sequence[int]) -> Any:
    """The stock cache after one forward over the prompt."""
    stock = _Stock(model)
    stock.forward(torch.tensor([list(prompt_ids)], dtype=torch.long, device=model.device), 0, last_only=True)
    return stock.cache


def read_in_blocks(
    model: Any, prompt_ids: Sequence[int], text_ids: Sequence[int], block_size: int
) -> Iterator[torch.Tensor]:
    """Logits `[B, V]` that choose each token of `text_ids`, the model reading them `block_size` at a time.

    The stock cache only ever grows here: going back is what recurrent layers cannot do in it. The first block
    holds the choice made by the prompt alone.
    """
    stock, device = _Stock(model), model.device
    yield stock.forward(torch.tensor([list(prompt_ids)], device=device), 0, last_only=True)[0].float()
    # The last token is not read: it chooses nothing that is in the text.
    for start in range(0, len(text_ids) - 1, block_size):
        block = list(text_ids[start : min(start + block_size, len(text_ids) - 1)])
        step = torch.tensor([block], device=device)
        yield stock.forward(step, len(prompt_ids) + start)[0].float()


def clock(device: torch.device) -> float:
    """Seconds, after the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Stock:
    """A model with the stock cache that its release makes for it, or with another."""

    def __init__(self, model: Any, cache: Any = None) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config) if cache is None else cache
        self.accepted = frozenset(inspect.signature(type(model).forward).parameters)

    def forward(self, input_ids: torch.Tensor, position: int, last_only: bool = False) -> torch.Tensor:
        """Logits `[1, T, V]` (`T` = 1 with `last_only`) of a cached forward whose first token is at `position`."""
        arguments: dict[str, Any] = {cache_argument(self.model): self.cache, "use_cache": True}
        if "position_ids" in self.accepted:
            # Given rather than left out: some models count wrongly from their cache when it is.
            last = position + input_ids.shape[1]
            arguments["position_ids"] = torch.arange(position, last, device=input_ids.device)[None]
        if last_only and "logits_to_keep" in self.accepted:
            arguments["logits_to_keep"] = 1
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids, **arguments).logits
        return logits[:, -1:] if last_only else logits
