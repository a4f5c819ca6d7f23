"""`ddaudit run` and `ddaudit demo`: the commands that execute code, and need torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from ddaudit.auditor.record import Entry

NEEDS_RUNTIME = "needs torch and transformers, remedy: pip install 'ddaudit[runtime]'"


@click.command()
@click.argument("folder", metavar="FORK", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="Target: a folder, a hub id (downloads), or a built-in profile.")
@click.option("--random-weights", is_flag=True, help="Build the model's architecture without its checkpoint.")
@click.option(
    "--loader", type=click.Choice(["causal-lm", "conditional"]), default="causal-lm", show_default=True,
    help="Text-only class, or the one with a vision tower.",
)  # fmt: skip
@click.option(
    "--drafter", default="scripted:0.7", show_default=True,
    help="`scripted:P[,Q]`: the right token first with chance P, else second with chance Q (0.5 if left out). "
    "`random`: the fork's own class, untrained. Or a folder, hub id or profile.",
)  # fmt: skip
@click.option("--entry", "entries", multiple=True, metavar="MODULE:FUNCTION", help="Only these; repeatable.")
@click.option(
    "--arg", "arguments", multiple=True, metavar="[FUNCTION.]NAME=VALUE",
    help="Pass on to the entries that take it. Repeatable; the same name several times sweeps over the values.",
)  # fmt: skip
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; repeatable. Default: random token ids.")
@click.option(
    "--prompts", "prompt_file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File of prompts, one a line.",
)  # fmt: skip
@click.option("--num-prompts", default=3, show_default=True, help="Random prompts.")
@click.option("--prompt-tokens", default=32, show_default=True, help="Length of a random prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--block-size", type=click.IntRange(min=1), help="Draft block; default: the drafter configuration's.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--device", default="auto", show_default=True, help="`auto`, `cpu`, `cuda`, `cuda:1`.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the record here.")
def run(
    folder: Path,
    entries: tuple[str, ...],
    arguments: tuple[str, ...],
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Run FORK's generating functions and compare each text with plain decoding, token by token.

    This EXECUTES the code in FORK. Any folder will do, a fork made by `ddaudit fix` or not.

    Exit code 0: every text is plain decoding's (or parts from it at a near-tie of the two best tokens only),
    1: a text differs, 2: an error.
    """
    if not folder.is_dir():
        _stop(f"there is no folder `{folder}`", "name the repository's or fork's root folder")
    if json_path and not json_path.absolute().parent.is_dir():
        _stop(f"there is no folder for `--json {json_path}`", "make it first")
    if prompt_file:
        prompts += tuple(line for line in prompt_file.read_text(encoding="utf-8").splitlines() if line.strip())
        if not prompts:
            _stop(f"`--prompts {prompt_file}` holds no prompt", "write one a line")
    click.echo(f"ddaudit run executes the code in {folder.name or folder.resolve().name}.", err=True)
    chosen = [_named_entry(text) for text in entries] if entries else _found_entries(folder)
    record = run_folder(folder, chosen, arguments, {**options, "prompt_texts": prompts})
    _finish(record, json_path)


def run_folder(folder: Path, entries: list[Entry], arguments: tuple[str, ...], options: dict[str, Any]) -> Any:
    """The run's record. Exits with 2 where nothing could be run."""
    # By name: `auditor` imports nothing of `runtime`, and the core installs without torch.
    try:
        runner = importlib.import_module("ddaudit.runtime.run")
        binding = importlib.import_module("ddaudit.runtime.binding")
        errors = importlib.import_module("ddaudit.runtime.errors")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ddaudit":
            raise
        _stop(f"`{error.name}` is not installed: this command {NEEDS_RUNTIME}", "")
    try:
        parsed = [binding.parse_argument(text) for text in arguments]
        return runner.run(folder, entries, parsed, runner.RunOptions(**options), _progress)
    except errors.RunError as error:
        _stop(str(error), error.remedy)


def _finish(record: Any, json_path: Path | None) -> None:
    from ddaudit.auditor.run_report import format_run, write_run

    click.echo(format_run(record), nl=False)
    if json_path:
        try:
            write_run(record, json_path)
        except OSError as error:
            _stop(f"`--json {json_path}` cannot be written: {error.strerror}", "name a file in a folder of yours")
    sys.exit(record.exit_code)


def _found_entries(folder: Path) -> list[Entry]:
    from ddaudit.auditor.entries import find_entries

    return list(find_entries(folder))


def _named_entry(text: str) -> Entry:
    """`module:function`; a file's path stands for its module."""
    module, colon, qualname = text.partition(":")
    if not colon or not module or not qualname:
        _stop(f"`--entry {text}` is not `module:function`", "for instance `--entry ddtree:ddtree_generate`")
    module = module.removesuffix(".py").replace("/", ".").strip(".")
    return Entry(module=module, qualname=qualname, path="", line=0, parameters=())


def _progress(text: str) -> None:
    click.echo(f"  {text}", err=True)


def _stop(problem: str, remedy: str) -> Any:
    click.echo(f"error: {problem}", err=True)
    if remedy:
        click.echo(f"remedy: {remedy}", err=True)
    sys.exit(2)
