"""`ddaudit scan` and `ddaudit explain` as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.rule import all_rules

BRITTLE = """
from transformers import DynamicCache, PreTrainedModel


def decode(target: PreTrainedModel, ids, start):
    cache = DynamicCache()
    out = target(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    cache.crop(start)
    return target.lm_head(out.hidden_states[start + 1])
"""
CLEAN = "import torch\n\n\ndef double(x: torch.Tensor):\n    return 2 * x\n"


@pytest.fixture
def repo(tmp_path, monkeypatch):
    (tmp_path / "decode.py").write_text(BRITTLE.lstrip("\n"))
    (tmp_path / "clean.py").write_text(CLEAN)
    # The same release wherever the tests run.
    (tmp_path / "requirements.txt").write_text("transformers>=5.17\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_clean_is_0(repo):
    result = run("scan", "clean.py")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "Transformers 5.24.0, the newest admitted by transformers>=5.17 in requirements.txt:1",
        "0 findings in 1 file scanned (0 skipped, 0 failed)",
    ]


def test_findings_are_1_and_grouped_by_file(repo):
    result = run("scan")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0] == "decode.py"
    assert lines[1:6] == [
        "  5:13     DDA101 bare-cache             error  [fix]    DynamicCache()",
        "  6:23     DDA403 deprecated-keyword     warn   [unsafe] past_key_values=cache",
        "  7:5      DDA102 cache-crop             error  [fix]    cache.crop(start)",
        "  8:12     DDA202 lm-head                port   [fix]    target.lm_head",
        "  8:27     DDA203 hidden-index           port   [unsafe] out.hidden_states[start + 1]",
    ]
    assert lines[-2:] == [
        "5 findings in 2 files scanned (0 skipped, 0 failed); 3 fixable with `fix`, 5 with `fix --unsafe`",
        "next: ddaudit fix",
    ]


def test_each_remedy_and_what_happens_is_said_once(repo):
    (repo / "again.py").write_text(BRITTLE.lstrip("\n"))
    output = run("scan").output
    assert "  DDA102 cache-crop, 2 here\n" in output and output.count("crop_cache(cache, length)") == 1
    assert [line.split()[:2] for line in output.partition("what happens\n")[2].splitlines()[:3]] == [
        ["4", "error"],
        ["4", "port"],
        ["2", "warn"],
    ]


def test_no_line_is_wider_than_the_terminal(repo, monkeypatch):
    (repo / "wide.py").write_text(BRITTLE.lstrip("\n").replace("start", "length_of_the_committed_prefix"))
    monkeypatch.setenv("COLUMNS", "72")
    lines = run("scan").output.splitlines()
    findings = lines[: lines.index("what to do")]
    assert max(map(len, findings)) == 72 and any(line.endswith("...") for line in findings)
    remedies = lines[lines.index("what to do") : lines.index("what happens")]
    assert max(map(len, remedies)) <= 72


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        ((".",), "next: ddaudit fix ."),
        (("decode.py",), "next: ddaudit fix REPOSITORY"),
        ((".", "--select", "hidden-index"), "next: ddaudit fix --unsafe ."),
        (
            (".", "--select", "deprecated-keyword", "--transformers", "4.57"),
            "next: what is left is for a person; `ddaudit explain CODE` prints",
        ),
    ],
)
def test_a_scan_ends_with_the_next_step(repo, arguments, step):
    assert run("scan", *arguments).output.splitlines()[-1].startswith(step)


def test_json_lines_are_findings_alone(repo):
    result = run("scan", ".", "--format", "jsonl")
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["code"] for row in rows] == ["DDA101", "DDA403", "DDA102", "DDA202", "DDA203"]
    first = rows[0]
    assert first.keys() >= {
        "code", "slug", "kind", "path", "line", "column", "end_line", "end_column", "expr", "severity", "confidence",
        "applicability", "message", "evidence", "fixable",
    }  # fmt: skip
    assert (first["path"], first["line"], first["column"], first["expr"]) == ("decode.py", 5, 13, "DynamicCache()")
    assert [row["fixable"] for row in rows] == [True, False, True, True, False]
    assert str(repo) not in result.output


def test_json_is_one_object_with_what_was_not_examined(repo):
    (repo / "broken.py").write_text("def f(:\n")
    result = run("scan", ".", "--format", "json")
    record = json.loads(result.stdout)
    assert result.exit_code == 2
    assert len(record["findings"]) == 5
    assert record["skipped"] == [{"path": "broken.py", "reason": "syntax", "detail": "line 1: invalid syntax"}]
    assert record["summary"] == {
        "scanned": 2, "skipped": 0, "failed": 1, "findings": 5, "suppressed": 0, "fixable": 3, "fixable_unsafe": 5,
    }  # fmt: skip


def test_a_file_that_was_not_examined_is_2_and_named_on_stderr(repo):
    (repo / "latin.py").write_bytes(b"x = '\xe9'\n")
    result = run("scan", "clean.py", "latin.py")
    assert result.exit_code == 2
    assert result.stderr.startswith("not examined: latin.py: encoding")
    assert "1 failed" in result.stdout


def test_excluded_folders_are_named_and_do_not_count(repo):
    (repo / "build").mkdir()
    (repo / "build" / "copy.py").write_text(BRITTLE)
    result = run("scan", "--ignore", "DDA", ".")
    assert result.exit_code == 0
    assert "not examined: build: excluded" in result.stderr
    assert "(1 skipped, 0 failed)" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("scan", "nowhere"), "nowhere does not exist"),
        (("scan", "empty"), "no Python file in empty"),
        (("scan", "--select", "DDA999"), "no rule 'DDA999'"),
        (("scan", "--ignore", "bare"), "no rule 'bare'"),
        (("explain", "DDA000"), "no rule 'DDA000'"),
    ],
)
def test_a_mistake_of_the_caller_is_one_line_and_2(repo, args, message):
    (repo / "empty").mkdir()
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_select_and_ignore_take_prefixes_slugs_and_lists(repo):
    def codes(*args):
        return [json.loads(line)["code"] for line in run("scan", "--format", "jsonl", *args).output.splitlines()]

    assert codes("--select", "DDA1") == ["DDA101", "DDA102"]
    assert codes("--select", "lm-head,hidden-index") == ["DDA202", "DDA203"]
    assert codes("--select", "DDA1", "--ignore", "cache-crop") == ["DDA101"]


def test_min_confidence(repo):
    (repo / "guess.py").write_text("def f(model, ids, m):\n    return model(ids, attention_mask=m[None, None])\n")
    assert run("scan", "guess.py").exit_code == 0
    result = run("scan", "guess.py", "--min-confidence", "guess")
    assert result.exit_code == 1
    assert "DDA105 tree-mask              silent          (guess) attention_mask=m[None, None]" in result.output


def test_scan_writes_and_runs_nothing(repo):
    (repo / "trap.py").write_text("import transformers\nraise SystemExit(7)\n")
    before = {path: path.read_bytes() for path in repo.rglob("*") if path.is_file()}
    assert run("scan").exit_code == 1
    assert {path: path.read_bytes() for path in repo.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_explain_prints_the_rule_s_own_page_and_examples(rule):
    by_code, by_slug = run("explain", rule.code), run("explain", rule.slug)
    assert by_code.exit_code == 0
    assert by_code.output == by_slug.output
    assert re.match(rf"{rule.code} {rule.slug} \(.*\b{rule.severity.value}\b.*; fix: .+\)\n", by_code.output)
    assert rule.page in by_code.output
    assert ("becomes:" in by_code.output) is rule.has_fix
    assert "Fine:" in by_code.output and "Found:" in by_code.output


def test_explain_alone_lists_every_rule():
    output = run("explain").output
    heads = [line for line in output.splitlines() if not line.startswith(" ")]
    assert [line.split()[:2] for line in heads] == [[rule.code, rule.slug] for rule in all_rules()]
    # What a rule finds, not the pattern of its message.
    assert "{" not in output and max(map(len, output.splitlines())) <= 110


def test_version():
    assert run("--version").output.startswith("ddaudit, version ")


def test_help_and_a_scan_start_without_heavy_imports():
    code = (
        "import sys; from ddaudit.auditor.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'libcst', 'jinja2', 'ddaudit.auditor.facts.flow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
