"""SARIF as code hosts and editors read it: what they require, and that it says the same as the other formats."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.engine import scan, scan_sources
from ddaudit.auditor.fixing.applying import apply_fixes
from ddaudit.auditor.reports.sarif_report import sarif
from ddaudit.auditor.rule import all_rules
from ddaudit.auditor.sources.source import SourceFile, read_tree

if TYPE_CHECKING:
    from pathlib import Path

CODE = '''"""Decodes."""

from transformers import DynamicCache, PreTrainedModel


def decode(target: PreTrainedModel, ids, start):
    cache = DynamicCache()
    name = "\N{GRINNING FACE}"; out = target(ids, past_key_values=cache, output_hidden_states=True)
    cache.crop(start)
    cache.crop(start)
    kept = target.lm_head(out)  # ddaudit: ignore[lm-head] it has one
    return target.lm_head(out.hidden_states[start + 1])
'''


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a repository"
    (folder / "deep er").mkdir(parents=True)
    (folder / "deep er" / "dé#code.py").write_text(CODE, encoding="utf-8")
    (folder / "clean.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "build").mkdir()
    (folder / "requirements.txt").write_text("transformers>=5.17\n")
    monkeypatch.chdir(folder)
    return folder


def run(*args: str) -> str:
    return CliRunner().invoke(main, ["scan", "--no-cache", *args]).stdout


def log(*args: str) -> dict[str, Any]:
    document = json.loads(run("--format", "sarif", *args))
    (only,) = document["runs"]
    return only


def check_region(region: dict[str, int]) -> None:
    assert region.keys() == {"startLine", "startColumn", "endLine", "endColumn"}
    assert all(isinstance(number, int) and number >= 1 for number in region.values())
    assert (region["startLine"], region["startColumn"]) <= (region["endLine"], region["endColumn"])


def check_artifact(artifact: dict[str, str], bases: dict[str, Any]) -> None:
    assert re.fullmatch(r"(?:[A-Za-z0-9._~/-]|%[0-9A-F]{2})+", artifact["uri"])
    assert not artifact["uri"].startswith("/") and artifact["uriBaseId"] in bases


def check(document: dict[str, Any]) -> None:
    """What the standard and GitHub require of the parts that are there."""
    assert document.keys() == {"$schema", "version", "runs"}
    assert document["version"] == "2.1.0" and document["$schema"].endswith("sarif-schema-2.1.0.json")
    for each in document["runs"]:
        assert each.keys() == {"tool", "invocations", "originalUriBaseIds", "columnKind", "results"}
        assert each["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        driver = each["tool"]["driver"]
        assert driver["name"] and driver["version"]
        for rule in driver["rules"]:
            texts = [rule["shortDescription"]["text"], rule["fullDescription"]["text"], *rule["help"].values()]
            assert all(isinstance(text, str) and text for text in texts) and rule["help"].keys() == {"text", "markdown"}
            assert max(map(len, texts[:2])) <= 1024
            assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
            assert rule["help"]["markdown"].count("```") % 2 == 0
        identities = [rule["id"] for rule in driver["rules"]]
        assert len(set(identities)) == len(identities)
        for result in each["results"]:
            assert result["ruleId"] == identities[result["ruleIndex"]]
            assert result["level"] in ("error", "warning", "note")
            assert result["message"]["text"]
            assert all(kept["kind"] == "inSource" for kept in result["suppressions"])
            (location,) = result["locations"]
            check_region(location["physicalLocation"]["region"])
            check_artifact(location["physicalLocation"]["artifactLocation"], each["originalUriBaseIds"])
            for fix in result.get("fixes", ()):
                assert fix["description"]["text"] and fix["artifactChanges"]
                for change in fix["artifactChanges"]:
                    check_artifact(change["artifactLocation"], each["originalUriBaseIds"])
                    assert change["replacements"]
                    for replacement in change["replacements"]:
                        check_region(replacement["deletedRegion"])
                        assert isinstance(replacement["insertedContent"]["text"], str)
        prints = [result["partialFingerprints"]["ddaudit/v1"] for result in each["results"]]
        assert len(set(prints)) == len(prints)
        for invocation in each["invocations"]:
            for notification in invocation["toolExecutionNotifications"]:
                assert notification["message"]["text"] and notification["level"] in ("error", "warning", "note")
                for location in notification.get("locations", ()):
                    check_artifact(location["physicalLocation"]["artifactLocation"], each["originalUriBaseIds"])


def test_it_has_what_is_required(repo: Path) -> None:
    document = json.loads(run("--format", "sarif"))
    check(document)
    assert [rule["id"] for rule in document["runs"][0]["tool"]["driver"]["rules"]] == [
        rule.code for rule in all_rules()
    ]
    assert len(document["runs"][0]["results"]) == 7


def test_every_format_has_the_same_findings(repo: Path) -> None:
    rows = [json.loads(line) for line in run("--format", "jsonl").splitlines()]
    record = json.loads(run("--format", "json"))
    text, path = [], ""
    for line in run().partition("what to do")[0].splitlines():
        if found := re.match(r"  (\d+):(\d+) +(DDA\d+) ", line):
            text.append((path, int(found[1]), int(found[2]), found[3]))
        elif line:
            path = line
    results = [
        (
            unquote(place["artifactLocation"]["uri"]), place["region"]["startLine"], place["region"]["startColumn"],
            result["ruleId"], bool(result["suppressions"]),
        )
        for result in log()["results"]
        for place in [result["locations"][0]["physicalLocation"]]
    ]  # fmt: skip

    def named(row: dict[str, Any]) -> tuple[str, int, int, str]:
        return row["path"], row["line"], row["column"], row["code"]

    assert results == [(*named(row), "suppressed" in row) for row in rows]
    assert text == [named(row) for row in record["findings"]] == [row[:4] for row in results if not row[4]]
    assert [named(row) for row in record["suppressed"]] == [row[:4] for row in results if row[4]]
    assert (len(text), len(results)) == (6, 7)


def test_columns_are_those_of_code_points(repo: Path) -> None:
    only = log()
    (result,) = [each for each in only["results"] if each["ruleId"] == "DDA403"]
    region = result["locations"][0]["physicalLocation"]["region"]
    line = CODE.splitlines()[region["startLine"] - 1]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == "past_key_values=cache"
    assert only["columnKind"] == "unicodeCodePoints"


def test_fingerprints_stay_when_lines_are_inserted_above(repo: Path) -> None:
    def seen() -> tuple[list[str], list[int]]:
        results = log()["results"]
        lines = [each["locations"][0]["physicalLocation"]["region"]["startLine"] for each in results]
        return [each["partialFingerprints"]["ddaudit/v1"] for each in results], lines

    prints, lines = seen()
    file = repo / "deep er" / "dé#code.py"
    file.write_text(CODE.replace("\n\n\ndef", "\n\nx = 1\n\n\ndef"), encoding="utf-8")
    assert seen() == (prints, [line + 2 for line in lines])


def test_two_findings_that_look_alike_have_fingerprints_of_their_own() -> None:
    """Inside an f-string a finding is named by the whole string."""
    text = CODE.partition("    cache =")[0] + '    return f"{target.lm_head} {target.lm_head}"\n'
    result = scan_sources({"a.py": SourceFile("a.py", text)})
    first, second = result.findings
    assert first.span == second.span
    check(json.loads(sarif(result, {})))


def test_a_suppressed_finding_has_its_reason(repo: Path) -> None:
    kept = [each["suppressions"] for each in log()["results"] if each["suppressions"]]
    assert kept == [[{"kind": "inSource", "justification": "it has one"}]]


def test_what_was_not_examined_is_a_notification(repo: Path) -> None:
    (invocation,) = log()["invocations"]
    assert invocation["executionSuccessful"] is False
    assert [(each["level"], each["message"]["text"]) for each in invocation["toolExecutionNotifications"]] == [
        ("error", "not examined: broken.py: syntax: line 1: invalid syntax"),
        ("note", "not examined: build: excluded: not the repository's own source"),
    ]
    assert log("clean.py")["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_it_is_the_same_from_anywhere_and_names_no_folder(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = run("--format", "sarif", ".")
    monkeypatch.chdir(repo.parent)
    assert run("--format", "sarif", "a repository") == here
    assert str(repo.parent) not in here


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("files", [(), ("deep er/dé#code.py",)], ids=["folder", "file"])
def test_a_fix_is_what_fix_does_for_it_alone(repo: Path, files: tuple[str, ...], newline: str) -> None:
    """Put in place by lines and columns, the replacements give the text that the fix itself gives, imports too."""
    (repo / "deep er" / "dé#code.py").write_bytes(CODE.replace("\n", newline).encode())
    (source,) = [each for path, each in read_tree([repo]).sources.items() if "code" in path]
    findings = {(each.code, each.span.line): each for each in scan([repo]).findings}
    fixed = 0
    for result in log(*files)["results"]:
        finding = findings.get((result["ruleId"], result["locations"][0]["physicalLocation"]["region"]["startLine"]))
        if "fixes" not in result:
            assert finding is None or finding.applicability.value != "safe"
            continue
        ((change,),) = [fix["artifactChanges"] for fix in result["fixes"]]
        lines = [*source.text.splitlines(keepends=True), ""]
        for replacement in reversed(change["replacements"]):
            region = replacement["deletedRegion"]
            assert (region["startColumn"], region["endColumn"]) == (1, 1)
            lines[region["startLine"] - 1 : region["endLine"] - 1] = [replacement["insertedContent"]["text"]]
        assert finding is not None
        assert "".join(lines) == apply_fixes(source, [finding]).source.text != source.text
        fixed += 1
    assert fixed == 4


def test_of_too_many_the_worst_are_given_and_it_says_so() -> None:
    result = scan_sources({"a.py": SourceFile("a.py", CODE)})
    document = json.loads(sarif(result, {}, max_results=3))
    check(document)
    (only,) = document["runs"]
    assert [each["level"] for each in only["results"]] == ["error"] * 3
    assert [each["message"]["text"] for each in only["invocations"][0]["toolExecutionNotifications"]] == [
        "4 of 7 findings are left out, the least severe: a run holds 3"
    ]
