"""A probe as text: one class after the other, a fact a line."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import TYPE_CHECKING

from ddaudit.auditor.profile import LETTERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.profile import ClassFacts, Profile

WIDTH = 110
_LABEL = 20


def as_text(profile: Profile) -> str:
    lines = [f"{profile.name}: {profile.about}", f"Transformers {profile.transformers}, on the meta device: no weights"]
    for facts in profile.classes:
        lines += ["", f"{facts.name}, by {', '.join(facts.loaders)}"]
        for label, value in _rows(facts):
            if value:
                lines += textwrap.wrap(
                    value, WIDTH, initial_indent=f"  {label:<{_LABEL}}", subsequent_indent=" " * (_LABEL + 2),
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
    return "\n".join(lines)


def _rows(facts: ClassFacts) -> Iterator[tuple[str, str]]:
    yield "input embeddings", _chain(facts.input_embeddings)
    yield "head", _chain(facts.output_embeddings) or "none"
    yield "tied", "the head's weight is the embedding's" if facts.is_tied else "no: the head has its own weight"
    yield "layers", facts.layers
    yield "final norm", facts.final_norm or "none under a known name"
    where = "flat" if facts.text_config == "config" else f"composite: {facts.text_config}"
    yield "config", f"{facts.config_class}, {where}"
    yield "config fields", ", ".join(_field(*places) for places in facts.config_fields.values())
    if facts.refused:
        yield "one token", f"refused: {facts.refused}"
    else:
        yield from _measured(facts)
    yield "rope", ", ".join(f"{name}={value}" for name, value in facts.rope.items()) or "none"
    yield "mRoPE", "positions of three axes" if facts.has_mrope else ""
    yield "forward takes", ", ".join(facts.forward_arguments) + (", **kwargs" if facts.takes_any_argument else "")
    yield "weights", f"{_bytes(facts.weight_bytes)} in {facts.dtype}, {_count(facts.num_parameters)} parameters"


def _measured(facts: ClassFacts) -> Iterator[tuple[str, str]]:
    kinds = [kind for kind in LETTERS if kind in facts.layer_kinds]
    legend = ", ".join(f"{LETTERS[kind]} {kind}: {facts.layer_kinds.count(kind)}" for kind in kinds)
    yield "layer pattern", f"{facts.pattern}    ({legend})"
    if facts.recurrent_layers:
        where = f"in {len(facts.recurrent_layers)} layers: {ranges(facts.recurrent_layers)}"
        yield "recurrent state", f"{_bytes(facts.recurrent_bytes)} a sequence, {where}"
    else:
        yield "recurrent state", "none"
    yield "convolution state", _bytes(facts.conv_bytes) if facts.conv_bytes else ""
    yield "K/V", f"{_bytes(facts.kv_bytes_per_token)} a token"
    crop = "can be cropped" if facts.is_croppable else "cannot be cropped"
    names = " or ".join(f"`{name}`" for name in facts.cache_arguments)
    taken = f"taken as {names}" if names else "taken under no known name"
    yield "cache", f"{facts.cache_class}, {taken}, {crop}" if facts.cache_class else "none"
    last = "the last after the final norm" if facts.is_last_hidden_state_normed else "the last before the final norm"
    yield "hidden states", f"{facts.num_hidden_states}, {last}" if facts.num_hidden_states else "not given"
    scaled = f"changed after the final norm by {', '.join(facts.logit_operations)}"
    yield "logits", scaled if facts.logit_operations else "the head's output, no scaling and no cap"


def _chain(path: tuple[str, ...]) -> str:
    asked = [name or "the model" for name in path[:-1]]
    return f"{path[-1]}" + (f", through {' > '.join(asked)}" if len(asked) > 1 else "") if path else ""


def _field(first: str, *others: str) -> str:
    return first + (" (and nested)" if others else "")


def ranges(numbers: tuple[int, ...]) -> str:
    """`0-2, 4-6, 9`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} {unit}" if number >= 100 or unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
