"""The sample research repository, start to end: what a scan finds, the fork kept in git, and what the fork decodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.engine import scan
from ddaudit.auditor.facts.entries import find_entries

if TYPE_CHECKING:
    from ddaudit.auditor.record import RunRecord

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "tests" / "research_repo"
FORK = ROOT / "patched" / "research_repo"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_scan_finds_every_pattern_and_nothing_else() -> None:
    found = Counter((finding.code, finding.kind) for finding in scan([SAMPLE]).findings)
    assert found == {
        ("DDA101", "bare-cache"): 3,
        ("DDA102", "cache-crop"): 4,
        ("DDA103", "cache-internals"): 3,
        ("DDA104", "cache-internals"): 1,
        ("DDA105", "tree-mask"): 1,
        ("DDA201", "model-path"): 4,
        ("DDA202", "lm-head"): 3,
        ("DDA203", "hidden-index"): 2,
        ("DDA301", "mask-token-filter"): 2,
        ("DDA302", "single-end-token"): 1,
        ("DDA401", "config-attr"): 3,
        ("DDA403", "deprecated-kwarg"): 6,
        ("DDA405", "unguarded-synchronize"): 2,
        ("DDA406", "forced-flash-attention"): 1,
    }


def test_a_fresh_fix_is_the_fork_in_git(tmp_path: Path) -> None:
    """Whoever changes a rule sees here what that does to a repository, and reads it."""
    before = contents(SAMPLE)
    result = CliRunner().invoke(main, ["fix", str(SAMPLE), "--output", str(tmp_path / "fork")])
    assert result.exit_code == 1, result.output  # what a person has to decide is left
    assert contents(tmp_path / "fork") == contents(FORK), "run `ddaudit fix tests/research_repo` and read its diff"
    assert contents(SAMPLE) == before


def test_nothing_fixable_is_left_in_the_fork() -> None:
    assert scan([FORK]).fixable() == ()


def test_every_decoder_is_an_entry_point() -> None:
    expected = {"sapling.chain:chain_generate", "sapling.plain:plain_generate", "sapling.tree:tree_generate"}
    assert {entry.name for entry in find_entries(SAMPLE)} == expected
    assert {entry.name for entry in find_entries(FORK)} == expected


def decode(folder: Path, loader: str) -> RunRecord:
    """Every entry of `folder` over a tiny random hybrid on the CPU, in fp32, with acceptance set."""
    pytest.importorskip("torch", reason="needs the extra `runtime`")
    pytest.importorskip("transformers", reason="needs the extra `runtime`")
    from ddaudit.runtime.running.run import RunOptions, run

    options = RunOptions(model="tiny-hybrid", random_weights=True, loader=loader, device="cpu", max_new_tokens=96)
    return run(folder, find_entries(folder), [], options)


def test_the_original_does_not_run_on_a_hybrid() -> None:
    assert {entry.verdict for entry in decode(SAMPLE, "causal-lm").entries} == {"error"}


@pytest.mark.parametrize("loader", ["causal-lm", "conditional"])
def test_the_fork_decodes_what_the_target_alone_would(loader: str) -> None:
    entries = {entry.name.split(":")[1]: entry for entry in decode(FORK, loader).entries}
    assert {name: entry.verdict for name, entry in entries.items()} == {
        "plain_generate": "identical",
        "chain_generate": "identical",
        "tree_generate": "identical",
    }
    lengths = {name: entry.acceptance_length_mean or 0 for name, entry in entries.items()}
    assert 2.5 < lengths["chain_generate"] < lengths["tree_generate"]
