"""A target's forwards over an open window, replayed: one graph a window size, for whichever cache is seated."""

from __future__ import annotations

import bisect
import functools
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from ddaudit.runtime.caches.takeover import cache_argument, install
from ddaudit.runtime.kernels.delta_rule import commit_delta_rule
from ddaudit.runtime.models.architecture import decoder_layers, text_config
from ddaudit.runtime.replay.attending import GroupedAttention, attending
from ddaudit.runtime.replay.calls import Replayed, answer, is_plain
from ddaudit.runtime.replay.errors import NotReplayable, Refusals, relative_difference
from ddaudit.runtime.replay.graph import Graph
from ddaudit.runtime.replay.memory import KeyValues, States, unseat
from ddaudit.runtime.replay.prefill import PIECE, in_pieces
from ddaudit.runtime.replay.regions import Regions, inductor
from ddaudit.runtime.replay.static_window import StaticDelta, StaticWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from ddaudit.runtime.caches.gated_delta import WindowFactors
    from ddaudit.runtime.replay.cache import ReplayedCache
    from ddaudit.runtime.replay.regions import Compiler

SIZES = (1, 8, 16, 17, 24, 32, 33, 48, 64, 65, 96, 129)
"""Nodes of the windows that have a graph. Few, since each is compiled and captured when it is first met; and beside
each power of two one more, for a tree of so many drafts and its root, which the kernel takes by itself."""
LARGEST_WINDOW = SIZES[-1]
"""Nodes; larger windows run eagerly."""


def padded(length: int) -> int:
    """The window size whose graph serves `length` nodes, at most `LARGEST_WINDOW`."""
    return SIZES[bisect.bisect_left(SIZES, length)]


@dataclass
class _Stage:
    """One window size: its tensors and its two graphs."""

    window: StaticWindow
    ids: torch.Tensor
    """`[1, T]`."""
    positions: torch.Tensor
    """`[1, T]`."""
    path: torch.Tensor
    """`[T]`, then how many of them count, `[1]`: in one tensor, so that one copy brings both."""
    forward: Graph | None = None
    commit: Graph | None = None
    last_path: tuple[int, ...] | None = None
    last_chain: int | None = None
    """The length of the chain that the window's tree still is."""
    is_proven: bool = False
    """Whether its output was held against the eager forward's."""


class TargetGraphs:
    """Installed on a target once. Serves one cache at a time: the one whose layers are seated in its memory."""

    def __init__(self, model: nn.Module, compiler: Compiler | None) -> None:
        self._model = weakref.ref(model)
        self._stock = model.forward
        self._mixers = install(model)
        self._regions = Regions(list(decoder_layers(model)), compiler) if compiler else None
        self._seated: weakref.ref[ReplayedCache] | None = None
        self._key_values: KeyValues | None = None
        self._states: States | None = None
        self._start: torch.Tensor | None = None
        self._stages: dict[int, _Stage] = {}
        self._refused: Refusals[int | str] = Refusals()

    # -- what a forward is ----------------------------------------------------------------------------------------

    def takes(self, cache: ReplayedCache, kwargs: dict[str, Any]) -> bool:
        """Whether a forward with these arguments is one over a short window, as graphs are captured for."""
        mask = kwargs.get("attention_mask")
        if not is_plain(self.model, kwargs) or (mask is not None and mask.dim() != 4):
            return False
        length = kwargs["input_ids"].shape[1]
        # The first forward is a prompt's, of any length.
        return cache.get_seq_length() > 0 and 0 < length <= LARGEST_WINDOW and padded(length) not in self._refused

    def takes_in_pieces(self, cache: ReplayedCache, kwargs: dict[str, Any]) -> bool:
        """Whether a forward with these arguments is a long one that may be fed piece by piece."""
        if not is_plain(self.model, kwargs) or self._unserved(cache):
            return False
        if kwargs["input_ids"].shape[1] <= (LARGEST_WINDOW if cache.get_seq_length() else PIECE):
            return False
        mask = kwargs.get("attention_mask")
        return mask is None or (mask.dim() == 2 and bool(mask.all()))

    def refuse_part(self, module: nn.Module) -> None:
        """Say once that a forward of `module`, which is not the whole model, is not replayed."""
        self._refused.add(
            "part", "only the whole model's are replayed", f"forwards of {type(module).__name__} alone run eagerly"
        )

    def _unserved(self, cache: ReplayedCache) -> str:
        """Why this model's forwards with `cache` cannot be over fixed memory; empty where they can."""
        if getattr(self.model, "get_output_embeddings", lambda: None)() is None:
            return "it has no head, and gives no logits to hold a graph against"
        for index, layer in enumerate(cache.layers):
            kind, mixer = type(layer), self._mixers.get(index)
            if kind is DynamicLayer or (kind is LinearAttentionLayer and mixer and mixer.over_tree):
                continue
            return f"layer {index} ({mixer.kind if mixer else kind.__name__}) has no kernel for fixed memory"
        return ""

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    # -- running one ----------------------------------------------------------------------------------------------

    def forward(self, cache: ReplayedCache, kwargs: dict[str, Any], visible: torch.Tensor | None) -> Any:
        """The model's output for the window that `cache` has open, or None where it cannot be replayed.

        Args:
            visible: `[T, T]` boolean, None for a chain.
        """
        length = kwargs["input_ids"].shape[1]
        try:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                graph = self._ready(cache, kwargs, visible)
            replayed = graph.replay()
        except NotReplayable as reason:
            self._refuse(padded(length), str(reason))
            return None
        except torch.OutOfMemoryError:
            self._refuse(padded(length), "there is no memory left to capture it")
            return None
        return answer(self.model, cache, kwargs, replayed, length)

    def _ready(self, cache: ReplayedCache, kwargs: dict[str, Any], visible: torch.Tensor | None) -> Graph:
        ids = kwargs["input_ids"]
        stage = self._stage(cache, padded(ids.shape[1]), cache.start)
        self._fill(stage, ids, kwargs.get("position_ids"), visible, cache.start)
        if stage.forward is None:
            stage.forward = self._captured(partial(self._run, stage))
        if stage.commit is None:
            self._set_path(stage, ())
            stage.commit = self._captured(partial(self._commit, stage))
        return stage.forward

    @contextmanager
    def in_place(self, cache: ReplayedCache) -> Iterator[None]:
        """While it lasts, an eager forward of a seated cache appends to its memory, and attends to that as it is."""
        attention = _attention(cache)
        if not attention:
            yield
            return
        assert self._key_values is not None
        length = next(iter(attention.values())).get_seq_length()
        with self._key_values.appending(attention, length), attending("sdpa", GroupedAttention()):
            yield

    def prefill(self, cache: ReplayedCache, kwargs: dict[str, Any]) -> Any:
        """The model's output for the long window that `cache` has open, as `takes_in_pieces` says."""
        length = kwargs["input_ids"].shape[1]

        def beginning(begin: int) -> AbstractContextManager[None]:
            held = cache.start + begin
            if not held:
                # Shapes are known once there are keys.
                return nullcontext()
            try:
                with torch.inference_mode(False), torch.no_grad():
                    self._seat(cache, held, room=length - begin + LARGEST_WINDOW)
            except (NotReplayable, torch.OutOfMemoryError):
                # The first window will say so.
                return nullcontext()
            return self.in_place(cache)

        return in_pieces(self._stock, {**kwargs, "attention_mask": None}, beginning)

    def is_proven(self, length: int) -> bool:
        return self._stages[padded(length)].is_proven

    def prove(self, length: int, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        """Hold a replayed forward against the eager one; a graph that gives something else is not used again."""
        difference = relative_difference(logits, expected)
        # Random weights at 27B differ by a tenth between any two kernels in bfloat16, and a wrong mask by 1.
        if difference <= (1e-3 if logits.dtype == torch.float32 else 0.4):
            self._stages[padded(length)].is_proven = True
            return True
        self._refuse(padded(length), f"its graph's logits differ from eager ones by {difference:.1e}")
        return False

    def commit(self, cache: ReplayedCache, length: int, path: Sequence[int]) -> None:
        """Keep the nodes `path` of the window of `length` nodes that was just run, in every layer."""
        assert self.holds(cache)
        stage = self._stages[padded(length)]
        if tuple(path) != stage.last_path:
            self._set_path(stage, path)
        assert stage.commit is not None
        if path:
            stage.commit.replay()
        self.show(cache, cache.start + len(path))

    def holds(self, cache: ReplayedCache) -> bool:
        return self._seated is not None and self._seated() is cache

    def factors(self, length: int) -> dict[int, tuple[dict[int, torch.Tensor], WindowFactors]]:
        """Copies of what the last window of `length` nodes left for its commit, by layer: the convolutions' inputs
        `[1, C, T]` by number, and the factors of the delta rule."""
        window = self._stages[padded(length)].window
        return {index: static.cut(length) for index, static in window.recurrent.items()}

    def release(self, cache: ReplayedCache) -> None:
        """Give the cache's layers memory of their own, so that another cache can be seated."""
        unseat(_attention(cache), _recurrent(cache))
        self._seated = None

    def show(self, cache: ReplayedCache, length: int) -> None:
        """Let the cache's attention layers hold the first `length` tokens."""
        assert self._key_values is not None
        self._key_values.show(_attention(cache), length)

    # -- memory -----------------------------------------------------------------------------------------------------

    def _stage(self, cache: ReplayedCache, length: int, start: int) -> _Stage:
        self._seat(cache, start, room=LARGEST_WINDOW)
        if length not in self._stages:
            self._stages[length] = self._make_stage(length)
        return self._stages[length]

    def _seat(self, cache: ReplayedCache, held: int, room: int) -> None:
        """Bring the `held` tokens of `cache` into the graphs' memory, with room for `room` more.

        Raises:
            NotReplayable: where its layers are not of kinds or shapes that fixed memory is for.
        """
        attention, recurrent = _attention(cache), _recurrent(cache)
        other = self._seated() if self._seated else None
        if other is not None and other is not cache:
            other.leave()
        if self._key_values is None:
            if reason := self._unserved(cache):
                raise NotReplayable(reason)
            self._key_values = KeyValues(attention)
            self._states = States(recurrent) if recurrent else None
            self._start = torch.zeros(1, dtype=torch.long, device=self.model.device)
        self._seated = weakref.ref(cache)
        if attention:
            if not self._key_values.fits(held + room):
                # Their graphs are for the memory of before.
                self._stages.clear()
            self._key_values.seat(attention, held, room)
        if self._states is not None:
            self._states.seat(recurrent)

    def _make_stage(self, length: int) -> _Stage:
        assert self._key_values is not None and self._start is not None
        device = self._start.device
        window = StaticWindow(length, self._start, self._key_values, self._states)
        for index, mixer in self._mixers.items():
            assert self._states is not None and mixer.over_tree is not None
            place = self._states.place(index)
            window.recurrent[index] = StaticDelta(mixer.over_tree, window, self._states, place)
        integers = partial(torch.zeros, dtype=torch.long, device=device)
        return _Stage(window, integers(1, length), integers(1, length), integers(length + 1))

    def _fill(
        self, stage: _Stage, ids: torch.Tensor, positions: torch.Tensor | None, visible: torch.Tensor | None, start: int
    ) -> None:
        length = ids.shape[1]
        window = stage.window
        window.start.fill_(start)
        stage.ids[:, :length].copy_(ids)
        if visible is not None or stage.last_chain != length:
            if length < window.length:
                window.visible.fill_(False).fill_diagonal_(True)
            window.visible[:length, :length].copy_(_chain(length, ids.device) if visible is None else visible)
            stage.last_chain = length if visible is None else None
        if positions is None:
            stage.positions.copy_(window.visible.sum(-1) - 1 + start)
        else:
            # What stands behind is an earlier window's, as good as any.
            stage.positions[:, :length].copy_(positions)

    def _set_path(self, stage: _Stage, path: Sequence[int]) -> None:
        # Beyond the path each row of keys and values stays where it is.
        places = [*path, *range(len(path), stage.window.length), len(path)]
        stage.path.copy_(torch.tensor(places), non_blocking=True)
        stage.last_path = tuple(path)

    # -- what is captured -------------------------------------------------------------------------------------------

    def _captured(self, function: Any) -> Graph:
        captured = [graph for stage in self._stages.values() for graph in (stage.forward, stage.commit) if graph]
        return Graph(function, self.model.device, next(iter(captured), None))

    def _run(self, stage: _Stage) -> Replayed:
        model = self.model
        stage.window.prepare()
        implementation = str(getattr(text_config(model), "_attn_implementation", "eager"))
        compiled = self._regions.installed(stage.window.tensors_of) if self._regions else nullcontext()
        with stage.window.attending(implementation), compiled:
            output = self._stock(
                input_ids=stage.ids,
                position_ids=stage.positions,
                # Four axes: stock code takes it for a finished mask, makes none, and keeps it from other layers.
                attention_mask=stage.window.visible[None, None],
                use_cache=True,
                output_hidden_states=True,
                **{cache_argument(model): stage.window},
            )
        stage.window.finish()
        states = output.hidden_states
        is_alike = len({(state.shape, state.dtype) for state in states}) == 1
        return Replayed(output.logits, states, torch.stack(states) if is_alike else None)

    def _commit(self, stage: _Stage) -> None:
        window, path, num = stage.window, stage.path[:-1], stage.path[-1:]
        if self._states is not None:
            assert window.factors is not None
            factors = window.factors
            commit_delta_rule(self._states.recurrent, factors.keys, factors.writes, factors.log_decay, path, num)
            for number, states in self._states.convolution.items():
                _commit_inputs(states, window.inputs[number], path, num)
        assert self._key_values is not None
        if self._key_values.memory is not None:
            self._key_values.keep(window.start, path)

    def _refuse(self, length: int, reason: str) -> None:
        self._stages.pop(length, None)
        self._refused.add(length, reason, f"windows of {length} tokens run eagerly on {type(self.model).__name__}")


def _commit_inputs(states: torch.Tensor, inputs: torch.Tensor, path: torch.Tensor, num: torch.Tensor) -> None:
    """Shift the `num` inputs on `path`, of `[L, 1, T, C]`, into the convolutions' states, `[L, 1, C, kernel]`."""
    size = states.shape[-1]
    # Entry j of the new state is input j of the old state followed by the path's, counted from the path's end.
    at = torch.arange(size, device=path.device) + num
    from_path = inputs.index_select(2, path[(at - size).clamp(0, len(path) - 1)]).transpose(2, 3)
    states.copy_(torch.where(at < size, states.index_select(-1, at.clamp(max=size - 1)), from_path))


@functools.lru_cache(maxsize=32)
def _chain(length: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _attention(cache: ReplayedCache) -> dict[int, DynamicLayer]:
    return {index: layer for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer}


def _recurrent(cache: ReplayedCache) -> dict[int, LinearAttentionLayer]:
    return {index: layer for index, layer in enumerate(cache.layers) if type(layer) is LinearAttentionLayer}


_installed: weakref.WeakKeyDictionary[nn.Module, TargetGraphs] = weakref.WeakKeyDictionary()


def graphs_of(model: nn.Module, compiler: Compiler | None = inductor) -> TargetGraphs:
    """What replays this model's windows, installed on it once: its forward asks a `ReplayedCache` first."""
    if model not in _installed:
        graphs = TargetGraphs(model, compiler)
        stock = model.forward

        @functools.wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            cache = next((value for value in kwargs.values() if hasattr(value, "replayed")), None)
            output = cache.replayed(kwargs, stock) if cache is not None else None
            return stock(*args, **kwargs) if output is None else output

        model.forward = forward
        _installed[model] = graphs
    return _installed[model]
