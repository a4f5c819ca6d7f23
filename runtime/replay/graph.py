"""A function over fixed tensors, captured once as a CUDA graph and replayed; called as it is elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.caches.mode import note_graph
from ddaudit.runtime.replay.errors import NotReplayable

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UPS = 2
"""Kernels are compiled and chosen in the first call, which must not happen while capturing."""


class Graph:
    """`function` reads and writes fixed tensors and returns tensors (or nothing); what it returns is overwritten by
    the next replay of any graph that shares its memory.

    `function` runs several times here and must not change what it reads.

    Args:
        beside: a graph to share memory with, which lives as long as any of those that do.

    Raises:
        NotReplayable: where the function cannot be captured: it asks the device for a number, for example.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, beside: Graph | None = None) -> None:
        self._function: Callable[[], Any] | None = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            # Not a pool's handle: when the last graph of a pool goes, the pool goes, and its handle is not to be used.
            pool = beside._graph.pool() if beside is not None and beside._graph is not None else None
            self._graph = self._capture(function, device, pool)
            # It knows its owner, which would keep both, and the memory they are for, until garbage is collected.
            self._function = None
        else:
            # Whatever cannot be captured shows itself here too.
            for _ in range(_WARM_UPS):
                self.replay()
        note_graph()

    def _capture(self, function: Callable[[], Any], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
        with torch.inference_mode(False), torch.no_grad():
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool):
                    self._output = function()
            except RuntimeError as error:
                raise NotReplayable(f"capturing it failed: {str(error).splitlines()[0]}") from error
        return graph

    def replay(self) -> Any:
        if self._graph is not None:
            self._graph.replay()
            return self._output
        assert self._function is not None
        with torch.inference_mode(False), torch.no_grad():
            return self._function()
