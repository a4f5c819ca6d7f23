"""A target run in float16 beside a drafter that was trained on its bfloat16 states.

Llama 3, Qwen3 and Qwen3.6 checkpoints are bfloat16. In float16 the same weights give other hidden states, and with
large activations infinities; nothing fails, but a drafter that reads the target's states is right less often, and the
text is no longer that of the checkpoint. `dtype="auto"` loads what the checkpoint says, on every release. Where there
is only one model, or a drafter that is a model of its own in float16 too, the choice is left alone.

On: every release; checkpoints in bfloat16, silently.
Seen: known from ports of EAGLE-3 and DFlash; public reports of falling acceptance, not measured here.
Fix: unsafe: memory and speed change with the dtype.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.library import DRAFTER, instance_kind
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._loaders import loader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

HALF = frozenset({"torch.float16", "torch.half"})


class HalfPrecisionTarget(Rule):
    code = "DDA306"
    kind = "half-precision-target"
    severity = Severity.SILENT
    message = (
        "the target is run in float16, and its drafter has learned from states of the checkpoint's own dtype; "
        'load it with `dtype="auto"`'
    )
    nodes = (ast.keyword,)
    markers = ("float16", "torch.half")
    EXAMPLES = (
        Good("""
            import torch
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name", dtype=torch.float16)
        """),
        Good("""
            import torch
            from transformers import AutoModelForCausalLM

            def pair(name, small):
                target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
                draft_model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float16)
                return target, draft_model
        """),
        Good("""
            import torch
            from transformers import AutoModelForCausalLM

            def pair(name, make_drafter):
                target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
                drafter = make_drafter(target).to(torch.float16)
                return target, drafter
        """),
        Bad(
            """
            import torch
            from transformers import AutoModelForCausalLM

            def pair(name, make_drafter):
                target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
                drafter = make_drafter(target)
                return target, drafter
            """,
            """
            from transformers import AutoModelForCausalLM

            def pair(name, make_drafter):
                target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
                drafter = make_drafter(target)
                return target, drafter
            """,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.keyword)
        call = file.parent(node)
        if node.arg not in ("dtype", "torch_dtype") or not isinstance(call, ast.Call):
            return
        if not HALF & file.qualified_names(node.value) or _is_drafters(call, file):
            return
        called = loader(call, file)
        owner = called.origin.rpartition(".")[0] if called is not None else ""
        if called is None or instance_kind(owner) is not Kind.MODEL or not _has_drafter(call, file):
            return
        reason = "the checkpoint's own dtype, which is float16 where the checkpoint is"
        fix = Fix((file.edit(node.value, '"auto"'),), Applicability.UNSAFE, reason)
        yield self.report(file, node, called, fix=fix)


def _is_drafters(call: ast.Call, file: FileFacts) -> bool:
    return DRAFTER.search(file.text(file.statement(call)).partition("(")[0]) is not None


def _has_drafter(call: ast.Call, file: FileFacts) -> bool:
    """Whether a drafter is bound beside the target, and is none that float16 is as good for: a model of its own."""
    scope = file.scope(call)
    stored = [node for node in file.file.attributes if isinstance(node.ctx, ast.Store) and file.scope(node) is scope]
    bound = [node for name in scope.names if DRAFTER.search(name) for node in scope.names[name]]
    bound += [node for node in stored if DRAFTER.search(node.attr)]
    texts = [file.text(file.statement(node)) for node in bound if not isinstance(node, ast.arg)]
    return bool(texts) and not any("float16" in text or "half" in text for text in texts)
