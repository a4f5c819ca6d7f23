"""Records that pass between fixing, running and reporting; the one module that `runtime` shares with `auditor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One parameter of an entry point, as written in the source."""

    name: str
    annotation: str
    """The annotation's source text, empty without one."""
    has_default: bool


@dataclass(frozen=True)
class Entry:
    """A function of a research repository that takes a target and input ids and returns generated ids."""

    module: str
    """Import name as the repository itself uses it from its root, such as `ddtree` or `model.dflash`."""
    qualname: str
    """`function` or `Class.method`."""
    path: str
    line: int
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        return f"{self.module}:{self.qualname}"
