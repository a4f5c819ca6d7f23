"""The architecture matrix: what stock Transformers and this runtime do on every causal architecture, measured."""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ddaudit.runtime.caches.cache import crop_cache, keep_in_cache
from ddaudit.runtime.caches.making import make_cache
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.caches.window import ROOT, Window
from ddaudit.runtime.models.architecture import text_config
from ddaudit.runtime.models.architectures import VOCABULARY, build_tiny
from ddaudit.runtime.models.loading import Target
from ddaudit.runtime.running.run import RunOptions, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from ddaudit.auditor.record import Entry

TOLERANCE = 1e-4
"""Largest relative difference of logits, fp32, that still counts as exact."""
NEAR_TIE = 1e-3
"""Top-2 gaps below this may flip by rounding."""
_TREE = (ROOT, 0, 0, 1, 1, 2, 3, 6, 7, 5, 9, ROOT, 11, 12)
_PROMPT, _BLOCK = 9, 6


@dataclass(frozen=True)
class ArchitectureRow:
    """One architecture: what its stock cached continuation does, and whether windows on it are exact."""

    architecture: str
    verdict: str
    """`exact …`, `wrong …`, `refused …` or `not built …`."""
    layers: str = ""
    stock: dict[str, str] = field(default_factory=dict)
    """Relative difference of the stock cached continuation to a fresh forward: a block or single tokens, with and
    without explicit positions; an exception's text where it raises."""
    differences: dict[str, float] = field(default_factory=dict)
    """The runtime's, by check."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def wrong_in_stock(self) -> list[str]:
        """The stock continuations that are not a fresh forward's."""
        return [name for name, found in self.stock.items() if _is_wrong(found)]


def _is_wrong(found: str) -> bool:
    try:
        return float(found) > TOLERANCE
    except ValueError:
        return True


def check_architecture(
    model_type: str, decode: Callable[[nn.Module], dict[str, float]] | None = None
) -> ArchitectureRow:
    """Build one architecture tiny and check it.

    Args:
        decode: runs a fork's entries on the model, as `decode_with` makes it.
    """
    started_s = time.perf_counter()
    logging.disable(logging.WARNING)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = _check(model_type, decode)
    finally:
        logging.disable(logging.NOTSET)
    return ArchitectureRow(**{**asdict(row), "seconds": round(time.perf_counter() - started_s, 1)})


def _check(model_type: str, decode: Callable[[nn.Module], dict[str, float]] | None) -> ArchitectureRow:
    try:
        model = build_tiny(model_type)
        _fresh(model, _text(4, seed=0))
    except Exception as error:
        return ArchitectureRow(model_type, f"not built: {_first_line(error)}")
    layers = _describe_layers(model)
    stock = {
        "block": _attempt(_stock_continuation, model, _BLOCK, True),
        "block, no positions": _attempt(_stock_continuation, model, _BLOCK, False),
        "token": _attempt(_stock_continuation, model, 1, True),
        "token, no positions": _attempt(_stock_continuation, model, 1, False),
    }
    differences: dict[str, float] = {}
    refused = failed = ""
    for check in (_rollback, _long_prefill, _tree):
        try:
            differences |= check(model)
        except (NotImplementedError, ValueError) as error:
            refused = str(error).splitlines()[0]
            if not differences:
                return ArchitectureRow(model_type, f"refused: {refused}", layers, stock)
        except Exception as error:
            failed = _first_line(error)
    # Nothing can be said of an architecture that in this size does not decode right by itself.
    if _is_wrong(stock["token"]):
        reason = f"its own cached decoding is not its fresh forward's ({stock['token']})"
        return ArchitectureRow(model_type, f"not built: {reason}", layers, stock, differences)
    if failed:
        return ArchitectureRow(model_type, f"wrong: {failed}", layers, stock, differences)
    exception = ""
    try:
        differences |= decode(model) if decode else {}
    except Exception as error:
        exception = _first_line(error)
    wrong = [name for name, difference in differences.items() if not difference <= TOLERANCE]
    largest = f"{max(differences.values()):.0e}"
    verdict = f"wrong: {', '.join(wrong)}" if wrong else f"exact ({largest})"
    if refused and not wrong:
        verdict = f"exact ({largest}) for chains, refused for trees: {refused}"
    elif exception and not wrong:
        verdict = f"exact ({largest}), but the fork does not run: {exception}"
    return ArchitectureRow(model_type, verdict, layers, stock, differences)


def _tree(model: nn.Module) -> dict[str, float]:
    """Every node against its root path fed alone, then a kept path continued."""
    prompt, nodes, more = _text(_PROMPT, 1), _text(len(_TREE), 2), _text(3, 3)
    cache = make_cache(model)
    _forward(model, cache, prompt)
    window = Window(_PROMPT, len(_TREE), _TREE)
    visible = torch.cat([torch.ones(len(_TREE), _PROMPT).bool(), window.ancestors(torch.device("cpu"))], 1)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    logits = _forward(model, cache, nodes, _PROMPT + torch.tensor([window.depths]), attention_mask=mask)
    paths = [_path(node) for node in range(len(_TREE))]
    worst = max(
        _difference(logits[:, node], _fresh(model, torch.cat([prompt, nodes[:, path]], 1))[:, -1])
        for node, path in enumerate(paths)
    )
    kept = paths[8]
    keep_in_cache(cache, _PROMPT, kept)
    whole = torch.cat([prompt, nodes[:, kept], more], 1)
    return {"tree": max(worst, _difference(_forward(model, cache, more), _fresh(model, whole)[:, -3:]))}


def _rollback(model: nn.Module) -> dict[str, float]:
    """After rejected blocks, against never having drafted; past a sliding window's end too."""
    text = _text(_PROMPT, 4)
    cache = make_cache(model)
    _forward(model, cache, text)
    worst = 0.0
    for round_number, kept in enumerate((2, 0, 6, 1)):
        block = _text(_BLOCK, 10 + round_number)
        logits = _forward(model, cache, block)
        worst = max(worst, _difference(logits, _fresh(model, torch.cat([text, block], 1))[:, -_BLOCK:]))
        text = torch.cat([text, block[:, :kept]], 1)
        crop_cache(cache, text.shape[1])
    return {"rollback": worst}


def _long_prefill(model: nn.Module) -> dict[str, float]:
    """A prompt longer than any window, cut back inside and continued."""
    text = _text(160, 5)
    cache = make_cache(model)
    worst = _difference(_forward(model, cache, text), _fresh(model, text))
    crop_cache(cache, 150)
    again = _difference(_forward(model, cache, text[:, 150:155]), _fresh(model, text[:, :155])[:, 150:])
    return {"long prefill": max(worst, again)}


def _stock_continuation(model: nn.Module, step: int, positions: bool) -> float:
    text = _text(_PROMPT + 2 * _BLOCK, 6)
    cache = DynamicCache(config=model.config)
    found = [_forward(model, cache, text[:, :_PROMPT], numbered=positions)]
    for start in range(_PROMPT, text.shape[1], step):
        at = torch.arange(start, start + step)[None] if positions else None
        found.append(_forward(model, cache, text[:, start : start + step], at, numbered=positions))
    return _difference(torch.cat(found, 1), _fresh(model, text))


def _forward(
    model: nn.Module, cache: Any, ids: torch.Tensor, positions: torch.Tensor | None = None, numbered: bool = True,
    **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    if positions is None and numbered and type(cache) is DynamicCache:
        positions = torch.arange(ids.shape[1])[None]
    if positions is not None:
        kwargs["position_ids"] = positions
    logits: torch.Tensor = model(ids, use_cache=True, **{cache_argument(model): cache}, **kwargs).logits
    return logits


def _fresh(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, or 1 where a choice that is no near-tie differs."""
    best = expected.topk(2, dim=-1).values
    clear = (best[..., 0] - best[..., 1]) > NEAR_TIE * best[..., 0].abs().clamp(min=1)
    if bool((found.argmax(-1) != expected.argmax(-1))[clear].any()):
        return 1.0
    return float((found - expected).norm() / expected.norm())


def _text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def _path(node: int) -> list[int]:
    return [] if node == ROOT else [*_path(_TREE[node]), node]


def _attempt(measure: Callable[..., float], *args: Any) -> str:
    try:
        return f"{measure(*args):.1e}"
    except Exception as error:
        return _first_line(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _describe_layers(model: nn.Module) -> str:
    config = text_config(model)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        sliding = DynamicCache(config=model.config).is_sliding
        kinds = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]
    counts = {kind: list(kinds).count(kind) for kind in dict.fromkeys(kinds)}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def decode_with(
    folder: Path, entries: Sequence[Entry], num_tokens: int = 100
) -> Callable[[nn.Module], dict[str, float]]:
    """A check that runs a fork's entries on a model: 0 for each whose tokens are greedy decoding's, 1 for others.

    Raises:
        RuntimeError: for an entry that does not run on that model.
    """

    def decode(model: nn.Module) -> dict[str, float]:
        target = Target(model, None, "tiny", has_random_weights=True, drafter_profile="")
        options = RunOptions(
            model="", drafter="scripted:0.7", max_new_tokens=num_tokens, num_prompts=1, prompt_tokens=16, block_size=8,
            checks_state=False,
        )  # fmt: skip
        record = run(folder, entries, (), options, target=target)
        failed = next((entry for entry in record.entries if entry.verdict == "error"), None)
        if failed:
            raise RuntimeError(failed.error)
        return {entry.name: float(entry.verdict != "identical") for entry in record.entries}

    return decode


def check_all(
    names: Sequence[str], folder: Path | None, entries: Sequence[Entry], num_workers: int
) -> Iterator[ArchitectureRow]:
    """Rows in the order of `names`, as they come in, from `num_workers` processes of one thread each."""
    check = partial(_check_alone, folder=folder, entries=tuple(entries))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(check, names)


def _check_alone(name: str, folder: Path | None, entries: tuple[Entry, ...]) -> ArchitectureRow:
    return check_architecture(name, decode_with(folder, entries) if folder else None)
