"""A tree too large to examine as a whole."""

from __future__ import annotations

import pytest

from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.sources import parts
from ddaudit.auditor.sources.parts import divide, scan_parts
from ddaudit.auditor.sources.source import SourceFile

BROKEN = "from transformers import DynamicCache\n\ncache = DynamicCache()\n"


def tree(*paths, text=BROKEN):
    return {path: SourceFile(path, text) for path in paths}


@pytest.fixture
def small(monkeypatch):
    """Limits that a few short files exceed: three to a part."""
    monkeypatch.setattr(parts, "MAX_WHOLE", 4 * len(BROKEN))
    monkeypatch.setattr(parts, "MAX_PART", 3 * len(BROKEN))


def test_a_repository_is_one_part():
    assert len(divide(tree("a.py", "pkg/b.py", "pkg/inner/c.py"))) == 1


def test_nothing_is_one_empty_part():
    assert divide({}) == [{}]


def test_folders_stay_together_and_neighbours_share_a_part(small):
    sources = tree("a/1.py", "a/2.py", "b/1.py", "c/1.py", "c/2.py", "d/1.py")
    assert [sorted(part) for part in divide(sources)] == [
        ["a/1.py", "a/2.py", "b/1.py"],
        ["c/1.py", "c/2.py", "d/1.py"],
    ]


def test_a_folder_too_large_is_divided_by_what_is_in_it(small):
    sources = tree("a/1.py", *(f"a/b/{n}.py" for n in range(3)), "a/c/1.py", "z.py")
    divided = [sorted(part) for part in divide(sources)]
    assert sorted(path for part in divided for path in part) == sorted(sources)
    assert ["a/b/0.py", "a/b/1.py", "a/b/2.py"] in divided


def test_every_part_is_scanned_and_the_order_is_that_of_paths(small):
    sources = tree(*(f"{folder}/{n}.py" for folder in "dcba" for n in range(2)))
    result = scan_sources(sources, select=("bare-cache",))
    assert [finding.path for finding in result.findings] == sorted(sources)
    assert result.num_scanned == 8


def test_a_file_that_does_not_parse_fails_alone(small):
    sources = {**tree("a/1.py", "a/2.py", "b/1.py", "b/2.py"), "b/3.py": SourceFile("b/3.py", "def f(:\n")}
    result = scan_sources(sources, select=("bare-cache",))
    assert [entry.path for entry in result.failed] == ["b/3.py"]
    assert len(result.findings) == 4


def test_results_come_in_the_order_of_the_parts():
    assert scan_parts(len, [tree("a.py"), tree("a.py", "b.py"), {}]) == [1, 2, 0]
