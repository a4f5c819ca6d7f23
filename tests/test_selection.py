"""Files named one by one: only they are reported and changed, and their whole repository gives the facts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.sources import selection
from ddaudit.auditor.sources.selection import select_files
from ddaudit.auditor.sources.source import SkipReason

if TYPE_CHECKING:
    from pathlib import Path

LOADS = """import torch
from transformers import AutoModelForCausalLM
from decoding import step
step(AutoModelForCausalLM.from_pretrained("name"), None)
torch.cuda.synchronize()
"""
# Without the file above, nothing proves that this is a model.
STEPS = "def step(m, ids):\n    return m.model.embed_tokens(ids)\n"
FIXED = "def step(m, ids):\n    return m.get_input_embeddings()(ids)\n"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "repo"
    for name, text in {"main.py": LOADS, "decoding.py": STEPS, "sub/fine.py": "x = 1\n", "bad.py": "def f(:\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return root


def texts(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


# Nothing to do


@pytest.mark.parametrize("command", [("scan",), ("fix", "--in-place"), ("fix", "--check")])
def test_an_empty_list_is_clean(command: tuple[str, ...], repo: Path) -> None:
    before = texts(repo)
    os.chdir(repo)
    assert run(*command, "--files") == (0, "", "")
    assert texts(repo) == before


@pytest.mark.parametrize("command", [("scan",), ("fix", "--in-place")])
def test_a_clean_file_is_clean_whatever_the_others_are(command: tuple[str, ...], repo: Path) -> None:
    before = texts(repo)
    code, _, err = run(*command, "--files", repo / "sub" / "fine.py")
    assert (code, err, texts(repo)) == (0, "", before)


def test_without_a_marker_the_repository_is_not_read(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on one harmless file must not cost what a scan of everything costs."""
    read: list[list[Path]] = []
    real = selection.read_tree

    def read_tree(paths, root=None):
        read.append(list(paths))
        return real(paths, root)

    monkeypatch.setattr(selection, "read_tree", read_tree)
    fine = repo / "sub" / "fine.py"
    select_files([fine], ["embed_tokens"])
    assert read == [[fine]]
    select_files([repo / "decoding.py"], ["embed_tokens"])
    assert [repo in paths for paths in read] == [False, False, True]


def test_what_is_left_out_by_choice_is_said_and_clean(repo: Path) -> None:
    (repo / "build").mkdir()
    (repo / "build" / "copy.py").write_text(STEPS)
    (repo / "page.ipynb").write_text("{}")
    for command in (("scan",), ("fix", "--in-place")):
        code, _, err = run(*command, "--files", repo / "build" / "copy.py", repo / "page.ipynb")
        assert code == 0
        assert sorted(err.splitlines()) == [
            "not examined: build/copy.py: excluded (not the repository's own source)",
            "not examined: page.ipynb: excluded (notebooks are not read)",
        ]
    assert (repo / "build" / "copy.py").read_text() == STEPS


# Facts from everywhere, findings from here


def test_a_named_file_is_judged_by_its_repository(repo: Path) -> None:
    code, out, err = run("scan", repo / "decoding.py", "--format", "jsonl")
    assert (code, err) == (1, "")
    assert out.count("\n") == 1
    assert '"path": "decoding.py"' in out and '"confidence": "proven"' in out


def test_without_git_the_working_folder_is_the_repository(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / ".git").rmdir()
    monkeypatch.chdir(repo)
    _, out, _ = run("scan", "decoding.py", "--format", "jsonl")
    assert '"confidence": "proven"' in out


def test_the_summary_counts_the_named_files(repo: Path) -> None:
    _, out, _ = run("scan", repo / "decoding.py", repo / "sub" / "fine.py")
    assert "1 finding in 2 files scanned (0 skipped, 0 failed)" in out


def test_a_named_file_that_is_broken_is_2(repo: Path) -> None:
    for command in (("scan",), ("fix", "--in-place")):
        code, _, err = run(*command, repo / "bad.py", repo / "sub" / "fine.py")
        assert code == 2
        assert err.startswith("not examined: bad.py: syntax")


# Fixing


def test_only_named_files_are_changed(repo: Path) -> None:
    before = texts(repo)
    code, out, _ = run("fix", "--in-place", repo / "decoding.py")
    assert code == 0
    assert texts(repo) == before | {"decoding.py": FIXED}
    assert "1 fixed in 1 file, 0 left\n" in out
    assert run("fix", "--in-place", repo / "decoding.py")[0] == 0
    assert texts(repo) == before | {"decoding.py": FIXED}


def test_several_files_from_several_folders(repo: Path) -> None:
    (repo / "sub" / "more.py").write_text("import torch\ntorch.cuda.synchronize()\n")
    before = texts(repo)
    assert run("fix", "--in-place", repo / "decoding.py", repo / "sub" / "more.py")[0] == 0
    changed = {name for name, text in texts(repo).items() if text != before[name]}
    assert changed == {"decoding.py", "sub/more.py"}


def test_a_script_without_a_suffix_is_fixed_when_named(repo: Path) -> None:
    script = repo / "train"
    script.write_text("#!/usr/bin/env python\nimport torch\ntorch.cuda.synchronize()\n")
    assert run("scan", script)[0] == 1
    assert run("fix", "--in-place", script)[0] == 0
    assert "is_available" in script.read_text()


def test_diff_and_check_of_files_write_nothing(repo: Path) -> None:
    before = texts(repo)
    code, out, _ = run("fix", "--diff", repo / "decoding.py")
    assert code == 1
    assert "+    return m.get_input_embeddings()(ids)" in out and "main.py" not in out
    assert run("fix", "--check", repo / "decoding.py")[0] == 1
    assert run("fix", "--check", repo / "sub" / "fine.py")[0] == 0
    assert texts(repo) == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("fix", "repo/decoding.py"), "`--in-place`"),
        (("fix", "--in-place", "repo/decoding.py", "repo/sub"), "one repository's root folder, or files"),
        (("fix", "--in-place", "--files", "repo"), "one repository's root folder, or files"),
        (("fix", "--in-place", "repo/decoding.py", "repo/nowhere.py"), "nowhere.py does not exist"),
        (("scan", "repo/nowhere.py"), "nowhere.py does not exist"),
    ],
)
def test_a_mistake_of_the_caller_is_one_line_and_2(args: tuple[str, ...], message: str, repo: Path) -> None:
    before = texts(repo)
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
    assert texts(repo) == before


# Links


def test_through_a_link_nothing_is_written(repo: Path) -> None:
    """The file behind it was not named."""
    (repo / "alias.py").symlink_to("decoding.py")
    before = texts(repo)
    code, out, _ = run("fix", "--in-place", repo / "alias.py")
    assert code == 1
    assert "it is reached through a link" in out
    assert texts(repo) == before


def test_a_link_that_leaves_the_repository_is_not_followed(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(STEPS)
    (repo / "away.py").symlink_to(tmp_path / "outside.py")
    chosen = select_files([repo / "away.py", repo / "decoding.py"], ())
    assert [(item.path, item.reason) for item in chosen.tree.skipped] == [("away.py", SkipReason.SYMLINK)]
    assert run("fix", "--in-place", repo / "away.py")[0] == 2
    assert (tmp_path / "outside.py").read_text() == STEPS
