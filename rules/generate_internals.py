"""Inside `generate` and `Trainer`: methods that Transformers has removed, renamed or calls with more arguments.

`model.greedy_search`, `model.sample`, `_get_logits_warper` and their like are gone, so a call raises, and a method
put in their place is never called. `Trainer` hands `compute_loss` the argument `num_items_in_batch`, which an override
of the old signature does not take. Call `generate` with a logits processor, a stopping criterion or
`custom_generate`, and take `**kwargs` in overrides. Members are looked up in a list of what 5.24.0 has.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.names import RELEASE, gone_since, has_member
from ddaudit.auditor.facts.scopes import Class
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

MIXIN = "transformers.generation.utils.GenerationMixin"
# What `generate` was made of in Transformers 4.
INTERNALS = re.compile(
    r"^_?(greedy_search|sample|beam_search|beam_sample|group_beam_search|constrained_beam_search|contrastive_search"
    r"|assisted_decoding|dola_decoding|get_logits_warper|get_logits_processor|get_stopping_criteria|extend_attention_mask"
    r"|extract_past_from_model_output|update_model_kwargs_for_generation|validate_model_(class|kwargs)"
    r"|prepare_(model_inputs|attention_mask_for_generation|encoder_decoder_kwargs_for_generation|generated_length)"
    r"|get_initial_cache_position|reorder_cache|get_cache|has_unfinished_sequences|temporary_reorder_cache"
    r"|prepare_decoder_attention_mask|prepare_cache_for_generation|prepare_generation_config)$"
)
OVERRIDE = "this method is put in the place of one that Transformers {release} does not have, so it is never called"
INPUTS = (
    "`generate` hands this method other arguments in each release, and keeps positions and the cache itself; "
    "leave the stock one in place"
)
SIGNATURE = (
    "`Trainer` hands `compute_loss` the argument `num_items_in_batch` since Transformers 4.46, and this override does "
    "not take it; add `num_items_in_batch=None`"
)
REASON = "what the call was for has to be seen"


class GenerateInternals(Rule):
    code = "DDA211"
    kind = "generate-internals"
    severity = Severity.ERROR
    message = (
        "`{name}` is gone from Transformers {release}; use `generate` with processors, criteria or `custom_generate`"
    )
    nodes = (ast.Attribute, ast.FunctionDef)
    markers = (
        "search",
        "sample",
        "_get_",
        "_extend_",
        "_extract_",
        "prepare_",
        "_validate_",
        "_reorder",
        "compute_loss",
    )
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def draw(model: PreTrainedModel, ids):
                return model.generate(ids, do_sample=True)
        """),
        Good("""
            from transformers import Trainer

            class Mine(Trainer):
                def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
                    return model(**inputs).loss
        """),
        Good("""
            import torch

            def draw(distribution: torch.distributions.Categorical):
                return distribution.sample()
        """),
        Bad("""
            from transformers import PreTrainedModel

            def draw(model: PreTrainedModel, ids):
                return model.greedy_search(ids)
        """),
        Bad("""
            from transformers import GenerationMixin

            def search(self, input_ids):
                return input_ids

            GenerationMixin.greedy_search = search
        """),
        Bad("""
            from transformers import Trainer

            class Mine(Trainer):
                def compute_loss(self, model, inputs, return_outputs=False):
                    return model(**inputs).loss
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute(value=base, attr="prepare_inputs_for_generation", ctx=ast.Store()):
                owner = file.holds(base, Kind.MODEL) or _stock_class(base, file)
                if owner is not None and not file.is_set_by_own_class(node):
                    yield self.report(file, node, owner, message=INPUTS, fix=REASON)
            case ast.Attribute(value=base, attr=name) if INTERNALS.match(name) and not has_member(MIXIN, name):
                owner = file.holds(base, Kind.MODEL) or _stock_class(base, file)
                if owner is None or file.is_set_by_own_class(node) or _defines(name, base, file):
                    return
                if isinstance(node.ctx, ast.Load):
                    if not file.facts.flow.is_set_anywhere(name):
                        yield self.report(
                            file, node, owner, fix=REASON, since=gone_since(f"{MIXIN}.{name}"),
                            claim=Claim(Ask.PATH, name), name=name, release=RELEASE,
                        )  # fmt: skip
                else:
                    yield self.report(
                        file, node, owner, severity=Severity.SILENT, message=OVERRIDE, fix=REASON,
                        since=gone_since(f"{MIXIN}.{name}"), release=RELEASE,
                    )  # fmt: skip
            case ast.FunctionDef(name="compute_loss", args=args):
                owner_class = file.scope(node).owner
                takes = args.kwarg is not None or "num_items_in_batch" in {
                    arg.arg for arg in (*args.args, *args.kwonlyargs)
                }
                if owner_class is None or takes or len(args.args) > 4:
                    return
                for above in file.facts.flow.bases(owner_class):
                    if isinstance(above, str) and re.match(r"^(transformers|trl)\..*Trainer$", above):
                        fact = f"{file.source.path}:{node.lineno}: `{owner_class.node.name}` subclasses `{above}`"
                        because = Value(Kind.TRAINER, above, evidence=(fact,))
                        last = node.args.args[-1]
                        yield self.report(file, last, because, message=SIGNATURE, fix=REASON, since="4.46")
                        return


def _stock_class(base: ast.expr, file: FileFacts) -> Value | None:
    for name in sorted(file.qualified_names(base)):
        if re.match(r"^transformers\..*(GenerationMixin|ForCausalLM|ForConditionalGeneration|PreTrainedModel)$", name):
            return Value(Kind.LIBRARY, name, evidence=(f"{file.source.path}:{base.lineno}: `{name}`",))
    return None


def _defines(name: str, base: ast.expr, file: FileFacts) -> bool:
    """Whether a class of the repository that `base` may be has the method itself."""
    for value in file.values(base):
        owner = file.definition(value)
        if isinstance(owner, Class) and file.facts.flow.method(owner, name) is not None:
            return True
    return False
