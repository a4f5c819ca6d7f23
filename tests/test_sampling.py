"""The chi-square test of sampled tokens can fail: wrong temperatures, acceptance rules and states are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_models import qwen3

from ddaudit.auditor.cli import main
from ddaudit.auditor.facts.entries import find_entries
from ddaudit.auditor.record import RunRecord
from ddaudit.auditor.reports.run_report import format_run
from ddaudit.runtime.checks.sampling import CONTROL, SampleTally, survival
from ddaudit.runtime.running.binding import sampling_temperature
from ddaudit.runtime.running.run import RunOptions, run

FORK = Path(__file__).parents[1] / "patched" / "research_repo"
ENTRY = "sampled:generate"
VOCABULARY = 101

# Draws at every place of the block and keeps drafts by the rule in braces. No cache: right on any architecture.
SAMPLED = """
import torch

def sample(logits, temperature):
    return torch.multinomial((logits / temperature).softmax(-1).flatten(0, -2), 1).view(logits.shape[:-1])

@torch.no_grad()
def generate(target, drafter, input_ids, max_new_tokens, block_size, mask_token_id, temperature):
    ids = torch.cat([input_ids, sample(target(input_ids, use_cache=False).logits[:, -1:], temperature)], 1)
    end = input_ids.shape[1] + max_new_tokens
    while ids.shape[1] < end:
        start = ids.shape[1] - 1
        block = torch.full((1, block_size), mask_token_id)
        block[:, 0] = ids[:, -1]
        hidden = drafter(
            noise_embedding=target.get_input_embeddings()(block),
            position_ids=torch.arange(start, start + block_size)[None],
            target_hidden=None,
        )
        block[:, 1:] = target.get_output_embeddings()(hidden[:, 1:]).argmax(-1)
        logits = target(torch.cat([ids[:, :-1], block], 1), use_cache=False).logits[:, start:]
        choice = sample(logits, temperature)
        agree = {rule}
        accepted = int(agree.long().cumprod(1).sum())
        ids = torch.cat([ids, block[:, 1 : accepted + 1], choice[:, accepted : accepted + 1]], 1)
    return ids[:, :end]
"""
EXACT_MATCH = "block[:, 1:] == choice[:, :-1]"
IN_TOP_K = "(logits[:, :-1].topk(4).indices == block[:, 1:, None]).any(-1)"

# The well-known patch, sampling: keys and values are cut, a recurrent layer keeps what was rejected.
LEAK = """
import torch
from transformers import DynamicCache

@torch.no_grad()
def generate(target, input_ids, max_new_tokens, temperature=0.0):
    cache = DynamicCache(config=target.config)
    out, length, step = [], 0, input_ids
    for _ in range(max_new_tokens):
        length += step.shape[1]
        wrong = torch.zeros(1, 1, dtype=torch.long)
        fed = torch.cat([step, wrong], 1)
        logits = target(fed, past_key_values=cache, use_cache=True).logits[:, -2]
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        step = torch.multinomial((logits / temperature).softmax(-1), 1)
        out.append(step)
    return torch.cat(out, 1)

def greedy(target, input_ids, max_new_tokens):
    for _ in range(max_new_tokens):
        input_ids = torch.cat([input_ids, target(input_ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return input_ids

def short(target, input_ids, max_new_tokens, temperature=0.0):
    return input_ids
"""


def drawn(logits, temperature):
    return torch.multinomial((logits.double() / temperature).softmax(1), 1)[:, 0].tolist()


def random_logits(length, seed, spread=2.0):
    return spread * torch.randn(length, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def tally_of(length, seed=0, temperature=0.8, drawn_at=None):
    torch.manual_seed(seed)
    tally = SampleTally(temperature)
    logits = random_logits(length, seed)
    tally.count(logits, logits, drawn(logits, drawn_at or temperature))
    return tally


@pytest.mark.parametrize(("statistic", "degrees", "p"), [(3.8415, 1, 0.05), (18.307, 10, 0.05), (45.315, 20, 0.001)])
def test_survival_is_that_of_the_tables(statistic, degrees, p):
    assert survival(statistic, degrees) == pytest.approx(p, rel=1e-3)


def test_at_a_single_place_it_is_pearsons_test():
    """Four tokens of chances 0.4, 0.3, 0.2, 0.1, drawn 200 times."""
    chances = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    counts = torch.tensor([90, 50, 42, 18])
    tally = SampleTally(1.0)
    logits = chances.log().expand(200, -1)
    tally.count(logits, logits, torch.arange(4).repeat_interleave(counts).tolist())
    expected = 200 * chances
    test = tally.test()
    assert test.num_cells == 4 and test.num_samples == 200
    assert test.statistic == pytest.approx(float(((counts - expected) ** 2 / expected).sum()))


def test_right_tokens_look_wrong_as_often_as_they_should():
    """Pearson's own statistic over different places would stay below 5 % far too often."""
    p_values = torch.tensor([tally_of(300, seed).test().p_value for seed in range(300)])
    assert 0.03 < (p_values < 0.05).double().mean() < 0.07
    assert 0.42 < (p_values < 0.5).double().mean() < 0.58


def test_right_tokens_preserve_the_distribution_and_the_control_fails():
    test = tally_of(2000).test()
    assert test.verdict == "distribution-preserving" and test.control_p_value < 1e-4 < 0.01 < test.p_value
    assert (test.num_samples, test.num_more) == (2000, 0)
    assert test.control_temperature == pytest.approx(CONTROL * test.temperature)


@pytest.mark.parametrize("drawn_at", [0.68, 0.92])
def test_another_temperature_is_biased(drawn_at):
    assert tally_of(2000, drawn_at=drawn_at).test().verdict == "biased"


def test_too_few_samples_are_inconclusive_and_the_number_named_is_enough():
    few = tally_of(150).test()
    assert few.verdict == "inconclusive" and 100 < few.num_more < 3000
    enough = [tally_of(few.num_samples + few.num_more, seed).test().verdict for seed in range(20)]
    assert enough.count("distribution-preserving") >= 17


def test_a_distribution_without_choice_never_becomes_conclusive():
    logits = torch.zeros(500, VOCABULARY)
    logits[:, 7] = 1000.0
    tally = SampleTally(1.0)
    tally.count(logits, logits, [7] * 500)
    test = tally.test()
    assert (test.verdict, test.num_more) == ("inconclusive", None)


def test_no_tokens_are_inconclusive():
    assert SampleTally(1.0).test().verdict == "inconclusive"


def test_rounding_of_the_readings_is_no_bias():
    """With ranks and chances from one reading, rounding makes the best token look likelier than it is."""
    generator = torch.Generator().manual_seed(30)
    torch.manual_seed(31)
    truth = random_logits(3000, 3, spread=1.0)

    def reading():
        return truth + 0.4 * torch.randn(truth.shape, generator=generator)

    tokens = drawn(reading(), 0.8)
    two, one = SampleTally(0.8), SampleTally(0.8)
    two.count(reading(), reading(), tokens)
    logits = reading()
    one.count(logits, logits, tokens)
    assert two.test().verdict == "distribution-preserving"
    assert one.test().verdict == "biased"


def test_a_text_is_read_where_it_stands():
    model = qwen3()
    prompt = tuple(range(3, 14))
    text: list[int] = []
    torch.manual_seed(0)
    tally = SampleTally(0.7)
    for _ in range(60):
        text = []
        for _ in range(20):
            logits = model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[:, -1]
            text += drawn(logits.detach(), 0.7)
        tally.read(model, prompt, text)
    assert tally.num_samples == 1200 and tally.test().verdict == "distribution-preserving"
    shifted = SampleTally(0.7)
    for _ in range(60):
        shifted.read(model, prompt, text[1:])
    assert shifted.test().verdict == "biased"


def invoke(folder, *arguments):
    path = folder / "record.json"
    options = ["--model", "tiny-hybrid", "--random-weights", "--device", "cpu", "--max-new-tokens", "24"]
    result = CliRunner().invoke(main, ["run", str(folder), *options, "--json", str(path), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    record = RunRecord.from_json(json.loads(path.read_text())) if path.exists() else None
    return result.exit_code, result.output, record


@pytest.mark.parametrize(
    ("rule", "samples", "verdict", "code"),
    [(EXACT_MATCH, 800, "distribution-preserving", 0), (IN_TOP_K, 200, "biased", 1)],
    ids=["exact match", "in top k"],
)
def test_a_rule_of_acceptance_is_judged(tmp_path, rule, samples, verdict, code):
    """Keeping a draft because it is among the likeliest tokens is the usual shortcut, and shifts the distribution."""
    (tmp_path / "sampled.py").write_text(SAMPLED.replace("{rule}", rule))
    found, output, record = invoke(tmp_path, "--temperature", "0.5", "--samples", str(samples), "--entry", ENTRY)
    entry = record.entries[0]
    assert (entry.verdict, found) == (verdict, code), output
    assert entry.acceptance_length_mean > 1.2
    assert entry.prompts == () and entry.sampling.temperature == 0.5 == record.temperature
    assert f"sampling: {verdict}: chi-square" in output and ", temperature 0.5" in output


def test_a_trace_of_rejected_tokens_biases_what_is_sampled(tmp_path):
    (tmp_path / "sampled.py").write_text(LEAK)
    code, output, record = invoke(tmp_path, "--temperature", "1", "--samples", "400", "--entry", ENTRY)
    assert (code, record.entries[0].verdict) == (1, "biased"), output


def test_an_entry_without_temperature_stays_greedy(tmp_path):
    (tmp_path / "sampled.py").write_text(SAMPLED.replace("{rule}", EXACT_MATCH))
    (tmp_path / "others.py").write_text(LEAK)
    options = ["--temperature", "1", "--samples", "90"]
    code, output, record = invoke(tmp_path, *options, "--entry", "others:greedy", "--entry", ENTRY)
    greedy, sampled = record.entries
    assert (greedy.verdict, greedy.sampling) == ("identical", None)
    # Too few to tell is not a pass.
    assert (sampled.verdict, code) == ("inconclusive", 2)
    assert f"--samples {sampled.sampling.num_samples + sampled.sampling.num_more}" in " ".join(output.split())
    code, output, _ = invoke(tmp_path, *options, "--entry", "others:greedy")
    assert code == 2 and "no entry takes the temperature 1" in output


def test_a_sampled_text_that_stops_at_once_is_lossy(tmp_path):
    (tmp_path / "sampled.py").write_text(LEAK)
    _, output, record = invoke(tmp_path, "--temperature", "1", "--entry", "sampled:short")
    assert "stops 16 of 16 tokens short" in output and record.entries[0].prompts[0].verdict == "lossy"


def test_a_temperature_passed_to_an_entry_is_judged_too():
    assert sampling_temperature(("ids", "temperature"), {"temperature": 0.7}, 0.0) == 0.7
    assert sampling_temperature(("ids", "temp"), {}, 0.5) == 0.5
    assert sampling_temperature(("ids", "temp"), {"temp": 0}, 0.5) == 0.0
    assert sampling_temperature(("ids",), {}, 0.5) == 0.0


def test_the_forks_walks_preserve_the_distribution():
    """Chain and tree of the sample's fork, at a temperature at which drafts are accepted."""
    entries = [entry for entry in find_entries(FORK) if "plain" not in entry.name]
    options = RunOptions("tiny-hybrid", random_weights=True, device="cpu", temperature=0.5, samples=800)
    record = run(FORK, entries, (), options)
    assert {entry.verdict for entry in record.entries} == {"distribution-preserving"}
    assert all(entry.acceptance_length_mean > 1.25 for entry in record.entries)
    assert record.exit_code == 0 and record.state_check.verdict == "agree"
    assert "Every entry samples as the target alone would" in format_run(record)
    assert RunRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
