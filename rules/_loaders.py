"""Calls of Transformers that load a model, directly or through a class of the repository, and what is given to them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.scopes import Class
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence

if TYPE_CHECKING:
    from ddaudit.auditor.facts.repository import FileFacts

LOADERS = (".from_pretrained", ".from_config", ".pipeline")


def loader(call: ast.Call, file: FileFacts) -> Value | None:
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


def unpacked_into(options: ast.Name, file: FileFacts) -> Value | None:
    """The call of Transformers into which a dict is unpacked."""
    home = file.scope(options).find(options.id)
    for call in file.file.calls:
        for keyword in call.keywords:
            match keyword:
                case ast.keyword(arg=None, value=ast.Name(id=options.id)) if file.scope(call).find(options.id) is home:
                    if (called := loader(call, file)) is not None:
                        return called
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
