"""The target of a run: a checkpoint, or an architecture with random weights. Nothing is downloaded unasked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from ddaudit.runtime.caches.kernels import serve_cpu
from ddaudit.runtime.errors import RunError, describe
from ddaudit.runtime.models.hub import not_cached, why_offline
from ddaudit.runtime.models.initializing import build_random, require_memory
from ddaudit.runtime.models.profile import load_profile
from ddaudit.runtime.tiny import TARGET, TINY

LOADERS = {"causal-lm": AutoModelForCausalLM, "conditional": AutoModelForImageTextToText}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_PATTERNS = ("tokenizer*", "vocab.*", "*.tiktoken", "spiece.model")


@dataclass(frozen=True)
class Target:
    """A target model ready to run."""

    model: Any
    tokenizer: Any
    description: str
    has_random_weights: bool
    drafter_profile: str
    """Name of the drafter profile that goes with a built-in target, else empty."""


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RunError(f"`--device {name}` is no device", "`auto`, `cpu`, `cuda` or `cuda:1`") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"`--device {name}`, and torch {torch.__version__} sees no GPU", "use `--device cpu`")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError(f"`--device {name}`, and there are {torch.cuda.device_count()} GPUs", "use `--device cuda:0`")
    return device


def choose_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    """`auto` is float32 on a CPU, where the verdict is exact, and the checkpoint's own on a GPU."""
    if name != "auto":
        return DTYPES[name]
    own = getattr(config, "dtype", None)
    own = getattr(torch, own, None) if isinstance(own, str) else own
    return torch.float32 if device.type == "cpu" else (own or torch.bfloat16)


def load_target(name: str, *, random_weights: bool, loader: str, dtype: str, device: torch.device, seed: int) -> Target:
    """`name` is a folder, the bundled target, a built-in profile or a hub id, looked at in that order."""
    label = name
    if name == TINY and not Path(name).is_dir():
        name = str(TARGET)
    folder = Path(name)
    is_folder, is_hub_id = folder.is_dir(), looks_like_hub_id(name)
    profile = None if is_folder or is_hub_id else load_profile(name)
    if profile is not None:
        if profile.kind != "target":
            raise RunError(f"`--model {name}` is a {profile.kind}", f"use it as `--drafter {name}`")
        if not random_weights:
            raise RunError(
                f"`{name}` is a built-in profile: an architecture without weights",
                "add `--random-weights`, or name a folder or hub id that has the checkpoint",
            )
        config = AutoConfig.for_model(**profile.config)
    else:
        if is_folder and not (folder / "config.json").is_file():
            raise RunError(f"the model folder `{folder.name}` has no config.json", "name the checkpoint's own folder")
        if is_folder and not random_weights:
            require_weights(folder)
        config = _from_hub_or_folder(AutoConfig, name, is_folder)
    chosen = choose_dtype(dtype, device, config)
    model_class = LOADERS[loader]
    label = folder.resolve().name if is_folder and label != TINY else label
    if random_weights:
        model = build_random(
            lambda: _from_config(model_class, config, chosen), device, f"{label} with random weights", seed
        )
    else:
        if is_folder:
            require_memory(checkpoint_bytes(folder), device, label)
        model, found = _from_hub_or_folder(
            model_class, name, is_folder, config=config, dtype=chosen, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):
            # Transformers fills them with random numbers and a warning.
            raise RunError(
                f"`{label}` lacks {len(missing)} of the model's weights, such as `{missing[0]}`",
                "take the whole checkpoint, or the other `--loader`",
            )
        model = model.to(device).eval()
    serve_cpu(model)
    kind = "built-in profile" if profile else ("bundled" if label == TINY else "folder" if is_folder else "hub")
    weights = f"random weights, seed {seed}" if random_weights else "checkpoint"
    return Target(
        model=model,
        tokenizer=None if profile else _load_tokenizer(name, is_folder),
        description=f"{label} ({kind}), {type(model).__name__}, {weights}",
        has_random_weights=random_weights,
        drafter_profile=profile.drafter if profile else "",
    )


def looks_like_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith((".", "/"))


def require_weights(folder: Path) -> None:
    if not any(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)):
        raise RunError(
            f"the model folder `{folder.name}` has no weights ({' or '.join(WEIGHT_PATTERNS)})",
            "put the checkpoint there, or build the architecture alone with `--random-weights`",
        )


def checkpoint_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"`{folder.name}/config.json` cannot be read: {error}", "name a model folder") from error
    return config


def _from_config(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    try:
        return model_class.from_config(config, dtype=dtype)
    except ValueError as error:
        raise RunError(
            f"Transformers has no such model for `{type(config).__name__}`: {str(error).splitlines()[0]}",
            "try the other `--loader`",
        ) from error


def _from_hub_or_folder(loaded_class: Any, name: str, is_folder: bool, **arguments: Any) -> Any:
    is_offline = not is_folder and bool(why_offline(name))
    try:
        return loaded_class.from_pretrained(name, local_files_only=is_folder or is_offline, **arguments)
    except Exception as error:  # a broken checkpoint raises what its reader happens to: KeyError, SafetensorError ...
        if is_offline:
            raise not_cached(name) from error
        label = Path(name).name if is_folder else name
        raise RunError(
            f"`{label}` does not load: {describe(error).splitlines()[0]}",
            "check the name, the files in the folder, and for a hub id the connection",
        ) from error


def _load_tokenizer(name: str, is_folder: bool) -> Any:
    """None where there is none: token ids are then drawn at random."""
    # Transformers makes an empty tokenizer where a folder has no file for one.
    if is_folder and not any(path for pattern in TOKENIZER_PATTERNS for path in Path(name).glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=is_folder or bool(why_offline(name)))
    except Exception:  # the tokenizers package raises bare ones
        return None
