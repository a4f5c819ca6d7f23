"""The drafter of a run: the repository's own class with real or random weights, or a scripted one."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from ddaudit.runtime.drafters.bundled import class_for_weights, is_called_as_dflash
from ddaudit.runtime.drafters.dflash import DFlashDrafter
from ddaudit.runtime.drafters.scripted import AccompaniedDrafter, ScriptedDrafter, companion_of, parse_scripted
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models.architecture import text_config
from ddaudit.runtime.models.hub import not_cached, why_offline
from ddaudit.runtime.models.initializing import build_random, require_memory
from ddaudit.runtime.models.loading import Target, checkpoint_bytes, looks_like_hub_id, read_config, require_weights
from ddaudit.runtime.models.profile import load_profile
from ddaudit.runtime.replay.drafter import replay_drafter
from ddaudit.runtime.tiny import DRAFTER, TINY

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_DEFAULT_BLOCK_SIZE = 16
_FALLBACK = "scripted:0.7"
"""In place of the bundled drafter where the repository calls its drafter in another way."""
_OWN_HEAD = re.compile(r"self\.(lm_head|head|output_head|vocab_head|unembed\w*)\s*[:=]")


@dataclass(frozen=True)
class DraftPlan:
    """What a drafter's configuration says that entries ask for."""

    config: dict[str, Any]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]


def plan_drafts(spec: str, target: Target, block_size: int | None) -> DraftPlan:
    """The drafter's configuration: of the folder or profile named, of the target's own profile, or derived."""
    spec = companion_of(spec) or spec
    if spec == TINY:
        config = read_config(DRAFTER)
        own = text_config(target.model)
        if (config["hidden_size"], config["vocab_size"]) != (own.hidden_size, own.vocab_size):
            raise RunError(f"`--drafter {TINY}` was trained for `--model {TINY}` alone", f"use `--drafter {_FALLBACK}`")
    elif _is_by_name(spec):
        config = _named_config(spec)
    elif target.drafter_profile:
        config = dict(load_profile(target.drafter_profile).config)
    else:
        config = _derived_config(target)
    nested = dict(config.get("dflash_config") or {})
    own = text_config(target.model)
    # Configurations in use keep these at the top or inside `dflash_config`; drafter classes read either.
    size = block_size or config.get("block_size") or nested.get("block_size") or _DEFAULT_BLOCK_SIZE
    mask = _first(config.get("mask_token_id"), nested.get("mask_token_id"), own.vocab_size - 1)
    taps = _first(config.get("target_layer_ids"), nested.get("target_layer_ids"), _spread_taps(own.num_hidden_layers))
    shared = {"block_size": size, "mask_token_id": mask, "target_layer_ids": list(taps)}
    config.update(shared, dflash_config={**nested, **shared})
    return DraftPlan(config, size, mask, tuple(taps))


def make_drafter(spec: str, plan: DraftPlan, own_class: type | None, target: Target, seed: int) -> Any:
    """A drafter of the repository's `own_class` (None where it has none), on the target's device, in its dtype."""
    device, dtype = target.model.device, target.model.dtype
    if spec == TINY:
        if own_class is not None and is_called_as_dflash(own_class) and not _returns_logits(own_class):
            spec = str(DRAFTER)
            own_class = class_for_weights(own_class, lambda each: _build(each, _make_config(each, plan), dtype))
        else:
            spec = _FALLBACK
    if spec.startswith("scripted:"):
        p, q = parse_scripted(spec)
        beside = companion_of(spec)
        scripted = _scripted_class(own_class, AccompaniedDrafter if beside else ScriptedDrafter)
        config = _make_config(own_class, plan)
        drafter = scripted(target.model, config, plan, p, q, seed, _returns_logits(own_class))
        if beside:
            drafter.companion = make_drafter(beside, plan, own_class, target, seed)
        return drafter
    is_folder = Path(spec).is_dir()
    is_trained = is_folder or (_is_by_name(spec) and looks_like_hub_id(spec))
    is_local = is_folder or (is_trained and bool(why_offline(spec)))
    if own_class is None:
        if not is_trained:
            raise RunError(
                f"no drafter class was found in the repository: `--drafter {spec}` has nothing to build",
                "use `--drafter scripted:0.7`, or name a draft model's folder",
            )
        if "dflash_config" not in _named_config(spec):
            drafter = AutoModelForCausalLM.from_pretrained(spec, dtype=dtype, local_files_only=is_local)
            return drafter.to(device).eval()
        # Public DFlash drafters come without code.
        own_class = DFlashDrafter
    config = _make_config(own_class, plan)
    if is_trained:
        if is_folder:
            require_weights(Path(spec))
            require_memory(checkpoint_bytes(Path(spec)), device, Path(spec).name)
        drafter, found = own_class.from_pretrained(  # type: ignore[attr-defined]
            spec, config=config, dtype=dtype, local_files_only=is_local, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):
            # Transformers fills them with random numbers and a warning, and hardly a draft is accepted.
            raise RunError(
                f"`{own_class.__name__}` has {len(missing)} weights that `{spec}` lacks, such as `{missing[0]}`",
                "name a drafter that was made for this class, or use `--drafter scripted:0.7`",
            )
        drafter = drafter.to(device).eval()
    else:
        drafter = build_random(lambda: _build(own_class, config, dtype), device, f"a random {own_class.__name__}", seed)
    if device.type == "cuda":
        replay_drafter(drafter)
    return drafter


def describe_drafter(spec: str, temperature: float = 0.0) -> str:
    if spec.startswith("scripted:"):
        p, q = parse_scripted(spec)
        which, time = ("likeliest", "asks the target") if temperature else ("right", "costs no time")
        if beside := companion_of(spec):
            time = f"beside it runs {describe_drafter(beside)}, whose proposals are dropped"
        return f"scripted: the {which} token first with chance {p:g}, else second with chance {q:g}; {time}"
    if spec == TINY:
        return f"{TINY} (bundled)"
    if spec == "random":
        return "the repository's own class, random weights"
    if Path(spec).is_dir():
        return f"{Path(spec).resolve().name} (folder), the repository's own class"
    kind = "hub" if looks_like_hub_id(spec) else "built-in profile, random weights"
    return f"{spec} ({kind}), the repository's own class"


def describe_bundled(drafters: Iterable[Any]) -> str:
    """What the bundled drafter was to the repository: weights for its class, one in its place, or nothing."""
    places: dict[str, None] = {}
    scripted = ""
    for drafter in drafters:
        kind = type(drafter)
        if isinstance(drafter, ScriptedDrafter):
            scripted = describe_drafter(_FALLBACK)
        elif replaced := getattr(kind, "stands_in_for", ""):
            places[f"in ddaudit's class in place of `{replaced}`, whose weights are laid out otherwise"] = None
        elif drafter is not None:
            places[f"in the repository's `{kind.__name__}`"] = None
    if scripted and not places:
        return f"{scripted}; the repository has no class that is called as {TINY} is"
    other = [f"where the repository drafts in another way, {scripted}"] if scripted else []
    return "; ".join([f"{TINY} (bundled), trained", *places, *other])


def own_drafter_class(modules: list[Any]) -> type | None:
    """The one `PreTrainedModel` subclass that the repository's modules define, if it is just one."""
    names = {module.__name__ for module in modules}
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ in names
    }
    return found.pop() if len(found) == 1 else None


def _is_by_name(spec: str) -> bool:
    return spec not in ("random", TINY) and not spec.startswith("scripted:")


def _named_config(spec: str) -> dict[str, Any]:
    if Path(spec).is_dir():
        return read_config(Path(spec))
    if looks_like_hub_id(spec):
        from huggingface_hub import hf_hub_download

        is_offline = bool(why_offline(spec))
        try:
            path = hf_hub_download(spec, "config.json", local_files_only=is_offline)
        except Exception as error:
            if is_offline:
                raise not_cached(spec) from error
            raise RunError(
                f"`{spec}` does not load: {type(error).__name__}: {error}".splitlines()[0],
                "name a draft model that has a config.json",
            ) from error
        return read_config(Path(path).parent)
    profile = load_profile(spec)
    if profile.kind != "drafter":
        raise RunError(f"`--drafter {spec}` is a {profile.kind}", f"use it as `--model {spec}`")
    return dict(profile.config)


def _derived_config(target: Target) -> dict[str, Any]:
    """A small block drafter of the target's width, for targets that no profile pairs with one."""
    own = text_config(target.model)
    # Mamba has no attention heads, Bloom no longest text.
    num_heads = getattr(own, "num_attention_heads", 4)
    return {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": own.num_hidden_layers,
        "hidden_size": own.hidden_size,
        "intermediate_size": 2 * own.hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": max(2, own.hidden_size // num_heads),
        "vocab_size": own.vocab_size,
        "max_position_embeddings": getattr(own, "max_position_embeddings", 4096),
        "rms_norm_eps": 1e-6,
        "rope_theta": _rope_theta(own),
    }


def _make_config(own_class: type | None, plan: DraftPlan) -> Any:
    """The plan's configuration as the drafter class's own config class, its rope theta checked."""
    config_class = getattr(own_class, "config_class", None) or Qwen3Config
    # An empty `rope_scaling` says nothing, and Transformers 5 warns of the old name.
    left_out = {"model_type", "architectures"} | ({"rope_scaling"} if not plan.config.get("rope_scaling") else set())
    values = {name: value for name, value in plan.config.items() if name not in left_out}
    try:
        config = config_class(**values)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"`{config_class.__name__}` does not take the drafter's configuration: {error}",
            "name the drafter's own folder: `--drafter FOLDER`",
        ) from error
    wanted = _rope_theta(plan.config)
    if wanted is None:
        return config
    # Transformers 5 keeps theta in `rope_parameters` alone; classes written before read `rope_theta`, some with
    # a silent default of 10000.
    if getattr(config, "rope_theta", None) is None:
        config.rope_theta = wanted
    if float(_rope_theta(config) or 0) != float(wanted):
        raise RunError(f"rope theta {wanted:g} of the drafter's configuration did not reach `{config_class.__name__}`")
    return config


def _rope_theta(config: Any) -> float | None:
    """Rope theta, flat or inside `rope_parameters`, of a dict or a configuration object."""
    values = config if isinstance(config, dict) else vars(config)
    nested = values.get("rope_parameters") or {}
    # With several layer kinds the parameters are one level deeper, one set a kind.
    inner = next((part for part in nested.values() if isinstance(part, dict)), nested)
    theta: float | None = _first(inner.get("rope_theta"), values.get("rope_theta"))
    return theta


def _spread_taps(num_layers: int) -> list[int]:
    """Three layers spread over the target's depth, in order, fewer where it has fewer."""
    last = max(num_layers - 2, 0)
    return sorted({0, last // 2, last})


def _build(own_class: type, config: Any, dtype: torch.dtype) -> Any:
    if issubclass(own_class, PreTrainedModel):
        return own_class._from_config(config, dtype=dtype)  # type: ignore[attr-defined]
    return own_class(config).to(dtype)


def _scripted_class(own_class: type | None, base: type) -> type:
    """A scripted drafter that is also an instance of the repository's class, so that its methods can be entries."""
    if own_class is None:
        return base
    return type(f"Scripted{own_class.__name__}", (base, own_class), {})


def _returns_logits(own_class: type | None) -> bool:
    """Whether the repository's drafter carries a head of its own, and so returns logits."""
    if own_class is None:
        return False
    try:
        return _OWN_HEAD.search(inspect.getsource(own_class)) is not None
    except (OSError, TypeError):
        return False


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
