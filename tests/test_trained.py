"""The bundled pair: what the record of its making says holds for the files that are shipped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import PreTrainedModel, Qwen3Config  # noqa: E402

from ddaudit.auditor.cli import main  # noqa: E402
from ddaudit.runtime.drafters.dflash import DFlashDrafter  # noqa: E402
from ddaudit.runtime.drafters.drafting import describe_bundled, make_drafter, plan_drafts  # noqa: E402
from ddaudit.runtime.drafters.scripted import ScriptedDrafter  # noqa: E402
from ddaudit.runtime.errors import RunError  # noqa: E402
from ddaudit.runtime.models.loading import Target, load_target  # noqa: E402
from ddaudit.runtime.running.prompts import make_prompts  # noqa: E402
from ddaudit.runtime.running.run import RunOptions  # noqa: E402
from ddaudit.runtime.tiny import DRAFTER, TARGET, TINY  # noqa: E402
from ddaudit.runtime.tiny.acceptance import accepted_lengths, drafts_along  # noqa: E402
from ddaudit.runtime.tiny.continuing import continue_texts  # noqa: E402
from ddaudit.runtime.tiny.corpus import read_held_out  # noqa: E402
from ddaudit.runtime.tiny.pretraining import bits_per_byte  # noqa: E402

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "tests" / "records" / "tiny-trained.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def target():
    arguments = {"random_weights": False, "loader": "causal-lm", "dtype": "auto", "seed": 0}
    return load_target(TINY, device=torch.device("cpu"), **arguments)


def test_the_shipped_files_are_those_that_the_record_is_of() -> None:
    for stage, folder in (("held_out", TARGET), ("acceptance", DRAFTER)):
        shipped = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        assert shipped == RECORD[stage]["files"]
    assert sum(path.stat().st_size for folder in (TARGET, DRAFTER) for path in folder.iterdir()) <= 14_000_000
    assert RECORD["target"]["parameters"] <= 8_000_000


def test_the_model_card_has_the_records_figures() -> None:
    card = (TARGET.parents[1] / "README.md").read_text(encoding="utf-8")
    figures = [f"{RECORD['held_out'][f'{name}bits_per_byte']:.2f}" for name in ("", "gzip_", "xz_")]
    figures += [f"{RECORD['target'][name]:,}" for name in ("parameters", "steps", "tokens_seen")]
    figures += [f"{RECORD['drafter'][name]:,}" for name in ("parameters", "steps", "blocks_seen")]
    figures += [f"{RECORD[stage]['losses'][at][1]:.2f}" for stage in ("target", "drafter") for at in (0, -1)]
    figures += [f"in {RECORD[stage]['seconds']:.0f} s" for stage in ("target", "texts", "drafter")]
    greedy, sampled = RECORD["acceptance"]["by_temperature"]
    for facts in (greedy, sampled):
        assert f"| {facts['temperature']:g} | {facts['chain']:.2f} | {facts['tree_32']:.2f} |" in card
        figures += [f"{facts['distinct_tokens_a_text']:.0f} distinct"]
    figures += [RECORD["data"]["training_sha256"], *RECORD["data"]["held_out_modules"]]
    assert [figure for figure in figures if figure not in card] == []
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"gets {greedy['chain']:.2f} tokens a round and a tree of 32 nodes {greedy['tree_32']:.2f}" in readme
    assert f"at temperature 1 {sampled['chain']:.2f} and {sampled['tree_32']:.2f}" in readme
    assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
    assert greedy["chain"] >= 3.0 and greedy["tree_32"] >= 1.12 * greedy["chain"]
    assert RECORD["held_out"]["bits_per_byte"] < 1.6 < RECORD["held_out"]["gzip_bits_per_byte"]


def test_it_knows_the_held_out_text_of_the_python_that_runs(target) -> None:
    text = next(source.text for source in read_held_out() if source.path == "json/decoder.py")[:6000]
    assert bits_per_byte(target.model, target.tokenizer, [text]) < 1.6


def test_its_prompts_are_held_out_text(target) -> None:
    prompts = make_prompts(target, RunOptions(TINY, num_prompts=4, prompt_tokens=20), mask_token_id=1)
    assert [len(prompt.ids) for prompt in prompts] == [20] * 4
    texts = [source.text for source in read_held_out()]
    for prompt in prompts:
        assert prompt.text and prompt.text.lstrip().startswith(("def ", "class "))
        assert any(prompt.text in text for text in texts)


def test_a_run_without_a_model_accepts_what_is_read_off_the_text(target, tmp_path: Path) -> None:
    """Decoding by the sample's fork, whose class takes other weights, beside one pass over the finished text."""
    num_new = 40
    arguments = ["run", str(ROOT / "patched" / "research_repo"), "--device", "cpu", "--num-prompts", "1"]
    done = CliRunner().invoke(main, [*arguments, "--max-new-tokens", str(num_new), "--json", str(tmp_path / "record")])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "record").read_text())
    assert "tiny-trained (bundled)" in record["model"]
    assert "in place of `BlockDrafter`" in record["drafter"]
    assert {entry["verdict"] for entry in record["entries"]} == {"identical"}
    assert record["prompt_lengths"] == [96]
    rounds = {entry["name"].partition(":")[2]: entry["rounds"] for entry in record["entries"]}
    assert rounds["tree_generate"] <= rounds["chain_generate"] < rounds["plain_generate"] / 2
    drafter = DFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    (prompt,) = make_prompts(target, RunOptions(TINY, num_prompts=1, prompt_tokens=96), mask_token_id=1)
    text = continue_texts(target.model, torch.tensor([prompt.ids]), num_new + 16, 0.0, 0)[0]
    lengths = accepted_lengths(drafts_along(drafter, target.model, text, 96), text[96:].tolist(), None)
    expected, reached = 0, 1
    while reached < num_new:
        reached += lengths[expected]
        expected += 1
    assert rounds["chain_generate"] == expected


def test_acceptance_on_held_out_text(target) -> None:
    drafter = DFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    prompts = make_prompts(target, RunOptions(TINY, num_prompts=6, prompt_tokens=96), mask_token_id=1)
    lengths: dict[int | None, list[int]] = {None: [], 32: []}
    for text in continue_texts(target.model, torch.tensor([prompt.ids for prompt in prompts]), 64, 0.0, 0):
        drafts = drafts_along(drafter, target.model, text, 96)
        for budget, found in lengths.items():
            found += accepted_lengths(drafts, text[96:].tolist(), budget)
    # Six prompts from the Python that runs, not the record's 64.
    assert fmean(lengths[None]) >= 2.5
    assert fmean(lengths[32]) >= 1.12 * fmean(lengths[None])


class PublicDrafter(DFlashDrafter):
    """A repository's class of the public layout."""


class OtherDrafter(PreTrainedModel):
    """Called as a DFlash drafter is, in another order, with other weights."""

    config_class = Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.fuse = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def forward(self, noise_embedding, target_hidden, position_ids, cache=None, **more):
        raise NotImplementedError

    def own_block_size(self) -> int:
        return self.block_size


class LanguageModel(PreTrainedModel):
    config_class = Qwen3Config

    def forward(self, input_ids, past_key_values=None):
        raise NotImplementedError


def test_the_drafter_goes_into_the_repositorys_class_or_takes_its_place(target) -> None:
    plan = plan_drafts(TINY, target, None)
    own, other, *scripted = (
        make_drafter(TINY, plan, own_class, target, seed=0)
        for own_class in (PublicDrafter, OtherDrafter, LanguageModel, None)
    )
    assert type(own) is PublicDrafter
    assert isinstance(other, OtherDrafter) and other.own_block_size() == 8
    assert all(isinstance(drafter, ScriptedDrafter) for drafter in scripted)
    weights = DFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).state_dict()
    for drafter in (own, other):
        assert set(drafter.state_dict()) == set(weights)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in drafter.state_dict().items())
    said = describe_bundled([own, other, *scripted, None])
    for part in ("the repository's `PublicDrafter`", "in place of `OtherDrafter`", "in another way, scripted"):
        assert said.count(part) == 1
    assert describe_bundled(scripted).startswith("scripted:")
    block, taps, positions = torch.randn(1, 8, 256), torch.randn(1, 5, 768), torch.arange(13)[None]
    with torch.no_grad():
        expected = own(position_ids=positions, noise_embedding=block, target_hidden=taps)
        assert torch.equal(other(block, taps, positions, is_causal=False), expected)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5])
def test_its_target_can_be_scripted_at_any_chance(target, p: float) -> None:
    """Rows of rare tokens nearly repeat others: where a wrong token cannot stand clear of them, another is drawn."""
    ids = target.tokenizer.encode(read_held_out()[0].text)[:300]
    drafter = make_drafter(f"scripted:{p}", plan_drafts(f"scripted:{p}", target, None), None, target, seed=0)
    drafter.follow(100, ids[100:])
    assert drafter.num_misordered == 0


def test_it_drafts_for_its_own_target_alone() -> None:
    config = SimpleNamespace(hidden_size=256, vocab_size=2049, get_text_config=lambda **_: config)
    stranger = Target(SimpleNamespace(config=config), None, "another target", True, "")
    with pytest.raises(RunError, match="was trained for `--model tiny-trained` alone"):
        plan_drafts(TINY, stranger, None)


def test_prompts_for_real_checkpoints_come_by_name(tmp_path: Path) -> None:
    fork = ROOT / "patched" / "research_repo"
    for name in ("code", "mathematics", "chat"):
        lines = (ROOT / "runtime" / "prompts" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(set(lines)) == 8
        # Read before anything is loaded, so the missing tokenizer is what stops this.
        done = CliRunner().invoke(
            main, ["run", str(fork), "--model", "tiny-hybrid", "--random-weights", "--prompts", name]
        )
        assert done.exit_code == 2 and "no tokenizer" in done.output
    done = CliRunner().invoke(main, ["run", str(fork), "--prompts", "poems"])
    assert done.exit_code == 2 and "one of: chat, code, mathematics" in done.output


def test_the_wheel_has_weights_and_prompts(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "patched")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    built = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=checkout, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (name,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(name) as wheel:
        packed = set(wheel.namelist())
    for folder in (TARGET, DRAFTER):
        assert {f"ddaudit/runtime/tiny/weights/{folder.name}/{path.name}" for path in folder.iterdir()} <= packed
    assert {f"ddaudit/runtime/prompts/{kind}.txt" for kind in ("code", "mathematics", "chat")} <= packed
