"""The path of a decoder layer written as a text.

`f"model.layers.{i}.mlp"` names a module of a text-only Llama or Qwen3. A composite model, such as
`Qwen3_5ForConditionalGeneration`, has it below `model.language_model`, GPT-NeoX below `gpt_neox`, and PEFT puts
`base_model.model` before it, so a tracer, `get_submodule` or `hf_device_map` does not find it: KeyError, LookupError,
or nothing traced at all (kmeng01/rome and its successors keep such templates for each family in a file). Go by the
modules: `get_decoder().layers[i]`, or the name that `named_modules()` gives for that object.

A template that is chosen by a test of the model's structure is fine, and so is a text that is only printed.

On: every release; composite classes, GPT-NeoX, PEFT.
Seen: the templates of kmeng01/rome and likenneth/honest_llama, read in the source.
Fix: none: what looks for the name has to take the module.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._paths import written_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class WrittenPath(Rule):
    code = "DDA214"
    kind = "model-path"
    severity = Severity.PORT
    message = (
        "`{path}` is a layer's path on some families and loaders only; go by the modules of "
        "`get_decoder().layers` and their own names"
    )
    nodes = (ast.JoinedStr, Named(ast.Call, frozenset({"format"})), ast.Subscript, ast.Compare)
    markers = ("layers", ".h.", "blocks", "hf_device_map")
    EXAMPLES = (
        Good("""
            def report(i, loss):
                print(f"model.layers.{i}: {loss}")
        """),
        Good("""
            def name(model, i):
                if hasattr(model, "transformer"):
                    return f"transformer.h.{i}"
                return next(name for name, module in model.named_modules() if module is model.get_decoder().layers[i])
        """),
        Good("""
            def projection(state, i):
                return state[f"model.layers.{i}.mlp.up_proj.weight"]
        """),
        Good("""
            PREFIX = "model.layers."

            def is_layer(name):
                return name.startswith(PREFIX)
        """),
        Bad("""
            def traced(trace, model, layers):
                return trace(model, [f"model.layers.{i}" for i in layers])
        """),
        Bad("""
            def module(model, i):
                return model.get_submodule("transformer.h.{}.mlp".format(i))
        """),
        Bad("""
            def device(model):
                return model.hf_device_map["model.embed_tokens"]
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.JoinedStr() | ast.Call(func=ast.Attribute(attr="format")):
                path = written_path(node, file)
            case (
                ast.Subscript(value=ast.Attribute(attr="hf_device_map"), slice=ast.Constant(value=str(path)))
                | ast.Compare(left=ast.Constant(value=str(path)), comparators=[ast.Attribute(attr="hf_device_map")])
            ) if path.startswith(("model.", "transformer.")):
                pass
            case _:
                return
        if path is not None:
            fact = f"{file.source.path}:{file.lineno(node)}: `{path}` is written like a layer's path"
            because = Value(Kind.LAYER, fact, Confidence.LIKELY, (fact,))
            yield self.report(file, node, because, fix="what looks for the name has to take the module", path=path)
