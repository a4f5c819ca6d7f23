"""The recurrent part of a layer while a window is open: its state stays as it was, the window can be taken back.

Two ways: `GatedDeltaWindow` (in `delta_window`) solves a whole tree at once; `SteppedWindow` runs the stock layer
one token at a time and so serves every kind of layer without knowing what its state means.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from ddaudit.runtime.caches.window import ROOT, Window, node_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

LONG_WINDOW = 128
"""Chains longer than this go into the state at once: they are prefills, and going back into one is replayed."""

_STATE = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


@dataclass(frozen=True)
class MixerCall:
    """One call of a recurrent mixer, which can be repeated over other tokens, rows and states."""

    mixer: nn.Module
    forward: Callable[..., Any]
    """The stock forward of `mixer`."""
    cache_argument: str
    hidden_states: torch.Tensor
    """`[B, T, D]`."""
    kwargs: dict[str, Any]
    """The other arguments; tensors `[B or 1, T, ...]`, also inside tuples, run along the window."""

    def run(self, cache: Any) -> torch.Tensor:
        """The mixer's output, `[B, T, D]`, with the state in `cache`, which is carried on."""
        output = self.forward(self.hidden_states, **self.kwargs, **{self.cache_argument: cache})
        if not isinstance(output, tuple):
            return output
        # Some mixers return the output and attention weights that they do not have.
        if any(isinstance(item, torch.Tensor) for item in output[1:]):
            raise NotImplementedError(
                f"{type(self.mixer).__name__} returns several tensors: no exact way to verify it here"
            )
        return output[0]

    def run_on(self, layer: LinearAttentionLayer) -> torch.Tensor:
        """As `run`, on one layer's state alone."""
        return self.run(_OneLayer(layer, self.mixer.layer_idx))

    def at(self, nodes: Sequence[int]) -> MixerCall:
        """One token a row: `nodes` of each row of the batch, rows of the batch outermost, `[B * len(nodes), 1, D]`."""
        index = node_index(tuple(nodes), self.hidden_states.device)
        batch, length = self.hidden_states.shape[:2]

        def rows(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(rows(item) for item in value)
            if not isinstance(value, torch.Tensor) or value.shape[:2] not in ((1, length), (batch, length)):
                return value
            return value.expand(batch, *value.shape[1:])[:, index].flatten(0, 1).unsqueeze(1)

        kwargs = {name: rows(value) for name, value in self.kwargs.items()}
        return replace(self, hidden_states=rows(self.hidden_states), kwargs=kwargs)

    def part(self, start: int, end: int) -> MixerCall:
        """The same call over the tokens `start` to `end`, `[B, end - start, D]`."""
        length = self.hidden_states.shape[1]

        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(cut(item) for item in value)
            along = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
            return value[:, start:end] if along else value

        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        return replace(self, hidden_states=cut(self.hidden_states), kwargs=kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixerCall:
        # A copied cache shares the window's inputs, which nothing writes, and must not copy the model.
        return self


class _OneLayer(Cache):
    """A stock cache with the state of one layer, found under that layer's number."""

    def __init__(self, layer: LinearAttentionLayer, layer_idx: int) -> None:
        super().__init__(layers=[layer] * (layer_idx + 1))


class RecurrentWindow(ABC):
    """A recurrent layer's open window. `layer` is the stock cache layer with the state before it."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self.layer = layer
        self.window = Window.chain(0, 0)
        self.is_folded = False
        """Whether the window went straight into the state, so that only a replay can take it back."""

    def open(self, window: Window) -> None:
        self.window, self.is_folded = window, False

    def run(self, call: MixerCall) -> torch.Tensor:
        """The mixer's output `[B, T, D]` at every node of the window, each as if its root path had been fed alone."""
        self.is_folded = self.window.is_chain and self.folds(call)
        if not self.is_folded:
            return self.verify(call)
        state = self.branch()
        output = self.fold(call, state)
        self.take(state)
        return output

    @property
    def has_state(self) -> bool:
        return any(self.layer.has_previous_state.values())

    @abstractmethod
    def folds(self, call: MixerCall) -> bool:
        """Whether a chain is fed for good rather than verified."""

    def fold(self, call: MixerCall, state: LinearAttentionLayer) -> torch.Tensor:
        """Feed a chain to `state` for good."""
        return call.run_on(state)

    @abstractmethod
    def verify(self, call: MixerCall) -> torch.Tensor:
        """The output at every node, keeping what `commit` needs and leaving the state alone."""

    @abstractmethod
    def commit(self, path: tuple[int, ...]) -> None:
        """Carry the state over the nodes of `path`, which is not empty, and no others."""

    def close(self, path: tuple[int, ...]) -> None:
        if not self.is_folded and len(path):
            self.commit(path)

    def branch(self, rows: Sequence[int] | None = None) -> LinearAttentionLayer:
        """A stock layer with a copy of the state, its rows chosen or repeated."""
        return _branch(self.layer, rows)

    def take(self, state: LinearAttentionLayer) -> None:
        for name in _STATE:
            setattr(self.layer, name, getattr(state, name))
        self.layer.device = state.device


def _branch(layer: LinearAttentionLayer, rows: Sequence[int] | None) -> LinearAttentionLayer:
    branch = LinearAttentionLayer(layer.number_of_states)
    for name in _STATE:
        setattr(branch, name, dict(getattr(layer, name)))
    for states in (branch.conv_states, branch.recurrent_states):
        for index, state in states.items():
            if state is not None:
                branch.device, branch.dtype = state.device, state.dtype
                chosen = slice(None) if rows is None else torch.tensor(rows, device=state.device)
                # Copied also where no row is chosen: stock layers write their states in place.
                states[index] = state[chosen].clone() if rows is None else state[chosen]
    return branch


class SteppedWindow(RecurrentWindow):
    """Any recurrent layer: the stock forward over the levels of the tree, the nodes of a level as rows of a batch.

    The slow, general way: as many calls as the tree is deep. A layer's own forward of several tokens is used only
    to start a text, where nothing can be carried wrongly, and for long continuations by mixers seen to get them
    right (Jamba's does not in Transformers 5.24).
    """

    def __init__(self, layer: LinearAttentionLayer) -> None:
        super().__init__(layer)
        self._call: MixerCall | None = None

    def folds(self, call: MixerCall) -> bool:
        return self.window.length > (LONG_WINDOW if self.has_state else 1)

    def fold(self, call: MixerCall, state: LinearAttentionLayer) -> torch.Tensor:
        if not self.has_state or _continues_exactly(call, self.layer):
            return call.run_on(state)
        return torch.cat([call.at([node]).run_on(state) for node in range(self.window.length)], dim=1)

    def verify(self, call: MixerCall) -> torch.Tensor:
        self._call = call
        batch = call.hidden_states.shape[0]
        parents = self.window.parents or ()
        state, before, order, outputs = self.branch(), [ROOT], [], []
        for level in self.window.levels:
            columns = [before.index(parents[node]) for node in level]
            rows = [row * len(before) + column for row in range(batch) for column in columns]
            state = _branch(state, rows)
            output = call.at(level).run_on(state)
            outputs.append(output.unflatten(0, (batch, len(level))).squeeze(2))
            order += level
            before = level
        back = torch.tensor(order, device=call.hidden_states.device).argsort()
        return torch.cat(outputs, dim=1)[:, back]

    def commit(self, path: tuple[int, ...]) -> None:
        assert self._call is not None
        state = self.branch()
        for node in path:
            self._call.at([node]).run_on(state)
        self.take(state)

    def close(self, path: tuple[int, ...]) -> None:
        super().close(path)
        self._call = None


_seen_to_continue: weakref.WeakKeyDictionary[type[nn.Module], bool] = weakref.WeakKeyDictionary()


def _continues_exactly(call: MixerCall, layer: LinearAttentionLayer, tokens: int = 6) -> bool:
    """Whether this kind of mixer carries its state through several tokens at once as through one at a time."""
    kind = type(call.mixer)
    if kind not in _seen_to_continue:
        together = call.part(0, tokens).run_on(_branch(layer, None)).double()
        state = _branch(layer, None)
        stepped = torch.cat([call.part(i, i + 1).run_on(state) for i in range(tokens)], dim=1).double()
        # Far above rounding and far below the 0.5 of a state that was dropped.
        tolerance = 1e-3 if call.hidden_states.dtype == torch.float32 else 5e-2
        _seen_to_continue[kind] = bool((together - stepped).norm() <= tolerance * stepped.norm())
    return _seen_to_continue[kind]
