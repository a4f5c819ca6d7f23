"""Where caches are made: replayed on a GPU, eager elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddaudit.runtime.caches.cache import VerifiableCache
from ddaudit.runtime.caches.mode import replay_wanted
from ddaudit.runtime.models.architecture import unwrap
from ddaudit.runtime.replay.cache import ReplayedCache
from ddaudit.runtime.replay.target import graphs_of

if TYPE_CHECKING:
    from torch import nn


def make_cache(model: nn.Module, max_length: int | None = None) -> VerifiableCache:
    """A cache for `model`, whatever its architecture, that can verify a block or a tree of tokens and go back.

    Prepares the model once (forward hooks; recurrent mixers run the stock code with tree-aware kernels). Forwards
    without such a cache stay as they were. On a GPU short windows are replayed as graphs.

    Args:
        model: any Transformers decoder, wrapped or not.
        max_length: most tokens the cache may hold; a forward beyond it raises.

    Raises:
        NotImplementedError: for a layer kind without an exact method, naming the layer.
    """
    model = unwrap(model)
    if replay_wanted() and model.device.type == "cuda":
        return ReplayedCache(model, max_length, graphs_of(model))
    return VerifiableCache(model, max_length)
