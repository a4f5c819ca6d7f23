"""Finding and decoding Python files: no byte lost, nothing skipped in silence."""

from __future__ import annotations

import ast
import codecs
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddaudit.auditor.sources.source import MAX_BYTES, SkipReason, SourceFile, decode, read_tree

AWKWARD = [
    b"",
    b"x = 1",
    b"x = 1\r\ny = 2\r\n",
    b"x = 1\ry = 2\r",
    b"x = 1\n\r\ny = 2\r\n\r",
    codecs.BOM_UTF8 + b"x = '\xc3\xa9'\n",
    b"# -*- coding: latin-1 -*-\nx = '\xe9'\n",
    b"# a comment\r# coding: latin-1\rx = '\xe9'\r",
    b"x = 1\n\x0cy = 2\n\tz = 3  \n",
    "\uff58 = 1\ny = 'é\U0001d518'; z = 2\n".encode(),
    b"x = '\x0b \xe2\x80\xa8 \x1c'\n",
]


@pytest.mark.parametrize("data", AWKWARD)
def test_decoded_text_encodes_to_the_same_bytes(data):
    assert decode("a.py", data).encode() == data


@given(st.lists(st.sampled_from(["x = 1", "é = '\U0001d518'", "\n", "\r", "\r\n", "\x0c", "# ü", "\t", "'''\r'''"])))
def test_any_mixture_encodes_to_the_same_bytes(parts):
    data = "".join(parts).encode()
    assert decode("a.py", data).encode() == data


@pytest.mark.parametrize(
    "data",
    [b"x = '\xe9'\n", b"# coding: no-such-codec\n", codecs.BOM_UTF8 + b"# coding: latin-1\n"],
)
def test_bytes_that_are_not_what_the_file_declares_raise(data):
    with pytest.raises((SyntaxError, ValueError, LookupError)):
        decode("a.py", data)


@pytest.mark.parametrize(
    "text",
    [
        "a = 1\nbb = 'é\U0001d518' + ccc\n",
        "a = 1\r\nbb = 'é' + ccc\r",
        "a = 1\rbb = ccc",
        "a = 1\n\x0cbb = ccc\n",
        "s = '''\u2028\x0b'''\nbb = 'ü' + ccc\n",
        "\uff42\uff42 = '日本' + ccc\n",
    ],
)
def test_parser_positions_are_code_points_of_the_text(text):
    """A parser column is in UTF-8 bytes, and a line ends by its own rules: an edit placed by either corrupts text."""
    source = SourceFile("a.py", text)
    name = next(n for n in ast.walk(source.parse()) if isinstance(n, ast.Name) and n.id == "ccc")
    start = source.offset(name.lineno, name.col_offset)
    end = source.offset(name.end_lineno, name.end_col_offset)
    assert text[start:end] == "ccc"
    span = source.span(start, end)
    assert (span.line, span.end_line) == (name.lineno, name.end_lineno)
    assert source.line(span.line)[span.column - 1 :].startswith("ccc")


def test_comments_are_told_from_hashes_in_strings():
    text = "a = '# no'  # yes\r\nb = f('#')\r# é too\r"
    source = SourceFile("a.py", text)
    assert source.comments == [text.index("# yes"), text.index("# é")]
    assert not source.has_comment(0, text.index("# yes"))
    assert source.has_comment(0, text.index("# yes") + 1)


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_name(path.name + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_folder_is_read_with_paths_relative_to_it(tmp_path):
    write(tmp_path, a="", pkg__b="", pkg__deep__c="")
    (tmp_path / "notes.txt").write_text("x")
    tree = read_tree([tmp_path])
    assert list(tree.sources) == ["a.py", "pkg/b.py", "pkg/deep/c.py"]
    assert tree.skipped == ()


def test_what_is_not_source_is_left_out_and_said(tmp_path):
    write(tmp_path, a="", build__b="", venv__c="", kept__d="")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyvenv.cfg").write_text("")
    write(tmp_path, mine__lib__e="")
    write(tmp_path / ".git", f="")
    tree = read_tree([tmp_path])
    assert list(tree.sources) == ["a.py", "kept/d.py"]
    assert {(entry.path, entry.reason) for entry in tree.skipped} == {
        ("build", SkipReason.EXCLUDED),
        ("mine", SkipReason.EXCLUDED),
        ("venv", SkipReason.EXCLUDED),
    }
    assert not any(entry.is_failure for entry in tree.skipped)


def test_unreadable_files_are_failures_with_a_reason(tmp_path):
    write(tmp_path, a="", big="#" * (MAX_BYTES + 1))
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    tree = read_tree([tmp_path])
    assert list(tree.sources) == ["a.py"]
    assert {(entry.path, entry.reason) for entry in tree.skipped if entry.is_failure} == {
        ("big.py", SkipReason.TOO_LARGE),
        ("latin.py", SkipReason.ENCODING),
    }


def test_links_inside_are_visited_once_and_links_out_are_not_followed(tmp_path):
    inside, outside = tmp_path / "repo", tmp_path / "other"
    write(inside, pkg__a="")
    write(outside, secret="")
    os.symlink(inside, inside / "pkg" / "loop")
    os.symlink(inside / "pkg" / "a.py", inside / "alias.py")
    os.symlink(outside, inside / "away")
    os.symlink(outside / "secret.py", inside / "secret.py")
    tree = read_tree([inside])
    assert list(tree.sources) == ["pkg/a.py"]
    assert {(entry.path, entry.reason) for entry in tree.skipped} == {
        ("away", SkipReason.SYMLINK),
        ("secret.py", SkipReason.SYMLINK),
    }


def test_one_file_named_twice_is_read_once(tmp_path, monkeypatch):
    write(tmp_path, pkg__a="")
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    tree = read_tree([Path("pkg/a.py"), Path("pkg"), Path("./pkg/../pkg/a.py")])
    assert list(tree.sources) == ["pkg/a.py"]


def test_a_file_without_the_suffix_is_read_when_named(tmp_path):
    (tmp_path / "script").write_text("x = 1\n")
    assert list(read_tree([tmp_path / "script"]).sources) == ["script"]


def test_missing_path_and_empty_folder_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_tree([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no Python file"):
        read_tree([tmp_path])
