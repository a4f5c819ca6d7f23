"""Cache layers that can take tokens back: one class or function per kind of layer state."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ddaudit.runtime import gated_delta
from ddaudit.runtime.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_WINDOW = 128
"""Chains longer than this are folded into the state at once by the stock kernel: they are prefills, their factors
would take much memory, and going back into one is replayed."""


class GatedDeltaLayer(LinearAttentionLayer):
    """State of a gated delta rule layer, and what its open window would add to it.

    `recurrent_states[0]` is `[B, H, K, V]` and `conv_states[i]` `[B, C, kernel]`, both as they were before the
    window until `close`. The mixer's forward, run by `takeover`, reaches `convolve` and `delta_rule`.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        # Makes the stock forward hand every input to `update_conv_state`, for one token too.
        self.record_past = True
        self.window = Window.chain(0, 0)
        self.window_inputs: dict[int, torch.Tensor] = {}
        self.factors: gated_delta.WindowFactors | None = None
        self._convolving = 0

    def open(self, window: Window) -> None:
        self.window = window

    @property
    def folds_window(self) -> bool:
        """Whether the open window goes straight into the state, so that it cannot be taken back."""
        return self.window.is_chain and self.window.length > LONG_WINDOW

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keep the window's inputs `[B, C, T]` and hand them on unchanged; `convolve` adds what came before."""
        self.window_inputs[state_idx] = conv_states
        self._convolving = state_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Nothing to store: `delta_rule` has kept what `close` needs."""
        self.has_previous_state[state_idx] = True
        return recurrent_states

    def convolve(
        self,
        kernel: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Stand in for `causal_conv1d_fn`: `[B, C, T]` to `[B, C, T]`."""
        index, kernel_size = self._convolving, weight.shape[-1]
        if self.conv_states[index] is None:
            self.conv_states[index] = hidden_states.new_zeros(*hidden_states.shape[:-1], kernel_size)
            self.is_conv_states_initialized[index] = True
            self.conv_kernel_size[index] = kernel_size
            self.dtype, self.device = hidden_states.dtype, hidden_states.device
        state = self.conv_states[index]
        if self.folds_window:
            full = torch.cat([state, hidden_states], dim=-1)
            self.conv_states[index] = full[..., -kernel_size:].clone()
            output = _on_device(kernel, full)(full, weight, bias, activation=activation, **kwargs)
            return output[..., -hidden_states.shape[-1] :]
        taps = self.window.taps(kernel_size, hidden_states.device)
        function = None if activation is None else ACT2FN[activation]
        return gated_delta.convolve(hidden_states, state, taps, weight, bias, function)

    def delta_rule(
        self,
        kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Stand in for the chunked and the recurrent delta rule: output `[B, T, H, V]`, no final state."""
        if not kwargs.get("use_qk_l2norm_in_kernel", False):
            raise NotImplementedError("a gated delta rule without unit keys has no exact window method here")
        state = self.recurrent_states[0]
        if self.folds_window:
            kwargs.update(initial_state=state, output_final_state=True)
            output, state = _on_device(kernel, query)(query, key, value, g=g, beta=beta, **kwargs)
            self.recurrent_states[0] = state.float()
        else:
            ancestors = self.window.ancestors(query.device)
            output, self.factors = gated_delta.verify(query, key, value, g, beta, state, ancestors)
        self.is_recurrent_states_initialized[0] = True
        return output, None

    def close(self, path: torch.Tensor) -> None:
        """Fold the nodes of `path`, `[P]` with P possibly 0, into the state and forget the others."""
        if not self.folds_window and len(path):
            for index, inputs in self.window_inputs.items():
                size = self.conv_states[index].shape[-1]
                full = torch.cat([self.conv_states[index], inputs[..., path]], dim=-1)
                self.conv_states[index] = full[..., -size:].clone()
            assert self.factors is not None
            self.recurrent_states[0] = gated_delta.commit(self.recurrent_states[0], self.factors, path)
        self.factors = None
        self.window_inputs = {}

    def crop(self, tokens_to_remove: int) -> None:
        raise RuntimeError("one layer alone cannot be cropped: call `crop_cache(cache, length)` on the whole cache")


def _on_device(kernel: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
    # flash-linear-attention's kernels are Triton's; installed beside a model on the CPU, Transformers' wrapper
    # would still call them. What it wraps is the torch version.
    return kernel if tensor.is_cuda else inspect.unwrap(kernel)


def keep_attention_window(layer: DynamicLayer, length: int, path: torch.Tensor) -> None:
    """Keep the nodes of `path`, `[P]`, of the last `length` entries of K and V, `[B, H, S, D]`.

    A sliding-window layer that records its past is also cut to what the next forward needs.
    """
    if not layer.is_initialized or layer.keys.numel() == 0:
        return
    past = layer.keys.shape[-2] - length
    layer.keys = _gather(layer.keys, past, path)
    layer.values = _gather(layer.values, past, path)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length += len(path) - length
        excess = layer.keys.shape[-2] - (layer.sliding_window - 1)
        if excess > 0:
            layer.keys, layer.values = layer.keys[..., excess:, :], layer.values[..., excess:, :]


def _gather(states: torch.Tensor, past: int, path: torch.Tensor) -> torch.Tensor:
    kept = states[..., past:, :].index_select(-2, path)
    # In place, so that a round costs the accepted nodes and not the context; a tensor made under inference mode
    # cannot be written outside of it, nor one that autograd watches.
    if states.requires_grad or (states.is_inference() and not torch.is_inference_mode_enabled()):
        return torch.cat([states[..., :past, :], kept], dim=-2)
    states[..., past : past + len(path), :] = kept
    return states[..., : past + len(path), :]
