"""A list of model families refuses models that would work.

A test of `model_type`, of a class by name, or of the checkpoint's name against a pattern has no route for a family
that is not listed: it raises, or, worse, matches nothing and does nothing (NVIDIA/kvpress#81). It is also false for
the listed families behind PEFT or `torch.compile`. Ask for what the code needs instead: `get_decoder()`, whether a
layer has `self_attn`, `cache.is_linear`. Only a person can say what a refusal protects, so nothing is edited.

On: every release; every family that is not named.
Seen: NVIDIA/kvpress#81, axolotl-ai-cloud/axolotl#2266.
Fix: none: only a person can say what a refusal protects.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import DRAFTER, MODEL_CLASS
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._gates import Outcome, outcome, refuses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

FAMILIES = re.compile(
    r"llama|qwen|mistral|mixtral|gemma|falcon|mpt|gpt[_-]?(neo|j|2)|pythia|opt\b|bloom|phi|deepseek|vicuna|glm|olmo"
    r"|baichuan|internlm|starcoder|longchat|cohere|granite",
    re.IGNORECASE,
)
FAMILY = re.compile(rf"({FAMILIES.pattern})[\d._-]*", re.IGNORECASE)
FAMILY_CLASS = re.compile(
    r"^transformers\.(?!cache_utils\.).*[A-Z]\w*(ForCausalLM|ForConditionalGeneration|LMHeadModel|Attention\w*|DecoderLayer|RMSNorm|MLP"
    r"|RotaryEmbedding|Model)$"
)
CLASS_NAME = re.compile(
    r"^(?!Auto)[A-Z]\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)$"
    rf"|^(?i:{FAMILIES.pattern})\w*(Attention|DecoderLayer)$"
)
TABLE = "a table of families has no entry for others; ask for what the code needs, such as `get_decoder()`"
REASON = "what the refusal protects has to be judged"
SEVERITIES = {
    Outcome.REFUSED: Severity.ERROR,
    Outcome.MISTAKEN: Severity.ERROR,
    Outcome.PASSED_OVER: Severity.SILENT,
}


class ClassGate(Rule):
    code = "DDA404"
    kind = "class-gate"
    severity = Severity.ERROR
    message = "only listed families pass; ask for what the code needs, such as `get_decoder()`, instead of a name"
    nodes = (ast.Compare, Named(ast.Call, frozenset({"isinstance"})), ast.If, ast.Subscript)
    markers = ("model_type", "isinstance", "architectures", "__name__", "search(", "match(", "raise")
    EXAMPLES = (
        Good("""
            from transformers import AutoConfig

            def check(draft_path):
                draft_config = AutoConfig.from_pretrained(draft_path)
                if draft_config.model_type != "llama":
                    raise ValueError("no drafter of ours")
        """),
        Good("""
            from transformers import AutoConfig

            def test_export(exported):
                assert AutoConfig.from_pretrained(exported).model_type == "llama"
        """),
        Good("""
            from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

            def adopt(layer):
                if isinstance(layer, LinearAttentionAndFullAttentionLayer):
                    return layer.conv_states
                raise TypeError(type(layer))
        """),
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
            from transformers import AutoModelForCausalLM, BloomForCausalLM

            def cut(name, k, end):
                model = AutoModelForCausalLM.from_pretrained(name)
                if isinstance(model, BloomForCausalLM):
                    k = k[:, :, :end]
                else:
                    k = k[:, :, :end, :]
                return k, model.config.model_type == "bloom"
        """),
        Good("""
            from transformers import OPTForCausalLM

            def limit(model, tokenizer):
                if isinstance(model, OPTForCausalLM):
                    tokenizer.model_max_length = model.config.max_position_embeddings
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
            from transformers import PreTrainedModel

            LENGTHS = {"llama": 4096, "qwen2": 32768}

            def length(model: PreTrainedModel):
                return LENGTHS[model.config.model_type]
        """),
        Bad("""
            from transformers import AutoConfig

            def check(name):
                config = AutoConfig.from_pretrained(name)
                if config.model_type not in ("llama", "mistral"):
                    raise ValueError(name)
        """),
        Bad("""
            from transformers.models.llama.modeling_llama import LlamaRMSNorm

            def fuse(model, fused):
                for name, module in model.named_modules():
                    if isinstance(module, LlamaRMSNorm):
                        module.forward = fused
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
                if "llama" in model_name or "longchat" in model_name:
                    return 32
                elif model_name == "mistral":
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
            from transformers import AutoConfig

            from models import KVLlamaForCausalLM, KVMixtralForCausalLM

            def load(name):
                kind = AutoConfig.from_pretrained(name).architectures[0]
                if kind == "LlamaForCausalLM":
                    model = KVLlamaForCausalLM.from_pretrained(name)
                else:
                    model = KVMixtralForCausalLM.from_pretrained(name)
                return model
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
                severity = SEVERITIES.get(outcome(node, file))
                if severity is not None and not _is_expected(node, file):
                    yield self.report(file, node, config, severity=severity, fix=REASON)
            case ast.Subscript(value=table, slice=ast.Name() | ast.Attribute(attr="model_type") as key, ctx=ast.Load()):
                config = _model_type(key, file) if isinstance(key, ast.Attribute) or "type" in key.id else None
                if not FAMILIES.search(" ".join(_strings(table, file)) if config is not None else ""):
                    return
                if config is not None and not _is_looked_up_first(node, file):
                    yield self.report(file, node, config, message=TABLE, fix=REASON)
            case ast.Call(func=ast.Name(id="isinstance"), args=[given, classes]):
                yield from self._instance(node, given, classes, file)
            case ast.If() if tests := list(_refusing_chain(node, file)):
                for test in tests:
                    fact = f"{file.source.path}:{test.lineno}: the chain of families ends in an error"
                    yield self.report(file, test, Value(Kind.LIBRARY, fact, Confidence.LIKELY, (fact,)), fix=REASON)
            case ast.If() if refuses(node.body) and (pattern := _matches_name(node.test, file)) is not None:
                yield self.report(file, node.test, pattern, fix=REASON)

    def _instance(self, node: ast.Call, given: ast.expr, classes: ast.expr, file: FileFacts) -> Iterator[Finding]:
        named = classes.elts if isinstance(classes, ast.Tuple) else [classes]
        names = (name for item in named for name in sorted(file.qualified_names(item)) if FAMILY_CLASS.match(name))
        name = next((name for name in names if not name.endswith("PreTrainedModel")), None)
        # What replaces a family's method may ask which family it serves.
        if name is None or (isinstance(given, ast.Name) and given.id == "self"):
            return
        decided = outcome(node, file)
        if decided is Outcome.SERVED or (decided is Outcome.PASSED_OVER and not _is_acted_on(node, given, file)):
            return
        fact = f"{file.source.path}:{node.lineno}: `{name}` is one family's class"
        severity = SEVERITIES.get(decided, Severity.SILENT)
        tested = [n.rpartition(".")[2] for item in named for n in sorted(file.qualified_names(item))]
        claim = Claim(Ask.CLASS, "|".join(tested)) if all(MODEL_CLASS.search(each) for each in tested) else None
        gate = Value(Kind.LIBRARY, name, evidence=(fact,))
        yield self.report(file, node, gate, severity=severity, fix=REASON, claim=claim)


def _is_expected(compare: ast.Compare, file: FileFacts) -> bool:
    """Of a drafter, which is of one architecture, or in what a test expects of a file that was written."""
    if DRAFTER.search(file.text(compare)):
        return True
    function = file.function(compare)
    asserted = any(isinstance(above, ast.Assert) for above in file.ancestors(compare))
    return asserted and function is not None and function.name.startswith("test")


def _is_acted_on(test: ast.Call, given: ast.expr, file: FileFacts) -> bool:
    """Whether the branch does something to the object, not only with what it says of itself."""
    branch = next((above for above in file.ancestors(test) if isinstance(above, ast.If)), None)
    if branch is None or not any(part is test for part in ast.walk(branch.test)):
        return True
    tested = ast.dump(given)
    for part in (part for statement in branch.body for part in ast.walk(statement)):
        match part:
            case ast.Return() | ast.Raise() | ast.Yield() | ast.Continue():
                return True
            case ast.Attribute(attr="forward" | "_modules") | ast.Call(func=ast.Name(id="setattr")):
                return True
            case ast.Call(func=function, args=args, keywords=keywords):
                handed = [*args, *(keyword.value for keyword in keywords)]
                if any(ast.dump(item) == tested for item in handed):
                    return True
                if isinstance(function, ast.Attribute) and tested in ast.dump(function.value):
                    return True
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                if tested in ast.dump(part.value).replace("Store()", "Load()"):
                    return True
            case ast.Assign(value=value) if tested in ast.dump(value) and "attr='config'" not in ast.dump(value):
                return True
    return False


def _is_looked_up_first(entry: ast.Subscript, file: FileFacts) -> bool:
    """Under a test whether the table has the key."""
    key = ast.dump(entry.slice)
    tests = (above.test for above in file.ancestors(entry) if isinstance(above, ast.If | ast.IfExp))
    asked = (part for test in tests for part in ast.walk(test) if isinstance(part, ast.Compare))
    return any(isinstance(part.ops[0], ast.In) and ast.dump(part.left) == key for part in asked)


def _strings(expr: ast.expr, file: FileFacts) -> list[str]:
    """A literal text, or the texts in a literal collection, or the keys of a table, by way of a name."""
    match file.made_from(expr):
        case ast.Constant(value=str(text)):
            return [text]
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [str(item.value) for item in elements if isinstance(item, ast.Constant)]
        case ast.Dict(keys=keys):
            return [str(item.value) for item in keys if isinstance(item, ast.Constant)]
    return []


def _model_type(expr: ast.expr, file: FileFacts) -> Value | None:
    """The config whose `model_type` this is."""
    match made := file.made_from(expr):
        case ast.Attribute(value=base, attr="model_type"):
            if (config := file.holds(base, Kind.CONFIG, Kind.TEXT_CONFIG)) is not None:
                return config
            if file.text(base).rpartition(".")[2] == "config":
                fact = f"{file.source.path}:{expr.lineno}: `{file.text(made)}` is compared with a family's name"
                return Value(Kind.CONFIG, fact, Confidence.LIKELY, (fact,))
    return None


def _reads_model_type(compare: ast.Compare, file: FileFacts) -> Value | None:
    """The config whose `model_type` is compared with literal names."""
    sides = [compare.left, *compare.comparators]
    if not any(FAMILIES.search(text) for side in sides for text in _strings(side, file)):
        return None
    return next(filter(None, (_model_type(side, file) for side in sides)), None)


def _names_class(compare: ast.Compare, file: FileFacts) -> Value | None:
    """A comparison with the name of one family's class: of `architectures`, or of a class's `__name__`."""
    sides = [compare.left, *compare.comparators]
    names = [text for side in sides for text in _strings(side, file)]
    if not any(CLASS_NAME.match(name) for name in names):
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
    if not refuses(chain.orelse):
        return
    for test in tests:
        for part in test.values if isinstance(test, ast.BoolOp) else [test]:
            match part:
                case ast.Compare(left=ast.Constant(value=str(family)), ops=[ast.In()], comparators=[name]):
                    if FAMILIES.search(family) and "model" in file.text(name) and "model_type" not in file.text(name):
                        yield test
                        break
                case ast.Compare(
                    left=ast.Name(id=name) | ast.Attribute(attr=name),
                    ops=[ast.Eq()],
                    comparators=[ast.Constant(value=str(family))],
                ) if "model" in name and FAMILY.fullmatch(family) and _model_type(part.left, file) is None:
                    yield test
                    break


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
