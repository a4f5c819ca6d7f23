"""Inside `generate` and `Trainer`: methods that Transformers has removed, renamed or calls with more arguments.

`model.greedy_search`, `model.sample`, `_get_logits_warper` and their like are gone, so a call raises, and a method
put in their place is never called. `Trainer` hands `compute_loss` and `training_step` the argument
`num_items_in_batch`, and `log` a start time (4.46 and later), which overrides of the old signatures do not take:
TypeError in the first step. `prepare_inputs_for_generation` called by hand hands back the whole text since 5.x, where
it cut it to what the cache lacks: a loop of one's own goes on, with a cache that is too long (measured on 5.24: 76
entries for 13 tokens). Call `generate` with a logits processor, a stopping criterion or `custom_generate`, and
take `**kwargs` in overrides. Members are looked up in a list of what 5.24.0 has.

On: Transformers 5 on every model; `Trainer` since 4.46.
Seen: the loops of hao-ai-lab/LookaheadDecoding and the trainers of FasterDecoding/Medusa, read against 5.24.
Fix: none.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.names import RELEASE, gone_since, has_member
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
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
    r"|get_initial_cache_position|update_causal_mask|cache_dependant_input_preparation|reorder_cache|get_cache|has_unfinished_sequences|temporary_reorder_cache"
    r"|prepare_decoder_attention_mask|prepare_cache_for_generation|prepare_generation_config)$"
)
OVERRIDE = "this method is put in the place of one that Transformers {release} does not have, so it is never called"
INPUTS = (
    "`generate` hands this method other arguments in each release, and keeps positions and the cache itself; "
    "leave the stock one in place"
)
UNCUT = (
    "called by hand it no longer cuts the inputs to what is new: the whole text goes in again on top of the cache, "
    "without an error; give it `next_sequence_length=`, or call `generate`"
)
SIGNATURE = (
    "`Trainer` hands `{name}` the argument `{added}` now, and this override does not take it; add `{added}=None`"
)
# Methods of `Trainer` that are handed one argument more, how many they are handed with `self`, and since when.
ADDED = {
    "compute_loss": ("num_items_in_batch", 4, "4.46"),
    "training_step": ("num_items_in_batch", 3, "4.46"),
    "log": ("start_time", 2, "4.47"),
}
OVERRIDDEN = frozenset({"prepare_inputs_for_generation"})
REASON = "what the call was for has to be seen"


class GenerateInternals(Rule):
    code = "DDA211"
    kind = "generate-internals"
    severity = Severity.ERROR
    message = (
        "`{name}` is gone from Transformers {release}; use `generate` with processors, criteria or `custom_generate`"
    )
    nodes = (
        Named(ast.Attribute, INTERNALS), Named(ast.Attribute, OVERRIDDEN), ast.FunctionDef, Named(ast.Call, OVERRIDDEN)
    )  # fmt: skip
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
        "training_step",
        "def log",
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
            def search(self, ids, **model_kwargs):
                inputs = self.prepare_inputs_for_generation(ids, **model_kwargs)
                inputs["input_ids"] = ids[:, -1:]
                return self(**inputs)
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
            def search(self, ids, criteria, **model_kwargs):
                while not criteria(ids):
                    inputs = self.prepare_inputs_for_generation(ids, **model_kwargs)
                    ids = self(**inputs).logits.argmax(-1)
                return ids
        """),
        Bad("""
            from transformers import GenerationMixin

            def search(self, input_ids):
                return input_ids

            GenerationMixin.greedy_search = search
        """),
        Bad(
            """
            from transformers import Trainer

            class Mine(Trainer):
                def compute_loss(self, model, inputs, return_outputs=False):
                    return model(**inputs).loss

                def training_step(self, model, inputs):
                    return super().training_step(model, inputs)

                def log(self, logs):
                    return super().log(logs)
            """,
            findings=3,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute(value=base, attr="prepare_inputs_for_generation", ctx=ast.Store()):
                owner = file.holds(base, Kind.MODEL, Kind.BACKBONE) or _stock_class(base, file)
                if owner is not None and not file.is_set_by_own_class(node):
                    yield self.report(file, node, owner, message=INPUTS, fix=REASON)
            case ast.Attribute(value=base, attr=name) if INTERNALS.match(name) and not has_member(MIXIN, name):
                stock = _stock_class(base, file)
                owner = file.holds(base, Kind.MODEL, Kind.BACKBONE) or stock
                if owner is None and name.startswith("_"):
                    owner = _self_of_a_loop(name, base, file)
                if owner is None or file.is_set_by_own_class(node) or file.defines(base, name):
                    return
                if isinstance(node.ctx, ast.Load):
                    # What is set on an instance can be read there; a class is read before it is given another.
                    if stock is not None or not file.facts.flow.is_set_anywhere(name):
                        yield self.report(
                            file, node, owner, fix=REASON, since=gone_since(f"{MIXIN}.{name}"),
                            claim=Claim(Ask.PATH, name), name=name, release=RELEASE,
                        )  # fmt: skip
                else:
                    yield self.report(
                        file, node, owner, severity=Severity.SILENT, message=OVERRIDE, fix=REASON,
                        since=gone_since(f"{MIXIN}.{name}"), release=RELEASE,
                    )  # fmt: skip
            case ast.Call(func=ast.Attribute(value=base, attr="prepare_inputs_for_generation"), keywords=keywords):
                name = "prepare_inputs_for_generation"
                given = {keyword.arg for keyword in keywords}
                function = file.function(node)
                # Without a cache there is nothing to cut, and an override of the same name only passes on.
                if not given & {None, "past_key_values", "cache"} or "next_sequence_length" in given:
                    return
                owner = file.holds(base, Kind.MODEL) or _self_of_a_loop(name, base, file)
                passes_on = (function is not None and function.name == name) or _cuts_itself(node, file)
                if owner is not None and not passes_on and not file.defines(base, name):
                    yield self.report(
                        file, node, owner, severity=Severity.SILENT, message=UNCUT, fix=REASON, since="5.17"
                    )
            case ast.FunctionDef(name=method, args=args) if method in ADDED:
                owner_class = file.scope(node).owner
                added, position, since = ADDED[method]
                takes = args.kwarg is not None or added in {arg.arg for arg in (*args.args, *args.kwonlyargs)}
                if owner_class is None or takes or args.vararg is not None or len(args.args) > position:
                    return
                for above in file.facts.flow.bases(owner_class):
                    if isinstance(above, str) and re.match(r"^(transformers|trl)\..*Trainer$", above):
                        fact = f"{file.source.path}:{node.lineno}: `{owner_class.node.name}` subclasses `{above}`"
                        because = Value(Kind.TRAINER, above, evidence=(fact,))
                        yield self.report(
                            file, args.args[-1], because, message=SIGNATURE, fix=REASON, since=since,
                            name=method, added=added,
                        )  # fmt: skip
                        return


def _stock_class(base: ast.expr, file: FileFacts) -> Value | None:
    for name in sorted(file.qualified_names(base)):
        if re.match(r"^transformers\..*(GenerationMixin|ForCausalLM|ForConditionalGeneration|PreTrainedModel)$", name):
            return Value(Kind.LIBRARY, name, evidence=(f"{file.source.path}:{base.lineno}: `{name}`",))
    return None


def _cuts_itself(call: ast.Call, file: FileFacts) -> bool:
    """Whether the code puts inputs of its own into what comes back."""
    match file.statement(call):
        case ast.Assign(targets=[ast.Name(id=name)]):
            pass
        case _:
            return False
    for node in file.nodes:
        match node:
            case ast.Subscript(value=ast.Name(id=name_), slice=ast.Constant(value="input_ids"), ctx=ast.Store()):
                if name_ == name and file.function(node) is file.function(call):
                    return True
    return False


def _self_of_a_loop(name: str, base: ast.expr, file: FileFacts) -> Value | None:
    """`self` in a function of no class: a decoding loop that is put in the place of a model's own."""
    function = file.function(base)
    if function is None or function.owner is not None or not isinstance(base, ast.Name) or base.id != "self":
        return None
    fact = f"{file.source.path}:{base.lineno}: `{name}` is a model's, in a function that takes `self`"
    return Value(Kind.MODEL, fact, Confidence.LIKELY, (fact,))
