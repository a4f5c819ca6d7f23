"""Whatever is done to two caches of one model, in any order, a replayed one holds what an eager one holds."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from test_replay import assert_same, feed, pair, text
from tiny_models import EXACT

from ddaudit.runtime import crop_cache, keep_in_cache
from ddaudit.runtime.caches.window import ROOT
from ddaudit.runtime.replay import memory, prefill, target

LONGEST_TEXT = 700


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Prompts of several pieces, and memory that is outgrown, at the length of these texts."""
    monkeypatch.setattr(prefill, "PIECE", 140)
    monkeypatch.setattr(target, "PIECE", 140)
    monkeypatch.setattr(memory, "ROOM", 128)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_5-composite", "olmo-hybrid"])
def test_any_sequence_is_as_eager(name, seed):
    chance = random.Random(seed)
    model = EXACT[name]()
    caches = [pair(model), pair(model)]
    for step in range(12):
        number = chance.randrange(2)
        what = chance.choice([fed, fed, fed, fed_long, fed_tree, cropped, copied, started_again])
        caches[number] = what(model, caches[number], chance, step)
        eager, replayed = caches[number]
        assert replayed.get_seq_length() == eager.get_seq_length()


def fed(model, caches, chance, step, lengths=(1, 1, 2, 3, 16, 17, 40)):
    eager, replayed = caches
    held, length = eager.get_seq_length(), chance.choice(lengths)
    if held + length > LONGEST_TEXT:
        return caches
    given = {"logits_to_keep": chance.choice([1, 7, 200])} if chance.random() < 0.3 else {}
    if chance.random() < 0.3:
        given["position_ids"] = torch.arange(held, held + length)[None]
    if chance.random() < 0.3:
        given["attention_mask"] = torch.ones(1, held + length, dtype=torch.long)
    ids = text(length, step)
    assert_same(feed(model, replayed, ids, **given), feed(model, eager, ids, **given))
    if chance.random() < 0.4:
        kept = chance.randrange(length + 1)
        for cache in caches:
            crop_cache(cache, held + kept)
    return caches


def fed_long(model, caches, chance, step):
    return fed(model, caches, chance, step, lengths=(130, 141, 280, 300))


def fed_tree(model, caches, chance, step):
    eager, replayed = caches
    if not eager.get_seq_length():
        return caches
    parents = [ROOT]
    for node in range(1, chance.choice([2, 5, 16, 33, 64])):
        parents.append(chance.choice([ROOT, *range(max(0, node - 5), node)]))
    ids = text(len(parents), step)
    assert_same(feed(model, replayed, ids, tuple(parents)), feed(model, eager, ids, tuple(parents)))
    path, at = [], ROOT
    while children := [node for node, parent in enumerate(parents) if parent == at]:
        if chance.random() < 0.3:
            break
        at = chance.choice(children)
        path.append(at)
    for cache in caches:
        keep_in_cache(cache, cache.window.start, path)
    return caches


def cropped(model, caches, chance, step):
    length = chance.randrange(caches[0].get_seq_length() + 1)
    for cache in caches:
        crop_cache(cache, length)
    return caches


def copied(model, caches, chance, step):
    return copy.deepcopy(caches)


def started_again(model, caches, chance, step):
    for cache in caches:
        cache.reset()
    return caches
