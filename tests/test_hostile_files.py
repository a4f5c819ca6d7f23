"""Awkward files and ends: nothing waits, nothing is lost for another's sake, every early end is exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.fixing import placing
from ddaudit.auditor.scanning import examining
from ddaudit.auditor.sources.source import SkipReason, read_tree, shown

BRITTLE = "from transformers import PreTrainedModel\n\ndef f(m: PreTrainedModel):\n    return m.model.layers\n"
COMMAND = [sys.executable, "-c", "from ddaudit.auditor.cli import main; main()"]
NOBODY = 65534


@pytest.fixture
def locked():
    """A folder that may be listed and not entered, between two files; read without the rights of root."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    for name in ("a", "m/inner", "z"):
        (root / f"{name}.py").parent.mkdir(exist_ok=True)
        (root / f"{name}.py").write_text(BRITTLE)
    (root / "m").chmod(0o444)
    was = os.geteuid()
    if not was:
        os.seteuid(NOBODY)
    yield root
    if not was:
        os.seteuid(was)
    (root / "m").chmod(0o755)
    shutil.rmtree(root)


def test_a_folder_that_may_not_be_entered_hides_no_other(locked):
    """Its parent was left out instead, with every file after it."""
    tree = read_tree([locked])
    assert sorted(tree.sources) == ["a.py", "z.py"]
    assert [(entry.path, entry.reason) for entry in tree.skipped] == [("m", SkipReason.UNREADABLE)]


def test_a_file_that_may_not_be_reached_is_an_error_of_one_line(locked):
    result = CliRunner().invoke(main, ["scan", str(locked / "m" / "inner.py")])
    assert result.exit_code == 2
    assert "Permission denied" in result.output and "Traceback" not in result.output


def test_a_folder_that_may_not_be_entered_is_missing_from_a_copy_and_no_other(locked):
    """The whole fix stopped there, as an ordinary user."""
    unread = {}
    assert sorted(path for path, _ in placing._walk(locked, unread)) == ["a.py", "m", "z.py"]
    assert unread == {"m/inner.py": "Permission denied"}


@pytest.mark.parametrize("target", ["a pipe", "/dev/zero"])
def test_what_is_no_regular_file_is_not_read(target, tmp_path):
    """Reading a pipe waits for its writer, and a device has no end."""
    (tmp_path / "a.py").write_text(BRITTLE)
    if target == "a pipe":
        os.mkfifo(tmp_path / "b.py")
        paths = [tmp_path]
    else:
        paths = [tmp_path, Path(target)]
    found = subprocess.run([*COMMAND, "scan", "--format", "json", *map(str, paths)], capture_output=True, timeout=30)
    record = json.loads(found.stdout)
    assert found.returncode == 2
    assert [entry["reason"] for entry in record["skipped"]] == ["unreadable"]
    assert record["summary"]["scanned"] == 1


@pytest.mark.parametrize("name", [b"bad\xff.py", b"new\nline.py", b"\x1b[31mred.py", "é.py".encode()])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("command", [["scan"], ["scan", "--format", "json"], ["scan", "--format", "jsonl"], ["fix"]])
def test_any_file_name_is_reported_on_any_terminal(name, encoding, command, tmp_path):
    """A name that the terminal lacks ended the scan; a line break or an escape in one went out as it was."""
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(BRITTLE)
    arguments = [*command, *(["--check"] if command == ["fix"] else []), str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    found = subprocess.run([*COMMAND, *arguments], capture_output=True, env=environment, timeout=60)
    assert found.returncode == 1, found.stderr
    # Where a terminal says that it has ASCII alone, click does not believe it.
    text = found.stdout.decode()
    if "--format" in command:
        record = json.loads(text)
        assert os.fsencode(record["path"] if "path" in record else record["findings"][0]["path"]) == name
    else:
        assert "\x1b" not in text
        assert any(shown(os.fsdecode(name)) in line for line in text.splitlines())


def test_a_fault_of_the_tool_is_not_taken_for_findings(tmp_path, monkeypatch):
    """An exception that nobody caught ended with 1, the code for findings."""

    def fail(*args, **kwargs):
        raise KeyError("x")

    (tmp_path / "a.py").write_text(BRITTLE)
    monkeypatch.setattr(examining, "learn", fail)
    result = CliRunner().invoke(main, ["scan", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output.endswith("error: this is a fault of ddaudit\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_fix_leaves_nothing_behind(number, tmp_path):
    """SIGTERM ended the process at once and left the half-built fork's folder."""
    source, output = tmp_path / "repo", tmp_path / "out"
    source.mkdir()
    output.mkdir()
    for i in range(300):
        (source / f"a{i}.py").write_text(BRITTLE)
    process = subprocess.Popen(
        [*COMMAND, "fix", str(source), "-o", str(output / "fork")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while not os.listdir(output) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    left = os.listdir(output)
    if process.returncode == 0:
        assert left == ["fork"], "it was done before the signal came"
    else:
        assert (process.returncode, left) == (2, []), errors
