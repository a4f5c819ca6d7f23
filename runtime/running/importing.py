"""Importing a research repository in isolation: its `model` and `utils` neither meet ours nor stay imported."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from ddaudit.runtime.errors import RunError, describe
from ddaudit.runtime.running.requirements import install_command, missing_packages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

_UNDERNEATH = ("torch", "transformers")
_SHARED = sys.stdlib_module_names | {"ddaudit"}
"""Already imported, these stay: what runs underneath goes on importing them, and a namesake would break it."""


@contextlib.contextmanager
def isolated_imports(folder: Path) -> Iterator[None]:
    """Put `folder` first on `sys.path`, with a fresh view of every module name that it owns.

    Inside, `import model` finds the repository's own `model`, whatever was imported under that name before. On
    leaving, its modules are gone again, the earlier ones are back, and `sys.path` and the working folder are as
    they were. No bytecode is written.
    """
    folder = folder.resolve()
    roots = [root for root in (folder, folder / "src") if root.is_dir()]
    for name in _UNDERNEATH:
        if any((root / f"{name}.py").is_file() or (root / name / "__init__.py").is_file() for root in roots):
            raise RunError(
                f"`{folder.name}` has a module of its own called `{name}`, which hides the installed one",
                f"rename it, and what imports it: this command decodes with the installed `{name}`",
            )
    set_aside = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if _owns(roots, name.partition(".")[0]) and name.partition(".")[0] not in _SHARED
    }
    before = set(sys.modules)
    path, cwd, dont_write_bytecode = list(sys.path), os.getcwd(), sys.dont_write_bytecode
    sys.path[:0] = [str(root) for root in roots]
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        # Modules of installed packages stay: importing torch's or numpy's extensions twice is not safe.
        for name in set(sys.modules) - before:
            if _owns(roots, name.partition(".")[0]) or lies_under(sys.modules[name], folder):
                del sys.modules[name]
        sys.modules.update(set_aside)
        sys.path[:] = path
        sys.dont_write_bytecode = dont_write_bytecode
        os.chdir(cwd)
        for root in roots:
            sys.path_importer_cache.pop(str(root), None)


def load_function(
    folder: Path, module_name: str, qualname: str, modules: Sequence[str] = ()
) -> tuple[Callable[..., Any], type | None]:
    """`function` or `Class.method` of a module of `folder`, and the class. Call inside `isolated_imports`.

    `modules` are all that will be imported: what has to be installed for them is said at once.
    """
    module = _import_module(folder, module_name, modules)
    owner: type | None = None
    found: Any = module
    for part in qualname.split("."):
        owner = found if isinstance(found, type) else None
        try:
            found = getattr(found, part)
        except AttributeError:
            raise RunError(
                f"`{module_name}` has no `{qualname}`",
                "name one that exists; without `--entry` those that are found by reading are run",
            ) from None
    if not callable(found):
        raise RunError(f"`{module_name}:{qualname}` is not callable", "name a function: `--entry module:function`")
    return found, owner


def _import_module(folder: Path, module_name: str, modules: Sequence[str]) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == module_name.partition(".")[0] or _owns([folder], missing):
            raise RunError(
                f"`{module_name}` does not import: no module named `{error.name}` in `{folder.name}`",
                "give the name as the repository imports it from its root: `--entry package.module:function`",
            ) from error
        raise _not_installed(folder, module_name, modules, error) from error
    except (RunError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RunError(
            f"`{module_name}` does not import: {describe(error)}",
            f"it must import on its own: try `python -c 'import {module_name}'` in that folder",
        ) from error


def _not_installed(folder: Path, module_name: str, modules: Sequence[str], error: ModuleNotFoundError) -> RunError:
    roots, name = (folder, folder / "src"), error.name or ""
    top = name.partition(".")[0]
    if name != top and top in sys.modules:
        return RunError(
            f"`{module_name}` needs `{name}`, which the installed `{top}` does not have",
            f"take a release of `{top}` that has it, or another import",
        )
    missing = {top} | missing_packages(roots, [module_name])
    names, are = ", ".join(f"`{each}`" for each in sorted(missing)), "are" if len(missing) > 1 else "is"
    return RunError(
        f"`{module_name}` needs {names}, which {are} not installed",
        f"`{install_command(missing | missing_packages(roots, modules))}` (a package may have another name there)",
    )


def _owns(roots: list[Path], name: str) -> bool:
    """Whether `import name` from one of `roots` finds a module or package of its own.

    A folder without `__init__.py` counts only where nothing installed has that name: an installed package wins
    over a namespace, so a data folder called `datasets` does not hide the package.
    """
    if not name:
        return False
    for root in roots:
        if (root / f"{name}.py").is_file() or (root / name / "__init__.py").is_file():
            return True
        if (root / name).is_dir() and getattr(sys.modules.get(name), "__file__", None) is None:
            return name in sys.modules
    return False


def lies_under(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and str(file).startswith(str(folder) + os.sep)
