"""At temperature above 0: are an entry's tokens drawn from the target's distribution? A chi-square test.

Each token is counted under its rank among the target's probabilities at its place, read by stock code from the
entry's own text. A right token's rank follows those probabilities whatever came before, so counts less their
expectations, summed over all places, have a known covariance C, and

    (counts - expected)ᵀ C⁻¹ (counts - expected)

is chi-square distributed with one degree of freedom less than there are cells. At a single place this is Pearson's
statistic; over many places Pearson's own comes out too small, and lets faults pass. Ranks, because the usual faults
(tokens accepted that were not drawn, a wrong temperature, a state with a trace of other tokens) move mass along them.

Stock code reads each text twice: in small blocks for the ranks, and in one for the chances. Taken from one reading,
what rounding in reduced precision puts first would also look likelier than it is.

The test must be able to fail: the same tokens are also held against the distribution at 1.15 times the temperature.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.record import SampleTest
from ddaudit.runtime.checks.decoding import read_in_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

SIGNIFICANCE = 1e-3
"""A right entry is called biased once in a thousand runs."""
CONTROL = 1.15
MIN_EXPECTED = 20.0
"""Cells with fewer expected tokens are joined to their neighbours: the normal approximation needs them."""
_BLOCK = 5
"""Of the reading for ranks: shorter than a sampled text, so that the two readings round differently."""
_POWER_SIGMAS = 1.645
"""As many samples as reject the control 95 times in 100."""
_MARGIN = 1.2
"""More samples also mean more cells, which cost a little power."""


class SampleTally:
    """Tokens counted by rank beside what a temperature, and the control's, lets expect. All in float64."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.num_samples = 0
        self._edges: list[int] = []
        self._observed = torch.zeros(0, dtype=torch.float64)
        self._expected = {temperature: _Moments(), CONTROL * temperature: _Moments()}

    def read(self, model: Any, prompt_ids: Sequence[int], text_ids: Sequence[int]) -> None:
        """Count the tokens of one text, a short one: its logits over the whole vocabulary are held."""
        if len(text_ids):
            readings = (read_in_blocks(model, prompt_ids, text_ids, size) for size in (_BLOCK, len(text_ids)))
            ranking, logits = (torch.cat(list(reading)) for reading in readings)
            self.count(ranking, logits, text_ids)

    def count(self, ranking: torch.Tensor, logits: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Count tokens drawn one from each distribution of `logits` `[N, V]`, under their ranks in `ranking`."""
        if not self._edges:
            self._edges = _cell_edges(logits.shape[1])
            self._observed = torch.zeros(len(self._edges) - 1, dtype=torch.float64)
        order = ranking.argsort(dim=1, descending=True)
        tokens = torch.tensor(list(token_ids), device=logits.device)
        ranks = (order == tokens[:, None]).int().argmax(1).cpu()
        cells = torch.bucketize(ranks, torch.tensor(self._edges[1:-1]), right=True)
        self._observed += torch.bincount(cells, minlength=len(self._observed))
        self.num_samples += len(token_ids)
        ordered = logits.double().gather(1, order)
        for temperature, moments in self._expected.items():
            cumulative = (ordered / temperature).softmax(1).cumsum(1).cpu()
            cumulative = torch.cat([cumulative.new_zeros(len(ranks), 1), cumulative], dim=1)
            moments.add(cumulative[:, self._edges].diff(dim=1))

    def test(self) -> SampleTest:
        """The verdict over everything counted so far."""
        target, control = self._expected.values()
        statistic, num_cells = _chi_square(self._observed, target)
        p_value = survival(statistic, num_cells - 1)
        control_statistic, control_cells = _chi_square(self._observed, control)
        control_p_value = survival(control_statistic, control_cells - 1)
        num_more: int | None = 0
        if p_value < SIGNIFICANCE:
            verdict = "biased"
        elif control_p_value < SIGNIFICANCE:
            verdict = "distribution-preserving"
        else:
            verdict, num_more = "inconclusive", self._num_more()
        return SampleTest(
            verdict=verdict,
            temperature=self.temperature,
            num_samples=self.num_samples,
            num_cells=num_cells,
            statistic=statistic,
            p_value=p_value,
            control_temperature=CONTROL * self.temperature,
            control_p_value=control_p_value,
            num_more=num_more,
        )

    def _num_more(self) -> int | None:
        """Samples that the control's rejection still takes: what sets it apart grows with their number."""
        target, control = self._expected.values()
        apart, num_cells = _chi_square(target.mean, control)
        if num_cells < 2 or apart <= 0:
            return None
        needed = _MARGIN * self.num_samples * _noncentrality(num_cells - 1) / apart
        return max(math.ceil(needed) - self.num_samples, self.num_samples // 4)


class _Moments:
    """Mean and covariance of the counts, summed over places."""

    def __init__(self) -> None:
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.covariance = torch.zeros(0, 0, dtype=torch.float64)

    def add(self, chances: torch.Tensor) -> None:
        """One token at each of N places, `[N, cells]` the chances of its cell."""
        mean = chances.sum(0)
        covariance = mean.diag() - chances.T @ chances
        first = not len(self.mean)
        self.mean = mean if first else self.mean + mean
        self.covariance = covariance if first else self.covariance + covariance


def survival(statistic: float, degrees: int) -> float:
    """The chance that a chi-square variable of so many degrees of freedom is larger; 1 for none at all."""
    if degrees < 1:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _cell_edges(vocabulary: int) -> list[int]:
    """Where cells of ranks begin, 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, and the end."""
    edges = [0, 1, 2, 3]
    step = 4
    while step < vocabulary:
        edges += [step, step + step // 2]
        step *= 2
    return [edge for edge in edges if edge < vocabulary] + [vocabulary]


def _chi_square(observed: torch.Tensor, moments: _Moments) -> tuple[float, int]:
    """The statistic of the module's docstring and the number of cells left after joining."""
    starts, filled = [], math.inf
    for cell, expected in enumerate(moments.mean.tolist()):
        if filled >= MIN_EXPECTED:
            starts.append(cell)
            filled = 0.0
        filled += expected
    if filled < MIN_EXPECTED:
        starts = starts[:-1]
    if len(starts) < 2:
        return 0.0, len(starts)
    joined = torch.zeros(len(starts), len(observed), dtype=torch.float64)
    for row, (start, end) in enumerate(zip(starts, [*starts[1:], len(observed)], strict=True)):
        joined[row, start:end] = 1
    # The counts add up to the number of samples, so one cell says nothing new.
    joined = joined[:-1]
    apart = joined @ (observed - moments.mean)
    covariance = joined @ moments.covariance @ joined.T
    return float(apart @ torch.linalg.solve(covariance, apart)), len(starts)


def _noncentrality(degrees: int) -> float:
    """How far the statistic must be moved to be rejected 95 times in 100, by the normal approximation."""
    low, high = 0.0, 10.0 * degrees + 100.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if survival(middle, degrees) > SIGNIFICANCE else (low, middle)
    above, spread = high - degrees, 2 * _POWER_SIGMAS**2
    # The larger root of x - above = sigmas * sqrt(2 degrees + 4 x).
    return above + spread + math.sqrt((above + spread) ** 2 - above**2 + spread * degrees)
