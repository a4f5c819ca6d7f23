"""A Transformers cache for any architecture that can verify a block or a tree of tokens and go back, exactly."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ddaudit.runtime.caches import takeover
from ddaudit.runtime.caches.attention import keep_attention_window
from ddaudit.runtime.caches.commits import commits
from ddaudit.runtime.caches.history import History, Tokens
from ddaudit.runtime.caches.window import Window, visible_in
from ddaudit.runtime.models.architecture import decoder, text_config, unwrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from transformers.cache_utils import Cache

    from ddaudit.runtime.caches.recurrent import RecurrentWindow


# The stand-in for layers that keep nothing (shared K/V, MoE-only layers) came with 5.18.
_STATELESS = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
_RECURRENT = (
    LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)
_UNFINISHED = "an earlier forward with this cache did not finish: its state is lost, make a new cache"


class VerifiableCache(DynamicCache):
    """A `DynamicCache` whose last window stays open until it is closed, or the next forward keeps all of it.

    Make one with `make_cache`. Where a layer forgets (recurrent, sliding window), token ids are remembered, so that
    going back over a closed window can replay them from an empty state.
    """

    def __init__(self, model: nn.Module, max_length: int | None = None) -> None:
        model = unwrap(model)
        super().__init__(config=model.config)
        self._start_empty(model)
        self.max_length = max_length
        self.window: Window | None = None
        self._model = weakref.ref(model)
        self._forward_of: int | None = None
        self._history = History()
        self._committed = 0
        self._feeding: Tokens | None = None
        self._holds_images = False
        self._tree_mask: torch.Tensor | None = None

    def _start_empty(self, model: nn.Module) -> None:
        mixers = takeover.install(model)
        self.layers = DynamicCache(config=model.config).layers
        for index, layer in enumerate(self.layers):
            _check_exact(layer, index, mixers, model)
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        self.recurrent: dict[int, RecurrentWindow] = {
            index: mixers[index].window(layer)
            for index, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionLayer)
        }
        """The open window of each layer that has a recurrent part, by the layer's number."""

    @property
    def _sliding(self) -> list[DynamicSlidingWindowLayer]:
        return [layer for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer)]

    @property
    def _forgets(self) -> bool:
        """Whether a layer drops what going back over a closed window would need."""
        return bool(self.recurrent or self._sliding)

    @property
    def is_croppable(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, those of the open window included once its forward is done."""
        if any(isinstance(layer, DynamicLayer) for layer in self.layers):
            return int(super().get_seq_length(layer_idx))
        return self._committed + (self.window.length if self.window and self._forward_of is None else 0)

    # -- the forward ------------------------------------------------------------------------------------------

    def open_window(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        """Called by the hooks of `takeover` before a forward of the model, then of its decoder; edits `kwargs`."""
        outermost = self._forward_of is None or self._forward_of == id(module)
        if outermost:
            if self._forward_of is not None:
                raise RuntimeError(_UNFINISHED)
            self._settle()
            self._start_window(module, kwargs)
            self._forward_of = id(module)
        if self._sliding and module is decoder(self._live_model()):
            self._mask_windowed_layers(kwargs)

    def _start_window(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        fed = ids if ids is not None else kwargs["inputs_embeds"]
        start, length = self.get_seq_length(), fed.shape[1]
        self._check_room(start + length)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        self._tree_mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 4 else None
        if self._tree_mask is not None:
            self._refuse_unmasked_attention(module)
            needs_tree = bool(self.recurrent or self._sliding)
            window = Window.from_mask(self._tree_mask, start, length) if needs_tree else Window(start, length, None)
        else:
            if isinstance(mask, torch.Tensor) and self.recurrent and not bool(mask.all()):
                raise ValueError(
                    "the attention mask marks padding, which a recurrent layer would fold into its state: "
                    "decode prompts of different lengths one by one"
                )
            window = Window.chain(start, length)
        self._holds_images = self._holds_images or any(name.startswith("pixel_values") for name in kwargs)
        if positions is None and window.parents is not None and self._may_number(module):
            kwargs["position_ids"] = positions = window.positions(fed.device)
        self.window = window
        self._feeding = None if ids is None or self._holds_images else Tokens(ids, positions)
        for recurrent in self.recurrent.values():
            recurrent.open(window)

    def _check_room(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"this forward would fill the cache to {length} tokens, but it was made for "
                f"max_length={self.max_length}"
            )

    def _may_number(self, module: nn.Module) -> bool:
        # Stock code numbers a tree's nodes one after the other, and Bamba's (5.24) counts a continuation from zero.
        # Image tokens are numbered by their own rules, which stay the model's.
        return not self._holds_images and "position_ids" in takeover.forward_parameters(module)

    def forward_done(self, module: nn.Module) -> None:
        if self._forward_of == id(module):
            self._forward_of = self._tree_mask = None

    def _mask_windowed_layers(self, kwargs: dict[str, Any]) -> None:
        # Research code builds one mask for all layers; Transformers takes one for each layer type, as wide as what
        # that type's layers still hold.
        mask, window = self._tree_mask, self.window
        if mask is None or window is None:
            return
        visible = visible_in(mask)
        at = window.positions(mask.device)[0]
        keys = torch.cat([torch.arange(window.start, device=mask.device), at])
        kinds = dict.fromkeys(_layer_type(self._live_model(), index) for index in range(len(self.layers)))
        masks: dict[str, torch.Tensor | None] = dict.fromkeys(kinds)
        for index, layer in enumerate(self.layers):
            kind = _layer_type(self._live_model(), index)
            if masks[kind] is not None:
                continue
            if isinstance(layer, DynamicSlidingWindowLayer):
                size = layer.sliding_window
                chunked = kind == "chunked_attention"
                near = at[:, None] // size == keys // size if chunked else at[:, None] - keys < size
                seen = (visible & near)[..., max(window.start - size + 1, 0) :]
                masks[kind] = seen if mask.dtype == torch.bool else _additive(seen, mask.dtype)
            elif isinstance(layer, DynamicLayer):
                masks[kind] = mask
        kwargs["attention_mask"] = masks if len(masks) > 1 else next(iter(masks.values()))

    def _refuse_unmasked_attention(self, module: nn.Module) -> None:
        config = text_config(self._live_model())
        implementation = str(getattr(config, "_attn_implementation", ""))
        if "flash" in implementation:
            raise ValueError(
                f"`{implementation}` cannot take a tree mask and would ignore it: load the target with "
                'attn_implementation="sdpa"'
            )
        attends = any(isinstance(layer, DynamicLayer) for layer in self.layers)
        takes_positions = "position_ids" in takeover.forward_parameters(module)
        if attends and (not takes_positions or getattr(config, "alibi", False)):
            raise ValueError(
                f"{type(module).__name__} takes no positions for its tokens but counts their places in the cache, "
                "where the branches of a tree stand behind each other: verify one chain at a time"
            )

    # -- going back -------------------------------------------------------------------------------------------

    def close_window(self, indices: Sequence[int]) -> None:
        """Keep the window's nodes `indices`, a path from the committed tokens, and forget the others.

        Raises:
            ValueError: where there is no open window, or `indices` is no path and a layer needs one.
        """
        if self._forward_of is not None:
            raise RuntimeError(_UNFINISHED)
        window = self.window
        if window is None:
            raise ValueError("no window is open: it was closed already, or no forward has run with this cache")
        if self.recurrent:
            window.check_path(indices)
        history = self._history.extended(self._feeding, indices) if self._forgets else self._history
        if len(indices) < window.length and any(recurrent.is_folded for recurrent in self.recurrent.values()):
            self._replay(history, window.start + len(indices))
        else:
            self._close_layers(window.length, indices)
            self._history, self.window = history, None
            self._committed = window.start + len(indices)

    def _close_layers(self, length: int, indices: Sequence[int]) -> None:
        path = tuple(indices)
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                keep_attention_window(layer, length, path)
        for recurrent in self.recurrent.values():
            recurrent.close(path)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, exactly.

        Raises:
            ValueError: where `length` is more than the cache holds, or the tokens to replay were not seen.
        """
        if self._forward_of is not None:
            raise RuntimeError(_UNFINISHED)
        held = self.get_seq_length()
        if not 0 <= length <= held:
            raise ValueError(f"cannot keep {length} tokens of a cache that holds {held}")
        if self.window is not None and length >= self.window.start:
            self.close_window(range(length - self.window.start))
        elif length < held and self._forgets:
            self._replay(self._history, length)
        elif length < held:
            self._close_layers(held - length, [])
            self.window = None

    @commits
    def crop(self, tokens_to_remove: int) -> None:
        """Transformers' own call, for code not yet ported: a count to remove if at most 0, else a length to keep."""
        self.truncate(tokens_to_remove if tokens_to_remove > 0 else self.get_seq_length() + tokens_to_remove)

    def reset(self) -> None:
        # Made anew: up to 5.17 a stock layer's `reset` zeroes its entries and keeps counting them.
        self._start_empty(self._live_model())
        self.window, self._forward_of, self._history, self._committed = None, None, History(), 0
        self._holds_images = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._settle()
        super().reorder_cache(beam_idx)
        self._history = self._history.reordered(beam_idx)

    def _settle(self) -> None:
        window = self.window
        if window is None:
            return
        if self.recurrent and not window.is_chain:
            raise ValueError(
                "a tree of tokens is still open, and a recurrent layer cannot keep all its branches: "
                "call `keep_in_cache` with the accepted nodes, or `crop_cache`, before the next forward"
            )
        self.close_window(range(window.length))

    def _replay(self, history: History, length: int) -> None:
        tokens = history.first(length)
        self.reset()
        if length == 0:
            return
        stack = decoder(self._live_model())
        kwargs = {"input_ids": tokens.ids, "position_ids": tokens.positions, takeover.cache_argument(stack): self}
        with torch.no_grad():
            stack(**kwargs, use_cache=True)
        self._settle()

    def _live_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model this cache was made for is gone")
        return model


def _check_exact(layer: Any, index: int, mixers: dict[int, takeover.Mixer], model: nn.Module) -> None:
    kind = _layer_type(model, index)
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, *_STATELESS):
        return
    if type(layer) in _RECURRENT and index in mixers:
        return
    raise NotImplementedError(
        f"layer {index} of {type(model).__name__} (`{kind}`, cached as {type(layer).__name__}) has no exact way to "
        "verify and take back tokens here, and is not run approximately"
    )


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def _layer_type(model: nn.Module, index: int) -> str:
    types = getattr(text_config(model), "layer_types", None)
    return types[index] if types else "attention"


@commits
def crop_cache(cache: Cache, length: int) -> None:
    """Keep the first `length` tokens of a cache, exactly, on every layer kind and Transformers release.

    Takes caches of `make_cache` and stock ones. `Cache.crop` itself took a length up to Transformers 5.17 and takes
    a negative count since.

    Raises:
        ValueError: where the cache holds fewer tokens, or a stock cache has recurrent layers.
    """
    if isinstance(cache, VerifiableCache):
        cache.truncate(length)
        return
    _refuse_recurrent(cache)
    held = cache.get_seq_length()
    if not 0 <= length <= held:
        raise ValueError(f"cannot keep {length} tokens of a cache that holds {held}")
    if length < held:
        cache.crop(length - held)


@commits
def keep_in_cache(cache: Cache, past_length: int, indices: Sequence[int] | torch.Tensor) -> None:
    """After a tree round, keep the accepted nodes of the last window, exactly, on every layer kind.

    Args:
        cache: of `make_cache`, or a stock one with attention layers only.
        past_length: tokens the cache held before the window.
        indices: the accepted nodes in order, counted within the window: a path from the committed tokens.

    Raises:
        ValueError: where the window does not start at `past_length`, `indices` is no path of it and a layer needs
            one, or a stock cache has recurrent layers.
    """
    nodes = indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)
    if isinstance(cache, VerifiableCache):
        if cache.window is None or cache.window.start != past_length:
            found = "no window is open" if cache.window is None else f"the open window starts at {cache.window.start}"
            raise ValueError(f"asked to keep nodes of the window after {past_length} tokens, but {found}")
        cache.close_window(nodes)
        return
    _refuse_recurrent(cache)
    length = cache.get_seq_length() - past_length
    if any(not 0 <= node < length for node in nodes):
        raise ValueError(f"kept nodes {nodes} are not all inside the window of {length} nodes after {past_length}")
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.cumulative_length >= layer.sliding_window:
            raise ValueError("a sliding-window layer of this cache has dropped what a tree needs: use `make_cache`")
        if isinstance(layer, DynamicLayer):
            keep_attention_window(layer, length, tuple(nodes))


def _refuse_recurrent(cache: Cache) -> None:
    if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        raise ValueError(
            "this cache has recurrent layers, whose state holds every token fed and cannot be cut: "
            "make it with `make_cache(model)`"
        )
