"""Comments that keep a finding: where they hold, what they leave alone, and how they themselves are reported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.engine import scan, scan_sources
from ddaudit.auditor.fixing.settling import settle
from ddaudit.auditor.scanning.result_cache import ResultCache
from ddaudit.auditor.sources.source import SourceFile
from ddaudit.auditor.suppressions import suppressions

if TYPE_CHECKING:
    from pathlib import Path

    from ddaudit.auditor.scanning.result import ScanResult

HEAD = "from transformers import DynamicCache, PreTrainedModel\n\n\ndef f(model: PreTrainedModel, ids, n):\n"
CODES = ("DDA101", "DDA102", "DDA202")


def look(body: str, *select: str, head: str = HEAD) -> ScanResult:
    text = head + "".join(f"    {line}\n" for line in body.splitlines())
    result = scan_sources({"a.py": SourceFile("a.py", text)}, select=select)
    assert not result.skipped
    return result


def found(body: str, head: str = HEAD) -> list[str]:
    """Codes that are reported, of three rules and the one about comments."""
    return [finding.code for finding in look(body, *CODES, "DDA501", head=head).findings]


def fixed(body: str, *select: str) -> str:
    text = HEAD + "".join(f"    {line}\n" for line in body.splitlines())
    result = settle({"a.py": SourceFile("a.py", text)}, lambda sources: scan_sources(sources, select=select).findings)
    assert not result.errors
    return "".join(f"{line.removeprefix('    ')}\n" for line in result.sources["a.py"].text.split(HEAD)[1].splitlines())


HELD = {
    "same line": "cache = DynamicCache()  # ddaudit: ignore[DDA101] a reason",
    "by name": "cache = DynamicCache()  # ddaudit: ignore[bare-cache] a reason",
    "in small letters": "cache = DynamicCache()  # ddaudit:ignore[dda101]",
    "after another comment": "cache = DynamicCache()  # type: ignore  # ddaudit: ignore[DDA101] a reason",
    "before another comment": "cache = DynamicCache()  # ddaudit: ignore[DDA101] a reason  # noqa: E501",
    "noqa": "cache = DynamicCache()  # noqa: E501, DDA101",
    "noqa in capitals": "cache = DynamicCache()  # NOQA:DDA101",
    "line above": "# ddaudit: ignore[DDA101] a reason\ncache = DynamicCache()",
    "two lines above": "# ddaudit: ignore[DDA101] a reason\n\n# why\ncache = DynamicCache()",
    "first line of a call": "model(  # ddaudit: ignore[DDA101]\n    ids,\n    cache=DynamicCache(),\n)",
    "other line of a call": "model(\n    ids,  # ddaudit: ignore[DDA101]\n    cache=DynamicCache(),\n)",
    "line of its own in a call": "model(\n    # ddaudit: ignore[DDA101]\n    ids,\n    cache=DynamicCache(),\n)",
    "last line of a call": "model(\n    ids,\n    cache=DynamicCache(),\n)  # noqa: DDA101",
    "after a string of lines": 'x = DynamicCache(), """\n"""  # ddaudit: ignore[DDA101]',
    "after a backslash": "x = DynamicCache(), \\\n    n  # ddaudit: ignore[DDA101]",
    "two rules": "return model.lm_head(DynamicCache())  # ddaudit: ignore[DDA101, lm-head] a reason",
    "header": "with open(DynamicCache()):  # ddaudit: ignore[DDA101]\n    pass",
    "above a header": "# ddaudit: ignore[DDA101]\nwith open(DynamicCache()):\n    pass",
    "file": "cache = DynamicCache()\n# ddaudit: ignore-file[DDA101] a reason",
}
NOT_HELD = {
    "other rule": ("return model.lm_head(DynamicCache())  # ddaudit: ignore[DDA101]", ["DDA202"]),
    "line below": ("cache = DynamicCache()\n# ddaudit: ignore[DDA101]", ["DDA101", "DDA501"]),
    "two below": ("# ddaudit: ignore[DDA101]\nn += 1\ncache = DynamicCache()", ["DDA501", "DDA101"]),
    "body": ("with open(n):  # ddaudit: ignore[DDA101]\n    cache = DynamicCache()", ["DDA501", "DDA101"]),
    "noqa above": ("# noqa: DDA101\ncache = DynamicCache()", ["DDA501", "DDA101"]),
    "noqa of others": ("cache = DynamicCache()  # noqa: E501", ["DDA101"]),
    "noqa of all": ("cache = DynamicCache()  # noqa", ["DDA101"]),
    "in a text": ('cache = DynamicCache(), "# ddaudit: ignore[DDA101]"', ["DDA101"]),
    "misspelt": ("cache = DynamicCache()  # ddaudit: ingore[DDA101]", ["DDA101", "DDA501"]),
    "unknown": ("cache = DynamicCache()  # ddaudit: ignore[DDA1]", ["DDA101", "DDA501"]),
    "itself": ("n += 1  # ddaudit: ignore[DDA501]", ["DDA501"]),
}


@pytest.mark.parametrize("body", HELD.values(), ids=HELD)
def test_a_comment_holds_for_its_statement(body: str) -> None:
    assert found(body) == []
    # Without the comments the findings are there.
    assert found("\n".join(line.partition("#")[0].rstrip() for line in body.splitlines())) != []


@pytest.mark.parametrize(("body", "codes"), NOT_HELD.values(), ids=NOT_HELD)
def test_a_comment_holds_for_nothing_else(body: str, codes: list[str]) -> None:
    assert found(body) == codes


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_any_newline_ends_a_comment(newline: str) -> None:
    text = HEAD + "    a = DynamicCache()  # ddaudit: ignore[DDA101] é\n    b = DynamicCache()\n"
    result = scan_sources({"a.py": SourceFile("a.py", text.replace("\n", newline))}, select=CODES)
    assert [finding.span.line for finding in result.findings] == [6]
    assert [(finding.span.line, finding.suppressed) for finding in result.suppressed] == [(5, "é")]


def test_a_rule_that_was_not_looked_for_is_not_called_unused() -> None:
    body = "n += 1  # ddaudit: ignore[DDA101, DDA102]"
    (finding,) = look(body, "DDA102", "DDA501").findings
    assert "`DDA102` is not found there" in finding.message and "DDA101" not in finding.message
    assert look(body, "DDA202", "DDA501").findings == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("n += 1  # ddaudit: ignore[DDA101] why", "n += 1"),
        ("n += 1  # type: ignore  # ddaudit: ignore[DDA101] why", "n += 1  # type: ignore"),
        ("n += 1  # ddaudit: ignore[DDA101] why  # noqa: E501", "n += 1  # noqa: E501"),
        ("n += 1  # noqa: DDA101, E501", "n += 1  # noqa: E501"),
        ("# ddaudit: ignore[DDA101] why\nn += 1", "n += 1"),
        ("n += 1\n\n# ddaudit: ignore[DDA101] why\n\nreturn n", "n += 1\n\n\nreturn n"),
        ("f(\n    # ddaudit: ignore[DDA101] why\n    n,\n)", "f(\n    n,\n)"),
        (
            "x = model.lm_head(n)  # ddaudit: ignore[DDA101, lm-head] why",
            "x = model.lm_head(n)  # ddaudit: ignore[lm-head] why",
        ),
        ("x = model.lm_head(n)  # ddaudit: ignore why", "x = model.lm_head(n)  # ddaudit: ignore[DDA202] why"),
        ("n += 1  # ddaudit: ignore", "n += 1"),
    ],
)
def test_the_fix_takes_out_what_suppresses_nothing(before: str, after: str) -> None:
    assert fixed(before) == after + "\n"
    assert fixed(after) == after + "\n"


def test_a_typing_error_is_not_taken_out() -> None:
    body = "cache = DynamicCache()  # ddaudit: ignore[bare-cahce] why"
    assert fixed(body, "DDA501") == body + "\n"
    assert "(`bare-cache`?)" in look(body, "DDA501").findings[0].message


def test_what_is_suppressed_is_not_fixed() -> None:
    kept = "a = model.lm_head(ids)  # ddaudit: ignore[DDA202] why\n"
    assert fixed(kept + "b = model.lm_head(ids)", "DDA202") == kept + "b = model.get_output_embeddings()(ids)\n"


def test_the_command_counts_and_marks_them(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(HEAD + "    return model.lm_head(ids)  # ddaudit: ignore[DDA202] it has one\n")
    run = CliRunner().invoke
    text = run(main, ["scan", str(tmp_path), "--no-cache"])
    assert text.exit_code == 0
    assert text.output.splitlines()[-1] == (
        "0 findings in 1 file scanned (0 skipped, 0 failed); 1 suppressed by comments"
    )
    record = json.loads(run(main, ["scan", str(tmp_path), "--no-cache", "--format", "json"]).output)
    assert record["findings"] == [] and record["summary"]["suppressed"] == 1
    (line,) = run(main, ["scan", str(tmp_path), "--no-cache", "--format", "jsonl"]).output.splitlines()
    assert record["suppressed"] == [json.loads(line)]
    assert (json.loads(line)["suppressed"], json.loads(line)["suppressed_reason"]) == (True, "it has one")
    said = run(main, ["explain", f"{file}:5"]).output.splitlines()
    assert said[-1] == "found: DDA202 lm-head at model.lm_head, suppressed: it has one"
    mended = run(main, ["fix", "--in-place", "--files", str(file)])
    assert mended.exit_code == 0 and mended.output.endswith("0 left, 1 suppressed by comments\n")
    assert "model.lm_head" in file.read_text()


def test_a_kept_result_knows_them(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "a.py").write_text(HEAD + "    return model.lm_head(ids)  # ddaudit: ignore[DDA202] it has one\n")
    kept = ResultCache(tmp_path / "kept")
    first = scan([repo], cache=kept)
    assert [finding.suppressed for finding in first.suppressed] == ["it has one"]
    assert scan([repo], cache=kept) == first
    (repo / "a.py").write_text(HEAD + "    return model.lm_head(ids)\n")
    assert scan([repo], cache=kept).suppressed == ()


def test_a_file_without_such_a_comment_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(source: SourceFile) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(SourceFile, "tokens", tokens)
    assert suppressions(SourceFile("a.py", "x = 1  # noqa: E501\n")) == ()
    with pytest.raises(AssertionError, match="tokenized"):
        suppressions(SourceFile("a.py", "x = 1  # noqa: DDA101\n"))


def test_what_the_tokenizer_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(source: SourceFile) -> None:
        raise SyntaxError("no")

    monkeypatch.setattr(SourceFile, "tokens", tokens)
    assert found(HELD["same line"]) == ["DDA101"]
