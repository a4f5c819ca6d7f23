"""Verdicts can fail: a wrong token is lossy, a near-tie passes, and a leak does not pass behind a near-tie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import qwen3, qwen3_5

from ddaudit.auditor.record import Noise
from ddaudit.runtime.checks.decoding import decode_plain, read_in_blocks
from ddaudit.runtime.checks.verdict import judge_prompt, measure_noise, worst

PROMPT = tuple(range(1, 12))
LENGTH = 40
QUIET = Noise(100, 1e-6, 1e-5, 1e-6, 5e-6, 0, 0.3)


@pytest.fixture(scope="module")
def model():
    return qwen3()


@pytest.fixture(scope="module")
def reference(model):
    return decode_plain(model, PROMPT, LENGTH, keep_logits=LENGTH)


def judge(model, reference, found, noise=QUIET, shortfall=0):
    return judge_prompt(model, 0, reference, found, noise, LENGTH, shortfall)


def with_choice(model, reference, position, rank=1):
    """The reference's text with the second-best token at one position, then greedy again."""
    text = list(reference.generated_ids)
    second = reference.logits[position].topk(rank + 1).indices[rank].item()
    prefix = PROMPT + tuple(text[:position]) + (second,)
    return (*text[:position], second, *decode_plain(model, prefix, LENGTH - position - 1).generated_ids)


def test_equal_text_is_identical(model, reference):
    verdict = judge(model, reference, reference.generated_ids)
    assert (verdict.verdict, verdict.reason, verdict.divergence) == ("identical", "every token equal", None)


def test_text_past_the_end_is_not_held_against_it(model, reference):
    assert judge(model, reference, (*reference.generated_ids, 1, 2)).verdict == "identical"


def test_a_wrong_token_is_lossy_even_if_all_later_ones_follow_from_it(model, reference):
    verdict = judge(model, reference, with_choice(model, reference, 7))
    assert verdict.verdict == "lossy"
    found = verdict.divergence
    assert found is not None and (found.position, found.expected) == (7, reference.generated_ids[7])
    assert found.gap_reference == pytest.approx(found.gap_own_text, abs=1e-4)
    assert found.context_ids == (PROMPT + reference.generated_ids[:7])[-8:]
    assert verdict.num_not_best == 1


def test_a_gap_within_the_noise_is_a_near_tie(model, reference):
    gap = reference.top2_gaps[7]
    verdict = judge(model, reference, with_choice(model, reference, 7), replace(QUIET, gap_max=gap, num_flips=1))
    assert verdict.verdict == "near-tie"


def test_a_third_best_token_is_not_a_near_tie(model, reference):
    """The top-2 gap is within the noise, the token chosen is not one of the two."""
    third = with_choice(model, reference, 7, rank=2)
    best = reference.logits[7].topk(3).values
    noise = replace(QUIET, gap_max=(best[0] - best[1]).item() * 0.51, num_flips=1)
    assert best[0] - best[2] > 2 * noise.gap_max
    assert judge(model, reference, third, noise).verdict == "lossy"


def test_a_leak_does_not_pass_behind_a_near_tie(model, reference):
    """The first divergence is within the noise; what follows is not what the model would choose."""
    text = with_choice(model, reference, 7)
    noise = replace(QUIET, gap_max=reference.top2_gaps[7], num_flips=1)
    wrong = (*text[:20], *((token + 1) % 101 for token in text[20:]))
    verdict = judge(model, reference, wrong, noise)
    assert verdict.verdict == "lossy" and verdict.num_beyond_noise > 10


def test_under_loud_noise_too_many_strange_choices_are_lossy(model, reference):
    """Where the noise exceeds every gap, only the number of strange choices can tell."""
    loud = replace(QUIET, gap_max=100.0, num_flips=5)
    text = tuple((token + 1) % 101 for token in reference.generated_ids)
    verdict = judge(model, reference, text, loud)
    assert (verdict.verdict, verdict.num_beyond_noise) == ("lossy", 0)
    assert judge(model, reference, with_choice(model, reference, 7), loud).verdict == "near-tie"


@pytest.mark.parametrize(("missing", "shortfall", "verdict"), [(3, 7, "identical"), (8, 7, "lossy"), (1, 0, "lossy")])
def test_short_texts(model, reference, missing, shortfall, verdict):
    found = judge(model, reference, reference.generated_ids[:-missing], shortfall=shortfall)
    assert found.verdict == verdict and f"{missing}" in found.reason


def test_no_text_at_all_is_lossy(model, reference):
    assert judge(model, reference, (), shortfall=100).verdict == "lossy"


@pytest.mark.parametrize("build", [qwen3, qwen3_5])
def test_noise_of_float32_is_far_below_any_gap(build):
    model = build()
    references = [decode_plain(model, prompt, LENGTH, keep_logits=LENGTH) for prompt in (PROMPT, PROMPT[:5])]
    noise = measure_noise(model, references)
    assert noise is not None
    assert noise.num_positions == 2 * 2 * (LENGTH - 1)
    assert 0 < noise.gap_max < 1e-3 < noise.top2_gap_p50
    assert (noise.num_flips, noise.flip_rate) == (0, 0.0)


def test_noise_of_bfloat16_is_seen():
    model = qwen3().bfloat16()
    reference = decode_plain(model, PROMPT, LENGTH, keep_logits=LENGTH)
    noise = measure_noise(model, [reference])
    blocks = torch.cat(list(read_in_blocks(model, PROMPT, reference.generated_ids, 16)))
    assert noise is not None and noise.gap_max > 1e-3
    # A text that parts only where its own bfloat16 blocks would choose otherwise is no worse than a near-tie.
    assert judge(model, reference, tuple(blocks.argmax(1).tolist()), noise).verdict in ("identical", "near-tie")


def test_no_noise_without_two_choices(model):
    assert measure_noise(model, [decode_plain(model, PROMPT, 1, keep_logits=1)]) is None


def test_worst():
    assert worst(["identical", "near-tie"]) == "near-tie"
    assert worst(["lossy", "near-tie"]) == "lossy"
    assert worst([]) == "error"
