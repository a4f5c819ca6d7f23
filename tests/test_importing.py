"""A research repository is imported in isolation, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from ddaudit.runtime.errors import RunError
from ddaudit.runtime.running.importing import isolated_imports, load_function
from ddaudit.runtime.running.requirements import install_command, missing_packages


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_nothing_stays_imported_and_nothing_is_written(tmp_path):
    fork = write(
        tmp_path,
        {
            "lone_entry.py": "import lone_part.inner\ndef f(): return lone_part.inner.VALUE",
            "lone_part/__init__.py": "",
            "lone_part/inner.py": "VALUE = 7",
        },
    )
    path, cwd, bytecode = list(sys.path), os.getcwd(), sys.dont_write_bytecode
    with isolated_imports(fork):
        assert load_function(fork, "lone_entry", "f")[0]() == 7
    assert not [name for name in sys.modules if name.startswith("lone_")]
    assert (sys.path, os.getcwd(), sys.dont_write_bytecode) == (path, cwd, bytecode)
    assert not list(fork.rglob("__pycache__"))


def test_a_name_already_imported_does_not_reach_the_fork_and_comes_back(tmp_path, monkeypatch):
    """`model` of the process must not be taken for the repository's own, nor be replaced by it."""
    ours, inner = types.ModuleType("model"), types.ModuleType("model.inner")
    monkeypatch.setitem(sys.modules, "model", ours)
    monkeypatch.setitem(sys.modules, "model.inner", inner)
    fork = write(tmp_path, {"model/__init__.py": "", "model/inner.py": "def f(): return 'theirs'"})
    with isolated_imports(fork):
        assert load_function(fork, "model.inner", "f")[0]() == "theirs"
    assert sys.modules["model"] is ours and sys.modules["model.inner"] is inner


def test_two_forks_one_after_the_other_see_their_own(tmp_path):
    for name in ("a", "b"):
        fork = write(
            tmp_path / name, {"helper.py": f"NAME = {name!r}", "go.py": "import helper\ndef f(): return helper.NAME"}
        )
        with isolated_imports(fork):
            assert load_function(fork, "go", "f")[0]() == name


def test_a_source_layout_is_found(tmp_path):
    fork = write(tmp_path, {"src/laid_out/__init__.py": "", "src/laid_out/go.py": "def f(): return 1"})
    with isolated_imports(fork):
        assert load_function(fork, "laid_out.go", "f")[0]() == 1


def test_a_data_folder_does_not_hide_an_imported_package(tmp_path):
    """Repositories keep `datasets/` folders; an installed package of that name must stay the one imported."""
    import click

    fork = write(tmp_path, {"click/readme.txt": "data", "go.py": "import click\ndef f(): return click"})
    with isolated_imports(fork):
        assert load_function(fork, "go", "f")[0]() is click
    assert sys.modules["click"] is click


def test_everything_is_put_back_when_the_body_raises(tmp_path):
    fork = write(tmp_path, {"lone_entry.py": ""})
    path = list(sys.path)
    with pytest.raises(KeyError), isolated_imports(fork):
        __import__("lone_entry")
        os.chdir(tmp_path)
        raise KeyError
    assert sys.path == path and "lone_entry" not in sys.modules and Path.cwd() != tmp_path


def test_methods_come_with_their_class(tmp_path):
    fork = write(tmp_path, {"go.py": "class Drafter:\n    def spec(self): return 1\n"})
    with isolated_imports(fork):
        function, owner = load_function(fork, "go", "Drafter.spec")
        assert owner is not None and owner.__name__ == "Drafter" and function(None) == 1


@pytest.mark.parametrize(
    ("source", "entry", "message", "remedy"),
    [
        ("import no_such_package_1\ndef f(): ...", "go:f", "no_such_package_1", "pip install no_such_package_1"),
        ("import go.missing", "go:f", "go.missing", "--entry"),
        ("1 / 0", "go:f", "ZeroDivisionError", "import go"),
        ("raise SystemExit(3)", "go:f", "SystemExit", "import go"),
        ("def f(:", "go:f", "SyntaxError", "import go"),
        ("", "go:f", "has no `f`", "--entry"),
        ("f = 3", "go:f", "not callable", "--entry"),
        ("", "absent:f", "absent", "--entry"),
    ],
)
def test_errors_say_what_to_do(tmp_path, source, entry, message, remedy):
    fork = write(tmp_path, {"go.py": source})
    with isolated_imports(fork), pytest.raises(RunError) as caught:
        load_function(fork, *entry.split(":"))
    assert message in str(caught.value) and remedy in caught.value.remedy


def test_a_module_that_an_installed_package_lacks_is_not_called_missing(tmp_path):
    fork = write(tmp_path, {"go.py": "import click.no_such_module"})
    with isolated_imports(fork), pytest.raises(RunError) as caught:
        load_function(fork, "go", "f")
    assert "which the installed `click` does not have" in str(caught.value)


def test_all_that_is_not_installed_is_said_at_once(tmp_path):
    """One name a run: install, run, read the next name, through nine packages."""
    files = {
        "go.py": "import no_such_1, os\nfrom parts.inner import f\nimport no_such_2.deep",
        "parts/__init__.py": "from . import beside",
        "parts/beside.py": "from no_such_3 import x",
        "parts/inner.py": "from .. import parts\nwith open(__file__): import no_such_5\ndef f(): import no_such_lazy",
        "other.py": "import no_such_4\nimport go",
        "unrelated.py": "import no_such_unrelated",
        "requirements.txt": "no-such-requirement",
    }
    fork = write(tmp_path, files)
    with isolated_imports(fork), pytest.raises(RunError) as caught:
        load_function(fork, "go", "f", ["go", "other"])
    assert str(caught.value) == "`go` needs `no_such_1`, `no_such_2`, `no_such_3`, `no_such_5`, which are not installed"
    assert caught.value.remedy.startswith("`pip install no_such_1 no_such_2 no_such_3 no_such_4 no_such_5` ")


def test_packages_are_named_as_pip_knows_them():
    assert install_command({"yaml", "cv2", "datasets", "PIL"}) == "pip install datasets opencv-python pillow pyyaml"


@pytest.mark.parametrize(
    "source",
    [
        "import os.path, json",
        "import click.no_such_module",
        "try:\n    import no_such_1\nexcept ImportError:\n    no_such_1 = None",
        "try:\n    import no_such_1\nexcept (KeyError, Exception): pass",
        "try:\n    import no_such_1\nexcept: pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such_1",
        "def f():\n    import no_such_1",
        "from . import no_such_file",
        "def f(:",
    ],
)
def test_an_import_that_may_fail_or_never_runs_is_not_missing(tmp_path, source):
    fork = write(tmp_path, {"pkg/go.py": source})
    with isolated_imports(fork):
        assert missing_packages([fork], ["pkg.go"]) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import no_such_1 as n",
        "class A:\n    from no_such_1.deep import f",
        "try:\n    import no_such_1\nexcept KeyError: pass",
        "try: pass\nfinally:\n    import no_such_1",
        "from ..top import f",
        "from .. import top",
    ],
)
def test_an_import_that_every_run_executes_is_missing(tmp_path, source):
    files = {
        "pkg/__init__.py": "",
        "pkg/sub/__init__.py": "",
        "pkg/top.py": "import no_such_1",
        "pkg/sub/go.py": source,
    }
    fork = write(tmp_path, files)
    with isolated_imports(fork):
        assert missing_packages([fork], ["pkg.sub.go"]) == {"no_such_1"}


def test_what_the_repository_reaches_by_its_own_path_is_not_missing(tmp_path):
    fork = write(
        tmp_path, {"go.py": "import sys\nsys.path.append('far')\nimport near_1", "far/near_1.py": "x = 1\ndef f(): ..."}
    )
    with isolated_imports(fork):
        os.chdir(fork)
        assert load_function(fork, "go", "near_1.f")[0]() is None
