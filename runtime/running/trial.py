"""One entry with its arguments on its way through a run: its function, what it has given so far, its record."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.record import EntryRecord
from ddaudit.runtime.checks.verdict import worst
from ddaudit.runtime.errors import RunError, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddaudit.auditor.record import Entry, PromptVerdict
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
    parameters: tuple[str, ...] = ()
    failure: tuple[str, str] = ("", "")


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
    num_texts: int = 0
    """Texts it has generated: one a prompt, more where it samples."""
    tokens: int = 0
    decode_s: float = 0.0
    rounds: int = 0
    lengths: list[float] = field(default_factory=list)
    stage_s: dict[str, float] = field(default_factory=dict)
    stage_source: str = ""
    peak: int = 0
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
    return text, "`ddaudit scan` names the places that break on this architecture, `ddaudit fix` mends them"


def finish(trial: Trial, num_prompts: int) -> EntryRecord:
    """The trial's record, whatever came of it. One that has not seen all prompts is an error: it proves nothing."""
    call = trial.call
    error, remedy = trial.failure
    sampling = trial.samples.test() if trial.samples and trial.is_alive else None
    if trial.is_alive and trial.num_prompts < max(1, num_prompts):
        error = f"the run ended after {trial.num_prompts} of {num_prompts} prompts"
    verdicts = [verdict.verdict for verdict in trial.verdicts] + ([sampling.verdict] if sampling else [])
    after_first = max(0, trial.tokens - trial.num_texts)
    mean: float | None = None
    if trial.lengths:
        mean = sum(trial.lengths) / len(trial.lengths)
    elif trial.rounds:
        mean = after_first / trial.rounds
    return EntryRecord(
        name=call.name,
        arguments={name: plain_json(value) for name, value in call.arguments.items()},
        verdict="error" if error else worst(verdicts),
        tokens=trial.tokens,
        tokens_per_s=after_first / trial.decode_s if trial.decode_s else 0.0,
        decode_s=trial.decode_s,
        acceptance_length_mean=mean,
        acceptance_source="entry" if trial.lengths else "measured",
        rounds=trial.rounds or None,
        stage_s=trial.stage_s,
        stage_source=trial.stage_source,
        peak_memory_bytes=trial.peak,
        prompts=tuple(trial.verdicts),
        sampling=sampling,
        error=error,
        remedy=remedy,
    )


def plain_json(value: Any) -> Any:
    """The value where JSON can say it, else its text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value
