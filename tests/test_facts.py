"""What names hold: told apart by where values come from, not by what they are called."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddaudit.auditor.facts.repository import learn
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.facts.walking import walk
from ddaudit.auditor.finding import Confidence
from ddaudit.auditor.sources.source import SourceFile


def facts_of(**files):
    """Facts of files by module name, `pkg__engine` for `pkg/engine.py` and `pkg` for a package's own file."""
    sources = {}
    for name, text in files.items():
        is_package = any(other.startswith(f"{name}__") for other in files)
        path = name.replace("__", "/") + ("/__init__.py" if is_package else ".py")
        sources[path] = SourceFile(path, textwrap.dedent(text).lstrip("\n"))
    return {file.source.path: file for file in learn({p: (s, s.parse()) for p, s in sources.items()})}


def kinds(file, text):
    """Kinds that the last expression with this text can hold."""
    node = [n for n in file.nodes if isinstance(n, ast.expr) and file.text(n) == text][-1]
    return {value.kind for value in file.values(node)}


def value(file, text, kind):
    node = [n for n in file.nodes if isinstance(n, ast.expr) and file.text(n) == text][-1]
    return file.holds(node, kind)


def in_one(text, expr):
    return kinds(facts_of(a=text)["a.py"], expr)


# Nothing, or something else


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x.crop((0, 0, 4, 4))\n",
        "from torch import nn\nclass Net(nn.Module):\n    pass\nx = Net()\nx.layers\n",
        "from diffusers import DiffusionPipeline\nx = DiffusionPipeline.from_pretrained('n')\nx.layers\n",
        "from mlx_lm import load\nx, _ = load('n')\nx.model.layers\n",
        "import mlx.core as mx\ndef f(x):\n    return x.model.layers\n",
        "def f(DynamicCache):\n    x = DynamicCache()\n    return x.layers\n",
        "from transformers import AutoTokenizer\nx = AutoTokenizer.from_pretrained('n')\nx\n",
        "from transformers import AutoModel\nx = AutoModel.from_pretrained('n', trust_remote_code=True)\nx\n",
        "class Config:\n    pass\nx = Config()\nx.hidden_size\n",
        "from vllm import LLM\ndef f(x):\n    return x.model.layers\n",
        "def f(past):\n    x = past + 1\n    return x\n",
        "from .runners import Runner\ndef f(x: Runner):\n    return x.model.layers\n",
        "from engine import Engine\ndef f(x: Engine, ids):\n    return x(ids, output_hidden_states=True).logits\n",
        "from transformers import CLIPVisionModel\nx = CLIPVisionModel.from_pretrained('n')\nx(use_cache=True)\n",
    ],
)
def test_neither_model_nor_cache(text):
    assert not in_one(text, "x") & {Kind.MODEL, Kind.BACKBONE, Kind.CACHE, Kind.CONFIG}


def test_own_module_keeps_its_own_names():
    text = """
    from torch import nn
    class Draft(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
            self.lm_head = nn.Linear(1, 1)
        def forward(self, x, past_key_values=None):
            for layer in self.layers:
                x = layer(x, past_key_values=past_key_values, use_cache=True)
            return self.lm_head(x)
    """
    file = facts_of(a=text)["a.py"]
    assert kinds(file, "self") == {Kind.OWN}
    assert kinds(file, "self.lm_head") == {Kind.OTHER}
    assert kinds(file, "layer") == {Kind.OTHER}


def test_a_local_of_the_same_name_hides_the_library():
    text = """
    from transformers import DynamicCache
    def f():
        DynamicCache = dict
        x = DynamicCache()
        return x
    """
    assert Kind.CACHE not in in_one(text, "x")


# Models


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import AutoModelForCausalLM\nx = AutoModelForCausalLM.from_pretrained('n').eval()\nx\n",
        "import transformers\nx = transformers.AutoModelForCausalLM.from_config(c)\nx\n",
        "import transformers as hf\nx = hf.Qwen3ForCausalLM(c).to('cuda')\nx\n",
        "from transformers import PreTrainedModel\ndef f(x: PreTrainedModel):\n    return x\n",
        "from transformers import PreTrainedModel\ndef f(x: 'PreTrainedModel | None' = None):\n    return x\n",
        "from typing import Optional\nfrom transformers import PreTrainedModel\ndef f(x: Optional[PreTrainedModel]):\n"
        "    return x\n",
        "import torch\nfrom transformers import Qwen3ForCausalLM as A\nx = torch.compile(A.from_pretrained('n'))\nx\n",
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM as A\n"
        "x = PeftModel.from_pretrained(A.from_pretrained('n'), 'adapter')\nx\n",
        "try:\n    from transformers import AutoModelForImageTextToText as A\nexcept ImportError:\n"
        "    from transformers import AutoModelForVision2Seq as A\nx = A.from_pretrained('n')\nx\n",
        "from transformers import *\nx = AutoModelForCausalLM.from_pretrained('n')\nx\n",
    ],
)
def test_a_model_is_proven_by_constructor_or_annotation(text):
    found = value(facts_of(a=text)["a.py"], "x", Kind.MODEL)
    assert found is not None and found.confidence is Confidence.PROVEN
    assert found.evidence and found.evidence[0].startswith("a.py:")


def test_a_model_flows_through_calls_attributes_and_files():
    files = facts_of(
        main="""
        from pkg import Engine
        from loading import load
        engine = Engine(load("n"))
        """,
        loading="""
        from transformers import AutoModelForCausalLM
        def load(name):
            model = AutoModelForCausalLM.from_pretrained(name)
            model.eval()
            return model
        """,
        pkg="from .engine import Engine\n",
        pkg__engine="""
        class Engine:
            def __init__(self, target):
                self.target = target
            def run(self, ids):
                inner = self.target.module
                return decode(inner, ids)
        def decode(m, ids):
            return m(ids)
        """,
    )
    assert value(files["pkg/engine.py"], "m", Kind.MODEL).confidence is Confidence.PROVEN
    assert "loading.py:3" in value(files["pkg/engine.py"], "m", Kind.MODEL).evidence[0]


def test_a_call_with_a_forward_s_own_arguments_proves_a_model():
    text = """
    def step(x, ids, kv):
        out = x(ids, past_key_values=kv, use_cache=True, output_hidden_states=True)
        return out.logits
    """
    file = facts_of(a=text)["a.py"]
    assert value(file, "x", Kind.MODEL).confidence is Confidence.PROVEN
    assert value(file, "kv", Kind.CACHE).confidence is Confidence.PROVEN
    assert kinds(file, "out") == {Kind.OUTPUT}


def test_a_path_makes_it_likely_and_a_name_alone_a_guess():
    file = facts_of(a="def f(net, model):\n    return net.model.embed_tokens, model\n")["a.py"]
    assert value(file, "net", Kind.MODEL).confidence is Confidence.LIKELY
    assert value(file, "model", Kind.MODEL).confidence is Confidence.GUESS


def test_paths_below_a_model():
    text = """
    from transformers import PreTrainedModel
    def f(m: PreTrainedModel):
        return (m.model.layers[0], m.get_decoder().layers[1:], m.model.embed_tokens, m.lm_head, m.model.norm,
                m.config, m.config.get_text_config(), getattr(m, "config"), m.get_input_embeddings().weight)
    """
    file = facts_of(a=text)["a.py"]
    assert kinds(file, "m.model.layers[0]") == {Kind.LAYER}
    assert kinds(file, "m.get_decoder().layers[1:]") == {Kind.LAYERS}
    assert kinds(file, "m.model.embed_tokens") == {Kind.EMBEDDING}
    assert kinds(file, "m.lm_head") == {Kind.HEAD}
    assert kinds(file, "m.model.norm") == {Kind.NORM}
    assert kinds(file, 'getattr(m, "config")') == kinds(file, "m.config") == {Kind.CONFIG}
    assert kinds(file, "m.config.get_text_config()") == {Kind.TEXT_CONFIG}
    assert kinds(file, "m.get_input_embeddings().weight") == {Kind.EMBEDDING_WEIGHT}


def test_a_subclass_of_a_stock_model_is_both():
    text = """
    from transformers import LlamaForCausalLM
    class Mine(LlamaForCausalLM):
        def f(self):
            return self
    """
    assert in_one(text, "self") == {Kind.OWN, Kind.MODEL}


# Caches


def test_caches_know_what_takes_them_and_whether_they_go_back():
    text = """
    from torch import nn
    from transformers import DynamicCache, PreTrainedModel
    class Draft(nn.Module):
        def forward(self, ids, past_key_values=None):
            return ids
    def rewind(cache, length):
        cache.crop(length)
    def decode(target: PreTrainedModel, draft: Draft, ids):
        a = DynamicCache()
        b = DynamicCache()
        target(ids, past_key_values=a)
        draft(ids, past_key_values=b)
        rewind(a, 3)
        return a, b
    """
    file = facts_of(a=text)["a.py"]
    first, second = (file.cache_use(value(file, name, Kind.CACHE)) for name in "ab")
    assert (len(first.models), len(first.owners), first.goes_back) == (1, 0, True)
    assert (len(second.models), len(second.owners), second.goes_back) == (0, 1, False)


def test_an_output_s_cache_is_a_cache():
    text = """
    from transformers import PreTrainedModel
    def f(m: PreTrainedModel, ids):
        past = m(ids).past_key_values
        for layer in past.layers:
            layer.keys
        return past
    """
    file = facts_of(a=text)["a.py"]
    assert kinds(file, "past") == {Kind.CACHE}
    assert kinds(file, "layer") == {Kind.CACHE_LAYER}


def test_a_cache_from_the_runtime_is_managed():
    text = "from ddaudit.runtime import make_cache\ndef f(m):\n    c = make_cache(m)\n    return c\n"
    file = facts_of(a=text)["a.py"]
    assert file.is_managed(value(file, "c", Kind.CACHE))


# Masks and hidden states


@pytest.mark.parametrize("mask", ["m[None, None]", "m.unsqueeze(0).unsqueeze(0)", "torch.zeros(1, 1, 4, 8)[:, :, :2]"])
def test_masks_with_four_dimensions(mask):
    text = f"import torch\ndef make(m):\n    return 1, {mask}\n_, got = make(x)\ngot\n"
    assert in_one(text, "got") == {Kind.TREE_MASK}


@pytest.mark.parametrize("mask", ["m[None]", "torch.zeros(4, 8)", "m[:, None]"])
def test_masks_with_fewer(mask):
    text = f"import torch\ndef make(m):\n    return 1, {mask}\n_, got = make(x)\ngot\n"
    assert Kind.TREE_MASK not in in_one(text, "got")


def test_hidden_states_reach_the_function_that_taps_them():
    files = facts_of(
        a="""
        from taps import tap
        from transformers import PreTrainedModel
        def f(m: PreTrainedModel, ids):
            out = m(ids, output_hidden_states=True)
            return tap(out.hidden_states, 3)
        """,
        taps="def tap(states, layer):\n    return states[layer + 1]\n",
    )
    assert Kind.HIDDEN_STATES in kinds(files["taps.py"], "states")


# What edits ask


def test_is_bound_before():
    text = """
    import os
    def f(param, flag):
        before = 1
        if flag:
            inside = 2
        site()
        after = 3
        def g():
            inner()
    """
    file = facts_of(a=text)["a.py"]
    site = next(n for n in file.nodes if isinstance(n, ast.Call) and file.text(n) == "site()")
    inner = next(n for n in file.nodes if isinstance(n, ast.Call) and file.text(n) == "inner()")
    bound = {n for n in ("os", "param", "before", "inside", "after") if file.is_bound_before(ast.Name(n), site)}
    assert bound == {"os", "param", "before"}
    assert file.is_bound_before(ast.Name("param"), inner)
    assert not file.is_bound_before(ast.Name("before"), inner)


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        ("y = a.b", True),
        ("f(a.b)", True),
        ("a.b = 1", False),
        ("a.b += 1", False),
        ("del a.b", False),
        ("for a.b in c: pass", False),
        ("with c as a.b: pass", False),
        ("match c:\n    case a.b: pass", False),
    ],
)
def test_is_read(text, is_read):
    file = facts_of(a=text)["a.py"]
    node = next(n for n in file.nodes if isinstance(n, ast.Attribute))
    assert file.is_read(node) is is_read


def test_a_long_chain_and_a_long_sum_are_no_deeper_than_short_ones():
    text = (
        "def f(net):\n    x = net" + ".model" * 200 + ".layers\n    y = " + " + ".join(["x"] * 300) + "\n    return y\n"
    )
    assert in_one(text, "y") == set()


# Functions put in place of others', hooks and mixins


PATCH = """
    from types import MethodType
    from transformers.models.llama.modeling_llama import LlamaAttention

    def forward(self, hidden):
        return self.q_proj(hidden)

    def patch(model):
        for module in model.modules():
            if isinstance(module, LlamaAttention):
                module.forward = MethodType(forward, module)
"""


def test_self_of_a_function_put_in_place_of_a_forward_is_that_module():
    file = facts_of(a=PATCH)["a.py"]
    assert value(file, "self", Kind.ATTENTION).origin.endswith("LlamaAttention")


def test_a_function_given_to_another_attribute_is_handed_nothing():
    assert in_one(PATCH.replace("module.forward =", "module.helper ="), "self") == set()


def test_a_hook_on_a_layer_is_handed_its_output_and_one_on_attention_is_not():
    text = """
        from transformers import PreTrainedModel

        def hook(module, args, output):
            return output

        def tap(model: PreTrainedModel):
            model.get_decoder().layers[0]{below}.register_forward_hook(hook)
    """
    assert in_one(text.format(below=""), "output") == {Kind.LAYER_OUTPUT}
    assert in_one(text.format(below=".self_attn"), "output") == set()


def test_self_of_a_mixin_is_the_vendored_model_it_is_mixed_into():
    text = """
        from torch import nn

        class Part(nn.Module):
            def run(self, ids):
                return self.model(ids)

        class MyLlamaForCausalLM(nn.Module):
            pass

        class Whole(Part, MyLlamaForCausalLM):
            pass
    """
    assert Kind.MODEL in in_one(text, "self")
    assert Kind.MODEL not in in_one(text.replace("(Part, MyLlamaForCausalLM)", "(Part)"), "self")


def test_a_part_of_ones_own_model_is_not_stock_and_one_of_a_subclass_of_a_stock_model_is():
    text = """
        from torch import nn
        from transformers import LlamaForCausalLM

        class Mine({base}):
            def run(self, ids):
                return self.model(ids)
    """
    for base, is_stock in (("nn.Module", False), ("LlamaForCausalLM", True)):
        file = facts_of(a=text.format(base=base))["a.py"]
        node = next(n for n in file.nodes if isinstance(n, ast.Attribute) and file.text(n) == "self.model")
        assert file.is_stock(node) is is_stock


# What other repositories call and keep


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        ("def f(cache, name):\n    return cache['blocks.0'].shape, cache[name][0].shape\n", "cache"),
        ("def f(cache):\n    for name, grid in cache.items():\n        print(cache[name][0])\n", "cache"),
        ("def f(key_cache, i):\n    return key_cache[i][0].shape\n", "key_cache"),
        (
            "def f(adapter_past_key_values):\n    return adapter_past_key_values[0][0].shape\n",
            "adapter_past_key_values",
        ),
        (
            "class KVCache:\n    def cat(self, x):\n        return x\n"
            "def f(past_key_values, x):\n    return past_key_values[0][0].cat(x)\n",
            "past_key_values",
        ),
    ],
)
def test_other_stores_are_no_caches(text, cache):
    """Activation caches by name, stacks of tensors, a head's own cache and the repository's own cache class."""
    assert Kind.CACHE not in in_one(text, cache)


@pytest.mark.parametrize(
    "body",
    ["    for k, v in past_key_values:\n        print(k)", "    for kv in past_key_values:\n        k, v = kv",
     "    return past_key_values[0] if past_key_values else None"],
)  # fmt: skip
def test_a_past_that_is_taken_apart_is_a_cache(body):
    assert Kind.CACHE in in_one(f"def f(past_key_values):\n{body}\n", "past_key_values")


def test_an_own_class_that_sets_the_name_says_nothing_of_others():
    text = """
    class Store:
        def __init__(self):
            self.key_cache = []
    class CacheStore(Store):
        def __init__(self):
            self.key_cache = []
    def f(store, past_key_values):
        return store.key_cache, past_key_values.key_cache
    """
    file = facts_of(a=text)["a.py"]
    assert kinds(file, "store") == set()
    assert kinds(file, "past_key_values") == {Kind.CACHE}


def test_layers_through_an_abstract_method_a_list_and_a_nested_target():
    text = """
    from transformers import AutoModelForCausalLM
    class Base:
        def __init__(self, name):
            self.model = AutoModelForCausalLM.from_pretrained(name)
            self.blocks = self.get_blocks()
        def get_blocks(self):
            \"\"\"The layers.\"\"\"
            raise NotImplementedError
    class Llama(Base):
        def get_blocks(self):
            return self.model.model.layers
        def walk(self, xs):
            for block in self.blocks:
                print(block)
            for i, (layer, x) in enumerate(zip(list(self.model.model.layers), xs)):
                print(layer)
    """
    file = facts_of(a=text)["a.py"]
    assert kinds(file, "block") == {Kind.LAYER}
    assert kinds(file, "layer") == {Kind.LAYER}


def test_a_layer_put_into_a_module_gives_what_a_layer_gives():
    text = """
    from torch import nn
    from transformers import PreTrainedModel
    class Wrapped(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block
        def forward(self, *args, **kwargs):
            output = self.block(*args, **kwargs)
            return output
    def wrap(model: PreTrainedModel):
        return [Wrapped(layer) for layer in model.get_decoder().layers]
    """
    assert Kind.LAYER_OUTPUT in in_one(text, "output")


def test_an_output_by_key_and_states_without_the_last():
    text = """
    from transformers import PreTrainedModel
    def f(model: PreTrainedModel, ids):
        out = model(ids, output_hidden_states=True)
        every, others = out["hidden_states"], out.hidden_states[:-1]
        return every, others
    """
    file = facts_of(a=text)["a.py"]
    assert kinds(file, "every") == {Kind.HIDDEN_STATES}
    assert kinds(file, "others") == set()


def test_a_family_s_config_is_the_target_s_where_it_is_loaded():
    text = """
    from transformers import LlamaConfig
    def build(config: LlamaConfig):
        return config
    loaded = LlamaConfig.from_pretrained("name")
    loaded
    """
    file = facts_of(a=text)["a.py"]
    assert kinds(file, "loaded") == {Kind.CONFIG}
    assert kinds(file, "config") == set()


def test_a_checkout_is_a_package_by_its_own_name():
    files = facts_of(
        engine__model="class Transformer:\n    pass\n",
        engine="",
        run="from Project.engine.model import Transformer\nmodel = Transformer()\nmodel.layers\n",
    )
    assert kinds(files["run.py"], "model") == {Kind.OWN}


def test_a_module_around_a_given_model_is_no_copy_of_an_architecture():
    text = """
    from torch import nn
    class BaseQuantForCausalLM(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
    class OwnForCausalLM(nn.Module):
        def __init__(self, config):
            super().__init__()
    class OwnForCausalLM_KV(OwnForCausalLM):
        pass
    """
    file = facts_of(a=text)["a.py"]
    flow = file.facts.flow
    assert [flow.is_family_model(owner) for owner in file.file.classes] == [False, True, True]


def test_fixtures_reach_the_tests_that_name_them():
    """The nearest `conftest.py` counts, and a test's stand-in does not hide what a model is proven by."""
    found = facts_of(
        tests__conftest="""
            import pytest
            from torch import nn
            from decode import step

            class Tiny(nn.Module):
                pass

            @pytest.fixture(scope="module")
            def model():
                yield Tiny()
        """,
        tests__real__conftest="""
            import pytest
            from transformers import AutoModelForCausalLM

            @pytest.fixture
            def model():
                return AutoModelForCausalLM.from_pretrained("name")
        """,
        tests__test_tiny="""
            from decode import step

            def test(model):
                assert step(model, model.model)
        """,
        tests__real__test_real="def test(model):\n    assert model.model",
        decode="""
            def step(model, ids):
                out = model(input_ids=ids, use_cache=True)
                return out.logits
        """,
    )
    assert kinds(found["tests/test_tiny.py"], "model") == {Kind.OWN}
    assert kinds(found["tests/real/test_real.py"], "model") == {Kind.MODEL}
    assert kinds(found["decode.py"], "model") == {Kind.MODEL, Kind.OWN}


def test_a_model_of_the_repository_alone_is_no_stock_one():
    """No release of Transformers moves the parts of a module that does not stand on it."""
    text = """
        from torch import nn
        from transformers import LlamaPreTrainedModel

        class {name}({base}):
            pass

        x = {name}()
        x
    """
    text = textwrap.dedent(text)
    assert in_one(text.format(name="LlamaForCausalLM", base="nn.Module"), "x") == {Kind.OWN}
    assert Kind.MODEL in in_one(text.format(name="LlamaForCausalLM", base="LlamaPreTrainedModel"), "x")


def test_a_store_by_name_is_no_cache():
    """What is asked for by an activation's name holds activations, not the states of layers."""
    assert Kind.CACHE not in in_one("def f(cache, hook_name):\n    return cache[hook_name][0]\n", "cache")
    assert Kind.CACHE in in_one("def f(cache, layer):\n    return cache[layer][0]\n", "cache")


# What is looked up, beside looking at every node


def test_indexed_nodes_are_those_of_a_plain_walk():
    """The index goes through fields itself; a field that it forgets would hide a finding."""
    text = Path(__file__).read_text(encoding="utf-8")
    text += "\nmatch x:\n    case {'a': [b, *c], **d} if (e := f(**g)):\n        pass\n"
    file = facts_of(a=text)["a.py"].file
    plain = list(walk(file.tree))
    skipped = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)
    assert {id(n) for n in plain} == {id(n) for n in ast.walk(file.tree) if not isinstance(n, skipped)}
    assert {kind: list(nodes) for kind, nodes in file.by_type.items() if nodes} == {
        kind: [n for n in plain if type(n) is kind] for kind in {type(n) for n in plain}
    }


def test_nodes_by_name_are_those_of_a_plain_search():
    text = Path(__file__).read_text(encoding="utf-8")
    file = facts_of(a=text)["a.py"].file
    calls = [n for n in walk(file.tree) if isinstance(n, ast.Call)]
    assert file.calls_giving("encoding", "key") == [
        n for n in calls if {"encoding", "key"} & {keyword.arg for keyword in n.keywords}
    ]
    attributes = [n for n in walk(file.tree) if isinstance(n, ast.Attribute)]
    assert list(file.of(Named(ast.Attribute, re.compile("read|ki")))) == [
        n for n in attributes if n.attr.startswith(("read", "ki"))
    ]
    keywords = [n for n in walk(file.tree) if isinstance(n, ast.keyword)]
    assert list(file.of(Named(ast.keyword, frozenset({"encoding"})))) == [n for n in keywords if n.arg == "encoding"]


def test_a_place_with_two_findings_and_a_class_of_two_are_the_same_for_any_hash_seed(tmp_path):
    """Sets of names are gone through in an order that the seed decides."""
    text = """
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.models.mistral.modeling_mistral import MistralRMSNorm

        def fuse(model, i, is_new):
            kind = LlamaRMSNorm if is_new else MistralRMSNorm
            for name, module in model.named_modules():
                if isinstance(module, kind):
                    module.forward = None
            return f"model.layers.{i}.self_attn.attn"
    """
    (tmp_path / "a.py").write_text(textwrap.dedent(text), encoding="utf-8")
    code = "from ddaudit.auditor.cli import main; main()"
    command = [sys.executable, "-c", code, "scan", "--no-cache", "--format", "jsonl", str(tmp_path)]
    outputs = {
        subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}, check=False).stdout
        for seed in ("1", "2", "3", "4")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 4
