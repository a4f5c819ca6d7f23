"""Tells syntax that is newer than this Python from what is no Python at all: LibCST parses the first."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddaudit.auditor.sources.source import SourceFile

TIMEOUT_S = 20
MAX_CRASHES = 3
_PARSE = """
import json, sys
import libcst
for text in json.load(sys.stdin):
    try:
        libcst.parse_module(text)
    except Exception:
        print(0, flush=True)
    else:
        print(1, flush=True)
"""


def newer_syntax(failed: list[SourceFile]) -> set[str]:
    """Paths of those files, none of which this Python parses, that LibCST parses."""
    texts = tuple(source.text for source in failed)
    return {source.path for source, parses in zip(failed, _parse(texts), strict=False) if parses}


# Each pass of a fix scans all files again.
@lru_cache(maxsize=2)
def _parse(texts: tuple[str, ...]) -> list[bool]:
    """Whether LibCST parses each text, as far as it came. On deep nesting its parser overflows the stack, so it runs
    in a process of its own, one that imports nothing from the working folder."""
    parses: list[bool] = []
    for _ in range(MAX_CRASHES):
        rest = texts[len(parses) :]
        if not rest:
            break
        command = [sys.executable, "-I", "-c", _PARSE]
        try:
            done = subprocess.run(command, input=json.dumps(rest).encode(), capture_output=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            break
        parses += [line == b"1" for line in done.stdout.splitlines()]
        if done.returncode:
            parses.append(False)
    return parses
