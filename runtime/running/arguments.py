"""`--arg`: values passed on to entries, and the calls that sweeping over them makes."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddaudit.runtime.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddaudit.auditor.record import Entry


@dataclass(frozen=True)
class Argument:
    """One `--arg [function.]name=value`."""

    function: str
    name: str
    value: Any

    def fits(self, entry: Entry) -> bool:
        return not self.function or self.function in (entry.qualname, entry.qualname.rpartition(".")[2], entry.name)


@dataclass(frozen=True)
class Call:
    """An entry with one choice of its `--arg` values: one record of the run."""

    entry: Entry
    arguments: dict[str, Any]
    name: str


def parse_argument(text: str) -> Argument:
    """`[function.]name=value`, the value a Python literal where it is one and the text itself where not."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RunError(f"`--arg {text}` is not `name=value`", "for instance `--arg tree_budget=64`")
    function, _, parameter = name.strip().rpartition(".")
    if not parameter.isidentifier():
        raise RunError(f"`--arg {text}`: `{parameter}` is not a parameter's name", "write `--arg function.name=value`")
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        parsed = value
    return Argument(function, parameter, parsed)


def expand(entries: Mapping[Entry, Sequence[str]], arguments: Sequence[Argument]) -> list[Call]:
    """Each entry, given with its parameters, with each combination of the values given for them.

    A name given several times sweeps, and its value is then part of the call's name.
    """
    calls = []
    used: set[int] = set()
    for entry, parameters in entries.items():
        values: dict[str, list[Any]] = {}
        for position, argument in enumerate(arguments):
            if argument.fits(entry) and (argument.name in parameters or "**" in parameters):
                values.setdefault(argument.name, []).append(argument.value)
                used.add(position)
        for combination in itertools.product(*values.values()):
            chosen = dict(zip(values, combination, strict=True))
            swept = ",".join(f"{name}={value}" for name, value in chosen.items() if len(values[name]) > 1)
            calls.append(Call(entry, chosen, f"{entry.name}[{swept}]" if swept else entry.name))
    unused = [argument.name for position, argument in enumerate(arguments) if position not in used]
    if unused:
        signatures = "; ".join(f"{entry.name}({', '.join(names)})" for entry, names in entries.items())
        raise RunError(f"no entry takes `--arg {unused[0]}`", f"the entries are: {signatures}")
    return calls
