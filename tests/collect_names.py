"""Writes the lists that `ddaudit.auditor.facts.names` reads: names and class members of the installed Transformers.

Run it once for each release: `python tests/collect_names.py`. With an older release installed, `--save FILE` keeps its
lists; `--lost 5.0=OLD.json 5.24=LESS_OLD.json` then writes which of those names are gone from which release on: each
file has the lists of the release known before it.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

from ddaudit.auditor.facts.names import DATA, LOST, MEMBERS

MODEL_PARTS = re.compile(r"(Attention\w*|DecoderLayer|Block|RotaryEmbedding)$")
OTHER_CLASSES = frozenset({"GenerationMixin", "PreTrainedModel", "Trainer"})
ROTARY = re.compile(r"^apply_\w*rotary\w*$")


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
                package = importlib.import_module(module)
                names = set(dir(package))
                # What a package serves on demand stands in it as text only.
                names |= {text for text in _texts(path) if "__getattr__" in vars(package) and hasattr(package, text)}
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
        if name.islower() and module not in found and _leads_somewhere(module):
            found[module] = "*"
    return found


def _texts(path: Path) -> set[str]:
    """Strings in a file that could be names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value.isidentifier()}


def _leads_somewhere(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # A stand-in without a specification, as 5.17 has them for old module names.
        return True


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


def collect_members(pattern: str = "**/*.py") -> dict[str, str]:
    """What instances of the classes that research code patches have, and the parameters of rotary functions."""
    import torch
    import transformers

    assert transformers.__file__ is not None
    root = Path(transformers.__file__).parent
    classes: dict[str, tuple[list[str], set[str]]] = {}
    found = {"torch.nn.Module": " ".join(sorted(name for name in dir(torch.nn.Module()) if name[:2] != "__"))}
    signature = inspect.signature(transformers.GenerationMixin.generate)
    generating = {*transformers.GenerationConfig().to_dict(), *signature.parameters}
    for path in sorted(root.glob(pattern)):
        module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        origins = {
            alias.asname or alias.name: f"{_absolute(module, node)}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            # `generate` hands on what any model takes.
            if isinstance(node, ast.FunctionDef) and node.name in ("forward", "prepare_inputs_for_generation"):
                generating.update(arg.arg for arg in (*node.args.args, *node.args.kwonlyargs))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[f"{module}.{node.name}"] = ([origins.get(b, f"{module}.{b}") for b in bases], _members(node))
            elif isinstance(node, ast.FunctionDef) and ROTARY.match(node.name):
                found[f"{module}.{node.name}"] = " ".join(arg.arg for arg in node.args.args)
    for name in classes:
        last = name.rpartition(".")[2]
        if last in OTHER_CLASSES or (MODEL_PARTS.search(last) and ".modeling_" in name):
            pending, members = [name], set[str]()
            while pending:
                bases, own = classes.get(pending.pop(), ([], set()))
                members |= own
                pending += bases
            found[name] = " ".join(sorted(members))
    found["GenerationMixin.generate"] = " ".join(sorted(generating))
    return found


def _absolute(module: str, node: ast.ImportFrom) -> str:
    above = module.split(".")[: -node.level] if node.level else []
    return ".".join([*above, node.module or ""])


def _members(node: ast.ClassDef) -> set[str]:
    members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for item in ast.walk(node):
        match item:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                members.add(attr)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]) if item in node.body:
                members.add(name)
    return {name for name in members if not name.startswith("__")}


def gone(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """What a release lacks of an earlier one: names by their owner, `*` for an owner that is gone as a whole.

    Old names of "fast" modules are served on demand and left out.
    """
    found: dict[str, str] = {}
    for owner, names in before.items():
        if owner not in after:
            found[owner] = "*"
        elif "*" not in after[owner].split():
            lost = set(names.split()) - set(after[owner].split())
            found[owner] = " ".join(sorted(name for name in lost if not name.lower().endswith("fast")))
    return {owner: names for owner, names in found.items() if names and not owner.endswith("_fast")}


def lost(arguments: list[str]) -> dict[str, dict[str, str]]:
    """By release, oldest first, what it lacks of the one before; the last is compared with the lists in the tool."""
    steps = [argument.partition("=")[::2] for argument in arguments]
    lists = [json.loads(Path(path).read_text(encoding="utf-8")) for _, path in steps]
    lists.append({"names": _read(DATA), "members": _read(MEMBERS)})
    return {
        release: gone(before["names"], after["names"]) | gone(before["members"], after["members"])
        for (release, _), before, after in zip(steps, lists[:-1], lists[1:], strict=True)
    }


def _read(path: Path) -> dict[str, str]:
    record: dict[str, str] = json.loads(gzip.decompress(path.read_bytes()))
    return record


def write(path: Path, record: object) -> None:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--save", file]:
            Path(file).write_text(json.dumps({"names": collect(), "members": collect_members()}), encoding="utf-8")
        case ["--lost", *older]:
            write(LOST, lost(older))
        case _:
            write(DATA, collect())
            write(MEMBERS, collect_members())
