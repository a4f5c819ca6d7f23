"""Proving edits on the concrete tree: right ones pass, and each kind of wrong one is refused."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap

import libcst as cst
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.finding import Edit, Import
from ddaudit.auditor.fixing.concrete import Concrete, Unproven
from ddaudit.auditor.fixing.edits import splice
from ddaudit.auditor.fixing.proof import check_imports, faults
from ddaudit.auditor.sources.newer_syntax import newer_syntax
from ddaudit.auditor.sources.source import SourceFile


def reasons(text: str, *edits: Edit) -> list[str]:
    """Why the edits are refused, in order; none where they are proven. Raises Unproven as the proof does."""
    before = Concrete(SourceFile("a.py", text))
    found = faults(before, edits, Concrete(splice(before.source, edits)))
    return [found[edit] for edit in sorted(found)]


def edit(text: str, old: str, new: str) -> Edit:
    """Replace the last occurrence of `old`."""
    start = text.rindex(old)
    return Edit(start, start + len(old), new)


# Right


AWKWARD = [
    "",
    "# only a comment",
    "x = 1\ry = 2\r",
    "x = 1\r\ny = 2\n\n \t\n",
    "\x0cx = 1\n\x0c\ny = 'é\u2028'\n",
    "try:\n    pass\nexcept (A, B) :\n    pass\n",
    "if x: pass\x0c\n",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_no_edit_is_proven(text: str) -> None:
    assert reasons(text) == []


@pytest.mark.parametrize("text", AWKWARD)
def test_a_line_put_before_awkward_text_is_proven(text: str) -> None:
    assert reasons("y = old(1)\n" + text, Edit(4, 10, "new(2)"), Edit(0, 0, "import a\n")) == []


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("x = target.model.embed_tokens(ids)\n", "target.model.embed_tokens", "target.get_input_embeddings()"),
        ("x = -a.b ** 2\n", "a.b", "a.get()"),
        ("async def f():\n    return await a.b\n", "a.b", "a.get()"),
        ("x = not a.b\n", "a.b", "a.get()"),
        ("x = (a)\n", "(a)", "b"),
        ("x = (a)\n", "a", "b + 1"),
        ("x = (a)\n", "a", "(b)"),
        ("x = (1, 2)\n", "(1, 2)", "f(1, 2)"),
        ("x = a\n", "a", "1, 2"),
        ("f(torch_dtype=d)\n", "torch_dtype", "dtype"),
        ("x.crop(1)\n", "crop", "cut"),
        ("s = 'é'; x = old(s)\n", "old(s)", "new(s)"),
        ("x = old(1)\ry = 2\r", "old(1)", "new(1)"),
        ("x = f(\n    # why\n    a,\n)\n", "f(\n    # why\n    a,\n)", "g(\n    # why\n    a)"),
        ("def f():\n    x = g(\n        1)\n", "g(\n        1)", "h(\n        1,\n        2)"),
        # Statements
        ("def f():\n    stop()  # why\n    go()\n", "stop()", "if a:\n        stop()"),
        ("for i in x:\n    i.a = 1\ncut(x)\ny = 1\n", "for i in x:\n    i.a = 1\ncut(x)", "keep(x)"),
        ("a(); b(); c()\n", "a(); b()", "both()"),
        ("# one\nimport a\nx = 1\n", "import a\n", ""),
        ("x = 1\ny = 2\n", "y = 2\n", "y = 2\nz = 3\n"),
        ("try:\n    x()\nexcept (A, B) :\n    pass\ny()\n", "y()", "z()"),
        # A comment that suppresses
        ("x = 1  # ddaudit: ignore[DDA101] why\n", "  # ddaudit: ignore[DDA101] why", ""),
        ("x = 1  # a  # noqa: DDA101, E501\n", "# noqa: DDA101, E501", "# noqa: E501"),
        ("f(\n    # noqa: DDA101\n    a,\n)\n", "    # noqa: DDA101\n", ""),
    ],
)
def test_whole_nodes_for_whole_nodes_are_proven(text: str, old: str, new: str) -> None:
    assert reasons(text, edit(text, old, new)) == []


def test_several_edits_are_proven_together() -> None:
    text = "a.b(c.d)\nx = e.f\n"
    assert reasons(text, edit(text, "a.b", "p"), edit(text, "c.d", "q(r)"), edit(text, "e.f", "s.t.u")) == []


# Wrong


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        # A part of a token
        ("total = 1\n", "tot", "fin"),
        ("x.crop_all(1)\n", "crop", "keep"),
        ("x = 'old'\n", "old", "new"),
        ("x = 10\n", "1", "2"),
        ("x = 1 if a else 2\n", "if a", "if b"),
        # Another precedence
        ("x = a.b * 2\n", "a.b", "a + b"),
        ("x = -a.b ** 2\n", "a.b", "a.b + 1"),
        ("x = not a.b\n", "a.b", "a or b"),
        ("async def f():\n    return await a.b\n", "a.b", "a if b else c"),
        ("x = a.b.c\n", "a.b", "a or b"),
        ("x = f(a)[0]\n", "f(a)", "-a"),
        ("x = a == b\n", "b", "b == c"),
        ("x = (a).b\n", "(a)", "a + b"),
        # A comment gone, swallowing or swallowed
        ("f(\n    # why\n)\n", "f(\n    # why\n)", "g()"),
        ("a()\n# why\nb()\n", "a()\n# why\nb()", "c()"),
        ("x = 1; y = 2  # why\n", "; y = 2", "  # two"),
        ("y = 2  # why\n", "y = 2", "y = 3  # two"),
        ("y = 2  # why\nz = 3\n", "why", "why; x = 1"),
        ("y = 2  # why\n", "  # why", ""),
        ("y = 2  # why  # noqa: DDA101\n", "  # why  # noqa: DDA101", ""),
        ("y = 2  # noqa: DDA101\n", "# noqa: DDA101", "# noqa"),
        ("y = 2  # noqa: DDA101\nz = 3\n", "# noqa: DDA101", "; x = 1"),
        ("y = '# noqa: DDA101'\n", "# noqa: DDA101", ""),
        # Half a statement
        ("x = 1\ny = 2\n", "= 1\ny", "= 3\ny"),
        ("if a:\n    b()\n", "if a:", "while a:"),
        ("for i in x:\n    f()\nelse:\n    g()\n", "for i in x:\n    f()", "h()\nif x:\n    f()"),
        ("return_ = a\n", "= a", "= b"),
        # Parentheses of a call, and what makes an argument or an index
        ("f(a)(b)\n", "f(a", "g(a"),
        ("f(a)(b)\n", "(a)", "[a]"),
        ("f(a)\n", "a", "a, b"),
        ("f(a)\n", "a", "*a"),
        ("f(a)\n", "a", "k=a"),
        ("f(k=a)\n", "k=a", "**a"),
        ("x[i]\n", "i", "i, j"),
        ("x[i]\n", "i", "i:j"),
        ("f(a, b)\n", "a, b", "b, a"),
        # Inside an f-string
        ("x = f'{old} {y}'\n", "old", "new"),
        ("x = f'{y:{old}}'\n", "old", "new"),
        # A pattern is no expression
        ("match x:\n    case a.b:\n        pass\n", "a.b", "a.get()"),
        # An expression is no statement
        ("x = a\n", "a", "b; c"),
        ("f(a)\n", "a", ""),
    ],
)
def test_anything_else_is_refused(text: str, old: str, new: str) -> None:
    wanted = edit(text, old, new)
    try:
        found = reasons(text, wanted)
    except (Unproven, SyntaxError):
        # The text after does not even parse.
        with pytest.raises(SyntaxError):
            ast.parse(splice(SourceFile("a.py", text), [wanted]).text)
    else:
        assert len(found) == 1


def test_what_leaves_its_block_is_refused() -> None:
    """Whole statements on both sides, and the rest is the same text: only the place in the tree is another."""
    text = "if a:\n    x = 1\n    y = 2\n"
    with pytest.raises(Unproven, match="beside the edits"):
        reasons(text, edit(text, "    y = 2\n", "y = 3\n"))


def test_one_wrong_edit_is_named_among_right_ones() -> None:
    text = "a.b\nc.d * 2\ne.f\n"
    wrong = edit(text, "c.d", "c + d")
    assert len(reasons(text, edit(text, "a.b", "x"), wrong, edit(text, "e.f", "y"))) == 1


def test_a_dropped_comment_is_named() -> None:
    text = "f(\n    # why\n)\n"
    assert reasons(text, edit(text, text.rstrip(), "g()")) == ["it would drop the comment `# why`"]


@pytest.mark.parametrize(
    "text",
    [
        "x" + ".a" * (1500 if sys.version_info < (3, 12) else 3000) + "\n",
        "x = " + "-" * 1500 + "1\n",
    ],
)
def test_what_is_nested_deeply_is_refused_before_it_overflows_the_stack(text: str) -> None:
    with pytest.raises(Unproven, match="nested too deeply"):
        Concrete(SourceFile("a.py", text))


def test_an_edit_on_a_line_that_libcst_does_not_restore_is_refused() -> None:
    """Columns behind the lost blank would be one off."""
    text = "try: pass\nexcept (A, B) : old(1)\n"
    assert len(reasons(text, edit(text, "old(1)", "new(1)"))) == 1


# Imports

MAY_ADD = {Import("a", "b"), Import("c", "d")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import x\ny = 1\n", "import x\ny = 1\n"),
        ("import x\ny = 1\n", "import x\nfrom a import b\ny = 1\n"),
        ("# Licence\ny = 1\n", "# Licence\nfrom a import b\nfrom c import d\n\ny = 1\n"),
        ("from a import z\n\n\ny = 1\n", "from a import b, z\n\n\ny = 1\n"),
        ("from a import (\n    x,  # why\n)\n", "from a import (\n    x,  # why\n    b,\n)\n"),
        ("from x import y, z\nw = 1\n", "from x import z\nw = 1\n"),
        ("import x; y = 1\n", "import x; y = 1\nfrom a import b\n"),
        ("import x\ny = 1\n", "y = 1\n"),
    ],
)
def test_import_lines_alone_may_differ(before: str, after: str) -> None:
    check_imports(Concrete(SourceFile("a.py", before)), Concrete(SourceFile("a.py", after)), MAY_ADD)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("import x\ny = 1\n", "import x\nfrom a import z\ny = 1\n", "would import z"),
        ("y = 1\n", "from a import b as e\ny = 1\n", "would import b"),
        ("y = 1\n", "from .a import b\ny = 1\n", "would import b"),
        ("y = 1\n", "import a\ny = 1\n", "would import a"),
        ("import x\ny = 1\n", "import x\n", "beside"),
        ("if y:\n    import x\n    z()\n", "if y:\n    import x\nz()\n", "beside"),
        ("import x  # why\n", "from a import b\n", "comment `# why`"),
    ],
)
def test_nothing_else_may(before: str, after: str, why: str) -> None:
    with pytest.raises(Unproven, match=why):
        check_imports(Concrete(SourceFile("a.py", before)), Concrete(SourceFile("a.py", after)), MAY_ADD)


# Both ways agree

NAMES = st.sampled_from(["a", "b.c", "d(e)", "f[g]", "1", "'s'", "f'{h} {i!r:>{j}}'"])


FORMS = "{0} + {1}|-{0}|not {0}|{0} ** {1}|{0} if {1} else {2}|{0} < {1}|{0} or {1} and {2}|lambda: {0}|({0})|{0}.w"
FORMS += "|f({0}, k={1})|[{0}, *{1}]|{{{0}: {1}}}|x[{0}:{1}, {2}]|[{0} for y in {1} if {2}]|f({0} for y in {1})"
FORMS += "|({0}, {1})|({0} := {1})|({0}).z"


@st.composite
def compound(draw: st.DrawFn, parts: st.SearchStrategy[str]) -> str:
    return draw(st.sampled_from(FORMS.split("|"))).format(*(draw(parts) for _ in range(3)))


EXPRESSIONS = st.recursive(NAMES, compound, max_leaves=8)


STATEMENTS = ["x = {}", "{}; {}", "assert {}, {}", "if {}:\n\tx.y = {}", "for i in {}:\n    ({},\n     1)  # one"]
STATEMENTS += ["def f(p={}):\n    return {}  # é", "with {} as q: pass", "async def g():\n    return await {}"]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Small programs, not all of which parse."""
    lines = draw(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=3))
    return "".join(line.format(draw(EXPRESSIONS), draw(EXPRESSIONS)) + "\n" for line in lines)


class _Put(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)


@given(programs(), EXPRESSIONS, st.data())
def test_the_proof_agrees_with_both_trees(text: str, replacement: str, data: st.DataObject) -> None:
    """What is proven is what replacing the node gives, in Python's tree and in LibCST's; the rest is refused."""
    source = SourceFile("a.py", text)
    try:
        tree, new = source.parse(), ast.parse(replacement, mode="eval").body
    except SyntaxError:
        return
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for string in strings for part in ast.walk(string) if part is not string}
    node = data.draw(st.sampled_from([n for n in ast.walk(tree) if isinstance(n, ast.expr) and id(n) not in inside]))
    start = source.offset(node.lineno, node.col_offset)
    end = source.offset(node.end_lineno or 0, node.end_col_offset or 0)
    wanted = Edit(start, end, replacement)
    before, after = Concrete(source), splice(source, [wanted])
    try:
        is_proven = not faults(before, [wanted], Concrete(after))
    except (SyntaxError, Unproven):
        # No assignment to a call, for one.
        return
    # A name, an attribute and a call stand wherever another does, so not everything is refused.
    plain = (ast.Name, ast.Attribute, ast.Call)
    assert is_proven or not (isinstance(node, plain) and isinstance(new, plain))
    if is_proven:
        assert _shape(after.parse()) == _shape(_Put(node, new).visit(tree))
        (old,) = before.nodes(start, end)["expression"]
        put = cst.parse_expression(replacement)
        left = [part for part in old.lpar if before.spans[part][0] < start]
        right = [part for part in old.rpar if before.spans[part][0] >= end]
        put = put.with_changes(lpar=[*left, *put.lpar], rpar=[*put.rpar, *right])
        assert before.module.deep_replace(old, put).code == after.text


class _Flat(ast.NodeTransformer):
    """`(a or b) or c` as the parser gives `a or b or c`, which means the same."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        first = node.values[0]
        if isinstance(first, ast.BoolOp) and type(first.op) is type(node.op):
            node.values[:1] = first.values
        return node


def _shape(tree: ast.AST) -> str:
    """A tree but for the contexts, in which a replacement parsed alone differs."""
    return re.sub(r"(, )?ctx=(Load|Store|Del)\(\)", "", ast.dump(_Flat().visit(tree)))


# Syntax that is newer than this Python


def test_newer_syntax_is_told_from_what_is_no_python() -> None:
    texts = {"newer.py": "try: pass\nexcept* A: print(t'{x}')\n", "broken.py": "def f(:\n", "old.py": "print 'x'\n"}
    files = [SourceFile(path, text) for path, text in texts.items()]
    assert newer_syntax(files) == {"newer.py"}
    assert newer_syntax([]) == set()


def test_a_file_that_overflows_the_parser_loses_no_other() -> None:
    deep, newer = SourceFile("deep.py", "(" * 100_000), SourceFile("newer.py", "x = t'{x}'\n")
    assert newer_syntax([newer, deep, newer]) == {"newer.py"}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python has template strings")
def test_a_scan_says_so_and_a_fix_leaves_the_file() -> None:
    sources = {"a.py": SourceFile("a.py", "x = t'{y}'\n"), "b.py": SourceFile("b.py", "x = (\n")}
    details = {item.path: item.detail for item in scan_sources(sources).skipped}
    assert "LibCST parses it: its syntax is newer than Python" in details["a.py"]
    assert "LibCST" not in details["b.py"]


def test_nothing_of_the_scanned_folder_is_imported(tmp_path) -> None:
    """A repository may hold a `json.py`, and a scan executes nothing."""
    for name in ("json", "libcst"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')\n")
    code = textwrap.dedent("""
        from ddaudit.auditor.sources.newer_syntax import newer_syntax
        from ddaudit.auditor.sources.source import SourceFile
        import os
        os.chdir({!r})
        print(newer_syntax([SourceFile("a.py", "x = t'{{y}}'")]))
    """).format(str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "{'a.py'}\n", done.stderr
