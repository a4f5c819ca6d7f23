"""Plain decoding of a run's prompts, and whether the target still decodes as it did."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ddaudit.auditor.record import PlainRecord
from ddaudit.runtime.checks.decoding import Reference, decode_plain
from ddaudit.runtime.checks.verdict import TOLERANCE, measure_noise
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models.architecture import stop_token_ids, text_config
from ddaudit.runtime.running.metering import peak_memory_bytes, reset_peak_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddaudit.auditor.record import Noise
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
