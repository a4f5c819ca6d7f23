"""The text that a scripted drafter is asked to go on from, where it is not known beforehand: at a temperature.

A drafter is told little: its block's first token and where that stands. What lies between two calls was accepted
from its own proposals, so the text is known, or nearly so where a branch of a tree was taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddaudit.runtime.checks.decoding import decode_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

LOOKAHEAD = 3
"""Tokens read on from the text: at a temperature few more are ever accepted."""


class TextReader:
    """The text so far, and what the target would most likely add to it, by stock code."""

    def __init__(self, target: nn.Module, prompt_ids: Sequence[int]) -> None:
        self._target: Any = target
        self._prompt = list(prompt_ids)
        self._text = list(prompt_ids)
        self._read: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self._prompt)

    def begin(self) -> None:
        """A new text after the same prompt."""
        self._text = list(self._prompt)

    def likeliest(self, position: int, fed_ids: Sequence[int]) -> list[int]:
        """The next tokens after `fed_ids`, whose first stands at `position`."""
        # Accepted by chance from where nothing was proposed: every token was alike there, and 0 comes first.
        gap = [0] * (position - len(self._text))
        self._text = [*self._text[:position], *gap, *fed_ids]
        text = tuple(self._text)
        if text not in self._read:
            self._read[text] = decode_plain(self._target, text, LOOKAHEAD).generated_ids
        self._text += self._read[text]
        return list(self._read[text])

    def propose(self, token_ids: Sequence[int]) -> None:
        """What is proposed for the positions that `likeliest` gave: the text, as far as it will be accepted."""
        self._text[-LOOKAHEAD:] = token_ids

    def token_of(self, embedding: torch.Tensor) -> int:
        """The token with that input embedding `[H]`, scaled or not."""
        rows = self._target.get_input_embeddings().weight
        return int((rows @ embedding.to(rows) / rows.norm(dim=1)).argmax())
