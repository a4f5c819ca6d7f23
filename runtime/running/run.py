"""Running a repository's entry points against plain decoding. This executes the code that it is given."""

from __future__ import annotations

import math
import platform
import sys
import warnings
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ddaudit.auditor.record import PlainRecord, RunRecord, StateCheck
from ddaudit.runtime.caches.mode import ReplayLog, eager_only, replay_log, replay_wanted
from ddaudit.runtime.checks.invariance import check_state
from ddaudit.runtime.checks.sampling import SampleTally
from ddaudit.runtime.drafters.drafting import (
    DraftPlan,
    describe_bundled,
    describe_drafter,
    make_drafter,
    own_drafter_class,
    plan_drafts,
)
from ddaudit.runtime.drafters.scripted import chain_acceptance
from ddaudit.runtime.errors import RunError, describe
from ddaudit.runtime.models.loading import Target, choose_device, load_target
from ddaudit.runtime.running.arguments import expand, parse_argument
from ddaudit.runtime.running.attempt import run_prompt, sample_prompt
from ddaudit.runtime.running.binding import (
    Offer,
    drafter_class,
    parameter_names,
    sampling_temperature,
    takes_drafter,
)
from ddaudit.runtime.running.containing import closed_off, settings_kept, signals_kept
from ddaudit.runtime.running.importing import isolated_imports, lies_under, load_function
from ddaudit.runtime.running.profiling import measure_floor
from ddaudit.runtime.running.prompts import Prompt, make_prompts
from ddaudit.runtime.running.references import (
    decode_references,
    decode_replayed,
    is_changed,
    require_positions,
    wanted_stops,
)
from ddaudit.runtime.running.trial import Imported, Trial, explain, finish
from ddaudit.runtime.tiny import TINY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddaudit.auditor.record import Entry, EntryRecord, Floor, Noise
    from ddaudit.runtime.checks.decoding import Reference
    from ddaudit.runtime.running.arguments import Argument, Call

__all__ = ["RunError", "RunOptions", "parse_argument", "run"]


@dataclass(frozen=True)
class RunOptions:
    """What a run is asked for. The defaults are those of the command line."""

    model: str
    random_weights: bool = False
    loader: str = "causal-lm"
    drafter: str = "scripted:0.7"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_new_tokens: int = 128
    block_size: int | None = None
    prompt_texts: tuple[str, ...] = ()
    num_prompts: int = 3
    prompt_tokens: int = 32
    temperature: float = 0.0
    samples: int = 2048
    """Tokens of each entry to test, at a temperature above 0."""
    checks_state: bool = True
    eager: bool = False
    """Replay no CUDA graphs."""
    profile: bool = False
    """Measure what the device can do, and hold each stage against it."""


def run(
    folder: Path,
    entries: Sequence[Entry],
    arguments: Sequence[Argument],
    options: RunOptions,
    progress: Callable[[str], None] = lambda text: None,
    target: Target | None = None,
    keep: Callable[[RunRecord], None] = lambda record: None,
) -> RunRecord:
    """Plain decoding, then each entry, over the prompts. An entry that fails does not stop the others.

    `target` stands in for the one that the options name. `keep` is given the record so far after each prompt of
    each entry, and an interrupted run returns it: entries that have not seen every prompt are errors in it.

    Raises:
        RunError: where nothing could be run: no model, no prompt, no entry.
    """
    if not entries:
        raise RunError(
            f"no entry point was found in `{folder.name}`", "name a function that generates: `--entry module:function`"
        )
    device = choose_device(options.device)
    # A mistake in it would otherwise show only after the model is loaded and has decoded.
    describe_drafter(options.drafter)
    # The repository's code may change the working folder.
    folder = folder.resolve()
    so_far = _SoFar(folder, options, device, target)
    with (
        closed_off(),
        isolated_imports(folder),
        warnings.catch_warnings(),
        eager_only(options.eager),
        replay_log() as so_far.replays,
    ):
        # A scan says so at each place (DDA403), and no fix renames it: the new name needs Transformers 5.24.
        warnings.filterwarnings("ignore", r"`past_key_values` is deprecated", FutureWarning)
        try:
            _run(so_far, entries, arguments, progress, keep)
        except KeyboardInterrupt:
            progress("interrupted")
    return so_far.record()


@dataclass
class _SoFar:
    """A run under way."""

    folder: Path
    options: RunOptions
    device: torch.device
    target: Target | None
    trials: Sequence[Trial] = ()
    prompts: Sequence[Prompt] = ()
    plain: PlainRecord | None = None
    noise: Noise | None = None
    state_check: StateCheck | None = None
    replays: ReplayLog = field(default_factory=ReplayLog)
    plain_replayed: EntryRecord | None = None
    nominal_acceptance: float | None = None
    floor: Floor | None = None

    def record(self) -> RunRecord:
        try:
            version = metadata.version("ddaudit")
        except metadata.PackageNotFoundError:
            version = "unknown"
        target, options, is_cuda = self.target, self.options, self.device.type == "cuda"
        return RunRecord(
            ddaudit_version=version,
            python_version=platform.python_version(),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            fork=self.folder.name,
            device=torch.cuda.get_device_name(self.device) if is_cuda else "cpu",
            dtype=str(target.model.dtype).removeprefix("torch.") if target else "",
            model=target.description if target else "not loaded: no entry imports",
            drafter=self._drafter(),
            seed=options.seed,
            max_new_tokens=options.max_new_tokens,
            prompt_lengths=tuple(len(prompt.ids) for prompt in self.prompts),
            noise=self.noise,
            plain=self.plain,
            entries=tuple(finish(trial, len(self.prompts)) for trial in self.trials),
            peak_memory_kind="device" if is_cuda else "process",
            state_check=self.state_check,
            temperature=options.temperature,
            execution="replayed" if self.replays.num_graphs else "eager",
            num_graphs=self.replays.num_graphs,
            replay_warnings=tuple(self.replays.refusals),
            plain_replayed=self.plain_replayed,
            nominal_acceptance=self.nominal_acceptance,
            floor=self.floor,
        )

    def _drafter(self) -> str:
        if self.trials and not any(trial.imported.takes_drafter for trial in self.trials):
            return "none: no entry takes one"
        if self.options.drafter == TINY:
            return describe_bundled(trial.drafter for trial in self.trials)
        return describe_drafter(self.options.drafter, self.options.temperature)


def _run(
    so_far: _SoFar,
    entries: Sequence[Entry],
    arguments: Sequence[Argument],
    progress: Callable[[str], None],
    keep: Callable[[RunRecord], None],
) -> None:
    folder, options = so_far.folder, so_far.options
    with signals_kept():
        imported = _import_entries(entries, folder)
    calls = expand({entry: found.parameters for entry, found in imported.items()}, arguments)
    trials = [_make_trial(call, imported[call.entry], options.temperature) for call in calls]
    so_far.trials = trials
    if not any(trial.is_alive for trial in trials):
        return
    if options.temperature and not any(trial.samples for trial in trials):
        raise RunError(
            f"no entry takes the temperature {options.temperature:g}",
            "leave `--temperature` out, or name entries with a parameter `temperature`",
        )
    target = so_far.target
    if target is None:
        progress(f"loading {options.model}")
        target = load_target(
            options.model,
            random_weights=options.random_weights,
            loader=options.loader,
            dtype=options.dtype,
            device=so_far.device,
            seed=options.seed,
        )
    so_far.target = target
    plan = plan_drafts(options.drafter, target, options.block_size)
    _make_drafters(trials, folder, options, plan, target)
    prompts = make_prompts(target, options, plan.mask_token_id)
    so_far.prompts = prompts
    require_positions(target, prompts, options.max_new_tokens + plan.block_size)
    stop_token_ids = wanted_stops(target)
    so_far.nominal_acceptance = None if options.temperature else chain_acceptance(options.drafter, plan.block_size)
    if options.profile:
        progress("measuring what the device can do")
        so_far.floor = measure_floor(target.model)
    so_far.plain, references, so_far.noise = decode_references(
        target, prompts, options, plan, stop_token_ids, so_far.floor, progress
    )
    for trial in trials:
        trial.floor = so_far.floor
    for number, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        offer = Offer(
            target=target.model,
            drafter=None,
            tokenizer=target.tokenizer,
            prompt_ids=prompt.ids,
            prompt_text=prompt.text,
            max_new_tokens=options.max_new_tokens,
            block_size=plan.block_size,
            mask_token_id=plan.mask_token_id,
            target_layer_ids=plan.target_layer_ids,
            stop_token_ids=stop_token_ids,
            seed=options.seed,
        )
        for trial in trials:
            if not trial.is_alive:
                continue
            progress(f"prompt {number + 1} of {len(prompts)}: {trial.call.name}")
            try:
                with settings_kept():
                    given = replace(offer, drafter=trial.drafter)
                    if trial.samples:
                        sample_prompt(trial, given, number, math.ceil(options.samples / len(prompts)))
                    else:
                        run_prompt(trial, given, number, reference, so_far.noise)
                trial.num_prompts += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                trial.failure = explain(error, folder)
            if is_changed(target, reference, so_far.noise):
                trial.failure = (
                    "it leaves the target changed: plain decoding gives another text after it",
                    "leave the target's weights as they are, and remove hooks that were put on it",
                )
                for other in trials:
                    if other.is_alive:
                        other.failure = (
                            f"not judged: `{trial.call.name}` has changed the target",
                            f"run it alone: `--entry {other.call.entry.name}`",
                        )
            keep(so_far.record())
    # Last, so that entries that make no cache of ours are timed on a model without its hooks.
    if so_far.device.type == "cuda" and replay_wanted() and not options.temperature:
        progress("plain decoding replayed")
        so_far.plain_replayed = decode_replayed(target, references, so_far.noise, stop_token_ids, so_far.floor)
    if options.checks_state:
        progress("the same text under two rejection patterns")
        so_far.state_check = _check_state(target, references, so_far.noise, options.seed)


def _check_state(target: Target, references: Sequence[Reference], noise: Noise | None, seed: int) -> StateCheck:
    try:
        return check_state(target.model, references, noise, seed)
    except Exception as error:
        return StateCheck("error", describe(error))


def _make_trial(call: Call, imported: Imported, temperature: float) -> Trial:
    """An entry that takes no temperature is greedy, whatever the others do."""
    chosen = sampling_temperature(imported.parameters, call.arguments, temperature)
    return Trial(call, imported, failure=imported.failure, samples=SampleTally(chosen) if chosen else None)


def _import_entries(entries: Sequence[Entry], folder: Path) -> dict[Entry, Imported]:
    found = {}
    modules = [entry.module for entry in entries]
    for entry in entries:
        try:
            function, owner = load_function(folder, entry.module, entry.qualname, modules)
            own_class = drafter_class(function, owner)
            names = parameter_names(function, owner)
            found[entry] = Imported(entry, function, owner, own_class, takes_drafter(function, owner), names)
        except Exception as error:
            # Not known what it takes: any `--arg` may have been meant for it.
            names = tuple(parameter.name for parameter in entry.parameters) or ("**",)
            found[entry] = Imported(entry, parameters=names, failure=explain(error, folder))
    # An entry without annotations still drafts with the repository's class, where there is just one.
    inside = [module for module in list(sys.modules.values()) if lies_under(module, folder.resolve())]
    only_class = own_drafter_class(inside)
    return {entry: replace(each, own_class=each.own_class or only_class) for entry, each in found.items()}


def _make_drafters(trials: Sequence[Trial], folder: Path, options: RunOptions, plan: DraftPlan, target: Target) -> None:
    """One drafter for each drafter class of the repository, shared by its entries."""
    made: dict[type | None, Any] = {}
    for trial in trials:
        own_class = trial.imported.own_class
        try:
            if not trial.imported.takes_drafter:
                continue
            if trial.is_alive and own_class not in made:
                made[own_class] = make_drafter(options.drafter, plan, own_class, target, options.seed)
            trial.drafter = made.get(own_class)
        except Exception as error:
            trial.failure = explain(error, folder)
