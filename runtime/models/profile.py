"""Built-in configurations of targets and drafters, so that an architecture can be run without its checkpoint."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddaudit.runtime.errors import RunError
from ddaudit.runtime.tiny import TINY

# Targets whose facts the scan reads stand with the core, which needs no torch.
_FOLDERS = (Path(__file__).parent / "profiles", Path(__file__).parents[2] / "auditor" / "profiles")


@dataclass(frozen=True)
class Profile:
    """A model's `config.json` and what goes with it."""

    name: str
    kind: str
    """`target` or `drafter`."""
    about: str
    config: dict[str, Any]
    drafter: str = ""
    """The profile of the drafter made for this target."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a probe found, for the scan."""


def profile_names(kind: str) -> list[str]:
    return sorted(name for name in _paths() if load_profile(name).kind == kind)


def has_profile(name: str) -> bool:
    return name in _paths()


def load_profile(name: str) -> Profile:
    if not has_profile(name):
        known = sorted(_paths())
        close = difflib.get_close_matches(name.lower(), [TINY, *known], n=1, cutoff=0.7)
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise RunError(
            f"`{name}` is no folder, no hub id (`owner/name`) and no built-in profile",
            f"{hint}name a folder, a hub id, `{TINY}`, or one of the built-in profiles: {', '.join(known)}",
        )
    return Profile(name=name, **json.loads(_paths()[name].read_text(encoding="utf-8")))


def _paths() -> dict[str, Path]:
    return {path.stem: path for folder in _FOLDERS for path in folder.glob("*.json")}
