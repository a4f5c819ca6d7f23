"""Unified diffs that `git apply` takes, exact to the byte whatever a file's encoding and newlines."""

from __future__ import annotations

import os
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONTEXT = 3
_ESCAPES = {7: "a", 8: "b", 9: "t", 10: "n", 11: "v", 12: "f", 13: "r", 34: '"', 92: "\\"}


def patch(files: Mapping[str, tuple[bytes, bytes]]) -> bytes:
    """One patch for files whose bytes changed: path, relative to the root, to the bytes before and after."""
    return b"".join(_file_patch(path, *files[path]) for path in sorted(files))


def _file_patch(path: str, before: bytes, after: bytes) -> bytes:
    if before == after:
        return b""
    old, new = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    header = b"diff --git %s %s\n--- %s\n+++ %s\n" % (old, new, _ended(old), _ended(new))
    return header + b"".join(_hunks(_lines(before), _lines(after)))


def _lines(data: bytes) -> list[bytes]:
    """Lines as git sees them: only LF ends one."""
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _hunks(before: list[bytes], after: list[bytes]) -> Iterator[bytes]:
    matcher = SequenceMatcher(None, before, after, autojunk=len(before) > 20_000)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        start, end = group[0], group[-1]
        yield b"@@ -%s +%s @@\n" % (_range(start[1], end[2]), _range(start[3], end[4]))
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                yield from _marked(b" ", before[old_start:old_end])
            else:
                yield from _marked(b"-", before[old_start:old_end])
                yield from _marked(b"+", after[new_start:new_end])


def _marked(mark: bytes, lines: list[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"


def _range(start: int, end: int) -> bytes:
    count = end - start
    # An empty side names the line before it.
    return b"%d" % (start + 1) if count == 1 else b"%d,%d" % (start + (count > 0), count)


def _quoted(name: str) -> bytes:
    """A file's name as git writes it: in quotes and escaped where it has unusual characters."""
    data = os.fsencode(name)
    if all(32 <= byte < 127 and byte not in (34, 92) for byte in data):
        return data
    parts = []
    for byte in data:
        if byte in _ESCAPES:
            parts.append("\\" + _ESCAPES[byte])
        else:
            parts.append(chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}")
    return ('"' + "".join(parts) + '"').encode("ascii")


def _ended(name: bytes) -> bytes:
    """A name with spaces ends with a tab in `---` and `+++`, where a time of day could follow."""
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name
