"""What the README shows of the sample repository is what the commands print, line break for line break."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"```console\n\$ ddaudit (.*)\n((?s:.*?))```")
SHOWN = {
    command: text
    for command, text in COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    # What tries or runs something has tests of its own.
    if shlex.split(command)[0] in ("scan", "fix") and "--verify" not in command
}


def missing(shown: str, printed: str) -> list[str]:
    """The parts of a sample, which `...` divides, that do not stand so in the output, in this order."""
    rest, lost = "\n" + printed, []
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        _, found, after = rest.partition("\n" + part)
        if part and not found:
            lost.append(part)
        elif part:
            rest = "\n" + after
    return lost


def test_a_line_broken_elsewhere_is_missed() -> None:
    assert missing("b\n...\nd e\n", "a\nb\nc\nd e\n") == []
    assert missing("d e\n", "d\ne\n") == ["d e\n"]
    assert missing("d\n...\nb\n", "b\nd\n") == ["b\n"]
    assert missing("e\n", "d e\n") == ["e\n"]


@pytest.mark.parametrize("command", SHOWN)
def test_a_sample_is_the_real_output(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests/research_repo", "patched/research_repo"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    printed = CliRunner().invoke(main, shlex.split(command)).output
    assert missing(SHOWN[command], printed) == []


def test_there_are_samples() -> None:
    assert {shlex.split(command)[0] for command in SHOWN} == {"scan", "fix"}
    assert any("--why" in command for command in SHOWN)
