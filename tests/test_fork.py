"""Forks: every file, exact patches, one record, and never half of anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from toy_rules import MAKE_CACHE, Rename, scanner

from ddaudit.auditor.cli import main
from ddaudit.auditor.engine import ScanResult, scan
from ddaudit.auditor.fixing import fork, placing
from ddaudit.auditor.fixing.fork import MANIFEST, PATCH, plan_fix, read_manifest
from ddaudit.auditor.fixing.patch import patch
from ddaudit.auditor.fixing.placing import write_fork, write_in_place

RESEARCH_REPO = Path(__file__).parent / "research_repo"
BEFORE = b"import torch\nx = old(1)\n"
AFTER = b"import torch\nfrom ddaudit.runtime import make_cache\nx = make_cache(1)\n"


@pytest.fixture
def toy_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """`old(` becomes `make_cache(`, whatever the real rules do. The rest of the scan is the real one."""
    toy, real = scanner(Rename("old", "make_cache", imports=(MAKE_CACHE,))), fork.scan_sources

    def scan_sources(sources, skipped=(), **options) -> ScanResult:
        result = real(sources, skipped, **options)
        return ScanResult(tuple(toy(sources)), result.skipped, result.num_scanned)

    monkeypatch.setattr(fork, "scan_sources", scan_sources)


@pytest.fixture
def source(tmp_path: Path, toy_rules: None) -> Path:
    """A repository with one file to fix, and everything that a copy may lose."""
    root = tmp_path / "repo"
    (root / "pkg" / "empty").mkdir(parents=True)
    (root / "pkg" / "a.py").write_bytes(BEFORE)
    (root / "pkg" / "fine.py").write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    (root / "data.bin").write_bytes(bytes(range(256)))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link.py").symlink_to("pkg/a.py")
    (root / "away").symlink_to("../outside.txt")
    (root / "pkg" / "loop").symlink_to("..")
    (root / "dangling").symlink_to("nowhere")
    for left_out in (".git", "__pycache__", "pkg/.pytest_cache", "env"):
        (root / left_out).mkdir()
        (root / left_out / "file").write_text("x")
    (root / "env" / "pyvenv.cfg").write_text("")
    return root


def contents(root: Path) -> dict[str, tuple[int, bytes | str]]:
    """Mode, and bytes or link target, of everything in a folder. Links are not followed."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            held: bytes | str = ""
            if path.is_symlink():
                held = os.readlink(path)
            elif path.is_file():
                held = path.read_bytes()
            found[path.relative_to(root).as_posix()] = (path.lstat().st_mode, held)
    return found


def fix(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["fix", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def git(*arguments: str, cwd: Path, **options) -> subprocess.CompletedProcess[bytes]:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=cwd, capture_output=True, **options)


# What a fork holds


def test_a_fork_has_every_file_with_its_mode_and_the_source_is_untouched(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    write_fork(plan_fix(source), tmp_path / "out" / "fork")
    assert contents(source) == before
    expected = {
        path: value
        for path, value in before.items()
        if not path.startswith((".git", "__pycache__", "pkg/.pytest_cache", "env"))
    }
    expected["pkg/a.py"] = (expected["pkg/a.py"][0], AFTER)
    expected["away"] = (expected["away"][0], "../../outside.txt")
    found = contents(tmp_path / "out" / "fork")
    assert set(found) - set(expected) == {MANIFEST, PATCH}
    assert {path: found[path] for path in expected} == expected
    assert os.listdir(tmp_path / "out") == ["fork"]


def test_the_manifest_says_what_was_done(source: Path, tmp_path: Path) -> None:
    (source / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (source / ".git" / "packed-refs").write_text("# pack-refs\n" + "ab" * 20 + " refs/heads/main\n")
    (source / "broken.py").write_text("def f(:\n")
    write_fork(plan_fix(source), tmp_path / "fork")
    record = read_manifest(tmp_path / "fork")
    assert record is not None
    assert record["source"] == {"name": "repo", "commit": "ab" * 20}
    assert [(item["path"], item["line"], item["how"]) for item in record["fixed"]] == [("pkg/a.py", 2, "edited")]
    assert record["left"] == []
    assert {item["path"]: item["reason"] for item in record["not_examined"]}["broken.py"] == "syntax"
    changed = {path for path, entry in record["files"].items() if entry.get("before") != entry.get("after")}
    assert changed == {"pkg/a.py"}
    assert record["files"]["away"] == {"link": "../outside.txt", "leaves": "rewritten to reach the same place"}
    assert record["files"]["link.py"] == {"link": "pkg/a.py"}
    assert str(tmp_path) not in (tmp_path / "fork" / MANIFEST).read_text()


def test_one_source_gives_the_same_bytes_wherever_it_lies(source: Path, tmp_path: Path, monkeypatch) -> None:
    write_fork(plan_fix(source), tmp_path / "one")
    (tmp_path / "elsewhere").mkdir()
    source.rename(tmp_path / "elsewhere" / "repo")
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_fork(plan_fix(Path("repo")), tmp_path / "other")
    one, other = contents(tmp_path / "one"), contents(tmp_path / "other")
    # What it leads to has moved with the source; the manifest is the same all the same.
    assert (one.pop("away")[1], other.pop("away")[1]) == ("../outside.txt", "../elsewhere/outside.txt")
    assert one == other


def test_with_nothing_to_fix_there_is_a_fork_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "a.py").write_text("x = 1\n")
    code, out, _ = fix(tmp_path / "repo", "-o", tmp_path / "fork")
    assert code == 0
    assert "0 fixed in 0 files, 0 left" in out
    assert (tmp_path / "fork" / "a.py").read_text() == "x = 1\n"


def test_a_file_reached_through_a_link_is_fixed_once_and_not_through_the_link(source: Path, tmp_path: Path) -> None:
    plan = plan_fix(source)
    assert list(plan.changes) == ["pkg/a.py"]
    write_fork(plan, tmp_path / "fork")
    assert os.readlink(tmp_path / "fork" / "link.py") == "pkg/a.py"


@pytest.mark.usefixtures("toy_rules")
def test_a_file_that_is_there_only_through_a_link_is_left(tmp_path: Path) -> None:
    """Written through, the link would change a file that the fork does not own."""
    repo = tmp_path / "repo"
    (repo / "build").mkdir(parents=True)
    (repo / "build" / "a.py").write_bytes(BEFORE)
    (repo / "b.py").write_text("x = 1\n")
    (repo / "a.py").symlink_to("build/a.py")
    plan = plan_fix(repo)
    assert plan.changes == {}
    assert [item.reason for item in plan.settled.left] == ["it is reached through a link"]
    write_in_place(plan)
    assert (repo / "build" / "a.py").read_bytes() == BEFORE


def test_what_cannot_be_read_or_parsed_is_copied_and_reported(source: Path, tmp_path: Path) -> None:
    (source / "broken.py").write_bytes(b"def f(:\n")
    (source / "latin.py").write_bytes(b"x = '\xe9'\n")
    (source / "usr").symlink_to("/usr")
    (source / "self.py").symlink_to("self.py")
    os.mkfifo(source / "pipe")
    code, out, err = fix(source, "-o", tmp_path / "fork")
    assert code == 2
    assert "1 fixed in 1 file" in out
    for name in ("broken.py: syntax", "latin.py: encoding", "usr: symlink", "self.py: unreadable", "not copied: pipe"):
        assert name in err
    assert (tmp_path / "fork" / "broken.py").read_bytes() == b"def f(:\n"
    assert os.readlink(tmp_path / "fork" / "usr") == "/usr"
    assert (tmp_path / "fork" / "latin.py").read_bytes() == b"x = '\xe9'\n"


def test_a_link_out_of_the_repository_reaches_the_same_place(source: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "v1").mkdir(parents=True)
    (tmp_path / "data" / "latest").symlink_to("v1")
    (tmp_path / "outside.txt").write_text("outside")
    out = {
        "pkg/data": "../../data/latest", "up": "..", "gone": "../nowhere/at/all", "pkg/through": "loop/../outside.txt",
        "pkg/script.py": "../../outside.txt",
    }  # fmt: skip
    copied = {"absolute": str(tmp_path / "data"), "by_another": "pkg/data/x", "here": "./pkg/../run.sh", "self": "self"}
    back = {"pkg/back.py": ("../../repo/pkg/a.py", "a.py"), "whole": ("../repo", ".")}
    for path, held in {**out, **copied, **{path: held for path, (held, _) in back.items()}}.items():
        (source / path).symlink_to(held)
    fork = tmp_path / "deep" / "er" / "fork"
    _, printed, err = fix(source, "-o", fork)
    for path, held in out.items():
        assert os.path.realpath(fork / path) == os.path.realpath(source / path), path
        assert f"link rewritten to reach the same place: {path} -> {os.readlink(fork / path)}\n" in printed
        assert not os.path.isabs(os.readlink(fork / path)) and os.readlink(fork / path) != held
    assert os.readlink(fork / "pkg" / "data").endswith("data/latest")
    assert {path: os.readlink(fork / path) for path in copied} == copied
    # What comes back into the repository is the fork's own.
    assert {path: os.readlink(fork / path) for path in back} == {path: inside for path, (_, inside) in back.items()}
    assert "not examined, a link to the same place: pkg/script.py: symlink" in err
    assert printed.count("link rewritten") == len(out) + len(back) + len(["away"])
    # Neither counts as worked in by hand, and both are the same to the byte.
    assert "was there already" in fix(source, "-o", fork)[1]
    (source / "new.py").write_text("x = 1\n")
    assert "by hand" not in fix(source, "-o", fork)[1]
    (fork / "away").unlink()
    (source / "new.py").write_text("x = 2\n")
    assert "by hand" in fix(source, "-o", fork)[1]


def test_a_file_that_is_not_copied_is_not_said_to_be(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe.py")
    (source / "broken.py").write_bytes(b"def f(:\n")
    (source / ".hypothesis").mkdir()
    (source / ".hypothesis" / "latin.py").write_bytes(b"x = '\xe9'\n")
    code, out, err = fix(source, "-o", tmp_path / "fork")
    assert code == 2
    said = {path: [line for line in err.splitlines() if path in line] for path in ("pipe.py", "broken.py", "latin.py")}
    assert {path: len(lines) for path, lines in said.items()} == dict.fromkeys(said, 1), err
    assert said["pipe.py"] == ["not examined, not copied: pipe.py: unreadable (it is no regular file)"]
    assert said["broken.py"][0].startswith("not examined, copied as it is: broken.py: syntax")
    # A cache of a tool is no part of a fork.
    assert said["latin.py"][0].startswith("not examined, not copied: .hypothesis/latin.py: encoding")
    assert "next: ddaudit run" in out


def test_a_fork_without_a_python_file_is_not_one_to_run(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    os.mkfifo(tmp_path / "repo" / "pipe.py")
    code, out, _ = fix(tmp_path / "repo", "-o", tmp_path / "fork")
    assert code == 2
    assert "fork: " in out and "next:" not in out


# Again


def test_fixing_again_changes_nothing(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fork"
    fix(source, "-o", target)
    before, inode = contents(target), target.stat().st_ino
    code, out, _ = fix(source, "-o", target)
    assert (code, contents(target), target.stat().st_ino) == (0, before, inode)
    assert "was there already" in out


def test_fixing_the_fork_gives_the_fork(source: Path, tmp_path: Path) -> None:
    fix(source, "-o", tmp_path / "fork")
    before = contents(tmp_path / "fork")
    assert fix(tmp_path / "fork", "-o", tmp_path / "again")[0] == 0
    assert contents(tmp_path / "again") == before
    assert fix(tmp_path / "fork", "-o", tmp_path / "fork")[0] == 0
    assert fix(tmp_path / "fork", "--in-place")[0] == 0
    assert contents(tmp_path / "fork") == before


def test_a_fork_before_is_replaced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fork"
    fix(source, "-o", target)
    (source / "new.py").write_bytes(BEFORE)
    (source / "run.sh").unlink()
    fix(source, "-o", target)
    assert (target / "new.py").read_bytes() == AFTER
    assert not (target / "run.sh").exists()
    assert sorted(os.listdir(tmp_path)) == ["fork", "repo"]


def test_a_fork_that_somebody_worked_in_is_kept_beside_the_new_one(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fork"
    fix(source, "-o", target)
    (target / "results.json").write_text("hours of work")
    _, out, _ = fix(source, "-o", target)
    assert "changed by hand" in out
    assert (tmp_path / "fork.changed-1" / "results.json").read_text() == "hours of work"
    assert not (target / "results.json").exists()


# Refused


@pytest.mark.parametrize("target", ["repo", "repo/pkg/fork", ".", "full", "file"])
def test_a_target_that_is_no_place_for_a_fork_is_refused(target: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    before = contents(tmp_path)
    code, _, err = fix(source, "-o", tmp_path / target)
    assert code == 2
    assert err.startswith("error: ")
    assert contents(tmp_path) == before


def test_links_do_not_hide_that_the_target_lies_inside(source: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(source)
    code, _, err = fix(tmp_path / "alias", "-o", source / "fork")
    assert code == 2
    assert "inside the source" in err


@pytest.mark.parametrize("arguments", [("missing",), ("file.py",), ("empty",), ("repo", "--in-place", "-o", "x")])
def test_what_cannot_be_fixed_is_a_clear_error(
    arguments: tuple[str, ...], source: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.py").write_text("x = 1\n")
    (tmp_path / "empty").mkdir()
    before = contents(tmp_path)
    code, _, err = fix(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert contents(tmp_path) == before


# Whole or not at all


def old_and_new(source: Path, tmp_path: Path) -> tuple[Path, dict]:
    target = tmp_path / "fork"
    fix(source, "-o", target)
    (source / "pkg" / "a.py").write_bytes(BEFORE + b"y = old(2)\n")
    return target, contents(target)


@pytest.mark.parametrize("step", ["_build", "_put", "copyfile"])
def test_a_failure_leaves_the_fork_before_and_no_litter(step: str, source: Path, tmp_path: Path, monkeypatch) -> None:
    target, before = old_and_new(source, tmp_path)

    def fail(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(placing.shutil if step == "copyfile" else placing, step, fail)
    code, _, err = fix(source, "-o", target)
    assert code == 2
    assert "No space left" in err
    assert contents(target) == before
    assert sorted(os.listdir(tmp_path)) == ["fork", "repo"]


def test_without_an_exchange_a_failing_rename_puts_the_old_fork_back(source: Path, tmp_path: Path, monkeypatch) -> None:
    target, before = old_and_new(source, tmp_path)
    monkeypatch.setattr(placing, "_exchange", lambda one, other: False)
    real = os.rename

    def rename(old: Path, new: Path) -> None:
        if Path(new) == target and not str(old).endswith(".before"):
            raise OSError(5, "Input/output error")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    assert fix(source, "-o", target)[0] == 2
    assert contents(target) == before
    monkeypatch.setattr(os, "rename", real)
    fix(source, "-o", target)
    assert (target / "pkg" / "a.py").read_bytes() == AFTER + b"y = make_cache(2)\n"
    assert sorted(os.listdir(tmp_path)) == ["fork", "repo"]


def test_killed_at_any_time_there_is_the_old_fork_or_the_new_one(source: Path, tmp_path: Path) -> None:
    for number in range(40):
        (source / f"data{number}").write_bytes(os.urandom(50_000))
    (source / "pkg" / "a.py").write_text("import torch\ntorch.cuda.synchronize()\n")
    code = "import sys; from ddaudit.auditor.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "fix", str(source), "-o", str(tmp_path / "fork")]
    subprocess.run(command, capture_output=True)
    states = [contents(tmp_path / "fork")]
    (source / "new.txt").write_text("new")
    subprocess.run([*command[:-1], str(tmp_path / "reference")], capture_output=True)
    states.append(contents(tmp_path / "reference"))
    assert states[0] != states[1]
    for delay in range(8):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(0.05 + 0.06 * delay)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert contents(tmp_path / "fork") in states


# In place, and writing nothing


def test_in_place_edits_the_source_itself(source: Path) -> None:
    before = contents(source)
    (source / "pkg" / "a.py").chmod(0o750)
    assert fix(source, "--in-place")[0] == 0
    after = contents(source)
    assert after.pop("pkg/a.py") == (0o100750, AFTER)
    before.pop("pkg/a.py")
    assert after == before


def test_in_place_all_files_go_back_where_one_cannot_be_replaced(source: Path, monkeypatch) -> None:
    (source / "pkg" / "b.py").write_bytes(BEFORE)
    before = contents(source)
    real = os.replace

    def replace(old: Path, new: Path) -> None:
        if new == source / "pkg" / "b.py":
            raise PermissionError(13, "Permission denied")
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    code, _, err = fix(source, "--in-place")
    assert code == 2
    assert "cannot be written: Permission denied" in err
    assert contents(source) == before


def test_diff_prints_the_patch_and_writes_nothing(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    code, out, err = fix(source, "--diff")
    assert code == 1
    assert out.encode() == plan_fix(source).patch
    assert out.startswith("diff --git a/pkg/a.py b/pkg/a.py\n")
    assert "1 would be fixed in 1 file" in err
    assert contents(tmp_path) == before


def test_check_says_whether_something_would_change(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert fix(source, "--check")[0] == 1
    assert contents(tmp_path) == before
    (source / "pkg" / "a.py").write_bytes(AFTER)
    assert fix(source, "--check")[0] == 0
    # What no fix mends would not change, so it is no reason to stop a commit.
    (source / "pkg" / "b.py").write_bytes(b"def f(make_cache):\n    old(1)\n")
    assert fix(source, "--check")[0] == 0
    assert fix(source, "-o", tmp_path / "fork")[0] == 1


def test_the_default_target_is_patched_and_the_name(source: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    code, out, _ = fix(source)
    assert code == 0
    assert (tmp_path / "desk" / "patched" / "repo" / "pkg" / "a.py").read_bytes() == AFTER
    assert "ddaudit run patched/repo" in out


# The patch

PIECES = st.sampled_from(
    [b"x\n", b"x\r\n", b"\r", b"y", b"\xe9\xff", b"\x00", b"\n", b"\t \n", b"\\ No newline\n", b"-- \n"]
)


@given(st.lists(PIECES, max_size=30), st.lists(PIECES, max_size=30))
def test_git_takes_the_patch_to_the_byte(tmp_path_factory, before: list[bytes], after: list[bytes]) -> None:
    old, new = b"".join(before), b"".join(after)
    if old == new or not old or not new:
        return
    folder = tmp_path_factory.mktemp("patch")
    (folder / "a.py").write_bytes(old)
    applied = git("apply", "-", cwd=folder, input=patch({"a.py": (old, new)}))
    assert applied.returncode == 0, applied.stderr
    assert (folder / "a.py").read_bytes() == new


@pytest.mark.parametrize("name", ["a b.py", "ä.py", 'q"\\.py', "tab\there.py", "d e/f.py"])
def test_git_finds_files_of_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x\n")
    applied = git("apply", "-", cwd=tmp_path, input=patch({name: (b"x\n", b"y\n")}))
    assert applied.returncode == 0, applied.stderr
    assert (tmp_path / name).read_bytes() == b"y\n"


@pytest.mark.usefixtures("toy_rules")
def test_the_patch_of_a_fork_makes_the_fork_of_a_clean_checkout(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    for name, data in {
        "crlf.py": BEFORE.replace(b"\n", b"\r\n"),
        "mixed.py": b"import torch\r\nx = old(1)\ny = old(2)\rz = old(3)",
        "latin.py": b"# coding: latin-1\nx = '\xe9'\nold(x)",
        "marked.py": b"\xef\xbb\xbfold(1)\n",
    }.items():
        (repo / name).write_bytes(data)
    git("init", "-q", cwd=repo, check=True)
    git("add", ".", cwd=repo, check=True)
    git("commit", "-q", "-m", "x", cwd=repo, check=True)
    assert fix(repo, "-o", tmp_path / "fork")[0] == 0
    record = json.loads((tmp_path / "fork" / MANIFEST).read_bytes())
    assert record["source"]["commit"] == git("rev-parse", "HEAD", cwd=repo).stdout.decode().strip()
    git("clone", "-q", str(repo), str(tmp_path / "clean"), cwd=tmp_path, check=True)
    applied = git("apply", str(tmp_path / "fork" / PATCH), cwd=tmp_path / "clean")
    assert applied.returncode == 0, applied.stderr
    for file in repo.glob("*.py"):
        assert (tmp_path / "clean" / file.name).read_bytes() == (tmp_path / "fork" / file.name).read_bytes()
        assert b"make_cache" in (tmp_path / "fork" / file.name).read_bytes()


# With the real rules


def test_the_sample_is_fixed_for_good(tmp_path: Path) -> None:
    """The main promise: what can be fixed is fixed, what was fixed compiles, and nothing fixable is left."""
    code, _, err = fix(RESEARCH_REPO, "-o", tmp_path / "fork")
    assert (code, err) == (1, "")
    for file in (tmp_path / "fork").rglob("*.py"):
        compile(file.read_bytes(), file.name, "exec")
    assert scan([RESEARCH_REPO]).fixable()
    assert scan([tmp_path / "fork"]).fixable() == ()
    record = read_manifest(tmp_path / "fork")
    assert record is not None
    assert len(record["entries"]) == 3
    before = contents(tmp_path / "fork")
    fix(tmp_path / "fork", "-o", tmp_path / "again")
    assert contents(tmp_path / "again") == before
