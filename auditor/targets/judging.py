"""What a profile answers to a claim, from its facts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Answer, Ask, Claim, Outcome
from ddaudit.auditor.facts.library import EMBEDDING_NAMES, HEAD_NAMES, LAYERS_NAMES, NORM_NAMES

if TYPE_CHECKING:
    from ddaudit.auditor.profile import ClassFacts

WORKS = Answer(Outcome.WORKS)
_CACHE_NAMES = ("past_key_values", "cache", "cache_params")


def judge(claim: Claim, facts: ClassFacts) -> Answer | None:
    """What comes of the claim on this class; None where the facts do not say."""
    match claim.ask:
        case Ask.PATH:
            return _path(claim.what, facts)
        case Ask.HEAD:
            return _head(claim.what, facts)
        case Ask.CONFIG | Ask.CONFIG_OR_DEFAULT:
            return _field(claim, facts)
        case Ask.CROP_LENGTH:
            return Answer(Outcome.RAISES, "`crop` takes no length to keep")
        case Ask.CACHE_NAME:
            return Answer(Outcome.RAISES, f"a cache has no `{claim.what}`")
        case Ask.CACHE_PAIRS:
            return Answer(Outcome.RAISES, "a cache is no tuple of pairs")
        case Ask.LAYER_STATE if facts.num_hidden_states:
            normed = Answer(Outcome.DEPENDS, f"`hidden_states[{facts.num_hidden_states - 1}]` is after the final norm")
            return normed if facts.is_last_hidden_state_normed else WORKS
        case Ask.KEYWORD if facts.forward_arguments:
            return _keyword(claim.what, facts)
    if not facts.layer_kinds:
        return None
    count = sum(kind.startswith(("linear", "conv")) for kind in facts.layer_kinds)
    stateful = f"{count} of {len(facts.layer_kinds)} layers carry a state"
    without_keys = [index for index, kind in enumerate(facts.layer_kinds) if kind in ("linear", "conv", "none")]
    match claim.ask:
        case Ask.LAYER_PART:
            kinds = [kind for kind in facts.layer_kinds if claim.what not in facts.layer_parts.get(kind, ())]
            missing = f"{len(kinds)} of {len(facts.layer_kinds)} layers have no `{claim.what}`"
            return Answer(Outcome.RAISES, missing) if kinds else WORKS
        case Ask.BARE_CACHE:
            return Answer(Outcome.RAISES, stateful) if count else WORKS
        case Ask.TREE_MASK:
            return Answer(Outcome.SILENT, stateful) if count else WORKS
        case Ask.ROLLBACK:
            # A convolution's inputs come back once their recording is on.
            recurrent = f"{len(facts.recurrent_layers)} of {len(facts.layer_kinds)} layers carry a recurrent state"
            return Answer(Outcome.SILENT, recurrent) if facts.recurrent_layers else WORKS
        case Ask.LAYER_KEYS | Ask.LAYER_ATTENTION if without_keys:
            return Answer(Outcome.RAISES, f"layer {without_keys[0]} has no attention")
        case Ask.LAYER_KEYS | Ask.LAYER_ATTENTION:
            return WORKS
    return None


def _path(path: str, facts: ClassFacts) -> Answer:
    if path in facts.modules:
        return WORKS
    name = path.rpartition(".")[2]
    places = {
        EMBEDDING_NAMES: facts.input_embeddings[-1:],
        LAYERS_NAMES: (facts.layers,),
        NORM_NAMES: (facts.final_norm,),
        HEAD_NAMES: facts.output_embeddings[-1:],
    }
    for names, place in places.items():
        if name in names and any(place):
            what = f"`{name}`" if place[0].endswith(f".{name}") or place[0] == name else f"what `{name}` names"
            return Answer(Outcome.RAISES, f"{what} is at `{place[0]}`")
    return Answer(Outcome.RAISES, f"there is no `{path}`")


def _head(path: str, facts: ClassFacts) -> Answer:
    found = _path(path, facts)
    if found.works and facts.logit_operations:
        return Answer(
            Outcome.SILENT, f"its logits are changed after the final norm ({_joined(facts.logit_operations)})"
        )
    return found


def _field(claim: Claim, facts: ClassFacts) -> Answer:
    places = facts.config_fields.get(claim.what, ())
    if f"config.{claim.what}" in places:
        return WORKS
    missing = Outcome.RAISES if claim.ask is Ask.CONFIG else Outcome.SILENT
    return Answer(missing, f"`{claim.what}` is at `{places[0]}`" if places else f"there is no `{claim.what}`")


def _keyword(name: str, facts: ClassFacts) -> Answer | None:
    # A decorator may take a name that the signature does not show.
    if name in facts.forward_arguments or name in facts.cache_arguments:
        return WORKS
    if name in _CACHE_NAMES and facts.refused:
        return None
    known = f"; its cache is `{facts.cache_argument}`" if name in _CACHE_NAMES and facts.cache_argument else ""
    if facts.takes_any_argument:
        return Answer(Outcome.SILENT, f"`{name}` is swallowed unread{known}")
    return Answer(Outcome.RAISES, f"the forward takes no `{name}`{known}")


def _joined(names: tuple[str, ...]) -> str:
    return ", ".join(names)
