"""Target profiles: what a model really looks like, as facts in a JSON file that needs no torch to be read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "profiles"
DEFAULT_TARGET = "qwen3.6-27b"
LETTERS = {
    "full": "F", "sliding": "S", "linear": "L", "linear+full": "H", "linear+sliding": "H", "conv": "C", "none": "-",
}  # fmt: skip
"""One letter for each kind of layer, by what its cache holds."""


@dataclass(frozen=True)
class ClassFacts:
    """One model class, as one loader or more make it from the configuration. Paths are dotted, below the model."""

    name: str
    loaders: tuple[str, ...]
    input_embeddings: tuple[str, ...]
    """Modules that `get_input_embeddings` asks in turn, the one that holds the weight last; "" is the model itself."""
    output_embeddings: tuple[str, ...]
    """The same for the head; empty where there is none."""
    layers: str
    final_norm: str
    """Empty where there is none under a known name."""
    modules: tuple[str, ...]
    """Every module path with no number in it, so none inside a decoder layer."""
    layer_parts: dict[str, tuple[str, ...]]
    """The names in a decoder layer, by its kind."""
    config_class: str
    text_config: str
    """Where the decoder's fields stand: `config` on a flat configuration, else such as `config.text_config`."""
    config_fields: dict[str, tuple[str, ...]]
    """Where each field answers, such as `config.text_config.hidden_size`; aliases answer too."""
    forward_arguments: tuple[str, ...]
    cache_arguments: tuple[str, ...]
    """Names under which a cache was given and came back, old ones that a decorator takes among them."""
    takes_any_argument: bool
    """Whether the forward swallows keywords that it does not know."""
    layer_kinds: tuple[str, ...]
    """Of each layer of the stock cache after one token: `full`, `sliding`, `linear`, `linear+full`, `conv`, `none`."""
    recurrent_layers: tuple[int, ...]
    recurrent_bytes: int
    """Of all recurrent states of one sequence; it does not grow with its length."""
    conv_bytes: int
    kv_bytes_per_token: int
    cache_class: str
    cache_argument: str
    is_croppable: bool
    num_hidden_states: int
    is_last_hidden_state_normed: bool
    is_tied: bool
    logit_operations: tuple[str, ...]
    """What is done to numbers between the final norm and the logits, the head itself left out."""
    rope: dict[str, Any]
    has_mrope: bool
    dtype: str
    num_parameters: int
    weight_bytes: int
    refused: str = ""
    """Why no token could be run; what is measured by running is then empty."""

    @property
    def pattern(self) -> str:
        return draw(self.layer_kinds)


@dataclass(frozen=True)
class Profile:
    """A target: its configuration, and the facts that a probe of each class found."""

    name: str
    about: str
    classes: tuple[ClassFacts, ...]
    config: dict[str, Any] = field(default_factory=dict)
    transformers: str = ""
    drafter: str = ""

    def to_json(self) -> dict[str, Any]:
        """The file's form; `config` is what `ddaudit run` builds the architecture from."""
        data: dict[str, Any] = {"about": self.about, "kind": "target"}
        if self.drafter:
            data["drafter"] = self.drafter
        facts = {"transformers": self.transformers, "classes": [asdict(each) for each in self.classes]}
        return {**data, "config": self.config, "facts": facts}

    @classmethod
    def from_json(cls, name: str, data: dict[str, Any]) -> Profile:
        """Raises ValueError where these are no facts of a target."""
        try:
            facts = data["facts"]
            classes = tuple(_class_facts(each) for each in facts["classes"])
            drafter = data.get("drafter", "")
            return cls(name, data["about"], classes, data["config"], facts["transformers"], drafter)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} is no target profile: {error} is missing or of another type") from error


def _class_facts(data: dict[str, Any]) -> ClassFacts:
    def frozen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: frozen(item) for key, item in value.items()}
        return tuple(value) if isinstance(value, list) else value

    known = {each.name for each in fields(ClassFacts)}
    values = {name: value if name == "rope" else frozen(value) for name, value in data.items() if name in known}
    return ClassFacts(**values)


def draw(kinds: tuple[str, ...]) -> str:
    """The layers as letters, the shortest repeated stretch written once: `LLLF x16`, `F x12`, `LLF x3 LL`."""
    letters = "".join(LETTERS.get(kind, "?") for kind in kinds)
    for size in range(1, len(letters) // 2 + 1):
        unit, times = letters[:size], 1
        while letters[times * size :].startswith(unit):
            times += 1
        rest = letters[times * size :]
        if times > 1 and len(rest) < size:
            return f"{unit} x{times}" + (f" {rest}" if rest else "")
    runs = [(letter, len(list(group))) for letter, group in groupby(letters)]
    return " ".join(letter if count == 1 else f"{letter} x{count}" for letter, count in runs)


def profile_names() -> tuple[str, ...]:
    """The built-in targets, by name."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def load_profile(name: str) -> Profile:
    """A built-in profile, or one that `ddaudit probe --save` wrote to a file.

    Raises ValueError for an unknown name and a file without facts; OSError where a file cannot be read.
    """
    path = FOLDER / f"{name}.json" if name in profile_names() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        raise ValueError(f"no profile {name!r}: there are {', '.join(profile_names())}, or name a file of facts")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} is no target profile: {error}") from error
    return Profile.from_json(path.stem, data)


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(as_text(profile), encoding="utf-8")


def as_text(profile: Profile) -> str:
    """One fact a line: lists stay on theirs."""
    return _indented(profile.to_json(), "") + "\n"


def _indented(value: Any, indent: str) -> str:
    if isinstance(value, dict) and value:
        inner = indent + "  "
        items = (f"{inner}{json.dumps(key)}: {_indented(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        inner = indent + "  "
        return "[\n" + ",\n".join(inner + _indented(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value)
