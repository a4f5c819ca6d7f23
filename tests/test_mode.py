"""Eager only is asked for a block at a time, and what replay says reaches whoever listens."""

from __future__ import annotations

import pytest
import torch
from tiny_models import qwen3
from transformers import DynamicCache

from ddaudit.runtime import crop_cache, keep_in_cache, make_cache
from ddaudit.runtime.caches.commits import watched_commits
from ddaudit.runtime.caches.mode import eager_only, note_graph, note_refusal, replay_log, replay_wanted


def test_replay_is_wanted_unless_a_block_says_otherwise():
    assert replay_wanted()
    with eager_only(False):
        assert replay_wanted()
        with pytest.raises(KeyError), eager_only():
            with eager_only(False):
                assert not replay_wanted()
            raise KeyError
    assert replay_wanted()


def test_the_log_holds_what_was_said_while_it_was_open():
    note_graph()
    with replay_log() as outer:
        note_refusal("a mask per layer")
        with replay_log() as inner:
            note_graph()
            note_refusal("a mask per layer")
        note_graph()
    note_refusal("too late")
    assert (outer.num_graphs, outer.refusals) == (2, ["a mask per layer"])
    assert (inner.num_graphs, inner.refusals) == (1, ["a mask per layer"])


def test_commits_are_seen_of_every_kind_and_only_while_watched():
    """A meter that missed one would count the commit as the fork's own work."""
    seen = []

    class Watcher:
        def __enter__(self):
            seen.append("in")

        def __exit__(self, *_):
            seen.append("out")

    model, ids = qwen3(), torch.tensor([[5, 6, 7, 8]])
    cache, stock = make_cache(model), DynamicCache(config=model.config)
    for each in (cache, stock):
        model(ids, past_key_values=each, use_cache=True)
    with watched_commits(Watcher):
        keep_in_cache(cache, 0, [0, 1, 2])
        crop_cache(stock, 3)
        cache.crop(-1)
        with pytest.raises(ValueError):
            crop_cache(cache, 9)
    crop_cache(cache, 1)
    assert seen == ["in", "out"] * 4
    assert cache.get_seq_length() == 1 and stock.get_seq_length() == 3
