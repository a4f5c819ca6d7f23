"""What reading a hostile file can end in, however careful the code that does: it costs that file, not the run."""

from __future__ import annotations

EXHAUSTION = (RecursionError, MemoryError)
TOO_DEEP = "nested too deeply"


def said(error: BaseException) -> str:
    """Why nothing more can be said about the file."""
    return "out of memory" if isinstance(error, MemoryError) else f"an expression is {TOO_DEEP}"
