"""What `make_cache` installs on a model: hooks that open windows, and a detour in the recurrent mixers.

All of it stands aside when a forward runs without a cache of ours, so the stock model is there for comparison.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddaudit.runtime.caches.delta_window import GatedDeltaWindow, tree_forward
from ddaudit.runtime.caches.kernels import serve_cpu
from ddaudit.runtime.caches.recurrent import MixerCall, RecurrentWindow, SteppedWindow
from ddaudit.runtime.models.architecture import decoder, keep_layer_outputs, text_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers.cache_utils import LinearAttentionLayer

    from ddaudit.runtime.caches.cache import VerifiableCache

# Transformers 5.24 renamed the models' `past_key_values` and the mixers' `cache_params` to `cache`.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_STATE_CALLS = ("update_conv_state", "update_recurrent_state")


@dataclass(frozen=True)
class Mixer:
    """The recurrent mixer of one layer, found by its use of the cache."""

    kind: str
    over_tree: Callable[..., Any] | None
    """Its forward over a `GatedDeltaWindow`, for gated delta rules."""

    def window(self, layer: LinearAttentionLayer) -> RecurrentWindow:
        return SteppedWindow(layer) if self.over_tree is None else GatedDeltaWindow(layer, self.over_tree)


_installed: weakref.WeakKeyDictionary[nn.Module, dict[int, Mixer]] = weakref.WeakKeyDictionary()
_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_parameters: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()


def install(model: nn.Module) -> dict[int, Mixer]:
    """Prepare `model` for `VerifiableCache`, once; returns the recurrent mixer of each layer that has one.

    Raises:
        ValueError: where the decoder takes no cache, or reads in both directions.
        NotImplementedError: where one layer has two, whose states could not be told apart, or the state is kept
            elsewhere (xLSTM, RecurrentGemma).
    """
    if model not in _installed:
        stack = decoder(model)
        cache_argument(stack)
        # GPT-NeoX leaves `is_decoder` at False and is one: only an encoder stack reads both ways.
        if not getattr(text_config(model), "is_decoder", True) and type(stack).__name__.endswith("Encoder"):
            raise ValueError(f"{type(model).__name__} reads its text in both directions (`is_decoder` is False)")
        found = [module for module in stack.modules() if is_recurrent(module)]
        if getattr(model, "_is_stateful", False) and not found:
            raise NotImplementedError(
                f"{type(model).__name__} keeps a recurrent state outside of the cache, or in one of its own"
            )
        mixers = {module.layer_idx: Mixer(type(module).__name__, tree_forward(module)) for module in found}
        if len(mixers) < len(found):
            names = sorted({type(module).__name__ for module in found})
            raise NotImplementedError(
                f"{type(model).__name__} has several recurrent mixers in a layer: {', '.join(names)}"
            )
        serve_cpu(model)
        # Once, also where a model and its decoder are both prepared.
        new = {model, stack, *found} - set(_prepared)
        if stack in new:
            keep_layer_outputs(model)
        for module in new & {model, stack}:
            module.register_forward_pre_hook(_before_forward, with_kwargs=True)
            module.register_forward_hook(_after_forward, with_kwargs=True)
        for module in new & {*found}:
            module.forward = _detour(module)
        _prepared.update(new)
        _installed[model] = mixers
    return _installed[model]


def is_recurrent(module: nn.Module) -> bool:
    """Whether this module keeps a state in the cache, by the code of its forward."""
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    return hasattr(module, "layer_idx") and any(call in names for call in _STATE_CALLS)


def forward_parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of what this module's forward takes. Found once: a round asks four times, and each takes 40 us."""
    if module not in _parameters:
        _parameters[module] = tuple(inspect.signature(module.forward).parameters)
    return _parameters[module]


def cache_argument(module: nn.Module) -> str:
    """The name under which this module's forward takes a cache in the installed Transformers.

    Raises:
        ValueError: where it takes none.
    """
    parameters = forward_parameters(module)
    name = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
    if name is None:
        raise ValueError(f"the forward of {type(module).__name__} takes no cache under any of {_CACHE_ARGUMENTS}")
    return name


def _ours(kwargs: dict[str, Any]) -> VerifiableCache | None:
    given = (kwargs.get(name) for name in _CACHE_ARGUMENTS)
    return next((cache for cache in given if hasattr(cache, "open_window")), None)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = _by_name(forward_parameters(module), args, kwargs)
    cache = _ours(kwargs)
    if cache is None:
        return None
    # Under the name this module knows: Mamba swallows `past_key_values` unread and decodes without a cache.
    kwargs = {name: value for name, value in kwargs.items() if name not in _CACHE_ARGUMENTS}
    kwargs[cache_argument(module)] = cache
    cache.open_window(module, kwargs)
    return (), kwargs


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _ours(_by_name(forward_parameters(module), args, kwargs))
    if cache is not None:
        cache.forward_done(module)


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _detour(mixer: nn.Module) -> Callable[..., Any]:
    stock = mixer.forward
    names = tuple(inspect.signature(stock).parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        named = _by_name(names, args, kwargs)
        # A cache of ours, or the window of a forward that is being captured.
        name = next((name for name in _CACHE_ARGUMENTS if hasattr(named.get(name), "recurrent")), None)
        if name is None:
            return stock(*args, **kwargs)
        cache = named.pop(name)
        # Padding was refused when the window was opened, and a tree's mask is not for this layer.
        if "attention_mask" in named:
            named["attention_mask"] = None
        call = MixerCall(mixer, stock, name, named.pop(names[0]), named)
        return cache.recurrent[mixer.layer_idx].run(call)

    return forward
