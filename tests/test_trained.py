"""The bundled target: what the record of its making says holds for the files that are shipped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ddaudit.auditor.cli import main  # noqa: E402
from ddaudit.runtime.models.loading import load_target  # noqa: E402
from ddaudit.runtime.running.prompts import make_prompts  # noqa: E402
from ddaudit.runtime.running.run import RunOptions  # noqa: E402
from ddaudit.runtime.tiny import TARGET, TINY  # noqa: E402
from ddaudit.runtime.tiny.corpus import read_held_out  # noqa: E402
from ddaudit.runtime.tiny.pretraining import bits_per_byte  # noqa: E402

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "tests" / "records" / "tiny-trained.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def target():
    arguments = {"random_weights": False, "loader": "causal-lm", "dtype": "auto", "seed": 0}
    return load_target(TINY, device=torch.device("cpu"), **arguments)


def test_the_shipped_files_are_those_that_the_record_is_of() -> None:
    shipped = {path.name: sha256(path.read_bytes()).hexdigest() for path in TARGET.iterdir()}
    assert shipped == RECORD["held_out"]["files"]
    assert sum(path.stat().st_size for path in TARGET.iterdir()) < 11_000_000
    assert RECORD["target"]["parameters"] <= 8_000_000


def test_the_model_card_has_the_records_figures() -> None:
    card = (TARGET.parents[1] / "README.md").read_text(encoding="utf-8")
    figures = [f"{RECORD['held_out'][f'{name}bits_per_byte']:.2f}" for name in ("", "gzip_", "xz_")]
    figures += [f"{RECORD['target'][name]:,}" for name in ("parameters", "steps", "tokens_seen")]
    figures += [RECORD["data"]["training_sha256"], *RECORD["data"]["held_out_modules"]]
    assert [figure for figure in figures if figure not in card] == []
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


def test_a_run_without_a_model_is_lossless_on_it(tmp_path: Path) -> None:
    """Trained weights, and text that ends: what random weights cannot show."""
    arguments = ["run", str(ROOT / "patched" / "research_repo"), "--device", "cpu", "--num-prompts", "1"]
    done = CliRunner().invoke(main, [*arguments, "--max-new-tokens", "32", "--json", str(tmp_path / "record")])
    record = json.loads((tmp_path / "record").read_text())
    assert done.exit_code == 0, done.output
    assert "tiny-trained (bundled)" in record["model"]
    assert {entry["verdict"] for entry in record["entries"]} == {"identical"}
    assert record["prompt_lengths"] == [96]


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
    assert {f"ddaudit/runtime/tiny/weights/target/{path.name}" for path in TARGET.iterdir()} <= packed
    assert {f"ddaudit/runtime/prompts/{kind}.txt" for kind in ("code", "mathematics", "chat")} <= packed
