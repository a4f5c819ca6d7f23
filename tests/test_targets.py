"""Severities and messages follow the profile that is asked for; nothing here needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ddaudit.auditor.claim import Ask, Claim, Outcome
from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.profile import load_profile, profile_names
from ddaudit.auditor.sources.source import SourceFile
from ddaudit.auditor.targets.judging import judge
from ddaudit.auditor.targets.targeting import neutrality, reach

if TYPE_CHECKING:
    from pathlib import Path

    from ddaudit.auditor.finding import Finding

EMBED = "def embed(model: PreTrainedModel, ids):\n    return model.model.embed_tokens(ids)\n"
HEAD = "def logits(model: PreTrainedModel, hidden):\n    return model.lm_head(hidden)\n"
WIDTH = "def width(model: PreTrainedModel):\n    return model.config.hidden_size\n"
OLD_WIDTH = "def width(model: PreTrainedModel):\n    return model.config.n_embd\n"
BARE = "def run(model: PreTrainedModel, ids):\n    return model(ids, cache=DynamicCache())\n"
CROP = "def back(cache: DynamicCache, n):\n    cache.crop(n)\n"


def only_finding(code: str, *targets: str) -> Finding:
    text = f"from transformers import DynamicCache, PreTrainedModel\n\n{code}"
    [finding] = scan_sources({"a.py": SourceFile("a.py", text)}, targets=targets).findings
    return finding


@pytest.mark.parametrize(
    ("code", "target", "severity"),
    [
        (EMBED, "qwen3.6-27b", Severity.PORT),
        (EMBED, "gpt2", Severity.ERROR),
        (EMBED, "qwen3-vl", Severity.ERROR),
        (EMBED, "llama-3-8b", Severity.PORT),
        (HEAD, "qwen3.6-27b", Severity.PORT),
        (HEAD, "biogpt", Severity.ERROR),
        (HEAD, "gemma-2-2b", Severity.SILENT),
        (WIDTH, "qwen3.6-27b", Severity.PORT),
        (WIDTH, "gemma-3-4b", Severity.ERROR),
        (OLD_WIDTH, "qwen3.6-27b", Severity.ERROR),
        (OLD_WIDTH, "gpt2", Severity.PORT),
        (BARE, "qwen3.6-27b", Severity.ERROR),
        (BARE, "jamba", Severity.ERROR),
        (BARE, "llama-3-8b", Severity.PORT),
        (CROP, "llama-3-8b", Severity.ERROR),
    ],
)
def test_severity_follows_the_target(code: str, target: str, severity: Severity) -> None:
    assert only_finding(code, target).severity is severity


def test_without_a_target_it_is_the_default_one() -> None:
    assert only_finding(EMBED) == only_finding(EMBED, "qwen3.6-27b")


def test_the_message_names_the_class_and_the_real_place() -> None:
    place = "raises on `Qwen3_5ForConditionalGeneration`: `embed_tokens` is at `model.language_model.embed_tokens`"
    assert place in only_finding(EMBED).message
    assert "`embed_tokens` is at `transformer.wte`" not in only_finding(EMBED, "gpt2").message
    assert "what `embed_tokens` names is at `transformer.wte`" in only_finding(EMBED, "gpt2").message


def test_the_worst_of_several_targets_counts() -> None:
    finding = only_finding(EMBED, "llama-3-8b", "gpt2")
    assert finding.severity is Severity.ERROR
    assert "works on `LlamaForCausalLM`" in finding.message
    assert "raises on `GPT2LMHeadModel`" in finding.message


def test_an_unknown_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nosuch"):
        only_finding(EMBED, "nosuch")
    (tmp_path / "broken.json").write_text('{"about": ""}')
    with pytest.raises(ValueError, match="facts"):
        only_finding(EMBED, str(tmp_path / "broken.json"))


def test_targets_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"from transformers import PreTrainedModel\n\n{EMBED}")
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from ddaudit.auditor.cli import main\n"
        f"main(['scan', {str(tmp_path)!r}, '--target', 'gpt2', '--format', 'jsonl'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 1, shown.stderr
    assert json.loads(shown.stdout)["severity"] == "error"


def test_reach_counts_architectures() -> None:
    found = reach(Claim(Ask.PATH, "model.embed_tokens"))
    assert found is not None
    assert {"llama-3-8b", "jamba"} <= found.works
    assert not {"gpt2", "qwen3.6-27b"} & found.works
    assert 0 < found.share < 1
    assert reach(Claim(Ask.IMPORT, "transformers.x")) is None


def test_neutrality_rises_with_fixes_to_the_whole() -> None:
    finding = only_finding(EMBED)
    before, after = neutrality([finding]), neutrality([], num_fixed=1)
    assert before.score < 1
    assert before.num_served == len((reach(finding.claim) or pytest.fail("no reach")).works)  # type: ignore[arg-type]
    assert (after.score, after.num_served) == (1, len(profile_names()))
    assert neutrality([]).score == 1


def test_a_class_that_did_not_run_says_nothing_of_its_cache() -> None:
    facts = next(each for each in load_profile("llama-4").classes if each.refused)
    assert judge(Claim(Ask.BARE_CACHE), facts) is None
    answer = judge(Claim(Ask.PATH, "language_model.lm_head"), facts)
    assert answer is not None and answer.outcome is Outcome.WORKS
