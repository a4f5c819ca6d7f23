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
TENSORS = frozenset({"weight", "bias", "inv_freq"})
TALK = frozenset({"print", "info", "warning", "debug", "error", "set_description", "write", "warn"})


def tests_path(test: ast.expr) -> bool:
    """Whether the test chooses between one such path and others."""
    for part in ast.walk(test):
        match part:
            case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value=str(name))]):
                if name in PARTS | INNER_NAMES:
                    return True
    return False


def written_path(node: ast.AST, file: FileFacts) -> str | None:
    """The path of a layer, or of something in one, that a formatted text is; None where it is only said."""
    text = _filled(node)
    if text is None or not LAYER_PATH.match(text) or set(text.split(".")) & TENSORS:
        return None
    if file.file.is_lookalike or file.is_under(node, tests_path):
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
