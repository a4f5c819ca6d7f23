"""The state check can fail: a trace of rejected tokens shows, rounding does not, and a refusal has its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import EXACT, qwen3

from ddaudit.auditor.record import Noise, RunRecord, StateCheck
from ddaudit.auditor.reports.run_report import format_run
from ddaudit.runtime.caches.recurrent import SteppedWindow
from ddaudit.runtime.caches.window import ROOT, Window
from ddaudit.runtime.checks import invariance
from ddaudit.runtime.checks.decoding import decode_plain
from ddaudit.runtime.checks.invariance import check_state, plan_rounds
from ddaudit.runtime.checks.verdict import measure_noise
from ddaudit.runtime.models.architectures import build_tiny

PROMPTS = (tuple(range(3, 14)), tuple(range(20, 40)))
QUIET = Noise(100, 1e-6, 1e-5, 1e-6, 5e-6, 0, 0.3)


def references(model, length=48, keep_logits=0):
    return [decode_plain(model, prompt, length, keep_logits=keep_logits) for prompt in PROMPTS]


@pytest.mark.parametrize("name", list(EXACT))
def test_two_patterns_of_the_same_text_agree(name):
    model = EXACT[name]()
    check = check_state(model, references(model), QUIET)
    assert (check.verdict, check.reason, check.num_positions) == ("agree", "", 96)
    assert check.num_rejected > 20 and check.logits_relative < 1e-5 and check.position is not None


def test_rounds_are_bounded_however_long_the_text():
    """At 27B size in eager mode a round costs 0.13 s."""
    model = qwen3()
    many = references(model, length=400) * 2
    check = check_state(model, many, QUIET)
    assert check.num_positions == 384
    assert check.verdict == "agree" and 30 <= check.num_rounds <= 55


def test_reduced_precision_is_judged_by_the_noise_of_the_run():
    model = qwen3().bfloat16()
    texts = references(model, length=150, keep_logits=150)
    noise = measure_noise(model, texts)
    assert noise is not None
    check = check_state(model, texts, noise)
    assert (check.verdict, check.reason) == ("agree", "") and check.logits_relative > 1e-3
    assert check_state(model, texts, QUIET).verdict == "differ"


def commit_one_more(commit, self, path):
    """Carry the state over the node after the path too, if there is one."""
    commit(self, (*path, path[-1] + 1) if path[-1] + 1 < self.window.length else path)


def leaky(monkeypatch):
    monkeypatch.setattr(SteppedWindow, "commit", partial_method(commit_one_more, SteppedWindow.commit))
    return build_tiny("lfm2")


def partial_method(faulty, stock):
    return lambda *args: faulty(stock, *args)


def test_a_rejected_token_in_the_state_shows_and_says_where(monkeypatch):
    model = leaky(monkeypatch)
    check = check_state(model, references(model), QUIET)
    assert check.verdict == "differ" and check.num_flips > 2 and "beyond" in check.reason
    assert check.prompt in (0, 1) and 0 <= check.position < 48


def test_a_fault_that_flips_nothing_still_shows_in_the_logits(monkeypatch):
    model = leaky(monkeypatch)
    loud = replace(QUIET, gap_max=100.0, num_flips=60)
    check = check_state(model, references(model), loud)
    assert check.verdict == "differ" and "logits differ by" in check.reason
    # More flips than stock decoding's are a fault, whatever the size of each.
    check = check_state(model, references(model), replace(loud, num_flips=0))
    assert check.verdict == "differ" and "noise explains 2" in check.reason


def test_logits_that_are_no_numbers_differ(monkeypatch):
    model = qwen3()
    texts = references(model)
    read = invariance._read

    def broken(*args):
        for number, logits in enumerate(read(*args)):
            yield logits * float("nan") if number else logits

    monkeypatch.setattr(invariance, "_read", broken)
    assert check_state(model, texts, QUIET).verdict == "differ"


def test_a_model_that_the_runtime_refuses_is_not_checked():
    model = build_tiny("recurrent_gemma")
    check = check_state(model, [], QUIET)
    assert check.verdict == "not checked" and "keeps a recurrent state outside" in check.reason
    record = RunRecord("1", "3", "2", "5", "f", "cpu", "float32", "m", "d", 0, 1, (1,), None, None, (),
                       state_check=check)  # fmt: skip
    assert f"state     not checked: {check.reason}\n" in format_run(record)


def test_a_model_that_takes_no_tree_is_checked_with_chains():
    """MPT counts places in the cache, where the branches of a tree stand behind each other."""
    model = build_tiny("mpt")
    check = check_state(model, references(model), QUIET)
    assert (check.verdict, check.num_positions) == ("agree", 96)


def test_no_text_is_nothing_to_check():
    assert check_state(qwen3(), [], QUIET).verdict == "not checked"


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("length", [1, 5, 100])
def test_a_plan_keeps_the_text_and_rejects_what_is_wrong(trees, length):
    text = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for seed in range(20):
        rounds = plan_rounds(text, 8, 50, seed, trees)
        assert [each.tokens[node] for each in rounds for node in each.kept] == text
        after = 0
        for each in rounds:
            window = Window(0, len(each.tokens), each.parents)
            window.check_path(each.kept)
            after += len(each.kept)
            last = each.kept[-1]
            hung = [token for token, parent in zip(each.tokens, each.parents, strict=True) if parent == last]
            # What follows the kept path is never the text's next token: it would have been accepted.
            assert after == length or text[after] not in hung
            assert trees or window.is_chain
    assert not trees or length == 1 or any(each.parents.count(ROOT) > 1 for each in rounds)


@pytest.mark.parametrize(("verdict", "code"), [("agree", 0), ("not checked", 0), ("differ", 1), ("error", 2)])
def test_the_exit_code_knows_the_state(verdict, code):
    from ddaudit.auditor.record import EntryRecord

    check = StateCheck(verdict, "why", num_patterns=2, num_positions=9, num_flips=1, prompt=0, position=3)
    entries = (EntryRecord("e", {}, "identical"),)
    record = RunRecord("1", "3", "2", "5", "f", "cpu", "float32", "m", "d", 0, 1, (1,), None, None, entries,
                       state_check=check)  # fmt: skip
    assert record.exit_code == code
    assert ("token for token" in format_run(record)) == (code == 0)
    assert RunRecord.from_json(record.to_json()) == record
