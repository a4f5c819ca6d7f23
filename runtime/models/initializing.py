"""Random weights on which faults show, and what a model will weigh before it is built."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

TOY_PARAMETERS = 50_000_000
"""Models below this are made faults visible in; above it, the family's own initialisation stands."""
_WORKING_SHARE = 1.05
"""Weights and the least that a forward needs beside them."""


def build_random(build: Callable[[], nn.Module], device: torch.device, what: str, seed: int) -> nn.Module:
    """The module that `build` makes, its tensors created on `device` at once, seeded.

    It is built on the meta device first, so that one which does not fit is refused before memory is touched.
    """
    try:
        with torch.device("meta"):
            sketch = build()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sketch.parameters())
    except RuntimeError:
        num_bytes = 0  # a repository's class may read its tensors while it is built: on meta they have no values
    require_memory(num_bytes, device, what)
    torch.manual_seed(seed)
    with torch.device(device):
        model = build()
    if sum(tensor.numel() for tensor in model.parameters()) < TOY_PARAMETERS:
        make_faults_visible(model, seed)
    return model.eval().requires_grad_(False)


def make_faults_visible(model: nn.Module, seed: int) -> None:
    """Norm weights off their neutral value, strong mixers, slow decay.

    A plain small initialisation hides a double norm, a state that keeps rejected tokens and a wrong position:
    the residual stream is then nearly the embedding, and the state is forgotten within a few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            values = torch.rand(parameter.shape, generator=generator).mul(0.09).add(0.01).log()
        elif name.endswith("dt_bias"):
            values = noise * 0.5
        elif "norm" in name.lower():
            values = parameter.float().cpu() + 0.3 * noise
        elif parameter.dim() >= 2 and "embed" not in name:
            # Convolutions have few inputs a channel: the same gain keeps every mixer's output near its input.
            values = noise * 1.4 / math.sqrt(parameter[0].numel())
        else:
            values = noise if parameter.dim() >= 2 else parameter.float().cpu() + 0.1 * noise
        parameter.data.copy_(values.to(parameter))


def require_memory(num_bytes: int, device: torch.device, what: str) -> None:
    """Raise where `num_bytes` of weights will not fit into what is free on `device`."""
    free = free_bytes(device)
    needed = int(num_bytes * _WORKING_SHARE)
    if free is not None and needed > free:
        raise RunError(
            f"not enough memory for {what}: it needs {needed / 2**30:.1f} GiB on {device}, "
            f"{free / 2**30:.1f} GiB are free",
            "free memory, use a larger device, a smaller `--dtype`, or a smaller model such as `--model tiny-hybrid`",
        )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device, None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes: dict[str, Any] = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    return int(sizes["MemAvailable"]) * 1024 if "MemAvailable" in sizes else None
