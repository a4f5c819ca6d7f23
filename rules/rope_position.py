"""Rotary positions moved: the base into `rope_parameters`, the module to the model, positions out of the arguments.

Since Transformers 5 `config.rope_theta` raises, and `getattr(config, "rope_theta", 10000)` silently gives its default
for every model (deepspeedai/DeepSpeed#8345); a write creates an attribute that nobody reads, and `config.rope_scaling
= {…}` replaces `rope_parameters` and loses the base. Attention modules have no `rotary_emb`: the model makes `cos` and
`sin` once and hands them down. Rotary modules are built from a config, not from a size, and
`apply_rotary_pos_emb`'s fifth argument is `unsqueeze_dim`, so positions given there are silently taken for that.
Read `config.get_text_config().rope_parameters`, which is nested by layer type on Gemma 3.

On: Transformers 5 on every model.
Seen: deepspeedai/DeepSpeed#8345, deepspeedai/DeepSpeed#8341, huggingface/transformers#42390.
Fix: unsafe for a written base, since releases before 5 read the attribute; none for the rest.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.names import RELEASE, has_member, parameters
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

FIELDS = frozenset({"rope_theta", "rope_scaling", "rotary_emb_base"})
OLD_SIZES = frozenset({"dim", "base", "max_position_embeddings", "scaling_factor", "rope_type"})
ASKED = OLD_SIZES | {"position_ids"}
NAMES = re.compile(rf"({'|'.join(sorted(FIELDS))})$|.*rotary")
# An attention class that stands for one of a family that is not known.
TYPICAL = "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5Attention"
DEFAULT = (
    "`{name}` is in `rope_parameters` since Transformers 5, so the default is taken for every model without an error; "
    "read `config.get_text_config().rope_parameters`"
)
WRITE = (
    "`{name}` is in `rope_parameters` since Transformers 5: set here it is not read, or replaces the base; "
    "change the entries of `config.get_text_config().rope_parameters`"
)
MODULE = (
    "`{name}` is no member of an attention module in Transformers {release}: the model makes cos and sin once; "
    "use the `position_embeddings` that a layer is given"
)
BUILT = "a rotary module is built from a config since Transformers 4.48; give it one"
FIFTH = "the fifth argument is `unsqueeze_dim` since Transformers 5, and positions are not taken; leave them out"
REASON = "which base or which positions are meant has to be seen"


class RopePosition(Rule):
    code = "DDA210"
    kind = "rope-position"
    severity = Severity.ERROR
    message = (
        "`{name}` is no attribute of a config since Transformers 5; read `config.get_text_config().rope_parameters`"
    )
    since = "5.0"
    nodes = (Named(ast.Attribute, NAMES), ast.Call)
    markers = ("rope_theta", "rope_scaling", "rotary", "Rotary", "rope")
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def base(model: PreTrainedModel):
                rope = model.config.get_text_config().rope_parameters
                return rope.get("full_attention", rope)["rope_theta"]
        """),
        Good("""
            from dataclasses import dataclass

            @dataclass
            class Config:
                rope_theta: float = 10000.0

            def base(config: Config):
                return config.rope_theta
        """),
        Good("""
            from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

            def turn(config, query, key, hidden, positions):
                cos, sin = Qwen3RotaryEmbedding(config)(hidden, positions)
                return apply_rotary_pos_emb(query, key, cos, sin)
        """),
        Bad("""
            from transformers import PreTrainedModel

            def base(model: PreTrainedModel):
                return getattr(model.config, "rope_theta", 10000.0)
        """),
        Bad(
            """
            from transformers import AutoModelForCausalLM

            def build(config, base):
                config.rope_theta = base
                return AutoModelForCausalLM.from_config(config)
            """,
            """
            from transformers import AutoModelForCausalLM

            def build(config, base):
                config.get_text_config().rope_parameters["rope_theta"] = base
                return AutoModelForCausalLM.from_config(config)
            """,
        ),
        Bad("""
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

            def turn(query, key, cos, sin, position_ids):
                return apply_rotary_pos_emb(query, key, cos, sin, position_ids)
        """),
        Bad("""
            from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

            def build(size):
                return LlamaRotaryEmbedding(size, max_position_embeddings=2048)
        """),
        Bad("""
            from transformers.models.llama.modeling_llama import LlamaAttention

            def forward(self, value, length):
                return self.rotary_emb(value, seq_len=length)

            LlamaAttention.forward = forward
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute(value=base, attr=name) if name in FIELDS:
                config = _config(base, file)
                if config is None or file.is_set_by_own_class(node):
                    return
                asked = Claim(Ask.CONFIG if isinstance(node.ctx, ast.Load) else Ask.CONFIG_OR_DEFAULT, name)
                if not isinstance(node.ctx, ast.Load):
                    claim = asked if name != "rope_scaling" else None
                    silent = Severity.ERROR if name == "rope_scaling" else Severity.SILENT
                    fix = _write(node, base, file) if name == "rope_theta" else REASON
                    yield self.report(
                        file, node, config, severity=silent, message=WRITE, fix=fix, claim=claim, name=name
                    )
                elif name != "rope_scaling" and not _is_asked_for(name, node, file):
                    yield self.report(file, node, config, fix=REASON, claim=asked, name=name)
            case ast.Attribute(value=base, attr=name) if "rotary" in name and isinstance(node.ctx, ast.Load):
                yield from self._member(node, base, name, file)
            case ast.Call(func=ast.Name(id="getattr"), args=[base, ast.Constant(value=str(name)), _]):
                config = _config(base, file) if name in FIELDS - {"rope_scaling"} else None
                if config is not None and not _reads_parameters(node, file):
                    claim = Claim(Ask.CONFIG_OR_DEFAULT, name)
                    yield self.report(
                        file,
                        node,
                        config,
                        severity=Severity.SILENT,
                        message=DEFAULT,
                        fix=REASON,
                        claim=claim,
                        name=name,
                    )
            case ast.Call(keywords=keywords) if len(node.args) > 2 or any(k.arg in ASKED for k in keywords):
                yield from self._function(node, file)

    def _member(self, node: ast.Attribute, base: ast.expr, name: str, file: FileFacts) -> Iterator[Finding]:
        owners = [value for value in file.values(base) if value.kind is Kind.ATTENTION]
        if not owners or file.is_set_by_own_class(node) or file.facts.flow.is_set_anywhere(name):
            return
        classes = [owner.origin if owner.origin.startswith("transformers.") else TYPICAL for owner in owners]
        if not any(has_member(owner, name) for owner in classes):
            yield self.report(
                file, node, owners[0], message=MODULE, fix=REASON, since="4.48", name=name, release=RELEASE
            )

    def _function(self, call: ast.Call, file: FileFacts) -> Iterator[Finding]:
        for name in sorted(file.qualified_names(call.func)):
            fact = f"{file.source.path}:{call.lineno}: `{name}` is called"
            called = Value(Kind.LIBRARY, name, evidence=(fact,))
            keywords = {keyword.arg for keyword in call.keywords}
            if name.startswith("transformers.") and name.endswith("RotaryEmbedding"):
                if keywords & OLD_SIZES or len(call.args) > 2:
                    yield self.report(file, call, called, message=BUILT, fix=REASON, since="4.48")
            elif (known := parameters(name)) and "apply_" in name and "position_ids" not in known:
                fifth = call.args[4] if len(call.args) > 4 else None
                if "position_ids" in keywords or (fifth is not None and not isinstance(fifth, ast.Constant)):
                    yield self.report(file, call, called, severity=Severity.SILENT, message=FIFTH, fix=REASON)


def _config(base: ast.expr, file: FileFacts) -> Value | None:
    """The Transformers config that `base` is, unless the repository's own module is built from it."""
    return None if file.is_own_config(base) else file.holds(base, Kind.CONFIG, Kind.TEXT_CONFIG)


def _reads_parameters(node: ast.AST, file: FileFacts) -> bool:
    """Whether the same function also reads where the field is now, and this is for old releases."""
    function = file.function(node)
    return function is not None and "rope_parameters" in file.text(function.node)


def _write(node: ast.Attribute, base: ast.expr, file: FileFacts) -> Fix | str:
    if not isinstance(node.ctx, ast.Store) or not isinstance(file.parent(node), ast.Assign):
        return "the field is not simply assigned to"
    text = f'{file.text(base)}.get_text_config().rope_parameters["rope_theta"]'
    reason = (
        "what the model is built from since Transformers 5; older releases read the attribute, and Gemma 3 one a kind"
    )
    return Fix((file.edit(node, text),), Applicability.UNSAFE, reason, since="5.0")


def _is_asked_for(name: str, node: ast.AST, file: FileFacts) -> bool:
    """Under a test, or a `try`, that asks whether the config has the field."""
    for above in file.ancestors(node):
        match above:
            case ast.If(test=test) | ast.IfExp(test=test) if f'"{name}"' in file.text(test):
                return True
            case ast.Try(handlers=[_, *_]):
                return True
    return False
