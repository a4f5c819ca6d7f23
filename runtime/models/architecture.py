"""Where a model really keeps its layers, final norm, configuration and end tokens, whatever its nesting."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

# The final norm by the names that families give it: most; GPT-2, Falcon; Jamba, Falcon-H1; OPT, GPT-NeoX,
# Phi; Mamba; LFM2, whose final norm is called after the embedding; BioGPT, XGLM.
_FINAL_NORMS = (
    "norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "embedding_norm",
    "layer_norm",
)  # fmt: skip

_LAYER_LISTS = ("layers", "h", "blocks")
# Marks on tensors: which layer's output it is, and the last layer's output behind a normed state.
_LAYER = "_ddaudit_layer"
_RESIDUAL = "_ddaudit_residual"


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, `torch.compile` and PEFT wrappers."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model


def text_config(model: nn.Module) -> Any:
    """The configuration that describes the decoder: the nested one of a composite model, else the flat one."""
    config = unwrap(model).config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def decoder(model: nn.Module) -> nn.Module:
    """The module that owns the decoder layers and the final norm.

    Raises:
        ValueError: where no module holds a `ModuleList` of `num_hidden_layers` entries.
    """
    model = unwrap(model)
    stack = model.get_decoder() if hasattr(model, "get_decoder") else model
    # Before 5.0, and on some families still, `get_decoder` stops one module short of the layers.
    for module in stack.modules():
        if _layer_list(module, text_config(model).num_hidden_layers) is not None:
            return module
    raise ValueError(
        f"{type(model).__name__} has no list of {text_config(model).num_hidden_layers} decoder layers: "
        "a decoder-only Transformers model is needed"
    )


def _layer_list(module: nn.Module, num_layers: int) -> nn.ModuleList | None:
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    # LongCat counts two attention layers in each decoder layer, so the number alone does not find them all.
    named = [getattr(module, name, None) for name in _LAYER_LISTS]
    return next((child for child in lists if len(child) == num_layers or any(child is each for each in named)), None)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, first to last.

    Raises:
        ValueError: as `decoder` does.
    """
    layers = _layer_list(decoder(model), text_config(model).num_hidden_layers)
    assert layers is not None
    return layers


def final_norm(model: nn.Module) -> nn.Module:
    """The norm between the last decoder layer and the head.

    Raises:
        ValueError: where the decoder has none of the names that families give it; GPT-style models without a
            final norm do not have one at all.
    """
    stack = decoder(model)
    for name in _FINAL_NORMS:
        norm = getattr(stack, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ValueError(f"{type(stack).__name__} has no final norm under any of the names {', '.join(_FINAL_NORMS)}")


def keep_layer_outputs(model: nn.Module) -> None:
    """Hook a model so that `layer_output` finds each layer's output, also the last one behind the final norm."""
    stack, layers = decoder(model), decoder_layers(model)
    last: list[torch.Tensor] = []

    def after_layer(index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        setattr(state, _LAYER, index)
        if index == len(layers) - 1:
            last[:] = [state]

    # On the decoder's own output: GPT-2 returns a view of what its norm returned.
    def after_stack(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if last:
            setattr(output[0], _RESIDUAL, last.pop())

    for index, layer in enumerate(layers):
        layer.register_forward_hook(partial(after_layer, index))
    stack.register_forward_hook(after_stack)


def residual_of(state: torch.Tensor) -> torch.Tensor | None:
    """The residual stream before the final norm, on the state that `keep_layer_outputs` left it on; else None."""
    return getattr(state, _RESIDUAL, None)


def marked(copy: torch.Tensor, state: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """`copy` with what `keep_layer_outputs` left on `state`, whose residual stream is `residual` in the copy."""
    if hasattr(state, _LAYER):
        setattr(copy, _LAYER, getattr(state, _LAYER))
    if residual is not None:
        setattr(copy, _RESIDUAL, marked(residual, getattr(state, _RESIDUAL), None))
    return copy


def layer_output(outputs: Any, layer_id: int) -> torch.Tensor:
    """The residual stream `[B, T, D]` after one decoder layer, never the normed last state.

    `hidden_states` has one entry more than the model has layers: the first is the embeddings, and the last is
    taken after the final norm, so for the last layer `hidden_states[layer_id + 1]` is another tensor.

    Args:
        outputs: a model output with `hidden_states`, or that tuple.
        layer_id: 0 is the first decoder layer; negative counts from the last.

    Raises:
        ValueError: without hidden states, for a layer that is not among them, and for the last layer of a
            forward whose residual stream was not kept (`make_cache` makes the model keep it).
    """
    states: Sequence[torch.Tensor] | None = getattr(outputs, "hidden_states", outputs)
    if states is None:
        raise ValueError("the output holds no hidden states: call the model with `output_hidden_states=True`")
    num_layers = len(states) - 1
    index = layer_id + num_layers if layer_id < 0 else layer_id
    if not 0 <= index < num_layers:
        raise ValueError(f"layer {layer_id} asked of a model with {num_layers} decoder layers")
    # Most models put the embeddings first, Mamba does not: a marked state is found wherever it stands.
    marked = (state for state in states if getattr(state, _LAYER, None) == index)
    state = next(marked, states[index + 1])
    if state is None:
        raise ValueError(f"the forward did not keep the output of layer {layer_id}: name it in `output_hidden_states`")
    if index == num_layers - 1 and getattr(state, _LAYER, None) != index:
        state = getattr(state, _RESIDUAL, None)
        if state is None:
            raise ValueError(
                f"layer {layer_id} is the last: its entry in `hidden_states` is after the final norm, and this "
                "forward did not keep what came before. Make the cache with `make_cache(model)`, or tap another layer"
            )
    return state


def stop_token_ids(model: nn.Module, tokenizer: Any = None) -> list[int]:
    """Every end token, ascending: of the generation config, both model configs, and the tokenizer if given.

    Qwen3's tokenizer names one end token and its generation config two; a loop that knows only the first runs on.
    """
    model = unwrap(model)
    sources = (getattr(model, "generation_config", None), model.config, text_config(model), tokenizer)
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)
