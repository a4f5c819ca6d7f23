"""A hook on a decoder layer takes `output[0]`, which now drops the batch.

Decoder layers returned a tuple whose first element was the hidden state. They return the tensor itself now, Llama's
and Qwen's by 4.57, GPT-2's, OPT's and GPT-NeoX's in 5 (Falcon's still do not), so
`output[0]` in a forward hook is the first row of the batch: the numbers are silently those of one prompt, a further
index raises, and what is written to it reaches one row only (zjunlp/EasyEdit#675). The same goes for a trace of a
layer, `trace.output[0]`. Unwrap only what is a tuple. Attention modules still return tuples, MLPs never did.

On: Transformers 5 on every model, silently.
Seen: zjunlp/EasyEdit#675; kmeng01/memit and the tracers of nnsight take it so.
Fix: safe in a hook that returns nothing; none where the hook returns, or where what is taken is written to.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class LayerOutputIndex(Rule):
    code = "DDA205"
    kind = "layer-call"
    severity = Severity.SILENT
    message = (
        "a decoder layer returns a tensor now, so `[0]` drops all rows of the batch but the first; "
        "unwrap only what is a tuple"
    )
    since = "4.57"
    nodes = (ast.Subscript,)
    markers = ("hook", "edit_output", ".output", "*args", "**kwargs")
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def tap(model: PreTrainedModel, store):
                def hook(module, args, output):
                    store.append(output[0] if isinstance(output, tuple) else output)

                model.get_decoder().layers[3].register_forward_hook(hook)
        """),
        Good("""
            from transformers import PreTrainedModel

            def tap(model: PreTrainedModel, store):
                def hook(module, args, output):
                    store.append(output[0])

                model.get_decoder().layers[3].self_attn.register_forward_hook(hook)
        """),
        Bad(
            """
            from transformers import PreTrainedModel

            def tap(model: PreTrainedModel, store):
                def hook(module, args, output):
                    store["h"] = output[0]

                model.get_decoder().layers[3].register_forward_hook(hook)
            """,
            """
            from transformers import PreTrainedModel

            def tap(model: PreTrainedModel, store):
                def hook(module, args, output):
                    store["h"] = output[0] if isinstance(output, tuple) else output

                model.get_decoder().layers[3].register_forward_hook(hook)
            """,
        ),
        Bad("""
            from transformers import PreTrainedModel

            def steer(model: PreTrainedModel, direction):
                def hook(module, args, output):
                    return (output[0] + direction,)

                model.get_decoder().layers[3].register_forward_hook(hook)
        """),
        Bad("""
            from torch import nn
            from transformers import PreTrainedModel

            class Watched(nn.Module):
                def __init__(self, block):
                    super().__init__()
                    self.block = block

                def forward(self, *args, **kwargs):
                    output = self.block(*args, **kwargs)
                    self.seen = output[0]
                    return output

            def watch(model: PreTrainedModel):
                return [Watched(layer) for layer in model.get_decoder().layers]
        """),
        Bad("""
            from nnsight import LanguageModel

            def state(name, prompt):
                model = LanguageModel(name)
                with model.trace(prompt):
                    return model.transformer.h[3].output[0].save()
        """),
        Bad("""
            def state(trace, i):
                return trace[f"model.layers.{i}"].output[0]
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Subscript)
        if file.constant(node.slice) != 0:
            return
        match node.value:
            case ast.Attribute(value=ast.Subscript(slice=key), attr="output"):
                output = file.hooked_layer(key) or file.holds(node.value, Kind.LAYER_OUTPUT)
            case _:
                output = file.holds(node.value, Kind.LAYER_OUTPUT)
        if output is not None and not _is_guarded(node, file):
            yield self.report(file, node, output, fix=_fix(node, output, file), claim=Claim(Ask.LAYER_TUPLE))


def _is_guarded(node: ast.Subscript, file: FileFacts) -> bool:
    """Whether the code asks for the output's type or length before it unpacks."""
    scope = file.function(node)
    name = ast.dump(node.value)
    asks = ("isinstance", "type", "len", "is_tensor", "hasattr")
    for above in ast.walk(scope.node) if scope is not None else ():
        match above:
            case ast.Call(func=ast.Name(id=asked) | ast.Attribute(attr=asked), args=[given, *_]) if asked in asks:
                if ast.dump(given) == name:
                    return True
    return False


def _fix(node: ast.Subscript, output: Value, file: FileFacts) -> Fix | str:
    function = file.function(node)
    if not isinstance(node.value, ast.Name) or function is None:
        return "what is traced has to be seen"
    if not file.is_read(node) or isinstance(file.parent(node), ast.Subscript | ast.AugAssign):
        return "what is indexed further has to be seen"
    if any(isinstance(item, ast.Return) and item.value is not None for item in ast.walk(function.node)):
        return "what the hook returns has to have the form of what it was given"
    name = file.text(node.value)
    text = f"{file.text(node)} if isinstance({name}, tuple) else {name}"
    above = file.parent(node)
    if not (isinstance(above, ast.Assign) and above.value is node):
        text = f"({text})"
    reason = "the same for a layer that returns a tuple, and the tensor itself for one that does not"
    return Fix((file.edit(node, text),), Applicability.SAFE, reason)
