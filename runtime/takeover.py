"""What `make_cache` installs on a model: hooks that open windows, and tree-aware kernels in recurrent mixers.

All of it stands aside when a forward runs without a cache of ours, so the stock model is there for comparison.
"""

from __future__ import annotations

import inspect
import re
import types
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from ddaudit.runtime.architecture import decoder, final_norm, keep_residual, unwrap
from ddaudit.runtime.kernels import serve_cpu

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from ddaudit.runtime.cache import VerifiableCache
    from ddaudit.runtime.layers import GatedDeltaLayer

# Transformers 5.24 renamed the models' `past_key_values` and the mixers' `cache_params` to `cache`.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")

_DELTA_RULE = re.compile(r"(chunk|recurrent)_gated_delta_rule$")
_CONVOLUTION = re.compile(r"causal_conv1d_(fn|update)$")

_installed: weakref.WeakKeyDictionary[nn.Module, dict[int, type[nn.Module]]] = weakref.WeakKeyDictionary()


def install(model: nn.Module) -> dict[int, type[nn.Module]]:
    """Prepare `model` for `VerifiableCache`, once; returns the mixer class of each layer with an exact method."""
    model = unwrap(model)
    if model not in _installed:
        serve_cpu(model)
        stack = decoder(model)
        for module in {model, stack}:
            module.register_forward_pre_hook(_before_forward, with_kwargs=True)
            module.register_forward_hook(_after_forward, with_kwargs=True)
        keep_residual(stack, final_norm(model))
        mixers = {}
        for module in stack.modules():
            kernels = _gated_delta_kernels(module)
            if kernels:
                module.forward = _tree_forward(module, kernels)
                mixers[module.layer_idx] = type(module)
        _installed[model] = mixers
    return _installed[model]


def cache_argument(module: nn.Module) -> str:
    """The name under which this module's forward takes a cache in the installed Transformers.

    Raises:
        ValueError: where it takes none.
    """
    parameters = inspect.signature(module.forward).parameters
    name = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
    if name is None:
        raise ValueError(f"the forward of {type(module).__name__} takes no cache under any of {_CACHE_ARGUMENTS}")
    return name


def _ours(kwargs: dict[str, Any]) -> VerifiableCache | None:
    given = (kwargs.get(name) for name in _CACHE_ARGUMENTS)
    return next((cache for cache in given if hasattr(cache, "open_window")), None)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = _ours(kwargs)
    if cache is None:
        return None
    names = list(inspect.signature(module.forward).parameters)
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    cache.open_window(module, kwargs)
    return (), kwargs


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _ours(kwargs)
    if cache is not None:
        cache.forward_done(module)


def _gated_delta_kernels(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """The kernels that a gated delta rule mixer's forward calls by name, empty for any other module."""
    if not hasattr(module, "layer_idx"):
        return {}
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names
    delta = {name for name in names if _DELTA_RULE.search(name)}
    convolution = {name for name in names if _CONVOLUTION.search(name)}
    if not delta or not convolution:
        return {}
    return {name: forward.__globals__[name] for name in delta | convolution if name in forward.__globals__}


def _tree_forward(mixer: nn.Module, kernels: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The stock forward of `mixer` with its kernels handed to the layer's cache.

    The kernels are globals of the modelling module (5.17 to 5.24), so the stock code runs over a copy of those
    globals: projections, gates and head layouts stay each family's own.
    """
    stock = mixer.forward
    plain = inspect.unwrap(type(mixer).forward)
    current: list[GatedDeltaLayer] = []

    def convolve(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return current[-1].convolve(kernel, *args, **kwargs)

    def delta_rule(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return current[-1].delta_rule(kernel, *args, **kwargs)

    replaced = {
        name: partial(delta_rule if _DELTA_RULE.search(name) else convolve, kernel) for name, kernel in kernels.items()
    }
    over_tree = types.FunctionType(
        plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    over_tree.__kwdefaults__ = plain.__kwdefaults__

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = _ours(kwargs)
        if cache is None:
            return stock(*args, **kwargs)
        current.append(cache.layers[mixer.layer_idx])
        try:
            return over_tree(mixer, *args, **kwargs)
        finally:
            current.pop()

    return forward
