"""An attention forward of one release, put in place of Transformers' own.

`LlamaAttention.forward = my_forward` ties the code to one family and one release. The signature changed (position
embeddings come in, the cache is an object that is updated in place), two values are returned, not three, and the
module no longer has `num_heads`, `hidden_size`, `rotary_emb` or `_attn`; of a hybrid model most layers have another
forward. Register an attention function with `AttentionInterface` instead, or hook the module. Members are looked up
in a list of what each class of 5.24.0 has, which ships with the tool.

On: Transformers 4.48 and later on the family itself; every release on the others.
Seen: mit-han-lab/streaming-llm, whose patched forwards were read against 5.24.
Fix: none.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.names import RELEASE, attention_classes, has_member
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.finding import Finding

MEMBER = "`{name}` is no member of `{owner}` in Transformers {release}, so this raises; {remedy}"
RETURN = "attention modules return two values, and this one three, so the decoder layer that unpacks them raises"
REASON = "the forward has to be ported"
# Members that most families' attention had before 4.48: said to be gone where the family is not known.
COMMON = frozenset(
    {
        "num_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings", "rope_theta", "_shape",
        "_upad_input", "_flash_attention_forward", "_flash_attn_uses_top_left_mask", "pretraining_tp",
    }
)  # fmt: skip
# An attention class that stands for one of a family that is not known.
TYPICAL = "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5Attention"
ROTARY = ("rotary", "rope", "cos_cached", "sin_cached")


class ReplacedAttention(Rule):
    code = "DDA207"
    kind = "attn-submodule"
    severity = Severity.ERROR
    message = (
        "this forward has the signature and members of an older release, and of one family; "
        "register an attention function with `AttentionInterface`, or hook the module"
    )
    since = "4.57"
    nodes = (ast.Assign, ast.Attribute, ast.Return)
    markers = ("ttention", "attn")
    EXAMPLES = (
        Good("""
            from transformers import AttentionInterface

            def forward(module, query, key, value, attention_mask, **kwargs):
                return query, None

            AttentionInterface.register("mine", forward)
        """),
        Good("""
            from torch import nn

            class Attention(nn.Module):
                def __init__(self, heads):
                    super().__init__()
                    self.num_heads = heads

                def forward(self, hidden):
                    return hidden, self.num_heads, None
        """),
        Good("""
            import transformers

            def projected(self, hidden_states):
                return self.q_proj(hidden_states), self.num_heads
        """),
        Bad("""
            import transformers

            from patching import replace_by_name

            def forward(self, hidden_states, position_embeddings, **kwargs):
                query = self.q_proj(hidden_states).view(-1, self.num_heads, self.head_dim)
                return self.o_proj(query.flatten(1)), None

            def patch(model):
                replace_by_name(model, "LlamaAttention", "forward", forward)
        """),
        Bad(
            """
            from transformers import AutoModelForCausalLM

            def forward(self, hidden_states, **kwargs):
                return self.q_proj(hidden_states).view(-1, self.num_heads, self.head_dim), None

            def patch(name):
                model = AutoModelForCausalLM.from_pretrained(name)
                for layer in model.model.layers:
                    layer.self_attn.forward = forward
            """,
            findings=2,
        ),
        Bad(
            """
            from transformers.models.llama.modeling_llama import LlamaAttention

            def forward(self, hidden_states, past_key_value=None):
                heads = self.num_heads
                return self.o_proj(hidden_states), heads, past_key_value

            LlamaAttention.forward = forward
            """,
            findings=3,
        ),
        Bad("""
            import types
            from transformers.models.llama.modeling_llama import LlamaAttention

            def patch(model, forward):
                for module in model.modules():
                    if isinstance(module, LlamaAttention):
                        module.forward = types.MethodType(forward, module)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        has_any = Kind.ATTENTION in file.facts.flow.kinds
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="forward") as target]):
                owner = next((value for value in file.patched(target) if value.kind is Kind.ATTENTION), None)
                if owner is not None:
                    yield self.report(file, node, owner, fix=REASON)
            case ast.Attribute(value=ast.Name() as base, attr=name) if has_any and _is_self(base, file):
                owners = [value for value in file.values(base) if value.kind is Kind.ATTENTION]
                classes = [known for value in owners for known in _classes(value, file)]
                if not owners or any(has_member(known, name) for known in classes):
                    return
                is_known = all(value.origin.startswith("transformers.") for value in owners)
                if not isinstance(node.ctx, ast.Load) or not (is_known or name in COMMON):
                    return
                if file.is_set_by_own_class(node) or file.facts.flow.is_set_anywhere(name):
                    return
                remedy = "derive sizes from the projections and `head_dim`"
                if any(word in name for word in ROTARY) or not _raises_first(node, file):
                    return
                of = classes[0].rpartition(".")[2]
                yield self.report(
                    file, node, owners[0], message=MEMBER, fix=REASON,
                    name=name, owner=of, release=RELEASE, remedy=remedy,
                )  # fmt: skip
            case ast.Return(value=ast.Tuple(elts=[_, _, _])):
                function = file.function(node)
                because = file.facts.flow.patches.get(function) if function is not None else None
                if because is not None and because.kind is Kind.ATTENTION:
                    yield self.report(file, node, because, message=RETURN, fix=REASON)


def _classes(attention: Value, file: FileFacts) -> list[str]:
    """The classes that an attention module can be of: its own, those of the families imported, or the target's."""
    if attention.origin.startswith("transformers."):
        return [attention.origin]
    families = sorted(module for module in file.file.modules if library.MODELLING.match(module))
    return [name for module in families for name in attention_classes(module)] or [TYPICAL]


def _is_self(base: ast.Name, file: FileFacts) -> bool:
    """The first argument of the function around: what a method, or a function put in place of one, is called on."""
    function = file.function(base)
    is_method = function is not None and (base.id == "self" or function in file.facts.flow.patches)
    return is_method and function is not None and function.positional[:1] == [base.id]


def _raises_first(node: ast.Attribute, file: FileFacts) -> bool:
    """Of all uses of the member in the function, the first that surely runs, or the first."""
    function = file.function(node)
    assert function is not None and isinstance(node.value, ast.Name)
    uses = [
        use
        for use in file.file.attributes
        if use.attr == node.attr
        and isinstance(use.value, ast.Name)
        and use.value.id == node.value.id
        and file.function(use) is function
    ]
    return node is next((use for use in uses if not _is_conditional(use, function.node, file)), uses[0])


def _is_conditional(node: ast.AST, function: ast.AST, file: FileFacts) -> bool:
    below = node
    for above in file.ancestors(node):
        if above is function:
            return False
        if isinstance(above, ast.Raise) or (isinstance(above, ast.If | ast.IfExp) and below is not above.test):
            return True
        below = above
    return False
