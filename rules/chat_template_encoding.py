"""`apply_chat_template` returns a BatchEncoding where it returned ids.

Since Transformers 5 `return_dict` is True by default when the template is tokenized. `len()` of what comes back is its
number of keys, a slice of it is empty, `generate` and `torch.tensor` do not take it as ids, and a prompt mask made
from its length is silently wrong (NVIDIA/Model-Optimizer#2172). Ask for what is meant: `return_dict=False` for ids,
`tokenize=False` for text, or read `["input_ids"]`.

On: Transformers 5 on every tokenizer, silently.
Seen: NVIDIA/Model-Optimizer#2172, SearchSavior/OpenArc#95.
Fix: safe: `return_dict=False` is taken by every release and gives ids. Unsafe where it is only named like a
  tokenizer.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Confidence, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

FIELDS = frozenset({"input_ids", "attention_mask", "keys", "items", "data"})
PASS_ON = frozenset({"to", "cuda", "cpu"})


class ChatTemplateEncoding(Rule):
    code = "DDA407"
    kind = "deprecated-kwarg"
    severity = Severity.SILENT
    message = (
        "this returns a BatchEncoding since Transformers 5, and is used as token ids; "
        'say `return_dict=False`, or read `["input_ids"]`'
    )
    since = "5.0"
    nodes = (ast.Call,)
    markers = ("apply_chat_template",)
    EXAMPLES = (
        Good("""
            def ids(tokenizer, messages):
                return tokenizer.apply_chat_template(messages, return_tensors="pt")["input_ids"]
        """),
        Good("""
            def render(tokenizer, messages):
                return tokenizer.apply_chat_template(messages, tokenize=False)
        """),
        Good("""
            def encode(tokenizer, messages):
                batch = tokenizer.apply_chat_template(messages, return_tensors="pt")
                return batch["input_ids"]
        """),
        Good("""
            def encode(tokenizer, messages, model):
                batch = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
                return model.generate(**batch)
        """),
        Bad(
            """
            from transformers import AutoTokenizer

            def length(name, messages):
                tokenizer = AutoTokenizer.from_pretrained(name)
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
                return len(ids)
            """,
            """
            from transformers import AutoTokenizer

            def length(name, messages):
                tokenizer = AutoTokenizer.from_pretrained(name)
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                return len(ids)
            """,
        ),
        Bad(
            """
            def answer(model, tokenizer, messages):
                ids = tokenizer.apply_chat_template(messages, return_tensors="pt").to("cuda")
                return model.generate(ids)
            """,
            """
            def answer(model, tokenizer, messages):
                ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False).to("cuda")
                return model.generate(ids)
            """,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Call(func=ast.Attribute(value=tokenizer, attr="apply_chat_template")):
                pass
            case _:
                return
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if None in given or "return_dict" in given or "processor" in file.text(tokenizer).lower():
            return
        if "tokenize" in given and file.constant(given["tokenize"]) is not True:
            return
        because = file.holds(tokenizer, Kind.TOKENIZER)
        if because is None:
            if not any(word in file.text(tokenizer).lower() for word in ("tokenizer", "tok")):
                return
            fact = f"{file.source.path}:{node.lineno}: `{file.text(tokenizer)}` is named like a tokenizer"
            because = Value(Kind.TOKENIZER, fact, Confidence.LIKELY, (fact,))
        if _is_used_as_ids(node, file):
            yield self.report(file, node, because, fix=_fix(node, file), claim=Claim(Ask.TEMPLATE_IDS))


def _is_used_as_ids(call: ast.Call, file: FileFacts) -> bool:
    """Whether what comes back is measured, sliced, or handed on as it is."""
    value: ast.AST = call
    above = file.parent(value)
    while isinstance(above, ast.Attribute) and above.attr in PASS_ON:
        value = file.parent(above) or above
        above = file.parent(value)
    match above:
        case ast.Assign(targets=[ast.Name(id=name)]):
            home = file.scope(call).find(name)
            uses = [
                use
                for use in file.nodes
                if isinstance(use, ast.Name) and use.id == name and isinstance(use.ctx, ast.Load)
                if file.scope(use).find(name) is home
            ]
            return not any(_reads_fields(use, file) for use in uses) and any(_measures(use, file) for use in uses)
    return _measures(value, file)


def _reads_fields(use: ast.AST, file: FileFacts) -> bool:
    match file.parent(use):
        case ast.Attribute(attr=attr):
            return attr in FIELDS
        case ast.Subscript(slice=ast.Constant(value=str())):
            return True
        case ast.keyword(arg=None):
            return True
        case ast.Call(func=ast.Name(id="isinstance" | "hasattr")):
            return True
    return False


def _measures(use: ast.AST, file: FileFacts) -> bool:
    match file.parent(use):
        case ast.Attribute(attr=attr):
            return attr in ("shape", "size", "ndim", "dim", "numel", "unsqueeze", "squeeze", "tolist", "clone")
        case ast.Subscript(value=base, slice=key):
            return base is use and not (isinstance(key, ast.Constant) and isinstance(key.value, str))
        case ast.keyword(arg="input_ids" | "inputs"):
            return True
        case ast.Call(func=called, args=[first, *_]) if first is use and file.holds(called, Kind.MODEL) is not None:
            return True
        case ast.Call(func=ast.Name(id="len" | "list" | "zip" | "reversed" | "enumerate")):
            return True
        case ast.Call(func=ast.Attribute(attr="generate" | "tensor" | "LongTensor" | "cat" | "stack" | "decode")):
            return True
        case ast.BinOp():
            return True
    return False


def _fix(call: ast.Call, file: FileFacts) -> Fix | str:
    if not call.args and not call.keywords:
        return "the call has no arguments"
    inner = file.text(call).removesuffix(")").rstrip()
    space = " " if inner.endswith(",") else ", "
    reason = "ids on every release, as the code takes them"
    return Fix((file.edit(call, f"{inner}{space}return_dict=False)"),), Applicability.SAFE, reason)
