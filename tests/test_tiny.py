"""How the bundled pair is trained: its text, its loop, and how acceptance is read off a text."""

from __future__ import annotations

import inspect
import itertools
import json
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402

from ddaudit.runtime.drafters.dflash import DFlashDrafter  # noqa: E402
from ddaudit.runtime.errors import RunError  # noqa: E402
from ddaudit.runtime.tiny.acceptance import accepted_lengths  # noqa: E402
from ddaudit.runtime.tiny.corpus import excerpts, is_held_out, module_of, read_corpus, read_held_out  # noqa: E402
from ddaudit.runtime.tiny.delta_rule import delta_rule  # noqa: E402
from ddaudit.runtime.tiny.fitting import Schedule, fit  # noqa: E402
from ddaudit.runtime.tiny.pretraining import RowOrder  # noqa: E402
from ddaudit.runtime.tiny.recipe import FULL, SMALL  # noqa: E402
from ddaudit.runtime.tiny.tokenizing import train_tokenizer  # noqa: E402
from ddaudit.runtime.tiny.train import STAGES, Work, run_stages  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """`json` and `logging` are held out by their names, `ast` and `heapq` are not."""
    folder = tmp_path / "library"
    function = "def {0}(value):\n    if value:\n        return {0}(value - 1)\n    return [{0}, value]\n\n\n"
    for name in (
        "ast.py", "heapq.py", "json/decoder.py", "json/__init__.py", "logging/config.py", "test/test_ast.py",
        "test/test_json/test_scan.py", "encodings/cp1252.py", "site-packages/other/thing.py",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        words = "".join(function.format(f"{name.replace('/', '_')[:-3]}_{index}") for index in range(60))
        (folder / name).write_text(words)
    (folder / "bisect.py").write_text((folder / "json/decoder.py").read_text())
    return folder


def test_no_module_is_both_trained_on_and_held_out(library: Path) -> None:
    corpus = read_corpus(library)
    assert [source.path for source in corpus.training] == ["ast.py", "heapq.py", "test/test_ast.py"]
    assert [source.path for source in corpus.held_out] == ["json/__init__.py", "json/decoder.py", "logging/config.py"]
    assert corpus.held_out_modules == ("json", "logging")
    assert corpus.held_out == read_held_out(library)


def test_a_test_goes_with_what_it_tests() -> None:
    names = ("json/decoder.py", "test/test_json/test_scan.py", "test/test_json.py", "_json.py")
    assert {module_of(name) for name in names} == {"json"}
    assert module_of("test/support/__init__.py") == "support"
    # By name alone, so that the modules are the same ones in every release.
    assert [name for name in ("ast", "collections", "heapq", "json", "logging", "queue") if is_held_out(name)] == [
        "collections", "json", "logging", "queue",
    ]  # fmt: skip


def test_a_library_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no sources"):
        read_held_out(tmp_path)


def test_excerpts_begin_with_a_definition(library: Path) -> None:
    found = excerpts(read_held_out(library), 5, 300)
    assert len(found) == 5
    assert all(text.startswith("def ") and len(text) >= 300 for _, text in found)
    assert len({text for _, text in found}) == 5


def test_the_tokenizer_gives_texts_back(tmp_path: Path) -> None:
    train_tokenizer(["def f(x):\n    return x\n" * 20], 300).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(x):\n    return x\n", "a\tb\r\n\n\n  ü 12345 <|end", "  x  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1)


@pytest.mark.parametrize("length", [1, 31, 32, 100])
def test_delta_rule_is_that_of_transformers(length: int) -> None:
    """Values and gradients, with keys that repeat, beside the row-by-row solution."""
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    draw = torch.Generator().manual_seed(length)
    query, key = (torch.randn(2, length, 2, 16, generator=draw) for _ in range(2))
    value = torch.randn(2, length, 4, 16, generator=draw)
    key[:, 5:25] = key[:, 5:6]
    g, beta = -torch.rand(2, length, 4, generator=draw) * 0.1, torch.rand(2, length, 4, generator=draw)
    found = []
    for function in (delta_rule, reference):
        leaves = [part.clone().requires_grad_() for part in (query, key, value, g, beta)]
        heads = [part.repeat_interleave(2, dim=2) for part in leaves[:2]]
        output = function(*heads, leaves[2], g=leaves[3], beta=leaves[4], use_qk_l2norm_in_kernel=True)[0]
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        found.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_an_epoch_has_every_row_once() -> None:
    order = RowOrder(1000, 90, seed=3)
    epochs = [order.starts(10 * epoch, 10).tolist() for epoch in range(2)]
    for starts in epochs:
        assert len({start // 90 for start in starts}) == 10
        assert len({start % 90 for start in starts}) == 1
        assert max(starts) + 90 < 1000
    assert epochs[0] != epochs[1]
    # A run that goes on within an epoch.
    assert RowOrder(1000, 90, seed=3).starts(13, 4).tolist() == epochs[1][3:7]


class _Stopped(Exception):
    pass


def test_a_run_that_was_cut_goes_on_exactly(tmp_path: Path) -> None:
    def train(state: Path, stop_at: str = "") -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)

        def batch_of(step: int) -> tuple[torch.Tensor, ...]:
            return (torch.randn(8, 4, generator=torch.Generator().manual_seed(step)),)

        def progress(text: str) -> None:
            if stop_at and stop_at in text:
                raise _Stopped

        schedule = Schedule(steps=30, peak_lr=0.1, warmup_steps=5, log_every=5, save_every=10)
        losses = fit(model, batch_of, lambda batch: (model(batch) - batch).square().mean(), schedule, state, progress)
        return model.weight.detach().clone(), losses

    weight, losses = train(tmp_path / "whole")
    with pytest.raises(_Stopped):
        train(tmp_path / "cut", stop_at="step 25 ")
    again = train(tmp_path / "cut")
    assert torch.equal(again[0], weight)
    assert again[1] == losses
    assert losses[-1][1] < losses[0][1]


@pytest.mark.parametrize("budget", [None, 1, 5, 40])
def test_accepted_lengths_are_those_of_every_prefix_ranked(budget: int | None) -> None:
    """A tree is the likeliest prefixes; here all of them are written out and sorted."""
    depth, vocabulary = 3, 5
    drafts = torch.randn(60, depth, vocabulary, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    generated = torch.randint(vocabulary, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    expected, place = [], 0
    while place + depth < len(generated):
        coming = tuple(generated[place + 1 : place + 1 + depth])
        if budget is None:
            kept = {tuple(drafts[place].argmax(-1).tolist()[:length]) for length in range(1, depth + 1)}
        else:
            prefixes = [
                prefix
                for length in range(1, depth + 1)
                for prefix in itertools.product(range(vocabulary), repeat=length)
            ]
            scores = drafts[place]
            prefixes.sort(key=lambda prefix: -sum(float(scores[i, token]) for i, token in enumerate(prefix)))
            kept = set(prefixes[:budget])
        right = max(length for length in range(depth + 1) if not length or coming[:length] in kept)
        expected.append(right + 1)
        place += right + 1
    assert accepted_lengths(drafts, generated, budget) == expected


def test_what_is_shipped_is_small_enough() -> None:
    """At most 14 MB in bfloat16, 8 million parameters of them the target's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ddaudit.runtime.tiny.distilling import new_drafter

    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FULL.target_config()))
        drafter = new_drafter(FULL.drafter_config())
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (target, drafter)]
    assert sizes[0] <= 8_000_000
    assert 2 * sum(sizes) + 200_000 <= 14_000_000
    assert target.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2


def test_every_stage_at_toy_size(library: Path, tmp_path: Path) -> None:
    short = Schedule(steps=4, peak_lr=1e-3, warmup_steps=2, log_every=2, save_every=2)
    recipe = replace(
        SMALL, target=short, drafter=short, row_length=32, num_greedy_texts=4, num_sampled_texts=2, drafter_rows=2,
        num_prompts=2, vocab_size=320,
    )  # fmt: skip
    work = Work(tmp_path / "work", recipe, torch.device("cpu"), 0, library)
    said: list[str] = []
    run_stages(work, list(STAGES), said.append)
    record = json.loads((work.folder / "record.json").read_text())
    assert list(record) == list(STAGES)
    assert [step for step, _ in record["target"]["losses"]] == [2, 4]
    for stage, folder in (("held_out", work.target_folder), ("acceptance", work.drafter_folder)):
        assert record[stage]["files"] == {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert DFlashDrafter.from_pretrained(work.drafter_folder).mask_token_id == 1
    said.clear()
    run_stages(work, list(STAGES), said.append)
    assert said == [f"{stage}: done before" for stage in STAGES]
