"""Taps of a drafter taken one layer too early.

`target_layer_ids` count layers; `hidden_states[0]` is the embedding, so the state after layer `i` is
`hidden_states[i + 1]`. A drafter fed with `hidden_states[i]` gets every tap one layer too early: nothing fails, and
acceptance falls. `layer_output(hidden_states, i)` of `ddaudit.runtime` takes the state after layer `i`, the last one
before the final norm.

On: every release and target, silently.
Seen: seen in ports of z-lab/dflash, whose own code adds one.
Fix: unsafe: a drafter trained on such taps wants them so.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class TapOffset(Rule):
    code = "DDA304"
    kind = "tap-offset"
    severity = Severity.SILENT
    message = (
        "`hidden_states[0]` is the embedding, so this tap is taken one layer too early; "
        "use `layer_output(hidden_states, layer)`"
    )
    nodes = (ast.Subscript,)
    markers = ("target_layer_ids",)
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def taps(model: PreTrainedModel, ids, target_layer_ids):
                states = model(ids, output_hidden_states=True).hidden_states
                return [states[layer + 1] for layer in target_layer_ids]
        """),
        Good("""
            def picks(rows, target_layer_ids):
                return [rows[layer] for layer in target_layer_ids]
        """),
        Good("""
            from transformers import PreTrainedModel

            def taps(model: PreTrainedModel, ids, target_layer_ids):
                states = model(ids, output_hidden_states=True).hidden_states[1:]
                return [states[layer] for layer in target_layer_ids]
        """),
        Bad(
            """
            from transformers import PreTrainedModel

            def taps(model: PreTrainedModel, ids, target_layer_ids):
                states = model(ids, output_hidden_states=True).hidden_states
                return [states[layer] for layer in target_layer_ids]
            """,
            """
            from transformers import PreTrainedModel
            from ddaudit.runtime import layer_output

            def taps(model: PreTrainedModel, ids, target_layer_ids):
                states = model(ids, output_hidden_states=True).hidden_states
                return [layer_output(states, layer) for layer in target_layer_ids]
            """,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Subscript(value=states, slice=ast.Name(id=name) as layer) if file.is_read(node):
                held = file.holds(states, Kind.HIDDEN_STATES)
                if held is not None and not _leaves_out_first(states, file) and _counts_layers(layer, file):
                    yield self.report(
                        file, node, held, fix=_fix(node, file.text(states), name, file), claim=Claim(Ask.FIRST_STATE)
                    )


def _leaves_out_first(states: ast.expr, file: FileFacts) -> bool:
    """`hidden_states[1:]`: the embeddings are gone, and layers count from nought."""
    match file.made_from(states):
        case ast.Subscript(slice=ast.Slice(lower=ast.Constant(value=1))):
            return True
    return False


def _counts_layers(layer: ast.Name, file: FileFacts) -> bool:
    """Whether the index goes over the drafter's layer ids, as they are."""
    home = file.scope(layer).find(layer.id)
    bindings = home.names[layer.id] if home is not None else []
    if len(bindings) != 1:
        return False
    match file.parent(bindings[0]):
        case ast.For(target=target, iter=iterable) | ast.comprehension(target=target, iter=iterable):
            return target is bindings[0] and file.text(iterable).rpartition(".")[2] == "target_layer_ids"
    return False


def _fix(node: ast.AST, states: str, layer: str, file: FileFacts) -> Fix | str:
    if (runtime := file.runtime_call("layer_output", node)) is None:
        return "the names `layer_output` and `runtime` mean something else here"
    reason = "right where the ids count layers from zero, as DFlash's do"
    edit = file.edit(node, f"{runtime[0]}({states}, {layer})")
    return Fix((edit,), Applicability.UNSAFE, reason, (runtime[1],))
