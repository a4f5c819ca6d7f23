"""Proves what edits did to a text on LibCST's concrete trees: the slow, obvious way beside the clever one.

Rules take the places of their edits from Python's `ast`, and edits are made to the text. Here the text before and the
text after are parsed again, down to the last space. What an edit replaces must be whole nodes of the first tree, what
it puts there whole nodes of the second, and with these taken out both trees must be the same. So the second tree is
the first with exactly those nodes exchanged, and its code is the text after: no edit cuts through a token, binds
tighter or looser than what it replaces, reaches into an f-string or swallows a comment.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

import libcst as cst

from ddaudit.auditor.fixing.concrete import Concrete, Node, Span, Unproven
from ddaudit.auditor.suppressions import PART

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ddaudit.auditor.finding import Edit, Import


def faults(before: Concrete, edits: Collection[Edit], after: Concrete) -> dict[Edit, str]:
    """The edits that cannot be proven, each with the reason; empty where all are.

    `edits` made `after` from `before`. Raises Unproven where the trees differ beside the edits.
    """
    found: dict[Edit, str] = {}
    rewritten: Counter[str] = Counter()
    taken_before: dict[Node, str] = {}
    taken_after: dict[Node, str] = {}
    shift = 0
    for edit in sorted(edits):
        old = _stripped(before.source.text, edit.start, edit.end)
        new = _stripped(after.source.text, edit.start + shift, edit.start + shift + len(edit.replacement))
        shift += len(edit.replacement) - (edit.end - edit.start)
        if (comment := _suppression(before, old)) and _is_comment(after, new):
            rewritten[comment] += 1
        elif lost := _comments(before, old) - _comments(after, new):
            found[edit] = f"it would drop the comment `{next(iter(lost))}`"
        elif (pair := _exchanged(before, old, after, new)) is None:
            found[edit] = "LibCST finds no whole expression or statements that the edit would replace by such"
        else:
            for nodes, taken in zip(pair, (taken_before, taken_after), strict=True):
                # Only what has a counterpart leaves a mark: elsewhere there is nothing.
                taken |= dict.fromkeys(nodes, "") | ({nodes[0]: "edit"} if all(pair) else {})
    if not found:
        _compare(before, taken_before, after, taken_after, rewritten)
    return found


def check_imports(before: Concrete, after: Concrete, may_add: Collection[Import]) -> None:
    """Raises Unproven where anything but import statements differs, or more is imported than `may_add`."""
    _compare(before, _imports(before), after, _imports(after))
    allowed = {(item.module, item.name, None) for item in may_add}
    if added := set(_imported(after) - _imported(before)) - allowed:
        raise Unproven(f"it would import {', '.join(sorted(name for _, name, _ in added))}")


def _exchanged(before: Concrete, old: Span, after: Concrete, new: Span) -> tuple[Sequence[Node], Sequence[Node]] | None:
    """The nodes of an edit on either side: of one kind, or statements on one side and nothing on the other."""
    ours, theirs = before.nodes(*old), after.nodes(*new)
    for kind in ("expression", "parts of a line", "lines"):
        if kind in ours and kind in theirs:
            return ours[kind], theirs[kind]
    if old[0] == old[1]:
        return next((((), theirs[kind]) for kind in ("lines", "parts of a line") if kind in theirs), None)
    if new[0] == new[1]:
        return next(((ours[kind], ()) for kind in ("lines", "parts of a line") if kind in ours), None)
    return None


def _compare(
    before: Concrete,
    taken_before: Mapping[Node, str],
    after: Concrete,
    taken_after: Mapping[Node, str],
    rewritten: Counter[str] | None = None,
) -> None:
    if list(before.frame(taken_before)) != list(after.frame(taken_after)):
        raise Unproven("code beside the edits would mean something else")
    kept = Counter(text for _, text in before.comments) - (rewritten or Counter())
    if lost := kept - Counter(text for _, text in after.comments):
        raise Unproven(f"the comment `{next(iter(lost))}` would be lost")


def _suppression(file: Concrete, span: Span) -> str:
    """The comment of which the stretch is a suppression: no others may be rewritten."""
    at = bisect_left(file.comments, (span[0] + 1, "")) - 1
    offset, text = file.comments[at] if at >= 0 else (-1, "")
    is_part = offset >= 0 and offset <= span[0] < span[1] <= offset + len(text)
    return text if is_part and PART.fullmatch(file.source.text[slice(*span)]) else ""


def _is_comment(file: Concrete, span: Span) -> bool:
    """Whether the stretch is empty or a suppression."""
    return span[0] == span[1] or bool(_suppression(file, span))


def _comments(file: Concrete, span: Span) -> Counter[str]:
    """Comments within a stretch of text."""
    first, last = (bisect_left(file.comments, (offset, "")) for offset in span)
    return Counter(text for _, text in file.comments[first:last])


def _stripped(text: str, start: int, end: int) -> Span:
    """A stretch of text without the blanks and newlines at its ends."""
    held = text[start:end]
    start += len(held) - len(held.lstrip())
    return start, max(start, start + len(held.strip()))


def _imports(file: Concrete) -> dict[Node, str]:
    """Import statements, and the lines that hold nothing else."""
    taken = {node: "" for node in file.children if isinstance(node, cst.Import | cst.ImportFrom)}
    lines = (node for node in file.children if isinstance(node, cst.SimpleStatementLine))
    return taken | {line: "" for line in lines if all(part in taken for part in line.body)}


def _imported(file: Concrete) -> Counter[tuple[str, str, str | None]]:
    """Module, empty for `import a`, name and alias of everything imported."""
    imported: Counter[tuple[str, str, str | None]] = Counter()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            imported.update((module, alias.name, alias.asname) for alias in node.names)
    return imported
