"""One end token where a model has several.

`tokenizer.eos_token_id` is one id. Chat models end a turn with another than they end a text with, and their
generation config lists both (Qwen3: `<|im_end|>` and `<|endoftext|>`); a loop that knows one of them runs on past
the end. `stop_token_ids(model, tokenizer)` of `ddaudit.runtime` returns every end token from both configs.

On: every release; chat models, silently.
Seen: the generation configs of Qwen3 and Llama 3, which list several.
Fix: unsafe: a loop that ends earlier gives shorter texts on old models too.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Confidence, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

# What is never to be drawn is no condition to stop at.
FORBIDS = re.compile(r"(disallow|suppress|forbid|ban|bad_words)\w*$")


class SingleEndToken(Rule):
    code = "DDA302"
    kind = "single-end-token"
    severity = Severity.SILENT
    message = "a model can have several end tokens, and this list has one; use `stop_token_ids(model, tokenizer)`"
    nodes = (ast.List,)
    markers = ("eos_token_id",)
    EXAMPLES = (
        Good("""
            def ends(tokenizer):
                return [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        """),
        Good("""
            def close(ids, tokenizer):
                return ids + [tokenizer.eos_token_id]
        """),
        Good("""
            import torch

            def close(ids, tokenizer, device):
                end = torch.tensor([tokenizer.eos_token_id], device=device).unsqueeze(0)
                return torch.cat((ids, end), dim=-1)
        """),
        Good("""
            def forbid(settings, tokenizer):
                settings.disallow_tokens([tokenizer.eos_token_id])
        """),
        Bad(
            """
            from transformers import AutoModelForCausalLM, AutoTokenizer

            def main(name, generate):
                tokenizer = AutoTokenizer.from_pretrained(name)
                target = AutoModelForCausalLM.from_pretrained(name)
                return generate(target, ends=[tokenizer.eos_token_id])
            """,
            """
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from ddaudit.runtime import stop_token_ids

            def main(name, generate):
                tokenizer = AutoTokenizer.from_pretrained(name)
                target = AutoModelForCausalLM.from_pretrained(name)
                return generate(target, ends=stop_token_ids(target, tokenizer))
            """,
        ),
        Bad("""
            def main(tokenizer, generate):
                stop_ids = [tokenizer.eos_token_id]
                return generate(stop_ids)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.List(elts=[ast.Attribute(value=tokenizer, attr="eos_token_id")], ctx=ast.Load()):
                pass
            case _:
                return
        # In a sum of token ids the end token is text, not a condition.
        above = file.parent(node)
        if not isinstance(above, ast.keyword | ast.Assign | ast.AnnAssign | ast.Call | ast.arguments):
            return
        if isinstance(above, ast.Call) and (_is_joined(above, file) or FORBIDS.search(file.text(above.func))):
            return
        because = file.holds(tokenizer, Kind.TOKENIZER)
        if because is None:
            if "tokenizer" not in file.text(tokenizer).lower():
                return
            fact = f"{file.source.path}:{node.lineno}: `{file.text(tokenizer)}` is named like a tokenizer"
            because = Value(Kind.TOKENIZER, fact, Confidence.LIKELY, (fact,))
        yield self.report(file, node, because, fix=_fix(node, tokenizer, file))


def _is_joined(tensor: ast.expr, file: FileFacts) -> bool:
    """Whether a tensor, or the name that it gets, is put beside others: it is text then."""
    statement = file.statement(tensor)
    names = {ast.dump(target).replace("Store", "Load") for target in getattr(statement, "targets", ())}
    for call in file.file.calls:
        match call.func:
            case ast.Attribute(attr="cat" | "concat" | "concatenate" | "hstack"):
                parts = {part for arg in call.args for part in ast.walk(arg)}
                if tensor in parts or any(ast.dump(part) in names for part in parts):
                    return True
    return False


def _fix(node: ast.AST, tokenizer: ast.expr, file: FileFacts) -> Fix | str:
    models = [name for name in file.names_holding(Kind.MODEL, node) if file.is_bound_before(ast.Name(name), node)]
    if len(models) != 1:
        return "no single name here holds the model"
    if (runtime := file.runtime_call("stop_token_ids", node)) is None:
        return "the names `stop_token_ids` and `runtime` mean something else here"
    reason = "decoding stops at every end token of the model, which may be earlier than before"
    edit = file.edit(node, f"{runtime[0]}({models[0]}, {file.argument(tokenizer)})")
    return Fix((edit,), Applicability.UNSAFE, reason, (runtime[1],))
