"""What each parameter of an entry point is given: bound by name and annotation, or named in an error."""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NO_STOP_TOKEN = -1
"""Given where a stop token is asked for and none is wanted: no id equals it."""

_DRAFTER_NAMES = {"drafter", "draft_model", "draft", "draft_net", "drafter_model", "assistant", "assistant_model"}
_DRAFTER_NAMES |= {"small_model", "approx_model", "ssm", "speculator", "proposer", "student", "dflash", "eagle"}
_TARGET_NAMES = {"target", "target_model", "base_model", "verifier", "llm", "lm", "big_model", "large_model"}
_TARGET_NAMES |= {"main_model", "target_llm", "teacher", "causal_lm", "backbone"}
_NAMES = {
    "tokenizer": {"tokenizer", "tok", "processor"},
    "input_ids": {"input_ids", "prompt_ids", "prompt_tokens", "input_tokens", "context_ids", "token_ids", "ids"}
    | {"prefix", "prefix_ids", "inputs", "tokens", "idx", "prompt", "prompt_text", "text", "input_text"},
    "attention_mask": {"attention_mask"},
    "mask_token_id": {"mask_token_id", "mask_id", "mask_token"},
    "max_new_tokens": {"max_new_tokens", "max_tokens", "num_new_tokens", "new_tokens", "gen_len", "gen_length"}
    | {"max_gen_len", "max_gen_tokens", "max_gen_toks", "num_tokens", "n_tokens", "max_output_tokens"}
    | {"max_steps", "generation_length", "num_tokens_to_generate"},
    "max_length": {"max_length", "max_len", "max_seq_len", "max_total_tokens", "total_length"},
    "block_size": {"block_size", "block_len", "block_length", "draft_block_size"},
    "num_draft_tokens": {"num_draft_tokens", "draft_len", "draft_length", "gamma", "lookahead", "speculate_k"}
    | {"num_speculative_tokens", "num_assistant_tokens", "speculation_length", "k", "K", "n_draft", "draft_k"},
    "stop_token_ids": {"stop_token_ids", "stop_ids", "stop_tokens", "eos_token_ids", "eos_ids", "stop_token_id"}
    | {"eos_token_id", "eos_id", "eos", "eos_token", "stop_id"},
    "target_layer_ids": {"target_layer_ids", "tap_layer_ids", "layer_ids", "context_layer_ids"},
    "temperature": {"temperature", "temp"},
    "do_sample": {"do_sample"},
    "top_p": {"top_p"},
    "device": {"device"},
    "dtype": {"dtype", "torch_dtype"},
    "seed": {"seed"},
    "generator": {"generator"},
}
_ROLE_OF = {name: role for role, names in _NAMES.items() for name in names}


@dataclass(frozen=True)
class Offer:
    """What a run can give to an entry for one prompt."""

    target: Any
    drafter: Any
    tokenizer: Any
    prompt_ids: tuple[int, ...]
    prompt_text: str | None
    max_new_tokens: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    seed: int
    temperature: float = 0.0


def parameter_names(function: Callable[..., Any], owner: type | None) -> tuple[str, ...]:
    """What an entry takes, with what its class takes where one has to be made. `**` stands for any keyword."""
    parameters = list(inspect.signature(function).parameters.values())
    if owner is not None and not _is_drafter(owner):
        parameters += _constructor_parameters(owner).values()
    return tuple("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters)


def sampling_temperature(parameters: Sequence[str], arguments: Mapping[str, Any], default: float) -> float:
    """What an entry is run at: the value passed by `--arg`, else `default` where it takes a temperature, else 0."""
    names = [name for name in (*arguments, *parameters) if _ROLE_OF.get(name) == "temperature"]
    value = arguments.get(names[0], default) if names else 0.0
    return float(value) if isinstance(value, (int, float)) else 0.0


def bind(
    function: Callable[..., Any], owner: type | None, arguments: Mapping[str, Any], offer: Offer
) -> dict[str, Any]:
    """Keyword arguments for `function`. A required parameter that nothing fits is an error that names it.

    `self` is the drafter for a method of the drafter's class; an instance of any other class is made.
    """
    parameters = dict(inspect.signature(function).parameters)
    receiver: dict[str, Any] = {}
    if owner is not None and "self" in parameters:
        del parameters["self"]
        if _is_drafter(owner):
            _require_drafter("self", offer)
            receiver["self"] = offer.drafter
        else:
            constructor = _constructor_parameters(owner)
            own = {name: value for name, value in arguments.items() if name in constructor}
            arguments = {name: value for name, value in arguments.items() if name in parameters or name not in own}
            receiver["self"] = owner(**_bind(constructor, _constructor_hints(owner), own, offer, owner.__name__))
    return receiver | _bind(
        parameters, _type_hints(function), arguments, offer, getattr(function, "__name__", type(function).__name__)
    )


def takes_drafter(function: Callable[..., Any], owner: type | None) -> bool:
    """Whether an entry is given a drafter: in a parameter of its own or of its class, or as `self`."""
    return _receiver_is_drafter(function, owner) or bool(_drafter_hints(function, owner))


def drafter_class(function: Callable[..., Any], owner: type | None) -> type | None:
    """The repository's own drafter class, from the method's class or the annotation of the drafter parameter."""
    if _receiver_is_drafter(function, owner):
        return owner
    classes = map(_plain_class, _drafter_hints(function, owner))
    return next((found for found in classes if _is_own_module_class(found)), None)


def _receiver_is_drafter(function: Callable[..., Any], owner: type | None) -> bool:
    return owner is not None and "self" in inspect.signature(function).parameters and _is_drafter(owner)


def _drafter_hints(function: Callable[..., Any], owner: type | None) -> list[Any]:
    """Annotations of the parameters that take a drafter, None for one without; those of the class included."""
    parameters = dict(inspect.signature(function).parameters)
    hints = _type_hints(function)
    if owner is not None and "self" in parameters:
        del parameters["self"]
        parameters |= _constructor_parameters(owner)
        hints |= _constructor_hints(owner)
    return [hints.get(name) for name, role in _model_roles(parameters, hints).items() if role == "drafter"]


def _bind(
    parameters: Mapping[str, inspect.Parameter],
    hints: Mapping[str, Any],
    arguments: Mapping[str, Any],
    offer: Offer,
    of: str,
) -> dict[str, Any]:
    roles = _model_roles(parameters, hints)
    bound: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in arguments:
            bound[name] = arguments[name]
            continue
        role = roles.get(name) or _ROLE_OF.get(name)
        given, value = _value_for(role, name, parameter, hints.get(name), offer)
        if given:
            bound[name] = value
        elif parameter.default is parameter.empty:
            raise RunError(
                f"nothing to give to the required parameter `{name}` of `{of}`", f"pass it: `--arg {name}=VALUE`"
            )
    return bound | {name: value for name, value in arguments.items() if name not in parameters}


def _is_drafter(owner: type) -> bool:
    """A module class of the repository that is no wrapper around a target."""
    roles = _model_roles(_constructor_parameters(owner), _constructor_hints(owner))
    return _is_own_module_class(owner) and "target" not in roles.values()


def _constructor_parameters(owner: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(owner).parameters)


def _constructor_hints(owner: type) -> dict[str, Any]:
    return _type_hints(vars(owner).get("__init__", owner))


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # a forward reference that cannot be resolved leaves the annotations as they stand
        return dict(getattr(function, "__annotations__", {}))


def _model_roles(parameters: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, str]:
    """Which parameters are the target and the drafter. `model` is the drafter where another one is the target."""
    roles: dict[str, str] = {}
    for name in parameters:
        if name in _DRAFTER_NAMES:
            roles[name] = "drafter"
        elif name in _TARGET_NAMES:
            roles[name] = "target"
        elif _is_own_module_class(_plain_class(hints.get(name))):
            roles[name] = "drafter"
    if "model" in parameters:
        roles["model"] = "drafter" if "target" in roles.values() else "target"
    return roles


def _plain_class(hint: Any) -> type | None:
    """The class of an annotation, through `X | None`."""
    if isinstance(hint, type):
        return hint
    classes = [part for part in typing.get_args(hint) if isinstance(part, type) and part is not type(None)]
    return classes[0] if len(classes) == 1 else None


def _is_own_module_class(hint: type | None) -> bool:
    """An `nn.Module` class of the repository itself, as opposed to one of torch or Transformers."""
    if hint is None or not issubclass(hint, torch.nn.Module):
        return False
    return hint.__module__.partition(".")[0] not in ("torch", "transformers")


def _value_for(role: str | None, name: str, parameter: inspect.Parameter, hint: Any, offer: Offer) -> tuple[bool, Any]:
    """Whether there is a value for that role, and the value."""
    required = parameter.default is parameter.empty
    device = offer.target.device
    if role == "stop_token_ids":
        return _stop_value(name, parameter, hint, offer)
    if role == "input_ids":
        return True, _prompt_value(name, hint, offer)
    if role == "num_draft_tokens" and not required:
        return False, None
    if role == "top_p" and not required and not offer.temperature:
        return False, None
    values: dict[str, Any] = {
        "target": offer.target,
        "drafter": offer.drafter,
        "attention_mask": torch.ones(1, len(offer.prompt_ids), dtype=torch.long, device=device),
        "mask_token_id": offer.mask_token_id,
        "max_new_tokens": offer.max_new_tokens,
        "max_length": len(offer.prompt_ids) + offer.max_new_tokens,
        "block_size": offer.block_size,
        "num_draft_tokens": offer.block_size - 1,
        "target_layer_ids": list(offer.target_layer_ids),
        "temperature": offer.temperature,
        "do_sample": offer.temperature > 0,
        "top_p": 1.0,
        "device": device,
        "dtype": offer.target.dtype,
        "seed": offer.seed,
        "generator": None,
    }
    if role == "tokenizer":
        if offer.tokenizer is None and required:
            raise RunError(
                f"`{name}` wants a tokenizer and the model has none", "use a checkpoint folder with a tokenizer"
            )
        return offer.tokenizer is not None, offer.tokenizer
    if role == "drafter" and required:
        _require_drafter(name, offer)
    if role == "drafter" and offer.drafter is None:
        return False, None
    return (True, values[role]) if role in values else (False, None)


def _require_drafter(name: str, offer: Offer) -> None:
    if offer.drafter is None:
        raise RunError(f"`{name}` wants a drafter", "give one: `--drafter scripted:0.7`, `random` or a folder")


def _prompt_value(name: str, hint: Any, offer: Offer) -> Any:
    if hint is str or name in ("prompt_text", "text", "input_text"):
        if offer.prompt_text is None:
            raise RunError(f"`{name}` wants text, and there are only token ids", "give `--prompt TEXT`")
        return offer.prompt_text
    ids = torch.tensor([offer.prompt_ids], dtype=torch.long, device=offer.target.device)
    return ids[0].tolist() if typing.get_origin(hint) in (list, tuple) or hint is list else ids


def _stop_value(name: str, parameter: inspect.Parameter, hint: Any, offer: Offer) -> tuple[bool, Any]:
    takes_one = name.endswith("_id") or name in ("eos", "eos_token")
    if offer.stop_token_ids:
        return True, offer.stop_token_ids[0] if takes_one else list(offer.stop_token_ids)
    if parameter.default is not parameter.empty and not parameter.default:
        return False, None
    if type(None) in typing.get_args(hint):
        return True, None
    return True, NO_STOP_TOKEN if takes_one else [NO_STOP_TOKEN]
