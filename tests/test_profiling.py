"""Bytes are counted from the modules and caches themselves, and each stage stands against the floor of the run."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from test_settling import FORK
from tiny_models import gemma3, qwen3, qwen3_5, qwen3_5_composite

from ddaudit.auditor.cli import main
from ddaudit.auditor.record import Floor, RunRecord
from ddaudit.runtime import crop_cache, make_cache
from ddaudit.runtime.checks.decoding import stock_cache
from ddaudit.runtime.models.architecture import decoder
from ddaudit.runtime.running.profiling import kv_bytes, measure_floor, stage_costs, state_bytes, weights_read

PROMPT = tuple(range(1, 10))
FLOOR = Floor(copy_bytes_per_s=1e9, weight_bytes=1000, weight_read_s=0.002)


def test_a_table_of_embeddings_is_read_only_where_it_is_the_head():
    apart, tied = qwen3(), qwen3(tie_word_embeddings=True)
    # All of a text model's weights but the table, or all of them: then the table is the head.
    assert sum(map(torch.numel, weights_read(apart))) == apart.num_parameters() - 101 * 64
    assert sum(map(torch.numel, weights_read(tied))) == tied.num_parameters()


def test_a_vision_tower_is_not_read():
    model = qwen3_5_composite()
    read = sum(map(torch.numel, weights_read(model)))
    assert read == sum(map(torch.numel, decoder(model).parameters())) < model.num_parameters() - 101 * 64


def test_keys_and_values_are_those_of_the_cache():
    model = qwen3_5()
    for cache in (stock_cache(model, PROMPT), make_cache(model)):
        if not cache.get_seq_length():
            model(torch.tensor([PROMPT]), past_key_values=cache, use_cache=True)
            crop_cache(cache, len(PROMPT))
        held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        slow = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in held)
        assert kv_bytes(cache, len(PROMPT)) == slow > 0
        assert kv_bytes(cache, 100) * len(PROMPT) == 100 * slow
        states = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
        assert state_bytes(cache) == 4 * sum(
            layer.recurrent_states[0].numel() + layer.conv_states[0].numel() for layer in states
        )
    assert state_bytes(stock_cache(qwen3(), PROMPT)) == 0
    assert kv_bytes(None, 100) == state_bytes(None) == 0


def test_a_sliding_window_is_read_no_further_than_it_reaches():
    cache = stock_cache(gemma3(), PROMPT)
    # Three of four layers see 6 tokens; a token is 2 heads of 16, K and V, in float32.
    assert kv_bytes(cache, 100) == (3 * 6 + 100) * 2 * 16 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_floor_is_measured(dtype):
    model = qwen3().to(dtype)
    floor = measure_floor(model)
    assert floor.copy_bytes_per_s > 1e8 and floor.weight_read_s > 0
    assert floor.weight_bytes == sum(weight.numel() * weight.element_size() for weight in weights_read(model))


def test_costs_are_of_the_mean_round():
    costs = stage_costs({"verify": 0.04, "host": 0.02}, {"verify": 10_000_000}, 10, FLOOR)
    assert [cost.name for cost in costs] == ["verify", "host", "round"]
    verify, host, whole = costs
    assert (verify.seconds, verify.bytes, verify.floor_s) == (0.004, 1_001_000, pytest.approx(0.003))
    assert (host.bytes, host.floor_s, host.ratio) == (0, 0.0, None)
    assert (whole.seconds, whole.bytes) == (pytest.approx(0.006), verify.bytes)
    assert whole.ratio == pytest.approx(2)


def test_a_profile_of_a_run(tmp_path):
    path = tmp_path / "r.json"
    arguments = ["run", str(FORK), "--model", "tiny-hybrid", "--random-weights", "--device", "cpu", "--eager"]
    arguments += ["--max-new-tokens", "24", "--num-prompts", "1", "--json", str(path)]
    result = CliRunner().invoke(main, [*arguments, "--profile"])
    assert result.exit_code == 0, result.output
    record = RunRecord.from_json(json.loads(path.read_text()))
    assert record.execution == "eager" and record.plain_replayed is None
    assert [cost.name for cost in record.plain.costs] == ["verify", "round"]
    for entry in record.entries:
        *stages, whole = entry.costs
        assert [stage.name for stage in stages] == ["draft", "verify", "commit", "host"]
        assert whole.seconds == pytest.approx(sum(entry.measured_s.values()) / entry.rounds)
        assert whole.seconds * entry.rounds == pytest.approx(entry.decode_s)
        assert stages[1].bytes > record.floor.weight_bytes and whole.ratio > 1
    plain, tree = record.entries[1].costs, record.entries[2].costs
    assert plain[0].bytes == plain[2].bytes == 0 < tree[0].bytes
    table = result.output.partition("profile: ")[2].partition("\n\n")[0].splitlines()
    assert table[1].split() == ["a", "mean", "round", "ms", "MB", "floor", "ms", "x", "floor", "x", "weights"]
    assert [line.split()[0] for line in table[2:5]] == ["plain", record.entries[0].name, "draft"]
    assert max(map(len, table)) <= 100
    unprofiled = CliRunner().invoke(main, arguments)
    assert "profile: " not in unprofiled.output and json.loads(path.read_text())["floor"] is None
