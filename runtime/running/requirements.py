"""Packages that a repository's modules import and that are not installed: found by reading, all at once."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

# Where pip's name is another than the module's; `-`, `_` and capitals are the same to pip.
DISTRIBUTIONS = {
    "Crypto": "pycryptodome",
    "Levenshtein": "python-Levenshtein",
    "PIL": "pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fastchat": "fschat",
    "fitz": "pymupdf",
    "fla": "flash-linear-attention",
    "git": "gitpython",
    "hydra": "hydra-core",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "ot": "pot",
    "pkg_resources": "setuptools",
    "pynvml": "nvidia-ml-py",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "speech_recognition": "SpeechRecognition",
    "umap": "umap-learn",
    "wx": "wxPython",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def missing_packages(roots: Sequence[Path], modules: Iterable[str]) -> set[str]:
    """Top-level names that importing `modules` needs and that nothing here has, through the files below `roots`.

    Only imports that every run executes count: none in a function, under an `if`, or whose failure is caught.
    Call inside `isolated_imports`.
    """
    pending, seen, missing = list(modules), set[str](), set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        package, _, last = name.rpartition(".")
        if package:
            pending.append(package)
        elif not _is_found(name):
            missing.add(name)
        for root in roots:
            folder = root.joinpath(*package.split("."), last) if package else root / last
            for file, inside in ((folder / "__init__.py", name), (folder.parent / f"{last}.py", package)):
                if file.is_file():
                    pending += _imported(file, inside)
    return missing


def install_command(names: Iterable[str]) -> str:
    return f"pip install {' '.join(sorted({DISTRIBUTIONS.get(name, name) for name in names}, key=str.lower))}"


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it is imported, and was made by hand
        return True


def _imported(file: Path, package: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return list(_executed(tree.body, package))


def _executed(body: Sequence[ast.stmt], package: str) -> Iterator[str]:
    """Full names that these statements import, in a module of `package`."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - statement.level + 1] if statement.level else []
            name = ".".join(filter(None, (*above, statement.module)))
            if name:
                yield name
                # What is taken from a package may be a module of it.
                yield from (f"{name}.{alias.name}" for alias in statement.names if alias.name != "*")
        elif isinstance(statement, ast.Try):
            if not any(_catches(handler) for handler in statement.handlers):
                yield from _executed([*statement.body, *statement.orelse], package)
            yield from _executed(statement.finalbody, package)
        elif isinstance(statement, (ast.With, ast.ClassDef)):
            yield from _executed(statement.body, package)


def _catches(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in _CAUGHT) for kind in kinds)
