"""Arguments and fields that Transformers has renamed or no longer reads.

`past_key_values=` is called `cache=` from 5.24, in calls and on outputs; the old name works until 5.40,
and is an error where that release or a later one is named.
`torch_dtype=` is `dtype=` since 4.56. What still works is renamed only where the code is for no release without the new
name, as `--transformers` or the repository's own metadata say. `cache_position=` is accepted and ignored from 5.0: the
cache itself decides where tokens go. `Trainer(tokenizer=…)` is `processing_class=` since 4.46, and the old name raises
from 5.0. Keywords of the repository's own modules are its own.

On: `dtype` since 4.56, `cache` since 5.24; every model.
Seen: TransformerLensOrg/TransformerLens#1093, huggingface/transformers#44181, huggingface/transformers#41128.
Fix: safe where the code is for no release without the new name; unsafe for a key of a dict that may go elsewhere.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Edit, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._loaders import LOADERS, loader, unpacked_into

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

STORED = "it is assigned to"
RENAMED = "the same under its new name"
GONE = "5.40"
"""The release that no longer knows `past_key_values`, as the deprecation warning of 5.24 names it."""

KEYWORDS = frozenset({"past_key_values", "past_key_value", "cache_position", "torch_dtype", "tokenizer"})


class DeprecatedKeyword(Rule):
    code = "DDA403"
    kind = "deprecated-kwarg"
    severity = Severity.WARN
    message = "`{old}` is renamed to `{new}`{until}"
    nodes = (
        Named(ast.keyword, KEYWORDS),
        Named(ast.Attribute, frozenset({"past_key_values", "torch_dtype", "tokenizer"})),
        ast.Subscript, ast.Dict,
    )  # fmt: skip
    markers = ("past_key_value", "torch_dtype", "cache_position", "tokenizer=", ".tokenizer")
    EXAMPLES = (
        Good("""
            from transformers import PreTrainedModel

            def take(model: PreTrainedModel, ids):
                record = dict(model(ids))
                if "cache" in record:
                    record["past_key_values"] = record.pop("cache")
                return record["past_key_values"]
        """),
        Good("""
            from transformers import AutoModelForCausalLM

            def load(name, dtype):
                try:
                    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
                except TypeError:
                    return AutoModelForCausalLM.from_pretrained(name, torch_dtype=dtype)
        """),
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
            case ast.keyword():
                if isinstance(call := file.parent(node), ast.Call):
                    yield from self._keyword(node, call, file)

    def _field(self, node: ast.Attribute, file: FileFacts) -> Iterator[Finding]:
        base, name = node.value, node.attr
        if name == "past_key_values" and (output := file.holds(base, Kind.OUTPUT)) is not None:
            until = f" (gone in Transformers {GONE})"
            fix = _rename(_end(node, file) - len(name), name, "cache", "5.24") if file.is_read(node) else STORED
            yield self.report(
                file, node, output, fix=fix, since="5.24", claim=Claim(Ask.OUTPUT_FIELD, name),
                old=".past_key_values", new=".cache", until=until, gone_in=GONE,
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
        called = unpacked_into(options, file)
        if called is not None and not _is_second_try(key, file) and called.origin.endswith(LOADERS):
            text = file.text(key).replace("torch_dtype", "dtype")
            reason = "the dict may go to others that know the old name only"
            fix = Fix((file.edit(key, text),), Applicability.UNSAFE, reason, since="4.56")
            yield self.report(
                file, key, called, fix=fix, since="4.56", old='"torch_dtype"', new='"dtype"', until=" since 4.56"
            )

    def _keyword(self, keyword: ast.keyword, call: ast.Call, file: FileFacts) -> Iterator[Finding]:
        match keyword.arg:
            case "past_key_values" | "cache_position":
                called = file.holds(call.func, Kind.MODEL, Kind.BACKBONE, Kind.DECODER)
                if called is not None and file.is_stock(call.func):
                    yield self._forward(keyword, called, file)
            case "past_key_value":
                if (called := file.holds(call.func, Kind.LAYER)) is not None:
                    message = "`past_key_value` is swallowed by `**kwargs`, so the layer has no cache"
                    yield self.report(
                        file, keyword, called, severity=Severity.SILENT, message=message, since="5.0",
                        fix="a layer run by hand needs more than this name",
                    )  # fmt: skip
            case _:
                yield from self._loader(call, keyword, file)

    def _forward(self, keyword: ast.keyword, called: Value, file: FileFacts) -> Finding:
        if keyword.arg == "cache_position":
            message = "`cache_position` is ignored: the cache decides where tokens go; leave it out"
            reason = "what it was meant to do has to be seen"
            claim = Claim(Ask.KEYWORD, keyword.arg)
            return self.report(
                file, keyword, called, severity=Severity.SILENT, message=message, fix=reason, claim=claim, since="5.0"
            )
        until = f" (from 5.24; the old name goes in {GONE})"
        claim = Claim(Ask.KEYWORD, "past_key_values")
        return self.report(
            file, keyword, called, claim=claim, since="5.24", old="past_key_values=", new="cache=", until=until,
            fix=_rename(file.offsets(keyword)[0], "past_key_values", "cache", "5.24"), gone_in=GONE,
        )  # fmt: skip

    def _loader(self, call: ast.Call, keyword: ast.keyword, file: FileFacts) -> Iterator[Finding]:
        called = loader(call, file)
        if called is None or _is_second_try(call, file):
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


def _is_second_try(node: ast.AST, file: FileFacts) -> bool:
    """Where the new name was refused, as old releases do."""
    for above in file.ancestors(node):
        match above:
            case ast.ExceptHandler(type=ast.expr() as refused) if "TypeError" in file.text(refused):
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return False
    return False


def _rename(start: int, old: str, new: str, since: str) -> Fix:
    """The name at this offset becomes the one that exists since that release."""
    return Fix((Edit(start, start + len(old), new),), Applicability.SAFE, RENAMED, since=since)


def _end(node: ast.AST, file: FileFacts) -> int:
    return file.offsets(node)[1]


def _output_as_dict(record: ast.expr, file: FileFacts) -> Value | None:
    """The output of a model that a name is a plain dict of."""
    match file.made_from(record):
        case ast.Call(func=ast.Name(id="dict"), args=[output], keywords=[]) if not _is_written_to(record, file):
            return file.holds(output, Kind.OUTPUT)
    return None


def _is_written_to(record: ast.expr, file: FileFacts) -> bool:
    """Whether a dict of that name is given one of the two keys, or asked for it, so that either may be in it."""
    name = file.text(record)
    for node in file.file.of(ast.Subscript, ast.Compare, ast.Call):
        match node:
            case ast.Subscript(value=ast.Name(id=owner), slice=key, ctx=ast.Store() | ast.Del()) if owner == name:
                keys = [key]
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=owner)]) if owner == name:
                keys = [key]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="update")) if owner == name:
                return True
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr="pop" | "get" | "setdefault"), args=[key, *_]
            ) if owner == name:
                keys = [key]
            case _:
                continue
        if any(not isinstance(key, ast.Constant) or key.value in ("past_key_values", "cache") for key in keys):
            return True
    return False
