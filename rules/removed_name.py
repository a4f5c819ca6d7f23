"""A name of Transformers that the current release does not have.

Private modules and per-model classes come and go: `transformers.modeling_attn_mask_utils`, the per-backend attention
classes (`LlamaFlashAttention2`), per-model caches (`HybridMambaAttentionDynamicCache`), `AutoModelForVision2Seq`.
The import raises before anything runs. Names are looked up in a list of everything that 5.24.0 has, which ships with
the tool. An import with an `except ImportError` of its own is fine, and so is one for type checking only.

On: 5.24, on every target: the import raises.
Seen: deepseek-ai/DeepSeek-OCR#302, Adam-Mazur/Lazy-Llama#4, open-compass/VLMEvalKit#1675.
Fix: none: what takes its place has to be chosen.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.names import RELEASE, gone_since, has_module, has_name
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.auditor.targets.releases import number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

# Classes that have another name and are otherwise as they were.
RENAMED = {"AutoModelForVision2Seq": "AutoModelForImageTextToText"}
SUCCESSORS = {
    **{old: f"`{new}`" for old, new in RENAMED.items()},
    "is_flash_attn_available": "`is_flash_attn_2_available`",
    "Conversation": "a list of plain message dicts",
    "transformers.modeling_attn_mask_utils": "`transformers.masking_utils`, which needs a config and a cache",
}
MANY = "`{name}` do not exist in Transformers {release}, so the import raises; {remedy}"
CATCHES = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
REASON = "what takes its place has to be chosen"


class RemovedName(Rule):
    code = "DDA402"
    kind = "private-import"
    severity = Severity.ERROR
    message = "`{name}` does not exist in Transformers {release}, so the import raises; {remedy}"
    nodes = (ast.ImportFrom, ast.Import, Named(ast.Name, frozenset(RENAMED)))
    markers = ("transformers",)
    EXAMPLES = (
        Good("""
            try:
                from transformers import AutoModelForImageTextToText as AutoVLM
            except ImportError:
                from transformers import AutoModelForVision2Seq as AutoVLM
        """),
        Good("""
            from transformers.models.qwen3.modeling_qwen3 import ALL_ATTENTION_FUNCTIONS, Qwen3RMSNorm
        """),
        Good("""
            from typing import TYPE_CHECKING

            if TYPE_CHECKING:
                from transformers.modeling_tf_utils import TFPreTrainedModel
        """),
        Good("""
            from mylib.transformers import AutoModelForVision2Seq
        """),
        Bad("""
            from transformers import AutoModelForVision2Seq, AutoProcessor
        """),
        Bad("""
            from transformers.models.llama.modeling_llama import LlamaFlashAttention2, LlamaSdpaAttention
        """),
        Bad(
            """
            from transformers.models.llama.modeling_llama import (
                LlamaAttention,
                LlamaFlashAttention2,
                LlamaSdpaAttention,
            )
            """,
            findings=2,
        ),
        Bad("""
            import transformers.modeling_attn_mask_utils
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        if isinstance(node, ast.Name):
            yield from self._use(node, file)
            return
        assert isinstance(node, ast.ImportFrom | ast.Import)
        missing = list(_missing(node))
        if not missing or _is_guarded(node, file):
            return
        # A line of names is one place to mend, and the oldest of their releases the one from which it raises.
        for line in {file.lineno(place): None for place, _ in missing}:
            here = [(place, name) for place, name in missing if file.lineno(place) == line]
            names = [name for _, name in here]
            facts = (f"{file.source.path}:{node.lineno}: Transformers {RELEASE} has no `{name}`" for name in names)
            remedies = (SUCCESSORS.get(name) or SUCCESSORS.get(name.rpartition(".")[2]) for name in names)
            remedy = " and ".join(dict.fromkeys(filter(None, remedies)))
            first = min(names, key=lambda name: number(gone_since(name)))
            yield self.report(
                file,
                here[0][0],
                Value(Kind.LIBRARY, first, evidence=tuple(facts)),
                fix=REASON,
                message=MANY if len(names) > 1 else "",
                claim=Claim(Ask.IMPORT, first),
                since=gone_since(first),
                name="`, `".join([names[0], *(name.rpartition(".")[2] for name in names[1:])]),
                release=RELEASE,
                remedy=f"use {remedy}" if remedy else "find what took its place",
            )

    def _use(self, node: ast.Name, file: FileFacts) -> Iterator[Finding]:
        """A use of a class that only has another name now."""
        if node.id not in RENAMED:
            return
        for name in sorted(file.qualified_names(node)):
            last = name.rpartition(".")[2]
            if last not in RENAMED or name != f"transformers.{node.id}" or not file.is_read(node):
                continue
            home = file.scope(node).find(node.id)
            imports = home.names[node.id] if home is not None else []
            if len(imports) != 1 or _is_guarded(imports[0], file):
                continue
            fact = f"{file.source.path}:{node.lineno}: Transformers {RELEASE} has no `{name}`"
            because = Value(Kind.LIBRARY, name, evidence=(fact,))
            remedy = f"use `{RENAMED[last]}`"
            yield self.report(
                file, node, because, fix="the import has to change with it", since=gone_since(name),
                claim=Claim(Ask.IMPORT, name), name=name, release=RELEASE, remedy=remedy,
            )  # fmt: skip


def _missing(node: ast.ImportFrom | ast.Import) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith("transformers.") and not has_module(alias.name):
                yield alias, alias.name
        return
    module = node.module or ""
    if node.level or module.partition(".")[0] != "transformers":
        return
    if not has_module(module):
        yield node, module
        return
    for alias in node.names:
        if alias.name != "*" and not has_name(module, alias.name):
            yield alias, f"{module}.{alias.name}"


def _is_guarded(node: ast.AST, file: FileFacts) -> bool:
    """Under a `try` that catches the failure, or behind a test of a version or for type checking."""
    for above in file.ancestors(node):
        match above:
            case ast.Try(handlers=handlers) if any(_catches(handler) for handler in handlers):
                return True
            case ast.If(test=test):
                text = file.text(test)
                if any(word in text for word in ("TYPE_CHECKING", "version", "_available", "hasattr")):
                    return True
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & CATCHES)
