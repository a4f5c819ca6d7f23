"""Reading a model class on the `meta` device: where its parts are, and what one token through it leaves behind."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddaudit.auditor.profile import ClassFacts
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.models.architecture import decoder_layers, final_norm, text_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "layer_types", "sliding_window", "num_experts",
    "num_experts_per_tok", "use_cache", "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id",
    "rope_parameters", "rope_theta", "rope_scaling", "torch_dtype", "dtype",
    "n_embd", "n_layer", "n_head", "n_positions", "n_ctx",
)  # fmt: skip
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
# What only moves numbers or changes their type, and so is no scaling or cap.
_MOVES = re.compile(
    r"^(_to_copy|view|_unsafe_view|slice|select|alias|t|transpose|permute|expand|clone|detach|reshape|index|unsqueeze"
    r"|squeeze|arange|lift_fresh|empty\w*|copy_|mm|addmm|bmm|matmul|linear|constant_pad_nd|as_strided|cat)$"
)


@dataclass
class OneToken:
    """What one token through the model showed."""

    output: Any = None
    cache: Any = None
    refused: str = ""
    is_last_normed: bool = False
    logit_operations: list[str] = field(default_factory=list)


def facts_of(model: nn.Module, loaders: tuple[str, ...]) -> ClassFacts:
    """Everything a probe says about one class."""
    names = {module: name for name, module in model.named_modules()}
    config = model.config
    text_path, text = text_config_path(model)
    parameters = inspect.signature(model.forward).parameters
    norm = _final_norm(model)
    layers = decoder_layers(model)
    seen = run_one_token(model, norm)
    states = cache_states(seen.cache, len(layers))
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tensors = list({id(each): each for each in model.parameters()}.values())
    hidden = getattr(seen.output, "hidden_states", None) or ()
    rope = getattr(text, "rope_parameters", None) or {}
    return ClassFacts(
        name=type(model).__name__,
        loaders=loaders,
        input_embeddings=delegation(model, "get_input_embeddings", names),
        output_embeddings=delegation(model, "get_output_embeddings", names),
        layers=names[layers],
        final_norm=names[norm] if norm is not None else "",
        modules=tuple(name for name in names.values() if name and not re.search(r"(^|\.)\d+(\.|$)", name)),
        layer_parts=_layer_parts(layers, states.kinds),
        config_class=type(config).__name__,
        text_config=text_path,
        config_fields=dict(_fields(config, text, text_path)),
        forward_arguments=tuple(name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD),
        cache_arguments=_cache_arguments(model, seen),
        takes_any_argument=any(each.kind is each.VAR_KEYWORD for each in parameters.values()),
        layer_kinds=states.kinds,
        recurrent_layers=states.recurrent_layers,
        recurrent_bytes=states.recurrent_bytes,
        conv_bytes=states.conv_bytes,
        kv_bytes_per_token=states.kv_bytes,
        cache_class=type(seen.cache).__name__ if seen.cache is not None else "",
        cache_argument=_cache_argument(model),
        is_croppable=bool(getattr(seen.cache, "is_croppable", False)),
        num_hidden_states=len(hidden),
        is_last_hidden_state_normed=seen.is_last_normed,
        is_tied=getattr(inputs, "weight", None) is not None
        and getattr(outputs, "weight", None) is getattr(inputs, "weight", None),
        logit_operations=tuple(seen.logit_operations),
        rope=dict(rope),
        has_mrope="mrope_section" in str(rope),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        num_parameters=sum(each.numel() for each in tensors),
        weight_bytes=sum(each.numel() * each.element_size() for each in tensors),
        refused=seen.refused,
    )


def delegation(model: nn.Module, method: str, names: dict[Any, str]) -> tuple[str, ...]:
    """The modules whose `method` runs when the model's is called, then the module it returns that has the weight."""
    asked: list[str] = []

    def on_call(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == method:
            owner = names.get(frame.f_locals.get("self"))
            if owner is not None and owner not in asked:
                asked.append(owner)

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        found = getattr(model, method)()
    finally:
        sys.setprofile(before)
    if found is None:
        return ()
    while "weight" not in dict(found.named_parameters(recurse=False)) and any(True for _ in found.children()):
        asked.append(names[found])
        found = next(found.children())
    return (*asked, names[found])


def text_config_path(model: nn.Module) -> tuple[str, Any]:
    """Where the decoder's configuration stands below the model, and the configuration."""
    config, text = model.config, text_config(model)
    if text is config:
        return "config", config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is text:
            return f"config.{name}", text
        for inner in getattr(part, "sub_configs", {}):
            if getattr(part, inner, None) is text:
                return f"config.{name}.{inner}", text
    return "config.get_text_config()", text


def _fields(config: Any, text: Any, text_path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Where each field answers: at the top, and in the text configuration where that is another object."""
    places = {"config": config, text_path: text}
    for name in FIELDS:
        found = tuple(f"{place}.{name}" for place, each in places.items() if answers(each, name))
        if found:
            yield name, found


def answers(config: Any, name: str) -> bool:
    """Whether reading the field gives a value. Gemma 4 refuses some that differ between its layers."""
    try:
        getattr(config, name)
    except Exception:
        return False
    return True


def _layer_parts(layers: nn.ModuleList, kinds: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    parts: dict[str, tuple[str, ...]] = {}
    if len(kinds) != len(layers):
        kinds = ("",) * len(layers)
    for layer, kind in zip(layers, kinds, strict=True):
        parts.setdefault(kind, tuple(name for name, _ in layer.named_children()))
    return parts


def _final_norm(model: nn.Module) -> nn.Module | None:
    try:
        return final_norm(model)
    except ValueError:
        return None


def _cache_arguments(model: nn.Module, seen: OneToken) -> tuple[str, ...]:
    """The names under which a cache is taken and comes back, old ones that a decorator takes among them."""
    if seen.refused or seen.cache is None:
        return ()
    cache = run_one_token(model, None).cache
    return tuple(name for name in CACHE_ARGUMENTS if run_one_token(model, None, **{name: cache}).cache is cache)


def _cache_argument(model: nn.Module) -> str:
    try:
        return cache_argument(model)
    except ValueError:
        return ""


def run_one_token(model: nn.Module, norm: nn.Module | None, **arguments: Any) -> OneToken:
    """One forward of one token on the `meta` device, with the model's own stock cache unless one is given."""
    seen = OneToken()
    normed: list[torch.Tensor] = []
    operations = _Operations()
    hooks = []

    def after_norm(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        normed[:] = [output]
        # What came before does not count.
        operations.found.clear()

    if norm is not None:
        hooks.append(norm.register_forward_hook(after_norm))
    ids = torch.ones(1, 1, dtype=torch.long, device="meta")
    places = {"position_ids": torch.zeros(1, 1, dtype=torch.long, device="meta")}
    given = {"input_ids": ids, "use_cache": True, "output_hidden_states": True, **arguments}
    try:
        with torch.no_grad(), torch.device("meta"), _without_padding(model):
            try:
                with operations:
                    seen.output = model(**given)
            except Exception:
                # Bamba asks its first layer's cache, a linear one, where the token stands.
                if "position_ids" not in inspect.signature(model.forward).parameters:
                    raise
                operations.found.clear()
                with operations:
                    seen.output = model(**given, **places)
    except Exception as error:
        seen.refused = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        return seen
    finally:
        for hook in hooks:
            hook.remove()
    seen.cache = next((value for value in seen.output.values() if hasattr(value, "layers")), None)
    seen.cache = seen.cache if seen.cache is not None else getattr(seen.output, "past_key_values", None)
    seen.logit_operations = list(dict.fromkeys(operations.found)) if norm is not None else []
    states = getattr(seen.output, "hidden_states", None)
    if states and normed:
        # By storage: GPT-2 returns a view of what its norm returned.
        seen.is_last_normed = _storage(normed[0]) == _storage(states[-1])
    return seen


@contextmanager
def _without_padding(model: nn.Module) -> Iterator[None]:
    """No padding token: Transformers would look for it among ids that are not there, to warn."""
    configs = [model.config, text_config(model)]
    before = [getattr(each, "pad_token_id", None) for each in configs]
    for each in configs:
        each.pad_token_id = None
    try:
        yield
    finally:
        for each, token_id in zip(configs, before, strict=True):
            each.pad_token_id = token_id


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Operations(TorchDispatchMode):
    """Names of the operations on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not _MOVES.match(name):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class CacheStates:
    """What a cache holds after one token, by layer and in bytes."""

    kinds: tuple[str, ...] = ()
    recurrent_layers: tuple[int, ...] = ()
    recurrent_bytes: int = 0
    conv_bytes: int = 0
    kv_bytes: int = 0


def cache_states(cache: Any, num_layers: int) -> CacheStates:
    """Read from the tensors that the forward put there, whatever model it was."""
    kinds, recurrent, sizes = [], [], {"recurrent": 0, "conv": 0, "kv": 0}
    layers = list(getattr(cache, "layers", ()))
    # Caches of one model only, such as MiniMax's, keep the states of some layers in a list beside the others.
    lists = [value for name, value in vars(cache).items() if name != "layers"] if layers else []
    extra = [value for value in lists if isinstance(value, list) and len(value) >= num_layers]
    for index, layer in enumerate(layers):
        held = {
            "recurrent": _tensors(getattr(layer, "recurrent_states", None)),
            "conv": _tensors(getattr(layer, "conv_states", None)),
            "kv": [*_tensors(getattr(layer, "keys", None)), *_tensors(getattr(layer, "values", None))],
        }
        for each in extra:
            held["recurrent"] += _tensors(each[index]) if index < len(each) else []
        for name, tensors in held.items():
            sizes[name] += sum(each.numel() * each.element_size() for each in tensors)
        if held["recurrent"]:
            recurrent.append(index)
        kinds.append(_kind(layer, held))
    return CacheStates(tuple(kinds), tuple(recurrent), sizes["recurrent"], sizes["conv"], sizes["kv"])


def _kind(layer: Any, held: dict[str, list[torch.Tensor]]) -> str:
    attention = ""
    if any(each.numel() for each in held["kv"]):
        attention = "sliding" if "Sliding" in type(layer).__name__ else "full"
    if held["recurrent"]:
        return f"linear+{attention}" if attention else "linear"
    return attention or ("conv" if held["conv"] else "none")


def _tensors(value: Any) -> list[torch.Tensor]:
    if torch.is_tensor(value):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [each for item in items for each in _tensors(item)]
