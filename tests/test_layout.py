"""The layout's promises: what is packaged, who may import whom, and that the documents name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = ("auditor", "rules", "runtime")

# What each package may import of ours; everything may import itself.
MAY_IMPORT = {
    "auditor": (),
    "rules": ("ddaudit.auditor",),
    "runtime": ("ddaudit.auditor.claim", "ddaudit.auditor.profile", "ddaudit.auditor.record"),
}
HEAVY = {"torch", "transformers", "fla"}

# Nothing in the repository may depend on the machine it was written on, or send a reader to a file it lacks.
FOREIGN = re.compile(
    r"""(?<![\w.:/])/(?:work|root|home|Users|opt)/\w   # a machine's folders
      | [.]pyenv\b | \bfind-links\b | \bpypi[.]org\b | \bpythonhosted\b | \bdownload[.]pytorch\b
      | \b(?:DESIGN|STYLE|REQUIREMENTS)(?:[.]md|\s+(?:section\s+)?\d) | \bshared/(?:labels|cases|facts)
    """,
    re.VERBOSE,
)


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Every module that `path` imports anywhere, `from a import b` as `a.b` and `a`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_folder_with_modules_is_packaged() -> None:
    """A folder that is not listed is missing from the wheel, and only an editable install works."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in modules()}
    listed = settings()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted("ddaudit." + folder.replace("/", ".") for folder in folders)


def test_every_data_file_is_packaged() -> None:
    globs = settings()["tool"]["setuptools"]["package-data"]
    patterns = [
        f"{package.removeprefix('ddaudit.').replace('.', '/')}/{glob}"
        for package, of_package in globs.items()
        for glob in of_package
    ]
    data = [
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.suffix != ".py" and path.relative_to(ROOT).parts[0] in PACKAGES
    ]
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    allowed = (f"ddaudit.{package}", *MAY_IMPORT[package])
    ours = {name for name in imported(path) if name.split(".")[0] == "ddaudit"}
    assert {name for name in ours if not any(f"{name}.".startswith(f"{start}.") for start in allowed)} == set()


def test_the_core_needs_no_torch() -> None:
    """A pre-commit hook installs only the core: an import of torch there would break every user of the hook."""
    heavy = {
        path.relative_to(ROOT).as_posix()
        for path in modules()
        if path.relative_to(ROOT).parts[0] != "runtime" and HEAVY & {name.split(".")[0] for name in imported(path)}
    }
    assert heavy == set()
    code = (
        "import importlib, pkgutil, sys, ddaudit.auditor, ddaudit.rules\n"
        "for package in (ddaudit.auditor, ddaudit.rules):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not module.name.endswith('__main__'):\n"
        "            importlib.import_module(module.name)\n"
        f"sys.exit(', '.join({HEAVY!r} & set(sys.modules)) or 0)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_bytes()))


def test_nothing_names_a_machine_or_a_missing_document() -> None:
    found = []
    for path in tracked_files():
        if path == Path(__file__):
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in FOREIGN.finditer(text)]
    assert found == []


def test_readme_rule_table_is_current() -> None:
    from ddaudit.auditor.rule_table import with_rule_table

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == with_rule_table(readme), "run `python -m ddaudit.auditor.rule_table README.md`"


def test_readme_tree_is_complete() -> None:
    """A reader finds each file of the tool in the README's tree, and each name in the tree exists."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- file tree -->\n```\n(.*?)```", readme, re.DOTALL)
    assert block, "the README has no file tree"
    named, folders = set(), [""]
    for line in block.group(1).splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        depth = len(indent) // 2
        named.add(folders[depth] + name)
        folders[depth + 1 :] = [folders[depth] + name]
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
    # Rules have their own table.
    expected = {path.relative_to(ROOT).as_posix() for path in modules() if path.parent != ROOT / "rules"}
    assert sorted(name for name in expected - named if not name.endswith("__init__.py")) == []


def test_hooks_call_commands_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    from click.testing import CliRunner

    from ddaudit.auditor.cli import main

    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert set(hooks) == {"ddaudit-scan", "ddaudit-fix"}
    for hook in hooks.values():
        program, command, *_ = hook["entry"].split()
        assert program in settings()["project"]["scripts"]
        assert command in main.commands
        assert hook["language"] == "python"
        # The names of the files follow, and there may be none.
        assert "pass_filenames" not in hook
        assert CliRunner().invoke(main, [*hook["entry"].split()[1:], *hook["args"]]).exit_code == 0
        # Notebooks are not read: a commit of these alone is nothing to run for.
        assert hook["types_or"] == ["python"]
        assert hook["require_serial"] is True


def test_a_deprecation_alone_stops_no_commit(tmp_path: Path) -> None:
    """It works until a release that is named: a hook that is red on every commit is a hook that is taken out."""
    yaml = pytest.importorskip("yaml")
    from click.testing import CliRunner

    from ddaudit.auditor.cli import main
    from ddaudit.auditor.finding import Severity
    from ddaudit.auditor.rule import all_rules

    file = tmp_path / "decode.py"
    works = "from transformers import PreTrainedModel\ndef f(m: PreTrainedModel, ids, kv):\n"
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()):
        command = hook["entry"].split()[1:]
        file.write_text(works + "    return m(ids, past_key_values=kv)\n")
        assert CliRunner().invoke(main, [*command, str(file)]).exit_code == 1
        assert CliRunner().invoke(main, [*command, *hook["args"], str(file)]).exit_code == 0
        file.write_text(works + "    return m(ids, attention_mask=kv[None, None])\n")
        assert CliRunner().invoke(main, [*command, *hook["args"], str(file)]).exit_code == 1
        # A comment that suppresses nothing is the committer's own, and is put right at once.
        works_for_now = [rule.code for rule in all_rules() if rule.severity is Severity.WARN and rule.code < "DDA5"]
        assert hook["args"] == [f"--ignore={code}" for code in works_for_now]


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == settings()["project"]["version"]
