"""Transformers takes flash-linear-attention's kernels wherever that package imports; on a CPU they cannot run."""

from __future__ import annotations

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_KERNEL = re.compile(r"gated_delta_rule$|causal_conv1d_(fn|update)$")


def serve_cpu(model: nn.Module) -> None:
    """Let this model's code run its recurrent layers on the CPU with Transformers' torch versions of the kernels.

    Transformers 5.24 chooses a kernel once, at import, whatever the device of the tensors: with Triton installed a
    model on the CPU raises. Calling it again changes nothing; tensors on a GPU go where they went.
    """
    for module_class in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(module_class.forward)
        if not inspect.isfunction(forward):
            continue
        for name in forward.__code__.co_names:
            kernel = forward.__globals__.get(name)
            if kernel is not None and _KERNEL.search(name) and inspect.unwrap(kernel) is not kernel:
                forward.__globals__[name] = _by_device(kernel)


def _by_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    reference = inspect.unwrap(kernel)
    if getattr(kernel, "serves_cpu", False):
        return kernel

    @functools.wraps(reference)
    def call(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return (kernel if hidden_states.is_cuda else reference)(hidden_states, *args, **kwargs)

    call.serves_cpu = True  # type: ignore[attr-defined]
    return call
