"""How a value came from where it is made to where it is used, step by step: the flow followed backwards."""

from __future__ import annotations

import ast
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.scopes import Class, Function, Scope, Source, Variable
from ddaudit.auditor.facts.values import Kind, Value, fact_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.flow import Flow

MAX_STEPS = 8
MAX_TEXT = 60


def steps(flow: Flow, expr: ast.expr, scope: Scope, value: Value) -> tuple[str, ...]:
    """`path:line: fact` of each step from the making of the value to `expr`; empty where it is made there."""
    pending: list[tuple[ast.expr, Scope, tuple[str, ...]]] = [(expr, scope, ())]
    seen: set[Variable] = set()
    known: tuple[str, ...] = ()
    while pending:
        here, inside, taken = pending.pop(0)
        for variable in _variables(flow, here, inside):
            if variable in seen or all(held.origin != value.origin for held in flow.held(variable)):
                continue
            seen.add(variable)
            for source in flow.sources[variable]:
                if all(made.origin != value.origin for made in flow.produce(source)):
                    continue
                step = _step(flow, variable, source)
                known = ((step, *taken) if step else taken)[:MAX_STEPS]
                before = _before(flow, source)
                if before is None or len(known) == MAX_STEPS:
                    return known
                pending.append((*before, known))
                break
    return known


def _variables(flow: Flow, expr: ast.expr, scope: Scope) -> Iterator[Variable]:
    """What the value of an expression may have been read from."""
    for node in ast.walk(expr):
        match node:
            case ast.Name() | ast.Attribute():
                if (variable := flow.variable(node, scope)) is not None:
                    yield variable
            case ast.Call(func=function):
                for called in flow.values(function, scope):
                    target = flow.definition(called)
                    if called.kind in (Kind.FUNCTION, Kind.METHOD) and isinstance(target, Function):
                        yield from takewhile(
                            flow.sources.__contains__, (("return", target, i) for i in chain([None], count()))
                        )


def _before(flow: Flow, source: Source) -> tuple[ast.expr, Scope] | None:
    """The expression that the source takes the value from; None where it comes from nowhere else."""
    if source.mode == "import" and isinstance(source.target, tuple):
        module, name, level = source.target
        file = flow.modules.resolve(module, level, source.scope.file)
        return (ast.Name(name, ast.Load()), file.scope) if file is not None and name else None
    return (source.expr, source.scope) if source.expr is not None and source.mode != "annotation" else None


def _step(flow: Flow, variable: Variable, source: Source) -> str:
    """What happened, where it is not the making of the value itself."""
    kind, home, name = variable
    expr, file = source.expr, source.scope.file
    if source.mode == "import" and isinstance(source.target, tuple):
        if not isinstance(home, Scope) or not home.names[str(name)]:
            return ""
        return fact_at(home.names[str(name)][0], home.file, f"`{name}` is imported")
    if expr is None or source.mode == "annotation":
        return ""
    text = " ".join(ast.unparse(expr).split())
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    function = home.function if isinstance(home, Scope) else None
    if source.mode.startswith("iterate"):
        return fact_at(expr, file, f"`{name}` goes over `{text}`")
    if kind == "return" and isinstance(home, Function):
        return fact_at(expr, file, f"`{home.name}` returns `{text}`")
    if kind == "attribute" and isinstance(home, Class):
        return fact_at(expr, file, f"`{name}` of `{home.node.name}` is `{text}`")
    if function is not None and source.scope is not home:
        return fact_at(expr, file, f"`{function.name}` is given `{text}` as `{name}`")
    return fact_at(expr, file, f"`{name}` is `{text}`")
