"""Fixed memory for what a cache holds, so that a captured graph finds it at the same place in every round."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.caches.gated_delta import WindowFactors
from ddaudit.runtime.replay.errors import NotReplayable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

ROOM = 4096
"""Tokens by which the capacity for keys and values grows; growing means capturing anew, not compiling anew."""
_SHARED_NODES = 65
"""Nodes of the largest window in common use: a tree of 64 drafts and its root."""


class KeyValues:
    """Keys and values of all attention layers, `[L, 2, capacity, H, D]`: token after token, so that nothing about a
    token's place depends on the capacity.

    A layer whose `keys` and `values` are views of this memory is seated in it.
    """

    def __init__(self, layers: Mapping[int, DynamicLayer]) -> None:
        shapes = {(layer.keys.shape[0], layer.keys.shape[1], layer.keys.shape[3]) for layer in layers.values()}
        shapes |= {(layer.values.shape[0], layer.values.shape[1], layer.values.shape[3]) for layer in layers.values()}
        if len(shapes) > 1:
            raise NotReplayable(f"its attention layers cache keys and values of different shapes: {sorted(shapes)}")
        self._places = {index: place for place, index in enumerate(layers)}
        self.memory: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.memory is None else self.memory.shape[2]

    def fits(self, length: int) -> bool:
        """Whether the memory is large enough for so many tokens; where it is not, `seat` makes a larger one."""
        return length <= self.capacity

    def seat(self, layers: Mapping[int, DynamicLayer], length: int, room: int) -> None:
        """Bring the first `length` tokens of `layers` in, with room for `room` more."""
        if not self.fits(length + room):
            first = next(iter(layers.values())).keys
            capacity = -(-(length + room) // ROOM) * ROOM
            if self.memory is not None:
                capacity = max(capacity, -(-self.capacity * 5 // 4 // ROOM) * ROOM)
                # Freed before the larger one is made, unless these layers view it.
                self.memory = None
            shape = (len(layers), 2, capacity, first.shape[1], first.shape[3])
            # Zeros, since memory nothing wrote may hold NaN, which no mask hides.
            make = partial(torch.zeros, shape, dtype=first.dtype, device=first.device)
            try:
                self.memory = make()
            except torch.OutOfMemoryError:
                del first
                with _waiting_on_host(layers, length):
                    self.memory = make()
        if self._holds(layers, length):
            return
        held = self._all_held(length)
        for index, layer in layers.items():
            keys, values = held[index]
            if layer.keys.data_ptr() != keys.data_ptr():
                keys.copy_(layer.keys[..., :length, :])
                values.copy_(layer.values[..., :length, :])
            layer.keys, layer.values = keys, values

    def show(self, layers: Mapping[int, DynamicLayer], length: int) -> None:
        """Let `layers` hold the first `length` tokens."""
        held = self._all_held(length)
        for index, layer in layers.items():
            layer.keys, layer.values = held[index]

    @contextmanager
    def appending(self, layers: Mapping[int, DynamicLayer], length: int) -> Iterator[None]:
        """While it lasts, `layers`, which hold their first `length` tokens here, append in place, within the room that
        was asked for: stock layers copy all that they hold."""

        def update(
            index: int, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            held = self.held(index, length + keys.shape[-2])
            for states, new in zip(held, (keys, values), strict=True):
                states[..., length:, :] = new
            layers[index].keys, layers[index].values = held
            return held

        for index, layer in layers.items():
            layer.update = partial(update, index)
        try:
            yield
        finally:
            for layer in layers.values():
                del layer.update

    def held(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tokens' keys and values, `[1, H, length, D]` each."""
        assert self.memory is not None
        keys, values = self.memory[self._places[index], :, None, :length].transpose(2, 3)
        return keys, values

    def anchors(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first token's keys and values, `[1, H, 1, D]`, from where the others are reached by their strides."""
        return self.held(index, 1)

    def keep(self, start: torch.Tensor, path: torch.Tensor) -> None:
        """Move the rows `start + path[i]` to `start + i`, for all layers."""
        assert self.memory is not None
        kept = self.memory.index_select(2, start + path)
        self.memory.index_copy_(2, start + torch.arange(len(path), device=path.device), kept)

    def _holds(self, layers: Mapping[int, DynamicLayer], length: int) -> bool:
        """Whether the layers hold `length` tokens here already, as they do from round to round."""
        assert self.memory is not None
        first, step = self.memory.data_ptr(), self.memory.stride(0) * self.memory.element_size()
        return all(
            layer.keys.shape[-2] == length and layer.keys.data_ptr() == first + self._places[index] * step
            for index, layer in layers.items()
        )

    def _all_held(self, length: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """`held` of each layer: a round asks several times, and views made one by one take a millisecond."""
        assert self.memory is not None
        parts = self.memory.flatten(0, 1)[:, None, :length].transpose(2, 3).unbind()
        return {index: (parts[2 * place], parts[2 * place + 1]) for index, place in self._places.items()}


@contextmanager
def _waiting_on_host(layers: Mapping[int, DynamicLayer], length: int) -> Iterator[None]:
    """While it lasts, the first `length` tokens of `layers` are on the host, and back only where it fails: what is
    seated is copied from there. A second and several gigabytes less, at a length where both memories do not fit."""
    device = next(iter(layers.values())).keys.device
    for layer in layers.values():
        layer.keys, layer.values = (states[..., :length, :].cpu() for states in (layer.keys, layer.values))
    try:
        yield
    except torch.OutOfMemoryError:
        for layer in layers.values():
            layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
        raise


class States:
    """The states of all gated delta rule layers: `[L, 1, H, K, V]`, and `[L, 1, C, kernel]` a convolution; and what a
    window leaves for its commit, which all window sizes share, since only the last window can be committed."""

    def __init__(self, layers: Mapping[int, LinearAttentionLayer]) -> None:
        self._places = {index: place for place, index in enumerate(layers)}
        for index, layer in layers.items():
            if not all(layer.has_previous_state.values()) or layer.recurrent_states[0] is None:
                raise NotReplayable(f"layer {index} has no state yet")
        try:
            self.recurrent = torch.stack([layer.recurrent_states[0] for layer in layers.values()])
            self.convolution = {
                number: torch.stack([layer.conv_states[number] for layer in layers.values()])
                for number in next(iter(layers.values())).conv_states
            }
        except (RuntimeError, KeyError) as error:
            raise NotReplayable(f"its recurrent layers' states differ in shape: {error}") from error
        self._shared: dict[Any, torch.Tensor] = {}

    def place(self, index: int) -> int:
        return self._places[index]

    def factors(self, length: int) -> WindowFactors:
        """Room for the factors of a window of `length` nodes, of all layers: `[L, 1, H, T, ...]`."""
        layers, _, heads, key_size, value_size = self.recurrent.shape
        room = partial(self._room, length=length, dtype=torch.float32)
        return WindowFactors(
            room("keys", (layers, 1, heads, length, key_size)),
            room("writes", (layers, 1, heads, length, value_size)),
            room("log_decay", (layers, 1, heads, length)),
        )

    def inputs(self, length: int) -> dict[int, torch.Tensor]:
        """Room for the inputs of each convolution over a window of `length` nodes: `[L, 1, T, C]`."""
        return {
            number: self._room(number, (*state.shape[:2], length, state.shape[2]), length=length, dtype=state.dtype)
            for number, state in self.convolution.items()
        }

    def _room(self, name: Any, shape: tuple[int, ...], length: int, dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        if name not in self._shared or self._shared[name].numel() < size:
            # Windows made before keep theirs.
            most = size // length * max(length, _SHARED_NODES)
            self._shared[name] = torch.zeros(most, dtype=dtype, device=self.recurrent.device)
        return self._shared[name][:size].view(shape)

    def seat(self, layers: Mapping[int, LinearAttentionLayer]) -> None:
        """Bring the layers' states in, where they are not."""
        for index, layer in layers.items():
            place = self._places[index]
            if layer.recurrent_states[0].data_ptr() != self.recurrent[place].data_ptr():
                self.recurrent[place].copy_(layer.recurrent_states[0])
                layer.recurrent_states[0] = self.recurrent[place]
            for number, states in self.convolution.items():
                if layer.conv_states[number].data_ptr() != states[place].data_ptr():
                    states[place].copy_(layer.conv_states[number])
                    layer.conv_states[number] = states[place]


def unseat(attention: Mapping[int, DynamicLayer], recurrent: Mapping[int, LinearAttentionLayer]) -> None:
    """Give the layers memory of their own, so that another cache can take the place."""
    # After a reset they are new and empty.
    for layer in (layer for layer in attention.values() if layer.keys is not None):
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    for layer in (layer for layer in recurrent.values() if layer.recurrent_states[0] is not None):
        layer.recurrent_states[0] = layer.recurrent_states[0].clone()
        layer.conv_states.update({number: state.clone() for number, state in layer.conv_states.items()})
