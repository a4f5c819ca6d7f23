"""Targets and drafters: what is loaded, what is built, and what is refused with a remedy."""

from __future__ import annotations

import json
import sys
import time
import types

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from tiny_models import qwen3
from transformers import PreTrainedModel, Qwen3Config

from ddaudit.runtime.drafters.drafting import describe_drafter, make_drafter, plan_drafts
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models import hub as hub_module
from ddaudit.runtime.models import initializing, loading
from ddaudit.runtime.models.initializing import build_random
from ddaudit.runtime.models.loading import choose_device, choose_dtype, load_target
from ddaudit.runtime.models.profile import load_profile, profile_names

CPU = torch.device("cpu")


def load(name, **changes):
    wanted = {"random_weights": False, "loader": "causal-lm", "dtype": "auto", "device": CPU, "seed": 0, **changes}
    return load_target(str(name), **wanted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    qwen3().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny():
    return load("tiny-hybrid", random_weights=True)


class OwnDrafter(PreTrainedModel):
    """A drafter class as research repositories write them: theta read flat, with a silent default."""

    config_class = Qwen3Config

    def __init__(self, config):
        super().__init__(config)
        self.fc = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.theta = getattr(config, "rope_theta", 10000)
        self.block_size = config.block_size
        self.target_layer_ids = config.dflash_config["target_layer_ids"]
        self.post_init()


def test_a_checkpoint_is_loaded_as_it_is(checkpoint):
    target = load(checkpoint)
    assert target.description == "tiny-qwen3 (folder), Qwen3ForCausalLM, checkpoint"
    assert not target.has_random_weights and target.tokenizer is None
    wanted = qwen3().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in target.model.state_dict().items())


def test_random_weights_are_said_seeded_and_leave_the_checkpoint_alone(checkpoint):
    first, again, other = (load(checkpoint, random_weights=True, seed=seed) for seed in (0, 0, 1))
    assert "random weights, seed 0" in first.description and first.has_random_weights
    weight = first.model.get_output_embeddings().weight
    assert torch.equal(weight, again.model.get_output_embeddings().weight)
    assert not torch.equal(weight, other.model.get_output_embeddings().weight)
    assert not torch.equal(weight, load(checkpoint).model.get_output_embeddings().weight)


@pytest.mark.parametrize(
    ("loader", "class_name"),
    [("causal-lm", "Qwen3_5ForCausalLM"), ("conditional", "Qwen3_5ForConditionalGeneration")],
)
def test_both_loader_classes(loader, class_name):
    target = load("tiny-hybrid", random_weights=True, loader=loader)
    assert type(target.model).__name__ == class_name
    assert hasattr(target.model.config, "vision_config") == (loader == "conditional")
    assert not any(tensor.is_meta for tensor in target.model.state_dict().values())


def test_the_big_profile_is_the_published_architecture():
    """On the meta device: its shapes without its 54 GB."""
    config = loading.AutoConfig.for_model(**load_profile("qwen3.6-27b").config)
    with torch.device("meta"):
        model = loading.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kinds = model.config.layer_types
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (48, 16)
    assert 26.8e9 < sum(p.numel() for p in model.parameters()) < 27e9
    assert model.config.rope_parameters["rope_theta"] == 10_000_000


def test_toy_weights_show_faults(tiny):
    """Neutral norms hide a double norm; fast decay hides a state that keeps rejected tokens."""
    weights = dict(tiny.model.named_parameters())
    norms = [w for name, w in weights.items() if "norm" in name]
    assert all(w.std() > 0.1 for w in norms)
    rates = torch.cat([w.exp().flatten() for name, w in weights.items() if name.endswith("A_log")])
    assert rates.max() <= 0.11


def test_large_models_keep_their_own_initialisation(monkeypatch):
    monkeypatch.setattr(initializing, "TOY_PARAMETERS", 0)
    target = load("tiny-hybrid", random_weights=True)
    head = target.model.get_output_embeddings().weight
    assert head.std().item() == pytest.approx(0.02, rel=0.2)


def test_tensors_are_made_in_the_wanted_dtype_at_once():
    """A 27B model must not exist in float32 first."""
    made = []

    def build():
        made.append(torch.nn.Linear(4, 4).to(torch.bfloat16))
        return made[-1]

    model = build_random(build, CPU, "toy", 0)
    assert made[0].weight.is_meta and model is made[1]
    assert load("tiny-hybrid", random_weights=True, dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_class_that_reads_its_tensors_is_built_all_the_same():
    class Reads(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.scale = self.weight.sum().item()

    assert isinstance(build_random(Reads, CPU, "toy", 0).scale, float)


def test_dtype_by_default():
    config = Qwen3Config(dtype="float16")
    assert choose_dtype("auto", CPU, config) is torch.float32
    assert choose_dtype("auto", torch.device("cuda"), config) is torch.float16
    assert choose_dtype("auto", torch.device("cuda"), Qwen3Config()) is torch.bfloat16
    assert choose_dtype("bfloat16", CPU, config) is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "changes", "message", "remedy"),
    [
        ("no-such-model", {}, "no built-in profile", "qwen3.6-27b"),
        ("tiny-hybrid", {}, "without weights", "--random-weights"),
        ("tiny-hybrid-dflash", {"random_weights": True}, "is a drafter", "--drafter"),
    ],
)
def test_unloadable_names_are_refused(name, changes, message, remedy):
    with pytest.raises(RunError, match=message) as caught:
        load(name, **changes)
    assert remedy in caught.value.remedy


def test_a_folder_without_weights_is_refused(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(RunError, match="has no weights") as caught:
        load(tmp_path)
    assert "--random-weights" in caught.value.remedy
    assert load(tmp_path, random_weights=True).has_random_weights


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"no config\.json"):
        load(tmp_path)


def test_a_broken_checkpoint_is_refused(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="does not load"):
        load(tmp_path)


def test_too_little_memory_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(initializing, "free_bytes", lambda device: 10_000)
    made = []
    with pytest.raises(RunError, match="not enough memory") as caught:
        build_random(lambda: made.append(1) or torch.nn.Linear(100, 100), CPU, "toy", 0)
    assert len(made) == 1 and "--dtype" in caught.value.remedy


def test_free_memory_is_known_here():
    free = initializing.free_bytes(CPU)
    if sys.platform == "linux":
        assert free is not None and free > 2**20


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="sees no GPU") as caught:
        choose_device("cuda")
    assert "cpu" in caught.value.remedy
    assert choose_device("auto") == CPU
    with pytest.raises(RunError, match="no device"):
        choose_device("gpu")


@pytest.mark.parametrize("name", profile_names("drafter"))
@pytest.mark.parametrize("place", ["top", "inside"])
def test_block_size_is_read_in_either_place(tiny, tmp_path, name, place):
    config = load_profile(name).config
    size = config.pop("block_size")
    holder = config if place == "top" else config["dflash_config"]
    holder["block_size"] = size + 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_drafts(str(tmp_path), tiny, None)
    assert plan.block_size == plan.config["block_size"] == plan.config["dflash_config"]["block_size"] == size + 1
    assert plan_drafts(str(tmp_path), tiny, 4).block_size == 4


@pytest.mark.parametrize("place", ["flat", "rope_parameters"])
def test_rope_theta_reaches_the_drafter_class(tiny, place):
    """`getattr(config, "rope_theta", 10000)` is silently 10000 under Transformers 5: acceptance then falls."""
    plan = plan_drafts("random", tiny, None)
    if place == "rope_parameters":
        plan.config["rope_parameters"] = {"rope_type": "default", "rope_theta": plan.config.pop("rope_theta")}
    drafter = make_drafter("random", plan, OwnDrafter, tiny, 0)
    assert drafter.theta == drafter.config.rope_parameters["rope_theta"] == 10_000_000


def test_a_random_drafter_is_the_repositorys_own(tiny):
    plan = plan_drafts("random", tiny, None)
    drafter = make_drafter("random", plan, OwnDrafter, tiny, 0)
    assert isinstance(drafter, OwnDrafter) and drafter.dtype == tiny.model.dtype
    assert (drafter.block_size, drafter.target_layer_ids) == (16, [0, 2])
    for spec in ("random", "tiny-hybrid-dflash"):
        with pytest.raises(RunError, match=f"no drafter class .* `--drafter {spec}`"):
            make_drafter(spec, plan, None, tiny, 0)


def test_a_trained_drafter_is_loaded_into_the_repositorys_class(tiny, tmp_path):
    plan = plan_drafts("random", tiny, None)
    saved = make_drafter("random", plan, OwnDrafter, tiny, 3)
    saved.save_pretrained(tmp_path / "drafter")
    spec = str(tmp_path / "drafter")
    loaded = make_drafter(spec, plan_drafts(spec, tiny, None), OwnDrafter, tiny, 0)
    assert torch.equal(loaded.fc.weight, saved.fc.weight) and loaded.theta == 10_000_000
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(RunError, match="has no weights"):
        make_drafter(spec, plan, OwnDrafter, tiny, 0)


def test_a_scripted_drafter_is_an_instance_of_the_repositorys_class(tiny):
    """So that its methods can be entries, without its layers."""
    drafter = make_drafter("scripted:0.5", plan_drafts("scripted:0.5", tiny, None), OwnDrafter, tiny, 0)
    assert isinstance(drafter, OwnDrafter) and not list(drafter.parameters())
    assert (drafter.block_size, drafter.mask_token_id, drafter.device.type) == (16, 319, "cpu")


def test_a_drafter_plan_is_derived_for_any_target(checkpoint):
    target = load(checkpoint)
    plan = plan_drafts("random", target, 5)
    assert (plan.block_size, plan.mask_token_id, plan.target_layer_ids) == (5, 100, (0, 1, 2))
    assert plan.config["hidden_size"] == 64
    assert (
        make_drafter("random", plan, OwnDrafter, target, 0).theta == target.model.config.rope_parameters["rope_theta"]
    )


def test_a_target_is_no_drafter(tiny):
    with pytest.raises(RunError, match="is a target"):
        plan_drafts("tiny-hybrid", tiny, None)


def test_drafters_are_described_plainly():
    assert describe_drafter("random") == "the repository's own class, random weights"
    assert "chance 0.7" in describe_drafter("scripted:0.7")
    assert "built-in profile, random weights" in describe_drafter("qwen3.6-27b-dflash")


# The hub


@pytest.fixture
def hub(monkeypatch):
    """The hub answers as told, and what is loaded notes how."""
    calls = []

    def answer(error=None, seconds=0.0):
        def model_info(self, name, timeout):
            calls.append(("asked", name))
            time.sleep(seconds)
            if error:
                raise error

        monkeypatch.setattr(hub_module.HfApi, "model_info", model_info)

    def from_pretrained(name, local_files_only, **arguments):
        calls.append(("local" if local_files_only else "loaded", name))
        raise OSError("We couldn't connect, after 23 seconds\nand more lines")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", from_pretrained)
    hub_module.why_offline.cache_clear()
    yield answer, calls
    hub_module.why_offline.cache_clear()


def test_only_a_hub_id_asks_the_hub(hub, checkpoint):
    _, calls = hub
    load("tiny-hybrid", random_weights=True)
    with pytest.raises(RunError):
        load("no-such-model")
    with pytest.raises(RunError):
        load(checkpoint)
    assert {kind for kind, _ in calls} == {"local"}


def test_without_a_network_the_hub_is_asked_once_and_the_cache_serves(hub):
    answer, calls = hub
    answer(ConnectionError("Name or service not known"))
    with pytest.raises(RunError, match=r"does not answer \(ConnectionError: Name or service not known\)") as caught:
        load("some/model")
    assert calls == [("asked", "some/model"), ("local", "some/model")]
    assert "no folder here" in str(caught.value) and "tiny-hybrid" in caught.value.remedy
    with pytest.raises(RunError, match="does not answer"):
        plan_drafts("some/model", load("tiny-hybrid", random_weights=True), None)
    assert calls.count(("asked", "some/model")) == 1


def test_a_hub_that_never_answers_is_given_up_on(hub, monkeypatch):
    answer, _ = hub
    answer(seconds=5)
    monkeypatch.setattr(hub_module, "_PATIENCE_S", 0.05)
    start = time.monotonic()
    with pytest.raises(RunError, match="no answer in"):
        load("some/model")
    assert time.monotonic() - start < 3


def test_a_hub_that_answers_is_asked_for_the_files(hub):
    answer, calls = hub
    answer()
    with pytest.raises(RunError, match=r"`some/model` does not load: .*We couldn't connect, after 23 seconds$"):
        load("some/model")
    assert calls == [("asked", "some/model"), ("loaded", "some/model")]


def test_a_name_that_the_hub_does_not_know_is_refused(hub):
    answer, calls = hub
    response = types.SimpleNamespace(headers={}, request=None, status_code=404, text="")
    answer(RepositoryNotFoundError("404", response=response))
    with pytest.raises(RunError, match="no folder here, and the hub has no such model"):
        load("models/qwen")
    assert calls == [("asked", "models/qwen")]


@pytest.mark.parametrize(("typed", "meant"), [("tiny-hybird", "tiny-hybrid"), ("Tiny-Traind", "tiny-trained")])
def test_a_misspelt_model_is_told_the_name_that_is_nearest(typed, meant):
    with pytest.raises(RunError) as error:
        load_profile(typed)
    assert error.value.remedy.startswith(f"did you mean `{meant}`? ")
