"""The first `ModuleList` taken for the decoder's layers.

Going through `model.modules()` and taking the first `nn.ModuleList` finds the decoder's layers on a text-only model. A
vision-language model such as `Qwen3_5ForConditionalGeneration` has the blocks of its vision tower first, so the
result is silently about images (modelscope/ms-swift#10173). `get_decoder().layers` are the text layers on every
causal model.

On: every release; vision-language models, silently.
Seen: modelscope/ms-swift#10173.
Fix: none: the function that looks has to take the model's own accessor.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class FirstModuleList(Rule):
    code = "DDA212"
    kind = "model-path"
    severity = Severity.SILENT
    message = (
        "on a vision-language model the first `ModuleList` holds the vision tower's blocks; use `get_decoder().layers`"
    )
    nodes = (Named(ast.Call, frozenset({"isinstance"})),)
    markers = ("ModuleList",)
    EXAMPLES = (
        Good("""
            from torch import nn

            def lists(model):
                return [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        """),
        Good("""
            from torch import nn

            def longest(model):
                best = None
                for module in model.modules():
                    if isinstance(module, nn.ModuleList):
                        if best is None or len(module) > len(best):
                            best = module
                return best
        """),
        Good("""
            from torch import nn

            def count(model):
                return sum(isinstance(module, nn.ModuleList) for module in model.modules())
        """),
        Bad("""
            from torch import nn

            def blocks(model):
                for module in model.modules():
                    if isinstance(module, nn.ModuleList):
                        return module
        """),
        Bad("""
            from torch import nn

            def blocks(model):
                return next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), which]):
                if "torch.nn.ModuleList" in file.qualified_names(which) and _is_first(node, name, file):
                    fact = f"{file.source.path}:{node.lineno}: the first module that is a `ModuleList` is taken"
                    because = Value(Kind.LAYERS, fact, Confidence.LIKELY, (fact,))
                    reason = "the whole search goes, not only the test"
                    yield self.report(file, node, because, fix=reason, claim=Claim(Ask.FIRST_LIST))


def _is_first(test: ast.Call, name: str, file: FileFacts) -> bool:
    """Whether the loop over modules stops at the first that passes the test."""
    for above in file.ancestors(test):
        match above:
            case ast.If(body=body):
                last = body[-1]
                returns = isinstance(last, ast.Return) and last.value is not None and name in file.text(last.value)
                if not returns and not isinstance(last, ast.Break):
                    return False
            case ast.For(iter=iterable):
                return "modules()" in file.text(iterable)
            case ast.GeneratorExp(generators=[ast.comprehension(iter=iterable)]):
                call = file.parent(above)
                is_next = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "next"
                return is_next and "modules()" in file.text(iterable)
            case ast.FunctionDef() | ast.ListComp():
                return False
    return False
