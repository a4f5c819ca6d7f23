"""A tree mask left on the model as an attribute.

`model.model.tree_mask = mask` works only with a vendored forward that reads it: a stock model has no such attribute,
accepts any, and verifies the tree under its plain causal mask without an error. Even where it is read, it never
reaches linear-attention layers. Hand the mask to the forward as `attention_mask`, `[B, 1, T, P + T]`, with a cache
from `make_cache(model)`, which reads the tree from it.

On: every release and every stock model, silently.
Seen: the way of FasterDecoding/Medusa and SafeAILab/EAGLE, which vendor the model that reads it.
Fix: none: the vendored forward has to go with it.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class MaskAttribute(Rule):
    code = "DDA107"
    kind = "tree-mask"
    severity = Severity.SILENT
    message = (
        "only a vendored forward reads `{name}`; a stock model ignores it without an error: "
        "give the mask to the call, with a cache from `make_cache(model)`"
    )
    nodes = (ast.Assign,)
    markers = ("mask",)
    EXAMPLES = (
        Good("""
            from torch import nn

            class Tiny(nn.Module):
                def set_mask(self, mask):
                    self.tree_mask = mask
        """),
        Good("""
            def store(batch, mask):
                batch.tree_mask = mask
        """),
        Bad("""
            from transformers import PreTrainedModel

            def arm(model: PreTrainedModel, mask):
                model.model.tree_mask = mask
        """),
        Bad("""
            def disarm(model):
                model.base_model.model.tree_mask = None
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Assign)
        for target in node.targets:
            match target:
                # A method put in the place of one that makes masks is no mask.
                case ast.Attribute(value=base, attr=name) if name.endswith("_mask") and not name.startswith("_prepare"):
                    model = file.holds(base, Kind.MODEL, Kind.BACKBONE, Kind.DECODER)
                    is_self = isinstance(base, ast.Name) and file.holds(base, Kind.OWN) is not None
                    if model is not None and not is_self:
                        reason, claim = "the forward that reads it has to go", Claim(Ask.MASK_ATTRIBUTE, name)
                        yield self.report(file, target, model, fix=reason, claim=claim, name=name)
