"""What a name can hold: the values that facts are about, each with its evidence."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ddaudit.auditor.finding import Confidence

if TYPE_CHECKING:
    import ast

    from ddaudit.auditor.facts.scopes import File

RANK = {Confidence.GUESS: 0, Confidence.LIKELY: 1, Confidence.PROVEN: 2}


class Kind(Enum):
    """The kinds of value that rules ask about."""

    MODEL = "Transformers model with a head"
    BACKBONE = "Transformers model below its head"
    DECODER = "text decoder, as `get_decoder()` returns it"
    LAYERS = "list of decoder layers"
    LAYER = "decoder layer"
    LAYER_OUTPUT = "output of a decoder layer"
    ATTENTION = "attention module of a Transformers model"
    EMBEDDING = "input embedding"
    EMBEDDING_WEIGHT = "input embedding matrix"
    HEAD = "output head"
    NORM = "final norm"
    CONFIG = "configuration of a Transformers model"
    TEXT_CONFIG = "text configuration of a Transformers model"
    OUTPUT = "output of a Transformers model"
    HIDDEN_STATES = "tuple of hidden states"
    ATTENTIONS = "tuple of attention maps"
    CACHE = "Transformers cache"
    CACHE_LAYERS = "list of a cache's layers"
    CACHE_LAYER = "layer of a cache"
    TREE_MASK = "attention mask with four dimensions"
    TOKENIZER = "tokenizer"
    TRAINER = "trainer"
    COMPILED = "compiled model"
    TENSOR = "tensor"
    OWN = "instance of the repository's own class"
    OWN_CLASS = "class of the repository"
    FUNCTION = "function of the repository"
    METHOD = "bound method of the repository"
    MODULE = "module of the repository"
    LIBRARY = "name of another package"
    OTHER = "result of another package's call"

    # A member is one object. By name, as `Enum` has it, hashing calls Python code, millions of times a scan.
    __hash__ = object.__hash__


class Value(NamedTuple):
    """One thing a name can hold. Two values with the same kind and origin are the same thing."""

    kind: Kind
    origin: str
    """Where it comes from: `path:line:column` of the place that makes it, or a qualified name."""
    confidence: Confidence = Confidence.PROVEN
    evidence: tuple[str, ...] = ()
    """`path:line: fact`, what the confidence rests on."""

    @property
    def key(self) -> tuple[Kind, str]:
        return self.kind, self.origin

    @property
    def rank(self) -> int:
        return RANK[self.confidence]


def replace(
    value: Value,
    kind: Kind | None = None,
    origin: str | None = None,
    confidence: Confidence | None = None,
    evidence: tuple[str, ...] | None = None,
) -> Value:
    """The value with these fields changed."""
    return Value(
        kind or value.kind,
        origin or value.origin,
        confidence or value.confidence,
        value.evidence if evidence is None else evidence,
    )


def made(kind: Kind, node: ast.AST, file: File, fact: str, by: Value | None = None) -> Value:
    """A value that `node` makes, as sure as what it is made by."""
    evidence = (fact_at(node, file, fact),)
    if by is None:
        return Value(kind, place(node, file), evidence=evidence)
    return Value(kind, place(node, file), by.confidence, by.evidence[:3] + evidence)


def place(node: ast.AST, file: File) -> str:
    return f"{file.source.path}:{getattr(node, 'lineno', 1)}:{getattr(node, 'col_offset', 0)}"


def fact_at(node: ast.AST, file: File, fact: str) -> str:
    return f"{file.source.path}:{getattr(node, 'lineno', 1)}: {fact}"
