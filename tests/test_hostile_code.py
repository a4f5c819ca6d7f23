"""Awkward code: a safe fix means the same and runs, or is not made."""

from __future__ import annotations

import textwrap
import time

import pytest

from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.fixing.settling import settle
from ddaudit.auditor.sources.source import SourceFile

MODEL = "from transformers import PreTrainedModel\n\ndef f(m: PreTrainedModel, x, k):\n"
CACHE = "from transformers import DynamicCache\n\ndef f(c: DynamicCache, d: DynamicCache, n, start):\n"
BOTH = "from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel\n\n"


def fixed(text: str) -> str:
    """The text after every safe fix; its imports are left to other tests."""
    source = SourceFile("a.py", text)
    settled = settle({"a.py": source}, lambda sources: scan_sources(sources).findings)
    assert settled.errors == {}
    after = settled.sources["a.py"].text
    compile(after, "a.py", "exec")
    return "".join(line for line in after.splitlines(keepends=True) if "ddaudit" not in line)


def body(head: str, line: str) -> str:
    return head + textwrap.indent(line, "    ") + "\n"


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (MODEL, "m.model.embed_tokens = x"),
        (MODEL, "del m.model.norm"),
        (MODEL, "m.model.norm += x"),
        (MODEL, "for m.model.norm in x:\n    pass"),
        (MODEL, "with x as m.model.embed_tokens:\n    pass"),
        (MODEL, "match x:\n    case m.model.norm:\n        pass"),
        (MODEL, "match x:\n    case m.model.embed_tokens.weight | m.config.hidden_size.value:\n        pass"),
        (MODEL, "match x:\n    case {m.model.norm.name: _}:\n        pass"),
        (CACHE, "c.crop(start - d.get_seq_length())"),
        (CACHE, "c.crop(start - n)"),
        (CACHE, "c.crop(-n if n else 0)"),
        (CACHE, "c.crop(-n - 1)"),
        (CACHE, "k = -2\nc.crop(k)"),
        (CACHE, "(c if n else d).crop(-n)"),
        (CACHE, "c.crop(*n)"),
        (CACHE, "c.crop(\n    n  # kept\n)"),
    ],
)
def test_what_a_call_cannot_stand_for_stays(head, line):
    assert fixed(body(head, line)) == body(head, line)


@pytest.mark.parametrize(
    ("head", "line", "after"),
    [
        (MODEL, "(m or k).model.layers", "(m or k).get_decoder().layers"),
        (MODEL, "(m if k else x).lm_head(x)", "(m if k else x).get_output_embeddings()(x)"),
        (MODEL, "(m.config or k).hidden_size", "((m.config or k).get_text_config()).hidden_size"),
        (MODEL, "(y := m).model.norm(x)", "final_norm((y := m))(x)"),
        (MODEL, "-m.model.norm ** 2", "-final_norm(m) ** 2"),
        (MODEL, "y = (m\n     .model\n     .norm)(x)", "y = (final_norm(m))(x)"),
        (
            MODEL,
            "y = (m\n     .config\n     .vocab_size)",
            "y = ((m\n     .config).get_text_config()\n     .vocab_size)",
        ),
        (MODEL, "print(*m.model.layers, k)", "print(*m.get_decoder().layers, k)"),
        (CACHE, "c.crop(-(n + 1))", "crop_cache(c, c.get_seq_length() - (n + 1))"),
        (CACHE, "c.crop(-2)", "crop_cache(c, c.get_seq_length() - 2)"),
        (CACHE, "c.crop(x.shape[-1])", "crop_cache(c, x.shape[-1])"),
        (CACHE, "c.crop(start - 1)", "crop_cache(c, start - 1)"),
        (CACHE, "c.crop((yield))", "crop_cache(c, (yield))"),
        (CACHE, "(e := c).crop(n := 3)", "crop_cache((e := c), (n := 3))"),
        (CACHE, "c\\\n    .crop(n)", "crop_cache(c, n)"),
        (CACHE, "y = 1; c.crop(n); y = 2", "y = 1; crop_cache(c, n); y = 2"),
    ],
)
def test_text_taken_out_of_its_place_keeps_its_meaning(head, line, after):
    assert fixed(body(head, line)) == body(head, after)


@pytest.mark.parametrize(
    "text",
    [
        # The model has another value, or none, where the cache is made.
        "def f(model: PreTrainedModel, x):\n    m = None\n    c = DynamicCache()\n    m = model\n    m(x, cache=c)\n",
        "def f(x):\n    m = None\n    if x:\n        m = AutoModelForCausalLM.from_pretrained(x)\n"
        "    c = DynamicCache()\n    m(x, cache=c)\n",
        "def f(m: PreTrainedModel, x):\n    del m\n    c = DynamicCache()\n    m = x.load()\n    m(x, cache=c)\n",
        "def f(x, m: PreTrainedModel = None):\n    c = DynamicCache()\n    if m is not None:\n        m(x, cache=c)\n",
        "class A:\n    def f(self, x):\n        c = DynamicCache()\n"
        "        self.m = AutoModelForCausalLM.from_pretrained(x)\n        self.m(x, cache=c)\n",
        "def f(m: PreTrainedModel, x, c=DynamicCache()):\n    m(x, cache=c)\n",
        # The class is another one now and then.
        "if PreTrainedModel:\n    DynamicCache = dict\ndef f(m: PreTrainedModel, x):\n"
        "    c = DynamicCache()\n    m(x, cache=c)\n",
        "try:\n    from mine import DynamicCache\nexcept ImportError:\n    pass\ndef f(m: PreTrainedModel, x):\n"
        "    c = DynamicCache()\n    m(x, cache=c)\n",
        "def f(m: PreTrainedModel, x, opts):\n    c = DynamicCache(**opts)\n    m(x, cache=c)\n",
        # Rows are moved in ways that the compaction does not know: nothing about this cache is changed by halves.
        "def f(m: PreTrainedModel, x, past, path):\n    c = DynamicCache()\n    m(x, cache=c)\n"
        "    for i, layer in enumerate(c.layers):\n        layer.keys[:, :, past + 1 :] = layer.keys[:, :, path]\n"
        "    c.crop(past + len(path))\n",
    ],
)
def test_a_cache_whose_model_or_class_is_not_certain_stays(text):
    assert fixed(BOTH + text) == BOTH + text


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import DynamicCache as DC\n",
        "try:\n    from transformers import DynamicCache as DC\nexcept ImportError:\n    DC = None\n",
        "try:\n    from transformers import DynamicCache as DC\nexcept ImportError:\n    from mine import DC\n",
        "if x:\n    from transformers.cache_utils import DynamicCache as DC\n"
        "else:\n    from transformers import DynamicCache as DC\n",
    ],
)
def test_a_fallback_does_not_make_an_import_uncertain(text):
    use = "def f(m: PreTrainedModel, x):\n    c = DC({})\n    m(x, cache=c)\n"
    head = "from transformers import PreTrainedModel\n" + text
    assert fixed(head + use.format("")) == head + use.format("config=m.config")


def test_a_model_that_is_let_go_at_the_end_is_certain_before():
    text = BOTH + "def f(m: PreTrainedModel, x):\n    c = DynamicCache({})\n    m(x, cache=c)\n    del m\n"
    assert fixed(text.format("")) == text.format("config=m.config")


LOOP = """
def keep(c: DynamicCache, past, path):
    for layer in c.layers:
        {}
        layer.keys[:, :, past : past + len(path)] = layer.keys[:, :, {}]
        layer.values[:, :, past : past + len(path)] = layer.values[:, :, rows]{}
    c.crop(past + len(path))
"""


@pytest.mark.parametrize(
    "parts",
    [
        ("rows = path.pop() + past", "rows", ""),
        ("rows = past + path - 1", "rows", ""),
        ("rows = path + past", "rows - 1", ""),
        ("rows = path + past", "rows", " * 2"),
        ("rows = log(path) + past", "rows", ""),
        ("rows = path + past", "rows", "; print(layer)"),
        ("rows = path + past  # from the start", "rows", ""),
    ],
)
def test_a_loop_that_does_more_than_compacting_stays(parts):
    text = BOTH + LOOP.format(*parts)
    assert fixed(text) == text


def test_the_plain_compaction_becomes_one_call():
    """The near miss of the test above: the same loop, nothing more."""
    assert "    keep_in_cache(c, past, path)\n" in fixed(BOTH + LOOP.format("rows = path + past", "rows", ""))


FILTER = """
import torch

def decode(step, limit, mask_token_id):
    out = torch.full((1, limit + 8), mask_token_id)
    start = 1
    while start < limit:
        tokens, bonus = step(out, start)
        count = len(tokens)
        out[:, start : start + count] = tokens
        out[:, start + count] = bonus
        {}
    {}
    return out[:, out[0] != mask_token_id]
"""


@pytest.mark.parametrize(
    "parts",
    [
        ("start += count", "start = 0"),
        ("start += count", "out[:, limit] = 3"),
        ("start += count", "out = torch.cat([out, out], 1)"),
        ("start += count\n        start += 1", "pass"),
        ("count = 3\n        start += count", "pass"),
        ("if bonus == 3:\n            break\n        start += count", "pass"),
        ("if bonus == 3:\n            start += count", "pass"),
        ("out[:, start : start + 8] = 3\n        start += count", "pass"),
        ("start += count\n    else:\n        out[:, start + 1] = 3", "pass"),
    ],
)
def test_a_buffer_whose_written_length_is_not_certain_is_not_cut(parts):
    text = FILTER.format(*parts)
    assert fixed(text) == text


@pytest.mark.parametrize(
    "parts",
    [
        ("start += count", "pass"),
        ("start += count\n        if bonus == 3:\n            break", "out = out[:, :limit]"),
        ("with torch.no_grad():\n            start += count", "pass"),
    ],
)
def test_a_buffer_is_cut_after_the_last_write(parts):
    assert fixed(FILTER.format(*parts)).endswith("    return out[:, : start + 1]\n")


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("(torch\n  .cuda.synchronize())", "if (torch\n  .cuda).is_available():\n    (torch\n  .cuda.synchronize())\n"),
        ("gpu.synchronize()", "if gpu.is_available():\n    gpu.synchronize()\n"),
        ("if x: \\\n    torch.cuda.synchronize()", "if x: \\\n    torch.cuda.synchronize()\n"),
        ("torch.cuda.synchronize(); x()", "torch.cuda.synchronize(); x()\n"),
        ("if x: torch.cuda.synchronize()", "if x: torch.cuda.synchronize()\n"),
    ],
)
def test_a_guard_is_put_before_whole_lines_only(line, after):
    """A guard without the letters `cuda` was not taken for one, and the fix never settled."""
    head = "import torch\nimport torch.cuda as gpu\n"
    assert fixed(f"{head}{line}\n") == head + after


def test_kinds_survive_too_many_values():
    """A name held its first 24 values only: the one that makes it the repository's own was forgotten."""
    calls = "".join(f"use(AutoModelForCausalLM.from_pretrained('{i}'))\n" for i in range(40))
    text = f"{BOTH}class Net:\n    pass\n\ndef use(m):\n    m(1, past_key_values=c)\n\n"
    found = [
        scan_sources({"a.py": SourceFile("a.py", text + more)}).findings for more in (calls, calls + "use(Net())\n")
    ]
    assert [any(finding.code == "DDA403" for finding in findings) for findings in found] == [True, False]


@pytest.mark.parametrize(
    "lines",
    [
        "    if k == 0:\n        m.model.layers\n"
        + "".join(f"    elif k == {i}:\n        m.model.layers\n" for i in range(2000)),
        "    x = " + " + ".join(["m.model.layers"] * 900) + "\n",
        "".join(f"    m = m.to({i})\n" for i in range(2000)),
        "    x = [" + ", ".join(map(str, range(50_000))) + "]\n",
        "    m" + ".model" * 3000 + ".layers\n",
    ],
    ids=["elif", "sum", "rebinding", "list", "chain"],
)
def test_long_code_ends_in_bounded_time(lines):
    begin = time.process_time()
    scan_sources({"a.py": SourceFile("a.py", MODEL + lines)})
    assert time.process_time() - begin < 5
