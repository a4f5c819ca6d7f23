"""The list of names that a release of Transformers has."""

from __future__ import annotations

import gzip
import importlib.metadata
import json

import pytest
from collect_names import collect

from ddaudit.auditor.names import DATA, RELEASE, has_module, has_name


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
