"""`ddaudit fix`: the command that writes."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddaudit.auditor.source import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddaudit.auditor.fixing import Left
    from ddaudit.auditor.fork import Plan
    from ddaudit.auditor.placing import Placed
    from ddaudit.auditor.settling import Fixed


@click.command()
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
@click.option("--verify", is_flag=True, help="Try what was found on the target's own classes; needs the runtime.")
@click.option("--files", is_flag=True, help="For hooks: only FILES are meant, and there may be none.")
def fix(
    paths: tuple[Path, ...],
    output: Path | None,
    in_place: bool,
    diff: bool,
    check: bool,
    unsafe: bool,
    verify: bool,
    files: bool,
) -> None:
    """Write a patched fork of REPOSITORY (default: this folder), which itself stays as it is.

    Nothing is imported or executed. The fork has every file, the patch as `ddaudit.patch`, and what was done and
    left, and why, in `ddaudit.json`.

    FILES go with `--in-place`, `--diff` and `--check`. What their names hold is looked up in their whole repository;
    no other file is changed or reported.

    Exit code 0: nothing is left to do, 1: findings are left, 2: something could not be examined or fixed. With
    `--diff` and `--check` 1 says that something would change, whatever is left.
    """
    from ddaudit.auditor.fork import plan_fix, plan_fix_files
    from ddaudit.auditor.placing import check_target, write_fork, write_in_place

    if files and not paths:
        return
    if in_place and output:
        raise ValueError("`--in-place` writes no fork, so there is no `--output`: choose one of the two")
    source, *more = paths or (Path("."),)
    writes = not (diff or check)
    target = output or Path("patched") / source.resolve().name
    if any(path.is_dir() for path in paths) and (more or files):
        raise ValueError("`fix` takes one repository's root folder, or files")
    if writes and not in_place and (more or source.is_file()):
        raise ValueError(f"{source} is not a folder, and a fork is of a whole repository: ask for `--in-place`?")
    if writes and not in_place and source.is_dir():
        check_target(source, target)
    plan = plan_fix_files(paths, unsafe=unsafe) if more or source.is_file() else plan_fix(source, unsafe=unsafe)
    if diff:
        sys.stdout.buffer.write(plan.patch)
        sys.stdout.buffer.flush()
    placed = None
    try:
        if writes and in_place:
            write_in_place(plan)
        elif writes:
            placed = write_fork(plan, target)
    except OSError as error:
        raise ValueError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
    for line in _report(plan, placed, unsafe, whole=source.is_dir()):
        click.echo(line, err=diff)
    for line in _verified(plan) if verify else ():
        click.echo(line, err=diff)
    for line in _problems(plan, placed, whole=source.is_dir()):
        click.echo(line, err=True)
    if plan.exit_code == 2 or (placed and placed.not_copied):
        sys.exit(2)
    sys.exit(plan.exit_code if writes else int(bool(plan.changes)))


def _report(plan: Plan, placed: Placed | None, unsafe: bool, whole: bool) -> Iterator[str]:
    settled = plan.settled
    if settled.fixed:
        yield "fixed"
        yield from _by_path(settled.fixed)
    if settled.left:
        yield "left, with the reason (lines as in the fixed files)" if plan.changes else "left, with the reason"
        yield from _by_path(settled.left)
    names = ", ".join(entry.name for entry in plan.entries) or "none found"
    entries = f", {_count(len(plan.entries), 'entry point')}: {names}" if whole else ""
    yield f"{len(settled.fixed)} fixed in {_count(len(plan.changes), 'file')}, {len(settled.left)} left{entries}"
    if not unsafe and any(item.finding.applicability.value == "unsafe" for item in settled.left):
        yield "some of what is left has a fix that a person should read: --unsafe"
    if placed:
        yield f"fork: {_shown(placed.target)}" + ("" if placed.is_new else " (was there already, the same)")
        if placed.kept_as:
            yield f"the fork before had been changed by hand: it is kept as {_shown(placed.kept_as)}"
        yield f"next: ddaudit run {_shown(placed.target)} --model MODEL"


def _verified(plan: Plan) -> Iterator[str]:
    """What trying the findings came to, and how neutral the lines were and are."""
    from ddaudit.auditor.cli_verify import try_all
    from ddaudit.auditor.targeting import neutrality

    left = [item.finding for item in plan.settled.left]
    fixed = [item.finding for item in plan.settled.fixed]
    found = [*fixed, *left]
    counts = Counter(finding.verified.status.value for finding in try_all(found) if finding.verified)
    yield "tried: " + ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    asked = sum(finding.claim is not None for finding in fixed)
    yield f"neutrality before: {neutrality(found)}"
    yield f"neutrality after:  {neutrality(left, asked)}"


def _by_path(items: Iterable[Fixed | Left]) -> Iterator[str]:
    for path, group in groupby(items, key=lambda item: item.finding.path):
        yield f"  {shown(path)}"
        for item in group:
            finding = item.finding
            place = f"{finding.span.line}:{finding.span.column}"
            what = getattr(item, "reason", "") or ("" if getattr(item, "how", "") == "edited" else "by another fix")
            yield f"    {place:<8} {finding.code} {finding.slug:<20} {finding.expr[:70]}"
            if what:
                yield f"             {what}"


def _problems(plan: Plan, placed: Placed | None, whole: bool) -> Iterator[str]:
    for item in plan.skipped:
        # What is left out by choice was named, if files were.
        if item.is_failure or not whole:
            detail = f" ({item.detail})" if item.detail else ""
            fate = ", copied as it is" if placed else ""
            yield f"not examined{fate}: {shown(item.path)}: {item.reason.value}{detail}"
    for path, reason in plan.settled.errors.items():
        yield f"error: {shown(path)} was left as it was: {reason}"
    for path in sorted(plan.settled.parser_only):
        yield f"verified by parser only: {shown(path)}: this Python could not compile it before either"
    for path, reason in (placed.not_copied if placed else {}).items():
        yield f"not copied: {shown(path)}: {reason}"


def _shown(path: Path) -> str:
    """A path as the caller would write it."""
    here = Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
