"""An argument that stock `generate` does not take.

`generate` checks what it is given against its own arguments, the generation config and the model's forward, and raises
ValueError for the rest: "The following `model_kwargs` are not used by the model". Forks of Transformers added such
arguments (`dola_decoding=`, `mature_layer=` of voidism/DoLa), and releases took some away (`return_legacy_cache=`,
`num_logits_to_keep=`, gone from 5.x). Code that was written beside such a fork needs a logits processor,
`custom_generate`, or a decoding loop of its own. Arguments are looked up in a list of everything that `generate` and
any forward of 5.24.0 take, which ships with the tool.

On: 5.24 on every model; `return_legacy_cache` and `num_logits_to_keep` work on 4.x.
Seen: voidism/DoLa beside stock Transformers; raises ValueError on 5.24 (measured).
Fix: none: what the argument was for has to be seen.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.names import RELEASE, is_generate_keyword
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class UnknownGenerateKeyword(Rule):
    code = "DDA215"
    kind = "generate-internals"
    severity = Severity.ERROR
    message = (
        "`generate` of Transformers {release} does not take `{name}=` and raises ValueError; "
        "use a logits processor or `custom_generate`"
    )
    nodes = (ast.Call,)
    markers = (".generate(",)
    EXAMPLES = (
        Good("""
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name")
            model.generate(ids, max_new_tokens=8, do_sample=False, logits_to_keep=1, pixel_values=None, use_cache=True)
        """),
        Good("""
            from transformers import PreTrainedModel

            class Mine(PreTrainedModel):
                def generate(self, ids, tree_width):
                    return ids

            def draw(model: Mine, ids):
                return model.generate(ids, tree_width=4)
        """),
        Good("""
            def draw(engine, ids):
                return engine.generate(ids, sampling_params=None)
        """),
        Bad("""
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name")
            model.generate(ids, max_new_tokens=8, dola_decoding=True, mature_layer=32)
        """),
        Bad("""
            from transformers import AutoModelForCausalLM

            def draw(name, ids, drafter):
                model = AutoModelForCausalLM.from_pretrained(name)
                return model.generate(ids, draft_model=drafter, max_new_tokens=8)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Call(func=ast.Attribute(value=base, attr="generate"), keywords=keywords):
                unknown = [item for item in keywords if item.arg is not None and not is_generate_keyword(item.arg)]
                model = file.holds(base, Kind.MODEL) if unknown else None
                if model is None or model.confidence is not Confidence.PROVEN or not file.is_stock(base):
                    return
                if not file.facts.flow.is_set_anywhere("generate"):
                    names = "=`, `".join(str(keyword.arg) for keyword in unknown)
                    reason = "what the arguments are for has to be seen"
                    yield self.report(file, unknown[0], model, fix=reason, name=names, release=RELEASE)
