"""Taking a layer's state out of `hidden_states` by an offset is wrong for the last layer.

`hidden_states` has one entry more than the model has layers: the first is the embedding, the last is taken after
the final norm, so `hidden_states[layer + 1]` is the residual stream of every layer but the last, and a tap there is
normed twice where the caller norms again. `layer_output(hidden_states, layer)` of `ddaudit.runtime` returns the
residual stream for each. `attentions` has one entry per full-attention layer only, so on hybrid models its index is
not a layer's at all.

On: every release and model for the last layer; hybrid models for `attentions`.
Seen: huggingface/transformers#33417, huggingface/transformers#26142, NVIDIA/Model-Optimizer#1846.
Fix: unsafe: the same for every layer but the last, which comes before the norm then.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

ATTENTIONS = (
    "`attentions` has one entry per full-attention layer, so a layer's number is no index into it on hybrid models; "
    "pair its entries with the layers that have `self_attn`"
)
NORMED_TWICE = (
    "the last entry of `hidden_states` is normed already, so the final norm is applied to it twice; "
    "leave the last one out"
)


class HiddenIndex(Rule):
    code = "DDA203"
    kind = "hidden-index"
    severity = Severity.PORT
    message = (
        "the last entry of `hidden_states` is taken after the final norm, so a layer's offset is wrong for the last "
        "layer; use `layer_output(hidden_states, layer)`"
    )
    nodes = (ast.Subscript, ast.For)
    markers = ("hidden_states", "attentions")
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def last(model: PreTrainedModel, ids):
                return model(ids, output_hidden_states=True).hidden_states[-1]
        """),
        Good("""
            import torch

            def rows(hidden_states: torch.Tensor, batch):
                return hidden_states[batch + 1]
        """),
        Good("""
            from ddaudit.runtime import final_norm
            from transformers import PreTrainedModel

            def lens(model: PreTrainedModel, ids):
                norm = final_norm(model)
                states = model(ids, output_hidden_states=True).hidden_states
                for state in states:
                    if state is not states[-1]:
                        state = norm(state)
                    yield state
        """),
        Good("""
            from transformers import CLIPVisionModel

            tower = CLIPVisionModel.from_pretrained("clip")

            def features(images, layer):
                return tower(images, output_hidden_states=True).hidden_states[layer]
        """),
        Bad(
            """
            from transformers import PreTrainedModel

            def taps(model: PreTrainedModel, ids, layers):
                states = model(ids, output_hidden_states=True).hidden_states
                return [states[layer + 1] for layer in layers]
            """,
            """
            from transformers import PreTrainedModel
            from ddaudit.runtime import layer_output

            def taps(model: PreTrainedModel, ids, layers):
                states = model(ids, output_hidden_states=True).hidden_states
                return [layer_output(states, layer) for layer in layers]
            """,
        ),
        Bad("""
            from transformers import PreTrainedModel

            def maps(model: PreTrainedModel, ids):
                out = model(ids, output_attentions=True)
                return [out.attentions[i] for i in range(12)]
        """),
        Bad("""
            from ddaudit.runtime import final_norm
            from transformers import PreTrainedModel

            def lens(model: PreTrainedModel, ids):
                norm = final_norm(model)
                for state in model(ids, output_hidden_states=True).hidden_states:
                    yield norm(state)
        """),
        Bad(
            """
            from ddaudit.runtime import final_norm
            from transformers import PreTrainedModel

            def lens(model: PreTrainedModel, ids, head):
                norm = final_norm(model)
                states = model(ids, output_hidden_states=True).hidden_states
                for state in states:
                    yield head(norm(state))
            """,
            """
            from ddaudit.runtime import final_norm
            from transformers import PreTrainedModel

            def lens(model: PreTrainedModel, ids, head):
                norm = final_norm(model)
                states = model(ids, output_hidden_states=True).hidden_states
                for state in states:
                    yield head(state if state is states[-1] else norm(state))
            """,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Subscript(value=base, slice=index) if not _is_constant(index):
                if (states := file.holds(base, Kind.HIDDEN_STATES)) is not None:
                    yield self.report(file, node, states, fix=_fix(node, file), claim=Claim(Ask.LAYER_STATE))
                elif (maps := file.holds(base, Kind.ATTENTIONS)) is not None:
                    reason = "the loop has to go over other layers"
                    claim = Claim(Ask.LAYER_ATTENTION)
                    yield self.report(
                        file, node, maps, severity=Severity.ERROR, message=ATTENTIONS, fix=reason, claim=claim
                    )
            case ast.For(target=ast.Name(id=name), iter=iterable, body=body):
                states = file.holds(iterable, Kind.HIDDEN_STATES)
                calls = list(_norms(name, body, file))
                if states is not None and not isinstance(iterable, ast.Subscript) and calls:
                    yield self.report(
                        file, iterable, states, severity=Severity.SILENT, message=NORMED_TWICE,
                        fix=_leave_last(iterable, calls, body, file), claim=Claim(Ask.LAYER_STATE),
                    )  # fmt: skip


def _is_constant(index: ast.expr) -> bool:
    return isinstance(index, ast.Slice | ast.Constant | ast.Tuple) or (
        isinstance(index, ast.UnaryOp) and isinstance(index.operand, ast.Constant)
    )


def _norms(name: str, body: list[ast.stmt], file: FileFacts) -> Iterator[ast.Call]:
    """Calls of the final norm on the loop's variable, whichever entry it is."""
    for node in (item for statement in body for item in ast.walk(statement)):
        match node:
            case ast.Call(func=function, args=[ast.Name(id=given)]) if given == name:
                if file.holds(function, Kind.NORM) is not None and not _is_conditional(node, body, file):
                    yield node


def _is_conditional(call: ast.Call, body: list[ast.stmt], file: FileFacts) -> bool:
    """Inside the loop under a test that tells the last entry from the others."""
    for above in (call, *file.ancestors(call)):
        if isinstance(above, ast.If | ast.IfExp) and re.search(r"-1|len\(|last| is ", file.text(above.test)):
            return True
        if above in body:
            break
    return False


def _leave_last(states: ast.expr, calls: list[ast.Call], body: list[ast.stmt], file: FileFacts) -> Fix | str:
    """Norm every entry but the last, told by identity."""
    inside = [item for statement in body for item in ast.walk(statement)]
    match states, calls:
        case ast.Name(id=name), [ast.Call(args=[ast.Name(id=state)], keywords=[]) as call]:
            bound = {item.id for item in inside if isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Load)}
            if bound & {name, state}:
                return "the loop changes what it goes over"
            text = f"{state} if {state} is {name}[-1] else {file.text(call)}"
            above = file.parent(call)
            is_whole = isinstance(above, ast.Assign | ast.Return | ast.Yield) or (
                isinstance(above, ast.Call) and call in above.args and len(above.args) + len(above.keywords) == 1
            )
            reason = "right where the last entry is normed already, which few models' is not"
            edit = file.edit(call, text if is_whole else f"({text})")
            return Fix((edit,), Applicability.UNSAFE, reason)
    return "the last entry needs a case of its own"


def _fix(node: ast.Subscript, file: FileFacts) -> Fix | str:
    match node.slice:
        case ast.BinOp(left=layer, op=ast.Add(), right=offset) if _is_one(offset, file):
            pass
        case ast.BinOp(left=offset, op=ast.Add(), right=layer) if _is_one(offset, file):
            pass
        case _:
            return "the index is not written as a layer's number plus one"
    if not file.is_read(node):
        return "the entry is assigned to"
    if (runtime := file.runtime_call("layer_output", node)) is None:
        return "the names `layer_output` and `runtime` mean something else here"
    reason = "the same for every layer but the last, whose state it takes before the final norm"
    edit = file.edit(node, f"{runtime[0]}({file.argument(node.value)}, {file.argument(layer)})")
    return Fix((edit,), Applicability.UNSAFE, reason, (runtime[1],))


def _is_one(expr: ast.expr, file: FileFacts) -> bool:
    return file.constant(expr) == 1
