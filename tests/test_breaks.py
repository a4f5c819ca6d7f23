"""Deliberate faults, one in each mechanism: the checks that the suite and `ddaudit matrix` use must report them.

The same check on the same model without the fault passes, so each pair shows that a check can fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import gemma3, mistral, qwen3, qwen3_5
from transformers.cache_utils import DynamicSlidingWindowLayer

from ddaudit.runtime.caches import attention, gated_delta, recurrent, takeover
from ddaudit.runtime.caches import cache as cache_module
from ddaudit.runtime.caches.cache import VerifiableCache
from ddaudit.runtime.caches.delta_window import GatedDeltaWindow
from ddaudit.runtime.caches.making import make_cache
from ddaudit.runtime.caches.recurrent import SteppedWindow
from ddaudit.runtime.caches.window import Window
from ddaudit.runtime.checks.decoding import decode_plain
from ddaudit.runtime.checks.invariance import check_state
from ddaudit.runtime.models import architecture
from ddaudit.runtime.models.architectures import build_tiny
from ddaudit.runtime.probing import matrix
from ddaudit.runtime.probing.matrix import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = (tuple(range(3, 14)), tuple(range(20, 40)))


# The checks: a difference, to be held against the tolerance of the matrix.


def tree(model: Any) -> float:
    """Every node of a tree against its root path alone, then a kept path continued."""
    return matrix._tree(model)["tree"]


def rollback(model: Any) -> float:
    """Rejected blocks against never having drafted."""
    return matrix._rollback(model)["rollback"]


def prefill(model: Any) -> float:
    """A long prompt cut back and continued."""
    return matrix._long_prefill(model)["long prefill"]


def patterns(model: Any) -> float:
    """The same text under two rejection patterns."""
    check = check_state(model, [decode_plain(model, prompt, 40) for prompt in PROMPTS], None)
    return check.logits_relative if check.verdict == "differ" else 0.0


def unnumbered_tree(model: Any) -> float:
    """A tree whose positions the cache has to fill in."""
    prompt, nodes = matrix._text(6, 23), matrix._text(3, 24)
    cache = make_cache(model)
    matrix._forward(model, cache, prompt)
    visible = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    visible[0, 0, :, 6:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    logits = matrix._forward(model, cache, nodes, attention_mask=visible)
    return matrix._difference(logits[:, 2], matrix._fresh(model, torch.cat([prompt, nodes[:, [0, 2]]], 1))[:, -1])


def layer_outputs(model: Any) -> float:
    """What `layer_output` gives for each layer against what the layer returned."""
    make_cache(model)
    seen: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda m, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for layer in architecture.decoder_layers(model)
    ]
    output = model(matrix._text(9, 25), output_hidden_states=True)
    for handle in handles:
        handle.remove()
    found = [architecture.layer_output(output, index) for index in range(len(seen))]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, seen, strict=True))


# The faults. Each takes pytest's monkeypatch.


def commit_one_node_more(patch: Any) -> None:
    for kind in (GatedDeltaWindow, SteppedWindow):
        patch.setattr(kind, "commit", _one_more(kind.commit))


def _one_more(commit: Callable[..., None]) -> Callable[..., None]:
    def faulty(self: Any, path: tuple[int, ...]) -> None:
        after = path[-1] + 1
        commit(self, (*path, after) if after < self.window.length else path)

    return faulty


def forget_to_commit(patch: Any) -> None:
    for kind in (GatedDeltaWindow, SteppedWindow):
        patch.setattr(kind, "commit", lambda self, path: None)


def state_of_another_parent(patch: Any) -> None:
    """A node goes on from the state of the node before its parent."""
    branch = recurrent._branch

    def faulty(layer: Any, rows: Any) -> Any:
        return branch(layer, None if rows is None else [max(row - 1, 0) for row in rows])

    patch.setattr(recurrent, "_branch", faulty)


def convolve_over_neighbours(patch: Any) -> None:
    taps = Window.taps
    patch.setattr(Window, "taps", lambda self, *args: taps(Window.chain(self.start, self.length), *args))


def convolve_one_committed_input_late(patch: Any) -> None:
    convolve = gated_delta.convolve
    patch.setattr(
        gated_delta, "convolve", lambda fed, state, taps, *rest: convolve(fed, state.roll(1, -1), taps, *rest)
    )


def keep_convolution_inputs_of_the_window(patch: Any) -> None:
    """The last inputs fed, accepted or not, instead of those along the path."""
    commit = GatedDeltaWindow.commit

    def faulty(self: Any, path: tuple[int, ...]) -> None:
        fed = dict(self._inputs)
        commit(self, path)
        for number, inputs in fed.items():
            size = self.layer.conv_states[number].shape[-1]
            self.layer.conv_states[number] = torch.cat([self.layer.conv_states[number], inputs], -1)[..., -size:]

    patch.setattr(GatedDeltaWindow, "commit", faulty)


def decay_along_the_window(patch: Any) -> None:
    """Each node decays by all nodes before it, siblings too."""
    verify = gated_delta.verify

    def faulty(query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any, ancestors: torch.Tensor) -> Any:
        # The g whose sums along the paths are the sums over all that came before.
        along = torch.linalg.solve_triangular(ancestors.to(g), g.cumsum(1), upper=False)
        return verify(query, key, value, along, beta, state, ancestors)

    patch.setattr(gated_delta, "verify", faulty)


def commit_without_decay(patch: Any) -> None:
    commit = gated_delta.commit

    def faulty(state: Any, factors: Any, path: Any) -> Any:
        return commit(state, replace(factors, log_decay=torch.zeros_like(factors.log_decay)), path)

    patch.setattr(gated_delta, "commit", faulty)


def all_earlier_nodes_are_ancestors(patch: Any) -> None:
    verify = gated_delta.verify
    patch.setattr(gated_delta, "verify", lambda *args: verify(*args[:-1], torch.ones_like(args[-1]).tril()))


def attention_without_the_tree_mask(patch: Any) -> None:
    start = VerifiableCache._start_window

    def faulty(self: Any, module: Any, kwargs: dict[str, Any]) -> None:
        start(self, module, kwargs)
        kwargs["attention_mask"] = self._tree_mask = None

    patch.setattr(VerifiableCache, "_start_window", faulty)


def positions_left_to_the_model(patch: Any) -> None:
    patch.setattr(VerifiableCache, "_may_number", lambda self, module: False)


def windowed_mask_by_index(patch: Any) -> None:
    """Nodes of a tree are as far from each other as they were fed, not as they are deep."""
    mask = VerifiableCache._mask_windowed_layers

    def faulty(self: Any, kwargs: dict[str, Any]) -> None:
        window = self.window
        self.window = Window.chain(window.start, window.length)
        mask(self, kwargs)
        self.window = window

    patch.setattr(VerifiableCache, "_mask_windowed_layers", faulty)


def oldest_entry_of_a_window_lost(patch: Any) -> None:
    """A sliding layer is cut one entry short."""
    keep = attention.keep_attention_window

    def faulty(layer: Any, length: int, path: tuple[int, ...]) -> None:
        keep(layer, length, path)
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys.shape[-2] > 1:
            # Its place stays, so that no shape gives the fault away.
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            layer.keys[..., 0, :], layer.values[..., 0, :] = 0, 0

    patch.setattr(cache_module, "keep_attention_window", faulty)


def sliding_window_not_rolled_back(patch: Any) -> None:
    """The last entries of the window are kept, whichever were accepted."""
    keep = attention.keep_attention_window

    def faulty(layer: Any, length: int, path: tuple[int, ...]) -> None:
        if isinstance(layer, DynamicSlidingWindowLayer):
            path = tuple(range(length - len(path), length))
        keep(layer, length, path)

    patch.setattr(cache_module, "keep_attention_window", faulty)


def gather_one_off(patch: Any) -> None:
    gather = attention._gather
    patch.setattr(
        attention,
        "_gather",
        lambda states, past, path: gather(states, past, tuple(max(node - 1, 0) for node in path)),
    )


def gather_keys_only(patch: Any) -> None:
    gather, calls = attention._gather, []

    def faulty(states: torch.Tensor, past: int, path: tuple[int, ...]) -> torch.Tensor:
        calls.append(path)
        return gather(states, past, path if len(calls) % 2 else tuple(range(len(path))))

    patch.setattr(attention, "_gather", faulty)


def mark_the_normed_state(patch: Any) -> None:
    """The last layer's mark is put on what came out of the final norm."""

    def faulty(model: Any) -> None:
        stack = architecture.decoder(model)
        stack.register_forward_hook(lambda m, args, output: setattr(output[0], architecture._RESIDUAL, output[0]))

    patch.setattr(takeover, "keep_layer_outputs", faulty)


def mark_the_layer_before(patch: Any) -> None:
    keep = architecture.keep_layer_outputs

    def faulty(model: Any) -> None:
        keep(model)
        for index, layer in enumerate(architecture.decoder_layers(model)):
            layer.register_forward_hook(
                lambda m, args, out, index=index: setattr(
                    out[0] if isinstance(out, tuple) else out, architecture._LAYER, index + 1
                )
            )

    patch.setattr(takeover, "keep_layer_outputs", faulty)


@dataclass(frozen=True)
class Break:
    mechanism: str
    fault: Callable[[Any], None]
    build: Callable[[], Any]
    checks: tuple[Callable[[Any], float], ...]
    """Each of which reports the fault."""


def mamba2() -> Any:
    return build_tiny("mamba2")


def lfm2() -> Any:
    return build_tiny("lfm2")


BREAKS = [
    Break("state commit", commit_one_node_more, qwen3_5, (tree, rollback, patterns)),
    Break("state commit", commit_one_node_more, mamba2, (tree, rollback, patterns)),
    Break("state commit", forget_to_commit, qwen3_5, (tree, rollback)),
    Break("state commit", state_of_another_parent, mamba2, (tree, patterns)),
    Break("convolution window", convolve_over_neighbours, qwen3_5, (tree, patterns)),
    Break("convolution window", convolve_one_committed_input_late, qwen3_5, (tree, rollback)),
    Break("convolution window", keep_convolution_inputs_of_the_window, qwen3_5, (tree, rollback, patterns)),
    Break("convolution window", commit_one_node_more, lfm2, (tree, rollback, patterns)),
    Break("decay", decay_along_the_window, qwen3_5, (tree, patterns)),
    Break("decay", commit_without_decay, qwen3_5, (tree, rollback)),
    Break("tree mask", all_earlier_nodes_are_ancestors, qwen3_5, (tree, patterns)),
    Break("tree mask", attention_without_the_tree_mask, qwen3, (tree, patterns)),
    Break("positions", positions_left_to_the_model, qwen3_5, (unnumbered_tree,)),
    Break("positions", windowed_mask_by_index, gemma3, (tree, patterns)),
    Break("window roll-back", oldest_entry_of_a_window_lost, gemma3, (tree, rollback, prefill)),
    Break("window roll-back", sliding_window_not_rolled_back, mistral, (tree, rollback, patterns)),
    Break("gather", gather_one_off, qwen3, (tree, patterns)),
    Break("gather", gather_keys_only, qwen3, (tree, patterns)),
    Break("residual marks", mark_the_normed_state, qwen3, (layer_outputs,)),
    Break("residual marks", mark_the_layer_before, qwen3_5, (layer_outputs,)),
]
CASES = [
    pytest.param(each, check, id=f"{each.mechanism}: {each.fault.__name__}, {each.build.__name__}, {check.__name__}")
    for each in BREAKS
    for check in each.checks
]


def measured(build: Callable[[], Any], check: Callable[[Any], float]) -> float:
    with torch.no_grad():
        return check(build())


@pytest.mark.parametrize(
    ("build", "check"), sorted({(each.build, check) for each in BREAKS for check in each.checks}, key=str)
)
def test_without_a_fault_the_check_passes(build, check):
    assert measured(build, check) <= TOLERANCE


@pytest.mark.parametrize(("case", "check"), CASES)
def test_the_fault_is_caught(case, check, monkeypatch):
    case.fault(monkeypatch)
    assert measured(case.build, check) > TOLERANCE


def test_every_mechanism_is_broken_once():
    assert {each.mechanism for each in BREAKS} == {
        "state commit", "convolution window", "decay", "tree mask", "positions", "window roll-back", "gather",
        "residual marks",
    }  # fmt: skip
