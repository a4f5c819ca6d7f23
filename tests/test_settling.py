"""An entry whose text leaves the script at a near-tie is timed at the acceptance asked for, and judged as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import qwen3, qwen3_5

from ddaudit.auditor.facts.entries import find_entries
from ddaudit.auditor.reports.run_report import format_run
from ddaudit.runtime.checks.decoding import decode_plain, read_in_blocks
from ddaudit.runtime.models.loading import Target
from ddaudit.runtime.running.run import RunOptions, run
from ddaudit.runtime.running.settling import ties_settled

FORK = Path(__file__).parents[1] / "patched" / "research_repo"
OPTIONS = RunOptions("", drafter="scripted:0.8", device="cpu", max_new_tokens=96, num_prompts=2, checks_state=False)


def noisy(model, scale):
    """As in bfloat16 on a GPU: a forward of several tokens rounds otherwise than one of one, by its shape."""
    rows = {}

    def add_noise(module, args, output):
        length = output.logits.shape[1]
        if length > 1:
            if length not in rows:
                generator = torch.Generator().manual_seed(length)
                rows[length] = scale * torch.randn(output.logits.shape[1:], generator=generator)
            output.logits = output.logits + rows[length]

    model.register_forward_hook(add_noise)
    return model


def decoded(model):
    target = Target(model, None, "tiny", has_random_weights=True, drafter_profile="")
    entries = [entry for entry in find_entries(FORK) if "plain" not in entry.name]
    return run(FORK, entries, [], OPTIONS, target=target)


@pytest.fixture(scope="module")
def exact():
    return decoded(qwen3_5())


def test_where_nothing_is_noisy_the_text_that_is_judged_is_timed(exact):
    chain, tree = exact.entries
    assert [entry.verdict for entry in exact.entries] == ["identical"] * 2
    assert chain.settled is tree.settled is None and "settled" not in format_run(exact)
    assert exact.nominal_acceptance == pytest.approx((1 - 0.8**16) / (1 - 0.8))
    # On average, that is: these are 96 draws, the same for both prompts.
    assert chain.acceptance_length_mean > 0.75 * exact.nominal_acceptance


def test_under_noise_the_acceptance_asked_for_is_what_is_timed(exact):
    """Before, 0.8 came out as 1.0 to 1.2 tokens a round at 27B in bfloat16."""
    record = decoded(noisy(qwen3_5(), 0.05))
    assert record.noise.flip_rate > 0.03
    for entry, undisturbed in zip(record.entries, exact.entries, strict=True):
        assert entry.verdict == "near-tie"
        assert entry.settled.num_prompts == entry.settled.num_equal == 2
        assert entry.settled.bias == pytest.approx(2 * record.noise.gap_max)
        assert entry.settled.acceptance_length_mean < 2.5
        assert entry.acceptance_length_mean == pytest.approx(undisturbed.acceptance_length_mean)
        # The figures of both texts together would be neither's.
        assert entry.tokens == undisturbed.tokens and entry.rounds == undisturbed.rounds
    assert "2 of 2 texts are plain decoding's then" in " ".join(format_run(record).split())


PROMPT = tuple(range(1, 12))


def test_the_bias_moves_one_logit_a_position_and_ends_with_the_block():
    model = qwen3()
    text = decode_plain(model, PROMPT, 20)
    read = list(PROMPT + text.generated_ids)

    def logits(**kwargs):
        with torch.inference_mode():
            return model(torch.tensor([read]), **kwargs).logits[0].clone()

    before = logits()
    expected = before.clone()
    for index, token in enumerate(text.generated_ids):
        expected[len(PROMPT) + index - 1, token] += 0.5
    with ties_settled(model, text, 0.5):
        assert torch.equal(logits(), expected)
        assert torch.equal(logits(position_ids=torch.arange(len(read))[None]), expected)
        assert torch.allclose(logits(logits_to_keep=3), expected[-3:], atol=1e-5)
        # A cache is continued: the positions are those after what it holds.
        blocks = torch.cat(list(read_in_blocks(model, PROMPT, text.generated_ids, 8)))
        chosen = torch.tensor(text.generated_ids)[:, None]
        raised = blocks.gather(1, chosen) - before[len(PROMPT) - 1 : -1].gather(1, chosen)
        assert torch.allclose(raised, torch.full_like(raised, 0.5), atol=1e-3)
    assert torch.equal(logits(), before)


def test_a_wrong_text_stays_wrong():
    """Ties alone are settled: a token behind by more than the bias is chosen no more than before."""
    model = qwen3()
    text = decode_plain(model, PROMPT, 20)
    behind = max(range(20), key=lambda index: text.top2_gaps[index])
    gap = text.top2_gaps[behind]
    lead = torch.tensor([list(PROMPT + text.generated_ids[:behind])])
    with torch.no_grad():
        second = model(lead).logits[0, -1].topk(2).indices[1].item()
        ids = (*text.generated_ids[:behind], second, *text.generated_ids[behind + 1 :])
        other = type(text)(PROMPT, ids, text.top2_gaps, text.logits, 0.0)
        for bias, chosen in ((0.9 * gap, text.generated_ids[behind]), (1.1 * gap, second)):
            with ties_settled(model, other, bias):
                assert model(lead).logits[0, -1].argmax().item() == chosen
