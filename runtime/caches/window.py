"""The window: what one forward appended to a cache, as a tree of tokens that can still be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = -1
"""The parent of a node that directly follows the committed tokens."""


@lru_cache(maxsize=8)
def node_index(nodes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`nodes` as an index on `device`; every layer of a model asks for the same few."""
    # Outside of inference mode, so that a cached index serves there too.
    with torch.inference_mode(False):
        return torch.tensor(nodes, dtype=torch.long, device=device)


def parents_in(tree: torch.Tensor) -> torch.Tensor:
    """`[T]`: each node's parent, the latest earlier node that it sees in `tree` `[T, T]`; ROOT where it sees none."""
    count = torch.arange(1, len(tree) + 1, device=tree.device)
    return (tree.tril(-1) * count).amax(dim=-1) - 1


def visible_in(mask: torch.Tensor) -> torch.Tensor:
    """A boolean mask, True: visible, from one that is boolean already or additive (a large negative number: hidden)."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


@dataclass(frozen=True)
class Window:
    """The nodes of one forward, in the order they were fed, and where they hang.

    A chain (plain decoding, a draft block) is the tree in which each node's parent is the node before it.
    `parents` is None when the forward's 4-D mask was not read, which only pure attention allows.
    """

    start: int
    """Committed tokens before the window."""
    length: int
    parents: tuple[int, ...] | None

    @classmethod
    def chain(cls, start: int, length: int) -> Window:
        return cls(start, length, tuple(range(ROOT, length - 1)))

    @classmethod
    def from_mask(cls, mask: torch.Tensor, start: int, length: int) -> Window:
        """Read the tree out of the 4-D attention mask that research code passes for tree verification.

        Args:
            mask: `[batch or 1, heads or 1, length, start + length]`; boolean (True: visible) or additive
                (0: visible, a large negative number: hidden).

        Raises:
            ValueError: where the mask is no tree over the window: rows differ over batch or heads, committed
                tokens are hidden, a node sees a later one, or what it sees is not its parent's view and itself.
        """
        return WindowReading.begin(mask, start, length).window()

    @property
    def end(self) -> int:
        return self.start + self.length

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, self.length - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the committed tokens: 0 for a node that follows them directly."""
        depths: list[int] = []
        for parent in self._known_parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def positions(self, device: torch.device) -> torch.Tensor:
        """`[1, length]`: each node's place in the text of its own path."""
        if self.is_chain:
            return torch.arange(self.start, self.end, device=device)[None]
        return self.start + torch.tensor([self.depths], device=device)

    @cached_property
    def levels(self) -> tuple[list[int], ...]:
        """The nodes of each depth, from those that follow the committed tokens to the deepest."""
        levels: list[list[int]] = [[] for _ in range(max(self.depths, default=-1) + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(levels)

    @property
    def _known_parents(self) -> tuple[int, ...]:
        if self.parents is None:
            raise ValueError("this window's 4-D mask was not read: no tree is known for it")
        return self.parents

    def ancestors(self, device: torch.device) -> torch.Tensor:
        """`[length, length]` boolean: row i is True at i and at every node on its path from the root."""
        if device not in self._ancestors:
            if self.is_chain:
                tree = torch.ones(self.length, self.length, dtype=torch.bool).tril()
            else:
                tree = torch.eye(self.length, dtype=torch.bool)
                for node, parent in enumerate(self._known_parents):
                    if parent != ROOT:
                        tree[node] |= tree[parent]
            self._ancestors[device] = tree.to(device)
        return self._ancestors[device]

    def taps(self, kernel_size: int, device: torch.device) -> torch.Tensor:
        """`[length, kernel_size]`: where a causal convolution reads for each node, oldest first.

        The indices point into the last `kernel_size` committed inputs followed by the window's own.
        """
        key = (kernel_size, device)
        if key not in self._taps:
            rows = []
            for node in range(self.length):
                row, at = [], node
                for _ in range(kernel_size):
                    row.append(kernel_size + at)
                    # ROOT is -1: from there the walk goes on backwards through the committed inputs.
                    at = self._known_parents[at] if at >= 0 else at - 1
                rows.append(row[::-1])
            self._taps[key] = torch.tensor(rows, dtype=torch.long, device=device)
        return self._taps[key]

    # One window serves all layers of a model: what depends on the tree alone is made once per device.
    @cached_property
    def _ancestors(self) -> dict[torch.device, torch.Tensor]:
        return {}

    @cached_property
    def _taps(self) -> dict[tuple[int, torch.device], torch.Tensor]:
        return {}

    def check_path(self, indices: Sequence[int]) -> None:
        """Refuse `indices` that are not a path of nodes hanging on the committed tokens.

        Raises:
            ValueError: naming the first node that does not follow the one before it.
        """
        before = ROOT
        for node in indices:
            if not 0 <= node < self.length:
                raise ValueError(f"node {node} is outside the window of {self.length} nodes that is open")
            if self._known_parents[node] != before:
                raise ValueError(
                    f"kept nodes {list(indices)} are no path: node {node} follows "
                    f"{self._known_parents[node]}, not {before} ({ROOT} stands for the committed tokens)"
                )
            before = node


@dataclass(frozen=True)
class WindowReading:
    """A 4-D attention mask on its way to the host, so that whoever reads it there need not wait for it here."""

    start: int
    length: int
    tree: torch.Tensor
    """`[length, length]` boolean, on the mask's device: what each node sees of the window."""
    _read: torch.Tensor
    """`[length, length + 1 or more]` boolean, on the host: the tree, whether the node sees all that is committed, and
    of a mask of several rows or heads whether they are alike."""
    _arrived: torch.cuda.Event | None

    @classmethod
    def begin(cls, mask: torch.Tensor, start: int, length: int) -> WindowReading:
        """Start reading a mask, as `Window.from_mask` takes it.

        Raises:
            ValueError: where its last two sizes do not fit.
        """
        if mask.shape[-2:] != (length, start + length):
            raise ValueError(
                f"the 4-D attention mask is {tuple(mask.shape)}, but this forward appends {length} tokens to "
                f"{start} cached ones: its last two sizes must be ({length}, {start + length})"
            )
        visible = visible_in(mask).flatten(0, 1)
        first = visible[0]
        found = [first[:, start:], first[:, :start].all(dim=-1, keepdim=True)]
        if len(visible) > 1:
            found.append((visible == first).all(dim=0).all(dim=-1, keepdim=True))
        read = torch.cat(found, dim=-1)
        if not read.is_cuda:
            return cls(start, length, first[:, start:], read.cpu(), None)
        on_host = torch.empty(read.shape, dtype=read.dtype, pin_memory=True)
        on_host.copy_(read, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(start, length, first[:, start:], on_host, arrived)

    def window(self) -> Window:
        """The window, once the mask is there.

        Raises:
            ValueError: where the mask is no tree, as `Window.from_mask`.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        length = self.length
        tree, sees_past, is_alike = self._read[:, :length], self._read[:, length], self._read[:, length + 1 :]
        if not bool(is_alike.all()):
            raise ValueError("the 4-D attention mask differs between rows of the batch or heads: one tree is needed")
        if not bool(sees_past.all()):
            raise ValueError(
                "the 4-D attention mask hides committed tokens, which a recurrent layer cannot: "
                "its state already holds them"
            )
        parents = parents_in(tree)
        with_root = torch.cat([torch.zeros(1, length, dtype=torch.bool), tree])
        if not torch.equal(tree, with_root[parents + 1] | torch.eye(length, dtype=torch.bool)):
            raise ValueError(
                "the 4-D attention mask is not a tree in which parents come first: every node must see itself "
                "and exactly what its parent sees"
            )
        return Window(self.start, length, tuple(parents.tolist()))
