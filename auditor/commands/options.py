"""What several commands share: choosing rules and a release, the terminal's width, commands to type next."""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_Command = TypeVar("_Command", bound="Callable[..., None]")
_MOST_PATHS = 3
"""A hook passes hundreds: no command to type next repeats those."""


def _split(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for value in values for name in value.split(","))


def rule_options(command: _Command) -> _Command:
    """Adds `--select` and `--ignore`, which give tuples of code prefixes and slugs."""
    ignore = click.option("--ignore", multiple=True, callback=_split, help="Not rules of these code prefixes or slugs.")
    select = click.option(
        "--select", multiple=True, callback=_split, help="Only rules of these code prefixes or slugs."
    )
    return select(ignore(command))


def release_option(command: _Command) -> _Command:
    """Adds `--transformers`."""
    return click.option(
        "--transformers", metavar="VERSION", default="",
        help="Release of Transformers to port to.  [default: the newest the repository admits, or the installed one]",
    )(command)  # fmt: skip


def width() -> int:
    from ddaudit.auditor.reports.scan_report import WIDTH

    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def typed(paths: Sequence[Path]) -> str:
    """The paths in a command to type next."""
    return shlex.join(map(str, paths)) if len(paths) <= _MOST_PATHS else "FILES"
