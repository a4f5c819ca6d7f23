"""The last layer's state taken after the final norm, where the others are taken before it.

The last entry of `hidden_states` is the final norm's output on every Transformers model that returns it, so
`norm(out.hidden_states[-1])` norms twice, and taps put side by side, `torch.cat([h[1], h[16], h[-1]], dim=-1)`, mix
two kinds of state. Nothing fails: a lens is wrong at its last layer, a drafter accepts less (seen in conversions of
EAGLE-3 and DFlash drafters). `layer_output(hidden_states, layer)` of `ddaudit.runtime` returns the residual stream of
every layer, the last too. A last state that goes straight into the head is right as it is.

On: every release and model, silently.
Seen: huggingface/transformers#26142, NVIDIA/Model-Optimizer#1846, huggingface/transformers#40994.
Fix: none: which of the two was meant has to be seen.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

TWICE = "the last entry of `hidden_states` is normed already, and is normed again here; leave the norm out"
REASON = "which of the two was meant has to be seen"


class NormedLastTap(Rule):
    code = "DDA307"
    kind = "hidden-index"
    severity = Severity.SILENT
    message = (
        "the last of these taps is taken after the final norm, and the others before it; "
        "use `layer_output(hidden_states, layer)` for each"
    )
    nodes = (ast.Call,)
    markers = ("hidden_states",)
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def logits(model: PreTrainedModel, ids):
                out = model(ids, output_hidden_states=True)
                return model.get_output_embeddings()(out.hidden_states[-1])
        """),
        Good("""
            import torch
            from transformers import PreTrainedModel

            def features(model: PreTrainedModel, ids):
                states = model(ids, output_hidden_states=True).hidden_states
                return torch.cat([states[2], states[16], states[-3]], dim=-1)
        """),
        Bad("""
            import torch
            from transformers import PreTrainedModel

            def features(model: PreTrainedModel, ids):
                states = model(ids, output_hidden_states=True).hidden_states
                return torch.cat([states[2], states[16], states[-1]], dim=-1)
        """),
        Bad("""
            from ddaudit.runtime import final_norm
            from transformers import PreTrainedModel

            def lens(model: PreTrainedModel, ids):
                out = model(ids, output_hidden_states=True)
                return model.get_output_embeddings()(final_norm(model)(out.hidden_states[-1]))
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Call(
                func=ast.Attribute(attr="cat" | "concat" | "stack"),
                args=[ast.List(elts=taps) | ast.Tuple(elts=taps), *_],
            ):
                last = [tap for tap in taps if _is_last(tap, file)]
                states = [tap for tap in taps if _states(tap, file) is not None]
                if len(last) == 1 and len(states) > 1 and (because := _states(last[0], file)) is not None:
                    yield self.report(file, last[0], because, fix=REASON)
            case ast.Call(func=function, args=[state]) if _is_last(state, file):
                if file.holds(function, Kind.NORM) is not None and (because := _states(state, file)) is not None:
                    yield self.report(file, node, because, message=TWICE, fix=REASON)


def _states(tap: ast.expr, file: FileFacts) -> Value | None:
    """The hidden states of which one entry is taken."""
    made = file.made_from(tap)
    return file.holds(made.value, Kind.HIDDEN_STATES) if isinstance(made, ast.Subscript) else None


def _is_last(tap: ast.expr, file: FileFacts) -> bool:
    match file.made_from(tap):
        case ast.Subscript(slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1))):
            return True
    return False
