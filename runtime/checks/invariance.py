"""Does what was rejected leave a trace? The same text under different rejection patterns must choose the same tokens.

A sharper test of the cache than a fork's text: the right tokens are forced, so a fault cannot hide behind what it
changed, and the noise of the kernels is the only difference allowed (z-lab/dflash issue 172: a state fault flips 12
to 41 of 384 choices, rounding none).
"""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.record import StateCheck
from ddaudit.runtime.caches.cache import crop_cache, keep_in_cache
from ddaudit.runtime.caches.making import make_cache
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.caches.window import ROOT, Window
from ddaudit.runtime.checks.verdict import TOLERANCE, most_flips
from ddaudit.runtime.models.architecture import text_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddaudit.auditor.record import Noise
    from ddaudit.runtime.checks.decoding import Reference

NUM_POSITIONS = 384
"""Choices compared, over all prompts."""
NUM_ROUNDS = 20
"""Rounds of one pattern, about: at 27B size in eager mode one costs 0.13 s."""
EXACT = 1e-4
"""Relative difference of logits that is rounding, whatever the noise measured."""
_SHORTEST_MEAN = 4
_CHUNK = 64
"""Positions whose logits over the whole vocabulary are compared at a time."""


@dataclass(frozen=True)
class Round:
    """One window of a pattern: right tokens, and others that are taken back."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    kept: tuple[int, ...]
    """The nodes with the right tokens, a path."""


def plan_rounds(
    text_ids: Sequence[int], num_rounds: int, vocabulary: int, seed: int | str, trees: bool = True
) -> list[Round]:
    """Cut a text into about `num_rounds` rounds, each with wrong tokens behind the right ones or among them.

    With `trees`, about half of them are trees, in which wrong tokens hang on any node and come in any order.
    """
    rng = random.Random(seed)
    mean = max(_SHORTEST_MEAN, math.ceil(len(text_ids) / num_rounds))
    rounds: list[Round] = []
    start = 0
    while start < len(text_ids):
        num_right = min(rng.randint(1, 2 * mean - 1), len(text_ids) - start)
        # The token after the last right one is there to be missed.
        following = text_ids[start : start + num_right + 1]
        is_tree = trees and rng.random() < 0.5
        rounds.append(_make_round(following, num_right, rng.randint(0, mean), vocabulary, is_tree, rng))
        start += num_right
    return rounds


def _make_round(
    following: Sequence[int], num_right: int, num_wrong: int, vocabulary: int, is_tree: bool, rng: random.Random
) -> Round:
    turns = [True] * num_right + [False] * num_wrong
    if is_tree:
        rng.shuffle(turns)
    tokens: list[int] = []
    parents: list[int] = []
    kept: list[int] = []
    for node, is_right in enumerate(turns):
        if is_right:
            tokens.append(following[len(kept)])
            parents.append(kept[-1] if kept else ROOT)
            kept.append(node)
        else:
            parent = rng.randint(ROOT, node - 1) if is_tree else node - 1
            right = following[min(kept.index(parent) + 1 if parent in kept else 0, len(following) - 1)]
            tokens.append((right + rng.randint(1, vocabulary - 1)) % vocabulary)
            parents.append(parent)
    return Round(tuple(tokens), tuple(parents), tuple(kept))


def check_state(
    model: Any, references: Sequence[Reference], noise: Noise | None, seed: int = 0, num_patterns: int = 2
) -> StateCheck:
    """Feed each reference's text through `make_cache` under `num_patterns` rejection patterns and compare them.

    In reduced precision choices may flip: as often as stock decoding flips them by itself, and where the gap is
    within the noise. A model that the runtime refuses is not checked, with its reason.
    """
    try:
        trees = _takes_trees(model)
    except (NotImplementedError, ValueError) as error:
        return StateCheck("not checked", str(error))
    tally = _Tally(tolerance=TOLERANCE * noise.gap_max if noise else 0.0)
    vocabulary = text_config(model).vocab_size
    share = math.ceil(NUM_POSITIONS / max(1, len(references)))
    for prompt, reference in enumerate(references):
        text = reference.generated_ids[: min(share, NUM_POSITIONS - tally.num_positions)]
        if not text:
            break
        num_rounds = max(1, NUM_ROUNDS * len(text) // NUM_POSITIONS)
        patterns = [
            plan_rounds(text, num_rounds, vocabulary, f"{seed}/{prompt}/{pattern}", trees)
            for pattern in range(num_patterns)
        ]
        first = torch.cat(list(_read(model, reference.prompt_ids, patterns[0])))
        for rounds in patterns[1:]:
            tally.compare(prompt, first, _read(model, reference.prompt_ids, rounds))
        tally.count(len(text), patterns)
    return tally.judge(noise, num_patterns)


def _read(model: Any, prompt_ids: Sequence[int], rounds: Sequence[Round]) -> Iterator[torch.Tensor]:
    """Logits `[R, V]` at the right tokens of each round, what came before having been rejected as planned."""
    cache = make_cache(model)
    device = model.device
    _forward(model, cache, torch.tensor([list(prompt_ids)], device=device), last_only=True)
    length = len(prompt_ids)
    for each in rounds:
        window = Window(length, len(each.tokens), each.parents)
        tree = None if window.is_chain else window
        logits = _forward(model, cache, torch.tensor([each.tokens], device=device), tree)[0, list(each.kept)]
        if window.is_chain:
            crop_cache(cache, length + len(each.kept))
        else:
            keep_in_cache(cache, length, each.kept)
        length += len(each.kept)
        yield logits


def _forward(
    model: Any, cache: Any, ids: torch.Tensor, tree: Window | None = None, last_only: bool = False
) -> torch.Tensor:
    accepted = inspect.signature(type(model).forward).parameters
    kwargs: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if tree is not None:
        # As research code passes a tree: an additive mask, and positions by depth.
        past = torch.ones(tree.length, tree.start, dtype=torch.bool, device=ids.device)
        visible = torch.cat([past, tree.ancestors(ids.device)], dim=1)
        mask = torch.zeros(visible.shape, dtype=model.dtype, device=ids.device)
        kwargs["attention_mask"] = mask.masked_fill(~visible, torch.finfo(model.dtype).min)[None, None]
        if "position_ids" in accepted:
            kwargs["position_ids"] = tree.start + torch.tensor([tree.depths], device=ids.device)
    if last_only and "logits_to_keep" in accepted:
        kwargs["logits_to_keep"] = 1
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **kwargs).logits
    return logits


def _takes_trees(model: Any) -> bool:
    """Whether a tree of two siblings goes through.

    Raises:
        NotImplementedError, ValueError: where not even a chain would.
    """
    cache = make_cache(model)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    _forward(model, cache, ids[:, :1])
    try:
        _forward(model, cache, ids, Window(1, 2, (ROOT, ROOT)))
    except (NotImplementedError, ValueError):
        return False
    return True


@dataclass
class _Tally:
    """The differences found so far, named as in `StateCheck`."""

    tolerance: float
    """Gaps up to this flip by rounding."""
    num_rounds: int = 0
    num_rejected: int = 0
    num_positions: int = 0
    num_flips: int = 0
    num_beyond: int = 0
    logits_relative: float = 0.0
    largest: tuple[float, int | None, int | None] = (0.0, None, None)

    def count(self, num_positions: int, patterns: Sequence[Sequence[Round]]) -> None:
        rounds = [each for pattern in patterns for each in pattern]
        self.num_positions += num_positions
        self.num_rounds += len(rounds)
        self.num_rejected += sum(len(each.tokens) - len(each.kept) for each in rounds)

    def compare(self, prompt: int, first: torch.Tensor, other: Iterator[torch.Tensor]) -> None:
        """`first` `[N, V]` against the same positions, which come in parts."""
        position, squares, total = 0, 0.0, 0.0
        for found in (part.float() for logits in other for part in logits.split(_CHUNK)):
            expected = first[position : position + len(found)].float()
            apart = (found - expected).abs()
            squares += apart.square().sum().item()
            total += expected.square().sum().item()
            largest = apart.max().item()
            # A NaN is larger than everything.
            if not largest <= self.largest[0]:
                self.largest = (largest, prompt, position + int(apart.amax(1).argmax()))
            best, choice = expected.max(1), found.argmax(1)
            behind = (best.values - expected.gather(1, choice[:, None])[:, 0])[choice != best.indices]
            self.num_flips += len(behind)
            self.num_beyond += int((behind > self.tolerance).sum())
            position += len(found)
        relative = math.sqrt(squares / total) if total else math.inf
        self.logits_relative = max(relative, self.logits_relative)

    def judge(self, noise: Noise | None, num_patterns: int) -> StateCheck:
        if not self.num_positions:
            return StateCheck("not checked", "plain decoding generated no text")
        limit = max(EXACT, TOLERANCE * noise.logits_relative if noise else 0.0)
        most = most_flips(noise, self.num_positions * (num_patterns - 1))
        reason = ""
        if self.num_beyond:
            reason = f"{self.num_beyond} choices flip where the gap is beyond {TOLERANCE:g} times the largest noise"
        elif self.num_flips > most:
            reason = f"{self.num_flips} choices flip, noise explains {most:.0f}"
        elif not self.logits_relative <= limit:
            reason = f"logits differ by {self.logits_relative:.2g} of their size, noise explains {limit:.2g}"
        return StateCheck(
            verdict="differ" if reason else "agree",
            reason=reason,
            num_patterns=num_patterns,
            num_rounds=self.num_rounds,
            num_rejected=self.num_rejected,
            num_positions=self.num_positions,
            num_flips=self.num_flips,
            logits_relative=self.logits_relative,
            largest_difference=self.largest[0],
            prompt=self.largest[1],
            position=self.largest[2],
        )
