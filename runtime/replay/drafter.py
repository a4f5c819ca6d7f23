"""A block drafter's forwards, replayed: one graph for all numbers of tokens that a round accepts.

A DFlash drafter reads the features of the tokens accepted last and a block of masks, and appends the keys and values
of both to its cache. Arguments that grow with the accepted tokens are led by rows that no query sees, and the keys
and values of the others move to where those began.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicLayer

from ddaudit.runtime.caches.mode import replay_wanted
from ddaudit.runtime.models.architecture import decoder_layers
from ddaudit.runtime.replay.draft_window import DraftWindow
from ddaudit.runtime.replay.errors import NotReplayable, Refusals, relative_difference
from ddaudit.runtime.replay.graph import Graph
from ddaudit.runtime.replay.memory import KeyValues, unseat
from ddaudit.runtime.replay.regions import Regions, inductor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ddaudit.runtime.replay.regions import Compiler

LARGEST_DRAFT = 128
"""Tokens in any argument; longer ones, such as the features of a whole prompt, run eagerly."""
_CACHES = ("past_key_values", "cache", "past_key_value")


@dataclass
class _Stage:
    """One shape of the arguments, those that grow with the context at the length they are filled up to."""

    window: DraftWindow
    tensors: dict[str, torch.Tensor]
    graph: Graph | None = None
    proven: int | None = None
    """The sliding windows that did not reach over all tokens when its output was held against eager code's: where one
    has since been outgrown, the proof says nothing of it."""


class DrafterGraphs:
    """Installed on a drafter once. Serves one stock cache at a time, whose layers it lets view its memory."""

    def __init__(self, drafter: nn.Module, compiler: Compiler | None) -> None:
        self._drafter = weakref.ref(drafter)
        self._stock = drafter.forward
        self._regions = _regions(drafter, compiler)
        self._seated: weakref.ref[Any] | None = None
        self._key_values: KeyValues | None = None
        self._start: torch.Tensor | None = None
        self._stages: dict[Any, _Stage] = {}
        self._lengths: dict[Any, dict[str, int]] = {}
        """Of the arguments of the last call of a kind."""
        self._growing: dict[Any, frozenset[str]] = {}
        """The arguments of a kind of call that grow with the context."""
        self._refused: Refusals[Any] = Refusals()

    def forward(self, kwargs: dict[str, Any]) -> Any:
        """The drafter's output, appended to its cache; None where stock code has to run."""
        name = next((name for name in _CACHES if kwargs.get(name) is not None), None)
        if name is None or not replay_wanted() or torch.is_grad_enabled():
            return None
        cache = kwargs[name]
        tensors = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in kwargs.items() if key not in tensors and key != name}
        if not tensors or any(tensor.dim() < 2 or tensor.shape[0] != 1 for tensor in tensors.values()):
            return None
        lengths = {key: tensor.shape[1] for key, tensor in tensors.items()}
        kind = (
            tuple((key, tensor.shape[2:], tensor.dtype) for key, tensor in sorted(tensors.items())),
            tuple(sorted((key, repr(value)) for key, value in others.items())),
        )
        growing = self._growing_in(kind, lengths)
        if max(lengths.values()) > LARGEST_DRAFT or not _is_served(cache):
            return None
        num_leading = _filled_up(length := min(lengths[key] for key in growing)) - length if growing else 0
        sizes = {key: length + num_leading * (key in growing) for key, length in lengths.items()}
        key = (kind, tuple(sorted(sizes.items())))
        if key in self._refused:
            return None
        start = cache.get_seq_length()
        try:
            with torch.inference_mode(False), torch.no_grad():
                stage = self._stage(cache, key, tensors, sizes, start)
                stage.window.num_leading.fill_(num_leading)
                for each, tensor in tensors.items():
                    # The rows before may hold what an earlier call left there: it is not seen.
                    stage.tensors[each][:, sizes[each] - lengths[each] :].copy_(tensor)
                if stage.graph is None:
                    stage.graph = self._captured(functools.partial(self._run, stage, name, others))
            if stage.proven != stage.window.windows_within(start):
                self._prove(stage, name, cache, others, growing, start)
                stage.window.num_leading.fill_(num_leading)
            output = stage.graph.replay()
        except NotReplayable as error:
            self._refuse(key, str(error))
            return None
        except torch.OutOfMemoryError:
            self._refuse(key, "there is no memory left to capture it")
            return None
        output = _copied(output, stage.window, cache)
        assert self._key_values is not None
        self._key_values.show(_layers(cache), start + stage.window.num_keys - num_leading)
        return output

    def _growing_in(self, kind: Any, lengths: dict[str, int]) -> frozenset[str]:
        """The arguments that grow with the context: those that differ, all by as much, between two calls."""
        before = self._lengths.get(kind, lengths)
        self._lengths[kind] = lengths
        changes = {key: length - before[key] for key, length in lengths.items() if length != before[key]}
        if kind not in self._growing and len(set(changes.values())) == 1:
            self._growing[kind] = frozenset(changes)
        return self._growing.get(kind, frozenset())

    def _stage(
        self, cache: Any, key: Any, tensors: dict[str, torch.Tensor], sizes: dict[str, int], start: int
    ) -> _Stage:
        other = self._seated() if self._seated else None
        if other is not None and other is not cache:
            unseat(_layers(other), {})
        layers = _layers(cache)
        if self._key_values is None:
            self._key_values = KeyValues(layers)
            self._start = torch.zeros(1, dtype=torch.long, device=layers[0].keys.device)
        self._seated = weakref.ref(cache)
        if not self._key_values.fits(start + 2 * LARGEST_DRAFT):
            # Their graphs are for the memory of before.
            self._stages.clear()
        self._key_values.seat(layers, start, room=2 * LARGEST_DRAFT)
        assert self._start is not None
        self._start.fill_(start)
        if key not in self._stages:
            fixed = {name: tensor.new_zeros(1, sizes[name], *tensor.shape[2:]) for name, tensor in tensors.items()}
            self._stages[key] = _Stage(DraftWindow(self._start, self._key_values), fixed)
        return self._stages[key]

    def _captured(self, run: Callable[[], Any]) -> Graph:
        assert self._start is not None
        beside = next((stage.graph for stage in self._stages.values() if stage.graph), None)
        try:
            return Graph(run, self._start.device, beside)
        except NotReplayable as reason:
            if self._regions is None:
                raise
            self._regions = None
            graph = Graph(run, self._start.device, beside)
            self._refused.add("compiled", str(reason), f"{type(self._drafter()).__name__} drafts by layers as they are")
            return graph

    def _run(self, stage: _Stage, cache_name: str, others: dict[str, Any]) -> Any:
        drafter = self._drafter()
        assert drafter is not None
        implementation = str(getattr(drafter.config, "_attn_implementation", "eager"))
        window = stage.window
        window.begin()
        # Not in the first run, which only then tells the window's size.
        regions = self._regions if window.seen is not None else None
        compiled = regions.installed(window.tensors_of) if regions else nullcontext()
        with window.attending(implementation), compiled:
            output = self._stock(**stage.tensors, **others, **{cache_name: window})
        window.finish()
        window.keep()
        return output

    def _prove(
        self, stage: _Stage, cache_name: str, cache: Any, others: dict[str, Any], growing: frozenset[str], start: int
    ) -> None:
        """Hold the graph against the drafter's own code, with one leading row and without.

        Both at once, so that no later round has to: what the leading rows hold, whatever it is, is a context too.

        Raises:
            NotReplayable: where it gives something else.
        """
        assert stage.graph is not None and self._key_values is not None
        for num_leading in range(2 if growing else 1):
            stage.window.num_leading.fill_(num_leading)
            output = stage.graph.replay()
            given = {key: tensor[:, num_leading * (key in growing) :] for key, tensor in stage.tensors.items()}
            expected = self._stock(**given, **others, **{cache_name: cache})
            num_held = start + stage.window.num_keys - num_leading
            reason = _difference(output, expected) or self._key_difference(cache, start, num_held)
            self._key_values.show(_layers(cache), start)
            if reason:
                raise NotReplayable(reason)
        stage.proven = stage.window.windows_within(start)

    def _key_difference(self, cache: Any, start: int, num_held: int) -> str:
        """Why what stock code has just appended to `cache` is not what the graph has; empty where it is."""
        if cache.get_seq_length() != num_held:
            return f"its graph appends {num_held - start} tokens, its own code {cache.get_seq_length() - start}"
        assert self._key_values is not None
        for index, layer in _layers(cache).items():
            appended = [states[..., start:, :] for states in (layer.keys, layer.values)]
            held = [states[..., start:, :] for states in self._key_values.held(index, num_held)]
            if reason := _difference(held, appended):
                return reason
        return ""

    def _refuse(self, key: Any, reason: str) -> None:
        self._stages.pop(key, None)
        self._refused.add(key, reason, f"{type(self._drafter()).__name__} drafts eagerly")


def _regions(drafter: nn.Module, compiler: Compiler | None) -> Regions | None:
    """Its layers, compiled when they first run; None where it has no list of decoder layers."""
    try:
        return Regions(list(decoder_layers(drafter)), compiler) if compiler else None
    except (ValueError, AttributeError):
        return None


def _filled_up(length: int) -> int:
    """The context length whose graph serves `length`: one for all that a block of usual size accepts."""
    return max(16, 1 << (length - 1).bit_length())


def _is_served(cache: Any) -> bool:
    """Whether these are stock layers of full attention that hold something."""
    layers = getattr(cache, "layers", None) or []
    return len(layers) > 0 and all(type(layer) is DynamicLayer and layer.get_seq_length() for layer in layers)


def _layers(cache: Any) -> dict[int, DynamicLayer]:
    return dict(enumerate(cache.layers))


def _copied(output: Any, window: DraftWindow, cache: Any) -> Any:
    """The graph's output, which its next replay overwrites, as the caller's own."""

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else cache if leaf is window else leaf

    return pytree.tree_map(copied, output)


def _difference(output: Any, expected: Any) -> str:
    """Why the output is not the expected one; empty where it is."""
    ours, theirs = pytree.tree_leaves(output), pytree.tree_leaves(expected)
    for mine, stock in zip(ours, theirs, strict=True):
        if not isinstance(stock, torch.Tensor):
            continue
        difference = relative_difference(mine, stock)
        if not difference <= (1e-3 if stock.dtype == torch.float32 else 5e-2):
            return f"its graph gives something else than its own code, by {difference:.1e}"
    return ""


def replay_drafter(drafter: nn.Module, compiler: Compiler | None = inductor) -> None:
    """Let this drafter's forwards over a stock cache be replayed, where they can be."""
    graphs, stock = DrafterGraphs(drafter, compiler), drafter.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = None if args else graphs.forward(kwargs)
        return stock(*args, **kwargs) if output is None else output

    drafter.forward = forward
