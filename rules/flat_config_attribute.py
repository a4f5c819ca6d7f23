"""Sizes of the text decoder are not at the top of a composite config.

`model.config.hidden_size` raises AttributeError on `Qwen3_5Config`, whose text fields stand in `text_config`
(linkedin/Liger-Kernel#1012); `getattr(config, "max_position_embeddings", None)` silently gives None there, and
`model.config.use_cache = False` sets an attribute that nobody reads (PrimeIntellect-ai/prime-rl#1922).
`config.get_text_config()` is the text config on every model, the config itself on a flat one. The spellings of GPT-2
(`n_embd`, `n_layer`) exist on few families. The tie flag is the exception: it counts at the top.

The config that the repository's own module is built from is its own business.

On: every release; composite configs (Qwen3.5 and Qwen3.6, Gemma 3, Llama 4), by their own loader class.
Seen: linkedin/Liger-Kernel#1012, PrimeIntellect-ai/prime-rl#1922, hiyouga/LlamaFactory#7500.
Fix: safe to read, since a flat config returns itself; unsafe to write, since other code may read the top.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import DRAFTER
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.finding import Finding

OLD_SPELLINGS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings",
}
FEW_HAVE = frozenset({"sliding_window", "num_experts", "num_experts_per_tok"})
TEXT_FIELDS = frozenset(
    {
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "layer_types", "sliding_window",
        "num_experts", "num_experts_per_tok", "use_cache",
    }
)  # fmt: skip


class FlatConfigAttribute(Rule):
    code = "DDA401"
    kind = "config-attr"
    severity = Severity.PORT
    message = "`{name}` is a field of the text config on composite models; read it through `get_text_config()`"
    nodes = (Named(ast.Attribute, TEXT_FIELDS | {*OLD_SPELLINGS}), Named(ast.Call, frozenset({"getattr"})))
    markers = ("config",)
    EXAMPLES = (
        Good("""
            from transformers import DynamicCache

            def make(config):
                text = config.get_text_config() if hasattr(config, "get_text_config") else config
                return DynamicCache(config=text), text.num_hidden_layers
        """),
        Good("""
            from transformers import PreTrainedModel

            def width(model: PreTrainedModel):
                config = model.config.get_text_config()
                return config.hidden_size
        """),
        Good("""
            from torch import nn
            from transformers import AutoConfig

            class Drafter(nn.Module):
                def __init__(self, config):
                    super().__init__()
                    self.config = config
                    self.up = nn.Linear(config.hidden_size, self.config.hidden_size)

            drafter = Drafter(AutoConfig.from_pretrained("drafter"))
        """),
        Good("""
            from transformers import PreTrainedModel

            def is_tied(model: PreTrainedModel):
                return model.config.tie_word_embeddings
        """),
        Good("""
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("gpt2")
            try:
                length = model.config.n_ctx
            except AttributeError:
                length = 2048
        """),
        Bad(
            """
            from transformers import PreTrainedModel

            def width(model: PreTrainedModel):
                return model.config.hidden_size
            """,
            """
            from transformers import PreTrainedModel

            def width(model: PreTrainedModel):
                return model.config.get_text_config().hidden_size
            """,
        ),
        Bad(
            """
            from transformers import PreTrainedModel

            def window(model: PreTrainedModel):
                return getattr(model.config, "max_position_embeddings", None)
            """,
            """
            from transformers import PreTrainedModel

            def window(model: PreTrainedModel):
                return getattr(model.config.get_text_config(), "max_position_embeddings", None)
            """,
        ),
        Bad("""
            from transformers import PreTrainedModel

            def resize(model: PreTrainedModel, size):
                model.config.vocab_size = size
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute(value=base, attr=name):
                severity = self.severity
            case ast.Call(func=ast.Name(id="getattr"), args=[base, ast.Constant(value=str(name)), *rest]):
                severity = Severity.SILENT if rest else self.severity
            case _:
                return
        if name not in TEXT_FIELDS and name not in OLD_SPELLINGS:
            return
        config = file.holds(base, Kind.CONFIG)
        if config is None or file.holds(base, Kind.TEXT_CONFIG) or file.is_own_config(base):
            return
        # A drafter is of one architecture, and its config is flat.
        if DRAFTER.search(file.text(base)) or _is_text_config(base, file):
            return
        if _is_asked_for(base, name, node, file):
            # What no text config of the target has is asked for rightly.
            if name in OLD_SPELLINGS or name in FEW_HAVE:
                return
            severity = Severity.SILENT
        if isinstance(node, ast.Attribute) and not file.is_read(node):
            severity = Severity.SILENT
        ask = Ask.CONFIG_OR_DEFAULT if severity is Severity.SILENT else Ask.CONFIG
        if name in OLD_SPELLINGS and severity is self.severity:
            severity = Severity.ERROR
        fix = _fix(node, base, name, config, file)
        yield self.report(file, node, config, severity=severity, fix=fix, claim=Claim(ask, name), name=name)


def _is_text_config(base: ast.expr, file: FileFacts) -> bool:
    """Made by a choice that takes the text config where there is one."""
    match file.made_from(base):
        case ast.IfExp(body=ast.Call(func=ast.Attribute(attr="get_text_config"))):
            return True
        case ast.IfExp(body=ast.Attribute(attr="text_config")):
            return True
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value="text_config"), _]):
            return True
    return False


def _is_asked_for(base: ast.expr, name: str, node: ast.AST, file: FileFacts) -> bool:
    """Whether `hasattr` asks for the field first, on the way to this place, or a `try` has an answer without it."""
    asked = ast.dump(ast.parse(f"hasattr({ast.unparse(base)}, {name!r})", mode="eval").body)
    here = node
    for above in file.ancestors(node):
        match above:
            case ast.If(test=test) | ast.IfExp(test=test) if here is not test:
                if asked in ast.dump(test):
                    return True
            case ast.BoolOp(op=ast.And(), values=values) if here is not values[0]:
                if any(asked in ast.dump(value) for value in values[: values.index(here)]):  # type: ignore[arg-type]
                    return True
            case ast.Try(body=body, handlers=handlers) if here in body:
                if any(item.type is not None and "AttributeError" in ast.dump(item.type) for item in handlers):
                    return True
            case ast.stmt() if isinstance(above, ast.FunctionDef | ast.ClassDef):
                return False
        here = above
    return False


def _fix(node: ast.AST, base: ast.expr, name: str, config: Value, file: FileFacts) -> Fix | str:
    if isinstance(node, ast.Attribute) and not file.is_read(node):
        if name != "use_cache":
            return "the field is assigned to, and other code may read the one at the top"
        reason = "the decoder reads the text config's flag; on a flat config it is the same object"
        return Fix((file.edit(base, f"{file.operand(base)}.get_text_config()"),), Applicability.UNSAFE, reason)
    reason = "`get_text_config()` returns the config itself where it is flat"
    text = f"{file.operand(base)}.get_text_config()"
    if isinstance(node, ast.Attribute) and name in OLD_SPELLINGS:
        edit = file.edit(node, f"{text}.{OLD_SPELLINGS[name]}")
    else:
        edit = file.edit(base, text)
    return Fix((edit,), Applicability.SAFE, reason)
