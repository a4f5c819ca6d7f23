"""`ddaudit run` and `ddaudit demo`: the commands that execute code, and need torch."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddaudit.auditor.record import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddaudit.auditor.finding import Finding

SAMPLE = Path(__file__).resolve().parents[2] / "tests" / "research_repo"
PROMPTS = Path(__file__).resolve().parents[2] / "runtime" / "prompts"
TINY = "tiny-trained"
TINY_OPTIONS = {"model": TINY, "drafter": TINY, "prompt_tokens": 96}


@click.command(short_help="Run a fork's generating functions against plain decoding.")
@click.argument("folder", metavar="FORK", type=click.Path(path_type=Path))
@click.option(
    "--model", help="Target: a folder, a hub id (downloads), or a built-in profile. Default: `tiny-trained`, bundled."
)
@click.option("--random-weights", is_flag=True, help="Build the model's architecture without its checkpoint.")
@click.option(
    "--loader", type=click.Choice(["causal-lm", "conditional"]), default="causal-lm", show_default=True,
    help="Text-only class, or the one with a vision tower.",
)  # fmt: skip
@click.option(
    "--drafter",
    help="`scripted:P[,Q]`: the right token first with chance P, else second with chance Q (0.5 if left out). "
    "`random`: the fork's own class, untrained. Or a folder, hub id or profile. `scripted:P+DRAFTER` runs one of these "
    "beside the script, for its time. Default: `tiny-trained` for that target, `scripted:0.7` for others.",
)  # fmt: skip
@click.option("--entry", "entries", multiple=True, metavar="MODULE:FUNCTION", help="Only these; repeatable.")
@click.option(
    "--arg", "arguments", multiple=True, metavar="[FUNCTION.]NAME=VALUE",
    help="Pass on to the entries that take it. Repeatable; the same name several times sweeps over the values.",
)  # fmt: skip
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; repeatable.")
@click.option(
    "--prompts", "prompt_file", type=click.Path(path_type=Path),
    help="File of prompts, one a line; or `code`, `mathematics` or `chat`, eight each that come with ddaudit.",
)  # fmt: skip
@click.option(
    "--num-prompts", type=click.IntRange(min=1), default=3, show_default=True,
    help="Without texts: random token ids, or for `tiny-trained` held-out pieces of Python's standard library.",
)  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="Their length. Default: 32, 96 for `tiny-trained`.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="Above 0, entries that take a temperature sample, and a chi-square test judges their tokens.",
)  # fmt: skip
@click.option(
    "--samples", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of each entry for that test."
)
@click.option("--block-size", type=click.IntRange(min=1), help="Draft block; default: the drafter configuration's.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--device", default="auto", show_default=True, help="`auto`, `cpu`, `cuda`, `cuda:1`.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--eager", is_flag=True, help="Replay no CUDA graphs; the verdict is the same, the speed is not.")
@click.option(
    "--profile", is_flag=True,
    help="For each stage the bytes it must move, and its time over what moving them takes on this device.",
)  # fmt: skip
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

    At a temperature, its tokens are tested against the target's distribution instead.

    Exit code 0: every text is plain decoding's (or parts from it at a near-tie of the two best tokens only), or
    drawn from the target's distribution. 1: a text differs, a distribution is biased, or the cache keeps a trace of
    rejected tokens. 2: an error, or a test that could not tell.
    """
    if not folder.is_dir():
        _stop(f"there is no folder `{folder}`", "name the repository's or fork's root folder")
    _check_json_path(json_path)
    if prompt_file:
        if not prompt_file.is_file():
            prompt_file = PROMPTS / f"{prompt_file}.txt"
        if not prompt_file.is_file():
            names = ", ".join(sorted(path.stem for path in PROMPTS.glob("*.txt")))
            _stop(f"`--prompts {prompt_file.stem}` is no file", f"name one, a prompt a line, or one of: {names}")
        prompts += tuple(line for line in prompt_file.read_text(encoding="utf-8").splitlines() if line.strip())
        if not prompts:
            _stop(f"`--prompts {prompt_file}` holds no prompt", "write one a line")
    options = {name: value for name, value in options.items() if value is not None}
    if options.setdefault("model", TINY) == TINY and not options["random_weights"]:
        options = {**TINY_OPTIONS, **options}
    click.echo(f"ddaudit run executes the code in {folder.name or folder.resolve().name}.", err=True)
    chosen = [_named_entry(text) for text in entries] if entries else _found_entries(folder)
    record = run_folder(folder, chosen, arguments, {**options, "prompt_texts": prompts}, json_path)
    _finish(record, json_path)


@click.command(short_help="The whole job on a small example.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the run's record here.")
def demo(json_path: Path | None) -> None:
    """The whole job on a small example: scan our sample repository, fix it, run the fork, print the verdict.

    On the CPU, on the bundled pair of a small hybrid target and its drafter, continuing pieces of Python's standard
    library that neither was trained on. The sample needs a checkout of ddaudit.

    Exit code as for `run`.
    """
    from ddaudit.auditor.engine import scan
    from ddaudit.auditor.facts.entries import find_entries
    from ddaudit.auditor.fixing.fork import plan_fix
    from ddaudit.auditor.fixing.placing import write_fork

    if not SAMPLE.is_dir():
        _stop(
            "the demo's sample repository is not installed with the package",
            "get a checkout of ddaudit and, inside it: pip install -e '.[runtime]' && ddaudit demo",
        )
    _check_json_path(json_path)
    # The model is so small that threads cost more than they bring, several times as much on a busy machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _runtime()
    click.echo(f"1. scan {SAMPLE.name}, code written for Qwen3 and Transformers 4.57")
    for line in _finding_lines(scan([SAMPLE]).findings):
        click.echo(line)
    with tempfile.TemporaryDirectory(prefix="ddaudit-demo-") as folder:
        fork = Path(folder) / SAMPLE.name
        plan = plan_fix(SAMPLE)
        write_fork(plan, fork)
        num_lines = sum(
            line[:1] in (b"+", b"-") and line[:3] not in (b"+++", b"---") for line in plan.patch.splitlines()
        )
        click.echo(
            f"\n2. fix {len(plan.settled.fixed)} of them: {num_lines} lines in {len(plan.changes)} files; "
            f"{len(plan.settled.left)} are left to a person"
        )
        click.echo("\n3. run the fork on the bundled hybrid and its trained drafter, on text that neither has seen")
        options = {**TINY_OPTIONS, "device": "cpu", "max_new_tokens": 96}
        record = run_folder(fork, list(find_entries(fork)), (), options, json_path)
    _finish(record, json_path)


def _finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line a rule: how many, what happens, and the first place."""
    by_code: dict[str, list[Finding]] = {}
    for finding in findings:
        by_code.setdefault(finding.code, []).append(finding)
    for code, found in sorted(by_code.items()):
        first = found[0]
        place = f"{first.path}:{first.span.line}"
        yield f"   {code} {first.slug:<24} {len(found):>2} x {first.severity.value:<7} {place:<26} {first.expr[:44]}"
    yield f"   {len(findings)} findings"


def run_folder(
    folder: Path, entries: list[Entry], arguments: tuple[str, ...], options: dict[str, Any], json_path: Path | None
) -> Any:
    """The run's record, kept in `json_path` as it grows. Exits with 2 where nothing could be run."""
    from ddaudit.auditor.reports.run_report import write_run

    runner = _runtime()
    # The fork may change the working folder.
    path = json_path and json_path.absolute()

    def keep(record: Any) -> None:
        if path:
            write_run(record, path)

    try:
        parsed = [runner.parse_argument(text) for text in arguments]
        # What the fork prints is not the report.
        with contextlib.redirect_stdout(sys.stderr):
            return runner.run(folder, entries, parsed, runner.RunOptions(**options), _progress, keep=keep)
    except runner.RunError as error:
        _stop(str(error), error.remedy)


def _runtime() -> Any:
    """`ddaudit.runtime.running.run`, or the end of the command where torch is missing."""
    # By name: `auditor` imports nothing of `runtime`, and the core installs without torch.
    try:
        return importlib.import_module("ddaudit.runtime.running.run")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ddaudit":
            raise
        _stop(
            f"`{error.name}` is not installed, and this command decodes",
            "in a checkout of ddaudit: pip install -e '.[runtime]'",
        )


def _check_json_path(path: Path | None) -> None:
    """Before the run, which may take an hour, not after it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        _stop(f"there is no folder for `--json {path}`", "make it first")
    if path.is_dir():
        _stop(f"`--json {path}` is a folder", "name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        _stop(f"`--json {path}` cannot be written: {error.strerror}", "name a file in a folder of yours")


def _finish(record: Any, json_path: Path | None) -> None:
    from ddaudit.auditor.reports.run_report import format_run, write_run

    click.echo(format_run(record), nl=False)
    if json_path:
        try:
            write_run(record, json_path)
        except OSError as error:
            _stop(f"`--json {json_path}` cannot be written: {error.strerror}", "name a file in a folder of yours")
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        # Python would wait for threads that the fork has left running.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(record.exit_code)
    sys.exit(record.exit_code)


def _found_entries(folder: Path) -> list[Entry]:
    from ddaudit.auditor.facts.entries import find_entries

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
