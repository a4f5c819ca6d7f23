"""What `ddaudit fix` prints: what was done, what is left and why, and a command to type next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main

if TYPE_CHECKING:
    from pathlib import Path

# One line goes, one moves down, and a tree mask is right once its cache is.
DECODE = """import torch
from transformers import DynamicCache, PreTrainedModel


def decode(target: PreTrainedModel, ids, ancestors, start, span):
    cache = DynamicCache()
    out = target(ids, past_key_values=cache, attention_mask=ancestors[None, None])
    cache.crop(start)
    torch.cuda.synchronize()
    again = target(ids, past_key_values=cache, output_hidden_states=True)
    return out.logits, again.hidden_states[span + 1]
"""
CLEAN = "x = 1\n"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "my repo"
    root.mkdir()
    (root / "decode.py").write_text(DECODE)
    # The same release wherever the tests run.
    (root / "requirements.txt").write_text("transformers>=5.17\n")
    monkeypatch.chdir(tmp_path)
    return root


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def next_command(out: str) -> list[str]:
    """The words of the last `next:` line, as a shell reads them."""
    return shlex.split(out.splitlines()[-1].removeprefix("next: "))


def rows(out: str, heading: str) -> list[str]:
    """The lines below a heading."""
    lines = out.splitlines()
    start = lines.index(heading) + 1
    return lines[start : next(i for i in range(start, len(lines) + 1) if i == len(lines) or lines[i][:1] != " ")]


def test_clean_code_has_nothing_next_and_nothing_to_say(repo: Path) -> None:
    (repo / "decode.py").write_text(CLEAN)
    for flag in ("--check", "--diff"):
        code, out, err = run("fix", flag, repo)
        assert (code, (out + err).splitlines()) == (
            0,
            ["0 would be fixed in 0 files, 0 left, 0 entry points: none found"],
        )


def test_the_columns_stand_below_each_other_and_no_line_is_too_wide(repo: Path, monkeypatch) -> None:
    """A slug longer than its column pushed its line out of the table."""
    monkeypatch.setenv("COLUMNS", "70")
    _, out, _ = run("fix", "--check", "my repo")
    found = rows(out, "would fix")[1:] + rows(out, "would leave")[1:]
    assert {line.split()[2] for line in found} >= {"unguarded-synchronize", "bare-cache"}
    longest = max(len(line.split()[2]) for line in found)
    assert {line[len("    12:12    DDA101 ") + longest] for line in found} == {" "}
    assert all(line[len("    12:12    DDA101 ") + longest + 1] != " " for line in found)
    assert max(map(len, found)) <= 70 and any("..." in line for line in found)


def test_what_is_left_stands_where_a_scan_of_the_source_has_it(repo: Path) -> None:
    _, scanned, _ = run("scan", "my repo")
    code, out, _ = run("fix", "my repo")
    assert code == 1
    left = rows(out, "left")[1:]
    assert [line.split()[0] for line in left] == ["7:23", "10:25", "11:24"]
    assert all(any(line.split()[:3] == other.split()[:3] for other in scanned.splitlines()) for line in left)
    fork = (repo.parent / "patched" / "my repo" / "decode.py").read_text().splitlines()
    for line in left:
        _, _, moved = line.rpartition("(line ")
        expression = line.split(None, 3)[3].partition("  (")[0]
        assert expression in fork[int(moved.removesuffix(" in the fork)")) - 1]


def test_edited_in_place_it_stands_where_the_file_has_it_now(repo: Path) -> None:
    _, out, _ = run("fix", "--in-place", "my repo")
    left = [line.split()[:3] for line in rows(out, "left")[1:]]
    _, scanned, _ = run("scan", "my repo")
    assert left == [line.split()[:3] for line in scanned.splitlines()[1:4]]


def test_each_reason_is_said_once_under_its_rule(repo: Path) -> None:
    _, out, _ = run("fix", "my repo")
    assert "  DDA403 deprecated-keyword, 2 here\n" in out
    assert " ".join(out.split()).count("exists from Transformers 5.24, and the code is for Transformers 5.17 too") == 1


def test_what_went_with_another_fix_names_its_rule(repo: Path) -> None:
    _, out, _ = run("fix", "--check", "my repo")
    mask = next(line for line in rows(out, "would fix") if "tree-mask" in line)
    assert mask.endswith("attention_mask=ancestors[None, None]  (by the fix of DDA101)")


def test_next_is_a_run_that_needs_nothing_but_the_fork(repo: Path) -> None:
    _, out, _ = run("fix", "my repo")
    assert next_command(out) == ["ddaudit", "run", "patched/my repo", "--entry", "MODULE:FUNCTION"]


def test_next_after_a_look_is_the_same_command_that_writes(repo: Path) -> None:
    for flag in ("--check", "--diff"):
        _, out, err = run("fix", flag, "--unsafe", "--ignore", "DDA403", "-o", "my fork", "my repo")
        command = next_command(err if flag == "--diff" else out)
        assert command == ["ddaudit", "fix", "--unsafe", "--output=my fork", "--ignore=DDA403", "my repo"]
    assert run(*command[1:])[0] == 0
    assert (repo.parent / "my fork" / "ddaudit.json").is_file()


def test_next_for_files_edits_them(repo: Path) -> None:
    _, out, _ = run("fix", "--check", "my repo/decode.py")
    assert next_command(out) == ["ddaudit", "fix", "--in-place", "my repo/decode.py"]


def test_the_unsafe_hint_is_a_command(repo: Path) -> None:
    _, out, _ = run("fix", "my repo")
    hint = next(line for line in out.splitlines() if "--unsafe" in line)
    command = shlex.split(hint.partition(": ")[2])
    assert command == ["ddaudit", "fix", "--unsafe", "my repo"]
    assert "--unsafe" not in run(*command[1:])[1]


# Rules chosen


def test_rules_left_out_are_neither_fixed_nor_left(repo: Path) -> None:
    code, out, _ = run("fix", "--ignore", "DDA1,hidden-index", "--ignore", "DDA403", "my repo")
    assert code == 0
    assert "1 fixed in 1 file, 0 left" in out
    fork = (repo.parent / "patched" / "my repo" / "decode.py").read_text()
    assert "is_available" in fork and "DynamicCache()" in fork


def test_a_fork_records_the_rules_it_was_made_with(repo: Path) -> None:
    run("fix", "--select", "unguarded-synchronize", "my repo")
    manifest = (repo.parent / "patched" / "my repo" / "ddaudit.json").read_text()
    assert '"rules": {\n    "DDA405": "unguarded-synchronize"\n  }' in manifest


def test_an_unknown_rule_writes_nothing(repo: Path) -> None:
    code, out, err = run("fix", "--ignore", "DDA999", "my repo")
    assert (code, out) == (2, "") and err.startswith("error: no rule 'DDA999'")
    assert not (repo.parent / "patched").exists()


def test_the_command_list_is_not_cut() -> None:
    line = next(line for line in run("--help")[1].splitlines() if line.startswith("  fix "))
    assert line.endswith("the source stays as it is.")
