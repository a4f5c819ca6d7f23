"""Which names a release of Transformers has, and its classes which members: read from lists that ship with the tool."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

RELEASE = "5.24.0"
OLDEST = "4.57"
"""The oldest release whose names are known; what it lacks already is gone at the latest there."""
DATA = Path(__file__).parent / "data" / f"transformers-{RELEASE}.json.gz"
MEMBERS = DATA.with_name(f"transformers-{RELEASE}-members.json.gz")
LOST = DATA.with_name("transformers-lost.json.gz")
"""Names and members that older releases have, by the release that lacks them."""


# Old names of "fast" modules and classes are served on demand, by rules of their own, and stand in no list.


class _Lists:
    """Names by what has them, taken apart where they are asked for: apart, all of them fill ten times the memory."""

    def __init__(self, record: dict[str, str]) -> None:
        self.record = record
        self._apart: dict[str, tuple[str, ...]] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self.record

    def __getitem__(self, owner: str) -> tuple[str, ...]:
        """Empty where nothing is known."""
        if owner not in self._apart:
            self._apart[owner] = tuple(self.record.get(owner, "").split())
        return self._apart[owner]


def _read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


@cache
def _modules() -> _Lists:
    return _Lists(_read(DATA))


@cache
def _members() -> _Lists:
    return _Lists(_read(MEMBERS))


@cache
def _lost() -> dict[str, _Lists]:
    return {release: _Lists(gone) for release, gone in _read(LOST).items()}


def gone_since(name: str) -> str:
    """The release from which a module, a name in one, or a class's member is no more, where it is none of this one."""
    owner, _, last = name.rpartition(".")
    for release, gone in _lost().items():
        names = gone[owner]
        if name in gone or "*" in names or last in names:
            return release
    return OLDEST


def load() -> None:
    """Read the lists now: processes that are forked later have them."""
    for read in (_modules, _members, _lost):
        read()


def has_module(module: str) -> bool:
    """Whether `import module` works; only for modules of Transformers."""
    return module in _modules() or module.endswith("_fast")


def has_name(module: str, name: str) -> bool:
    """Whether `from module import name` works."""
    if name.endswith("Fast") or module.endswith("_fast") or name.startswith("__"):
        return True
    modules = _modules()
    return module in modules and (name in modules[module] or "*" in modules[module] or f"{module}.{name}" in modules)


def attention_classes(module: str) -> tuple[str, ...]:
    """Attention classes of one family's modelling module, in the order of their names."""
    return tuple(name for name in _members().record if name.startswith(f"{module}.") and "Attention" in name)


def has_member(owner: str, attr: str) -> bool:
    """Whether instances of this class have the attribute; True where nothing is known of the class."""
    members = _members()
    if owner not in members and "Attention" in owner:
        # A class that is gone, such as one of a single backend, was the family's attention too.
        known = attention_classes(owner.rpartition(".")[0])
        return not known or any(has_member(name, attr) for name in known)
    return owner not in members or attr in members[owner] or attr in members["torch.nn.Module"] or attr[:2] == "__"


def is_generate_keyword(name: str) -> bool:
    """Whether `generate` takes this argument on some model: its own, a setting of generation, or one of a forward."""
    return name in _members()["GenerationMixin.generate"]


def parameters(function: str) -> tuple[str, ...] | None:
    """Names of a rotary function's parameters; None where nothing is known of it."""
    return _members()[function] or None
