"""Measures what a scan costs beside other tools, in one run: processor seconds and memory, child processes included.

    python tests/benchmarks/scan_speed.py --tree TREE --research FOLDER --file FILE --peers FOLDER [--record FILE.json]

TREE is a large tree such as Transformers' own source, FOLDER research repositories below one folder, FILE a file with
nothing to find; `--peers` is the folder of an environment's commands, with `ruff`, `fixit` and `torchfix`. Prints a
table in Markdown. The tools do not do the same work: the table says what each does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

INTERVAL_S = 0.02
TIMEOUT_S = 240
WORK = {
    "ddaudit": "facts of the whole tree, then every rule",
    "ddaudit, kept result": "reads and hashes every file",
    "ruff, F and E": "rules on one file at a time, in Rust",
    "fixit, default rules": "rules on one file at a time, on LibCST",
    "torchfix": "rules on one file at a time, on LibCST; parses files with the word torch",
}


@dataclass(frozen=True)
class Measured:
    """One command on one tree."""

    tool: str
    tree: str
    cpu_s: float
    peak_mib: float
    """Of all its processes together; pages that several share count once."""
    wall_s: float
    exit_code: int
    note: str = ""


def measure(tool: str, tree: str, command: list[str], environment: dict[str, str], folder: Path) -> Measured:
    """Run a command once."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=folder, start_new_session=True
        )
        peak, note = 0, ""
        while process.poll() is None:
            peak = max(peak, sum(map(_memory_kib, _family(process.pid))))
            if time.monotonic() - begin > TIMEOUT_S:
                os.killpg(process.pid, 9)
                note = f"stopped after {TIMEOUT_S} s, not done"
            time.sleep(INTERVAL_S)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if not note and "Traceback" in said:
        note = "ended with a traceback: " + said.strip().splitlines()[-1][:120]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return Measured(
        tool, tree, round(used, 2), round(peak / 1024), round(time.monotonic() - begin, 2), process.returncode, note
    )


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        try:
            for thread in os.listdir(f"/proc/{each}/task"):
                found += map(int, Path(f"/proc/{each}/task/{thread}/children").read_text().split())
        except OSError:
            continue
    return found


def _memory_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def lines_of(path: Path) -> tuple[int, int]:
    """Python files, and their lines."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return len(files), sum(file.read_bytes().count(b"\n") for file in files if file.is_file())


def table(trees: dict[str, tuple[int, int]], found: list[Measured]) -> str:
    """A row a tool: CPU seconds, times ddaudit's without a kept result, and MiB, for each tree."""
    heads = [f"{name} ({files} files, {lines:,} lines)" for name, (files, lines) in trees.items()]
    rows = ["| tool | what it does | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    by_place = {(each.tool, each.tree): each for each in found}
    for tool, work in WORK.items():
        cells = []
        for tree in trees:
            each, ours = by_place.get((tool, tree)), by_place["ddaudit", tree]
            if each is None:
                cells.append("")
            elif each.note:
                cells.append(each.note)
            else:
                cells.append(f"{each.cpu_s:.2f} s ({each.cpu_s / ours.cpu_s:.2f} x), {each.peak_mib:.0f} MiB")
        rows.append(f"| {tool} | {work} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--research", type=Path, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    places = {"large tree": given.tree, "research code": given.research, "one file": given.file}
    ours = [sys.executable, "-c", "from ddaudit.auditor.cli import main; main()", "scan", "--format", "jsonl"]
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = ["--cache-dir", folder]
        for name, path in places.items():
            where = str(path.resolve())
            peers = given.peers.resolve()
            commands = {
                "ddaudit": [*ours, *kept, where],
                "ddaudit, kept result": [*ours, *kept, where],
                "ruff, F and E": [
                    str(peers / "ruff"), "check", "--isolated", "--no-cache", "--select", "F,E", "--quiet", where
                ],
                "fixit, default rules": [str(peers / "fixit"), "lint", where],
                "torchfix": [str(peers / "torchfix"), "--select", "ALL", where],
            }  # fmt: skip
            for tool, command in commands.items():
                environment = dict(os.environ)
                if not tool.startswith("ddaudit"):
                    environment.pop("PYTHONPATH", None)
                each = measure(tool, name, command, environment, Path(folder))
                found.append(each)
                print(f"{tool} on the {name}: {each.cpu_s} s, {each.peak_mib} MiB {each.note}", file=sys.stderr)
    trees = {name: lines_of(path) for name, path in places.items()}
    print(table(trees, found))
    if given.record:
        record = {
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "versions": _versions(given.peers),
            "trees": {name: {"files": files, "lines": lines} for name, (files, lines) in trees.items()},
            "measured": [asdict(each) for each in found],
        }
        given.record.write_text(json.dumps(record, indent=1) + "\n")


def _versions(peers: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({n: m.version(n) for n in ('ruff', 'fixit', 'torchfix', 'libcst')}))"
    )
    done = subprocess.run([peers / "python", "-c", code], capture_output=True, text=True, check=True)
    try:
        own = version("ddaudit")
    except ModuleNotFoundError:
        own = "a checkout"
    return {"ddaudit": own, **json.loads(done.stdout)}


if __name__ == "__main__":
    main()
