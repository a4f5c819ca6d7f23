"""Running a repository's entry points against plain decoding. This executes the code that it is given."""

from __future__ import annotations

import math
import platform
import sys
import warnings
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ddaudit.auditor.record import PlainRecord, RunRecord, StateCheck
from ddaudit.runtime.arguments import expand, parse_argument
from ddaudit.runtime.attempt import WARM_UP_TOKENS, run_prompt, sample_prompt
from ddaudit.runtime.binding import Offer, drafter_class, parameter_names, sampling_temperature
from ddaudit.runtime.decoding import Reference, decode_plain
from ddaudit.runtime.drafting import DraftPlan, describe_drafter, make_drafter, own_drafter_class, plan_drafts
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.importing import isolated_imports, lies_under, load_function
from ddaudit.runtime.invariance import check_state
from ddaudit.runtime.loading import Target, choose_device, load_target
from ddaudit.runtime.metering import peak_memory_bytes, reset_peak_memory
from ddaudit.runtime.prompts import Prompt, make_prompts
from ddaudit.runtime.sampling import SampleTally
from ddaudit.runtime.trial import Imported, Trial, explain, finish
from ddaudit.runtime.verdict import measure_noise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddaudit.auditor.record import Entry, Noise
    from ddaudit.runtime.arguments import Argument, Call

__all__ = ["RunError", "RunOptions", "parse_argument", "run"]

_NOISE_POSITIONS = 128
"""Choices a prompt whose logits are kept for the noise: 127 MB a prompt at a vocabulary of 248,320."""


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
    checks_state: bool = True
    temperature: float = 0.0
    samples: int = 2048
    """Tokens of each entry to test, at a temperature above 0."""


def run(
    folder: Path,
    entries: Sequence[Entry],
    arguments: Sequence[Argument],
    options: RunOptions,
    progress: Callable[[str], None] = lambda text: None,
    target: Target | None = None,
) -> RunRecord:
    """Plain decoding, then each entry, over the prompts. An entry that fails does not stop the others.

    `target` stands in for the one that the options name.

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
    with isolated_imports(folder), warnings.catch_warnings():
        # A scan says so at each place (DDA403), and no fix renames it: the new name needs Transformers 5.24.
        warnings.filterwarnings("ignore", r"`past_key_values` is deprecated", FutureWarning)
        imported = _import_entries(entries, folder)
        calls = expand({entry: found.parameters for entry, found in imported.items()}, arguments)
        trials = [_make_trial(call, imported[call.entry], options.temperature) for call in calls]
        if not any(trial.is_alive for trial in trials):
            return _record(folder, options, device, None, (), None, None, trials, None)
        if options.temperature and not any(trial.samples for trial in trials):
            raise RunError(
                f"no entry takes the temperature {options.temperature:g}",
                "leave `--temperature` out, or name entries with a parameter `temperature`",
            )
        if target is None:
            progress(f"loading {options.model}")
            target = load_target(
                options.model,
                random_weights=options.random_weights,
                loader=options.loader,
                dtype=options.dtype,
                device=device,
                seed=options.seed,
            )
        plan = plan_drafts(options.drafter, target, options.block_size)
        _make_drafters(trials, folder, options, plan, target)
        prompts = make_prompts(target, options, plan.mask_token_id)
        stop_token_ids = _stop_token_ids(target)
        plain, references, noise = _decode_references(target, prompts, options, plan, stop_token_ids, progress)
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
                    given = replace(offer, drafter=trial.drafter)
                    if trial.samples:
                        sample_prompt(trial, given, number, math.ceil(options.samples / len(prompts)))
                    else:
                        run_prompt(trial, given, number, reference, noise)
                except (Exception, SystemExit) as error:
                    trial.failure = explain(error, folder)
        state = _check_state(target, references, noise, options, progress) if options.checks_state else None
    return _record(folder, options, device, target, prompts, noise, plain, trials, state)


def _make_trial(call: Call, imported: Imported, temperature: float) -> Trial:
    """An entry that takes no temperature is greedy, whatever the others do."""
    chosen = sampling_temperature(imported.parameters, call.arguments, temperature)
    return Trial(call, imported, failure=imported.failure, samples=SampleTally(chosen) if chosen else None)


def _import_entries(entries: Sequence[Entry], folder: Path) -> dict[Entry, Imported]:
    found = {}
    for entry in entries:
        try:
            function, owner = load_function(folder, entry.module, entry.qualname)
            own_class = drafter_class(function, owner)
            found[entry] = Imported(entry, function, owner, own_class, parameter_names(function, owner))
        except RunError as error:
            # Not known what it takes: any `--arg` may have been meant for it.
            names = tuple(parameter.name for parameter in entry.parameters) or ("**",)
            found[entry] = Imported(entry, parameters=names, failure=(str(error), error.remedy))
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
            if trial.is_alive and own_class not in made:
                made[own_class] = make_drafter(options.drafter, plan, own_class, target, options.seed)
            trial.drafter = made.get(own_class)
        except Exception as error:
            trial.failure = explain(error, folder)


def _stop_token_ids(target: Target) -> tuple[int, ...]:
    """None with random weights: the length of their text would be chance."""
    if target.has_random_weights:
        return ()
    from ddaudit.runtime.architecture import stop_token_ids

    return tuple(stop_token_ids(target.model, target.tokenizer))


def _decode_references(
    target: Target,
    prompts: Sequence[Prompt],
    options: RunOptions,
    plan: DraftPlan,
    stop_token_ids: Sequence[int],
    progress: Callable[[str], None],
) -> tuple[PlainRecord, list[Reference], Noise | None]:
    # A block more than asked for: an entry may go past the end of its budget, and its text is compared there too.
    length = options.max_new_tokens + plan.block_size
    decode_plain(target.model, prompts[0].ids, WARM_UP_TOKENS)
    reset_peak_memory(target.model.device)
    references = []
    for number, prompt in enumerate(prompts):
        progress(f"prompt {number + 1} of {len(prompts)}: plain decoding")
        references.append(decode_plain(target.model, prompt.ids, length, stop_token_ids, keep_logits=_NOISE_POSITIONS))
    tokens = sum(len(reference.generated_ids) for reference in references)
    decode_s = sum(reference.decode_s for reference in references)
    plain = PlainRecord(
        tokens=tokens,
        tokens_per_s=(tokens - len(references)) / decode_s if decode_s else 0.0,
        decode_s=decode_s,
        peak_memory_bytes=peak_memory_bytes(target.model.device),
        num_distinct_tokens=len({token for reference in references for token in reference.generated_ids}),
    )
    progress("measuring the noise of stock decoding")
    noise = measure_noise(target.model, references)
    return plain, [replace(reference, logits=reference.logits[:0].clone()) for reference in references], noise


def _check_state(
    target: Target,
    references: Sequence[Reference],
    noise: Noise | None,
    options: RunOptions,
    progress: Callable[[str], None],
) -> StateCheck:
    # Last, so that entries that make no cache of ours are timed on a model without its hooks.
    progress("the same text under two rejection patterns")
    try:
        return check_state(target.model, references, noise, options.seed)
    except Exception as error:
        return StateCheck("error", f"{type(error).__name__}: {error}")


def _record(
    folder: Path,
    options: RunOptions,
    device: torch.device,
    target: Target | None,
    prompts: Sequence[Prompt],
    noise: Noise | None,
    plain: PlainRecord | None,
    trials: Sequence[Trial],
    state_check: StateCheck | None,
) -> RunRecord:
    try:
        version = metadata.version("ddaudit")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return RunRecord(
        ddaudit_version=version,
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        fork=folder.resolve().name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(target.model.dtype).removeprefix("torch.") if target else "",
        model=target.description if target else "not loaded: no entry imports",
        drafter=describe_drafter(options.drafter, options.temperature),
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        prompt_lengths=tuple(len(prompt.ids) for prompt in prompts),
        noise=noise,
        plain=plain,
        entries=tuple(finish(trial) for trial in trials),
        peak_memory_kind="device" if device.type == "cuda" else "process",
        state_check=state_check,
        temperature=options.temperature,
    )
