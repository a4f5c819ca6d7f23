"""What a line asks of a model: the one thing that a rule, a profile and a trial on the class itself all speak about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Ask(str, Enum):
    """The kinds of thing that a line can ask."""

    PATH = "path"
    """A dotted path below the model is there."""
    HEAD = "head"
    """A dotted path is the head, and its output the logits."""
    CONFIG = "config"
    """A field is read at the top of the configuration."""
    CONFIG_OR_DEFAULT = "config-or-default"
    """A field at the top is read with a default, or set: without it nothing raises."""
    BARE_CACHE = "bare-cache"
    """A stock cache made without a configuration serves the model."""
    CROP_LENGTH = "crop-length"
    """`crop` takes a length to keep."""
    ROLLBACK = "rollback"
    """A stock cache gives a token back, with every trace of it."""
    TREE_MASK = "tree-mask"
    """A mask with four dimensions reaches every layer."""
    CACHE_NAME = "cache-name"
    """The cache has an attribute of this name."""
    CACHE_PAIRS = "cache-pairs"
    """The cache is a tuple of keys and values."""
    LAYER_KEYS = "layer-keys"
    """Every layer of the cache has keys and values."""
    LAYER_STATE = "layer-state"
    """An offset into `hidden_states` gives every layer's output."""
    LAYER_PART = "layer-part"
    """Every decoder layer has a module of this name."""
    LAYER_ATTENTION = "layer-attention"
    """`attentions` has an entry for each layer."""
    IMPORT = "import"
    """A name of Transformers is there."""
    KEYWORD = "keyword"
    """The forward reads an argument of this name."""
    OUTPUT_FIELD = "output-field"
    """The output has a field of this name."""
    WEIGHT = "weight"
    """The state has a tensor of this name, `*` for what is filled in."""
    LAYER_TUPLE = "layer-tuple"
    """Decoder layers return a tuple."""
    LAYER_ALONE = "layer-alone"
    """A decoder layer runs on a hidden state alone."""
    LAYER_NAMED = "layer-named"
    """Looked for by this name, a module is found in every decoder layer."""
    FIRST_STATE = "first-state"
    """The first of the `hidden_states` is the first layer's."""
    FIRST_LIST = "first-list"
    """The first `ModuleList` holds the decoder layers."""
    CLASS = "class"
    """The model is an instance of one of these classes, `|` between them."""
    MASK_ATTRIBUTE = "mask-attribute"
    """A module of the model has this attribute, so that setting it may do something."""
    MASK_TOKEN = "mask-token"
    """The target never says the drafter's mask token."""
    NON_CAUSAL = "non-causal"
    """Every layer of the drafter may see what comes after."""
    TEMPLATE_IDS = "template-ids"
    """A chat template gives token ids."""
    ATTENTION = "attention"
    """This implementation of attention can be had, whatever is installed."""
    SYNCHRONIZE = "synchronize"
    """`torch.cuda.synchronize()` runs, whatever the machine."""


class Outcome(str, Enum):
    """What comes of it on one class."""

    WORKS = "works"
    RAISES = "raises"
    SILENT = "silently wrong"
    DEPENDS = "right for some layers only"


@dataclass(frozen=True, order=True)
class Claim:
    """One thing asked of a model; `what` is the path, field or name."""

    ask: Ask
    what: str = ""


@dataclass(frozen=True)
class Answer:
    """What comes of a claim on one class, and why."""

    outcome: Outcome
    reason: str = ""

    @property
    def works(self) -> bool:
        return self.outcome is Outcome.WORKS
