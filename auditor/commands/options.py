"""What several commands share: choosing rules and a release, the terminal's width, commands to type next."""

from __future__ import annotations

import functools
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def cache_options(command: _Command) -> _Command:
    """Adds `--no-cache` and `--cache-dir`, which give `cache`: the results of earlier scans, or None."""

    @click.option("--no-cache", is_flag=True, help="Neither use nor keep the results of earlier scans.")
    @click.option(
        "--cache-dir", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
        help="Where those results are kept.  [default: the platform's folder of caches]",
    )  # fmt: skip
    @functools.wraps(command)
    def with_cache(*args: Any, no_cache: bool, cache_dir: Path | None, **kwargs: Any) -> None:
        from ddaudit.auditor.scanning.result_cache import ResultCache, default_folder

        folder = None if no_cache else cache_dir or default_folder()
        command(*args, cache=ResultCache(folder) if folder is not None else None, **kwargs)

    return cast("_Command", with_cache)


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
