"""The command line: the one place that prints and exits."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ddaudit.auditor.cli_fix import fix
from ddaudit.auditor.cli_matrix import matrix
from ddaudit.auditor.cli_run import demo, run

CONFIDENCES = ("guess", "likely", "proven")


class _Group(click.Group):
    """Turns a caller's errors into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:
            click.echo(f"error: {error}", err=True)
            raise SystemExit(2) from None


@click.group(cls=_Group)
@click.version_option(package_name="ddaudit", prog_name="ddaudit")
def main() -> None:
    """Find, fix and prove what keeps decoding research code from running on new model architectures."""


def _split(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for value in values for name in value.split(","))


@main.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "json", "jsonl"]), default="text", show_default=True)
@click.option("--select", multiple=True, callback=_split, help="Only rules of these code prefixes or slugs.")
@click.option("--ignore", multiple=True, callback=_split, help="Not rules of these code prefixes or slugs.")
@click.option(
    "--min-confidence", type=click.Choice(CONFIDENCES), default="likely", show_default=True,
    help="How sure it must be that a name holds what it seems to.",
)  # fmt: skip
def scan(
    paths: tuple[Path, ...], form: str, select: tuple[str, ...], ignore: tuple[str, ...], min_confidence: str
) -> None:
    """Report brittle places in PATHS (default: this folder). Nothing is imported or executed.

    Exit code 0: clean, 1: findings, 2: something could not be examined.
    """
    from ddaudit.auditor import report
    from ddaudit.auditor.engine import scan as run_scan
    from ddaudit.auditor.finding import Confidence

    result = run_scan(paths or (Path("."),), select=select, ignore=ignore, min_confidence=Confidence(min_confidence))
    if form == "json":
        click.echo(report.json_object(result))
    else:
        for line in report.json_lines(result) if form == "jsonl" else report.text(result):
            click.echo(line)
        for entry in result.skipped:
            click.echo(report.skipped_line(entry), err=True)
    sys.exit(result.exit_code)


@main.command()
@click.argument("rule", required=False)
def explain(rule: str | None) -> None:
    """Say what RULE (a code or slug) finds, why it breaks and what the fix is; without RULE, list all."""
    from ddaudit.auditor import report
    from ddaudit.auditor.rule import all_rules, select_rules

    if rule is None:
        for each in all_rules():
            click.echo(report.rule_line(each))
        return
    for each in select_rules((rule,)):
        for line in report.rule_page(each):
            click.echo(line)


main.add_command(fix)
main.add_command(run)
main.add_command(demo)
main.add_command(matrix)
