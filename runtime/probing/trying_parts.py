"""Claims about a model's parts, tensors and surroundings, each tried by looking or by one call."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.auditor.claim import Answer, Ask, Outcome
from ddaudit.runtime.models.architecture import decoder_layers, text_config
from ddaudit.runtime.probing.observing import run_one_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

WORKS = Answer(Outcome.WORKS)


def _weight(model: nn.Module, what: str) -> Answer:
    """A key of the state, `*` for what is filled in."""
    pattern = re.compile(r"[\w.]+".join(re.escape(part) for part in what.split("*")))
    if any(pattern.fullmatch(name) for name in model.state_dict()):
        return WORKS
    return Answer(Outcome.RAISES, f"no tensor is named `{what}`")


def _layer_tuple(model: nn.Module, _what: str) -> Answer | None:
    seen: list[Any] = []
    hooks = [layer.register_forward_hook(lambda module, args, out: seen.append(out)) for layer in decoder_layers(model)]
    try:
        run_one_token(model, None)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        return None
    tensors = sum(torch.is_tensor(each) for each in seen)
    return Answer(Outcome.SILENT, f"{tensors} of {len(seen)} layers return a tensor") if tensors else WORKS


def _layer_alone(model: nn.Module, _what: str) -> Answer:
    state = torch.zeros(1, 1, text_config(model).hidden_size, device="meta", dtype=torch.bfloat16)
    for index, layer in enumerate(decoder_layers(model)):
        try:
            layer(state)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            return Answer(Outcome.RAISES, f"layer {index}: {str(error).splitlines()[0][:160]}")
    return WORKS


def _first_state(model: nn.Module, _what: str) -> Answer | None:
    states = getattr(run_one_token(model, None).output, "hidden_states", None)
    if not states:
        return None
    count = len(decoder_layers(model))
    more = Answer(Outcome.SILENT, f"{len(states)} entries for {count} layers: the first is the embedding")
    return more if len(states) > count else WORKS


def _layer_named(model: nn.Module, what: str) -> Answer:
    layers = decoder_layers(model)
    without = sum(not any(name.split(".")[-1] == what for name, _ in layer.named_modules() if name) for layer in layers)
    left = Answer(Outcome.SILENT, f"{without} of {len(layers)} layers have no module named `{what}`")
    return left if without else WORKS


def _class(model: nn.Module, what: str) -> Answer:
    names = {base.__name__ for base in type(model).__mro__}
    if names & set(what.split("|")):
        return WORKS
    return Answer(Outcome.SILENT, f"it is no {what.replace('|', ' or ')}")


def _first_list(model: nn.Module, _what: str) -> Answer:
    layers = decoder_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList):
            return WORKS if module is layers else Answer(Outcome.SILENT, f"the first `ModuleList` is `{name}`")
    return Answer(Outcome.SILENT, "there is no `ModuleList`")


def _mask_attribute(model: nn.Module, what: str) -> Answer:
    if any(hasattr(module, what) for module in model.modules()):
        return WORKS
    return Answer(Outcome.SILENT, f"no module of the class has a `{what}`")


def _output_field(model: nn.Module, what: str) -> Answer | None:
    output = run_one_token(model, None).output
    if output is None:
        return None
    return WORKS if hasattr(output, what) else Answer(Outcome.RAISES, f"the output has no `{what}`")


def _template(_model: nn.Module, _what: str) -> Answer | None:
    from transformers import PreTrainedTokenizerBase

    given = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.get("return_dict")
    if given is None:
        return None
    return WORKS if given.default is False else Answer(Outcome.SILENT, f"`return_dict` is {given.default} by default")


def _attention(model: nn.Module, what: str) -> Answer | None:
    """None where the machine has the package: whether it serves is then for a run to say."""
    before = getattr(model.config, "_attn_implementation", None)
    try:
        model.set_attn_implementation(what)
    except (ImportError, ValueError) as error:
        return Answer(Outcome.RAISES, str(error).splitlines()[0][:160])
    model.set_attn_implementation(before)
    return None


def _synchronize(_model: nn.Module, _what: str) -> Answer | None:
    """None on a machine with CUDA."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.synchronize()
    except (AssertionError, RuntimeError) as error:
        return Answer(Outcome.RAISES, f"without CUDA: {str(error).splitlines()[0][:160]}")
    return WORKS


TRIES: dict[Ask, Callable[[nn.Module, str], Answer | None]] = {
    Ask.WEIGHT: _weight,
    Ask.LAYER_TUPLE: _layer_tuple,
    Ask.LAYER_ALONE: _layer_alone,
    Ask.FIRST_STATE: _first_state,
    Ask.LAYER_NAMED: _layer_named,
    Ask.CLASS: _class,
    Ask.FIRST_LIST: _first_list,
    Ask.MASK_ATTRIBUTE: _mask_attribute,
    Ask.OUTPUT_FIELD: _output_field,
    Ask.TEMPLATE_IDS: _template,
    Ask.ATTENTION: _attention,
    Ask.SYNCHRONIZE: _synchronize,
}


def mask_token(model: nn.Module, drafter: Mapping[str, Any]) -> Answer | None:
    """Whether the drafter's mask token is one that the target never says."""
    token = drafter.get("dflash_config", drafter).get("mask_token_id", drafter.get("mask_token_id"))
    head = model.get_output_embeddings()
    if token is None or head is None:
        return None
    said = f"the mask token {token} is one of the {head.weight.shape[0]} that the head can say"
    return Answer(Outcome.SILENT, said) if token < head.weight.shape[0] else WORKS


def non_causal(drafter: Mapping[str, Any]) -> Answer | None:
    """Whether every layer of the drafter may be bidirectional."""
    kinds = drafter.get("layer_types") or []
    if not kinds or "is_causal" in drafter:
        return None
    sliding = kinds.count("sliding_attention")
    said = f"{sliding} of the drafter's {len(kinds)} layers are sliding, and its config says nothing of `is_causal`"
    return Answer(Outcome.SILENT, said) if sliding else WORKS
