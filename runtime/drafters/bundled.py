"""The bundled drafter in a repository's code: weights for the repository's own class, or a class in its place."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ddaudit.runtime.drafters.dflash import DFlashDrafter

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLED_WITH = {"position_ids", "noise_embedding", "target_hidden"}


def is_called_as_dflash(own_class: type | None) -> bool:
    """Whether the repository's drafter takes what a DFlash drafter takes."""
    if own_class is None or not issubclass(own_class, PreTrainedModel):
        return False
    return set(_signature(own_class).parameters) >= _CALLED_WITH


def class_for_weights(own_class: type, build: Callable[[type], torch.nn.Module]) -> type:
    """The repository's own class where its weights are those of the public layout, else one of ours in its place.

    `build` makes a class from the drafter's configuration.
    """
    try:
        with torch.device("meta"):
            own, public = (_shapes(build(each)) for each in (own_class, DFlashDrafter))
        if own == public:
            return own_class
    except Exception:  # a class that is not built from such a configuration is another kind of drafter
        pass
    signature = _signature(own_class)
    names = list(signature.parameters)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # In the repository's own order of parameters, which its calls may rely on.
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given |= given.pop(rest, {})
        del given[names[0]]
        return DFlashDrafter.forward(self, **given)

    namespace = {"forward": forward, "stands_in_for": own_class.__name__}
    return type(f"DFlash{own_class.__name__}", (DFlashDrafter, own_class), namespace)


def _signature(own_class: type) -> inspect.Signature:
    return inspect.signature(own_class.forward)  # type: ignore[attr-defined]


def _shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
