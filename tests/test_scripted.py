"""The scripted drafter puts the right token where it was asked to, in the target's own head."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCABULARY, gemma3, qwen3
from torch import nn
from transformers import DynamicCache, Qwen3Config

from ddaudit.runtime.checks.decoding import decode_plain
from ddaudit.runtime.drafters.drafting import DraftPlan, describe_drafter, make_drafter, plan_drafts
from ddaudit.runtime.drafters.scripted import AccompaniedDrafter, ScriptedDrafter, chain_acceptance, parse_scripted
from ddaudit.runtime.drafters.text_reading import LOOKAHEAD
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models.loading import Target

PLAN = DraftPlan(config={}, block_size=8, mask_token_id=3, target_layer_ids=(0, 2))
CONFIG = Qwen3Config(num_hidden_layers=2, vocab_size=VOCABULARY, hidden_size=64)
START, LENGTH = 20, 400


class Head(nn.Module):
    """A target that is only its head."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        self.head.weight.data = weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained_like(rows: int, width: int) -> torch.Tensor:
    """Rows with a large common part and unequal lengths, as trained heads have."""
    return normal(rows, width) * (0.5 + normal(rows, 1, seed=1).abs()) + 5 * normal(1, width, seed=2)


HEADS = {
    "square": normal(64, 64),
    "small": normal(320, 64),
    "large": normal(20_000, 256),
    "large-bfloat16": normal(20_000, 256).bfloat16(),
    "trained-like": trained_like(5_000, 256),
}


def ranks(drafter, target, reference):
    """Rank of the right token at each position."""
    block = torch.zeros(1, LENGTH, target.get_output_embeddings().weight.shape[1])
    hidden = drafter(noise_embedding=block, position_ids=torch.arange(START, START + LENGTH)[None])
    logits = target.get_output_embeddings()(hidden)[0].float()
    right = logits.gather(1, torch.tensor(reference)[:, None])
    return (logits > right).sum(1)


@pytest.mark.parametrize("name", list(HEADS))
@pytest.mark.parametrize(("p", "q"), [(0.7, 0.5), (1.0, 0.5), (0.0, 1.0), (0.3, 0.0)])
def test_the_right_token_has_the_rank_that_was_drawn(name, p, q):
    target = Head(HEADS[name])
    # Tokens that some hidden state chooses: of unequal rows, not every token can be the best.
    reference = (normal(LENGTH, HEADS[name].shape[1], seed=5) @ HEADS[name].float().T).argmax(1).tolist()
    drafter = ScriptedDrafter(target, CONFIG, PLAN, p, q, seed=0)
    drafter.follow(START, reference)
    found = ranks(drafter, target, reference)
    drawn = torch.tensor([drafter._draw(START + i, token).index(token) for i, token in enumerate(reference)])
    assert (found[drawn == 0] == 0).all()
    assert (found[drawn == 1] == 1).all()
    assert (found[drawn == 2] >= 2).all()
    # Four standard deviations of a share of 400 draws.
    assert abs((found == 0).float().mean().item() - p) <= 0.1
    assert abs((found == 1).float().mean().item() - (1 - p) * q) <= 0.1


def scripted(**changes):
    target = qwen3()
    drafter = ScriptedDrafter(target, CONFIG, PLAN, **{"p": 0.5, "q": 0.5, "seed": 0, **changes})
    drafter.follow(4, list(range(10, 30)))
    return target, drafter


def test_the_draft_of_a_position_does_not_depend_on_the_round():
    """A drafter that drew anew each round would let a chain find what it lost a round before."""
    _, drafter = scripted()
    whole = drafter(noise_embedding=torch.zeros(1, 20, 64), position_ids=torch.arange(4, 24)[None])
    part = drafter(noise_embedding=torch.zeros(1, 8, 64), position_ids=torch.arange(0, 17)[None])
    assert torch.equal(part, whole[:, 5:13])


def test_another_seed_draws_otherwise():
    first, second = scripted(seed=0)[1], scripted(seed=1)[1]
    assert not torch.equal(first._hidden, second._hidden)


def test_the_draft_cache_grows_as_with_a_real_drafter():
    _, drafter = scripted()
    cache = DynamicCache()
    drafter(
        noise_embedding=torch.zeros(1, 8, 64),
        target_hidden=torch.zeros(1, 4, 128),
        position_ids=torch.arange(12)[None],
        past_key_values=cache,
    )
    assert cache.get_seq_length() == 12 and len(cache.layers) == CONFIG.num_hidden_layers


def test_past_the_reference_it_proposes_nothing_in_particular():
    _, drafter = scripted()
    hidden = drafter(noise_embedding=torch.zeros(1, 8, 64), position_ids=torch.arange(100, 108)[None])
    assert hidden.shape == (1, 8, 64) and not hidden.any()


def test_called_as_a_language_model_it_aims_at_the_next_token():
    _, drafter = scripted(p=1.0)
    output = drafter(torch.zeros(1, 3, dtype=torch.long), position_ids=torch.arange(5, 8)[None])
    assert output.logits.argmax(-1).tolist() == [[12, 13, 14]]


def test_logits_where_the_repository_has_a_head_of_its_own():
    _, drafter = scripted(p=1.0, returns_logits=True)
    logits = drafter(noise_embedding=torch.zeros(1, 3, 64), position_ids=torch.arange(4, 7)[None])
    assert logits.argmax(-1).tolist() == [[10, 11, 12]]


def test_a_head_that_cannot_tell_tokens_apart_is_refused():
    target = Head(torch.ones(50, 16))
    with pytest.raises(RunError, match="cannot be scripted"):
        ScriptedDrafter(target, CONFIG, PLAN, 0.7, 0.5, 0).follow(0, list(range(40)))


@pytest.mark.parametrize(("text", "chances"), [("scripted:0.7", (0.7, 0.5)), ("scripted:1,0", (1.0, 0.0))])
def test_chances_are_read(text, chances):
    assert parse_scripted(text) == chances


@pytest.mark.parametrize("text", ["scripted:", "scripted:x", "scripted:1.2", "scripted:0.5,2", "scripted:0,0,0"])
def test_bad_chances_are_refused(text):
    with pytest.raises(RunError, match="not `scripted:P"):
        parse_scripted(text)


def proposals(drafter, target, token, position):
    """The first tokens of a block that begins with `token`."""
    with torch.no_grad():
        block = target.get_input_embeddings()(torch.tensor([[token, *[PLAN.mask_token_id] * 7]]))
        positions = torch.arange(position, position + 8)[None]
        hidden = drafter(noise_embedding=block, position_ids=positions, target_hidden=None)
        return target.get_output_embeddings()(hidden)[0, 1 : 1 + LOOKAHEAD].argmax(-1).tolist()


@pytest.mark.parametrize("build", [qwen3, gemma3])
def test_a_sampled_text_is_followed_as_it_is_written(build):
    """Gemma scales its embeddings, and a block says no more of its first token than that."""
    target, prompt = build(), (5, 6, 7, 8)
    drafter = ScriptedDrafter(target, target.config, PLAN, 1.0, 0.0, seed=0)
    drafter.follow_text(target, prompt, seed=1)
    first = proposals(drafter, target, 40, 4)
    assert first == list(decode_plain(target, (*prompt, 40), LOOKAHEAD).generated_ids)
    # Two of them were accepted, then another token came.
    second = proposals(drafter, target, 41, 7)
    assert second == list(decode_plain(target, (*prompt, 40, *first[:2], 41), LOOKAHEAD).generated_ids)
    drafter.follow_text(target, prompt, seed=2)
    assert proposals(drafter, target, 40, 4) == first


def test_a_gap_in_a_sampled_text_is_gone_over():
    """More was accepted than proposed: by chance, among tokens that were all alike."""
    target = qwen3()
    drafter = ScriptedDrafter(target, target.config, PLAN, 1.0, 0.0, seed=0)
    drafter.follow_text(target, (5, 6), seed=1)
    assert proposals(drafter, target, 9, 4) == list(decode_plain(target, (5, 6, 0, 0, 9), LOOKAHEAD).generated_ids)


def test_the_choices_of_a_sampled_text_depend_on_its_seed():
    """At one place the likeliest token must not always be drawn out: nothing would be accepted there."""
    target = qwen3()
    drafter = ScriptedDrafter(target, target.config, PLAN, 0.5, 1.0, seed=0)
    right = decode_plain(target, (5, 6, 9), LOOKAHEAD).generated_ids[0]
    first = []
    for seed in range(40):
        drafter.follow_text(target, (5, 6), seed)
        first.append(proposals(drafter, target, 9, 2)[0] == right)
    assert 10 < sum(first) < 30


class Companion(nn.Module):
    """A drafter that notes what it is given, and grows the cache as drafters do."""

    def __init__(self):
        super().__init__()
        self.given = []

    def forward(self, *args, **kwargs):
        self.given.append((args, kwargs))
        rows = torch.zeros(1, 1, kwargs["target_hidden"].shape[1] + 8, 1)
        kwargs["past_key_values"].update(rows, rows, 0)
        return torch.full((1, 8, 64), 9.0)


def test_a_companion_does_the_work_and_the_script_gives_the_answer():
    target, alone = scripted(p=1.0)
    both = AccompaniedDrafter(target, CONFIG, PLAN, 1.0, 0.5, seed=0)
    both.follow(4, list(range(10, 30)))
    both.companion = Companion()
    # No positions: each round counts on what the cache held before it.
    caches = DynamicCache(), DynamicCache()
    for drafter, cache in zip((alone, both), caches, strict=True):
        for context in (4, 3):
            given = {
                "noise_embedding": torch.zeros(1, 8, 64),
                "target_hidden": torch.zeros(1, context, 128),
                "past_key_values": cache,
            }
            hidden = drafter(**given)
            assert torch.equal(hidden, alone._at(torch.arange(4, 12) + 11 * (context == 3))[None])
        assert cache.get_seq_length() == 23
    assert [list(kwargs) for _, kwargs in both.companion.given] == [list(given)] * 2
    at = torch.arange(9, 20)
    assert torch.equal(both(**given, position_ids=at[None]), alone._at(at[-8:])[None])
    assert "position_ids" in both.companion.given[-1][1]


def test_a_companion_is_named_in_the_specification():
    target = Target(qwen3(), None, "m", has_random_weights=True, drafter_profile="")
    plan = plan_drafts("scripted:0.8+random", target, 8)
    assert parse_scripted("scripted:0.8,0.3+random") == (0.8, 0.3)
    assert chain_acceptance("scripted:0.5+random", 3) == 1.75 and chain_acceptance("random", 3) is None
    assert "whose proposals are dropped" in describe_drafter("scripted:0.8+random")
    assert "costs no time" in describe_drafter("scripted:0.8")
    own = make_drafter("scripted:0.8+random", plan, TinyDrafter, target, seed=0)
    assert isinstance(own, TinyDrafter) and type(own.companion) is TinyDrafter
    assert list(own.companion.parameters()) == list(own.parameters())
    with pytest.raises(RunError, match="no drafter class"):
        make_drafter("scripted:0.8+random", plan, None, target, seed=0)


class TinyDrafter(nn.Module):
    config_class = Qwen3Config

    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.hidden_size, config.hidden_size)
