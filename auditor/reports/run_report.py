"""A run's record as a table for people and as a file for machines."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ddaudit.auditor.record import VERDICTS
from ddaudit.auditor.reports.profile_report import format_profile
from ddaudit.auditor.reports.scan_report import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddaudit.auditor.record import (
        EntryRecord,
        Noise,
        PromptVerdict,
        RunRecord,
        SampleTest,
        SettledTies,
        StateCheck,
    )

_WIDTH = 100
_FEW_ACCEPTED = 1.1
_COLUMNS = ("entry", "tokens", "tokens/s", "speed-up", "x replay", "accepted", "rounds", "peak GiB", "verdict")


def format_run(record: RunRecord) -> str:
    """What ran on what, one row an entry, its stages, and why a verdict is not `identical`."""
    lines = [
        f"fork      {record.fork}",
        f"model     {record.model}" + (f", {record.dtype} on {record.device}" if record.dtype else ""),
        *(_describe_inputs(record) if record.prompt_lengths else []),
        f"versions  ddaudit {record.ddaudit_version}, torch {record.torch_version}, "
        f"transformers {record.transformers_version}",
    ]
    if record.noise:
        lines.append(f"noise     {_describe_noise(record.noise)}")
    if record.state_check:
        lines.append(f"state     {_describe_state(record.state_check)}")
    if record.execution == "replayed" or record.replay_warnings or record.device not in ("", "cpu"):
        lines.append(f"forwards  {_describe_execution(record)}")
        lines += textwrap.wrap("; ".join(record.replay_warnings), _WIDTH, initial_indent=" " * 10,
                               subsequent_indent=" " * 10)  # fmt: skip
    lines += ["", *_table(_rows(record)), *_counted_by(record), *_fastest(record), *format_profile(record)]
    for entry in [record.plain_replayed, *record.entries] if record.plain_replayed else record.entries:
        lines += _details(entry, record.nominal_acceptance)
    return "\n".join([*lines, "", _conclusion(record)]) + "\n"


def write_run(record: RunRecord, path: Path) -> None:
    """Write the record as JSON: the whole file or nothing."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record.to_json(), file, indent=2)
            file.write("\n")
        # mkstemp makes the file private, a record is as public as any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _conclusion(record: RunRecord) -> str:
    counts = {verdict: sum(entry.verdict == verdict for entry in record.entries) for verdict in VERDICTS}
    parts = [
        count(number, verdict) if verdict == "error" else f"{number} {verdict}"
        for verdict, number in counts.items()
        if number
    ]
    if record.state_check and record.state_check.verdict in ("differ", "error"):
        parts.append("and the cache's state is not shown to be right, see above")
    elif record.entries and counts["identical"] == len(record.entries):
        return "verdict: identical. Every entry's text is plain decoding's, token for token."
    elif record.entries and counts["distribution-preserving"] == len(record.entries):
        return "verdict: distribution-preserving. Every entry samples as the target alone would."
    return f"verdict: {', '.join(parts) or 'nothing was run'}."


def _describe_inputs(record: RunRecord) -> list[str]:
    drafter = textwrap.wrap(f"drafter   {record.drafter}", 120, subsequent_indent=" " * 10)
    return [*drafter, f"prompts   {_describe_prompts(record)}"]


def _describe_prompts(record: RunRecord) -> str:
    low, high = min(record.prompt_lengths), max(record.prompt_lengths)
    length = f"{low}" if low == high else f"{low} to {high}"
    temperature = f", temperature {record.temperature:g}" if record.temperature else ""
    return (
        f"{len(record.prompt_lengths)} of {length} tokens, {record.max_new_tokens} new tokens each, seed {record.seed}"
        f"{temperature}"
    )


def _describe_noise(noise: Noise) -> str:
    text = (
        f"stock blocks against stock single steps: gaps change by up to {noise.gap_max:.2g} logits, "
        f"{noise.num_flips} of {noise.num_positions} choices flip"
    )
    if noise.gap_max > noise.top2_gap_p50:
        # A wrong entry still shows by how many of its choices are not the model's own.
        text += f"; the median gap is {noise.top2_gap_p50:.2g}, so single tokens prove little on these weights"
    return text


def _describe_state(check: StateCheck) -> str:
    if not check.num_positions:
        return f"{check.verdict}: {check.reason}"
    number = {2: "two", 3: "three"}.get(check.num_patterns, f"{check.num_patterns}")
    text = (
        f"{number} rejection patterns of the same text agree at {check.num_positions - check.num_flips} of "
        f"{check.num_positions} choices"
    )
    if check.verdict == "agree":
        return f"{text}, logits within {check.largest_difference:.1g}"
    return (
        f"WRONG: {text}; {check.reason}; most, {check.largest_difference:.2g} logits, after token {check.position} "
        f"of prompt {check.prompt}"
    )


def _describe_execution(record: RunRecord) -> str:
    text = f"replayed, {count(record.num_graphs, 'graph')} captured" if record.execution == "replayed" else "eager"
    return text + ("; some run eagerly:" if record.replay_warnings else "")


def _rows(record: RunRecord) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    plain, replayed = record.plain, record.plain_replayed
    bases = [plain.tokens_per_s if plain else 0.0, replayed.tokens_per_s if replayed else 0.0]
    if plain:
        speeds = _speeds(plain.tokens_per_s, bases)
        rows.append(
            ("plain decoding", f"{plain.tokens}", *speeds, "1.00", "", _gib(plain.peak_memory_bytes), "reference")
        )
    for entry in [replayed, *record.entries] if replayed else record.entries:
        if entry.verdict == "error":
            rows.append((entry.name, *[""] * 7, "error"))
            continue
        rows.append(
            (
                entry.name,
                f"{entry.tokens}",
                *_speeds(entry.tokens_per_s, bases),
                "" if entry.acceptance_length_mean is None else f"{entry.acceptance_length_mean:.2f}",
                "" if entry.rounds is None else f"{entry.rounds}",
                _gib(entry.peak_memory_bytes),
                entry.verdict,
            )
        )
    return rows


def _speeds(tokens_per_s: float, bases: Sequence[float]) -> list[str]:
    return [f"{tokens_per_s:.1f}", *(f"{tokens_per_s / base:.2f}" if base else "" for base in bases)]


def _fastest(record: RunRecord) -> list[str]:
    """Against the baseline that is hard to beat, whichever way it comes out."""
    base = record.plain_replayed
    ran = [entry for entry in record.entries if entry.verdict != "error"]
    if not base or not base.tokens_per_s or not ran:
        return []
    best = max(ran, key=lambda entry: entry.tokens_per_s)
    ratio = best.tokens_per_s / base.tokens_per_s
    if ratio <= 1:
        text = f"no entry is faster than {base.name}; {best.name} comes nearest, at {ratio:.2f} of its speed"
    else:
        text = f"fastest: {best.name}, {ratio:.2f} times {base.name}"
    return ["", *textwrap.wrap(text, _WIDTH)]


def _counted_by(record: RunRecord) -> list[str]:
    """Where some figures are an entry's own and some measured: two entries with the same rounds may differ in them."""
    drafting = [entry for entry in record.entries if (entry.acceptance_length_mean or 1.0) != 1.0]
    measured = [entry.name for entry in drafting if entry.acceptance_source == "measured"]
    if not measured or len(measured) == len(drafting):
        return []
    text = (
        f"accepted is each entry's own count, the whole last round included; {', '.join(measured)} returns none, and "
        "what it returned is divided by its rounds"
    )
    return ["", *textwrap.wrap(text, _WIDTH)]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows below each other; a name that is too long for that stands on a line of its own, above its figures.

    A column without a figure is left out.
    """
    used = [i for i in range(len(_COLUMNS)) if i == 0 or not rows or any(row[i] for row in rows)]
    table = [[row[i] for i in used] for row in (_COLUMNS, *rows)]
    figures = [max(len(row[i]) for row in table) for i in range(1, len(used))]
    room = _WIDTH - sum(figures) - 2 * len(figures)
    first = max(len(row[0]) for row in table if len(row[0]) <= room)
    lines = []
    for name, *cells in table:
        if len(name) > room:
            lines += textwrap.wrap(name, _WIDTH)
            name = ""
        *numbers, verdict = cells
        padded = [cell.rjust(width) for cell, width in zip(numbers, figures, strict=False)]
        lines.append("  ".join([name.ljust(first), *padded, verdict]).rstrip())
    return lines


def _details(entry: EntryRecord, nominal_acceptance: float | None) -> list[str]:
    lines = []
    if entry.stage_s and entry.stage_source == "entry":
        stages = ", ".join(f"{name} {seconds:.3g}" for name, seconds in entry.stage_s.items())
        lines += textwrap.wrap(f"  seconds (its own clock): {stages}", _WIDTH, subsequent_indent="    ")
    if entry.measured_s and entry.rounds:
        lines.append(f"  a round (measured): {_describe_stages(entry.measured_s, entry.rounds)}")
    if entry.settled:
        text = f"  timed with near-ties settled: {_describe_settled(entry, entry.settled, nominal_acceptance)}"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="    ")
    if entry.error:
        lines.append(f"  error: {entry.error}")
        if entry.remedy:
            lines.append(f"  remedy: {entry.remedy}")
    if entry.sampling:
        lines += textwrap.wrap(f"  sampling: {_describe_sampling(entry.sampling)}", _WIDTH, subsequent_indent="    ")
        if 1 < (entry.acceptance_length_mean or 0) < _FEW_ACCEPTED:
            lines.append(
                "    hardly a draft was accepted, so that part was hardly tested: take a lower temperature too"
            )
    notable = [v for v in entry.prompts if v.verdict != "identical" or v.reason != "every token equal"]
    lines += [line for verdict in notable for line in _describe_verdict(verdict)]
    return ["", entry.name, *lines] if lines else []


def _describe_stages(seconds: dict[str, float], rounds: int) -> str:
    total = sum(seconds.values())
    parts = [f"{name} {1000 * value / rounds:.3g}" for name, value in seconds.items() if value]
    return f"{' + '.join(parts)} = {1000 * total / rounds:.3g} ms, {rounds} rounds, {total:.3g} s"


def _describe_settled(entry: EntryRecord, settled: SettledTies, nominal: float | None) -> str:
    text = (
        f"the token that plain decoding chose is given {settled.bias:.2g} logits more, which noise explains; "
        f"{settled.num_equal} of {settled.num_prompts} texts are plain decoding's then"
    )
    if settled.acceptance_length_mean and entry.acceptance_length_mean:
        text += f", and {entry.acceptance_length_mean:.2f} tokens a round, {settled.acceptance_length_mean:.2f} before"
    return text + (f"; a chain at the chances asked for has {nominal:.2f} on average" if nominal else "")


def _describe_sampling(test: SampleTest) -> str:
    text = (
        f"{test.verdict}: chi-square {test.statistic:.1f} over {test.num_cells} cells of {test.num_samples} tokens at "
        f"temperature {test.temperature:g}, p = {test.p_value:.2g}; the same tokens against temperature "
        f"{test.control_temperature:.3g}, which must fail: p = {test.control_p_value:.1g}"
    )
    if test.num_more is None:
        return f"{text}; no number of samples would tell the two apart: take a higher temperature"
    if test.num_more:
        return f"{text}; about {test.num_more} more samples are needed: --samples {test.num_samples + test.num_more}"
    return text


def _describe_verdict(verdict: PromptVerdict) -> list[str]:
    lines = [f"  prompt {verdict.prompt}: {verdict.verdict}: {verdict.reason}"]
    if verdict.divergence:
        at = verdict.divergence
        found, expected = _token(at.found, at.found_text), _token(at.expected, at.expected_text)
        # `repr`, so that a line break or an escape sequence of the text stays on its line.
        context = f" {at.context_text!r}" if at.context_text else ""
        lines.append(
            f"    token {at.position}: {found} instead of {expected}; top-2 gap {at.gap_reference:.3g}, "
            f"read back {at.gap_own_text:.3g} behind the best; after {' '.join(map(str, at.context_ids))}{context}"
        )
    return lines


def _token(token: int, text: str) -> str:
    return f"{token} {text!r}" if text else f"{token}"


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.2f}"
