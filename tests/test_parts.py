"""A tree too large to examine as a whole, and workers that die on the way."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from ddaudit.auditor.engine import scan, scan_sources
from ddaudit.auditor.reports import scan_report
from ddaudit.auditor.scanning import examining, parts, workers
from ddaudit.auditor.scanning.parts import divide
from ddaudit.auditor.sources.source import SkipReason, SourceFile

BROKEN = "from transformers import DynamicCache\n\ncache = DynamicCache()\n"
forks = pytest.mark.skipif(sys.platform != "linux", reason="the workers of this test need to be forks")


def tree(*paths, text=BROKEN):
    return {path: SourceFile(path, text) for path in paths}


def divided(sources):
    return divide({path: source.size for path, source in sources.items()})


@pytest.fixture
def small(monkeypatch):
    """Limits that a few short files exceed: three to a part."""
    monkeypatch.setattr(parts, "MAX_WHOLE", 4 * len(BROKEN))
    monkeypatch.setattr(parts, "MAX_PART", 3 * len(BROKEN))


def at_a_file(monkeypatch, path, act):
    """Let the visit of one file go wrong."""
    real = examining._visit

    def visit(file, rules):
        return act() if file.source.path == path else real(file, rules)

    monkeypatch.setattr(examining, "_visit", visit)


def test_a_repository_is_one_part():
    assert len(divided(tree("a.py", "pkg/b.py", "pkg/inner/c.py"))) == 1


def test_nothing_is_one_empty_part():
    assert divide({}) == [[]]


def test_folders_stay_together_and_neighbours_share_a_part(small):
    sources = tree("a/1.py", "a/2.py", "b/1.py", "c/1.py", "c/2.py", "d/1.py")
    assert divided(sources) == [["a/1.py", "a/2.py", "b/1.py"], ["c/1.py", "c/2.py", "d/1.py"]]


def test_a_folder_too_large_is_divided_by_what_is_in_it(small):
    sources = tree("a/1.py", *(f"a/b/{n}.py" for n in range(3)), "a/c/1.py", "z.py")
    assert sorted(path for part in divided(sources) for path in part) == sorted(sources)
    assert ["a/b/0.py", "a/b/1.py", "a/b/2.py"] in divided(sources)


def test_every_part_is_scanned_and_the_order_is_that_of_paths(small):
    sources = tree(*(f"{folder}/{n}.py" for folder in "dcba" for n in range(2)))
    result = scan_sources(sources, select=("bare-cache",))
    assert [finding.path for finding in result.findings] == sorted(sources)
    assert result.num_scanned == 8


def test_a_tree_in_parts_says_so_and_a_whole_one_does_not(small):
    result = scan_sources(tree("a/1.py", "b/1.py", "c/1.py", "d/1.py", "e/1.py"))
    assert len(result.limits) == 1 and "in 2 parts" in result.limits[0]
    assert any(line.startswith("limit: 5 files with ") for line in scan_report.text(result))
    assert scan_sources(tree("a/1.py", "b/1.py")).limits == ()


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_number_of_workers_changes_nothing(number, small):
    """The first of two to end came first in the output."""
    sources = tree(*(f"{folder}/{n}.py" for folder in "dcba" for n in range(2)), "b/x.py")
    sources["c/broken.py"] = SourceFile("c/broken.py", "def f(:\n")
    results = [scan_sources(dict(reversed(sources.items())), workers=count) for count in (1, number)]
    assert scan_report.json_object(results[0]) == scan_report.json_object(results[1])
    assert len(results[0].findings) == 9


def test_files_on_disk_are_read_where_they_are_examined(small, tmp_path):
    for path, source in tree(*(f"{folder}/{n}.py" for folder in "abcd" for n in range(2))).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(source.text)
    (tmp_path / "d" / "odd.py").write_bytes(b"# coding: nonsense\n")
    result = scan([tmp_path])
    assert len(result.findings) == 8
    assert [(entry.path, entry.reason) for entry in result.skipped] == [("d/odd.py", SkipReason.ENCODING)]


def test_a_file_named_alone_has_its_own_part_examined_and_no_process(small, tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    for path, source in tree(*(f"{folder}/{n}.py" for folder in "abcd" for n in range(2))).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(source.text)
    monkeypatch.setattr(workers.Workers, "run", None)
    result = scan([tmp_path / "c" / "1.py"])
    assert [finding.path for finding in result.findings] == ["c/1.py"]
    assert (result.num_scanned, len(result.limits)) == (1, 1)


def test_a_file_that_does_not_parse_fails_alone(small):
    sources = {**tree("a/1.py", "a/2.py", "b/1.py", "b/2.py"), "b/3.py": SourceFile("b/3.py", "def f(:\n")}
    result = scan_sources(sources, select=("bare-cache",))
    assert [entry.path for entry in result.failed] == ["b/3.py"]
    assert len(result.findings) == 4


def exhaust(error):
    def act():
        raise error

    return act


@forks
@pytest.mark.parametrize(
    "act",
    [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL), exhaust(RecursionError), exhaust(MemoryError)],
    ids=["exit", "kill", "recursion", "memory"],
)
def test_a_worker_that_dies_costs_the_file_it_was_at(act, small, monkeypatch):
    """The pool broke, and with it the run."""
    at_a_file(monkeypatch, "b/1.py", act)
    result = scan_sources(tree(*(f"{folder}/{n}.py" for folder in "abcd" for n in range(2))))
    assert [(entry.path, entry.reason.value) for entry in result.skipped] == [("b/1.py", "worker crash")]
    assert (len(result.findings), result.num_scanned, result.exit_code) == (7, 7, 2)


@forks
def test_a_worker_that_never_ends_costs_the_file_it_was_at(small, monkeypatch):
    monkeypatch.setattr(workers, "SILENT_S", 1)
    at_a_file(monkeypatch, "b/1.py", lambda: time.sleep(60))
    result = scan_sources(tree(*(f"{folder}/{n}.py" for folder in "abcd" for n in range(2))))
    assert [(entry.path, entry.reason.value) for entry in result.skipped] == [("b/1.py", "timeout")]
    assert len(result.findings) == 7


@forks
def test_a_worker_that_dies_over_all_files_is_found_out_in_halves(small, monkeypatch):
    """What is learnt of all files together is at no file: the one to blame is found by leaving others out."""
    real = examining.learn

    def learn(trees, failed):
        return os._exit(3) if "b/1.py" in trees else real(trees, failed)

    monkeypatch.setattr(examining, "learn", learn)
    result = scan_sources(tree(*(f"{folder}/{n}.py" for folder in "abcd" for n in range(2))))
    assert [entry.path for entry in result.skipped] == ["b/1.py"]
    assert len(result.findings) == 7
    assert len(result.limits) == 2


@forks
def test_a_fault_in_a_worker_is_a_fault_of_the_tool(small, monkeypatch):
    def learn(trees, failed):
        raise KeyError("x")

    monkeypatch.setattr(examining, "learn", learn)
    with pytest.raises(RuntimeError, match="KeyError"):
        scan_sources(tree(*(f"{folder}/{n}.py" for folder in "abcd" for n in range(2))))


@pytest.mark.parametrize("error", [RecursionError(), MemoryError(), KeyError("x")])
def test_a_rule_that_fails_costs_the_file_and_not_the_run(error, monkeypatch):
    """Without workers too: one file in which a rule fails hid what the others have."""
    from ddaudit.rules.bare_cache import BareCache

    real = BareCache.decide

    def decide(self, node, file):
        if file.source.path == "b.py":
            raise error
        return real(self, node, file)

    monkeypatch.setattr(BareCache, "decide", decide)
    result = scan_sources(tree("a.py", "b.py", "c.py"))
    assert [(entry.path, entry.reason.value) for entry in result.skipped] == [("b.py", "worker crash")]
    assert [finding.path for finding in result.findings] == ["a.py", "c.py"]
    assert result.exit_code == 2
