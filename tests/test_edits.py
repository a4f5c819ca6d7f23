"""Applying fixes: whole or not at all, comments kept, every other byte as it was."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_rules import MAKE_CACHE, Rename, edit, finding, scanner

from ddaudit.auditor.finding import Applicability, Edit
from ddaudit.auditor.fixing.applying import apply_fixes
from ddaudit.auditor.fixing.settling import settle
from ddaudit.auditor.sources.source import SourceFile, decode


def source(text: str, path: str = "a.py") -> SourceFile:
    return SourceFile(path, text)


def settled(text: str, *rules, **options):
    return settle({"a.py": source(text)}, scanner(*rules), **options)


# Nothing to do


def test_without_findings_nothing_changes() -> None:
    result = settled("x = other(1)\r\n", Rename("old", "new"))
    assert result.sources["a.py"].text == "x = other(1)\r\n"
    assert (result.fixed, result.left, result.errors) == ((), (), {})


def test_a_finding_without_a_fix_is_left_with_its_reason() -> None:
    result = settle({"a.py": source("x = 1\n")}, lambda sources: [finding(sources["a.py"], (), reason="by hand")])
    assert [item.reason for item in result.left] == ["by hand"]
    assert result.sources["a.py"].text == "x = 1\n"


def test_an_unsafe_fix_is_applied_only_on_request() -> None:
    rule = Rename("old", "new", applicability=Applicability.UNSAFE)
    kept = settled("old(1)\n", rule)
    assert kept.sources["a.py"].text == "old(1)\n"
    assert [item.reason for item in kept.left] == ["its fix is unsafe: a toy"]
    assert settled("old(1)\n", rule, unsafe=True).sources["a.py"].text == "new(1)\n"


def test_a_locked_file_is_left_for_the_reason_given_and_the_others_are_fixed() -> None:
    sources = {"a.py": source("old(1)\n"), "b.py": source("old(1)\n", "b.py")}
    result = settle(sources, scanner(Rename("old", "new")), locked={"a.py": "reached through a link"})
    assert {path: item.text for path, item in result.sources.items()} == {"a.py": "old(1)\n", "b.py": "new(1)\n"}
    assert [item.reason for item in result.left] == ["reached through a link"]
    assert result.errors == {}


# Several fixes


def test_a_fix_of_several_edits_is_refused_whole_where_one_drops_a_comment() -> None:
    text = "first()\nsecond(\n    # why\n)\n"
    file = source(text)
    both = finding(file, (edit(file, "first()", "one()"), edit(file, "second(\n    # why\n)", "two()")))
    applied = apply_fixes(file, [both])
    assert applied.source.text == text
    assert [item.reason for item in applied.refused] == ["it would drop the comment `# why`"]


def test_a_comment_inside_is_no_obstacle_where_the_replacement_keeps_it() -> None:
    assert (
        settled("old(\n    # why\n    1)\n", Rename("old", "new")).sources["a.py"].text == "new(\n    # why\n    1)\n"
    )


def test_text_put_behind_a_comment_would_become_part_of_it() -> None:
    file = source("x = 1  # why\ny = 2\n")
    behind = file.text.index("\n")
    applied = apply_fixes(file, [finding(file, (Edit(behind, behind, "; z = 3"),))])
    assert applied.source.text == file.text
    assert len(applied.refused) == 1


def test_a_replacement_that_comments_out_what_follows_is_refused() -> None:
    """`x = 1  # old` in front of `# why` swallows it: the comment is another one afterwards."""
    file = source("x = 1; y = 2  # why\n")
    applied = apply_fixes(file, [finding(file, (edit(file, "; y = 2", "  # two"),))])
    assert applied.source.text == file.text
    assert len(applied.refused) == 1


def test_a_hash_in_a_string_is_not_a_comment() -> None:
    assert settled("x = old('# no')\n", Rename("old", "new")).sources["a.py"].text == "x = new('# no')\n"


def test_matches_inside_a_match_are_all_fixed() -> None:
    """The outer replacement is made from the original text: applied with the inner one, one of them is lost."""
    result = settled("x = old(old(old(1)))\n", Rename("old", "new"))
    assert result.sources["a.py"].text == "x = new(new(new(1)))\n"
    assert [(item.finding.span.column, item.how) for item in result.fixed] == [
        (5, "edited"),
        (9, "edited"),
        (13, "edited"),
    ]


def test_of_two_that_overlap_the_outer_goes_first_and_the_other_is_deferred() -> None:
    file = source("loop(cut(x))\n")
    outer = finding(file, (edit(file, "loop(cut(x))", "keep(x)"),), code="TOY2")
    inner = finding(file, (edit(file, "cut(x)", "trim(x)"),))
    applied = apply_fixes(file, [inner, outer])
    assert applied.source.text == "keep(x)\n"
    assert (applied.findings, applied.deferred) == ((outer,), (inner,))


def test_a_finding_that_another_fix_takes_with_it_follows() -> None:
    def rule(file: SourceFile):
        if "loop" in file.text:
            yield finding(file, (edit(file, "loop(cut(x))", "keep(x)"),), code="TOY2")
        if "cut" in file.text:
            yield finding(file, (edit(file, "cut(x)", "trim(x)"),))

    result = settled("loop(cut(x))\n", rule)
    assert [(item.finding.code, item.how) for item in result.fixed] == [("TOY2", "edited"), ("TOY1", "follows")]
    assert result.left == ()


def test_findings_that_share_one_fix_are_all_fixed_by_making_it_once() -> None:
    file = source("keys(); values()\n")
    shared = (edit(file, "keys(); values()", "both()"),)
    findings = [finding(file, shared, code="TOY1"), finding(file, shared, code="TOY2")]
    applied = apply_fixes(file, findings)
    assert applied.source.text == "both()\n"
    assert len(applied.findings) == 2


def test_two_insertions_at_one_place_are_not_made_in_an_order_of_chance() -> None:
    file = source("x = 1\n")
    applied = apply_fixes(file, [finding(file, (Edit(0, 0, f"{name} = 0\n"),)) for name in "ab"])
    assert len(applied.findings) == len(applied.deferred) == 1


def test_two_statements_on_one_line_keep_their_places() -> None:
    result = settled("a = old(1); b = old(2)\n", Rename("old", "longer_name"))
    assert result.sources["a.py"].text == "a = longer_name(1); b = longer_name(2)\n"
    assert [item.finding.span.column for item in result.fixed] == [5, 17]


def test_lines_of_what_a_later_pass_fixes_are_those_of_the_source() -> None:
    """Stale positions: the first fix adds lines, the second would be reported below where it was."""

    def add_lines(file: SourceFile):
        if "first()" in file.text:
            yield finding(file, (edit(file, "first()", "one()\ntwo()\nthree()"),))
        elif "second()" in file.text:
            yield finding(file, (edit(file, "second()", "four()"),), code="TOY2")

    result = settled("first()\nsecond()\n", add_lines)
    assert result.sources["a.py"].text == "one()\ntwo()\nthree()\nfour()\n"
    assert [(item.finding.code, item.finding.span.line) for item in result.fixed] == [("TOY1", 1), ("TOY2", 2)]


def test_edits_that_overlap_within_one_fix_are_refused() -> None:
    file = source("abc()\n")
    applied = apply_fixes(file, [finding(file, (Edit(0, 3, "x"), Edit(2, 5, "y")))])
    assert applied.source.text == file.text
    assert [item.reason for item in applied.refused] == ["the edits of its fix overlap"]


# Faults of rules


def test_rules_that_undo_each_other_leave_the_file_and_are_named() -> None:
    sources = {"a.py": source("old(1)\nfine(2)\n"), "b.py": source("fine(2)\n", "b.py")}
    fight = [Rename("old", "new", code="TOY1"), Rename("new", "old", code="TOY2"), Rename("fine", "good", code="TOY3")]
    result = settle(sources, scanner(*fight))
    assert result.sources["a.py"].text == "old(1)\nfine(2)\n"
    assert result.errors == {"a.py": "not settled after 10 passes of the fixes of TOY1, TOY2"}
    assert result.sources["b.py"].text == "good(2)\n"
    assert {item.finding.code for item in result.left} == {"TOY1", "TOY3"}
    assert all("left as it was" in item.reason for item in result.left)


def test_a_rule_that_matches_its_own_output_leaves_the_file() -> None:
    def wrap(file: SourceFile):
        yield finding(file, (edit(file, "hidden", "pick(hidden)"),))

    result = settled("x = hidden\n", wrap)
    assert result.sources["a.py"].text == "x = hidden\n"
    assert "TOY1" in result.errors["a.py"]


def test_a_fix_that_changes_nothing_is_an_error_of_the_tool() -> None:
    result = settled("old(1)\n", Rename("old", "old"))
    assert result.errors == {"a.py": "the fix of TOY1 changes nothing"}


def test_what_no_longer_compiles_keeps_its_bytes() -> None:
    """`return` at the top level parses, as a whole statement for another: only compiling shows it."""
    result = settled(
        "old(1)\n", lambda file: [finding(file, (edit(file, "old(1)", "return 1"),))] if "ret" not in file.text else []
    )
    assert result.sources["a.py"].text == "old(1)\n"
    assert "does not compile" in result.errors["a.py"]
    assert len(result.left) == 1


def test_what_no_longer_parses_keeps_its_bytes() -> None:
    result = settled("x = old\n", lambda file: [finding(file, (edit(file, "old", "("),))])
    assert result.sources["a.py"].text == "x = old\n"
    assert "does not parse" in result.errors["a.py"]


def test_an_edit_inside_an_f_string_is_refused() -> None:
    """Its quotes may clash, and parsers before Python 3.12 misplace what stands there."""
    result = settled("x = f'{old}'\n", lambda file: [finding(file, (edit(file, "old", "new"),))])
    assert result.sources["a.py"].text == "x = f'{old}'\n"
    assert [item.reason.startswith("LibCST finds no whole expression") for item in result.left] == [True]
    assert result.errors == {}


def test_a_fix_that_would_bind_differently_is_refused_and_the_others_are_made() -> None:
    text = "x = old * 2\ny = old2(1)\n"

    def rules(file: SourceFile):
        yield finding(file, (edit(file, "old", "a + b"),))
        if "old2" in file.text:
            yield finding(file, (edit(file, "old2(1)", "new(1)"),), code="TOY2")

    result = settled(text, rules)
    assert result.sources["a.py"].text == "x = old * 2\ny = new(1)\n"
    assert [item.finding.code for item in result.left] == ["TOY1"]
    assert [item.finding.code for item in result.fixed] == ["TOY2"]


def test_a_fix_inside_one_that_is_refused_is_made() -> None:
    """The outer one comes first: refused, it must not keep the inner one waiting for ever."""

    def rules(file: SourceFile):
        if "cut" in file.text:
            yield finding(file, (edit(file, "loop(cut(x))", "a + b"),), code="TOY2")
            yield finding(file, (edit(file, "cut(x)", "trim(x)"),))

    result = settled("y = loop(cut(x)) * 2\n", rules)
    assert result.sources["a.py"].text == "y = loop(trim(x)) * 2\n"


def test_what_did_not_compile_before_is_verified_by_the_parser_only() -> None:
    result = settled("old(1)\nreturn 1\n", Rename("old", "new"))
    assert result.sources["a.py"].text == "new(1)\nreturn 1\n"
    assert result.parser_only == {"a.py"}


def test_what_the_encoding_cannot_hold_keeps_its_bytes() -> None:
    file = decode("a.py", b"# coding: latin-1\nx = '\xe9'\nold(1)\n")
    result = settle({"a.py": file}, scanner(Rename("old", "\u0436")))
    assert result.sources["a.py"] == file
    assert result.errors == {"a.py": "the fixed text cannot be written in iso-8859-1"}


# Bytes

NEWLINES = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.sampled_from(
    [
        "old(1)",
        "x = [old(1), old(old(2))]  ",
        "if x:\x0c",
        "\x0cy = 'é ü'",
        "# old(1) é",
        "\ufb01ne = '\u017f'",
        "\tz = old(3) # tab",
        "",
        " \t",
        "'''old(1)'''",
    ]
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Python with every kind of byte that a rewrite may lose: newlines, marks, form feeds, spaces, odd letters."""
    mark = draw(st.sampled_from([b"", codecs.BOM_UTF8]))
    encoding = "utf-8" if mark else draw(st.sampled_from(["utf-8", "latin-1"]))
    text = f"# coding: {encoding}" + draw(NEWLINES)
    for line in draw(st.lists(LINES, max_size=8)):
        if encoding == "latin-1":
            line = line.encode("latin-1", "ignore").decode("latin-1")
        if line.startswith("\t"):
            text += "if x:" + draw(NEWLINES)
        text += line.replace("if x:\x0c", "if x: pass\x0c") + draw(NEWLINES)
    if draw(st.booleans()):
        text = text.rstrip("\r\n")
    return mark + text.encode(encoding)


@given(files())
def test_bytes_outside_the_edits_are_identical(data: bytes) -> None:
    """Cut out what was replaced, from the bytes before and after: the rest is equal, mark and newlines included."""
    file = decode("a.py", data)
    result = settle({"a.py": file}, scanner(Rename("old", "new")))
    assert result.errors == {}
    after = result.sources["a.py"].encode()
    replaced = len(result.fixed)
    assert after.count(b"new(") - data.count(b"new(") == replaced
    assert after.replace(b"new(", b"old(") == data
    again = settle({"a.py": decode("a.py", after)}, scanner(Rename("old", "new")))
    assert again.sources["a.py"].encode() == after


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_replacements_take_the_newline_of_the_file(newline: str) -> None:
    text = f"import torch{newline}x = 1{newline}old(1){newline}"
    file = source(text)
    fix = finding(file, (edit(file, "old(1)", "if x:\n    make_cache(x)"),), imports=(MAKE_CACHE,))
    after = apply_fixes(file, [fix]).source.text
    expected = ["import torch", "from ddaudit.runtime import make_cache", "x = 1", "if x:", "    make_cache(x)", ""]
    assert after == newline.join(expected)


def test_a_file_of_many_findings_is_parsed_no_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing again for each finding makes a file of 800 take minutes."""
    parsed: list[str] = []
    real = SourceFile.parse

    def parse(self: SourceFile) -> object:
        parsed.append(self.path)
        return real(self)

    monkeypatch.setattr(SourceFile, "parse", parse)

    def count(num_findings: int) -> int:
        parsed.clear()
        text = "import torch\n" + "".join(f"old({i})\n" for i in range(num_findings))
        result = settle({"a.py": source(text)}, scanner(Rename("old", "make_cache", imports=(MAKE_CACHE,))))
        assert len(result.fixed) == num_findings
        return len(parsed)

    assert count(2) == count(50)
