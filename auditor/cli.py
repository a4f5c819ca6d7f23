"""The command line: the one place that prints and exits."""

from __future__ import annotations

import io
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddaudit.auditor.commands.fix import fix
from ddaudit.auditor.commands.matrix import matrix
from ddaudit.auditor.commands.options import cache_options, release_option, rule_options, typed, width
from ddaudit.auditor.commands.probe import probe
from ddaudit.auditor.commands.run import demo, run
from ddaudit.auditor.commands.verify import verify as verify_result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.scanning.result import ScanResult
    from ddaudit.auditor.scanning.result_cache import ResultCache

CONFIDENCES = ("guess", "likely", "proven")


class _Group(click.Group):
    """Turns a caller's errors into one line, and whatever else ends a command early into exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        for stream in (sys.stdout, sys.stderr):
            # Code under scan holds characters that a terminal may lack.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        if threading.current_thread() is threading.main_thread():
            # What is half-written is cleared away then, as after Ctrl-C.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (OSError, ValueError) as error:
            click.echo(f"error: {error}", err=True)
        except (KeyboardInterrupt, Exception) as error:
            if _is_interrupt(error):
                click.echo("error: interrupted", err=True)
            else:
                # Left to Python it would exit with 1, which says that there are findings.
                click.echo(f"{traceback.format_exc()}error: this is a fault of ddaudit", err=True)
        raise SystemExit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are used."""
        return list(self.commands)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it is one, or stands for one: a parser's clean-up may raise in its place."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@click.group(cls=_Group, epilog="Start with `ddaudit demo`, or with `ddaudit scan` in your repository.")
@click.version_option(package_name="ddaudit", prog_name="ddaudit")
def main() -> None:
    """Find, fix and prove what keeps decoding research code from running on new model architectures."""


@main.command(short_help="Report brittle places; nothing is imported or executed.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "jsonl", "sarif"]), default="text", show_default=True
)
@rule_options
@click.option(
    "--min-confidence", type=click.Choice(CONFIDENCES), default="likely", show_default=True,
    help="How sure it must be that a name holds what it seems to.",
)  # fmt: skip
@click.option(
    "--target", "targets", multiple=True, metavar="PROFILE",
    help="Model to port to: a built-in profile or a file of `probe --save`; repeatable.  [default: qwen3.6-27b]",
)  # fmt: skip
@release_option
@click.option("--verify", is_flag=True, help="Try each finding on the target's own classes; needs the runtime.")
@click.option("--why", is_flag=True, help="Show what each finding rests on, and why its fix is safe or not.")
@cache_options
@click.option("--files", is_flag=True, help="For hooks: only files are meant, and there may be none.")
def scan(
    paths: tuple[Path, ...],
    form: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    min_confidence: str,
    targets: tuple[str, ...],
    transformers: str,
    verify: bool,
    why: bool,
    cache: ResultCache | None,
    files: bool,
) -> None:
    """Report brittle places in PATHS (default: this folder). Nothing is imported or executed.

    Of files alone, what their names hold is looked up in their whole repository, and only they are reported.

    Exit code 0: clean, 1: findings, 2: something could not be examined.
    """
    from ddaudit.auditor.engine import scan as run_scan
    from ddaudit.auditor.finding import Confidence
    from ddaudit.auditor.reports import scan_report

    if files and not paths:
        return
    result = run_scan(
        paths or (Path("."),),
        select=select,
        ignore=ignore,
        min_confidence=Confidence(min_confidence),
        targets=targets,
        cache=cache,
        transformers=transformers,
    )
    if verify:
        result = verify_result(result, targets)
    if form == "json":
        click.echo(scan_report.json_object(result))
    elif form == "sarif":
        click.echo(_sarif(result, paths))
    else:
        for line in scan_report.json_lines(result) if form == "jsonl" else scan_report.text(result, width(), why=why):
            click.echo(line)
        step = scan_report.next_step(result, _folder(paths))
        if form == "text" and step:
            click.echo(step)
        for limit in result.limits if form == "jsonl" else ():
            click.echo(f"limit: {limit}", err=True)
        for entry in result.skipped:
            click.echo(scan_report.skipped_line(entry), err=True)
    sys.exit(result.exit_code)


def _sarif(result: ScanResult, paths: tuple[Path, ...]) -> str:
    from ddaudit.auditor.reports.sarif_report import sarif

    if not result.fixable():
        return sarif(result, {})
    # LibCST takes long to import.
    from ddaudit.auditor.engine import sources_of
    from ddaudit.auditor.fixing.previewing import preview

    return sarif(result, preview(result.findings, sources_of(paths or (Path("."),))))


def _folder(paths: tuple[Path, ...]) -> str:
    """The repository in a command to type next: the one folder that was named, if it was one."""
    if not paths:
        return ""
    return typed(paths) if len(paths) == 1 and paths[0].is_dir() else "REPOSITORY"


@click.command(short_help="Print a rule's page, or list all rules.")
@click.argument("rule", required=False, metavar="[RULE | FILE:LINE]")
def explain(rule: str | None) -> None:
    """Say what RULE (a code or slug) finds, why it breaks and what the fix is; without RULE, list all.

    For FILE:LINE, say what is known of each name there: why something is found on the line, or nothing.
    """
    from ddaudit.auditor.reports import scan_report
    from ddaudit.auditor.rule import all_rules, select_rules

    if rule is None:
        for each in all_rules():
            for line in scan_report.rule_entry(each, width()):
                click.echo(line)
        return
    path, _, line = rule.rpartition(":")
    if path and line.isdigit():
        for text in _known(Path(path), int(line)):
            click.echo(text)
        return
    for each in select_rules((rule,)):
        for line in scan_report.rule_page(each):
            click.echo(line)


def _known(path: Path, line: int) -> Iterator[str]:
    from ddaudit.auditor.engine import scan
    from ddaudit.auditor.facts.asking import known_at, learn_about
    from ddaudit.auditor.reports import scan_report
    from ddaudit.auditor.rule import all_rules

    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file and a line of it")
    result = scan((path,))
    for entry in result.skipped:
        raise ValueError(scan_report.skipped_line(entry))
    file = learn_about(path, {marker for rule in all_rules() for marker in rule.markers})
    if not 1 <= line <= file.source.num_lines:
        raise ValueError(f"{path} has no line {line}: it has {file.source.num_lines}")
    yield from scan_report.known_lines(f"{file.source.path}:{line}", list(known_at(file, line)), width())
    here = (*result.findings, *result.suppressed)
    found = [finding for finding in here if finding.span.line <= line <= finding.span.end_line]
    for finding in found:
        kept = "" if finding.suppressed is None else f", suppressed: {finding.suppressed or 'no reason given'}"
        yield f"found: {finding.code} {finding.slug} at {finding.expr}{kept}"
    if not found:
        yield "nothing is found here"


main.add_command(fix)
main.add_command(run)
main.add_command(demo)
main.add_command(matrix)
main.add_command(probe)
main.add_command(explain)
