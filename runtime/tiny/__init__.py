"""A small hybrid target and its drafter, trained on what ships with every Python, and how they are trained."""

from __future__ import annotations

from pathlib import Path

TINY = "tiny-trained"
"""The pair's name, for `--model` and `--drafter`."""
TARGET = Path(__file__).parent / "weights" / "target"
DRAFTER = TARGET.parent / "drafter"
