"""A probe finds out by asking the class: held against what is known of Qwen3.6-27B, and against tiny real models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.profile import Profile, as_text, draw, load_profile, profile_names
from ddaudit.auditor.reports.probe_report import ranges

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from ddaudit.auditor.commands.probe import differences  # noqa: E402 - torch may be missing
from ddaudit.runtime.models.architectures import build_tiny  # noqa: E402
from ddaudit.runtime.probing.observing import facts_of  # noqa: E402
from ddaudit.runtime.probing.probe import build_on_meta, probe  # noqa: E402

ALTERNATING = tuple("LLLF" * 16)


@pytest.fixture(scope="module")
def qwen() -> Profile:
    return probe("qwen3.6-27b")


def test_the_nested_class_of_the_target(qwen: Profile) -> None:
    facts = next(each for each in qwen.classes if each.name == "Qwen3_5ForConditionalGeneration")
    assert facts.input_embeddings == ("", "model", "model.language_model", "model.language_model.embed_tokens")
    assert facts.output_embeddings[-1] == "lm_head"
    assert (facts.layers, facts.final_norm) == ("model.language_model.layers", "model.language_model.norm")
    assert facts.config_fields["hidden_size"] == ("config.text_config.hidden_size",)
    assert facts.config_fields["tie_word_embeddings"][0] == "config.tie_word_embeddings"
    assert (facts.num_hidden_states, facts.is_last_hidden_state_normed, facts.is_tied) == (65, True, False)
    assert facts.has_mrope


@pytest.mark.parametrize("index", [0, 1])
def test_the_layers_and_the_state_of_the_target(qwen: Profile, index: int) -> None:
    facts = qwen.classes[index]
    assert facts.pattern == "LLLF x16"
    assert facts.recurrent_layers == tuple(i for i, letter in enumerate(ALTERNATING) if letter == "L")
    assert facts.recurrent_bytes == 48 * 48 * 128 * 128 * 4
    assert facts.kv_bytes_per_token == 16 * 2 * 4 * 256 * 2
    assert not facts.is_croppable


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from /proc")
def test_a_probe_takes_seconds_and_little_memory() -> None:
    # Not getrusage: a new process starts with the peak of the one that made it, here of all tests before.
    code = (
        "import time; from ddaudit.runtime.probing.probe import probe; started = time.perf_counter();"
        "size = probe('deepseek-v3').classes[0].weight_bytes;"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        "print(size, time.perf_counter() - started, status['VmHWM'].split()[0])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(shown[0]) > 1e12
    assert float(shown[1]) < 30
    assert int(shown[2]) * 1024 < 1e9


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "gpt2", "mamba2"])
def test_what_is_measured_on_meta_is_so_with_numbers(model_type: str) -> None:
    """The same reading of a model with real numbers: shapes, kinds and identities do not depend on the device."""
    real = build_tiny(model_type)
    facts = facts_of(build_on_meta(transformers.AutoModelForCausalLM, real.config).float(), ())
    output = real(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=True, output_hidden_states=True)
    cache = next(value for value in output.values() if hasattr(value, "layers"))
    assert facts.cache_class == type(cache).__name__
    assert facts.num_hidden_states == len(output.hidden_states)
    states = [each for layer in cache.layers for each in getattr(layer, "recurrent_states", {}).values()]
    assert facts.recurrent_bytes == sum(each.numel() * each.element_size() for each in states if each is not None)
    keys = [each for layer in cache.layers for each in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    assert facts.kv_bytes_per_token == sum(each.numel() * each.element_size() for each in keys if each is not None)
    assert real.get_submodule(facts.input_embeddings[-1]) is real.get_input_embeddings()
    assert real.get_submodule(facts.output_embeddings[-1]) is real.get_output_embeddings()


@pytest.mark.parametrize("name", ["gemma-2-2b", "cohere"])
def test_scaled_or_capped_logits_are_seen(name: str) -> None:
    """Held against the head applied by hand to the last hidden state."""
    facts = load_profile(name).classes[0]
    assert facts.logit_operations
    model_type = str(load_profile(name).config["model_type"])
    model = build_tiny(model_type)
    output = model(input_ids=torch.arange(1, 5)[None], output_hidden_states=True)
    by_hand = model.get_output_embeddings()(output.hidden_states[-1])
    assert not torch.allclose(by_hand, output.logits, atol=1e-4)


def test_plain_logits_are_the_heads() -> None:
    assert load_profile("llama-3-8b").classes[0].logit_operations == ()
    model = build_tiny("llama")
    output = model(input_ids=torch.arange(1, 5)[None], output_hidden_states=True)
    assert torch.equal(model.get_output_embeddings()(output.hidden_states[-1]), output.logits)


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3-8b", "gpt2", "jamba", "gemma-3-4b"])
def test_built_in_profiles_are_what_a_probe_finds(name: str) -> None:
    if load_profile(name).transformers != transformers.__version__:
        pytest.skip("the profiles are of another release")
    assert differences(load_profile(name), probe(name)) == []


def test_a_changed_fact_is_named(qwen: Profile) -> None:
    data = json.loads(as_text(qwen))
    data["facts"]["classes"][0]["is_tied"] = True
    changed = Profile.from_json("changed", data)
    assert differences(changed, qwen) == ["Qwen3_5ForCausalLM.is_tied is now False"]


def test_there_are_many_profiles() -> None:
    assert len(profile_names()) >= 30
    for name in profile_names():
        profile = load_profile(name)
        assert Profile.from_json(name, json.loads(as_text(profile))) == profile


def test_a_folder_with_only_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4}
    (folder / "config.json").write_text(json.dumps(config))
    target = tmp_path / "small.json"
    shown = CliRunner().invoke(main, ["probe", str(folder), "--format", "json", "--save", str(target)])
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)["facts"]["classes"][0]
    assert facts["layer_pattern"] == "F x3"
    assert facts["config_fields"]["n_embd"] == ["config.n_embd"]
    assert load_profile(str(target)).classes[0].pattern == "F x3"


def test_code_that_comes_with_a_model_does_not_run_unasked(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "of_its_own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}})
    )
    (tmp_path / "configuration_own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import GPT2Config as OwnConfig\n"
    )
    shown = CliRunner().invoke(main, ["probe", str(tmp_path)])
    assert shown.exit_code == 2
    assert "--trust-remote-code" in shown.output
    assert not mark.exists()


@pytest.mark.parametrize("arguments", [["nosuch"], [], ["tiny-hybrid-dflash"], ["BertTokenizer"]])
def test_what_cannot_be_probed_ends_with_two(arguments: list[str]) -> None:
    shown = CliRunner().invoke(main, ["probe", *arguments])
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("kinds", "drawn"),
    [
        (("linear", "linear", "linear", "full") * 16, "LLLF x16"),
        (("full",) * 12, "F x12"),
        (("sliding", "full") * 3 + ("sliding",), "SF x3 S"),
        (("full", "linear", "linear+full"), "F L H"),
        ((), ""),
    ],
)
def test_drawing(kinds: tuple[str, ...], drawn: str) -> None:
    assert draw(kinds) == drawn


def test_ranges() -> None:
    assert ranges((0, 1, 2, 4, 6, 7)) == "0-2, 4, 6-7"
