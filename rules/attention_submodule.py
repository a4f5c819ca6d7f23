"""Attention below every decoder layer is an assumption that hybrid models break.

Three of four layers of Qwen3.5 and Qwen3.6 have `linear_attn` and no `self_attn`: `layer.self_attn` raises
AttributeError there, and code that looks for modules by the name of one (`"self_attn" in name`,
`target_modules=["q_proj", "v_proj"]`) quietly leaves those layers out. Ask `hasattr(layer, "self_attn")`, go by
`config.layer_types`, or say what is to happen to the other layers.

On: every release; hybrid models.
Seen: three of four layers of Qwen3.6-27B have none (probed); NVIDIA/kvpress reads it from every layer.
Fix: none: what is to happen to the other layers has to be decided.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import ATTENTION_NAMES, MODEL_NAMES
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._paths import written_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value", "q_attn"})
# Projections of linear-attention layers: a list that names them means the other layers too.
LINEAR = frozenset({"in_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_ba", "out_proj", "linear_attn", "all-linear"})
# Hybrid families' layers differ from one another, though they are of one class.
ONE_LAYER = re.compile(r"^transformers\.(?!.*(Next|3_5|Lfm2|Jamba|Bamba|Hybrid|H1|Nemotron|Zamba)).*DecoderLayer$")
WALKS = frozenset({"named_modules", "named_children", "items"})
BY_NAME = (
    "a module is looked for by the name `{name}`, which linear-attention layers do not have: they are left out "
    "without an error; say what is to happen to them"
)
TARGETS = (
    "only full-attention layers have these modules: on a hybrid model three layers of four get no adapter; "
    'name the others\' projections too, or use `"all-linear"`'
)
REASON = "what is to happen to the other layers has to be decided"


class AttentionSubmodule(Rule):
    code = "DDA206"
    kind = "attn-submodule"
    severity = Severity.ERROR
    message = 'linear-attention layers of hybrid models have no `{name}`; test `hasattr(layer, "{name}")` first'
    nodes = (
        Named(ast.Attribute, ATTENTION_NAMES), ast.Compare, ast.JoinedStr,
        Named(ast.Call, frozenset({"format", "endswith", "startswith"})),
        Named(ast.keyword, frozenset({"target_modules"})),
    )  # fmt: skip
    markers = ("attn", "attention", "_proj", "query_key_value")
    EXAMPLES = (
        Good("""
            from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

            def parts(config):
                layer = Qwen3DecoderLayer(config, layer_idx=0)
                return layer.self_attn, layer.mlp
        """),
        Good("""
            from transformers import PreTrainedModel

            def projections(model: PreTrainedModel):
                for layer in model.get_decoder().layers:
                    if hasattr(layer, "self_attn"):
                        yield layer.self_attn.q_proj
        """),
        Good("""
            from torch import nn

            class Block(nn.Module):
                def __init__(self, attention):
                    super().__init__()
                    self.self_attn = attention

                def forward(self, hidden):
                    return self.self_attn(hidden)
        """),
        Good("""
            from peft import LoraConfig

            config = LoraConfig(target_modules=["q_proj", "v_proj", "in_proj_qkv", "out_proj"])
        """),
        Bad("""
            def heads(layers):
                return [f"model.layers.{i}.self_attn.o_proj" for i in layers]
        """),
        Bad("""
            from transformers import PreTrainedModel

            def projections(model: PreTrainedModel):
                return [layer.self_attn.q_proj for layer in model.get_decoder().layers]
        """),
        Bad("""
            from transformers import PreTrainedModel

            def attentions(model: PreTrainedModel):
                return [module for name, module in model.named_modules() if name.endswith("self_attn")]
        """),
        Bad("""
            from peft import LoraConfig

            config = LoraConfig(target_modules=["q_proj", "v_proj"])
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute(value=base, attr=name) if name in ATTENTION_NAMES:
                layer = file.holds(base, Kind.LAYER)
                if layer is None or file.is_set_by_own_class(node) or file.is_patched_self(base):
                    return
                if _is_made_here(base, file):
                    return
                if not _is_asked_for(name, node, file):
                    claim = Claim(Ask.LAYER_PART, name)
                    yield self.report(file, node, layer, fix=REASON, claim=claim, name=name)
            case ast.JoinedStr() | ast.Call(func=ast.Attribute(attr="format")):
                path = written_path(node, file)
                for part in sorted(ATTENTION_NAMES & set((path or "").split("."))):
                    fact = f"{file.source.path}:{file.lineno(node)}: `{path}` is written like a layer's path"
                    because = Value(Kind.LAYER, fact, Confidence.LIKELY, (fact,))
                    yield self.report(file, node, because, fix=REASON, name=part)
            case ast.Compare(left=left, comparators=[right]):
                yield from self._by_name(node, [left, right], file)
            case ast.Call(func=ast.Attribute(value=name, attr="endswith" | "startswith"), args=[literal]):
                yield from self._by_name(node, [literal, name], file)
            case ast.keyword():
                yield from self._targets(node, file)

    def _by_name(self, node: ast.AST, sides: list[ast.expr], file: FileFacts) -> Iterator[Finding]:
        for literal, other in (sides, sides[::-1]):
            text = literal.value if isinstance(literal, ast.Constant) else None
            if not isinstance(text, str) or not set(text.strip(".").split(".")) & (ATTENTION_NAMES | PROJECTIONS):
                continue
            name = other.value if isinstance(other, ast.Subscript) else other
            walked = _walked_model(name, file) if isinstance(name, ast.Name) else None
            if walked is not None:
                claim = Claim(Ask.LAYER_NAMED, text.strip(".").rpartition(".")[2])
                yield self.report(
                    file, node, walked, severity=Severity.SILENT, message=BY_NAME, fix=REASON, claim=claim,
                    name=text.strip("."),
                )  # fmt: skip

    def _targets(self, keyword: ast.keyword, file: FileFacts) -> Iterator[Finding]:
        call = file.parent(keyword)
        called = file.qualified_names(call.func) if isinstance(call, ast.Call) else ()
        if not any(name.startswith("peft.") for name in called):
            return
        made = file.made_from(keyword.value) or file.default(keyword.value)
        if not isinstance(made, ast.List | ast.Tuple | ast.Set):
            return
        names = {item.value for item in made.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)}
        if names & PROJECTIONS and not names & LINEAR:
            fact = f"{file.source.path}:{made.lineno}: the adapter's modules are listed by name"
            listed = Value(Kind.LIBRARY, fact, evidence=(fact,))
            claim = Claim(Ask.LAYER_NAMED, min(names & PROJECTIONS))
            yield self.report(file, keyword, listed, severity=Severity.SILENT, message=TARGETS, fix=REASON, claim=claim)


def _is_made_here(layer: ast.expr, file: FileFacts) -> bool:
    """A layer of one family's class, whose parts are the class's own."""
    match file.made_from(layer):
        case ast.Call(func=func):
            return any(ONE_LAYER.search(name) for name in file.qualified_names(func))
    return False


def _is_asked_for(name: str, node: ast.AST, file: FileFacts) -> bool:
    """Whether a test for the attribute, the layer's class or its kind stands around, or before in the same loop."""
    assert isinstance(node, ast.Attribute)
    layer = file.text(node.value)
    words = (f'"{name}"', f"'{name}'", "layer_type", f"isinstance({layer}", f"type({layer}", "is_linear")
    for above in file.ancestors(node):
        match above:
            case ast.If(test=test) | ast.IfExp(test=test):
                tests = [test]
            case ast.comprehension(ifs=tests):
                pass
            case ast.ListComp(generators=parts) | ast.GeneratorExp(generators=parts):
                tests = [test for part in parts for test in part.ifs]
            case ast.For(body=body):
                tests = [item.test for item in body if isinstance(item, ast.If)]
            case ast.Try(handlers=handlers):
                tests = []
                if any("AttributeError" in file.text(handler) for handler in handlers):
                    return True
            case _:
                continue
        if any(word in file.text(test) for test in tests for word in words):
            return True
    return False


def _walked_model(name: ast.Name, file: FileFacts) -> Value | None:
    """The model over whose modules the loop that binds this name goes."""
    home = file.scope(name).find(name.id)
    for binding in home.names[name.id] if home is not None else ():
        loop = next((a for a in file.ancestors(binding) if isinstance(a, ast.For | ast.comprehension)), None)
        for call in ast.walk(loop.iter) if loop is not None else ():
            match call:
                case ast.Call(func=ast.Attribute(value=walked, attr=attr)) if attr in WALKS:
                    if isinstance(walked, ast.Attribute) and walked.attr == "_modules":
                        walked = walked.value
                    elif attr == "items":
                        continue
                    if (model := file.holds(walked, Kind.MODEL, Kind.BACKBONE)) is not None:
                        return model
                    text = file.text(walked).rpartition(".")[2]
                    if MODEL_NAMES.match(text) and file.is_stock(walked):
                        fact = f"{file.source.path}:{walked.lineno}: the modules of `{text}` are gone through"
                        return Value(Kind.MODEL, fact, Confidence.LIKELY, (fact,))
    return None
