"""A long forward in pieces: what it needs while it runs is what one piece needs, whatever its length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddaudit.runtime.models.architecture import marked, residual_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

PIECE = 2048
"""Tokens. A piece of the 27B size keeps an H200 busy for as long as eager code takes to launch it."""


def in_pieces(
    forward: Callable[..., Any], kwargs: dict[str, Any], beginning: Callable[[int], AbstractContextManager[None]]
) -> Any:
    """What `forward(**kwargs)` returns, its tokens fed `PIECE` at a time to the cache that is among `kwargs`.

    Args:
        kwargs: with `input_ids` `[1, T]`, `position_ids` `[1, T]` or none, and no mask.
        beginning: what each piece runs in, told how many tokens of the forward came before it.
    """
    ids, positions, kept = kwargs["input_ids"], kwargs.get("position_ids"), kwargs.get("logits_to_keep", 0)
    length = ids.shape[1]
    first_kept = max(0, length - kept) if kept else 0
    logits = _Joined(length - first_kept)
    states: list[_Joined] = []
    output: Any = None
    for begin in range(0, length, PIECE):
        end = min(begin + PIECE, length)
        part = {**kwargs, "input_ids": ids[:, begin:end]}
        if positions is not None:
            part["position_ids"] = positions[:, begin:end]
        if kept:
            part["logits_to_keep"] = max(1, end - max(begin, first_kept))
        with beginning(begin):
            output = forward(**part)
        if end > first_kept:
            logits.add(output.logits, max(begin, first_kept) - first_kept)
        states = states or [_Joined(length) for _ in output.hidden_states or ()]
        for joined, state in zip(states, output.hidden_states or (), strict=True):
            joined.add(state, begin)
    output.logits = logits.tensor
    if states:
        output.hidden_states = tuple(joined.tensor for joined in states)
    return output


class _Joined:
    """One tensor of the whole forward, filled piece by piece: joined at the end, all would be there twice."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.tensor: torch.Tensor | None = None
        self._residual: _Joined | None = None

    def add(self, part: torch.Tensor | None, begin: int) -> None:
        """Take in `part`, `[B, n, ...]`, which stands at `begin`; None where a forward was not asked for it."""
        if part is None:
            return
        residual = residual_of(part)
        if self.tensor is None:
            self.tensor = part.new_empty(part.shape[0], self._length, *part.shape[2:])
            self._residual = _Joined(self._length) if residual is not None else None
        if self._residual is not None:
            self._residual.add(residual, begin)
        self.tensor[:, begin : begin + part.shape[1]] = part
        marked(self.tensor, part, self._residual.tensor if self._residual is not None else None)
