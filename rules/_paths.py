"""Paths below a model: tests that choose between them, and paths that are written as texts."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.library import EMBEDDING_NAMES, INNER_NAMES, LAYERS_NAMES, NORM_NAMES

if TYPE_CHECKING:
    from ddaudit.auditor.facts.repository import FileFacts

PARTS = EMBEDDING_NAMES | LAYERS_NAMES | NORM_NAMES
# `model.layers.*.mlp`, with `*` for what is filled in.
LAYER_PATH = re.compile(
    r"^(base_model\.model\.)?((model|transformer|gpt_neox|language_model|decoder)\.)+(layers|h|blocks)"
    r"[.\[]\*\]?(\.[\w*]+|\[\*\])*$"
)
# Where families keep what is below the head.
FIRST = frozenset({"model", "transformer", "gpt_neox"})
TENSORS = frozenset({"weight", "bias", "inv_freq"})
TALK = frozenset({"print", "info", "warning", "debug", "error", "set_description", "write", "warn"})


def tests_path(test: ast.expr, is_true: bool = True) -> bool:
    """Whether the test, where it came out so, has chosen a path.

    Nearly every model has `model`, a composite one as well: asking for it says nothing of what is below.
    """
    for part in ast.walk(test):
        match part:
            case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value=str(name))]):
                if name in (PARTS | INNER_NAMES) - FIRST or (is_true and name in FIRST - {"model"}):
                    return True
    return False


def _tests_model(test: ast.expr, is_true: bool) -> bool:
    """Whether the test has chosen a path that ends in `model`."""
    calls = (part for part in ast.walk(test) if isinstance(part, ast.Call))
    return tests_path(test, is_true) or (is_true and any(_asks_model(call) for call in calls))


def _asks_model(call: ast.Call) -> bool:
    match call:
        case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value="model")]):
            return True
    return False


def is_chosen(node: ast.AST, file: FileFacts) -> bool:
    """Whether a test around the node has chosen its path."""
    is_model = isinstance(node, ast.Attribute) and node.attr == "model"
    return file.is_under(node, _tests_model if is_model else tests_path)


def asks_encoder(test: ast.expr, holds: bool) -> bool:
    """Whether a test that came out so says that the model has an encoder of its own, which no target has."""
    match test:
        case ast.Attribute(attr="is_encoder_decoder"):
            return holds
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value="is_encoder_decoder"), *_]):
            return holds
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return asks_encoder(operand, not holds)
        case ast.BoolOp(op=ast.And(), values=values):
            return holds and any(asks_encoder(value, True) for value in values)
    return False


def written_path(node: ast.AST, file: FileFacts) -> str | None:
    """The path of a layer, or of something in one, that a formatted text is; None where it is only said."""
    text = _filled(node)
    if text is None or not LAYER_PATH.match(text) or set(text.split(".")) & TENSORS:
        return None
    if file.file.is_lookalike or is_chosen(node, file):
        return None
    for above in file.ancestors(node):
        match above:
            case ast.Raise() | ast.JoinedStr():
                return None
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in TALK:
                return None
            case ast.stmt():
                break
    return text


def _filled(node: ast.AST) -> str | None:
    """A text that something is filled into, with `*` for it."""
    match node:
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return re.sub(r"\{\w*\}", "*", text)
    return None
