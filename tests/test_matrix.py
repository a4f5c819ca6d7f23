"""The architecture matrix: some rows measured afresh, and the README's table held against them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.runtime.models.architectures import build_tiny, causal_architectures
from ddaudit.runtime.probing import matrix
from ddaudit.runtime.probing.matrix import check_architecture

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("<!-- matrix: ddaudit matrix --format markdown -->")[2].partition("<!-- end of matrix -->")[0]


SOME = ["bamba", "bloom", "gpt_oss", "granite", "jamba", "kimi_linear", "llama4_text", "nemotron_h", "rwkv"]


@pytest.mark.parametrize("architecture", SOME)
def test_the_table_of_the_readme_is_what_is_measured(architecture):
    row = check_architecture(architecture)
    line = next(line for line in TABLE.splitlines() if re.match(rf"(\| |- ){architecture}\b[ :]", line))
    words = re.sub(r" \(\d.*?\)", "", row.verdict)
    assert words in re.sub(r" \(\d.*?\)", "", line)
    if row.verdict.startswith("exact"):
        assert ("wrong: " + "; ".join(row.wrong_in_stock) if row.wrong_in_stock else "right") in line


def test_no_architecture_of_the_table_is_wrong_and_thirty_are_exact():
    verdicts = [line.split("|")[4].strip() for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert not [verdict for verdict in verdicts if verdict.startswith("wrong")]
    assert sum(verdict.startswith("exact") for verdict in verdicts) >= 30


def test_jambas_own_continuation_of_several_tokens_is_wrong_and_ours_is_not():
    """Transformers 5.24 drops its state between cached blocks; one token at a time is right."""
    row = check_architecture("jamba")
    assert "block" in row.wrong_in_stock and "token" not in row.wrong_in_stock
    assert row.verdict.startswith("exact")


def test_a_fault_of_the_runtime_is_a_wrong_row(monkeypatch):
    monkeypatch.setattr(matrix, "crop_cache", lambda cache, length: cache.truncate(max(length - 1, 0)))
    assert check_architecture("qwen3").verdict.startswith("wrong: ")


def test_the_command_prints_rows_as_json_and_refuses_what_is_not_there():
    result = CliRunner().invoke(main, ["matrix", "--only", "qwen3_5_text", "--format", "json", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["architecture"] == "qwen3_5_text" and row["verdict"].startswith("exact")
    assert {"sapling.chain:chain_generate", "sapling.tree:tree_generate"} <= set(row["differences"])
    assert CliRunner().invoke(main, ["matrix", "--only", "qwen9"]).exit_code == 2


def test_every_recurrent_kind_is_built_with_recurrent_layers():
    """A tiny configuration that lost its recurrent layers would be exact for nothing."""
    assert len(causal_architectures()) > 100
    for name in ("lfm2", "jamba", "bamba", "granitemoehybrid", "qwen3_next", "zamba2"):
        assert any(hasattr(module, "conv1d") or hasattr(module, "conv") for module in build_tiny(name).modules()), name
