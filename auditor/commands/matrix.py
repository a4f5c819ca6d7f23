"""`ddaudit matrix`: what stock Transformers and the runtime do on every causal architecture."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddaudit.auditor.facts.entries import find_entries

if TYPE_CHECKING:
    from ddaudit.auditor.record import Entry

SAMPLE_FORK = Path(__file__).resolve().parents[2] / "patched" / "research_repo"


@click.command()
@click.option("--only", "names", multiple=True, metavar="NAME", help="Only these model types; repeatable.")
@click.option(
    "--fork", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Run this fork's entries on each architecture too. Default: the sample's fork, in a checkout.",
)  # fmt: skip
@click.option("--format", "form", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="Processes. Default: all cores.")
def matrix(names: tuple[str, ...], folder: Path | None, form: str, jobs: int) -> None:
    """Build every causal architecture of the installed Transformers tiny and measure on each, in float32:

    stock cached continuation against a fresh forward; tree verification against each root path alone; rollback
    against never having drafted; and a fork's texts against greedy decoding.

    Exit code 0: each is exact, refused by name or not built; 1: one is wrong.
    """
    try:
        runtime: Any = importlib.import_module("ddaudit.runtime.probing.matrix")
        architectures: Any = importlib.import_module("ddaudit.runtime.models.architectures")
    except ImportError as error:
        raise click.ClickException(f"{error}; `matrix` needs the runtime: pip install 'ddaudit[runtime]'") from error
    known = architectures.causal_architectures()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise click.BadParameter(f"no causal architecture {', '.join(unknown)} in the installed Transformers")
    if folder is None and SAMPLE_FORK.is_dir():
        folder = SAMPLE_FORK
    entries = [entry for entry in find_entries(folder) if _drafts(entry)] if folder else []
    rows = []
    chosen = list(names) or known
    for row in runtime.check_all(chosen, folder, entries, min(jobs, len(chosen))):
        rows.append(row)
        click.echo(f"  {len(rows)} of {len(chosen)}: {row.architecture}: {row.verdict[:90]}", err=True)
    if form == "json":
        click.echo(json.dumps([row.to_json() for row in rows], indent=2))
    else:
        click.echo(as_markdown(rows) if form == "markdown" else as_text(rows))
    if any(row.verdict.startswith("wrong") for row in rows):
        raise click.exceptions.Exit(1)


def _drafts(entry: Entry) -> bool:
    return any("draft" in f"{parameter.name} {parameter.annotation}".lower() for parameter in entry.parameters)


def as_text(rows: list[Any]) -> str:
    """A line an architecture, and how many there are of each verdict."""
    width = max(len(row.architecture) for row in rows)
    lines = [f"{row.architecture:{width}}  {_stock(row):28}  {row.verdict}" for row in rows]
    return "\n".join([f"{'architecture':{width}}  {'stock continuation':28}  windows", *lines, "", summary(rows)])


def as_markdown(rows: list[Any]) -> str:
    """The README's table: architectures whose windows are measured, then the others with their reasons."""
    measured = [row for row in rows if row.verdict.startswith(("exact", "wrong"))]
    lines = ["| architecture | layers (tiny) | stock continuation | windows |", "|---|---|---|---|"]
    lines += [f"| {row.architecture} | {row.layers} | {_stock(row)} | {row.verdict} |" for row in measured]
    others = [f"- {row.architecture}: {row.verdict}" for row in rows if row not in measured]
    return "\n".join([*lines, "", *others])


def summary(rows: list[Any]) -> str:
    words = ("exact", "wrong", "refused", "not built")
    return ", ".join(f"{sum(row.verdict.startswith(word) for row in rows)} {word}" for word in words)


def _stock(row: Any) -> str:
    if not row.stock:
        return ""
    return f"wrong: {'; '.join(row.wrong_in_stock)}" if row.wrong_in_stock else "right"
