"""Each fix on architectures whose parts have different names: the original and the fixed code give equal tensors.

A case is code with a function `f(model, ids)`; what stands in `{}` is written as each architecture needs it. Where the
original raises on the installed release, the fixed code is held against a reference that uses no cache and no path.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

from test_rewrites import fixed, run  # noqa: E402 - torch may be missing
from tiny_models import VOCABULARY, gemma3, gpt2, llama, qwen3, qwen3_5, qwen3_5_composite  # noqa: E402

from ddaudit.auditor.rule import all_rules  # noqa: E402
from ddaudit.auditor.rule_table import fixes  # noqa: E402
from ddaudit.runtime.models.architectures import build_tiny  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD = "import torch\nfrom transformers import DynamicCache, PreTrainedModel\n\n"


def gpt_neox() -> Any:
    return build_tiny("gpt_neox")


BUILD: dict[str, Callable[[], Any]] = {
    "qwen3": qwen3, "llama": llama, "gpt2": gpt2, "gpt_neox": gpt_neox, "gemma3": gemma3,
    "qwen3_5": qwen3_5, "composite": qwen3_5_composite,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    slug: str
    code: str
    written: dict[str, str]
    """What stands in `{}`, by the architecture on which the original runs."""
    reference: Callable[[Any, Any], Any] | None = None
    """What the fixed code gives on `also`, where the original raises."""
    also: tuple[str, ...] = ()
    name: str = ""
    rules: tuple[str, ...] = field(default=())
    """Further rules whose fixes the code needs."""

    @property
    def text(self) -> str:
        return HEAD + textwrap.dedent(self.code).lstrip("\n")


ANY = {"qwen3": "", "gpt2": "", "gpt_neox": ""}


def embedded(model: Any, ids: Any) -> Any:
    return model.get_input_embeddings()(ids)


def logits(model: Any, ids: Any) -> Any:
    return model(ids, use_cache=False).logits


def rewound(model: Any, ids: Any) -> Any:
    """The last logits when the last three tokens were rejected and the first came again."""
    return logits(model, torch.cat([ids[:, :-3], ids[:, :1]], 1))[:, -1]


def kept(model: Any, ids: Any) -> Any:
    """The last logits when of the last three tokens, three branches, the middle one was kept and the first came."""
    return logits(model, torch.cat([ids[:, :-3], ids[:, -2:-1], ids[:, :1]], 1))[:, -1]


REWIND = """
    def f(model: PreTrainedModel, ids):
        cache = {}
        model(ids, cache=cache)
        cache.crop({}-3)
        return model(ids[:, :1], cache=cache).logits[:, -1]
"""
CASES = [
    Case(
        "model-path",
        "def f(model: PreTrainedModel, ids):\n    return {}(ids)\n",
        {"qwen3": "model.model.embed_tokens", "gpt2": "model.transformer.wte", "gpt_neox": "model.gpt_neox.embed_in",
         "gemma3": "model.model.embed_tokens"},
        embedded, ("composite",), "embedding",
    ),
    Case(
        "model-path",
        """
        def f(model: PreTrainedModel, ids):
            return torch.stack([sum(each.sum() for each in block.parameters()) for block in {}])
        """,
        {"qwen3": "model.model.layers", "gpt2": "model.transformer.h", "gpt_neox": "model.gpt_neox.layers"},
        name="blocks",
    ),
    Case(
        "model-path",
        "def f(model: PreTrainedModel, ids):\n    return {}(model.get_input_embeddings()(ids))\n",
        {"qwen3": "model.model.norm", "gpt2": "model.transformer.ln_f", "gpt_neox": "model.gpt_neox.final_layer_norm"},
        name="norm",
    ),
    Case(
        "lm-head",
        """
        def f(model: PreTrainedModel, ids):
            return {}(model(ids, output_hidden_states=True).hidden_states[-1])
        """,
        dict.fromkeys(("qwen3", "gpt2", "gpt_neox", "composite"), "model.lm_head"), name="called",
    ),
    Case(
        "lm-head",
        """
        def f(model: PreTrainedModel, ids):
            states = model(ids, output_hidden_states=True).hidden_states[-1]
            return states @ {}.weight.T
        """,
        dict.fromkeys(("qwen3", "gpt2", "gpt_neox", "composite"), "model.lm_head"), name="product",
    ),
    Case(
        "bare-cache",
        """
        def f(model: PreTrainedModel, ids):
            cache = DynamicCache()
            model(ids[:, :-1], cache=cache)
            return model(ids[:, -1:], cache=cache).logits[:, -1]
        """,
        {**ANY, "gemma3": ""},
        lambda model, ids: logits(model, ids)[:, -1], ("qwen3_5", "composite"),
    ),
    Case("cache-crop", REWIND.replace("{}", "DynamicCache()", 1).replace("{}", "", 1), {**ANY, "gemma3": ""},
         rewound, ("qwen3_5", "composite"), "count", ("bare-cache",)),
    Case("cache-crop", REWIND.replace("{}", "DynamicCache()", 1).replace("{}", "ids.shape[1] ", 1), {}, rewound,
         ("qwen3", "gpt2", "gpt_neox", "qwen3_5"), "length", ("bare-cache",)),
    Case("stock-cache-rollback", REWIND.replace("{}", "DynamicCache(config=model.config)", 1).replace("{}", "", 1), ANY,
         rewound, ("qwen3_5", "composite", "gemma3"), rules=("cache-crop",)),
    Case(
        "hand-compaction",
        """
        def f(model: PreTrainedModel, ids):
            cache = DynamicCache()
            past = ids.shape[1] - 3
            model(ids[:, :past], cache=cache)
            model(ids[:, past:], cache=cache, attention_mask=mask(past)[None, None], position_ids=places(past))
            path = torch.tensor([1])
            for layer in cache.layers:
                rows = path + past
                layer.keys[:, :, past : past + len(path)] = layer.keys[:, :, rows]
                layer.values[:, :, past : past + len(path)] = layer.values[:, :, rows]
            cache.crop(past + len(path){})
            return model(ids[:, :1], cache=cache).logits[:, -1]

        def mask(past):
            allowed = torch.ones(3, past + 3, dtype=torch.bool)
            allowed[:, past:] = torch.eye(3, dtype=torch.bool)
            return allowed

        def places(past):
            return torch.full((1, 3), past)
        """,
        dict.fromkeys(("qwen3", "llama", "gpt_neox"), " - cache.get_seq_length()"), kept, ("qwen3_5", "composite"),
        rules=("bare-cache", "cache-crop", "tree-mask"),
    ),
    Case(
        "cache-internals",
        """
        def f(model: PreTrainedModel, ids):
            cache = DynamicCache(config=model.config)
            model(ids, cache=cache)
            return torch.tensor(cache.seen_tokens)
        """,
        {}, lambda model, ids: torch.tensor(ids.shape[1]), ("qwen3", "gpt2", "gpt_neox", "gemma3", "qwen3_5"), "length",
    ),
    Case(
        "cache-internals",
        """
        def f(model: PreTrainedModel, ids):
            cache = DynamicCache(config=model.config)
            model(ids, cache=cache)
            return torch.tensor(cache[0][0].shape[2])
        """,
        {}, lambda model, ids: torch.tensor(ids.shape[1]), ("qwen3", "gpt2", "gpt_neox", "gemma3", "qwen3_5"), "pair",
    ),
    Case(
        "layer-output-index",
        """
        def f(model: PreTrainedModel, ids):
            store = []

            def hook(module, args, output):
                store.append(output[0])

            handle = model.get_decoder().layers[1].register_forward_hook(hook)
            model(ids)
            handle.remove()
            return store[0]
        """,
        {}, lambda model, ids: model(ids, output_hidden_states=True).hidden_states[2],
        ("qwen3", "llama", "gpt_neox", "gemma3", "composite"),
    ),
    Case(
        "flat-config-attribute",
        """
        def f(model: PreTrainedModel, ids):
            return torch.tensor([model.config.{}, getattr(model.config, "vocab_size", 0)])
        """,
        {"qwen3": "hidden_size", "gpt2": "n_embd", "gpt_neox": "num_hidden_layers", "gemma3": "num_attention_heads"},
    ),
    Case(
        "deprecated-keyword",
        """
        def f(model: PreTrainedModel, ids):
            out = model(ids[:, :-1], use_cache=True)
            return model(ids[:, -1:], past_key_values=out.past_key_values).logits
        """,
        {**ANY, "qwen3_5": ""}, name="cache",
    ),
    Case(
        "deprecated-keyword",
        """
        def f(model: PreTrainedModel, ids):
            fields = dict(model(ids, use_cache=True))
            return torch.tensor(fields["past_key_values"].get_seq_length())
        """,
        {}, lambda model, ids: torch.tensor(ids.shape[1]), ("qwen3", "gpt2", "gpt_neox", "qwen3_5"), "dict",
    ),
    Case(
        "deprecated-keyword",
        """
        from transformers import AutoModelForCausalLM

        def f(model: PreTrainedModel, ids):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(model.config, torch_dtype=torch.bfloat16)(ids).logits
        """,
        ANY, name="dtype",
    ),
    Case(
        "mask-token-filter",
        """
        def f(model: PreTrainedModel, ids, mask_token_id=0):
            out = torch.full((1, 40), mask_token_id)
            out[:, : ids.shape[1]] = ids
            start, limit = ids.shape[1] - 1, ids.shape[1] + 12
            while start < limit:
                best = model(out[:, : start + 1], use_cache=False).logits[:, -1].argmax(-1)
                count = 1
                out[:, start : start + count] = out[:, start : start + count]
                out[:, start + count] = best
                start += count
            out = out[:, : limit + 1]
            out = out[:, out[0] != mask_token_id]
            return out
        """,
        ANY,
    ),
    Case(
        "wrapper-path",
        """
        def f(model: PreTrainedModel, ids):
            runner = torch.compile(model)
            return torch.stack([value.float().sum() for value in runner.state_dict().values()])
        """,
        ANY, name="compiled",
    ),
    Case(
        "wrapper-path",
        """
        from types import SimpleNamespace

        def f(model: PreTrainedModel, ids):
            held = SimpleNamespace(base_model=SimpleNamespace(model=model), get_base_model=lambda: model)
            return through(held, ids)

        def through(peft_model, ids):
            return peft_model.base_model.model.{}(ids)
        """,
        {"qwen3": "model.embed_tokens", "gpt2": "transformer.wte", "gpt_neox": "gpt_neox.embed_in"}, name="adapter",
    ),
    Case(
        "hidden-index",
        """
        def f(model: PreTrainedModel, ids):
            states = model(ids, output_hidden_states=True).hidden_states
            return torch.stack([states[layer + 1] for layer in range(3)])
        """,
        {**ANY, "qwen3_5": ""}, name="tap",
    ),
    Case(
        "hidden-index",
        """
        def f(model: PreTrainedModel, ids):
            norm, rows = model.model.norm, []
            states = model(ids, output_hidden_states=True).hidden_states
            for state in states:
                rows.append(model.lm_head(norm(state)))
            return rows[-1]
        """,
        {}, logits, ("qwen3", "llama", "qwen3_5", "composite"), "lens", ("model-path", "lm-head"),
    ),
    Case(
        "tap-offset",
        """
        def f(model: PreTrainedModel, ids, target_layer_ids=(0, 1, 2)):
            states = model(ids, output_hidden_states=True).hidden_states
            return torch.stack([states[layer] for layer in target_layer_ids])
        """,
        {}, lambda model, ids: torch.stack(model(ids, output_hidden_states=True).hidden_states[1:4]),
        ("qwen3", "gpt2", "gpt_neox", "qwen3_5"),
    ),
    Case(
        "rope-position",
        """
        from transformers import AutoModelForCausalLM

        def f(model: PreTrainedModel, ids):
            torch.manual_seed(0)
            config = model.config
            config.rope_theta = 5e5
            return AutoModelForCausalLM.from_config(config)(ids).logits
        """,
        {}, lambda model, ids: rebased(model)(ids).logits, ("qwen3", "llama"),
    ),
]  # fmt: skip


def rebased(model: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}
    return AutoModelForCausalLM.from_config(model.config)


def label(case: Case, family: str) -> str:
    return f"{case.slug}{f' {case.name}' if case.name else ''}, {family}"


SAME = [pytest.param(case, family, id=label(case, family)) for case in CASES for family in case.written]
RIGHT = [pytest.param(case, family, id=label(case, family)) for case in CASES for family in case.also]


def prompt(length: int = 10) -> Any:
    return torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(3))


def rewritten(case: Case, text: str) -> str:
    found = fixed(text, case.slug, *case.rules)
    assert found != text, "nothing was fixed"
    return found


@pytest.mark.parametrize(("case", "family"), SAME)
def test_fixed_code_gives_the_originals_tensors(case: Case, family: str) -> None:
    text = case.text.replace("{}", case.written[family])
    with torch.no_grad():
        before = run(text, "f", BUILD[family](), prompt())
        after = run(rewritten(case, text), "f", BUILD[family](), prompt())
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("case", "family"), RIGHT)
def test_fixed_code_is_right_where_the_original_is_not(case: Case, family: str) -> None:
    text = case.text.replace("{}", next(iter(case.written.values()), ""))
    assert case.reference is not None
    with torch.no_grad():
        expected = case.reference(BUILD[family](), prompt())
        torch.testing.assert_close(run(rewritten(case, text), "f", BUILD[family](), prompt()), expected,
                                   rtol=2e-4, atol=2e-4)  # fmt: skip
        try:
            found = run(text, "f", BUILD[family](), prompt())
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return
        # Right by luck would show nothing: the original raises, or is wrong.
        assert found.shape != expected.shape or not torch.allclose(found, expected, rtol=2e-4, atol=2e-4)


# A tokenizer's ids, a machine's clock and a comment are no tensors of a model; `test_rewrites` runs the first.
WITHOUT_A_MODEL = {"chat-template-encoding", "faulty-suppression", "unguarded-synchronize"}


def test_every_safe_fix_is_executed_on_three_architectures() -> None:
    safe = {rule.slug for rule in all_rules() if "safe" in fixes(rule).replace("unsafe", "")}
    executed = {
        slug: {family for case in CASES if case.slug == slug for family in (*case.written, *case.also)} for slug in safe
    }
    assert {slug for slug, families in executed.items() if len(families) < 3} == WITHOUT_A_MODEL
