"""A gated delta rule layer while a window is open: the whole tree in one solve, the stock mixer around it."""

from __future__ import annotations

import inspect
import re
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.activations import ACT2FN

from ddaudit.runtime.caches import gated_delta
from ddaudit.runtime.caches.recurrent import LONG_WINDOW, RecurrentWindow
from ddaudit.runtime.caches.window import node_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers.cache_utils import LinearAttentionLayer

    from ddaudit.runtime.caches.recurrent import MixerCall
    from ddaudit.runtime.caches.window import Window

_DELTA_RULE = re.compile(r"(chunk|recurrent)_gated_delta_rule$")
_CONVOLUTION = re.compile(r"causal_conv1d_(fn|update)$")


def tree_forward(mixer: nn.Module) -> Callable[..., Any] | None:
    """The forward of a gated delta rule mixer that takes a `GatedDeltaWindow` for its cache; None for other mixers.

    The kernels are globals of the modelling module (5.17 to 5.24), so the stock code runs over a copy of those
    globals with stand-ins: projections, gates and head layouts stay each family's own.
    """
    stock = inspect.unwrap(type(mixer).forward)
    names = stock.__code__.co_names
    delta_rules = [name for name in names if _DELTA_RULE.search(name)]
    convolutions = [name for name in names if _CONVOLUTION.search(name)]
    if not delta_rules or not convolutions:
        return None
    current: list[GatedDeltaWindow] = []
    stand_ins: dict[str, Any] = {name: lambda *a, **k: current[-1].delta_rule(*a, **k) for name in delta_rules}
    stand_ins |= {name: lambda *a, **k: current[-1].convolve(*a, **k) for name in convolutions}
    over_tree = types.FunctionType(
        stock.__code__, {**stock.__globals__, **stand_ins}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    over_tree.__kwdefaults__ = stock.__kwdefaults__

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        window = next(value for value in kwargs.values() if isinstance(value, GatedDeltaWindow))
        current.append(window)
        try:
            return over_tree(mixer, hidden_states, **kwargs)
        finally:
            current.pop()

    return forward


class GatedDeltaWindow(RecurrentWindow):
    """Verifies with the tree mathematics of `gated_delta`, and stands in for the cache of its mixer meanwhile.

    `layer.recurrent_states[0]` is `[B, H, K, V]` and `layer.conv_states[i]` `[B, C, kernel]`, before the window.
    """

    record_past = True
    """What makes the stock forward hand over every convolution input, also of a single token."""

    def __init__(self, layer: LinearAttentionLayer, forward: Callable[..., Any]) -> None:
        super().__init__(layer)
        self._forward = forward
        self._inputs: dict[int, torch.Tensor] = {}
        self._factors: gated_delta.WindowFactors | None = None
        self._convolving = 0

    def folds(self, call: MixerCall) -> bool:
        return self.window.length > LONG_WINDOW

    def verify(self, call: MixerCall) -> torch.Tensor:
        return replace(call, forward=self._forward).run(self)

    def commit(self, path: tuple[int, ...]) -> None:
        assert self._factors is not None
        layer = self.layer
        index = node_index(path, self._factors.keys.device)
        for number, inputs in self._inputs.items():
            size = layer.conv_states[number].shape[-1]
            fed = torch.cat([layer.conv_states[number], inputs[..., index]], dim=-1)
            layer.conv_states[number] = fed[..., -size:].clone()
            layer.has_previous_state[number] = True
        layer.recurrent_states[0] = gated_delta.commit(layer.recurrent_states[0], self._factors, index)
        layer.is_recurrent_states_initialized[0] = True

    def close(self, path: tuple[int, ...]) -> None:
        super().close(path)
        self._inputs, self._factors = {}, None

    def adopt(self, window: Window, inputs: dict[int, torch.Tensor], factors: gated_delta.WindowFactors) -> None:
        """Take over a window that was verified elsewhere: its convolution inputs `[B, C, T]` and its factors."""
        self.open(window)
        self._inputs, self._factors = inputs, factors

    # -- the cache of the mixer's stock forward: 5.24 asks the cache, 5.17 asks its layer -----------------------

    @property
    def layers(self) -> _Everywhere:
        return _Everywhere(self)

    @property
    def conv_states(self) -> Any:
        return self.layer.conv_states

    @property
    def recurrent_states(self) -> Any:
        return self.layer.recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.has_state

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layer.conv_states[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.layer.recurrent_states[state_idx]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the window's inputs `[B, C, T]` and hand them on unchanged; `convolve` adds what came before."""
        self._inputs[state_idx] = conv_states
        self._convolving = state_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, **kwargs: Any) -> Any:
        """Nothing to store: `delta_rule` has kept what `commit` needs."""
        return recurrent_states

    # -- its kernels --------------------------------------------------------------------------------------------

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Stand in for `causal_conv1d_fn`: `[B, C, T]` to `[B, C, T]`."""
        layer, number, kernel_size = self.layer, self._convolving, weight.shape[-1]
        if layer.conv_states[number] is None:
            layer.conv_states[number] = hidden_states.new_zeros(*hidden_states.shape[:-1], kernel_size)
            layer.is_conv_states_initialized[number] = True
            layer.conv_kernel_size[number] = kernel_size
            layer.dtype, layer.device = hidden_states.dtype, hidden_states.device
        taps = self.window.taps(kernel_size, hidden_states.device)
        return gated_delta.convolve(
            hidden_states, layer.conv_states[number], taps, weight, bias, self.function(activation)
        )

    @staticmethod
    def function(activation: str | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return None if activation is None else ACT2FN[activation]

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Stand in for the chunked and the recurrent delta rule: output `[B, T, H, V]`, no final state."""
        if not use_qk_l2norm_in_kernel:
            raise NotImplementedError("a gated delta rule without unit keys has no exact window method here")
        ancestors = self.window.ancestors(query.device)
        state = self.layer.recurrent_states[0]
        output, self._factors = gated_delta.verify(query, key, value, g, beta, state, ancestors)
        return output, None


class _Everywhere:
    """A list of layers in which one layer stands at every place."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getitem__(self, index: int) -> Any:
        return self._layer
