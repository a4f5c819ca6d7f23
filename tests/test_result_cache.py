"""Results kept on disk: the same as a fresh scan's, and given for the same input only."""

from __future__ import annotations

import inspect
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddaudit.auditor import engine
from ddaudit.auditor.cli import main
from ddaudit.auditor.engine import scan
from ddaudit.auditor.finding import Confidence
from ddaudit.auditor.scanning import examining, result_cache
from ddaudit.auditor.scanning.result_cache import ResultCache, default_folder

SAMPLE = Path(__file__).parent / "research_repo"
BRITTLE = "from transformers import PreTrainedModel\n\ndef f(m: PreTrainedModel):\n    return m.model.layers\n"
SECRET = "the text of the file"


@pytest.fixture
def repo(tmp_path):
    root = tmp_path / "repo"
    root.mkdir()
    (root / "a.py").write_text(BRITTLE)
    (root / "b.py").write_text(f"x = '{SECRET}'\n")
    return root


@pytest.fixture
def kept(tmp_path):
    return ResultCache(tmp_path / "kept")


@pytest.fixture
def examined(monkeypatch):
    """Counts how often files are examined."""
    calls = []
    real = engine.examine

    def examine(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(engine, "examine", examine)
    return calls


def test_a_result_comes_back_as_it_was(kept, examined):
    """With every field of a finding, its fix and its claim: `fix`, `--verify` and the reports need them."""
    fresh = scan([SAMPLE], cache=kept)
    assert fresh == scan([SAMPLE])
    del examined[:]
    assert scan([SAMPLE], cache=kept) == fresh
    assert examined == []
    assert any(finding.fix and finding.fix.imports for finding in fresh.findings)
    assert any(finding.claim for finding in fresh.findings)


def test_failures_that_stay_are_kept_with_the_rest(repo, kept, examined):
    (repo / "broken.py").write_text("def f(:\n")
    (repo / "odd.py").write_bytes(b"x = '\xff'\n")
    fresh = scan([repo], cache=kept)
    assert [entry.path for entry in fresh.failed] == ["broken.py", "odd.py"]
    assert scan([repo], cache=kept) == fresh
    assert len(examined) == 1


def change_rule(repo, monkeypatch):
    """As an edit of a rule's file does."""
    result_cache.tool_digest.cache_clear()
    other = repo.parent / "tool"
    for folder in ("auditor", "rules"):
        (other / folder).mkdir(parents=True)
        (other / folder / "one.py").write_text("changed\n")
    monkeypatch.setattr(result_cache, "PACKAGE", other)


CHANGES = {
    "a file's bytes": lambda repo, patch: (repo / "b.py").write_text("x = 2\n"),
    "a file added": lambda repo, patch: (repo / "c.py").write_text(""),
    "a file removed": lambda repo, patch: (repo / "b.py").unlink(),
    "a file renamed": lambda repo, patch: (repo / "b.py").rename(repo / "c.py"),
    "two files' contents exchanged": lambda repo, patch: (
        (repo / "a.py").rename(repo / "c"), (repo / "b.py").rename(repo / "a.py"), (repo / "c").rename(repo / "b.py")
    ),
    "a folder left out": lambda repo, patch: (repo / "venv").mkdir(),
    "a rule": change_rule,
    "Python": lambda repo, patch: (result_cache.tool_digest.cache_clear(), patch.setattr(sys, "version", "3.99")),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_the_input_is_a_new_scan(change, repo, kept, examined, monkeypatch):
    scan([repo], cache=kept)
    change(repo, monkeypatch)
    try:
        scan([repo], cache=kept)
    finally:
        result_cache.tool_digest.cache_clear()
    assert len(examined) == 2


SETTINGS = {
    "select": ("DDA201",),
    "ignore": ("DDA201",),
    "min_confidence": Confidence.GUESS,
    "targets": ("qwen3-8b",),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_any_setting_is_a_scan_of_its_own(name, repo, kept, examined):
    scan([repo], cache=kept)
    scan([repo], cache=kept, **{name: SETTINGS[name]})
    assert len(examined) == 2


def test_every_setting_is_thought_of():
    """One that is new has to be part of the key, or be applied to what is kept, as the release is."""
    parameters = set(inspect.signature(scan).parameters)
    assert parameters == {"paths", "cache", "transformers", *SETTINGS}


def test_the_release_is_applied_to_what_is_kept(repo, kept, examined):
    scan([repo], cache=kept, transformers="4.57")
    newer = scan([repo], cache=kept, transformers="5.24")
    assert newer == scan([repo], transformers="5.24")
    assert len(examined) == 2


def test_a_profile_of_the_same_name_with_other_facts_is_another_target(repo, kept, examined, tmp_path):
    from ddaudit.auditor.profile import load_profile

    record = load_profile("qwen3-8b").to_json()
    file = tmp_path / "mine.json"
    for _ in range(2):
        file.write_text(json.dumps(record))
        load_profile.cache_clear()
        scan([repo], cache=kept, targets=(str(file),))
        record["about"] = "another"
    assert len(examined) == 2


def test_of_one_file_and_of_all_are_two_results(repo, kept, examined):
    (repo / ".git").mkdir()
    one = scan([repo / "a.py"], cache=kept)
    assert (one.num_scanned, scan([repo], cache=kept).num_scanned) == (1, 2)
    assert scan([repo / "a.py"], cache=kept) == one


@pytest.mark.parametrize("damage", [b"", b"x", b"\xff\xfe", None])
def test_a_damaged_entry_is_written_anew(damage, repo, kept, examined):
    fresh = scan([repo], cache=kept)
    (entry,) = kept.folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole.replace(b"layers", b"LAYERS") if damage is None else damage)
    assert scan([repo], cache=kept) == fresh
    assert len(examined) == 2
    assert entry.read_bytes() == whole


def test_a_crash_is_tried_again(repo, kept, examined, monkeypatch):
    def visit(file, rules):
        return "it failed" if file.source.path == "a.py" else []

    with monkeypatch.context() as patch:
        patch.setattr(examining, "_visit", visit)
        assert scan([repo], cache=kept).exit_code == 2
    assert scan([repo], cache=kept).exit_code == 1
    assert len(examined) == 2


def test_a_file_that_changes_during_the_scan_is_not_remembered(repo, kept, monkeypatch):
    real = engine.examine

    def examine(*args):
        (repo / "a.py").write_text("x = 1\n")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "examine", examine)
        assert scan([repo], cache=kept).findings == ()
    (repo / "a.py").write_text(BRITTLE)
    assert len(scan([repo], cache=kept).findings) == 1


def test_the_oldest_go_first(repo, kept, monkeypatch):
    monkeypatch.setattr(result_cache, "MAX_ENTRIES", 3)
    for i in range(6):
        (repo / "b.py").write_text(f"x = {i}\n")
        scan([repo], cache=kept)
    assert len(list(kept.folder.iterdir())) == 3
    monkeypatch.setattr(result_cache, "MAX_BYTES", 1)
    (repo / "b.py").write_text("x = 7\n")
    scan([repo], cache=kept)
    assert len(list(kept.folder.iterdir())) == 1


def test_nothing_of_the_text_is_kept_but_what_is_found(repo, kept):
    scan([repo], cache=kept)
    (entry,) = kept.folder.iterdir()
    text = entry.read_text()
    assert SECRET not in text and "m.model.layers" in text and str(repo) not in text
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def run(*arguments, **environment):
    code = "from ddaudit.auditor.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("place", ["a file", "/proc/nowhere", "relative/folder"])
def test_a_folder_that_cannot_be_used_is_no_error(place, repo, tmp_path):
    if place == "a file":
        (tmp_path / "file").write_text("")
        place = str(tmp_path / "file")
    found = run("scan", repo, XDG_CACHE_HOME=place, HOME=str(tmp_path / "nobody"))
    assert (found.returncode, found.stderr) == (1, "")


def test_the_platform_s_folder_and_those_named(repo, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert default_folder() == tmp_path / "caches" / "ddaudit"
    assert CliRunner().invoke(main, ["scan", "--no-cache", str(repo)]).exit_code == 1
    assert not (tmp_path / "caches").exists()
    CliRunner().invoke(main, ["scan", str(repo)])
    assert len(list((tmp_path / "caches" / "ddaudit").iterdir())) == 1
    outputs = [CliRunner().invoke(main, ["scan", "--cache-dir", str(tmp_path / "c"), str(repo)]).output for _ in "ab"]
    assert outputs[0] == outputs[1]
    assert len(list((tmp_path / "c").iterdir())) == 1
