"""What a name can hold: the values that facts are about, each with its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ddaudit.auditor.finding import Confidence

RANK = {Confidence.GUESS: 0, Confidence.LIKELY: 1, Confidence.PROVEN: 2}


class Kind(Enum):
    """The kinds of value that rules ask about."""

    MODEL = "Transformers model with a head"
    BACKBONE = "Transformers model below its head"
    DECODER = "text decoder, as `get_decoder()` returns it"
    LAYERS = "list of decoder layers"
    LAYER = "decoder layer"
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
    TENSOR = "tensor"
    OWN = "instance of the repository's own class"
    OWN_CLASS = "class of the repository"
    FUNCTION = "function of the repository"
    METHOD = "bound method of the repository"
    MODULE = "module of the repository"
    LIBRARY = "name of another package"
    OTHER = "result of another package's call"


@dataclass(frozen=True)
class Value:
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
