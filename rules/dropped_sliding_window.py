"""A drafter's attention that leaves out the sliding window of its layers.

A drafter built from Qwen3's, Mistral's or Gemma's parts has sliding-window layers where its config says so (four of
five in the DFlash drafter of Qwen3.6-27B, window 2048). Transformers' attention functions take the window as an
argument, `sliding_window=self.sliding_window`; a forward that does not hand it on attends to everything. Nothing
fails, and short texts are the same; past the window the drafter sees what it never saw in training, and acceptance
falls. Families without sliding windows, such as Llama, need no such argument.

On: Transformers 4.48 and later, where attention functions take the window; silently.
Seen: the attention of Qwen3 and Gemma 3 in 5.24, which hand it on; not measured here.
Fix: none: where the window is kept has to be seen.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

SLIDING_FAMILY = re.compile(r"^transformers\.models\.(qwen[23](_moe)?|mistral|ministral|gemma\w+|smollm3)\.")
FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"


class DroppedSlidingWindow(Rule):
    code = "DDA308"
    kind = "dropped-sliding-window"
    severity = Severity.SILENT
    message = (
        "this attention is called without the layer's sliding window, so such layers see everything; "
        "hand on `sliding_window=`"
    )
    nodes = (ast.Call,)
    markers = (FUNCTIONS,)
    EXAMPLES = (
        Good("""
            from torch import nn
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

            class Attention(nn.Module):
                def forward(self, q, k, v, mask):
                    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
                    return attend(self, q, k, v, mask, scaling=self.scaling)
        """),
        Good("""
            from torch import nn
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
            from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

            class Attention(nn.Module):
                def forward(self, q, k, v, mask):
                    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
                    return attend(self, q, k, v, mask, scaling=self.scaling, sliding_window=self.sliding_window)
        """),
        Good("""
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
            from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

            def names():
                return sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())
        """),
        Bad("""
            from torch import nn
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
            from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

            class Attention(nn.Module):
                def forward(self, q, k, v, mask):
                    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
                    return attend(self, q, k, v, mask, scaling=self.scaling)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        family = next((module for module in sorted(file.file.modules) if SLIDING_FAMILY.match(f"{module}.")), None)
        names = {keyword.arg for keyword in node.keywords}
        if family is None or "sliding_window" in names or file.module_class(node) is None:
            return
        function = file.function(node)
        # What `**kwargs` of a forward brings does not hold the window; a dict made here can. A comment does nothing.
        if not _is_attention_function(node.func, file) or (function and "sliding" in ast.unparse(function.node)):
            return
        fact = f"{file.source.path}:{node.lineno}: `{family}` has layers with a sliding window"
        because = Value(Kind.LIBRARY, fact, Confidence.LIKELY, (fact,))
        yield self.report(file, node.func, because, fix="where the window is kept has to be seen")


def _is_attention_function(function: ast.expr, file: FileFacts) -> bool:
    """Whether it is taken from Transformers' table of attention functions, on some way."""
    for made in file.all_made_from(function):
        table = made.value if isinstance(made, ast.Subscript) else made
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
            table = made.func.value
        if any(name.endswith(FUNCTIONS) for name in file.qualified_names(table)):
            return True
    return False
