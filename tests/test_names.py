"""The list of names that a release of Transformers has."""

from __future__ import annotations

import gzip
import importlib.metadata
import json

import pytest
from collect_names import collect, collect_members

from ddaudit.auditor.facts.names import DATA, MEMBERS, RELEASE, has_member, has_module, has_name, parameters


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformers", "AutoModelForCausalLM"),
        ("transformers", "Qwen2TokenizerFast"),
        ("transformers.models", "llama"),
        ("transformers.models.llama", "LlamaConfig"),
        ("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb"),
        ("transformers.models.qwen3.modeling_qwen3", "ALL_ATTENTION_FUNCTIONS"),
        ("transformers.tokenization_utils", "PreTrainedTokenizer"),
        ("transformers.pipelines", "TextGenerationPipeline"),
        ("transformers", "__version__"),
    ],
)
def test_names_that_resolve(module, name):
    assert has_name(module, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformers", "AutoModelForVision2Seq"),
        ("transformers.utils", "is_flash_attn_available"),
        ("transformers.models.llama.modeling_llama", "LlamaFlashAttention2"),
        ("transformers.models.no_such_model", "Config"),
    ],
)
def test_names_that_do_not(module, name):
    assert not has_name(module, name)


def test_modules():
    assert has_module("transformers.masking_utils")
    assert not has_module("transformers.modeling_attn_mask_utils")


def test_list_is_what_the_installed_release_gives():
    """A list written from another release, or by hand, would call working imports broken."""
    pytest.importorskip("transformers")
    if importlib.metadata.version("transformers") != RELEASE:
        pytest.skip(f"the list is of Transformers {RELEASE}")
    listed = json.loads(gzip.decompress(DATA.read_bytes()))
    collected = collect("*.py") | collect("models/qwen3/*.py")
    # What a package shows depends on its other files.
    files = {module: names for module, names in collected.items() if names != "*" and module != "transformers"}
    assert len(files) > 30
    assert {module: listed.get(module) for module in files} == files


LLAMA = "transformers.models.llama.modeling_llama"


@pytest.mark.parametrize("name", ["q_proj", "head_dim", "forward", "training", "register_forward_hook", "__class__"])
def test_members_that_an_attention_module_has(name):
    assert has_member(f"{LLAMA}.LlamaAttention", name)


@pytest.mark.parametrize("owner", ["LlamaAttention", "LlamaFlashAttention2"])
@pytest.mark.parametrize("name", ["num_heads", "hidden_size", "rotary_emb"])
def test_members_that_are_gone(owner, name):
    """A class that is gone itself answers as the family's attention."""
    assert not has_member(f"{LLAMA}.{owner}", name)


def test_nothing_is_said_of_a_class_that_is_not_known():
    assert has_member("transformers.models.no_such.modeling_no_such.Attention", "num_heads")


def test_parameters_of_rotary_functions():
    assert parameters(f"{LLAMA}.apply_rotary_pos_emb") == ("q", "k", "cos", "sin", "unsqueeze_dim")
    assert parameters(f"{LLAMA}.rotate_half") is None


def test_members_are_what_the_installed_release_gives():
    pytest.importorskip("transformers")
    if importlib.metadata.version("transformers") != RELEASE:
        pytest.skip(f"the list is of Transformers {RELEASE}")
    listed = json.loads(gzip.decompress(MEMBERS.read_bytes()))
    collected = collect_members("models/llama/modeling_llama.py")
    # What a class inherits stands in another file, and the modules that torch has depend on its release.
    own = {name: set(members.split()) for name, members in collected.items() if name != "torch.nn.Module"}
    assert len(own) >= 4
    for name, members in own.items():
        assert members <= set(listed[name].split())
