"""Is an entry's text what the model alone would have written? Judged against noise measured in the same run.

One token and many tokens use different kernels, so in reduced precision two correct texts may part where the two
best tokens are nearly level. `near-tie` is given for that alone: the gap at the parting is within the noise, and
so is every later choice, read back by the stock model from the entry's own text. A state leak may begin at a near
tie, yet cannot go on choosing tokens that the model itself would choose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.record import VERDICTS, Divergence, Noise, PromptVerdict
from ddaudit.runtime.checks.decoding import Reference, read_in_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOLERANCE = 2.0
"""Gaps count as within the noise up to this multiple of the largest one measured: a run judges more choices than
it measures, and a fork's kernels may round a little more than stock ones."""
NOISE_BLOCK = 16
CONTEXT_TOKENS = 8
_FLIP_MARGIN = 1.25
_FLIP_SIGMAS = 4.0


def measure_noise(model: Any, references: Sequence[Reference]) -> Noise | None:
    """Stock against stock: the reference text in blocks of 16 and in one, against its own single steps.

    Only the choices whose logits the references keep are used.
    """
    relative, gap_changes, gaps, flips = [0.0], [], [], 0
    for reference in references:
        single = reference.logits
        if len(single) < 2:
            continue
        best = single.topk(2)
        gap = best.values[:, 0] - best.values[:, 1]
        text = reference.generated_ids[: len(single)]
        for block_size in (NOISE_BLOCK, len(text)):
            blocks = torch.cat(list(read_in_blocks(model, reference.prompt_ids, text, block_size)))
            # The prompt's own forward is the same in both, and says nothing.
            relative.append(((blocks - single)[1:].norm() / single[1:].norm()).item())
            block_gap = blocks.gather(1, best.indices)
            gap_changes.append((gap - (block_gap[:, 0] - block_gap[:, 1])).abs()[1:])
            gaps.append(gap[1:])
            flips += int((blocks.argmax(1) != best.indices[:, 0])[1:].sum())
    if not gap_changes:
        return None
    changes, all_gaps = torch.cat(gap_changes), torch.cat(gaps)
    return Noise(
        num_positions=len(changes),
        logits_relative=max(relative),
        gap_max=changes.max().item(),
        gap_p50=changes.median().item(),
        gap_p99=changes.quantile(0.99).item(),
        num_flips=flips,
        top2_gap_p50=all_gaps.median().item(),
    )


def judge_prompt(
    model: Any,
    prompt: int,
    reference: Reference,
    found_ids: Sequence[int],
    noise: Noise | None,
    max_new_tokens: int,
    allowed_shortfall: int,
    decode: Callable[[list[int]], str] | None = None,
) -> PromptVerdict:
    """Compare the ids that an entry generated for one prompt with plain decoding. `decode` makes text of ids."""
    expected = reference.generated_ids
    shared = min(len(expected), len(found_ids))
    first = next((i for i in range(shared) if expected[i] != found_ids[i]), None)
    if first is None:
        return _judge_length(prompt, expected, found_ids, max_new_tokens, allowed_shortfall)
    behind = _behind_best(model, reference.prompt_ids, found_ids, first)
    tolerance = TOLERANCE * noise.gap_max if noise else 0.0
    context_ids = (reference.prompt_ids + expected[:first])[-CONTEXT_TOKENS:]
    shown = (list(context_ids), [expected[first]], [found_ids[first]])
    texts = [decode(ids) for ids in shown] if decode else ["", "", ""]
    divergence = Divergence(
        prompt=prompt,
        position=first,
        expected=expected[first],
        found=found_ids[first],
        gap_reference=reference.top2_gaps[first],
        gap_own_text=behind[0],
        context_ids=context_ids,
        context_text=texts[0],
        expected_text=texts[1],
        found_text=texts[2],
    )
    num_beyond = sum(gap > tolerance for gap in behind)
    num_not_best = sum(gap > 0 for gap in behind)
    limit = most_flips(noise, len(behind))
    within = f"within {tolerance:.2g}, {TOLERANCE:g} times the largest stock noise"
    if divergence.gap_reference > tolerance:
        verdict, reason = "lossy", f"gap {divergence.gap_reference:.3g} at the first divergence is not {within}"
    elif num_beyond:
        verdict, reason = "lossy", f"{num_beyond} of {len(behind)} later choices are not {within}"
    elif num_not_best > limit:
        verdict = "lossy"
        reason = f"{num_not_best} of {len(behind)} later choices are not the model's best, noise explains {limit:.0f}"
    else:
        verdict, reason = "near-tie", f"gap {divergence.gap_reference:.3g} at the first divergence is {within}"
    return PromptVerdict(prompt, verdict, len(found_ids), reason, divergence, num_beyond, num_not_best)


def worst(verdicts: Sequence[str]) -> str:
    """The worst of several verdicts; `error` for none at all."""
    return max(verdicts, key=VERDICTS.index, default="error")


def _judge_length(
    prompt: int, expected: Sequence[int], found: Sequence[int], max_new_tokens: int, allowed_shortfall: int
) -> PromptVerdict:
    """Equal as far as both go. A loop may count a round's tokens differently, so a few less than asked for pass."""
    wanted = min(len(expected), max_new_tokens)
    missing = wanted - len(found)
    if missing > allowed_shortfall or not found:
        return PromptVerdict(prompt, "lossy", len(found), f"stops {missing} of {wanted} tokens short")
    reason = f"equal, though {missing} tokens short" if missing > 0 else "every token equal"
    return PromptVerdict(prompt, "identical", len(found), reason)


def _behind_best(model: Any, prompt_ids: Sequence[int], text_ids: Sequence[int], first: int) -> list[float]:
    """For each token of a text from index `first` on: how far its logit is behind the best, read by stock code."""
    behind: list[float] = []
    # Block by block: the logits of a long text over a large vocabulary do not fit beside the model.
    for logits in read_in_blocks(model, prompt_ids, text_ids, NOISE_BLOCK):
        chosen = torch.tensor(list(text_ids[len(behind) : len(behind) + len(logits)]), device=logits.device)
        behind += (logits.max(1).values - logits.gather(1, chosen[:, None])[:, 0]).tolist()
    return behind[first:]


def most_flips(noise: Noise | None, num_choices: int) -> float:
    """How many choices other than the model's best the noise explains: its own flip rate with a margin."""
    rate = min(1.0, _FLIP_MARGIN * noise.flip_rate) if noise else 0.0
    return rate * num_choices + _FLIP_SIGMAS * math.sqrt(rate * (1 - rate) * num_choices + 1 / 4)
