"""What rewritten code does, run on tiny models: right where the original fails, and as before where it works."""

from __future__ import annotations

import textwrap

import pytest

from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.fixing.applying import apply_fixes
from ddaudit.auditor.sources.source import SourceFile

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import VOCABULARY, llama, qwen3, qwen3_5, qwen3_5_composite  # noqa: E402

FAMILIES = [qwen3, llama, qwen3_5, qwen3_5_composite]


def fixed(text, *slugs):
    """The text after every fix of these rules, pass after pass."""
    source = SourceFile("example.py", textwrap.dedent(text).lstrip("\n"))
    for _ in range(5):
        findings = scan_sources({"example.py": source}, select=slugs).findings
        wanted = [finding for finding in findings if finding.fix]
        if not wanted:
            return source.text
        source = apply_fixes(source, wanted).source
    raise AssertionError("the fixes do not settle")


def run(text, name, *args):
    space: dict[str, object] = {}
    exec(compile(text, "example.py", "exec"), space)
    return space[name](*args)


def prompt(rows=2, length=7):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_keeps_every_row(family):
    text = fixed(
        """
        from transformers import PreTrainedModel

        def tap(model: PreTrainedModel, ids):
            store = []

            def hook(module, args, output):
                store.append(output[0])

            handle = model.get_decoder().layers[1].register_forward_hook(hook)
            model(ids)
            handle.remove()
            return store[0]
        """,
        "layer-output-index",
    )
    model, ids = family(), prompt()
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        assert torch.equal(run(text, "tap", model, ids), states[2])


def test_without_the_rewrite_a_hook_loses_rows():
    """The check above can fail."""
    store = []
    model, ids = qwen3(), prompt()
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: store.append(output[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    assert store[0].shape[0] == ids.shape[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_embedding_and_norm_are_found_below_any_class(family):
    text = fixed(
        """
        from transformers import PreTrainedModel

        def parts(model: PreTrainedModel, ids):
            return len(model.model.layers), model.model.embed_tokens(ids), model.model.norm
        """,
        "model-path",
    )
    model = family()
    count, states, norm = run(text, "parts", model, prompt())
    assert count == 4
    assert torch.equal(states, model.get_input_embeddings()(prompt()))
    assert norm is model.get_decoder().norm


@pytest.mark.parametrize("family", FAMILIES)
def test_head_gives_the_models_own_logits(family):
    text = fixed(
        """
        from transformers import PreTrainedModel

        def last(model: PreTrainedModel, ids):
            states = model(ids, output_hidden_states=True).hidden_states[-1]
            return model.lm_head(states)
        """,
        "lm-head",
    )
    assert "get_output_embeddings()" in text
    model, ids = family(), prompt()
    with torch.no_grad():
        torch.testing.assert_close(run(text, "last", model, ids), model(ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_flag_that_the_decoder_reads_turns_the_cache_off(family):
    text = fixed(
        """
        from transformers import PreTrainedModel

        def prepare(model: PreTrainedModel):
            model.config.use_cache = False
            return model.config.num_hidden_layers
        """,
        "flat-config-attribute",
    )
    model = family()
    assert run(text, "prepare", model) == 4
    with torch.no_grad():
        assert model(prompt()).past_key_values is None


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_a_cache_is_decoding_without(family):
    text = fixed(
        """
        import torch
        from transformers import DynamicCache, PreTrainedModel

        def greedy(model: PreTrainedModel, ids, steps):
            past, out = DynamicCache(), []
            for _ in range(steps):
                ids = model(ids, cache=past, use_cache=True).logits[:, -1:].argmax(-1)
                out.append(ids)
            return torch.cat(out, dim=1)
        """,
        "bare-cache",
    )
    model, ids = family(), prompt(rows=1)
    with torch.no_grad():
        cached = run(text, "greedy", model, ids, 6)
        for column in range(6):
            nxt = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
            assert torch.equal(cached[:, column : column + 1], nxt)
            ids = torch.cat([ids, nxt], dim=1)


def test_a_compiled_models_state_loads_into_a_plain_one():
    text = fixed(
        """
        import torch
        from transformers import PreTrainedModel

        def state(model: PreTrainedModel):
            runner = torch.compile(model)
            return runner.state_dict(), isinstance(runner, PreTrainedModel)
        """,
        "wrapper-path",
    )
    state, is_model = run(text, "state", qwen3())
    assert is_model
    qwen3(seed=1).load_state_dict(state)


def test_a_template_gives_ids_to_code_that_measures_them():
    class Tokenizer:
        """Returns what Transformers 5 returns: a mapping, unless it is told otherwise."""

        def apply_chat_template(self, messages, return_dict=True):
            ids = list(range(5 * len(messages)))
            return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    text = """
        def labels(tokenizer, question, answer):
            head = tokenizer.apply_chat_template(question)
            full = tokenizer.apply_chat_template(question + answer)
            return [-100] * len(head) + list(full[len(head) :])
    """
    once = fixed(text, "chat-template-encoding")
    assert run(once, "labels", Tokenizer(), ["q"], ["a"]) == [-100] * 5 + [5, 6, 7, 8, 9]
    with pytest.raises((KeyError, TypeError)):
        run(textwrap.dedent(text), "labels", Tokenizer(), ["q"], ["a"])


OBVIOUS_AND_WRONG = {
    "the tie flag that counts is not the text config's": (
        "return model.config.tie_word_embeddings, model.config.hidden_size", "get_text_config().tie_word",
    ),
    "a parameter under the new name is no longer None at the first step": (
        "def g(past_key_values=None):\n        return past_key_values is not None\n"
        "    return model(ids, past_key_values=g)",
        "def g(cache",
    ),
    "old tuples hold no linear layer, and a sliding one at the wrong length": (
        "return DynamicCache.from_legacy_cache(ids)", "ddp_cache_data",
    ),
    "the final norm has another name below some decoders": ("return model.model.norm", "get_decoder().norm"),
    "recorded or not, a stock cache keeps a recurrent state's rejected tokens": (
        "cache = DynamicCache(config=model.config)\n    model(ids, cache=cache)\n    cache.crop(-2)", "cache.crop",
    ),
    "a cache with a config alone cannot be cut back on sliding layers": (
        "cache = DynamicCache()\n    model(ids, cache=cache)\n    cache.crop(5)", "DynamicCache(config",
    ),
    "a query projection may hold the output gate too": (
        "return ids.view(1, -1, model.config.hidden_size // model.config.num_attention_heads)", "head_dim",
    ),
    "the keys of the first layer are not as long as the text, or are not there": (
        "return model(ids).cache[0][0].shape[2]", ".keys",
    ),
    "a limit of -1 is no limit, under any name": (
        "cache = model(ids).cache\n    limit = cache.get_max_cache_shape()\n    return limit is not None and limit < 9",
        "get_max_length",
    ),
    "keys of layers that have none": ("return model(ids).cache.key_cache[0]", ".keys"),
    "another family's attention is not found by the new name of one": (
        "from transformers.models.llama.modeling_llama import LlamaFlashAttention2\n"
        "    return [each for each in model.modules() if isinstance(each, LlamaFlashAttention2)]",
        " LlamaAttention",
    ),
    "rotary parameters may be nested by the kind of layer": (
        "return getattr(model.config, 'rope_theta', 10000.0)", "rope_parameters",
    ),
    "a layer's number is no index into the maps": (
        "return [model(ids, output_attentions=True).attentions[i] for i in range(3)]", "attentions[3",
    ),
    "a causal mask that a function makes is None, or not of numbers": (
        "from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask as make\n"
        "    return make(None, (1, 3), ids, 0) + 1.0",
        "create_causal_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "never"), OBVIOUS_AND_WRONG.values(), ids=OBVIOUS_AND_WRONG)
def test_rewrites_that_look_obvious_and_are_wrong_are_never_made(body, never):
    text = (
        f"from transformers import DynamicCache, PreTrainedModel\n\ndef f(model: PreTrainedModel, ids):\n    {body}\n"
    )
    assert scan_sources({"example.py": SourceFile("example.py", text)}).findings, "nothing to fix shows nothing"
    once = fixed(text)
    assert never not in once
    compile(once, "example.py", "exec")
