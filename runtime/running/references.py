"""Plain decoding of a run's prompts, and whether the target still decodes as it did."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddaudit.auditor.record import EntryRecord, PlainRecord
from ddaudit.runtime.caches.making import make_cache
from ddaudit.runtime.caches.mode import replay_log
from ddaudit.runtime.checks.decoding import Reference, decode_cached, decode_plain, stock_cache
from ddaudit.runtime.checks.verdict import TOLERANCE, judge_prompt, measure_noise, worst
from ddaudit.runtime.errors import RunError, describe
from ddaudit.runtime.models.architecture import stop_token_ids, text_config
from ddaudit.runtime.running.metering import peak_memory_bytes, reset_peak_memory
from ddaudit.runtime.running.profiling import token_costs
from ddaudit.runtime.running.trial import Figures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddaudit.auditor.record import Floor, Noise, StageCost
    from ddaudit.runtime.drafters.drafting import DraftPlan
    from ddaudit.runtime.models.loading import Target
    from ddaudit.runtime.running.prompts import Prompt
    from ddaudit.runtime.running.run import RunOptions

_NOISE_POSITIONS = 128
"""Choices a prompt whose logits are kept for the noise: 127 MB a prompt at a vocabulary of 248,320."""
WARM_UP_TOKENS = 8
"""The first call of a shape compiles kernels, which is no part of decoding speed."""
_CHECK_TOKENS = 4
"""Of each prompt, decoded again after each entry to see that it has left the target as it was."""
_REPLAYED = "plain decoding replayed"


def require_positions(target: Target, prompts: Sequence[Prompt], num_new: int) -> None:
    """Raise RunError where the target has too few: some models go on past their last one, silently wrong."""
    longest = max(len(prompt.ids) for prompt in prompts) + num_new
    limit = getattr(text_config(target.model), "max_position_embeddings", None)
    if isinstance(limit, int) and longest > limit:
        raise RunError(
            f"a prompt and its new tokens need {longest} positions, and {target.description} has {limit}",
            "lower `--max-new-tokens` or `--prompt-tokens`",
        )


def wanted_stops(target: Target) -> tuple[int, ...]:
    """None with random weights: the length of their text would be chance."""
    if target.has_random_weights:
        return ()
    return tuple(stop_token_ids(target.model, target.tokenizer))


def decode_references(
    target: Target,
    prompts: Sequence[Prompt],
    options: RunOptions,
    plan: DraftPlan,
    stop_token_ids: Sequence[int],
    floor: Floor | None,
    progress: Callable[[str], None],
) -> tuple[PlainRecord, list[Reference], Noise | None]:
    """Time and memory of plain decoding, each prompt's text, and the noise of stock code.

    Raises RunError for a target whose logits are not numbers.
    """
    # A block more than asked for: an entry may go past the end of its budget, and its text is compared there too.
    length = options.max_new_tokens + plan.block_size
    decode_plain(target.model, prompts[0].ids, WARM_UP_TOKENS)
    reset_peak_memory(target.model.device)
    references = []
    for number, prompt in enumerate(prompts):
        progress(f"prompt {number + 1} of {len(prompts)}: plain decoding")
        references.append(decode_plain(target.model, prompt.ids, length, stop_token_ids, keep_logits=_NOISE_POSITIONS))
    if not all(math.isfinite(gap) for reference in references for gap in reference.top2_gaps):
        raise RunError(
            f"the logits of {target.description} are not all numbers (NaN or infinite)",
            "check its weights, or take another `--dtype`: nothing can be compared with such a text",
        )
    tokens = sum(len(reference.generated_ids) for reference in references)
    decode_s = sum(reference.decode_s for reference in references)
    peak = peak_memory_bytes(target.model.device)
    plain = PlainRecord(
        tokens=tokens,
        tokens_per_s=(tokens - len(references)) / decode_s if decode_s else 0.0,
        decode_s=decode_s,
        peak_memory_bytes=peak,
        num_distinct_tokens=len({token for reference in references for token in reference.generated_ids}),
        costs=_token_costs(target.model, references, decode_s, floor),
    )
    progress("measuring the noise of stock decoding")
    noise = measure_noise(target.model, references)
    return plain, [replace(reference, logits=reference.logits[:0].clone()) for reference in references], noise


def decode_replayed(
    target: Target,
    references: Sequence[Reference],
    noise: Noise | None,
    stop_token_ids: Sequence[int],
    floor: Floor | None,
) -> EntryRecord | None:
    """The baseline that replayed entries have to beat: plain decoding through `make_cache`. None without graphs."""
    model = target.model
    figures, verdicts = Figures(), []
    try:
        with replay_log() as log:
            decode_cached(model, make_cache(model), references[0].prompt_ids, WARM_UP_TOKENS)
        if not log.num_graphs:
            return None
        reset_peak_memory(model.device)
        for number, reference in enumerate(references):
            length = len(reference.generated_ids)
            ids, decode_s = decode_cached(model, make_cache(model), reference.prompt_ids, length, stop_token_ids)
            figures.add(Figures(1, len(ids), decode_s, len(ids) - 1, measured_s={"verify": decode_s}))
            verdicts.append(judge_prompt(model, number, reference, ids, noise, length, 0))
        figures.peak = peak_memory_bytes(model.device)
    except Exception as error:
        return EntryRecord(_REPLAYED, {}, "error", error=describe(error), remedy="run with `--eager`")
    return EntryRecord(
        name=_REPLAYED,
        arguments={},
        verdict=worst([verdict.verdict for verdict in verdicts]),
        tokens=figures.tokens,
        tokens_per_s=figures.after_first / figures.decode_s,
        decode_s=figures.decode_s,
        acceptance_length_mean=1.0,
        acceptance_source="measured",
        rounds=figures.rounds,
        measured_s=figures.measured_s,
        costs=_token_costs(model, references, figures.decode_s, floor),
        peak_memory_bytes=figures.peak,
        prompts=tuple(verdicts),
    )


def _token_costs(
    model: Any, references: Sequence[Reference], decode_s: float, floor: Floor | None
) -> tuple[StageCost, ...]:
    """Of one token after the first of each text."""
    num_tokens = sum(len(reference.generated_ids) - 1 for reference in references)
    if floor is None or not num_tokens:
        return ()
    contexts = [len(reference.prompt_ids) + len(reference.generated_ids) // 2 for reference in references]
    cache = stock_cache(model, references[0].prompt_ids)
    return token_costs(model, cache, sum(contexts) // len(contexts), decode_s / num_tokens, floor)


def is_changed(target: Target, reference: Reference, noise: Noise | None) -> bool:
    """Whether the target gives another text than before, other than at a near-tie."""
    tolerance = TOLERANCE * noise.gap_max if noise else 0.0
    try:
        again = decode_plain(target.model, reference.prompt_ids, min(_CHECK_TOKENS, len(reference.generated_ids)))
    except Exception:
        return True
    pairs = zip(again.generated_ids, reference.generated_ids, reference.top2_gaps, strict=False)
    parting = next((gap for found, expected, gap in pairs if found != expected), None)
    return parting is not None and parting > tolerance
