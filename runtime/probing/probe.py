"""What a model looks like, asked of the class itself: built on the `meta` device, without weights."""

from __future__ import annotations

import inspect
import logging
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ddaudit.auditor.profile import Profile
from ddaudit.runtime.caches.kernels import serve_cpu
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models.loading import looks_like_hub_id
from ddaudit.runtime.models.profile import has_profile, load_profile
from ddaudit.runtime.probing.observing import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

LOADERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_DTYPE = torch.bfloat16


def probe(name: str, trust_remote_code: bool = False) -> Profile:
    """The facts of every class that a loader makes from this model's configuration. No weights are read.

    Args:
        name: a folder with a `config.json`, a hub id, a built-in profile, a model type of Transformers such as
            `qwen3_next`, or a configuration class by name; looked at in that order.
        trust_remote_code: let code of the folder or the hub repository run.

    Raises:
        RunError: where the name is none of these, or no loader takes its configuration.
    """
    label = Path(name).resolve().name if Path(name).is_dir() else name
    with quiet():
        about, drafter, given, config = _configuration(name, label, trust_remote_code)
        classes = [facts_of(model, loaders) for model, loaders in build_classes(config, trust_remote_code)]
    return Profile(label, about, tuple(classes), given, transformers.__version__, drafter)


def _configuration(name: str, label: str, trust_remote_code: bool) -> tuple[str, str, dict[str, Any], Any]:
    """What it is in words, its drafter, the fields that make it, and the configuration."""
    if Path(name).is_dir() or looks_like_hub_id(name):
        config = _read(name, label, trust_remote_code)
        return f"read from the configuration of {label}", "", config.to_diff_dict(), config
    if has_profile(name):
        profile = load_profile(name)
        if profile.kind != "target":
            raise RunError(f"`{name}` is a {profile.kind}", "probe the target that it drafts for")
        config = transformers.AutoConfig.for_model(**profile.config)
        return profile.about, profile.drafter, profile.config, config
    config_class: Any = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else getattr(transformers, name, None)
    is_config = inspect.isclass(config_class) and issubclass(config_class, transformers.PreTrainedConfig)
    if not is_config:
        raise RunError(
            f"`{name}` is no folder, hub id, built-in profile, model type or configuration class",
            f"name one that Transformers {transformers.__version__} has, such as `qwen3_next` or `JambaConfig`",
        )
    about = f"{config_class.__name__} of Transformers at its defaults"
    return about, "", {"model_type": config_class.model_type}, config_class()


def _read(name: str, label: str, trust_remote_code: bool) -> Any:
    is_folder = Path(name).is_dir()
    if is_folder and not (Path(name) / "config.json").is_file():
        raise RunError(f"the folder `{label}` has no config.json", "name the model's own folder")
    try:
        return transformers.AutoConfig.from_pretrained(
            name, local_files_only=is_folder, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        remote = " Code that comes with a model runs only under `--trust-remote-code`"
        raise RunError(
            f"the configuration of `{label}` does not load: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
            f"check the name and the connection.{'' if trust_remote_code else remote}",
        ) from error


def build_classes(config: Any, trust_remote_code: bool = False) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Each class that a loader makes from this configuration, on the `meta` device, and the loaders that make it.

    Raises:
        RunError: where none does.
    """
    made: dict[type, list[str]] = {}
    models: dict[type, nn.Module] = {}
    refusals = []
    for loader in LOADERS:
        auto = getattr(transformers, loader, None)
        if auto is None:
            continue
        try:
            model = build_on_meta(auto, config, trust_remote_code)
        # A configuration class may refuse its own defaults, with whatever exception it meets.
        except Exception as error:
            refusals.append(f"{loader}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            continue
        models.setdefault(type(model), model)
        made.setdefault(type(model), []).append(loader)
    if not made:
        raise RunError(f"no loader builds `{type(config).__name__}`: {refusals[0]}", "name a decoder model")
    for model_class, loaders in made.items():
        yield models[model_class], tuple(loaders)


def build_on_meta(auto: Any, config: Any, trust_remote_code: bool = False) -> nn.Module:
    """A model without storage: shapes, modules and code, and no numbers."""
    with torch.device("meta"):
        arguments = {"trust_remote_code": True} if trust_remote_code else {}
        model: nn.Module = auto.from_config(config, dtype=_DTYPE, **arguments).eval().requires_grad_(False)
        if hasattr(model, "set_experts_implementation"):
            # The eager one asks which experts were chosen, and there are no numbers that say.
            with suppress(ValueError):
                model.set_experts_implementation("batched_mm")
    serve_cpu(model)
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Without Transformers' advice on how to load a model well."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers.logging.set_verbosity(level)
