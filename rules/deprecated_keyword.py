"""Arguments and fields that Transformers has renamed or no longer reads.

`past_key_values=` is called `cache=` from 5.24, in calls and on outputs; the old name works until 5.40.
`torch_dtype=` is `dtype=` since 4.56. What still works is renamed only where the code is for no release without the new
name, as `--transformers` or the repository's own metadata say. `cache_position=` is accepted and ignored from 5.0: the
cache itself decides where tokens go. `Trainer(tokenizer=…)` is `processing_class=` since 4.46, and the old name raises
from 5.0. Keywords of the repository's own modules are its own.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.scopes import Class
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Confidence, Edit, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

LOADERS = (".from_pretrained", ".from_config", ".pipeline")
STORED = "it is assigned to"
RENAMED = "the same under its new name"


class DeprecatedKeyword(Rule):
    code = "DDA403"
    kind = "deprecated-kwarg"
    severity = Severity.WARN
    message = "`{old}` is renamed to `{new}`{until}"
    nodes = (ast.Call, ast.Attribute, ast.Subscript, ast.Dict)
    markers = ("past_key_value", "torch_dtype", "cache_position", "tokenizer=", ".tokenizer")
    EXAMPLES = (
        Good("""
            from torch import nn

            class Drafter(nn.Module):
                def forward(self, ids, past_key_values=None):
                    return ids

            def draft(drafter: Drafter, ids, cache):
                return drafter(ids, past_key_values=cache)
        """),
        Good("""
            import torch
            from diffusers import DiffusionPipeline

            pipe = DiffusionPipeline.from_pretrained("name", torch_dtype=torch.float16)
        """),
        Bad(
            """
            from transformers import PreTrainedModel

            def step(model: PreTrainedModel, ids, past):
                return model(ids, past_key_values=past)
            """,
            """
            from transformers import PreTrainedModel

            def step(model: PreTrainedModel, ids, past):
                return model(ids, cache=past)
            """,
        ),
        Bad(
            """
            import torch
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name", torch_dtype=torch.bfloat16)
            """,
            """
            import torch
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained("name", dtype=torch.bfloat16)
            """,
        ),
        Bad(
            """
            from transformers import PreTrainedModel

            def next_cache(model: PreTrainedModel, ids):
                out = model(ids, use_cache=True)
                return out.past_key_values
            """,
            """
            from transformers import PreTrainedModel

            def next_cache(model: PreTrainedModel, ids):
                out = model(ids, use_cache=True)
                return out.cache
            """,
        ),
        Bad(
            """
            from transformers import PreTrainedModel

            def record(model: PreTrainedModel, ids):
                fields = dict(model(ids, use_cache=True))
                return fields["past_key_values"]
            """,
            """
            from transformers import PreTrainedModel

            def record(model: PreTrainedModel, ids):
                fields = dict(model(ids, use_cache=True))
                return fields["cache"]
            """,
        ),
        Bad(
            """
            from transformers import Trainer

            def train(model, tokenizer, data):
                return Trainer(model=model, tokenizer=tokenizer, train_dataset=data).train()
            """,
            """
            from transformers import Trainer

            def train(model, tokenizer, data):
                return Trainer(model=model, processing_class=tokenizer, train_dataset=data).train()
            """,
        ),
        Bad("""
            from transformers import PreTrainedModel

            def step(model: PreTrainedModel, ids, past, places):
                return model(ids, cache=past, cache_position=places)
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute():
                yield from self._field(node, file)
            case ast.Subscript(value=record, slice=ast.Constant(value="past_key_values") as key):
                if (output := _output_as_dict(record, file)) is not None:
                    edit = file.edit(key, file.text(key).replace("past_key_values", "cache"))
                    fix = Fix((edit,), Applicability.SAFE, RENAMED, since="5.24") if file.is_read(node) else STORED
                    yield self.report(
                        file, node, output, severity=Severity.ERROR, since="5.24", fix=fix,
                        old='["past_key_values"]', new='["cache"]', until=": a dict of the output lacks the old name",
                    )  # fmt: skip
            case ast.Subscript(value=ast.Name() as options, slice=ast.Constant(value="torch_dtype") as key):
                if isinstance(node.ctx, ast.Store):
                    yield from self._option(options, key, file)
            case ast.Dict(keys=keys):
                for name in keys:
                    above = file.parent(node)
                    if isinstance(name, ast.Constant) and name.value == "torch_dtype":
                        match above:
                            case (
                                ast.Assign(targets=[ast.Name() as options])
                                | ast.AnnAssign(target=ast.Name() as options)
                            ):
                                yield from self._option(options, name, file)
            case ast.Call():
                yield from self._keywords(node, file)

    def _field(self, node: ast.Attribute, file: FileFacts) -> Iterator[Finding]:
        base, name = node.value, node.attr
        if name == "past_key_values" and (output := file.holds(base, Kind.OUTPUT)) is not None:
            until = " (gone in Transformers 5.40)"
            fix = _rename(_end(node, file) - len(name), name, "cache", "5.24") if file.is_read(node) else STORED
            yield self.report(
                file, node, output, fix=fix, since="5.24", claim=Claim(Ask.OUTPUT_FIELD, name),
                old=".past_key_values", new=".cache", until=until,
            )  # fmt: skip
        elif name == "torch_dtype" and (config := file.holds(base, Kind.CONFIG)) is not None:
            reason = "the model's own dtype may be meant"
            yield self.report(
                file, node, config, fix=reason, since="4.56", old="torch_dtype", new="dtype", until=" since 4.56"
            )
        elif name == "tokenizer" and (trainer := file.holds(base, Kind.TRAINER)) is not None and file.is_stock(base):
            yield self.report(
                file, node, trainer, severity=Severity.ERROR, old=".tokenizer", new=".processing_class", until="",
                fix=_rename(_end(node, file) - len(name), name, "processing_class", "4.46"), since="5.0",
            )  # fmt: skip

    def _option(self, options: ast.Name, key: ast.Constant, file: FileFacts) -> Iterator[Finding]:
        """A key of a dict that is unpacked into a loader of Transformers."""
        home = file.scope(options).find(options.id)
        for call in file.file.calls:
            for keyword in call.keywords:
                match keyword:
                    case ast.keyword(arg=None, value=ast.Name(id=name)) if name == options.id:
                        called = _loader(call, file) if file.scope(call).find(name) is home else None
                        if called is not None and called.origin.endswith(LOADERS):
                            text = file.text(key).replace("torch_dtype", "dtype")
                            reason = "the dict may go to others that know the old name only"
                            fix = Fix((file.edit(key, text),), Applicability.UNSAFE, reason, since="4.56")
                            yield self.report(
                                file, key, called, fix=fix, since="4.56", old='"torch_dtype"', new='"dtype"',
                                until=" since 4.56",
                            )  # fmt: skip
                            return

    def _keywords(self, node: ast.Call, file: FileFacts) -> Iterator[Finding]:
        for keyword in node.keywords:
            match keyword.arg:
                case "past_key_values" | "cache_position":
                    called = file.holds(node.func, Kind.MODEL, Kind.BACKBONE, Kind.DECODER)
                    if called is not None and file.is_stock(node.func):
                        yield self._forward(keyword, called, file)
                case "past_key_value":
                    if (called := file.holds(node.func, Kind.LAYER)) is not None:
                        message = "`past_key_value` is swallowed by `**kwargs`, so the layer has no cache"
                        yield self.report(
                            file, keyword, called, severity=Severity.SILENT, message=message, since="5.0",
                            fix="a layer run by hand needs more than this name",
                        )  # fmt: skip
                case "torch_dtype" | "tokenizer":
                    yield from self._loader(node, keyword, file)

    def _forward(self, keyword: ast.keyword, called: Value, file: FileFacts) -> Finding:
        if keyword.arg == "cache_position":
            message = "`cache_position` is ignored: the cache decides where tokens go; leave it out"
            reason = "what it was meant to do has to be seen"
            claim = Claim(Ask.KEYWORD, keyword.arg)
            return self.report(
                file, keyword, called, severity=Severity.SILENT, message=message, fix=reason, claim=claim, since="5.0"
            )
        until = " (from 5.24; the old name goes in 5.40)"
        claim = Claim(Ask.KEYWORD, "past_key_values")
        return self.report(
            file, keyword, called, claim=claim, since="5.24", old="past_key_values=", new="cache=", until=until,
            fix=_rename(file.offsets(keyword)[0], "past_key_values", "cache", "5.24"),
        )  # fmt: skip

    def _loader(self, call: ast.Call, keyword: ast.keyword, file: FileFacts) -> Iterator[Finding]:
        called = _loader(call, file)
        if called is None:
            return
        if keyword.arg == "tokenizer":
            if called.origin.endswith("Trainer"):
                fix = _rename(file.offsets(keyword)[0], "tokenizer", "processing_class", "4.46")
                message = "`tokenizer=` is renamed to `processing_class=`, and the old name raises"
                yield self.report(file, keyword, called, severity=Severity.ERROR, fix=fix, since="5.0", message=message)
        elif called.origin.endswith(LOADERS):
            fix = _rename(file.offsets(keyword)[0], "torch_dtype", "dtype", "4.56")
            yield self.report(
                file, keyword, called, fix=fix, since="4.56", old="torch_dtype=", new="dtype=", until=" since 4.56"
            )


def _loader(call: ast.Call, file: FileFacts) -> Value | None:
    """What is called, if it is Transformers' own or a class of the repository that passes the argument on to it."""
    for value in file.values(call.func):
        if value.kind is Kind.LIBRARY and value.origin.startswith("transformers."):
            return value
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    for value in file.values(owner):
        target = file.definition(value)
        if value.kind is Kind.OWN_CLASS and isinstance(target, Class):
            if isinstance(call.func, ast.Attribute) and (passed := _passes_on(target, call.func.attr, file)):
                return passed
            for base in file.facts.flow.bases(target):
                if isinstance(base, str) and base.startswith("transformers."):
                    made = call.func.attr if isinstance(call.func, ast.Attribute) else ""
                    fact = f"{file.source.path}:{call.lineno}: `{target.node.name}` subclasses `{base}`"
                    return Value(Kind.LIBRARY, f"{base}.{made}".rstrip("."), Confidence.LIKELY, (fact,))
    return None


def _rename(start: int, old: str, new: str, since: str) -> Fix:
    """The name at this offset becomes the one that exists since that release."""
    return Fix((Edit(start, start + len(old), new),), Applicability.SAFE, RENAMED, since=since)


def _end(node: ast.AST, file: FileFacts) -> int:
    return file.offsets(node)[1]


def _output_as_dict(record: ast.expr, file: FileFacts) -> Value | None:
    """The output of a model that a name is a plain dict of."""
    match file.made_from(record):
        case ast.Call(func=ast.Name(id="dict"), args=[output]):
            return file.holds(output, Kind.OUTPUT)
    return None


def _passes_on(owner: Class, name: str, file: FileFacts) -> Value | None:
    """The loader of Transformers to which a class method hands its `**kwargs`."""
    method = file.facts.flow.method(owner, name)
    args = method.node.args if method is not None else None
    for call in ast.walk(method.node) if method is not None and args is not None and args.kwarg is not None else ():
        match call:
            case ast.Call(func=ast.Attribute(attr="from_pretrained" | "from_config"), keywords=keywords):
                if any(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == "kwargs" for k in keywords):
                    fact = f"{file.source.path}: `{owner.node.name}.{name}` hands its keywords on to `{name}`"
                    return Value(Kind.LIBRARY, f"{owner.node.name}.{name}", Confidence.LIKELY, (fact,))
    return None
