"""The tokens a cache was fed, so that going back over a closed window can feed them again from an empty state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of every row of a batch."""

    ids: torch.Tensor
    """`[B, T]`."""
    positions: torch.Tensor | None
    """`[..., T]` as they were passed, None where the model counted them itself."""

    def copied(self) -> Tokens:
        return Tokens(self.ids.clone(), None if self.positions is None else self.positions.clone())


@dataclass(frozen=True)
class Kept:
    """The nodes `indices` of a window. They are selected when they are asked for: to do it in each round would hand
    their numbers to the device and wait for it."""

    window: Tokens
    indices: Sequence[int]

    def tokens(self) -> Tokens:
        ids, positions = self.window.ids, self.window.positions
        index = torch.tensor(self.indices, dtype=torch.long, device=ids.device)
        return Tokens(ids[:, index], None if positions is None else positions[..., index.to(positions.device)])


@dataclass(frozen=True)
class History:
    """What was kept of each closed window, in order; None for one whose token ids were not seen."""

    windows: tuple[Kept | None, ...] = ()

    def extended(self, tokens: Tokens | None, indices: Sequence[int]) -> History:
        """With the nodes `indices` of a window that held `tokens`."""
        if not len(indices):
            return self
        # What research code feeds it may write to later.
        nodes = indices if isinstance(indices, range) else tuple(indices)
        return History((*self.windows, None if tokens is None else Kept(tokens.copied(), nodes)))

    def first(self, length: int) -> Tokens:
        """The first `length` tokens, joined.

        Raises:
            ValueError: where part of the text was fed as embeddings or with images.
        """
        if any(window is None for window in self.windows):
            raise ValueError(
                f"cannot go back to {length} tokens: that is before the last window, and part of the text was fed as "
                "embeddings or with images, so it cannot be fed again. Keep a copy of the shorter text's cache instead"
            )
        windows = [window.tokens() for window in self.windows if window is not None]
        ids = torch.cat([window.ids for window in windows], dim=1)[:, :length]
        given = [window.positions for window in windows if window.positions is not None]
        positions = torch.cat(given, dim=-1)[..., :length] if len(given) == len(windows) else None
        return Tokens(ids, positions)

    def reordered(self, rows: torch.Tensor) -> History:
        """With the rows of the batch permuted or repeated as `rows` says."""

        def chosen(tokens: Tokens) -> Tokens:
            return replace(tokens, ids=tokens.ids[rows.to(tokens.ids.device)])

        return History(tuple(kept and replace(kept, window=chosen(kept.window)) for kept in self.windows))
