"""A run's profile as a table: each stage of a round beside what moving its data alone would take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddaudit.auditor.record import Floor, RunRecord, StageCost

_WIDTH = 100
_COLUMNS = ("a mean round", "ms", "MB", "floor ms", "x floor", "x weights")


def format_profile(record: RunRecord) -> list[str]:
    """Nothing without a profile: `x floor` is a stage against its own bytes, `x weights` against the weights alone."""
    floor = record.floor
    if floor is None:
        return []
    rows: list[tuple[str, ...]] = []
    if record.plain and record.plain.costs:
        rows.append(_row("plain decoding", record.plain.costs[-1], floor))
    if record.plain_replayed and record.plain_replayed.costs:
        rows.append(_row(record.plain_replayed.name, record.plain_replayed.costs[-1], floor))
    for entry in record.entries:
        if entry.costs:
            *stages, whole = entry.costs
            rows.append(_row(entry.name, whole, floor))
            rows += [_row(f"  {stage.name}", stage, floor) for stage in stages if stage.seconds]
    if not rows:
        return []
    speed = f"copying moves {floor.copy_bytes_per_s / 1e9:.4g} GB/s"
    weights = f"reading the target's {_megabytes(floor.weight_bytes)} MB of weights takes {_ms(floor.weight_read_s)} ms"
    return ["", f"profile: on this device {speed}, {weights}", *_table(rows)]


def _row(name: str, cost: StageCost, floor: Floor) -> tuple[str, ...]:
    return (
        name,
        _ms(cost.seconds),
        _megabytes(cost.bytes) if cost.bytes else "",
        _ms(cost.floor_s) if cost.floor_s else "",
        "" if cost.ratio is None else f"{cost.ratio:.3g}",
        f"{cost.seconds / floor.weight_read_s:.3g}",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    table = [_COLUMNS, *rows]
    figures = [max(len(row[i]) for row in table) for i in range(1, len(_COLUMNS))]
    room = _WIDTH - sum(figures) - 2 * len(figures)
    first = max(len(row[0]) for row in table if len(row[0]) <= room)
    lines = []
    for name, *cells in table:
        if len(name) > room:
            lines.append(name)
            name = ""
        padded = [cell.rjust(width) for cell, width in zip(cells, figures, strict=True)]
        lines.append("  ".join([name.ljust(first), *padded]).rstrip())
    return lines


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.2f}" if milliseconds >= 1 else f"{milliseconds:.2g}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f}" if count >= 1e8 else f"{count / 1e6:.2g}"
