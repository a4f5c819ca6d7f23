"""One entry with its arguments on its way through a run: its function, what it has given so far, its record."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.record import EntryRecord, SettledTies
from ddaudit.runtime.checks.verdict import worst
from ddaudit.runtime.errors import RunError, describe
from ddaudit.runtime.running.profiling import stage_costs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddaudit.auditor.record import Entry, Floor, PromptVerdict, StageCost
    from ddaudit.runtime.checks.sampling import SampleTally
    from ddaudit.runtime.running.arguments import Call

RUNTIME = Path(__file__).parents[1]


@dataclass(frozen=True)
class Imported:
    """An entry's function, or why there is none."""

    entry: Entry
    function: Callable[..., Any] | None = None
    owner: type | None = None
    own_class: type | None = None
    """The repository's drafter class that the entry takes."""
    takes_drafter: bool = True
    parameters: tuple[str, ...] = ()
    failure: tuple[str, str] = ("", "")


@dataclass
class Figures:
    """Counts and times of one text, or of several added up."""

    num_texts: int = 0
    tokens: int = 0
    decode_s: float = 0.0
    rounds: int = 0
    lengths: list[float] = field(default_factory=list)
    stage_s: dict[str, float] = field(default_factory=dict)
    """By the entry's own clock, empty where it has none."""
    measured_s: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes that the stages had to move beyond the target's weights; filled for a profile."""
    peak: int = 0

    def add(self, other: Figures) -> None:
        self.num_texts += other.num_texts
        self.tokens += other.tokens
        self.decode_s += other.decode_s
        self.rounds += other.rounds
        self.lengths += other.lengths
        self.peak = max(self.peak, other.peak)
        self.stage_s = _added(self.stage_s, other.stage_s)
        self.measured_s = _added(self.measured_s, other.measured_s)
        self.moved = _added(self.moved, other.moved)

    @property
    def after_first(self) -> int:
        """Tokens after the first of each text, which the prefill gives."""
        return max(0, self.tokens - self.num_texts)

    @property
    def acceptance(self) -> float | None:
        """Tokens a round: the entry's own figure if it returns one."""
        if self.lengths:
            return sum(self.lengths) / len(self.lengths)
        return self.after_first / self.rounds if self.rounds else None


@dataclass
class Trial:
    """One call on its way over the prompts: what it needs, and what it has given so far."""

    call: Call
    imported: Imported
    drafter: Any = None
    samples: SampleTally | None = None
    """Where the tokens of an entry that runs at a temperature above 0 are counted."""
    num_prompts: int = 0
    """Prompts it has been through."""
    figures: Figures = field(default_factory=Figures)
    unsettled: Figures = field(default_factory=Figures)
    """Of the texts in whose place one with settled near-ties counts."""
    settled_bias: float = 0.0
    num_settled_equal: int = 0
    floor: Floor | None = None
    """Where a profile is wanted."""
    verdicts: list[PromptVerdict] = field(default_factory=list)
    failure: tuple[str, str] = ("", "")
    """What went wrong and the remedy, empty while nothing did."""

    @property
    def is_alive(self) -> bool:
        return not self.failure[0]


def explain(error: BaseException, folder: Path) -> tuple[str, str]:
    """What happened, with the repository's own line, and what to do."""
    if isinstance(error, RunError):
        return str(error), error.remedy
    text = describe(error)
    root = folder.resolve()
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if Path(f.filename).is_relative_to(root)]
    if frames:
        text += f" ({Path(frames[-1].filename).relative_to(root).as_posix()}:{frames[-1].lineno})"
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return text, "lower `--max-new-tokens`, `--prompt-tokens` or the entry's own budget"
    if isinstance(error, SystemExit):
        return text, "the entry ends the program itself: name a function that generates, not a script's `main`"
    if isinstance(error, NotImplementedError) and RUNTIME in Path(stack[-1].filename).parents:
        return text, "no fix changes that: take a target of other layer kinds; the README's limits name the exact ones"
    if (folder / "ddaudit.json").is_file():
        return (
            text,
            "if it was not given a wrong argument: `ddaudit scan` names what is left to mend by hand in the fork",
        )
    return text, "`ddaudit scan` names the places that break on this architecture, `ddaudit fix` mends them"


def finish(trial: Trial, num_prompts: int) -> EntryRecord:
    """The trial's record, whatever came of it. One that has not seen all prompts is an error: it proves nothing."""
    call = trial.call
    error, remedy = trial.failure
    sampling = trial.samples.test() if trial.samples and trial.is_alive else None
    if trial.is_alive and trial.num_prompts < max(1, num_prompts):
        of = f"after {trial.num_prompts} of {num_prompts} prompts" if num_prompts else "before the first prompt"
        error = f"the run ended {of}"
    verdicts = [verdict.verdict for verdict in trial.verdicts] + ([sampling.verdict] if sampling else [])
    figures = trial.figures
    return EntryRecord(
        name=call.name,
        arguments={name: plain_json(value) for name, value in call.arguments.items()},
        verdict="error" if error else worst(verdicts),
        tokens=figures.tokens,
        tokens_per_s=figures.after_first / figures.decode_s if figures.decode_s else 0.0,
        decode_s=figures.decode_s,
        acceptance_length_mean=figures.acceptance,
        acceptance_source="entry" if figures.lengths else "measured",
        rounds=figures.rounds or None,
        stage_s=figures.stage_s or figures.measured_s,
        stage_source="entry" if figures.stage_s else "measured" if figures.measured_s else "",
        measured_s=figures.measured_s,
        costs=_costs(figures, trial.floor),
        settled=_settled(trial),
        peak_memory_bytes=figures.peak,
        prompts=tuple(trial.verdicts),
        sampling=sampling,
        error=error,
        remedy=remedy,
    )


def _costs(figures: Figures, floor: Floor | None) -> tuple[StageCost, ...]:
    if floor is None or not figures.rounds:
        return ()
    return stage_costs(figures.measured_s, figures.moved, figures.rounds, floor)


def _added(sums: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {**sums, **{name: sums.get(name, 0) + value for name, value in more.items()}}


def _settled(trial: Trial) -> SettledTies | None:
    before = trial.unsettled
    if not before.num_texts:
        return None
    return SettledTies(before.num_texts, trial.settled_bias, trial.num_settled_equal, before.acceptance)


def plain_json(value: Any) -> Any:
    """The value where JSON can say it, else its text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value
