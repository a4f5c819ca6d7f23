"""Many prompts continued at once by the stock model: the texts that a drafter is to foresee."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.tiny.fitting import autocast


def continue_texts(model: Any, prompts: torch.Tensor, num_new: int, temperature: float, seed: int) -> torch.Tensor:
    """`[N, P]` prompts to `[N, P + num_new]` texts, greedy at temperature 0. The end token does not stop a text."""
    with torch.no_grad():
        device = prompts.device
        generator = torch.Generator(device).manual_seed(seed)
        arguments: dict[str, Any] = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
        texts = torch.empty(len(prompts), prompts.shape[1] + num_new, dtype=torch.long, device=device)
        texts[:, : prompts.shape[1]] = prompts
        step, position = prompts, 0
        for end in range(prompts.shape[1], texts.shape[1]):
            positions = torch.arange(position, end, device=device)[None].expand(len(prompts), -1)
            with autocast(device):
                logits = model(step, position_ids=positions, logits_to_keep=1, **arguments).logits[:, -1].float()
            if temperature > 0:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            texts[:, end : end + 1] = step = chosen
            position = end
        return texts
