"""Every rule against its own examples: what it finds, what it leaves alone, and the exact text of its fix."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from near_misses import MORE

from ddaudit.auditor.engine import scan_sources
from ddaudit.auditor.fixing.applying import apply_fixes
from ddaudit.auditor.fixing.settling import settle
from ddaudit.auditor.rule import Bad, Good, all_rules, select_rules
from ddaudit.auditor.sources.source import SourceFile

RULES = {rule.slug: rule for rule in all_rules()}
ALL = [(slug, i, e) for slug, rule in RULES.items() for i, e in enumerate((*rule.EXAMPLES, *MORE.get(slug, ())))]
GOOD = [(slug, i, e) for slug, i, e in ALL if isinstance(e, Good)]
BAD = [(slug, i, e) for slug, i, e in ALL if isinstance(e, Bad)]
OUR_COMMENT = r"# ddaudit: [^#]*|# noqa: [^#]*"
FIXED = [(slug, i, e) for slug, i, e in BAD if e.fixed is not None]


def ids(examples):
    return [f"{slug}-{i}" for slug, i, _ in examples]


def find(text, slug):
    result = scan_sources({"example.py": SourceFile("example.py", text)}, select=(slug,))
    assert not result.skipped
    return result.findings


@pytest.mark.parametrize(("slug", "number", "example"), GOOD, ids=ids(GOOD))
def test_good_is_left_alone(slug, number, example):
    assert [(finding.span.line, finding.expr) for finding in find(example.text, slug)] == []


@pytest.mark.parametrize(("slug", "number", "example"), BAD, ids=ids(BAD))
def test_bad_is_found_as_often_as_it_says(slug, number, example):
    findings = find(example.text, slug)
    assert len(findings) == example.findings
    for finding in findings:
        assert finding.code == RULES[slug].code
        assert "{" not in finding.message
        assert finding.fix or finding.no_fix_reason, "a finding without an edit says why"


@pytest.mark.parametrize(("slug", "number", "example"), BAD, ids=ids(BAD))
def test_bad_has_a_fix_only_where_its_example_shows_one(slug, number, example):
    has_fix = any(finding.fix for finding in find(example.text, slug))
    assert has_fix is (example.fixed is not None)


@pytest.mark.parametrize(("slug", "number", "example"), FIXED, ids=ids(FIXED))
def test_fix_gives_the_exact_text_which_compiles_and_is_clean(slug, number, example):
    source = SourceFile("example.py", example.text)
    fixed = apply_fixes(source, find(example.text, slug)).source.text
    assert fixed == example.fixed_text
    compile(fixed, "example.py", "exec")
    assert find(fixed, slug) == ()


@pytest.mark.parametrize(("slug", "number", "example"), [*GOOD, *BAD], ids=ids([*GOOD, *BAD]))
def test_examples_are_whole_programs(slug, number, example):
    ast.parse(example.text)


def settled(text, *, unsafe=True, backwards=False, slugs=()):
    """The text when every fix of the rules (empty: all) is made, findings taken from the last on where asked."""

    def scan(sources):
        findings = scan_sources(sources, select=slugs).findings
        return findings[::-1] if backwards else findings

    result = settle({"example.py": SourceFile("example.py", text)}, scan, unsafe=unsafe)
    assert not result.errors
    return result.sources["example.py"].text


def comments(text):
    return Counter(
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    )


@pytest.mark.parametrize(("slug", "number", "example"), FIXED, ids=ids(FIXED))
def test_a_second_fix_changes_nothing(slug, number, example):
    assert settled(example.fixed_text, slugs=(slug,)) == example.fixed_text


@pytest.mark.parametrize(("slug", "number", "example"), [*GOOD, *BAD], ids=ids([*GOOD, *BAD]))
def test_no_order_of_all_rules_fixes_gives_another_text(slug, number, example):
    for unsafe in (False, True):
        once = settled(example.text, unsafe=unsafe)
        assert settled(example.text, unsafe=unsafe, backwards=True) == once
        assert settled(once, unsafe=unsafe) == once


@pytest.mark.parametrize(("slug", "number", "example"), FIXED, ids=ids(FIXED))
def test_a_fix_keeps_every_comment(slug, number, example):
    """With a comment at the end of each line: the fix keeps them all, or is not made."""
    text = "".join(f"{line}  # note {i}\n" if line else "\n" for i, line in enumerate(example.text.splitlines()))
    fixed = settled(text, slugs=(slug,))
    # An import that nothing needs any more takes its comment along.
    gone = {f"# note {i}" for i, line in enumerate(example.text.splitlines()) if line.startswith(("from ", "import "))}
    # What a suppression shares its comment with stays.
    found = (comments(each).elements() for each in (text, fixed))
    expected, now = (Counter(re.sub(OUR_COMMENT, "", note) for note in notes) for notes in found)
    assert set(expected - now) <= gone
    assert now - expected == Counter()


@pytest.mark.parametrize(("slug", "number", "example"), FIXED, ids=ids(FIXED))
def test_a_fix_keeps_the_files_newlines(slug, number, example):
    text = example.text.replace("\n", "\r\n")
    assert settled(text, slugs=(slug,)) == settled(example.text, slugs=(slug,)).replace("\n", "\r\n")


OTHERS = [(slug, i, e) for slug, i, e in BAD if slug != "faulty-suppression"]


@pytest.mark.parametrize(("slug", "number", "example"), OTHERS, ids=ids(OTHERS))
def test_a_comment_above_the_statement_keeps_each_finding(slug, number, example):
    lines = example.text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(example.text).readline)
    kinds = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    begins, starts = True, []
    for token in (token for token in tokens if token.type not in kinds):
        starts += [token.start[0]] if begins else []
        begins = token.type == tokenize.NEWLINE
    found = find(example.text, slug)
    for start in sorted({max(s for s in starts if s <= finding.span.line) for finding in found}, reverse=True):
        indent = re.match(r"\s*", lines[start - 1]).group()
        lines.insert(start - 1, f"{indent}# ddaudit: ignore[{slug}] kept")
    text = "".join(f"{line}\n" for line in lines)
    result = scan_sources({"example.py": SourceFile("example.py", text)}, select=(slug, "DDA501"))
    assert (result.findings, len(result.suppressed)) == ((), len(found))
    assert settled(text, slugs=(slug, "DDA501")) == text


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rule_is_complete(rule):
    """A rule whose page, file name or examples are missing would leave `explain` and the README empty."""
    assert re.fullmatch(r"DDA[123459]\d\d", rule.code)
    assert Path(inspect.getfile(type(rule))).stem == rule.slug.replace("-", "_")
    assert len(rule.page.split()) > 30
    parts = [line.partition(": ")[0] for line in rule.page.splitlines() if re.match(r"(On|Seen|Fix): \S", line)]
    assert parts == ["On", "Seen", "Fix"], "where it breaks, who says so, and how sure the fix is"
    assert sum(isinstance(example, Good) for example in rule.EXAMPLES) >= 2
    assert any(isinstance(example, Bad) for example in rule.EXAMPLES)
    first_bad = next(i for i, example in enumerate(rule.EXAMPLES) if isinstance(example, Bad))
    assert all(isinstance(example, Bad) for example in rule.EXAMPLES[first_bad:]), "good ones come first"


@pytest.mark.parametrize(("slug", "number", "example"), BAD, ids=ids(BAD))
def test_markers_let_the_example_through(slug, number, example):
    """A marker that an example lacks would hide the defect from the rule."""
    assert any(marker in example.text for marker in RULES[slug].markers)


def test_codes_and_slugs_are_unique():
    assert len({rule.code for rule in all_rules()}) == len(RULES) == len(all_rules())


def test_every_rule_file_holds_a_rule():
    folder = Path(inspect.getfile(type(all_rules()[0]))).parent
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert files == {rule.slug.replace("-", "_") for rule in all_rules()}


def test_select_by_prefix_and_slug():
    assert {rule.code[:4] for rule in select_rules(("DDA1",))} == {"DDA1"}
    assert [rule.slug for rule in select_rules(("bare-cache", "DDA102"), ("bare-cache",))] == ["cache-crop"]
    assert select_rules() == all_rules()


@pytest.mark.parametrize("name", ["DDA999", "no-such-rule", "bare", ""])
def test_unknown_rule_is_an_error(name):
    with pytest.raises(ValueError, match="no rule"):
        select_rules((name,))
