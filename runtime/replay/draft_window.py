"""What a block drafter's stock code takes for its cache while its forward is captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ddaudit.runtime.replay.errors import NotReplayable
from ddaudit.runtime.replay.static_window import Reach, StaticWindow

if TYPE_CHECKING:
    from ddaudit.runtime.replay.memory import KeyValues


class DraftWindow(StaticWindow):
    """A draft block that sees what is cached, the new context and itself, in both directions unless a layer says
    otherwise: it may be causal, or have a sliding window."""

    def __init__(self, start: torch.Tensor, key_values: KeyValues) -> None:
        super().__init__(0, start, key_values, None)
        self.sliding_windows: set[int] = set()
        """Those that layers spoke of."""
        self.num_leading = torch.zeros_like(start)
        """`[1]`, the new keys that are there for the shape alone, before all others."""
        self.num_keys = 0
        """Keys that the forward appends, the leading ones included, once it has run."""
        self.seen: torch.Tensor | None = None
        """`[queries, keys]`, the keys behind the leading ones; there once a forward has told how many there are."""
        self.offsets: torch.Tensor | None = None
        """`[queries]`, the block's places after what is cached; as `seen`."""

    def begin(self) -> None:
        # In each forward: its graph has to read `num_leading` again.
        if self.seen is not None and self.offsets is not None:
            place = torch.arange(self.num_keys, device=self.start.device)
            self.seen.copy_((place >= self.num_leading).expand_as(self.seen))
            self.offsets.copy_(place[self.num_keys - len(self.offsets) :] - self.num_leading)

    def tensors_of(self, layer_idx: int) -> dict[str, torch.Tensor]:
        assert self.seen is not None and self.offsets is not None
        return super().tensors_of(layer_idx) | {"seen": self.seen, "offsets": self.offsets}

    def windows_within(self, length: int) -> int:
        """How many of the sliding windows do not reach over `length` cached tokens and the new ones."""
        return sum(size < length + self.num_keys for size in self.sliding_windows)

    def _reach(
        self,
        shape: tuple[int, int],
        is_causal: bool,
        mask: torch.Tensor | None,
        sliding_window: int,
        ignores_window: bool,
    ) -> Reach:
        num_queries, num_keys = shape
        if is_causal and mask is None and ignores_window:
            # Upper left, not lower right.
            raise NotReplayable("a layer is causal without a mask, which `sdpa` counts from the first key")
        if self.seen is None or self.offsets is None:
            self.num_keys = num_keys
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.start.device)
            self.offsets = torch.zeros(num_queries, dtype=torch.long, device=self.start.device)
            self.begin()
        if self.seen.shape != shape:
            raise NotReplayable("its layers attend from and to different numbers of tokens")
        if sliding_window:
            self.sliding_windows.add(sliding_window)
        if mask is None:
            sliding_window = 0 if ignores_window else sliding_window
            visible = self._among_new(is_causal, sliding_window)
        elif mask.dtype == torch.bool and mask.shape[-2:] == shape and mask.numel() == self.seen.numel():
            visible = mask.view(shape)
        else:
            raise NotReplayable(f"a layer attends under a mask {tuple(mask.shape)}")
        visible = self.seen if visible is None else visible & self.seen
        return Reach(visible, self.offsets if sliding_window else None, sliding_window)

    def _among_new(self, is_causal: bool, sliding_window: int) -> torch.Tensor | None:
        """What flash attention lets the block see of the new keys, `[queries, keys]`; None for everything."""
        assert self.offsets is not None
        key = torch.arange(self.num_keys, device=self.start.device)
        behind = key[self.num_keys - len(self.offsets) :, None] - key
        if is_causal:
            return (behind >= 0) & (behind < (sliding_window or self.num_keys))
        return behind.abs() < sliding_window if 0 < sliding_window < self.num_keys else None

    def keep(self) -> None:
        """Move the rows behind the leading ones to where those began."""
        place = torch.arange(self.num_keys, device=self.start.device)
        self.key_values.keep(self.start, (place + self.num_leading).clamp(max=self.num_keys - 1))
