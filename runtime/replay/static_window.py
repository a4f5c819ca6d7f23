"""What a model's stock code takes for its cache while a window's forward is captured: everything in fixed places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.caches import gated_delta
from ddaudit.runtime.caches.delta_window import GatedDeltaWindow
from ddaudit.runtime.replay import ops
from ddaudit.runtime.replay.attending import attending
from ddaudit.runtime.replay.errors import NotReplayable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ddaudit.runtime.caches.recurrent import MixerCall
    from ddaudit.runtime.replay.memory import KeyValues, States

# What an attention interface may be given without its result being another; caps, sinks and biases are not here.
_HARMLESS = {
    "position_ids", "use_cache", "cache_position", "is_causal", "output_attentions", "output_hidden_states",
    "sliding_window",
}  # fmt: skip


@dataclass(frozen=True)
class Reach:
    """What the queries of a layer see of the new keys, and how far back they see the others."""

    visible: torch.Tensor
    """`[queries, new keys]`."""
    offsets: torch.Tensor | None = None
    """`[queries]`, their places after the tokens before the window; None where there is no sliding window."""
    sliding_window: int = 0
    """0 for none."""


class StaticWindow:
    """The window of one forward of `length` nodes: what a tree is made of on the device, and where its factors go.

    Tensors are filled before each replay and never replaced.
    """

    def __init__(self, length: int, start: torch.Tensor, key_values: KeyValues, states: States | None) -> None:
        device = start.device
        self.length = length
        self.start = start
        """`[1]`, the tokens before the window."""
        self.key_values = key_values
        self.visible = torch.eye(length, dtype=torch.bool, device=device)
        """`[T, T]`: the nodes that each node sees, itself included."""
        sizes = {state.shape[-1] for state in states.convolution.values()} if states else set()
        self.taps = {size: torch.zeros(length, size, dtype=torch.long, device=device) for size in sizes}
        """`[T, kernel]` as `Window.taps`, a convolution size."""
        self._numbers = torch.arange(1, length + 1, device=device).expand(length, length).tril(-1)
        """`[T, T]`: of the nodes before each, counted from one."""
        self._inputs_before = {size: torch.arange(-1, size - 1, device=device) for size in sizes}
        self._own_inputs = {size: torch.arange(size, size + length, device=device) for size in sizes}
        self.recurrent: dict[int, StaticDelta] = {}
        """By the layer's number, where `takeover`'s detour of its mixer looks."""
        self.factors: gated_delta.WindowFactors | None = None
        """Of all layers, `[L, 1, H, T, ...]`."""
        self.inputs: dict[int, torch.Tensor] = {}
        """`[L, 1, T, C]`: the inputs of each convolution."""
        if states is not None:
            self.factors, self.inputs = states.factors(length), states.inputs(length)
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None
        self._made_anchors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self) -> None:
        """What follows from `visible`: where each node's convolution reads. In few steps, each a kernel of a round."""
        # The latest node that each sees before itself, counted from one: 0 is the last committed token.
        parents = (self.visible * self._numbers).amax(dim=-1)
        for size, taps in self.taps.items():
            # Of the committed inputs and the nodes' own behind them, the one before each on its path.
            before = torch.cat([self._inputs_before[size], parents + (size - 1)])
            reads = [self._own_inputs[size]]
            for _ in range(size - 1):
                reads.insert(0, before[reads[0]])
            torch.stack(reads, dim=1, out=taps)

    def tensors_of(self, layer_idx: int) -> dict[str, torch.Tensor]:
        """The fixed tensors that this layer's forward reads or writes, by names that are the same for its like."""
        found = {"start": self.start, "visible": self.visible}
        found |= {f"taps {size}": taps for size, taps in self.taps.items()}
        if layer_idx in self.recurrent:
            return found | self.recurrent[layer_idx].tensors
        keys, values = self._anchors(layer_idx)
        return found | {"keys": keys, "values": values}

    # -- the cache of stock code --------------------------------------------------------------------------------

    is_compileable = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Nothing is stored here: `attend` gets these two, and its kernel stores them."""
        self.finish()
        self._latest = (key_states, value_states)
        return self._latest

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # A number read while capturing would be there in every later round.
        raise NotReplayable("its forward asks the cache for its length")

    def finish(self) -> None:
        """Called after a forward: a layer that attended in its own way saw the window alone.

        Raises:
            NotReplayable: where one did.
        """
        if self._latest is not None:
            self._latest = None
            raise NotReplayable("its attention does not go through Transformers' attention functions")

    def attend(
        self,
        ignores_window: bool,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Stand in for an attention interface of Transformers."""
        if self._latest is None or self._latest[0] is not key or self._latest[1] is not value:
            raise NotReplayable(f"{type(module).__name__} attends to something else than what its cache returned")
        self._latest = None
        given = [name for name, value in kwargs.items() if value is not None and value is not False]
        unknown = [name for name in given if name not in _HARMLESS]
        if unknown or dropout:
            raise NotReplayable(f"{type(module).__name__} attends with {', '.join(unknown) or 'dropout'}")
        is_causal = kwargs.get("is_causal")
        reach = self._reach(
            (query.shape[2], key.shape[2]),
            bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
            attention_mask,
            kwargs.get("sliding_window") or 0,
            ignores_window,
        )
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        keys, values = self._anchors(module.layer_idx)
        attended = ops.window_attention(
            query, key, value, keys, values, self.start, reach.visible, reach.offsets, scale, reach.sliding_window
        )
        return attended, None

    def _reach(
        self,
        shape: tuple[int, int],
        is_causal: bool,
        mask: torch.Tensor | None,
        sliding_window: int,
        ignores_window: bool,
    ) -> Reach:
        """What the queries of one attention layer see.

        Args:
            shape: queries and new keys.
            mask: as the layer was given it, over the new keys alone.
            ignores_window: the attention function knows of a sliding window from its mask alone, as `sdpa` does.

        Raises:
            NotReplayable: where that is something else than the nodes of this window see.
        """
        if not is_causal:
            raise NotReplayable("an attention layer is not causal")
        if sliding_window and not ignores_window:
            raise NotReplayable("an attention layer has a sliding window")
        return Reach(self.visible)

    def attending(self, implementation: str) -> AbstractContextManager[None]:
        """While it lasts, Transformers' attention of that name is the kernel over this window."""
        return attending(implementation, partial(self.attend, implementation == "sdpa"))

    def _anchors(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Made once: a trace knows a tensor by its identity.
        if layer_idx not in self._made_anchors:
            self._made_anchors[layer_idx] = self.key_values.anchors(layer_idx)
        return self._made_anchors[layer_idx]


class StaticDelta(GatedDeltaWindow):
    """One gated delta rule layer of a `StaticWindow`: the stock mixer over fixed memory, nothing closed here."""

    def __init__(self, forward: Callable[..., Any], window: StaticWindow, states: States, place: int) -> None:
        # Not super(): there is no stock layer behind this one.
        self._forward = forward
        # Not the window itself, which knows its layers: memory must be free once neither is used.
        self._taps, self._visible = window.taps, window.visible
        self._convolving = 0
        assert window.factors is not None
        self._state = states.recurrent[place]
        self._convolution = {number: state[place] for number, state in states.convolution.items()}
        self._window_inputs = {number: inputs[place] for number, inputs in window.inputs.items()}
        self._keys, self._writes = window.factors.keys[place], window.factors.writes[place]
        self._log_decay = window.factors.log_decay[place]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"state": self._state, "k": self._keys, "u": self._writes, "G": self._log_decay}
        named |= {f"convolution {number}": state for number, state in self._convolution.items()}
        return named | {f"inputs {number}": inputs for number, inputs in self._window_inputs.items()}

    def cut(self, length: int) -> tuple[dict[int, torch.Tensor], gated_delta.WindowFactors]:
        """Copies of the first `length` nodes' convolution inputs and factors."""
        inputs = {number: each[:, :length].transpose(1, 2).clone() for number, each in self._window_inputs.items()}
        keys, writes = self._keys[..., :length, :].clone(), self._writes[..., :length, :].clone()
        return inputs, gated_delta.WindowFactors(keys, writes, self._log_decay[..., :length].clone())

    def run(self, call: MixerCall) -> torch.Tensor:
        return self.verify(call)

    @property
    def has_state(self) -> bool:
        return True

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        return self._convolution

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return {0: self._state}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._convolution[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._convolving = state_idx
        return conv_states

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if activation not in (None, "silu", "swish"):
            raise NotReplayable(f"its convolution is followed by {activation}")
        number = self._convolving
        convolved = ops.window_convolution(
            hidden_states.transpose(1, 2), self._convolution[number], self._taps[weight.shape[-1]], weight, bias,
            activation is not None, self._window_inputs[number],
        )  # fmt: skip
        return convolved.transpose(1, 2)

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
        if not use_qk_l2norm_in_kernel:
            raise NotReplayable("its delta rule has no unit keys")
        output = ops.window_delta_rule(
            query, key, value, g.float(), beta, self._state, self._visible,
            self._keys, self._writes, self._log_decay,
        )  # fmt: skip
        return output, None
