"""A list of model families refuses models that would work.

A test of `model_type`, of a class by name, or of the checkpoint's name against a pattern has no route for a family
that is not listed: it raises, or, worse, matches nothing and does nothing (NVIDIA/kvpress#81). It is also false for
the listed families behind PEFT or `torch.compile`. Ask for what the code needs instead: `get_decoder()`, whether a
layer has `self_attn`, `cache.is_linear`. Only a person can say what a refusal protects, so nothing is edited.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import MODEL_CLASS
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

FAMILIES = re.compile(
    r"llama|qwen|mistral|mixtral|gemma|falcon|mpt|gpt_?neox|gptj|pythia|opt\b|bloom|phi|deepseek|vicuna|glm|olmo",
    re.IGNORECASE,
)
FAMILY_CLASS = re.compile(
    r"^transformers\..*[A-Z]\w*(ForCausalLM|ForConditionalGeneration|Attention\w*|DecoderLayer|Model)$"
)
CLASS_NAME = re.compile(r"^[A-Z]\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|Attention|DecoderLayer)$")
REASON = "what the refusal protects has to be judged"


class ClassGate(Rule):
    code = "DDA404"
    kind = "class-gate"
    severity = Severity.ERROR
    message = "only listed families pass; ask for what the code needs, such as `get_decoder()`, instead of a name"
    nodes = (ast.Compare, ast.Call, ast.If)
    markers = ("model_type", "isinstance", "architectures", "__name__", "search(", "match(", "raise")
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def check(model):
                return isinstance(model, PreTrainedModel)
        """),
        Good("""
            from transformers import LlamaForCausalLM

            def width(model, weight):
                return weight.shape[0] if isinstance(model, LlamaForCausalLM) else weight.shape[1]
        """),
        Good("""
            def tree_for(model_name):
                if "vicuna" in model_name:
                    return "wide"
                return "narrow"
        """),
        Good("""
            import re

            NAME = re.compile("qwen[0-9]")

            def shorten(model_name):
                return NAME.search(model_name).group()
        """),
        Bad("""
            from transformers import PreTrainedModel

            def patch(model: PreTrainedModel):
                if "llama" in model.config.model_type:
                    return 1
                raise ValueError(model)
        """),
        Bad("""
            from transformers import LlamaForCausalLM

            def blocks(model):
                assert isinstance(model, LlamaForCausalLM)
                return model.get_decoder().layers
        """),
        Bad(
            """
            def layers_of(model_name):
                if "llama" in model_name:
                    return 32
                elif "mistral" in model_name:
                    return 24
                else:
                    raise NotImplementedError(model_name)
            """,
            findings=2,
        ),
        Bad("""
            from transformers import AutoConfig

            def load(name):
                kind = AutoConfig.from_pretrained(name).architectures[0]
                if kind == "LlamaForCausalLM":
                    return 1
        """),
        Bad("""
            import re

            SUPPORTED = re.compile("qwen3|llama")

            def check(model_name):
                if not SUPPORTED.search(model_name):
                    raise ValueError(model_name)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Compare() if (config := _reads_model_type(node, file) or _names_class(node, file)) is not None:
                yield self.report(file, node, config, fix=REASON)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, classes]) if not _has_alternative(node, file):
                named = classes.elts if isinstance(classes, ast.Tuple) else [classes]
                tested = [n.rpartition(".")[2] for item in named for n in sorted(file.qualified_names(item))]
                is_model = all(MODEL_CLASS.search(name) for name in tested)
                for item in named:
                    name = next((n for n in file.qualified_names(item) if FAMILY_CLASS.match(n)), None)
                    if name is not None and not name.endswith("PreTrainedModel"):
                        fact = f"{file.source.path}:{node.lineno}: `{name}` is one family's class"
                        gate = Value(Kind.LIBRARY, name, evidence=(fact,))
                        claim = Claim(Ask.CLASS, "|".join(tested)) if is_model else None
                        yield self.report(file, node, gate, severity=Severity.SILENT, fix=REASON, claim=claim)
                        return
            case ast.If() if tests := list(_refusing_chain(node, file)):
                for test in tests:
                    fact = f"{file.source.path}:{test.lineno}: the chain of families ends in an error"
                    yield self.report(file, test, Value(Kind.LIBRARY, fact, Confidence.LIKELY, (fact,)), fix=REASON)
            case ast.If() if _raises(node) and (pattern := _matches_name(node.test, file)) is not None:
                yield self.report(file, node.test, pattern, fix=REASON)


def _reads_model_type(compare: ast.Compare, file: FileFacts) -> Value | None:
    """The config whose `model_type` is compared with a literal name."""
    sides = [compare.left, *compare.comparators]
    if not any(FAMILIES.search(str(file.constant(side) or "")) for side in sides):
        return None
    for side in sides:
        match made := file.made_from(side):
            case ast.Attribute(value=base, attr="model_type"):
                if (config := file.holds(base, Kind.CONFIG, Kind.TEXT_CONFIG)) is not None:
                    return config
                if file.text(base).rpartition(".")[2] == "config":
                    fact = f"{file.source.path}:{compare.lineno}: `{file.text(made)}` is compared with a family's name"
                    return Value(Kind.CONFIG, fact, Confidence.LIKELY, (fact,))
    return None


def _names_class(compare: ast.Compare, file: FileFacts) -> Value | None:
    """A comparison with the name of one family's class: of `architectures`, or of a class's `__name__`."""
    sides = [compare.left, *compare.comparators]
    names = [str(side.value) for side in sides if isinstance(side, ast.Constant)]
    if not any(CLASS_NAME.match(name) and not name.startswith("Auto") for name in names):
        return None
    for side in sides:
        made = file.made_from(side)
        text = file.text(made) if made is not None else ""
        if "architectures" in text or "__name__" in text:
            fact = f"{file.source.path}:{compare.lineno}: `{text[:60]}` is compared with a class's name"
            return Value(Kind.CONFIG, fact, Confidence.PROVEN, (fact,))
    return None


def _refusing_chain(head: ast.If, file: FileFacts) -> Iterator[ast.expr]:
    """Tests of a model's name for families, in an `if` chain whose `else` raises."""
    above = file.parent(head)
    if isinstance(above, ast.If) and above.orelse == [head]:
        return
    tests: list[ast.expr] = []
    chain = head
    while True:
        tests.append(chain.test)
        if len(chain.orelse) != 1 or not isinstance(chain.orelse[0], ast.If):
            break
        chain = chain.orelse[0]
    if not any(isinstance(statement, ast.Raise) for statement in chain.orelse):
        return
    for test in tests:
        match test:
            case ast.Compare(left=ast.Constant(value=str(family)), ops=[ast.In()], comparators=[name]):
                if FAMILIES.search(family) and "model" in file.text(name) and "model_type" not in file.text(name):
                    yield test


def _has_alternative(test: ast.Call, file: FileFacts) -> bool:
    """One of two values is chosen: a special case of one family, and something for all others."""
    above = file.parent(test)
    return isinstance(above, ast.IfExp) and above.test is test


def _raises(node: ast.If) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in node.body)


def _matches_name(test: ast.expr, file: FileFacts) -> Value | None:
    """The pattern of family names that a negated test holds against a model's name."""
    match test:
        case ast.UnaryOp(
            op=ast.Not(), operand=ast.Call(func=ast.Attribute(value=pattern, attr="search" | "match" | "fullmatch"))
        ):
            found = file.made_from(pattern)
            if isinstance(found, ast.Call) and found.args and "re.compile" in file.qualified_names(found.func):
                text = file.constant(found.args[0])
                if isinstance(text, str) and FAMILIES.search(text):
                    fact = f"{file.source.path}:{found.lineno}: the pattern lists model families"
                    return Value(Kind.LIBRARY, fact, Confidence.PROVEN, (fact,))
    return None
