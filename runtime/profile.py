"""Built-in configurations of targets and drafters, so that an architecture can be run without its checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddaudit.runtime.errors import RunError

_FOLDER = Path(__file__).parent / "profiles"


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


def profile_names(kind: str) -> list[str]:
    return sorted(name for name in _all_names() if load_profile(name).kind == kind)


def load_profile(name: str) -> Profile:
    if name not in _all_names():
        raise RunError(
            f"`{name}` is no folder, no hub id (`owner/name`) and no built-in profile",
            f"name a checkpoint's folder, a hub id, or one of the built-in profiles: {', '.join(_all_names())}",
        )
    data = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Profile(name=name, **data)


def _all_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))
