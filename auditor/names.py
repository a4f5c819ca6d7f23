"""Which names a release of Transformers has, without importing it: read from a list that ships with the tool."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

RELEASE = "5.24.0"
DATA = Path(__file__).parent / "data" / f"transformers-{RELEASE}.json.gz"


# Old names of "fast" modules and classes are served on demand, by rules of their own, and stand in no list.


@cache
def _modules() -> dict[str, frozenset[str]]:
    record = json.loads(gzip.decompress(DATA.read_bytes()))
    return {module: frozenset(names.split()) for module, names in record.items()}


def has_module(module: str) -> bool:
    """Whether `import module` works; only for modules of Transformers."""
    return module in _modules() or module.endswith("_fast")


def has_name(module: str, name: str) -> bool:
    """Whether `from module import name` works."""
    if name.endswith("Fast") or module.endswith("_fast"):
        return True
    names = _modules().get(module)
    return names is not None and (name in names or "*" in names or f"{module}.{name}" in _modules())
