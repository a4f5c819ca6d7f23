"""How many tokens a round accepts, read off a finished text instead of decoding it.

Where decoding is exact, its text is known beforehand, and a draft depends on the text before it alone. So one pass
over the text gives the drafts at every place, and a walk over them gives the rounds that decoding takes.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.tiny.distilling import draft_logits, read_taps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddaudit.runtime.drafters.dflash import DFlashDrafter


def drafts_along(drafter: DFlashDrafter, target: Any, text: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Log-probabilities `[L - prompt_length, block - 1, V]` drafted at every place of one text `[L]`."""
    with torch.no_grad():
        size = drafter.block_size
        # Blocks at the end reach beyond the text; what stands there is masked, or after what may look.
        ids = torch.cat([text, text.new_zeros(size)])[None]
        taps = read_taps(target, ids, drafter.target_layer_ids)
        anchors = torch.arange(prompt_length, len(text), device=text.device)
        parts = [draft_logits(drafter, target, ids, taps, part[None])[0] for part in anchors.split(128)]
        return torch.cat(parts).float().log_softmax(-1)


def accepted_lengths(drafts: torch.Tensor, generated: Sequence[int], budget: int | None) -> list[int]:
    """Tokens each round gives: those accepted and the bonus token. `budget` is a tree's nodes, None a chain.

    `drafts[i]` was drafted with `generated[i]` as the block's known token.
    """
    lengths = []
    place = 0
    while place + drafts.shape[1] < len(generated):
        coming = generated[place + 1 : place + 1 + drafts.shape[1]]
        num_right = (
            _chain_match(drafts[place], coming) if budget is None else _tree_match(drafts[place], coming, budget)
        )
        lengths.append(num_right + 1)
        place += num_right + 1
    return lengths


def _chain_match(draft: torch.Tensor, coming: Sequence[int]) -> int:
    drafted = draft.argmax(-1).tolist()
    return next(
        (i for i, (found, wanted) in enumerate(zip(drafted, coming, strict=True)) if found != wanted), len(coming)
    )


def _tree_match(draft: torch.Tensor, coming: Sequence[int], budget: int) -> int:
    """Depth to which the `budget` likeliest prefixes of `draft` `[D, V]` hold the coming tokens."""
    scores, tokens = (part.tolist() for part in draft.topk(min(budget, draft.shape[1]), dim=-1))
    # The best prefix not yet in the tree is a child or the next sibling of one that is.
    heap: list[tuple[float, float, tuple[int, ...]]] = [(-scores[0][0], -scores[0][0], (0,))]
    right: tuple[int, ...] = ()
    num_right = 0
    for _ in range(budget):
        if not heap:
            break
        cost, own, ranks = heapq.heappop(heap)
        depth = len(ranks)
        if ranks[:-1] == right and depth == num_right + 1 and tokens[depth - 1][ranks[-1]] == coming[depth - 1]:
            right, num_right = ranks, depth
        if ranks[-1] + 1 < len(scores[depth - 1]):
            sibling = -scores[depth - 1][ranks[-1] + 1]
            heapq.heappush(heap, (cost - own + sibling, sibling, (*ranks[:-1], ranks[-1] + 1)))
        if depth < len(scores):
            child = -scores[depth][0]
            heapq.heappush(heap, (cost + child, child, (*ranks, 0)))
    return num_right
