"""What a wrapper hides: a fixed way through PEFT, and a compiled model taken for a plain one.

`peft_model.base_model.model` is a way through two wrappers that changes with the adapter and with nesting;
`get_base_model()` is the way that PEFT promises (huggingface/peft#932). `torch.compile(model)` returns an
`OptimizedModule`: it is no `PreTrainedModel`, so an `isinstance` test is false, and every key of its `state_dict()`
starts with `_orig_mod.`, so the file does not load into a plain model (pytorch/pytorch#101107). Take
`getattr(model, "_orig_mod", model)` first.

On: every release; models behind PEFT or `torch.compile`.
Seen: huggingface/peft#932, unslothai/unsloth#1509, pytorch/pytorch#101107, rasbt/LLMs-from-scratch#580.
Fix: safe: the same object where nothing is wrapped.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.library import INNER_NAMES, LAYERS_NAMES
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

TEST = 'a compiled model is an `OptimizedModule`, so this is false; test `getattr(model, "_orig_mod", model)`'
STATE = 'every key of a compiled model\'s state starts with `_orig_mod.`; take `getattr(model, "_orig_mod", model)`'
REASON = "the same object where the model is not compiled, and the model itself where it is"


class WrapperPath(Rule):
    code = "DDA213"
    kind = "wrapper"
    severity = Severity.PORT
    message = "`{path}` is a way through PEFT's wrappers that nesting changes; use `get_base_model()`"
    nodes = (Named(ast.Attribute, frozenset({"model"})), Named(ast.Call, frozenset({"isinstance", "state_dict"})))
    markers = ("base_model.model", "compile")
    EXAMPLES = (
        Good("""
            def layers(peft_model):
                return peft_model.get_base_model().get_decoder().layers
        """),
        Good("""
            import torch
            from transformers import AutoModelForCausalLM

            def save(name, path):
                model = AutoModelForCausalLM.from_pretrained(name)
                torch.save(model.state_dict(), path)
        """),
        Good("""
            import torch
            from transformers import PreTrainedModel

            def is_plain(model: PreTrainedModel):
                runner = torch.compile(model)
                return isinstance(getattr(runner, "_orig_mod", runner), PreTrainedModel)
        """),
        Bad(
            """
            from peft import PeftModel

            def layers(model: PeftModel):
                return model.base_model.model.model.layers
            """,
            """
            from peft import PeftModel

            def layers(model: PeftModel):
                return model.get_base_model().model.layers
            """,
        ),
        Bad(
            """
            import torch
            from transformers import AutoModelForCausalLM

            def save(name, path):
                model = torch.compile(AutoModelForCausalLM.from_pretrained(name))
                torch.save(model.state_dict(), path)
            """,
            """
            import torch
            from transformers import AutoModelForCausalLM

            def save(name, path):
                model = torch.compile(AutoModelForCausalLM.from_pretrained(name))
                torch.save(getattr(model, "_orig_mod", model).state_dict(), path)
            """,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute(value=ast.Attribute(value=root, attr="base_model"), attr="model"):
                yield from self._peft(node, root, file)
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name() as given, classes]):
                compiled = file.holds(given, Kind.COMPILED)
                if compiled is not None and any("PreTrainedModel" in name for name in file.qualified_names(classes)):
                    yield self.report(file, node, compiled, message=TEST, fix=_unwrap(given, file))
            case ast.Call(func=ast.Attribute(value=ast.Name() as given, attr="state_dict"), args=[], keywords=[]):
                if (compiled := file.holds(given, Kind.COMPILED)) is not None:
                    yield self.report(file, node, compiled, message=STATE, fix=_unwrap(given, file))

    def _peft(self, node: ast.Attribute, root: ast.expr, file: FileFacts) -> Iterator[Finding]:
        model = file.holds(root, Kind.MODEL)
        above = file.parent(node)
        if model is None or not isinstance(above, ast.Attribute) or not file.is_stock(root):
            return
        # A class of the repository may keep a plain model as `base_model`; it has no `model` below its `model`.
        says_peft = "peft" in " ".join((file.text(root), *model.evidence)).lower()
        if above.attr not in (INNER_NAMES | LAYERS_NAMES if says_peft else INNER_NAMES) or not file.is_read(node):
            return
        reason = "the base model of the adapter, whatever lies between"
        fix = Fix((file.edit(node, f"{file.text(root)}.get_base_model()"),), Applicability.SAFE, reason)
        yield self.report(file, node, model, fix=fix, path=file.text(node))


def _unwrap(given: ast.Name, file: FileFacts) -> Fix:
    edit = file.edit(given, f'getattr({given.id}, "_orig_mod", {given.id})')
    return Fix((edit,), Applicability.SAFE, REASON)
