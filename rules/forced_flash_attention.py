"""Flash attention demanded by name.

`attn_implementation="flash_attention_2"` raises ImportError where the optional package is missing, takes no mask
with four dimensions, so no tree can be verified under it, and never returns attention maps. The default (`sdpa`) does
the first two; maps need `eager`. Choose by what is installed and what the code does. Which one is right depends
on that, so nothing is edited.

On: every release; machines without the package, trees, attention maps.
Seen: huggingface/transformers#33417, bytedance/Sa2VA#105.
Fix: none: which implementation is right depends on the use.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import MAKERS
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class ForcedFlashAttention(Rule):
    code = "DDA406"
    kind = "forced-flash-attention"
    severity = Severity.ERROR
    message = (
        "flash attention raises where its package is missing and takes no tree mask; "
        "let the caller choose, or leave the argument out"
    )
    nodes = (ast.Call,)
    markers = ("flash_attention",)
    EXAMPLES = (
        Good("""
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name", attn_implementation="sdpa")
        """),
        Good("""
            from transformers import AutoModelForCausalLM

            def load(name, fast):
                kind = "flash_attention_2" if fast else "sdpa"
                return AutoModelForCausalLM.from_pretrained(name, attn_implementation=kind)
        """),
        Good("""
            from transformers import AutoModelForCausalLM

            def load(name, attention="flash_attention_2"):
                return AutoModelForCausalLM.from_pretrained(name, attn_implementation=attention)
        """),
        Bad("""
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name", attn_implementation="flash_attention_2")
        """),
        Bad("""
            from transformers import AutoModelForCausalLM

            ATTENTION = "flash_attention_2"

            def load(name):
                return AutoModelForCausalLM.from_pretrained(name, attn_implementation=ATTENTION)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in MAKERS:
            return
        for keyword in node.keywords:
            value = file.constant(keyword.value)
            forced = keyword.arg == "attn_implementation" and str(value).startswith("flash_attention")
            if forced:
                fact = f"{file.source.path}:{node.lineno}: the value is always `{value}`"
                because = Value(Kind.LIBRARY, file.text(node.func), evidence=(fact,))
                claim = Claim(Ask.ATTENTION, str(value) if forced else "flash_attention_2")
                reason = "which implementation is right depends on the use"
                yield self.report(file, keyword, because, fix=reason, claim=claim)
