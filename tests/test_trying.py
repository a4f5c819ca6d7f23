"""Profiles answer from facts what the class itself answers when tried: the two agree, and only trying refutes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from ddaudit.auditor.claim import Answer, Ask, Claim, Outcome  # noqa: E402 - torch may be missing
from ddaudit.auditor.cli import main  # noqa: E402
from ddaudit.auditor.finding import Confidence, Finding, Severity, Span, Status  # noqa: E402
from ddaudit.auditor.profile import FOLDER, load_profile  # noqa: E402
from ddaudit.auditor.targets.targeting import answers_of  # noqa: E402
from ddaudit.auditor.targets.verifying import verified  # noqa: E402
from ddaudit.runtime.probing.trying import try_on  # noqa: E402

CLAIMS = (
    *(Claim(Ask.PATH, path) for path in ("model.embed_tokens", "model.layers", "transformer.h", "model.decoder")),
    Claim(Ask.PATH, "model.language_model.norm"),
    *(Claim(Ask.HEAD, path) for path in ("lm_head", "embed_out")),
    *(Claim(Ask.CONFIG, name) for name in ("hidden_size", "num_hidden_layers", "n_embd", "vocab_size")),
    Claim(Ask.CONFIG_OR_DEFAULT, "use_cache"),
    *(Claim(ask) for ask in (Ask.BARE_CACHE, Ask.CROP_LENGTH, Ask.ROLLBACK, Ask.TREE_MASK, Ask.CACHE_PAIRS)),
    *(Claim(ask) for ask in (Ask.LAYER_KEYS, Ask.LAYER_STATE)),
    *(Claim(Ask.LAYER_PART, name) for name in ("self_attn", "mlp")),
    Claim(Ask.CACHE_NAME, "key_cache"),
    *(Claim(Ask.KEYWORD, name) for name in ("past_key_values", "cache_position")),
)
TARGETS = ("qwen3.6-27b", "gpt2", "gemma-2-2b", "lfm2-1.2b", "mamba-2", "falcon-h1", "biogpt")


@pytest.mark.parametrize("target", TARGETS)
def test_facts_and_the_class_agree(target: str) -> None:
    tried = try_on(target, CLAIMS)
    compared = 0
    for claim in CLAIMS:
        for name, answer in answers_of(claim, load_profile(target)).items():
            if name in tried[claim]:
                assert (claim, name, answer.outcome) == (claim, name, tried[claim][name].outcome), tried[claim][name]
                compared += 1
    # BioGPT runs no token without numbers, and says nothing of its cache.
    assert compared >= 14


PARTS = {
    Claim(Ask.WEIGHT, "model.embed_tokens.weight"): ("works raises", "raises"),
    Claim(Ask.WEIGHT, "transformer.h.*.attn.c_attn.weight"): ("raises raises", "works"),
    Claim(Ask.WEIGHT, "lm_head.weight"): ("works works", "works"),
    Claim(Ask.LAYER_TUPLE): ("silently wrong silently wrong", "silently wrong"),
    Claim(Ask.LAYER_ALONE): ("raises raises", "works"),
    Claim(Ask.FIRST_STATE): ("silently wrong silently wrong", "silently wrong"),
    Claim(Ask.LAYER_NAMED, "mlp"): ("works works", "works"),
    Claim(Ask.LAYER_NAMED, "q_proj"): ("silently wrong silently wrong", "silently wrong"),
    Claim(Ask.CLASS, "LlamaForCausalLM|GPT2LMHeadModel"): ("silently wrong silently wrong", "works"),
    Claim(Ask.CLASS, "PreTrainedModel"): ("works works", "works"),
    Claim(Ask.FIRST_LIST): ("works silently wrong", "works"),
    Claim(Ask.MASK_ATTRIBUTE, "tree_mask"): ("silently wrong silently wrong", "silently wrong"),
    Claim(Ask.OUTPUT_FIELD, "past_key_values"): ("works works", "works"),
    Claim(Ask.OUTPUT_FIELD, "no_such_field"): ("raises raises", "raises"),
    Claim(Ask.TEMPLATE_IDS): ("silently wrong silently wrong", "silently wrong"),
    Claim(Ask.ATTENTION, "no_such_attention"): ("raises raises", "raises"),
    Claim(Ask.CONFIG, "rope_theta"): ("raises raises", "raises"),
    Claim(Ask.PATH, "greedy_search"): ("raises raises", "raises"),
    # Of the drafter that is made for the target; none is known for GPT-2.
    Claim(Ask.MASK_TOKEN): ("silently wrong silently wrong", ""),
    Claim(Ask.NON_CAUSAL): ("silently wrong silently wrong", ""),
}


@pytest.mark.parametrize(("target", "place"), [("qwen3.6-27b", 0), ("gpt2", 1)])
def test_parts_and_tensors_are_tried(target: str, place: int) -> None:
    tried = try_on(target, PARTS)
    outcomes = {claim: " ".join(tried[claim][name].outcome.value for name in sorted(tried[claim])) for claim in PARTS}
    assert outcomes == {claim: expected[place] for claim, expected in PARTS.items()}


def test_a_machine_without_cuda_confirms_that_waiting_for_it_raises() -> None:
    import torch

    tried = try_on("gpt2", [Claim(Ask.SYNCHRONIZE)])[Claim(Ask.SYNCHRONIZE)]
    if torch.cuda.is_available():
        assert tried == {}
    else:
        assert tried["GPT2LMHeadModel"].outcome is Outcome.RAISES


def test_every_kind_of_claim_can_be_tried() -> None:
    """A kind without a way to try it would end `--verify` with an error."""
    assert set(try_on("gpt2", [Claim(ask, "a.b") for ask in Ask])) == {Claim(ask, "a.b") for ask in Ask}


def test_an_import_is_tried() -> None:
    there, gone = (
        Claim(Ask.IMPORT, "transformers.DynamicCache"),
        Claim(Ask.IMPORT, "transformers.AutoModelForVision2Seq"),
    )
    tried = try_on("gpt2", [there, gone])
    assert tried[there]["GPT2LMHeadModel"].outcome is Outcome.WORKS
    assert tried[gone]["GPT2LMHeadModel"].outcome is Outcome.RAISES


def finding(severity: Severity, claim: Claim | None) -> Finding:
    return Finding(
        "DDA201", "model-path", "model-path", "a.py", Span(0, 1, 1, 1, 1, 2), "x", "m", severity,
        Confidence.PROVEN, (), claim=claim,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("severity", "outcome", "status"),
    [
        (Severity.ERROR, Outcome.RAISES, Status.CONFIRMED),
        (Severity.ERROR, Outcome.WORKS, Status.REFUTED),
        (Severity.SILENT, Outcome.WORKS, Status.REFUTED),
        (Severity.PORT, Outcome.DEPENDS, Status.CONFIRMED),
        (Severity.PORT, Outcome.WORKS, Status.CONFIRMED),
        (Severity.WARN, Outcome.WORKS, Status.CONFIRMED),
    ],
)
def test_what_trying_comes_to(severity: Severity, outcome: Outcome, status: Status) -> None:
    """A line that works on the target is still one to port where another architecture has no such path."""
    claim = Claim(Ask.PATH, "model.embed_tokens")
    found = verified(finding(severity, claim), {claim: {"Any": Answer(outcome)}}).verified
    assert found is not None and found.status is status


def test_what_cannot_be_tried_says_so() -> None:
    bare = finding(Severity.ERROR, None)
    silent = replace(bare, claim=Claim(Ask.BARE_CACHE))
    for each, tried in ((bare, {}), (silent, {Claim(Ask.BARE_CACHE): {}})):
        found = verified(each, tried).verified
        assert found is not None and found.status is Status.NOT_TESTABLE
        assert found.reason


def write(folder: Path, body: str) -> str:
    (folder / "a.py").write_text(f"from transformers import DynamicCache, PreTrainedModel\n\n{body}")
    return str(folder)


def test_scan_says_what_was_confirmed(tmp_path: Path) -> None:
    folder = write(tmp_path, "def embed(model: PreTrainedModel, ids):\n    return model.model.embed_tokens(ids)\n")
    shown = CliRunner().invoke(main, ["scan", folder, "--verify", "--format", "json"])
    assert shown.exit_code == 1, shown.output
    record = json.loads(shown.stdout)
    assert [each["verified"] for each in record["findings"]] == ["confirmed"]
    assert "Qwen3_5Model" in record["findings"][0]["verified_reason"]
    assert record["notes"] == []
    assert 0 < record["neutrality"]["score"] < 1


def test_a_refuted_finding_is_a_note_and_does_not_count(tmp_path: Path) -> None:
    """A profile whose facts are wrong: the class itself has the last word."""
    folder = write(tmp_path, "def embed(model: PreTrainedModel, ids):\n    return model.transformer.wte(ids)\n")
    data = json.loads((FOLDER / "gpt2.json").read_text())
    modules = data["facts"]["classes"][0]["modules"]
    data["facts"]["classes"][0]["modules"] = [name for name in modules if name != "transformer.wte"]
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    arguments = ["scan", folder, "--target", str(tmp_path / "wrong.json")]
    assert CliRunner().invoke(main, arguments).exit_code == 1
    shown = CliRunner().invoke(main, [*arguments, "--verify"])
    assert shown.exit_code == 0, shown.output
    assert "refuted" in shown.output
    assert "0 findings" in shown.output


def test_fix_shows_neutrality_before_and_after(tmp_path: Path) -> None:
    folder = write(tmp_path, "def embed(model: PreTrainedModel, ids):\n    return model.model.embed_tokens(ids)\n")
    shown = CliRunner().invoke(main, ["fix", folder, "--check", "--verify"])
    assert "tried: 1 confirmed" in shown.output, shown.output
    before, after = (line for line in shown.output.splitlines() if line.startswith("neutrality"))
    assert after.startswith("neutrality after:  100%")
    assert not before.startswith("neutrality before: 100%")
