"""Which release is meant, who says so, which fixes it lets through, and that no finding is lost for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.engine import scan
from ddaudit.auditor.facts.names import RELEASE, gone_since
from ddaudit.auditor.finding import (
    RUNTIME_SINCE,
    Applicability,
    Confidence,
    Edit,
    Finding,
    Fix,
    Import,
    Severity,
    Span,
)
from ddaudit.auditor.rule import all_rules
from ddaudit.auditor.sources.requirements import read_requirement
from ddaudit.auditor.targets import releases
from ddaudit.auditor.targets.releases import Releases, admits, choose, number, on_release

CODE = """\
import torch
from transformers import AutoModelForCausalLM, DynamicCache

model = AutoModelForCausalLM.from_pretrained("name", torch_dtype=torch.bfloat16)
cache = DynamicCache(config=model.config)
out = model(ids, past_key_values=cache)
cache.crop(5)
"""


@pytest.mark.parametrize(
    ("requirement", "inside", "outside"),
    [
        ("==4.57.1", ["4.57.1"], ["4.57.0", "4.57.2", "5.0"]),
        ("==4.57", ["4.57.0"], ["4.57.1"]),
        ("==4.57.*", ["4.57", "4.57.9"], ["4.56.2", "4.58", "4.570"]),
        (">=4.40", ["4.40", "5.24.0"], ["4.39.3"]),
        (">=4.56.0,<5.3", ["4.56.0", "5.2.9"], ["5.3", "4.55"]),
        ("~=4.44", ["4.44", "4.57.1"], ["4.43", "5.0"]),
        ("~=4.44.2", ["4.44.3"], ["4.44.1", "4.45"]),
        ("^4.40", ["4.40", "4.57"], ["5.0", "4.39"]),
        ("~4.40", ["4.40.2"], ["4.41"]),
        (">4.40,!=4.41.*", ["4.42"], ["4.40", "4.41.1"]),
        ("^4.40||^5.17", ["4.41", "5.18"], ["6.0"]),
        ("===4.57.1", ["4.57.1"], ["4.57.2"]),
        (">=5.0.0rc1", ["5.0"], ["4.57"]),
    ],
)
def test_what_a_requirement_admits(requirement: str, inside: list[str], outside: list[str]) -> None:
    assert [release for release in (*inside, *outside) if admits(requirement, release)] == inside


FILES = {
    "pyproject.toml": '[project]\ndependencies = ["torch", "transformers[torch] >= 4.40, < 5 ; extra == \'a\'"]\n',
    "setup.cfg": "[options]\ninstall_requires =\n    torch\n    transformers>=4.40,<5\n",
    "setup.py": "from setuptools import setup\nsetup(install_requires=['torch', 'transformers>=4.40,<5'])\n",
    "requirements.txt": "# transformers==1\ntorch\ntransformers>=4.40,<5  # why\n",
    "requirements-dev.txt": "transformers>=4.40,<5 \\\n    --hash=sha256:1\n",
    "requirements/base.txt": "transformers>=4.40,<5\n",
    "environment.yml": "dependencies:\n  - python=3.11\n  - pip:\n    - transformers>=4.40,<5\n",
    "Pipfile": '[packages]\ntransformers = {version = ">=4.40,<5", extras = ["torch"]}\n',
}
LOCKS = {
    "uv.lock": '[[package]]\nname = "torch"\nversion = "2"\n\n[[package]]\nname = "transformers"\nversion = "4.50.1"\n',
    "poetry.lock": '[[package]]\nname = "transformers"\nversion = "4.50.1"\ndescription = "x"\n',
    "Pipfile.lock": '{"default": {"transformers": {"hashes": [], "version": "==4.50.1"}}}',
    "environment.yaml": "dependencies:\n- conda-forge::transformers=4.50.1=py_0\n",
}


@pytest.mark.parametrize(("name", "text"), FILES.items(), ids=FILES)
def test_every_kind_of_metadata_is_read(name: str, text: str, tmp_path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    found = read_requirement(tmp_path)
    assert found is not None and (found.releases, found.path) == (">=4.40,<5", name)
    assert "4.40" in text.splitlines()[found.line - 1]


@pytest.mark.parametrize(("name", "text"), LOCKS.items(), ids=LOCKS)
def test_every_kind_of_lock_is_read(name: str, text: str, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    found = read_requirement(tmp_path)
    assert found is not None and found.releases in ("==4.50.1", "==4.50.1.*")
    assert "4.50.1" in text.splitlines()[found.line - 1]


@pytest.mark.parametrize(
    "text",
    [
        "torch>=2\n",
        "transformers\n",
        "sentence-transformers==5.5.1\ntransformers-stream-generator==0.0.5\n",
        "transformers @ git+https://example.org/transformers@main\n",
        "",
    ],
)
def test_what_names_no_release_says_nothing(text: str, tmp_path) -> None:
    (tmp_path / "requirements.txt").write_text(text)
    assert read_requirement(tmp_path) is None


def test_a_tag_is_a_release_and_poetrys_table_is_read(tmp_path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers @ git+https://example.org/transformers@v4.49.0\n")
    tagged = read_requirement(tmp_path)
    assert tagged is not None and tagged.releases == "==4.49.0"
    (tmp_path / "pyproject.toml").write_text('[tool.poetry.dependencies]\npython = "^3.10"\ntransformers = "^4.40"\n')
    poetry = read_requirement(tmp_path)
    assert poetry is not None and (poetry.releases, poetry.path, poetry.line) == ("^4.40", "pyproject.toml", 3)


def test_a_file_that_does_not_parse_says_nothing(tmp_path) -> None:
    for name in ("pyproject.toml", "setup.cfg", "setup.py", "Pipfile.lock"):
        (tmp_path / name).write_text("transformers>=4.40 = [(\n")
    assert read_requirement(tmp_path) is None


def test_metadata_is_not_read_through_a_link_that_leaves_the_repository(tmp_path) -> None:
    (tmp_path / "elsewhere.txt").write_text("transformers==4.40\n")
    root = tmp_path / "repository"
    root.mkdir()
    (root / "requirements.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert read_requirement(root) is None


def choice(monkeypatch, tmp_path, *, installed: str = "", requirement: str = "", asked: str = "") -> Releases:
    def version(name: str) -> str:
        if not installed:
            raise releases.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(releases, "version", version)
    if requirement:
        (tmp_path / "requirements.txt").write_text(f"transformers{requirement}\n")
    return choose(tmp_path, asked)


@pytest.mark.parametrize(
    ("known", "target", "says"),
    [
        ({"asked": "5.20", "requirement": "==5.19", "installed": "5.24.0"}, "5.20", "by --transformers"),
        ({"asked": "4.57.1", "installed": "5.24.0"}, "4.57.1", "by --transformers"),
        ({"requirement": ">=4.40", "installed": "5.17.0"}, RELEASE, "admitted by transformers>=4.40 in"),
        ({"requirement": "==5.20.1", "installed": "5.24.0"}, "5.20.1", "admitted by transformers==5.20.1 in"),
        ({"requirement": ">=5.17,<5.20", "installed": "5.24.0"}, "5.19", "admitted by"),
        # Where the code comes from is no release to port to.
        ({"requirement": "==4.57.1", "installed": "5.17.0"}, RELEASE, "the newest known; the code is for"),
        ({"requirement": ">=4.56,<5.3"}, RELEASE, "the newest known; the code is for"),
        ({"installed": "5.20.0"}, "5.20.0", "installed"),
        ({"installed": "5.30.0"}, "5.30.0", f"installed; the newest that the rules know is {RELEASE}"),
        ({"requirement": "==5.30"}, "5.30", f"; the newest that the rules know is {RELEASE}"),
        ({"installed": "4.57.1"}, RELEASE, "4.57.1 is installed, on which no fork runs"),
        ({}, RELEASE, "nothing names one"),
    ],
)
def test_who_says_which_release_is_meant(monkeypatch, tmp_path, known, target: str, says: str) -> None:
    chosen = choice(monkeypatch, tmp_path, **known)
    assert (chosen.target, says in chosen.source) == (target, True), chosen


@pytest.mark.parametrize("asked", ["newest", ">=5", "5.x", "../5"])
def test_what_is_no_release_is_an_error(asked: str, tmp_path) -> None:
    with pytest.raises(ValueError, match="give one release"):
        choose(tmp_path, asked)


def finding(severity: Severity = Severity.ERROR, starts: str = "", **fix: object) -> Finding:
    made = Fix((Edit(0, 1, "y"),), Applicability.SAFE, "why", **fix)  # type: ignore[arg-type]
    return Finding("DDA999", "a", "a", "a.py", Span(0, 1, 1, 1, 1, 2), "x", "m", severity, Confidence.PROVEN, (),
                   fix=made, since=starts)  # fmt: skip


RUNTIME = (Import("ddaudit.runtime", "crop_cache"),)
NEEDS = {"anywhere": {}, "4.56": {"since": "4.56"}, "runtime": {"imports": RUNTIME}, "5.24": {"since": "5.24"}}


@pytest.mark.parametrize(
    ("known", "severity", "expected"),
    [
        # Of what fails on the target, a fix is made if its replacement exists there.
        ({"asked": "5.24"}, Severity.ERROR, {"anywhere": "safe", "4.56": "safe", "runtime": "safe", "5.24": "safe"}),
        ({"asked": "5.17"}, Severity.ERROR, {"anywhere": "safe", "4.56": "safe", "runtime": "safe", "5.24": "-"}),
        ({"asked": "4.57"}, Severity.SILENT, {"anywhere": "safe", "4.56": "safe", "runtime": "-", "5.24": "-"}),
        ({"asked": "4.50"}, Severity.SILENT, {"anywhere": "safe", "4.56": "-", "runtime": "-", "5.24": "-"}),
        # A pin to the past gates nothing but what only one of the releases of a fork has.
        ({"requirement": "==4.40"}, Severity.PORT, {"4.56": "safe", "runtime": "safe", "5.24": "-"}),
        ({"requirement": ">=4.40"}, Severity.PORT, {"anywhere": "safe", "runtime": "safe", "5.24": "unsafe"}),
        ({"requirement": ">=5.24"}, Severity.PORT, {"anywhere": "safe", "runtime": "safe", "5.24": "safe"}),
        # With none known, only what works on every release of a fork.
        ({}, Severity.ERROR, {"anywhere": "safe", "4.56": "safe", "runtime": "safe", "5.24": "-"}),
        ({"installed": "5.24.0"}, Severity.ERROR, {"anywhere": "safe", "runtime": "safe", "5.24": "safe"}),
        # What still works is renamed only where no release without the new name is meant.
        ({"asked": "5.24"}, Severity.WARN, {"4.56": "safe", "5.24": "safe"}),
        ({"requirement": "==4.57.1"}, Severity.WARN, {"4.56": "safe", "5.24": "-"}),
        ({"requirement": ">=4.40"}, Severity.WARN, {"4.56": "unsafe", "5.24": "unsafe"}),
        ({"requirement": ">=4.56"}, Severity.WARN, {"4.56": "safe", "5.24": "unsafe"}),
        ({"installed": "5.24.0"}, Severity.WARN, {"4.56": "unsafe", "5.24": "unsafe"}),
        ({}, Severity.WARN, {"4.56": "unsafe", "5.24": "-"}),
    ],
)  # fmt: skip
def test_which_fixes_are_made(monkeypatch, tmp_path, known, severity: Severity, expected: dict[str, str]) -> None:
    chosen = choice(monkeypatch, tmp_path, **known)
    made = {name: on_release(finding(severity, **NEEDS[name]), chosen) for name in expected}
    assert {name: each.fix.applicability.value if each.fix else "-" for name, each in made.items()} == expected
    assert all(each.no_fix_reason for each in made.values() if each.fix is None)


@pytest.mark.parametrize(
    ("known", "later"),
    [
        ({"requirement": "==4.57.1"}, ["5.0", "5.24"]),
        ({"requirement": "==4.40"}, ["4.57", "5.0", "5.24"]),
        ({"requirement": ">=4.56,<5.3"}, ["5.24"]),
        ({"requirement": ">=4.40"}, []),
        ({"asked": "4.57"}, ["5.0", "5.24"]),
        ({"installed": "5.24.0"}, []),
        ({}, []),
    ],
)
def test_what_starts_after_the_code_was_written_is_marked(monkeypatch, tmp_path, known, later: list[str]) -> None:
    chosen = choice(monkeypatch, tmp_path, **known)
    assert [since for since in ("", "4.57", "5.0", "5.24") if chosen.begins_later(finding(starts=since))] == later


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "requirements.txt").write_text("torch\ntransformers==4.57.1\n")
    return tmp_path


def test_a_pin_to_the_past_silences_nothing(repository) -> None:
    (repository / "other").mkdir()
    (repository / "other" / "a.py").write_text(CODE)
    pinned, free = scan([repository]), scan([repository / "other"])
    assert pinned.releases is not None and pinned.releases.written_for == "4.57.1"
    assert [replace(f, fix=None, no_fix_reason="") for f in pinned.findings if f.path == "a.py"] == [
        replace(f, fix=None, no_fix_reason="") for f in free.findings
    ]


def test_a_scan_prints_the_release_and_who_says_so(repository) -> None:
    output = CliRunner().invoke(main, ["scan", str(repository)]).output
    said = f"Transformers {RELEASE}, the newest known; the code is for transformers==4.57.1 in requirements.txt:2\n"
    assert said in output
    assert "  2 of 4 findings start after 4.57.1, marked `from`; name the release you port to with" in output
    assert "error  [fix]    (from 5.24) cache.crop(5)\n" in output
    record = json.loads(CliRunner().invoke(main, ["scan", str(repository), "--format", "json"]).stdout)
    assert record["transformers"]["project"] == {"requirement": "==4.57.1", "path": "requirements.txt", "line": 2}
    assert {row["code"]: row["since"] for row in record["findings"]}["DDA102"] == "5.24"


def test_a_named_release_lets_its_renames_through(repository) -> None:
    shown = CliRunner().invoke(main, ["fix", str(repository), "--diff", "--transformers", "5.24"])
    assert "+out = model(ids, cache=cache)\n" in shown.stdout
    assert '+model = AutoModelForCausalLM.from_pretrained("name", dtype=torch.bfloat16)\n' in shown.stdout
    assert "Transformers 5.24, by --transformers\n" in shown.stderr
    assert "next: ddaudit fix --transformers=5.24 " in shown.stderr


@pytest.mark.parametrize(
    ("asked", "severity", "beyond"),
    [("5.24", "warn", False), ("5.39", "warn", True), ("5.40", "error", True), ("6.0", "error", True)],
)
def test_a_name_that_is_gone_is_an_error(asked: str, severity: str, beyond: bool, repository) -> None:
    (repository / "b.py").write_text(
        "from transformers import PreTrainedModel\n\ndef step(model: PreTrainedModel, ids, cache):\n"
        "    return model(ids, past_key_values=cache).past_key_values\n"
    )
    shown = CliRunner().invoke(main, ["scan", str(repository / "b.py"), "--transformers", asked]).output
    rows = [line.split() for line in shown.splitlines() if "DDA403 deprecated-keyword" in line and "here" not in line]
    assert [row[3:5] for row in rows] == [[severity, "[fix]"]] * 2, shown
    assert ("still works" in shown) == (severity == "warn")
    said = f"Transformers {asked}, by --transformers"
    assert (f"{said}; the newest that the rules know is {RELEASE}\n" if beyond else f"{said}\n") in shown


def test_what_goes_later_is_not_refuted_by_the_release_that_is_installed(repository) -> None:
    from ddaudit.auditor.claim import Answer, Ask, Claim, Outcome
    from ddaudit.auditor.targets.verifying import verified

    claim = Claim(Ask.KEYWORD, "past_key_values")
    works = {claim: {"Tiny": Answer(Outcome.WORKS, "it takes it")}}
    gone = on_release(replace(finding(Severity.WARN), claim=claim, gone_in="5.40"), choose(repository, "5.40"))
    assert gone.severity is Severity.ERROR
    assert [verified(each, works).verified.status.value for each in (gone, replace(gone, gone_in=""))] == [
        "confirmed", "refuted",
    ]  # fmt: skip


def test_an_old_release_named_keeps_the_runtime_out(repository) -> None:
    shown = CliRunner().invoke(main, ["fix", str(repository), "--diff", "--transformers", "4.57.1"])
    assert "ddaudit.runtime" not in shown.stdout
    assert "dtype=torch.bfloat16" in shown.stdout
    assert "its replacement exists from Transformers 5.17, and 4.57.1 is meant" in " ".join(shown.stderr.split())


def test_a_fork_says_that_its_pin_has_to_go(repository, tmp_path_factory) -> None:
    said = "it runs on Transformers 5.17 or later: lift transformers==4.57.1 in requirements.txt:2\n"
    for requirement, expected in (("==4.57.1", True), (">=4.57.1", False)):
        (repository / "requirements.txt").write_text(f"torch\ntransformers{requirement}\n")
        fork = tmp_path_factory.mktemp("forks") / "fork"
        shown = CliRunner().invoke(main, ["fix", str(repository), "--output", str(fork)])
        assert (said in shown.output) is expected, shown.output


def test_the_manifest_names_the_release(repository, tmp_path_factory) -> None:
    fork = tmp_path_factory.mktemp("forks") / "fork"
    CliRunner().invoke(main, ["fix", str(repository), "--output", str(fork), "--transformers", "5.24"])
    record = json.loads((fork / "ddaudit.json").read_text())
    assert record["transformers"]["release"] == "5.24"
    assert record["transformers"]["source"] == "by --transformers"


def test_the_oldest_release_of_a_fork_is_the_runtimes() -> None:
    from test_layout import settings

    wanted = settings()["project"]["optional-dependencies"]["runtime"]
    assert f"transformers>={RUNTIME_SINCE}" in wanted


def test_rules_name_releases_that_compare() -> None:
    assert [rule.slug for rule in all_rules() if rule.since and not number(rule.since) > (0, 0, 0)] == []


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("transformers.AutoModelForVision2Seq", "5.0"),
        ("transformers.modeling_attn_mask_utils", "5.0"),
        ("transformers.DataCollatorForSOP", "5.24"),
        ("transformers.models.llama.modeling_llama.LlamaFlashAttention2", "4.57"),
        ("transformers.generation.utils.GenerationMixin._get_cache", "5.0"),
        ("transformers.generation.utils.GenerationMixin.greedy_search", "4.57"),
    ],
)
def test_when_a_name_went(name: str, release: str) -> None:
    assert gone_since(name) == release
