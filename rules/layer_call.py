"""A decoder layer run by hand lacks what the model hands its layers.

A layer of Transformers 5 needs `position_embeddings` from the model's rotary module and, by its own kind, a causal, a
sliding or a padding mask; Qwen3's raises `cannot unpack non-iterable NoneType`, Qwen3.5's misses an argument. It
returns a tensor, so `layer(hidden)[0]` drops the batch (VectorSpaceLab/OmniGen#212, unslothai/unsloth#1442), and a
cache handed to it as `past_key_value` is swallowed. To change what a layer reads or writes, hook it and call the
model. The repository's own layers may be called as they like.

On: Transformers 5 on every model.
Seen: VectorSpaceLab/OmniGen#212, unslothai/unsloth#1442; raises on tiny Qwen3 and Qwen3.5 (measured).
Fix: none: what the call was for has to be seen.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.calls import passes_on
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class LayerCall(Rule):
    code = "DDA204"
    kind = "layer-call"
    severity = Severity.ERROR
    message = (
        "a decoder layer needs position embeddings and a mask of its own kind, and returns a tensor; "
        "hook the layer and call the model instead"
    )
    since = "4.57"
    nodes = (ast.Call, Named(ast.Attribute, frozenset({"forward"})))
    markers = ("layer", "block", ".h")
    EXAMPLES = (
        Good("""
            from torch import nn
            from transformers import PreTrainedModel

            class Steered(nn.Module):
                def __init__(self, layer, vector):
                    super().__init__()
                    self.layer, self.vector = layer, vector

                def forward(self, hidden, *args, **kwargs):
                    return self.layer(hidden + self.vector, *args, **kwargs)

            def steer(model: PreTrainedModel, vector):
                return [Steered(layer, vector) for layer in model.get_decoder().layers]
        """),
        Good("""
            from torch import nn

            class Tiny(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.layers = nn.ModuleList([nn.Linear(width, width)])

                def forward(self, hidden):
                    for layer in self.layers:
                        hidden = layer(hidden)[0]
                    return hidden
        """),
        Good("""
            from transformers import PreTrainedModel

            def freeze(model: PreTrainedModel, start):
                for layer in model.get_decoder().layers[start:]:
                    layer.requires_grad_(False)
        """),
        Bad("""
            from transformers import PreTrainedModel

            def run_from(model: PreTrainedModel, hidden, start):
                for block in model.get_decoder().layers[start:]:
                    hidden = block(hidden)[0]
                return hidden
        """),
        Bad("""
            from transformers import PreTrainedModel

            def patch(model: PreTrainedModel, forward):
                for layer in model.get_decoder().layers:
                    layer.forward = forward
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Call(func=function) if node in file.facts.flow.layer_calls or _is_forward(function):
                if isinstance(function, ast.Attribute) and function.attr == "forward":
                    function = function.value
                layer = file.holds(function, Kind.LAYER)
                # What only passes on what the model gave has all that a layer needs.
                if layer is not None and not passes_on(node) and file.is_stock(function):
                    reason = "what the call was for has to be seen"
                    yield self.report(file, node, layer, fix=reason, claim=Claim(Ask.LAYER_ALONE))
            case ast.Attribute(value=owner, ctx=ast.Store()):
                assigned, layer = file.parent(node), file.holds(owner, Kind.LAYER)
                if layer is not None and isinstance(assigned, ast.Assign) and len(assigned.targets) == 1:
                    yield self.report(file, assigned, layer, fix="the new forward has the old signature")


def _is_forward(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "forward"
