"""Writes the list of names that `ddaudit.auditor.names` reads, from the installed Transformers.

Run it once for each release: `python tests/collect_names.py`.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
from pathlib import Path

from ddaudit.auditor.names import DATA


def collect(pattern: str = "**/*.py") -> dict[str, str]:
    """Each module's importable names, in the installed Transformers' files of this pattern. Imports its packages."""
    import transformers

    assert transformers.__file__ is not None
    root = Path(transformers.__file__).parent
    found: dict[str, str] = {}
    for path in sorted(root.glob(pattern)):
        parts = ("transformers", *path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            module = ".".join(parts[:-1])
            try:
                names = set(dir(importlib.import_module(module)))
            except ImportError:
                names = {"*"}
        else:
            module = ".".join(parts)
            names = _bound(ast.parse(path.read_text(encoding="utf-8")))
        found[module] = " ".join(sorted(names))
    for module, names in found.items():
        # Submodules show up as names once something has imported them.
        found[module] = " ".join(n for n in names.split() if f"{module}.{n}" not in found and not n.startswith("__"))
    for name in found.get("transformers", "").split():
        # Old module names that still lead somewhere.
        module = f"transformers.{name}"
        if name.islower() and module not in found and importlib.util.find_spec(module) is not None:
            found[module] = "*"
    return found


def _bound(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top, `*` where it cannot be said."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif not isinstance(node, ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return names


def write() -> None:
    """Write the list anew."""
    text = json.dumps(collect(), sort_keys=True, separators=(",", ":"))
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    write()
