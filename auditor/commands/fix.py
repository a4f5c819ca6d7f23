"""`ddaudit fix`: the command that writes."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddaudit.auditor.commands.options import release_option, rule_options, typed, width
from ddaudit.auditor.sources.source import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddaudit.auditor.fixing.applying import Left
    from ddaudit.auditor.fixing.fork import Plan
    from ddaudit.auditor.fixing.placing import Placed
    from ddaudit.auditor.fixing.settling import Fixed


@dataclass(frozen=True)
class _Asked:
    """What the caller asked for."""

    paths: tuple[Path, ...]
    output: Path | None
    in_place: bool
    diff: bool
    check: bool
    unsafe: bool
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    transformers: str

    @property
    def source(self) -> Path:
        return self.paths[0] if self.paths else Path(".")

    @property
    def writes(self) -> bool:
        return not (self.diff or self.check)

    @property
    def whole(self) -> bool:
        """Whether it is about a repository, not about files."""
        return self.source.is_dir()

    @property
    def command(self) -> str:
        """The command that asks for it."""
        flags = {"--unsafe": self.unsafe, "--in-place": self.in_place, "--diff": self.diff, "--check": self.check}
        values = {
            "--output": str(self.output or ""),
            "--select": ",".join(self.select),
            "--ignore": ",".join(self.ignore),
            "--transformers": self.transformers,
        }
        words = [*(flag for flag, given in flags.items() if given), *(f"{k}={v}" for k, v in values.items() if v)]
        return " ".join(filter(None, (shlex.join(["ddaudit", "fix", *words]), typed(self.paths))))


@click.command(short_help="Write a patched fork; the source stays as it is.")
@click.argument("paths", nargs=-1, metavar="[REPOSITORY | FILES]", type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Folder of the fork.  [default: patched/<its name>]"
)
@click.option(
    "--in-place", is_flag=True, help="Edit the repository, or FILES and no others, instead of writing a fork."
)
@click.option("--diff", is_flag=True, help="Print the patch and write nothing.")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if something would change.")
@click.option("--unsafe", is_flag=True, help="Also apply fixes that are right in the cases known: read the patch.")
@rule_options
@release_option
@click.option("--verify", is_flag=True, help="Try what was found on the target's own classes; needs the runtime.")
@click.option("--files", is_flag=True, help="For hooks: only FILES are meant, and there may be none.")
def fix(paths: tuple[Path, ...], files: bool, verify: bool, **options: Any) -> None:
    """Write a patched fork of REPOSITORY (default: this folder), which itself stays as it is.

    Nothing is imported or executed. The fork has every file, the patch as `ddaudit.patch`, and what was done and
    left, and why, in `ddaudit.json`.

    FILES go with `--in-place`, `--diff` and `--check`. What their names hold is looked up in their whole repository;
    no other file is changed or reported.

    Exit code 0: nothing is left to do, 1: findings are left, 2: something could not be examined or fixed. With
    `--diff` and `--check` 1 says that something would change, whatever is left.
    """
    from ddaudit.auditor.fixing.fork import plan_fix, plan_fix_files
    from ddaudit.auditor.fixing.placing import check_target, write_fork, write_in_place

    if files and not paths:
        return
    asked = _Asked(paths, **options)
    source, more = asked.source, len(paths) > 1
    if asked.in_place and asked.output:
        raise ValueError("`--in-place` writes no fork, so there is no `--output`: choose one of the two")
    target = asked.output or Path("patched") / source.resolve().name
    if any(path.is_dir() for path in paths) and (more or files):
        raise ValueError("`fix` takes one repository's root folder, or files")
    if asked.writes and not asked.in_place and (more or source.is_file()):
        raise ValueError(f"{source} is not a folder, and a fork is of a whole repository: ask for `--in-place`?")
    if asked.writes and not asked.in_place and asked.whole:
        check_target(source, target)
    choice: dict[str, Any] = {
        "unsafe": asked.unsafe, "select": asked.select, "ignore": asked.ignore, "transformers": asked.transformers,
    }  # fmt: skip
    plan = plan_fix_files(paths, **choice) if more or source.is_file() else plan_fix(source, **choice)
    if asked.diff:
        sys.stdout.buffer.write(plan.patch)
        sys.stdout.buffer.flush()
    placed = None
    try:
        if asked.writes and asked.in_place:
            write_in_place(plan)
        elif asked.writes:
            placed = write_fork(plan, target)
    except OSError as error:
        # Of a copy the second name is that of the file being written.
        place = error.filename2 or error.filename or target
        raise ValueError(f"{place} cannot be written: {error.strerror or error}") from error
    for line in _report(plan, placed, asked):
        click.echo(line, err=asked.diff)
    for line in _verified(plan) if verify else ():
        click.echo(line, err=asked.diff)
    for line in _problems(plan, placed, asked.whole):
        click.echo(line, err=True)
    if plan.exit_code == 2 or (placed and placed.not_copied):
        sys.exit(2)
    sys.exit(plan.exit_code if asked.writes else int(bool(plan.changes)))


def _report(plan: Plan, placed: Placed | None, asked: _Asked) -> Iterator[str]:
    from ddaudit.auditor.finding import RUNTIME_SINCE
    from ddaudit.auditor.reports.scan_report import count, release_lines

    fixed, left = plan.settled.fixed, plan.settled.left
    found = [item.finding for item in fixed] + [item.finding for item in left]
    slug_width = max((len(finding.slug) for finding in found), default=0)
    if fixed:
        yield "fixed" if asked.writes else "would fix"
        yield from _by_path(fixed, slug_width, _fixed_place)
    if left:
        yield "left" if asked.writes else "would leave"
        yield from _by_path(left, slug_width, lambda item: _left_place(item, placed, asked))
        yield "why"
        yield from _reasons(left)
    if found:
        yield from release_lines(plan.releases, found, width())
    done = "fixed" if asked.writes else "would be fixed"
    names = ", ".join(entry.name for entry in plan.entries) or "none found"
    entries = f", {count(len(plan.entries), 'entry point')}: {names}" if asked.whole else ""
    kept = f", {len(plan.suppressed)} suppressed by comments" if plan.suppressed else ""
    yield f"{len(fixed)} {done} in {count(len(plan.changes), 'file')}, {len(left)} left{kept}{entries}"
    if not asked.unsafe and any(item.finding.applicability.value == "unsafe" for item in left):
        yield f"some of what is left has a fix that a person should read: {replace(asked, unsafe=True).command}"
    if placed:
        yield f"fork: {_shown(placed.target)}" + ("" if placed.is_new else " (was there already, the same)")
        for path, held in sorted(placed.links.items()):
            yield f"link rewritten to reach the same place: {shown(path)} -> {shown(held)}"
        if placed.kept_as:
            yield f"the fork before had been changed by hand: it is kept as {_shown(placed.kept_as)}"
        needs = any(each.exists_since == RUNTIME_SINCE for item in fixed if (each := item.finding.fix))
        if needs and plan.releases.is_assumed and plan.releases.requirement:
            yield f"it runs on Transformers {RUNTIME_SINCE} or later: lift {plan.releases.requirement}"
        if any(map(placed.has, plan.settled.sources)):
            entry = "" if plan.entries else " --entry MODULE:FUNCTION"
            yield f"next: ddaudit run {shlex.quote(_shown(placed.target))}{entry}"
    elif plan.changes and not asked.writes:
        in_place = asked.in_place or not asked.whole
        yield f"next: {replace(asked, diff=False, check=False, in_place=in_place).command}"


def _verified(plan: Plan) -> Iterator[str]:
    """What trying the findings came to, and how neutral the lines were and are."""
    from ddaudit.auditor.commands.verify import try_all
    from ddaudit.auditor.targets.targeting import neutrality, reach

    left = [item.finding for item in plan.settled.left]
    fixed = [item.finding for item in plan.settled.fixed]
    found = [*fixed, *left]
    counts = Counter(finding.verified.status.value for finding in try_all(found) if finding.verified)
    yield "tried: " + ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    asked = sum(finding.claim is not None and reach(finding.claim) is not None for finding in fixed)
    yield f"neutrality before: {neutrality(found)}"
    yield f"neutrality after:  {neutrality(left, asked)}"


def _by_path(items: Sequence[Any], slug_width: int, place: Callable[[Any], tuple[str, str]]) -> Iterator[str]:
    """A line each, by file. `place` gives where it is and a note on it."""
    from ddaudit.auditor.reports.scan_report import clip

    for path, group in groupby(items, key=lambda item: item.finding.path):
        yield f"  {shown(path)}"
        for item in group:
            where, note = place(item)
            start = f"    {where:<8} {item.finding.code} {item.finding.slug:<{slug_width}} "
            end = f"  ({note})" if note else ""
            yield start + clip(item.finding.expr, width() - len(start) - len(end)) + end


def _fixed_place(item: Fixed) -> tuple[str, str]:
    span = item.finding.span
    return f"{span.line}:{span.column}", f"by the fix of {', '.join(item.by)}" if item.by else ""


def _left_place(item: Left, placed: Placed | None, asked: _Asked) -> tuple[str, str]:
    """As a scan of the source names it; where the source itself was edited, as a scan of it would now."""
    now = item.finding.span
    span = now if asked.writes and asked.in_place else item.before or now
    moved = placed is not None and now.line != span.line
    return f"{span.line}:{span.column}", f"line {now.line} in the fork" if moved else ""


def _reasons(left: Sequence[Left]) -> Iterator[str]:
    """Every reason once, under its rule."""
    from ddaudit.auditor.reports.scan_report import wrap

    by_rule: dict[tuple[str, str], list[str]] = {}
    for item in left:
        by_rule.setdefault((item.finding.code, item.finding.slug), []).append(item.reason)
    for (code, slug), reasons in sorted(by_rule.items()):
        yield f"  {code} {slug}, {len(reasons)} here"
        for reason in dict.fromkeys(reasons):
            yield from wrap(reason, width(), "    ", "      ")


def _problems(plan: Plan, placed: Placed | None, whole: bool) -> Iterator[str]:
    for item in plan.skipped:
        # What is left out by choice was named, if files were.
        if item.is_failure or not whole:
            detail = f" ({item.detail})" if item.detail else ""
            fate = f", {_fate(item.path, placed)}" if placed else ""
            yield f"not examined{fate}: {shown(item.path)}: {item.reason.value}{detail}"
    for path, reason in plan.settled.errors.items():
        yield f"error: {shown(path)} was left as it was: {reason}"
    for path in sorted(plan.settled.parser_only):
        yield f"verified by parser only: {shown(path)}: this Python could not compile it before either"
    said = {item.path for item in plan.skipped if item.is_failure}
    for path, reason in (placed.not_copied if placed else {}).items():
        if path in said:
            continue
        yield f"not copied: {shown(path)}: {reason}"


def _fate(path: str, placed: Placed) -> str:
    """What became of a file that was not examined."""
    if path in placed.links:
        return "a link to the same place"
    return "copied as it is" if placed.has(path) else "not copied"


def _shown(path: Path) -> str:
    """A path as the caller would write it."""
    here = Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
