"""Entry points found by reading: what generates from a target and input ids, and only that."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ddaudit.auditor.facts.entries import entries_of, find_entries
from ddaudit.auditor.record import Parameter
from ddaudit.auditor.sources.source import SourceFile

RESEARCH_REPO = Path(__file__).parent / "research_repo"

GREEDY = """
def generate(model, input_ids, max_new_tokens=16):
    cache = None
    step = input_ids
    for _ in range(max_new_tokens):
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        step = out.logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, step], dim=1)
    return input_ids
"""


def names(code: str, path: str = "a.py", **others: str) -> list[str]:
    files = {path: code} | {f"{name}.py": other for name, other in others.items()}
    sources = {name: SourceFile(name, textwrap.dedent(text)) for name, text in files.items()}
    return [entry.name for entry in entries_of(sources)]


# Not entries


@pytest.mark.parametrize(
    "code",
    [
        # No loop: Transformers' own generation.
        "def f(model, input_ids):\n    return model.generate(input_ids)\n",
        # Text, not ids.
        GREEDY.replace("input_ids, max", "prompt: str, max").replace(
            "step = input_ids", "input_ids = step = tok(prompt)"
        ),
        GREEDY.replace("model, input_ids, max", "model, prompt, max").replace(
            "step = input_ids", "step = input_ids = tokenizer.encode(prompt)"
        ),
        # Text comes out.
        GREEDY.replace("return input_ids", "return tokenizer.decode(input_ids[0])"),
        # Only counts come out.
        GREEDY.replace("return input_ids", "return input_ids.shape[1], cache"),
        # Streams.
        GREEDY.replace("    return input_ids", "        yield input_ids"),
        # The target is not a parameter.
        GREEDY.replace("model, input_ids, max", "input_ids, max"),
        # A module that is no Transformers model.
        GREEDY.replace("out.logits[:, -1:]", "out[:, -1:]").replace(", past_key_values=cache, use_cache=True", ""),
        # A training loop.
        """
        def train(model, input_ids, steps):
            losses = []
            for _ in range(steps):
                out = model(input_ids, use_cache=False)
                losses.append(out.loss.item())
            return losses, input_ids
        """,
        # Scoring: every token is given, none is fed back.
        """
        def score(model, input_ids):
            best, cache = [], None
            for t in range(input_ids.shape[1]):
                out = model(input_ids[:, t : t + 1], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                best.append(out.logits.argmax(-1))
            return torch.cat(best, dim=1)
        """,
        # A look-alike of another framework.
        """
        import mlx.core as mx

        def generate(model, prompt_tokens, cache):
            y = prompt_tokens
            tokens = []
            while len(tokens) < 8:
                logits = model(y[None], cache)
                y = mx.argmax(logits[:, -1], axis=-1)
                tokens.append(y.item())
            return tokens
        """,
    ],
)
def test_what_does_not_generate_ids_from_a_target_is_no_entry(code: str) -> None:
    assert names(code) == []


def test_a_wrapper_that_hands_on_is_no_entry_of_its_own() -> None:
    """Running it would run the same loop twice."""
    assert names(GREEDY + "\ndef fast(model, input_ids):\n    return generate(model, input_ids, 4)\n") == ["a:generate"]


def test_a_file_that_does_not_parse_has_none_and_stops_nothing() -> None:
    assert names(GREEDY, b="def f(:\n") == ["a:generate"]


# Entries


@pytest.mark.parametrize(
    "code",
    [
        GREEDY,
        GREEDY.replace("model, input_ids", "target: AutoModelForCausalLM, prompt_ids")
        .replace("model(", "target(")
        .replace("step = input_ids", "step = input_ids = prompt_ids"),
        GREEDY.replace("return input_ids", "return input_ids[:, :5].cpu(), cache"),
        GREEDY.replace("return input_ids", "return {'sequences': input_ids}"),
        GREEDY.replace("return input_ids", "return SimpleNamespace(output_ids=input_ids, steps=3)"),
        GREEDY.replace("return input_ids", "result = Generation(input_ids.tolist())\n    return result"),
        GREEDY.replace("return input_ids", "return cut(input_ids, 3)\n\ndef cut(ids, n):\n    return ids[:, :n]"),
        # A list of tokens that a function of the repository chose.
        """
        def pick(logits):
            return int(logits[0, -1].argmax())

        def generate(target, tokens):
            produced = []
            token = tokens
            while len(produced) < 8:
                logits = target(token, use_cache=True).logits
                token = pick(logits)
                produced.append(token)
            return produced
        """,
        # The target is called one function further on.
        """
        def verify(target, block, cache):
            return target(input_ids=block, past_key_values=cache, use_cache=True).logits.argmax(-1)

        def generate(target, draft, input_ids):
            output_ids = input_ids.clone()
            cache = make(target)
            while output_ids.shape[1] < 50:
                block = draft(output_ids)
                choice = verify(target, block, cache)
                output_ids = torch.cat([output_ids, choice[:, :1]], dim=1)
            return output_ids
        """,
    ],
)
def test_what_generates_ids_from_a_target_is_an_entry(code: str) -> None:
    assert names(code) == ["a:generate"]


def test_a_method_is_named_with_its_class() -> None:
    method = textwrap.indent(GREEDY.replace("(model,", "(self, model,"), "    ")
    assert names(f"class Drafter:\n{method}") == ["a:Drafter.generate"]


@pytest.mark.parametrize(
    ("path", "module"),
    [("a.py", "a"), ("p/q.py", "p.q"), ("p/__init__.py", "p"), ("src/p/q.py", "p.q"), ("lib/src/q.py", "lib.src.q")],
)
def test_modules_are_named_as_from_the_root(path: str, module: str) -> None:
    assert names(GREEDY, path) == [f"{module}:generate"]


def test_src_is_a_package_where_it_has_an_init() -> None:
    sources = {path: SourceFile(path, text) for path, text in (("src/__init__.py", ""), ("src/q.py", GREEDY))}
    assert [entry.name for entry in entries_of(sources)] == ["src.q:generate"]


def test_parameters_are_as_written() -> None:
    head = "def generate(model: 'M', /, input_ids, *rest: int, limit: list[int] | None, top=1, **more):"
    code = GREEDY.replace("def generate(model, input_ids, max_new_tokens=16):", head).replace("max_new_tokens", "limit")
    (entry,) = entries_of({"a.py": SourceFile("a.py", code)})
    assert (entry.path, entry.line) == ("a.py", 2)
    assert entry.parameters == (
        Parameter("model", "'M'", False),
        Parameter("input_ids", "", False),
        Parameter("*rest", "int", True),
        Parameter("limit", "list[int] | None", False),
        Parameter("top", "", True),
        Parameter("**more", "", True),
    )


def test_the_sample_repository_has_its_three_decoders() -> None:
    assert [entry.name for entry in find_entries(RESEARCH_REPO)] == [
        "sapling.chain:chain_generate",
        "sapling.plain:plain_generate",
        "sapling.tree:tree_generate",
    ]
