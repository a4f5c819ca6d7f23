"""A block drafter's forwards, replayed: one graph for each shape of its arguments.

A DFlash drafter reads the features of the tokens accepted last and a block of masks, and appends the keys and values
of both to its cache, so its shapes are as many as a block has accepted lengths.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicLayer

from ddaudit.runtime.caches.mode import note_graph, replay_wanted
from ddaudit.runtime.errors import describe
from ddaudit.runtime.replay.errors import NotReplayable, Refusals, relative_difference
from ddaudit.runtime.replay.graph import Graph
from ddaudit.runtime.replay.memory import KeyValues, unseat
from ddaudit.runtime.replay.static_window import StaticWindow

if TYPE_CHECKING:
    from torch import nn

LARGEST_DRAFT = 128
"""Tokens in any argument; longer ones, such as the features of a whole prompt, run eagerly."""
_CACHES = ("past_key_values", "cache", "past_key_value")


class DraftWindow(StaticWindow):
    """A draft block that sees all that is cached, the new context and itself, in both directions."""

    def __init__(self, start: torch.Tensor, key_values: KeyValues) -> None:
        super().__init__(0, start, key_values, None)
        self.is_causal = False
        self.num_new = 0
        """Keys that the forward appends, once it has run."""
        self._all: dict[tuple[int, int], torch.Tensor] = {}

    def _visible_to(self, num_queries: int, num_keys: int) -> torch.Tensor:
        shape = (num_queries, num_keys)
        if shape not in self._all:
            self._all[shape] = torch.ones(shape, dtype=torch.bool, device=self.start.device)
        self.num_new = num_keys
        return self._all[shape]


@dataclass
class _Stage:
    """One shape of the arguments."""

    window: DraftWindow
    tensors: dict[str, torch.Tensor]
    graph: Graph | None = None
    is_proven: bool = False


class DrafterGraphs:
    """Installed on a drafter once. Serves one stock cache at a time, whose layers it lets view its memory."""

    def __init__(self, drafter: nn.Module) -> None:
        self._drafter = weakref.ref(drafter)
        self._stock = drafter.forward
        self._seated: weakref.ref[Any] | None = None
        self._key_values: KeyValues | None = None
        self._start: torch.Tensor | None = None
        self._stages: dict[Any, _Stage] = {}
        self._refused: Refusals[Any] = Refusals()
        self._pool: Any = None

    def forward(self, kwargs: dict[str, Any]) -> Any:
        """The drafter's output, appended to its cache; None where stock code has to run."""
        name = next((name for name in _CACHES if kwargs.get(name) is not None), None)
        if name is None or not replay_wanted() or torch.is_grad_enabled():
            return None
        cache = kwargs[name]
        tensors = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in kwargs.items() if key not in tensors and key != name}
        key = (
            tuple((key, tensor.shape, tensor.dtype) for key, tensor in sorted(tensors.items())),
            tuple(sorted((key, repr(value)) for key, value in others.items())),
        )
        if key in self._refused or not tensors or not _is_served(cache):
            return None
        if any(tensor.shape[0] != 1 or max(tensor.shape[1:2]) > LARGEST_DRAFT for tensor in tensors.values()):
            return None
        start = cache.get_seq_length()
        try:
            with torch.inference_mode(False), torch.no_grad():
                stage = self._stage(cache, key, tensors, start)
                for each, tensor in tensors.items():
                    stage.tensors[each].copy_(tensor)
                if stage.graph is None:
                    run = functools.partial(self._run, stage, name, others)
                    stage.graph = Graph(run, stage.window.start.device, self._pool)
                    note_graph()
            output = stage.graph.replay()
        except (NotReplayable, torch.OutOfMemoryError) as error:
            self._refuse(key, describe(error))
            return None
        output = _copied(output, stage.window, cache)
        if not stage.is_proven:
            expected = self._stock(**kwargs)
            if reason := _difference(output, expected):
                self._refuse(key, reason)
                return expected
            stage.is_proven = True
        assert self._key_values is not None
        self._key_values.show(_layers(cache), start + stage.window.num_new)
        return output

    def _stage(self, cache: Any, key: Any, tensors: dict[str, torch.Tensor], start: int) -> _Stage:
        other = self._seated() if self._seated else None
        if other is not None and other is not cache:
            unseat(_layers(other), {})
        layers = _layers(cache)
        if self._key_values is None:
            self._key_values = KeyValues(layers)
            self._start = torch.zeros(1, dtype=torch.long, device=layers[0].keys.device)
            if self._start.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
        self._seated = weakref.ref(cache)
        if self._key_values.seat(layers, start, room=2 * LARGEST_DRAFT):
            self._stages.clear()
        assert self._start is not None
        self._start.fill_(start)
        if key not in self._stages:
            fixed = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            self._stages[key] = _Stage(DraftWindow(self._start, self._key_values), fixed)
        return self._stages[key]

    def _run(self, stage: _Stage, cache_name: str, others: dict[str, Any]) -> Any:
        drafter = self._drafter()
        assert drafter is not None
        implementation = str(getattr(drafter.config, "_attn_implementation", "eager"))
        with stage.window.attending(implementation):
            output = self._stock(**stage.tensors, **others, **{cache_name: stage.window})
        stage.window.finish()
        return output

    def _refuse(self, key: Any, reason: str) -> None:
        self._stages.pop(key, None)
        self._refused.add(key, reason, f"{type(self._drafter()).__name__} drafts eagerly")


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


def replay_drafter(drafter: nn.Module) -> None:
    """Let this drafter's forwards over a stock cache be replayed, where they can be."""
    graphs, stock = DrafterGraphs(drafter), drafter.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = None if args else graphs.forward(kwargs)
        return stock(*args, **kwargs) if output is None else output

    drafter.forward = forward
