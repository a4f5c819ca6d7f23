"""`torch.cuda.synchronize()` raises on a machine without CUDA.

Timers call it so that kernels count where they were launched. Without a GPU there is nothing to wait for, and the
call stops the whole program (a CPU build of torch raises AssertionError). Ask first whether CUDA is there.

On: every release of torch without CUDA; the message differs with the build.
Seen: liranringel/ddtree, whose timers stop it on a CPU (measured).
Fix: safe: nothing changes where there is CUDA.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.auditor.sources.source import NEWLINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

NAME = "torch.cuda.synchronize"


class UnguardedSynchronize(Rule):
    code = "DDA405"
    kind = "unguarded-synchronize"
    severity = Severity.ERROR
    message = "`torch.cuda.synchronize()` raises without CUDA; call it only if `torch.cuda.is_available()`"
    nodes = (ast.Call,)
    markers = ("synchronize",)
    EXAMPLES = (
        Good("""
            import torch

            def wait():
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        """),
        Good("""
            import torch

            def wait(device):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        """),
        Good("""
            import torch

            def wait():
                if not torch.cuda.is_available():
                    return
                torch.cuda.synchronize()
        """),
        Good("""
            def wait(stream):
                stream.synchronize()
        """),
        Bad(
            """
            import time
            import torch

            def now():
                torch.cuda.synchronize()
                return time.perf_counter()
            """,
            """
            import time
            import torch

            def now():
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                return time.perf_counter()
            """,
        ),
        Bad("""
            import torch

            def now(clock):
                return torch.cuda.synchronize() or clock()
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        if NAME not in file.qualified_names(node.func) or _is_guarded(node, file):
            return
        fact = f"{file.source.path}:{node.lineno}: no test for CUDA stands around it"
        because = Value(Kind.LIBRARY, NAME, evidence=(fact,))
        yield self.report(file, node, because, fix=_fix(node, file), claim=Claim(Ask.SYNCHRONIZE))


def _is_guarded(node: ast.AST, file: FileFacts) -> bool:
    """Under a test that asks for CUDA, in a `try`, or after an early exit by such a test."""
    here = node
    for above in file.ancestors(node):
        match above:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if here is not test:
                if _asks_for_cuda(test, file):
                    return True
            case ast.BoolOp(values=values) if here is not values[0] and _asks_for_cuda(values[0], file):
                return True
            case ast.Try(body=body, handlers=[_, *_]) if here in body:
                return True
        if isinstance(here, ast.stmt):
            block = file.block(here)
            for statement in block[: block.index(here)]:
                match statement:
                    case ast.If(test=test, body=[*_, ast.Return() | ast.Raise() | ast.Continue()]):
                        if _asks_for_cuda(test, file):
                            return True
                    case ast.Assert(test=test) if _asks_for_cuda(test, file):
                        return True
        here = above
    return False


def _asks_for_cuda(test: ast.expr, file: FileFacts) -> bool:
    """By any name: under `import torch.cuda as device` the guard that the fix writes has no `cuda` in it."""
    if "cuda" in file.text(test).lower():
        return True
    calls = (node for node in ast.walk(test) if isinstance(node, ast.Call))
    return any("torch.cuda.is_available" in file.qualified_names(call.func) for call in calls)


def _fix(node: ast.Call, file: FileFacts) -> Fix | str:
    statement = file.statement(node)
    if not isinstance(statement, ast.Expr) or statement.value is not node or not isinstance(node.func, ast.Attribute):
        return "the call is not a statement of its own"
    start, end = file.offsets(statement)
    line_start = file.source.line_starts[statement.lineno - 1]
    indent = file.source.text[line_start:start]
    rest = NEWLINE.split(file.source.text[end:], maxsplit=1)[0].partition("#")[0]
    is_continued = NEWLINE.sub("", file.source.line(max(1, statement.lineno - 1))).endswith("\\")
    if indent.strip() or rest.strip() or is_continued:
        return "other statements stand on the same line"
    step = "\t" if "\t" in indent else "    "
    test = f"if {file.operand(node.func.value)}.is_available():"
    reason = "nothing changes where there is CUDA; elsewhere there is nothing to wait for"
    edit = file.edit(statement, f"{test}\n{indent}{step}{file.text(statement)}")
    return Fix((edit,), Applicability.SAFE, reason)
