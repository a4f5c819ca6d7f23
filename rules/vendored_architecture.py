"""A copy or subclass of one family's model, loaded in place of the stock class.

`KVLlamaForCausalLM.from_pretrained(name)` builds a Llama from whatever it is given: another family's checkpoint
raises, or loads with most weights newly initialised. A subclass such as `class Mine(LlamaForCausalLM)` follows one
release's internals and one family's. Load the stock model through an `AutoModel` class and change it by hooks, by
`AttentionInterface` or by a cache of one's own. What such a file does with its own modules is its own business.

On: every release, on every other family.
Seen: FasterDecoding/Medusa, SafeAILab/EAGLE and others keep such copies; read in their sources.
Fix: none: the changes have to move to hooks on the stock model.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.library import MAKERS, MODEL_CLASS, is_stock_class
from ddaudit.auditor.facts.scopes import Class
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

REASON = "no mechanical edit: the changes have to move to hooks on the stock model"


class VendoredArchitecture(Rule):
    code = "DDA208"
    kind = "vendored-arch"
    severity = Severity.ERROR
    message = (
        "`{name}` is one family's model, of one release; other checkpoints do not load into it; "
        "load the stock model and change it by hooks"
    )
    nodes = (ast.ClassDef, ast.Call, ast.Assign)
    markers = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model.forward")
    EXAMPLES = (
        Good("""
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name")
        """),
        Good("""
            from torch import nn
            from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

            class Drafter(Qwen3PreTrainedModel):
                def __init__(self, config):
                    super().__init__(config)
                    self.layers = nn.ModuleList()

            drafter = Drafter.from_pretrained("drafter")
        """),
        Good("""
            from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

            class MyLlamaForCausalLM(LlamaPreTrainedModel):
                pass
        """),
        Bad("""
            from transformers import LlamaForCausalLM

            class Steered(LlamaForCausalLM):
                def forward(self, *args, **kwargs):
                    return super().forward(*args, **kwargs)
        """),
        Bad("""
            from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

            class MyLlamaForCausalLM(LlamaPreTrainedModel):
                pass

            model = MyLlamaForCausalLM.from_pretrained("name")
        """),
        Bad("""
            from transformers.models.llama.modeling_llama import LlamaForCausalLM

            def forward(self, input_ids):
                return self.model(input_ids)

            LlamaForCausalLM.forward = forward
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.ClassDef():
                base = next(filter(None, (_family_base(base, file) for base in node.bases)), None)
                if base is not None:
                    because = _because(node, base, file, "is subclassed")
                    yield self.report(file, _head(node), because, fix=REASON, name=node.name)
            case ast.Call(func=ast.Attribute(value=base, attr=attr)) if attr in MAKERS:
                for value in file.values(base):
                    owner = file.definition(value)
                    if (
                        value.kind is Kind.OWN_CLASS
                        and isinstance(owner, Class)
                        and file.facts.flow.is_family_model(owner)
                    ):
                        because = _because(node, owner.node.name, file, "is loaded")
                        yield self.report(file, node, because, fix=REASON, name=owner.node.name)
                        return
            case ast.Assign(targets=[ast.Attribute(value=base, attr="forward")]):
                for name in sorted(file.qualified_names(base)):
                    if _is_family_class(name):
                        because = _because(node, name, file, "gets another forward")
                        yield self.report(file, node, because, fix=REASON, name=name.rpartition(".")[2])
                        return


def _because(node: ast.ClassDef | ast.Call | ast.Assign, name: str, file: FileFacts, what: str) -> Value:
    fact = f"{file.source.path}:{node.lineno}: `{name}` {what}"
    return Value(Kind.LIBRARY, name, Confidence.PROVEN, (fact,))


def _head(node: ast.ClassDef) -> ast.AST:
    """The first base: the class's head without its body."""
    return node.bases[0]


def _is_family_class(name: str) -> bool:
    """A stock class of one family, that can be loaded as it is."""
    last = name.rpartition(".")[2]
    return is_stock_class(name) and not last.startswith("Auto") and name.startswith("transformers.")


def _family_base(base: ast.expr, file: FileFacts) -> str | None:
    for value in file.values(base):
        if value.kind is Kind.LIBRARY and _is_family_class(value.origin) and MODEL_CLASS.search(value.origin):
            return value.origin
        owner = file.definition(value)
        if value.kind is Kind.OWN_CLASS and isinstance(owner, Class) and file.facts.flow.is_family_model(owner):
            return owner.node.name
    return None
