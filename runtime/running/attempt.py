"""One entry over one prompt: called, measured from outside, its text judged. Greedy once, sampled many times."""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.record import PromptVerdict
from ddaudit.runtime.checks.decoding import decode_plain
from ddaudit.runtime.checks.verdict import TOLERANCE, judge_prompt
from ddaudit.runtime.drafters.scripted import ScriptedDrafter
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.running.binding import bind
from ddaudit.runtime.running.metering import metered, peak_memory_bytes, reset_peak_memory
from ddaudit.runtime.running.profiling import moved_bytes
from ddaudit.runtime.running.references import WARM_UP_TOKENS
from ddaudit.runtime.running.results import drain, read_output
from ddaudit.runtime.running.settling import ties_settled
from ddaudit.runtime.running.trial import Figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddaudit.auditor.record import Noise
    from ddaudit.runtime.checks.decoding import Reference
    from ddaudit.runtime.running.binding import Offer
    from ddaudit.runtime.running.trial import Trial

_SAMPLED_TOKENS = 16
"""Length of a sampled text."""


def run_prompt(trial: Trial, offer: Offer, number: int, reference: Reference, noise: Noise | None) -> None:
    """Greedy: one text, compared with plain decoding's, and timed.

    Where a scripted drafter's script is left at a near-tie, a second text gives the figures, its ties settled.
    """
    is_scripted = isinstance(offer.drafter, ScriptedDrafter)
    if is_scripted:
        offer.drafter.follow(len(offer.prompt_ids), reference.generated_ids)
    _warm_up(trial, offer, number)
    found, figures = _generate(trial, offer)
    if len(found) > len(reference.generated_ids) and reference.generated_ids[-1] not in offer.stop_token_ids:
        # It went on past its budget, by a block of its own perhaps: that is compared too, within reason.
        if len(found) > 2 * len(reference.generated_ids):
            raise RunError(
                f"the entry returned {len(found)} tokens where {offer.max_new_tokens} were asked for",
                "let it stop at the number of new tokens that it is given",
            )
        reference = decode_plain(offer.target, reference.prompt_ids, len(found), offer.stop_token_ids)
    decode = offer.tokenizer.decode if offer.tokenizer is not None else None
    shortfall = offer.block_size - 1
    verdict = judge_prompt(offer.target, number, reference, found, noise, offer.max_new_tokens, shortfall, decode)
    trial.verdicts.append(verdict)
    if is_scripted and figures.measured_s["draft"] and noise and verdict.verdict == "near-tie":
        trial.unsettled.add(figures)
        trial.settled_bias = TOLERANCE * noise.gap_max
        with ties_settled(offer.target, reference, trial.settled_bias):
            settled, figures = _generate(trial, offer)
        shared = min(len(settled), len(reference.generated_ids))
        trial.num_settled_equal += settled[:shared] == reference.generated_ids[:shared]
    trial.figures.add(figures)


def sample_prompt(trial: Trial, offer: Offer, number: int, num_samples: int) -> None:
    """At a temperature: short texts, each with its own seed, until there are about `num_samples` tokens."""
    assert trial.samples is not None
    wanted = min(offer.max_new_tokens, _SAMPLED_TOKENS)
    offer = replace(offer, max_new_tokens=wanted, temperature=trial.samples.temperature)
    num_texts = math.ceil(num_samples / wanted)
    for text_number in range(num_texts):
        seed = offer.seed + number * num_texts + text_number
        if isinstance(offer.drafter, ScriptedDrafter):
            offer.drafter.follow_text(offer.target, offer.prompt_ids, seed)
        if text_number == 0:
            _warm_up(trial, offer, number)
        torch.manual_seed(seed)
        found, figures = _generate(trial, replace(offer, seed=seed))
        trial.figures.add(figures)
        found = found[:wanted]
        trial.samples.read(offer.target, offer.prompt_ids, found)
        missing = wanted - len(found)
        is_stopped = found and found[-1] in offer.stop_token_ids
        if not found or (missing > offer.block_size - 1 and not is_stopped):
            reason = f"a sampled text stops {missing} of {wanted} tokens short"
            trial.verdicts.append(PromptVerdict(number, "lossy", len(found), reason))
            return


def _warm_up(trial: Trial, offer: Offer, number: int) -> None:
    if number == 0:
        _call(trial, replace(offer, max_new_tokens=min(WARM_UP_TOKENS, offer.max_new_tokens)))


def _generate(trial: Trial, offer: Offer) -> tuple[tuple[int, ...], Figures]:
    """The text of one call, and its figures."""
    device = offer.target.device
    reset_peak_memory(device)
    meter, returned = _call(trial, offer)
    output = read_output(returned, offer.prompt_ids)
    _require_known(output.generated_ids, offer.target)
    found = _cut_at_stop(output.generated_ids, offer.stop_token_ids)
    return found, Figures(
        num_texts=1,
        tokens=len(found),
        decode_s=meter.decode_s,
        rounds=meter.rounds,
        lengths=list(output.acceptance_lengths),
        stage_s=output.stage_s,
        measured_s=meter.stage_s(),
        moved=moved_bytes(meter, offer.target, offer.drafter, len(found)) if trial.floor else {},
        peak=peak_memory_bytes(device),
    )


def _call(trial: Trial, offer: Offer) -> tuple[Any, Any]:
    function = trial.imported.function
    assert function is not None
    bound = bind(function, trial.imported.owner, trial.call.arguments, offer)
    positional = [
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    first = [bound.pop(name) for name in positional if name in bound]
    with metered(offer.target, offer.drafter, len(offer.prompt_ids), offer.target.device) as meter, torch.no_grad():
        returned = drain(function(*first, **bound))
    return meter, returned


def _require_known(ids: Sequence[int], model: Any) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if (unknown := next((token for token in ids if not 0 <= token < size), None)) is not None:
        raise RunError(
            f"the entry returned {unknown} as a token id, and the target has {size}",
            "return the ids that were generated, without padding",
        )


def _cut_at_stop(ids: Sequence[int], stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    end = next((i + 1 for i, token in enumerate(ids) if token in stop_token_ids), len(ids))
    return tuple(ids[:end])
