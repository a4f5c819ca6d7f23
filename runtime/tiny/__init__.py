"""A small hybrid target, trained on what ships with every Python, and how it and a drafter for it are trained."""

from __future__ import annotations

from pathlib import Path

TINY = "tiny-trained"
"""Its name for `--model`."""
TARGET = Path(__file__).parent / "weights" / "target"
