"""Forks that do what they like to the process: the run ends, its record is whole, and no entry pays for another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_models import qwen3

from ddaudit.auditor.cli import main

ENTRY = """
import torch
{head}

@torch.no_grad()
def generate(target, input_ids, max_new_tokens, note=None):
    ids = input_ids
    for _ in range(max_new_tokens):
        ids = torch.cat([ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    {end}
"""
TINY = ("--model", "tiny-hybrid", "--random-weights", "--device", "cpu", "--max-new-tokens", "6", "--num-prompts", "2")
COMMAND = [sys.executable, "-c", "from ddaudit.auditor.cli import main; main()"]


def write(folder, **entries):
    """A module for each entry: what it does when imported, and how it ends."""
    folder.mkdir(exist_ok=True)
    for name, (head, end) in entries.items():
        (folder / f"{name}.py").write_text(ENTRY.format(head=head, end=end))
    return folder


def run(fork, *arguments, model=TINY):
    """Exit code, output, and each entry's record by module."""
    path = fork.parent / "record.json"
    result = CliRunner().invoke(main, ["run", str(fork), *model, "--json", str(path), *arguments])
    record = json.loads(path.read_text()) if path.exists() else {"entries": []}
    return result.exit_code, result.output, {entry["name"].partition(":")[0]: entry for entry in record["entries"]}


def test_no_entry_pays_for_what_another_does(tmp_path):
    fork = write(
        tmp_path / "fork",
        arguments=("import argparse; argparse.ArgumentParser().parse_args()", "return ids"),
        cancelled=("import asyncio", "raise asyncio.CancelledError()"),
        exits=("import sys; sys.exit(0)", "return ids"),
        leaves=("import os", "os._exit(0)"),
        moves=("import os, tempfile; os.chdir(tempfile.mkdtemp())", "return ids"),
        reads=("", "return input()"),
        unspeakable=("class E(Exception):\n    def __str__(self): raise ValueError", "raise E"),
        switches=("", "torch.set_default_dtype(torch.float64); torch.set_grad_enabled(True); return ids"),
        thrown=("class E(BaseException): pass", "raise E('x')"),
        unknown=("", "ids[0, -1] = 10**6; return ids"),
        endless=("", "return torch.cat([ids] * 9, 1)"),
        flags=("", "return ids > 3"),
        deep=("", "return ids[None]"),
        figures=("", "return dict(ids=ids, acceptance_lengths=[float('nan')], stage_s=dict(a=float('inf'), b=1.0))"),
        zz_last=("", "return ids"),
    )
    (fork / "callable.py").write_text("class C:\n    def __call__(self, target, input_ids): return 3\nobject = C()\n")
    (fork / "builtin.py").write_text("from torch import argmax as generate\n")
    names = [f"{path.stem}:{'object' if path.stem == 'callable' else 'generate'}" for path in sorted(fork.iterdir())]
    code, output, found = run(fork, *(f"--entry={name}" for name in names))
    assert code == 2, output
    right = {name for name, entry in found.items() if entry["verdict"] == "identical"}
    assert right == {"arguments", "moves", "switches", "figures", "zz_last"}
    errors = {name: entry["error"] for name, entry in found.items() if entry["verdict"] == "error"}
    assert len(errors) == len(names) - len(right)
    assert "SystemExit: 0" in errors["exits"] and "SystemExit: 0" in errors["leaves"]
    assert errors["thrown"] == "E: x (thrown.py:10)"
    assert errors["unspeakable"].startswith("E (")
    assert "EOFError" in errors["reads"]
    assert "1000000 as a token id, and the target has 320" in errors["unknown"]
    assert "where 6 were asked for" in errors["endless"]
    assert found["figures"]["stage_s"] == {"b": 2.0} and found["figures"]["acceptance_source"] == "measured"


@pytest.mark.parametrize(
    "end",
    [
        "target.get_output_embeddings().weight.data.roll(1, 0); target.lm_head.weight.data.neg_(); return ids[:, :-1]",
        "target.register_forward_hook(lambda m, a, o: setattr(o, 'logits', -o.logits)); return ids",
    ],
    ids=["weights", "hook"],
)
def test_an_entry_that_changes_the_target_is_named_and_no_other_is_judged(end, tmp_path):
    """The next entry's right text was called lossy."""
    fork = write(tmp_path / "fork", a_changes=("", end), b_innocent=("", "return ids"))
    code, output, found = run(fork, "--entry", "a_changes:generate", "--entry", "b_innocent:generate")
    assert code == 2, output
    assert "leaves the target changed" in found["a_changes"]["error"]
    assert found["b_innocent"]["error"] == "not judged: `a_changes:generate` has changed the target"


@pytest.mark.parametrize("drafter", ["scripted:0", "random"])
def test_an_entry_that_takes_no_drafter_is_given_none(drafter, tmp_path):
    """None is made either, so that none can fail."""
    fork = write(tmp_path / "fork", a=("", "return ids"))
    (fork / "a.py").write_text((fork / "a.py").read_text().replace("draft_model, ", "").replace("drafter, ", ""))
    code, output, found = run(fork, "--drafter", drafter)
    assert (code, found["a"]["verdict"]) == (0, "identical"), output
    assert "drafter   none: no entry takes one" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_was_done_is_kept_when_a_run_is_ended(number, tmp_path):
    """Whatever the fork makes of the signals. An entry that has not seen every prompt is an error."""
    ignore = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)"
    fork = write(tmp_path / "fork", a=(ignore, "return ids"), b=("import time", "time.sleep(100 * (len(ids[0]) > 36))"))
    path = tmp_path / "record.json"
    command = [*COMMAND, "run", str(fork), *TINY, "--max-new-tokens", "12", "--json", str(path)]
    process = subprocess.Popen(
        [*command, "--entry", "a:generate", "--entry", "b:generate"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell's background job ignores it, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert any("prompt 1 of 2: b:" in line for line in process.stderr)
    time.sleep(0.5)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    entries = json.loads(path.read_text())["entries"]
    assert [(e["verdict"], [p["verdict"] for p in e["prompts"]], e["error"]) for e in entries] == [
        ("error", ["identical"], "the run ended after 1 of 2 prompts"),
        ("error", [], "the run ended after 0 of 2 prompts"),
    ]
    assert sorted(os.listdir(tmp_path)) == ["fork", "record.json"]
    assert process.returncode == (-9 if number == signal.SIGKILL else 2)
    assert ("verdict: 2 error" in output) is (number != signal.SIGKILL)


def test_the_report_is_alone_on_standard_output_and_threads_do_not_keep_the_run(tmp_path):
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()"
    fork = write(tmp_path / "fork", a=("print('hello')", f"print('hello'); {thread}; return ids"))
    done = subprocess.run(
        [*COMMAND, "run", str(fork), *TINY, "--entry", "a:generate"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fork ") and "hello" not in done.stdout and "hello" in done.stderr


def test_an_argument_that_json_does_not_know_is_recorded_as_text(tmp_path):
    """The run was lost when its record was written, at the very end."""
    fork = write(tmp_path / "fork", a=("", "return ids"))
    code, output, found = run(fork, "--entry", "a:generate", "--arg", "note={1}")
    assert code == 0, output
    assert found["a"]["arguments"] == {"note": "{1}"}


@pytest.mark.parametrize("name", ["torch.py", "src/transformers/__init__.py"])
def test_a_module_that_hides_what_runs_underneath_is_refused(name, tmp_path):
    fork = write(tmp_path / "fork", a=("", "return ids"))
    (fork / name).parent.mkdir(parents=True, exist_ok=True)
    (fork / name).write_text("")
    code, output, _ = run(fork)
    assert code == 2 and "hides the installed one" in output and "remedy:" in output


def test_a_namesake_of_the_standard_library_breaks_nothing_underneath(tmp_path):
    fork = write(tmp_path / "fork", a=("", "return ids"))
    for name in ("logging", "inspect", "typing"):
        (fork / f"{name}.py").write_text("")
    assert run(fork, "--entry", "a:generate")[0] == 0


@pytest.mark.parametrize("arguments", [("--json", "."), ("--json", "/dev/null/x"), ("--max-new-tokens", "10000000")])
def test_what_cannot_end_well_is_refused_at_once(arguments, tmp_path):
    fork = write(tmp_path / "fork", a=("", "return ids"))
    result = CliRunner().invoke(main, ["run", str(fork), *TINY, "--entry", "a:generate", *arguments])
    assert result.exit_code == 2 and "remedy:" in result.output
    assert "plain decoding" not in result.output


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _drop(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _spoil(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_truncate, "does not load: SafetensorError"),
        (_drop, "lacks 1 of the model's weights, such as `model.norm.weight`"),
        (_spoil, "are not all numbers"),
        (lambda folder: (folder / "config.json").write_text("{"), "does not load"),
    ],
    ids=["truncated", "incomplete", "not numbers", "config"],
)
def test_a_harmed_checkpoint_is_an_error(harm, message, tmp_path):
    """One without numbers made every comparison pass as a near-tie; a missing weight was drawn at random."""
    qwen3().save_pretrained(tmp_path / "m")
    harm(tmp_path / "m")
    fork = write(tmp_path / "fork", a=("", "return ids"))
    model = ("--model", str(tmp_path / "m"), "--device", "cpu", "--max-new-tokens", "4")
    code, output, _ = run(fork, "--entry", "a:generate", model=model)
    assert code == 2 and message in output and "remedy:" in output
