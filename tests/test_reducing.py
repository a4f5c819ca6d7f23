"""What is left out of a proof changes nothing about it: the whole text is proven beside the short one."""

from __future__ import annotations

import ast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_rules import edit as edit_of
from toy_rules import finding

from ddaudit.auditor.finding import Edit
from ddaudit.auditor.fixing import reducing
from ddaudit.auditor.fixing.applying import apply_fixes
from ddaudit.auditor.fixing.concrete import Concrete, Unproven
from ddaudit.auditor.fixing.edits import splice
from ddaudit.auditor.fixing.proof import faults
from ddaudit.auditor.fixing.reducing import reduced
from ddaudit.auditor.sources.source import SourceFile

PIECES = (
    "x = old(1)\n", "y = 2; z = old(3)\n", "@wrap\n@old(1)\ndef f(a):\n    '''old( '''\n    return old(a)\n",
    "if a:\n    x = 1\nelif old(b):\n    y = [\n        1,\n        2,\n    ]\nelse:\n    z = old(3)\n",
    "try:\n    import a  # old(\nexcept E:\n    old(1)\nfinally:\n    pass\n", "# a comment\n\n",
    "x = 'é'; \\\ny = 1\n",
    "match a:\n    case [b]:\n        old(b)\n    case _:\n        x = 1\n", "for i in old(x): y = 1\n",
    "s = f'''\n{a}\n'''\n",
)  # fmt: skip


def verdict(before, edits, after):
    try:
        found = faults(Concrete(before), edits, Concrete(after))
    except Unproven:
        return "unproven"
    return [edit in found for edit in edits]


@pytest.fixture(autouse=True)
def every_run(monkeypatch):
    monkeypatch.setattr(reducing, "MIN_RUN", 1)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8), st.data())
def test_the_short_proof_says_what_the_whole_one_says(pieces, data):
    source = SourceFile("a.py", "".join(pieces))
    places = [i for i in range(len(source.text)) if source.text.startswith("old(", i)]
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True, max_size=3)) if places else []
    # The first is right, the others cut a token, open a bracket, end a line, or swallow one.
    texts = data.draw(st.lists(st.sampled_from(["new", "new(", "x or y", "ol", "# ", "a\n"]), min_size=3, max_size=3))
    edits = [Edit(place, place + 3, text) for place, text in zip(sorted(chosen), texts, strict=False)]
    after = splice(source, edits)
    try:
        after.parse()
    except SyntaxError:
        return
    short, kept, short_after = reduced(source, edits, after)
    ast.parse(short.text)
    assert [short.text[edit.start : edit.end] for edit in kept] == ["old"] * len(edits)
    assert verdict(short, kept, short_after) == verdict(source, edits, after)


def test_what_no_edit_is_near_is_left_out():
    text = "def f():\n" + "    x = [1,\n    2]\n" * 50 + "    y = old(1)\n" + "    z = 1\n" * 50
    source = SourceFile("a.py", text)
    place = text.index("old")
    edits = [Edit(place, place + 3, "new")]
    short, kept, after = reduced(source, edits, splice(source, edits))
    assert short.text == "def f():\n    pass\n    y = old(1)\n    pass\n"
    assert after.text == short.text.replace("old", "new")
    assert kept == (Edit(short.text.index("old"), short.text.index("old") + 3, "new"),)


def test_a_statement_that_an_edit_takes_in_is_not_left_out():
    """An opened bracket makes the lines behind it its own: they are no statements of the text after."""
    source = SourceFile("a.py", "x = old(1)\ny = 2\n")
    edits = [Edit(9, 10, ",\n*[(")]
    after = SourceFile("a.py", "x = old(1,\n*[(\ny := 2\n)])\n")
    assert reduced(source, edits, after)[0].text == source.text


@pytest.mark.parametrize(
    "rest",
    ["x = [\n" + "".join(f"    {i},\n" for i in range(20_000)) + "]\n", "y = " + "1 if a else " * 900 + "0\n"],
    ids=["long list", "nested ternaries"],
)
def test_a_hostile_statement_elsewhere_costs_nothing(rest):
    """LibCST took 34 s and 1.1 GB for the list, and overflowed its stack on the ternaries."""
    source = SourceFile("a.py", "x = old(1)\n" + rest)
    applied = apply_fixes(source, [finding(source, (edit_of(source, "old", "new"),))])
    assert applied.source.text == "x = new(1)\n" + rest


def test_too_much_code_near_edits_is_refused():
    source = SourceFile("a.py", "x = old([" + "1, " * 100_000 + "])\n")
    with pytest.raises(Unproven, match="too many to prove"):
        apply_fixes(source, [finding(source, (edit_of(source, "old", "new"),))])
