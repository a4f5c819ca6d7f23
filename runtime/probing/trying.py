"""Claims tried on the class itself, on the `meta` device: no weights, and no facts of a profile."""

from __future__ import annotations

import importlib
import inspect
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ddaudit.auditor.claim import Answer, Ask, Claim, Outcome
from ddaudit.auditor.profile import load_profile
from ddaudit.runtime.caches.takeover import cache_argument, is_recurrent
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models import profile
from ddaudit.runtime.models.architecture import decoder_layers, final_norm
from ddaudit.runtime.probing.observing import CACHE_ARGUMENTS, OneToken, answers, run_one_token
from ddaudit.runtime.probing.probe import build_classes, quiet
from ddaudit.runtime.probing.trying_parts import TRIES, mask_token, non_causal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

__all__ = ["RunError", "Trial", "try_on"]

WORKS = Answer(Outcome.WORKS)


def try_on(target: str, claims: Iterable[Claim]) -> dict[Claim, dict[str, Answer]]:
    """What comes of each claim on each class of a target profile; a claim that cannot be tried has no answer.

    Args:
        target: the name of a built-in profile, or a profile's file.

    Raises:
        RunError: where the installed Transformers builds no such model.
    """
    import transformers

    found: dict[Claim, dict[str, Answer]] = {claim: {} for claim in claims}
    with quiet():
        config = transformers.AutoConfig.for_model(**load_profile(target).config)
        for model, _ in build_classes(config):
            trial = Trial(model, _drafter(target))
            for claim, by_class in found.items():
                if (answer := trial.answer(claim)) is not None:
                    by_class[type(model).__name__] = answer
    return found


def _drafter(target: str) -> Mapping[str, Any]:
    """The configuration of the drafter made for the target, empty where none is known."""
    name = load_profile(target).drafter
    return profile.load_profile(name).config if name and profile.has_profile(name) else {}


class Trial:
    """One class, and what was already run on it."""

    def __init__(self, model: nn.Module, drafter: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.drafter = drafter or {}

    def answer(self, claim: Claim) -> Answer | None:
        """None where the class does not run far enough to say."""
        tries = {
            Ask.PATH: self._path, Ask.HEAD: self._head, Ask.CONFIG: self._field, Ask.CONFIG_OR_DEFAULT: self._field,
            Ask.BARE_CACHE: self._bare_cache, Ask.CROP_LENGTH: self._crop_length, Ask.ROLLBACK: self._rollback,
            Ask.TREE_MASK: self._tree_mask, Ask.CACHE_NAME: self._cache_name, Ask.CACHE_PAIRS: self._cache_pairs,
            Ask.LAYER_PART: self._layer_part, Ask.LAYER_KEYS: self._layer_keys, Ask.LAYER_STATE: self._layer_state,
            Ask.LAYER_ATTENTION: self._layer_attention, Ask.IMPORT: self._import, Ask.KEYWORD: self._keyword,
            Ask.MASK_TOKEN: self._mask_token,
            Ask.NON_CAUSAL: self._non_causal,
        }  # fmt: skip
        if claim.ask in TRIES:
            return TRIES[claim.ask](self.model, claim.what)
        return tries[claim.ask](claim)

    @cached_property
    def _one(self) -> OneToken:
        return self._run()

    def _run(self, **arguments: Any) -> OneToken:
        try:
            norm = final_norm(self.model)
        except ValueError:
            norm = None
        return run_one_token(self.model, norm, **arguments)

    def _cache(self) -> Any:
        """A stock cache that has seen one token; None where the class makes none."""
        return self._run().cache

    def _path(self, claim: Claim) -> Answer:
        try:
            reduce(getattr, claim.what.split("."), self.model)
        except AttributeError as error:
            return _raised(error)
        return WORKS

    def _head(self, claim: Claim) -> Answer:
        found = self._path(claim)
        if found.works and self._one.logit_operations:
            changed = ", ".join(self._one.logit_operations)
            return Answer(Outcome.SILENT, f"the model changes its logits after the final norm ({changed})")
        return found

    def _field(self, claim: Claim) -> Answer:
        if answers(self.model.config, claim.what):
            return WORKS
        missing = f"{type(self.model.config).__name__} has no `{claim.what}`"
        return Answer(Outcome.RAISES if claim.ask is Ask.CONFIG else Outcome.SILENT, missing)

    def _bare_cache(self, _claim: Claim) -> Answer | None:
        if self._one.refused or self._one.cache is None:
            return None
        seen = self._run(**{cache_argument(self.model): DynamicCache()})
        return Answer(Outcome.RAISES, seen.refused) if seen.refused else WORKS

    def _crop_length(self, _claim: Claim) -> Answer | None:
        if (cache := self._cache()) is None:
            return None
        try:
            cache.crop(1)
        except (ValueError, RuntimeError) as error:
            return _raised(error)
        return WORKS

    def _rollback(self, _claim: Claim) -> Answer | None:
        if (cache := self._cache()) is None or not hasattr(cache, "layers"):
            return None
        before = self._states(cache)
        if not before:
            return WORKS
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        cache.crop(-1)
        kept = sum(each is old for each, old in zip(self._states(cache), before, strict=True))
        return (
            Answer(Outcome.SILENT, f"after `crop(-1)` {kept} of {len(before)} states are what they were")
            if kept
            else WORKS
        )

    def _states(self, cache: Any) -> list[torch.Tensor]:
        held = (getattr(layer, "recurrent_states", None) or {} for layer in cache.layers)
        return [each for states in held for each in states.values() if torch.is_tensor(each)]

    def _tree_mask(self, _claim: Claim) -> Answer | None:
        """Which recurrent mixers, or layers where there are none, are given the mask that the model is given."""
        if self._one.refused:
            return None
        mixers = [module for module in self.model.modules() if is_recurrent(module)]
        watched = mixers or list(decoder_layers(self.model))
        reached: set[nn.Module] = set()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(torch.is_tensor(each) and each.dim() == 4 for each in (*args, *kwargs.values())):
                reached.add(module)

        hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in watched]
        try:
            seen = self._run(attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device="meta"))
        finally:
            for hook in hooks:
                hook.remove()
        if seen.refused:
            return Answer(Outcome.RAISES, seen.refused)
        blind = len(watched) - len(reached)
        what = f"{blind} of {len(watched)} {'recurrent mixers' if mixers else 'layers'} are given no such mask"
        return Answer(Outcome.SILENT, what) if blind else WORKS

    def _cache_name(self, claim: Claim) -> Answer:
        if hasattr(DynamicCache(), claim.what):
            return WORKS
        return Answer(Outcome.RAISES, f"DynamicCache has no `{claim.what}`")

    def _cache_pairs(self, _claim: Claim) -> Answer | None:
        if (cache := self._cache()) is None:
            return None
        try:
            for _key, _value in cache:
                pass
            cache[0]
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            return _raised(error)
        return WORKS

    def _layer_keys(self, _claim: Claim) -> Answer | None:
        if (cache := self._cache()) is None or not hasattr(cache, "layers"):
            return None
        without = [
            index for index, layer in enumerate(cache.layers) if not torch.is_tensor(getattr(layer, "keys", None))
        ]
        return Answer(Outcome.RAISES, f"layer {without[0]} of the cache has no keys") if without else WORKS

    def _layer_part(self, claim: Claim) -> Answer:
        layers = decoder_layers(self.model)
        without = sum(not hasattr(layer, claim.what) for layer in layers)
        missing = f"{without} of {len(layers)} layers have no `{claim.what}`"
        return Answer(Outcome.RAISES, missing) if without else WORKS

    def _layer_state(self, _claim: Claim) -> Answer | None:
        states = getattr(self._one.output, "hidden_states", None)
        if not states:
            return None
        normed = Answer(Outcome.DEPENDS, f"`hidden_states[{len(states) - 1}]` is what the final norm returned")
        return normed if self._one.is_last_normed else WORKS

    def _layer_attention(self, _claim: Claim) -> Answer | None:
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")
            maps = getattr(self._run(output_attentions=True).output, "attentions", None)
        except (ValueError, AttributeError):
            return None
        finally:
            self.model.set_attn_implementation(before)
        if maps is None:
            return None
        count, num_layers = sum(each is not None for each in maps), len(decoder_layers(self.model))
        short = Answer(Outcome.RAISES, f"{count} attention maps of {num_layers} layers")
        return short if count < num_layers else WORKS

    def _mask_token(self, _claim: Claim) -> Answer | None:
        return mask_token(self.model, self.drafter)

    def _non_causal(self, _claim: Claim) -> Answer | None:
        return non_causal(self.drafter)

    def _import(self, claim: Claim) -> Answer:
        module, _, name = claim.what.rpartition(".")
        for path, attribute in ((claim.what, ""), (module, name)):
            try:
                found = importlib.import_module(path)
            except ImportError:
                continue
            if not attribute or hasattr(found, attribute):
                return WORKS
        return Answer(Outcome.RAISES, f"the installed Transformers has no `{claim.what}`")

    def _keyword(self, claim: Claim) -> Answer | None:
        parameters = inspect.signature(self.model.forward).parameters
        if claim.what in parameters:
            return WORKS
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return Answer(Outcome.RAISES, f"the forward takes no `{claim.what}`")
        if claim.what in CACHE_ARGUMENTS:
            # By a call: a decorator may take a name that the signature does not show.
            if self._one.refused:
                return None
            cache = self._cache()
            if self._run(**{claim.what: cache}).cache is cache:
                return WORKS
        return Answer(Outcome.SILENT, f"`{claim.what}` is swallowed unread")


def _raised(error: Exception) -> Answer:
    return Answer(Outcome.RAISES, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
