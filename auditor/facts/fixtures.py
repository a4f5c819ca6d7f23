"""What pytest hands to a test by name: the fixtures of its file, or of a `conftest.py` above it.

Source: https://docs.pytest.org/en/stable/reference/fixtures.html (fixture availability).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.scopes import File, Function, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.flow import Flow


def pass_fixtures(flow: Flow) -> None:
    """Let what fixtures return or yield flow into the parameters of tests, and of other fixtures."""
    fixtures: dict[str, list[tuple[File, Function]]] = defaultdict(list)
    for file in flow.files.values():
        for function in file.functions if "pytest" in file.packages else ():
            if _is_fixture(function):
                fixtures[function.name].append((file, function))
    if not fixtures:
        return
    for file in flow.files.values():
        for function in file.functions:
            if function.name.startswith("test") or _is_fixture(function):
                for name in function.positional:
                    fixture = _visible(fixtures.get(name, []), file)
                    if fixture is not None and fixture is not function:
                        for source in _results(fixture, flow):
                            flow.add_source(("name", function.scope, name), source)
    flow.solve()


def _is_fixture(function: Function) -> bool:
    decorators = [] if isinstance(function.node, ast.Lambda) else function.node.decorator_list
    named = (item.func if isinstance(item, ast.Call) else item for item in decorators)
    return any(ast.unparse(item).rpartition(".")[2] == "fixture" for item in named)


def _visible(candidates: list[tuple[File, Function]], file: File) -> Function | None:
    """The fixture that a file sees: its own, the nearest conftest's, or the only one that it can have imported."""
    here = PurePosixPath(file.source.path)
    folders = list(here.parents)
    ranked: list[tuple[int, Function]] = []
    for home, function in candidates:
        there = PurePosixPath(home.source.path)
        if home is file:
            ranked.append((-1, function))
        elif there.name == "conftest.py" and there.parent in folders:
            ranked.append((folders.index(there.parent), function))
    if ranked:
        return min(ranked, key=lambda item: item[0])[1]
    return candidates[0][1] if len(candidates) == 1 else None


def _results(fixture: Function, flow: Flow) -> Iterator[Source]:
    yield from flow.sources.get(("return", fixture, None), [])
    for node in ast.walk(fixture.node):
        if isinstance(node, ast.Yield) and node.value is not None:
            yield Source("value", fixture.scope, node.value)
