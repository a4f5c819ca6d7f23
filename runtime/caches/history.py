"""The tokens a cache was fed, so that going back over a closed window can feed them again from an empty state."""

from __future__ import annotations

from dataclasses import dataclass
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

    def select(self, indices: Sequence[int]) -> Tokens:
        index = torch.tensor(indices, dtype=torch.long, device=self.ids.device)
        positions = None if self.positions is None else self.positions[..., index.to(self.positions.device)]
        return Tokens(self.ids[:, index], positions)


@dataclass(frozen=True)
class History:
    """What was kept of each closed window, in order; None for one whose token ids were not seen."""

    windows: tuple[Tokens | None, ...] = ()

    def extended(self, tokens: Tokens | None, indices: Sequence[int]) -> History:
        """With the nodes `indices` of a window that held `tokens`."""
        if not len(indices):
            return self
        return History((*self.windows, tokens and tokens.select(indices)))

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
        windows = [window for window in self.windows if window is not None]
        ids = torch.cat([window.ids for window in windows], dim=1)[:, :length]
        given = [window.positions for window in windows if window.positions is not None]
        positions = torch.cat(given, dim=-1)[..., :length] if len(given) == len(windows) else None
        return Tokens(ids, positions)

    def reordered(self, rows: torch.Tensor) -> History:
        """With the rows of the batch permuted or repeated as `rows` says."""
        return History(
            tuple(
                window and Tokens(window.ids[rows.to(window.ids.device)], window.positions) for window in self.windows
            )
        )
