"""The fused kernels at 27B size on a CUDA device: errors against float64, and times beside the bytes they must move.

    python tests/benchmarks/kernels.py [--only verify|commit|attention|draft] [--json FILE] [--jobs N] [--quick]

Each variant is checked first, in processes of their own that also fill Triton's cache; one that fails or is wrong is
not timed. A time is that of all layers of a forward in one CUDA graph, each layer with its own buffers, so that the
L2 cache holds no layer's state from one replay to the next.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_cases
from kernel_cases import AttentionCase, DeltaCase

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_DELTA_LAYERS, NUM_ATTENTION_LAYERS, NUM_DRAFT_LAYERS = 48, 16, 5
PATH = 9
"""Nodes of a committed path."""
OUTPUT_ERROR, STATE_ERROR = 6e-3, 1e-3
"""Beyond these a variant is wrong; `tf32` alone leaves about 3e-4 in the state."""


@dataclass(frozen=True)
class Variant:
    """One kernel, size and way of cutting it up."""

    kernel: str
    case: DeltaCase | AttentionCase
    launch: Any
    """None for what the op itself chooses."""

    def __str__(self) -> str:
        size = f"T={self.case.num_nodes}" + (f" past={self.case.past}" if hasattr(self.case, "past") else "")
        cut = asdict(self.launch) if self.launch else {"chosen by": "the op"}
        return f"{self.kernel} {size}  " + " ".join(f"{name}={value}" for name, value in cut.items())


def variants(quick: bool) -> list[Variant]:
    """What the op chooses comes first for each size."""
    from ddaudit.runtime.kernels.fused_attention import AttentionLaunch
    from ddaudit.runtime.kernels.fused_delta_rule import CommitLaunch, VerifyLaunch

    delta = functools.partial(
        DeltaCase, num_heads=48, num_key_heads=16, key_size=128, value_size=128, dtype=torch.bfloat16
    )
    full = functools.partial(AttentionCase, num_heads=24, num_key_heads=4, head_size=256, dtype=torch.bfloat16)
    # The drafter's block, over the context features of the tokens accepted last and its own mask tokens.
    draft = functools.partial(
        AttentionCase, 16, num_new=33, num_heads=32, num_key_heads=8, head_size=128, dtype=torch.bfloat16
    )
    found: list[Variant] = []
    cuts: dict[int, list[VerifyLaunch]] = {
        1: [VerifyLaunch(16, size, warps) for size in (16, 32, 64, 128) for warps in (2, 4, 8)],
        16: [VerifyLaunch(16, size, warps) for size in (16, 32, 64) for warps in (2, 4, 8)],
        64: [
            *(VerifyLaunch(64, size, warps) for size in (16, 32, 64) for warps in (4, 8)),
            *(VerifyLaunch(64, 32, warps, block_keys=keys) for warps in (4, 8) for keys in (32, 128)),
            *(VerifyLaunch(rows, 32, warps) for rows in (16, 32) for warps in (2, 4)),
            *(VerifyLaunch(64, 32, warps, precision=precision) for warps in (4, 8) for precision in ("tf32", "ieee")),
        ],
        80: [VerifyLaunch(rows, 32, warps) for rows in (16, 32, 64) for warps in (4, 8)],
    }
    for num_nodes, launches in cuts.items():
        found += [Variant("verify", delta(num_nodes), launch) for launch in (None, *launches)]
    commits = [CommitLaunch(keys, warps) for keys in (16, 32, 64, 128) for warps in (2, 4, 8)]
    found += [Variant("commit", delta(64), launch) for launch in (None, *commits)]
    for past in (1024, 8192, 32768):
        for num_nodes in (1, 16, 64, 80):
            rows = {1: (16,), 16: (32, 64, 128), 64: (64, 128), 80: (64, 128)}[num_nodes]
            few = (8, 16, 32, 64) if num_nodes == 1 else (3, 5, 10, 21)
            cut = [(32, 8, 3), (64, 8, 2)] if rows[-1] > 16 else [(32, 4, 3), (32, 4, 4), (64, 4, 3), (64, 4, 2)]
            attention = [
                AttentionLaunch(block_rows, keys, shares, warps if block_rows > 32 else 4, stages)
                for block_rows in rows
                for keys, warps, stages in cut
                for shares in few
            ]
            found += [Variant("attention", full(num_nodes, past), launch) for launch in (None, *attention)]
        windows = [AttentionLaunch(rows, 64, shares, 4, 3) for rows in (32, 64) for shares in (2, 4, 8, 16)]
        found += [Variant("draft", draft(past=past, window=2048), launch) for launch in (None, *windows)]
    return [variant for variant in found if variant.launch is None] if quick else found


def check(variant: Variant) -> dict[str, float] | str:
    """Errors, or what went wrong. In a worker process."""
    from ddaudit.runtime.kernels import fused_attention, fused_delta_rule

    try:
        with_launch = {"launch": variant.launch}
        if variant.kernel in ("attention", "draft"):
            attend = functools.partial(fused_attention.attend, **with_launch)
            errors = kernel_cases.attention_errors(variant.case, attend, "cuda")
        else:
            of = with_launch if variant.kernel == "verify" else {}
            verify = functools.partial(fused_delta_rule.verify, **of)
            of = with_launch if variant.kernel == "commit" else {}
            errors = kernel_cases.delta_errors(
                variant.case, verify, functools.partial(fused_delta_rule.commit, **of), "cuda"
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return {"output": errors.pop("output"), "state": max(errors.values(), default=0.0)}


def graph_seconds(step: Callable[[], None], repeats: int = 7) -> float:
    """The median replay of a graph of `step`."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_seconds(lambda: target.copy_(source))


def size_of(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@functools.lru_cache(maxsize=1)
def layers_of(case: DeltaCase | AttentionCase, num_layers: int) -> list[list[Any]]:
    """Arguments for each layer, each in memory of its own but for what layers share."""
    if isinstance(case, DeltaCase):
        first, _ = kernel_cases.delta_inputs(case, "cuda")
        shared = {6}
    else:
        first = kernel_cases.attention_inputs(case, "cuda")
        shared = {5, 6, 7}
    return [
        [x.clone() if isinstance(x, torch.Tensor) and place not in shared else x for place, x in enumerate(first)]
        for _ in range(num_layers)
    ]


def measure(variant: Variant) -> tuple[float, int]:
    """Seconds for all layers of a forward, and the bytes that these must read and write."""
    from ddaudit.runtime.kernels import fused_attention, fused_delta_rule

    case, launch = variant.case, variant.launch
    if variant.kernel in ("attention", "draft"):
        layers = layers_of(case, NUM_ATTENTION_LAYERS if variant.kernel == "attention" else NUM_DRAFT_LAYERS)
        query, key, value, key_buffer = layers[0][:4]
        read = min(case.past, case.window or case.past)
        past = 2 * size_of(key_buffer) * read // key_buffer.shape[2]
        num_bytes = past + 2 * size_of(query) + 2 * size_of(key, value)

        def attend() -> None:
            for arguments in layers:
                fused_attention.attend(*arguments, launch=launch)

        return graph_seconds(attend), num_bytes * len(layers)

    layers = layers_of(case, NUM_DELTA_LAYERS)
    if variant.kernel == "verify":

        def verify() -> None:
            for arguments in layers:
                fused_delta_rule.verify(*arguments, launch=launch)

        return graph_seconds(verify), (size_of(*layers[0]) + size_of(layers[0][2])) * len(layers)

    stacked = [torch.stack([arguments[place] for arguments in layers]).nan_to_num(0.0) for place in (5, 7, 8, 9)]
    path = torch.arange(case.num_nodes, device="cuda")
    num = torch.tensor([PATH], device="cuda")
    read = sum(size_of(x) for x in stacked[1:]) * PATH // case.num_nodes
    step = functools.partial(fused_delta_rule.commit, *stacked, path, num, launch=launch)
    return graph_seconds(step), 2 * size_of(stacked[0]) + read


def is_right(errors: dict[str, float] | str) -> bool:
    return not isinstance(errors, str) and errors["output"] <= OUTPUT_ERROR and errors["state"] <= STATE_ERROR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=("verify", "commit", "attention", "draft"))
    parser.add_argument("--quick", action="store_true", help="only what the ops choose themselves")
    parser.add_argument("--jobs", type=int, default=12, help="processes that check and compile")
    parser.add_argument("--json", type=Path, help="where to write every figure")
    options = parser.parse_args()

    chosen = [variant for variant in variants(options.quick) if not options.only or variant.kernel in options.only]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        checked = pool.map(check, chosen, chunksize=1)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    for variant, errors in zip(chosen, checked, strict=True):
        row: dict[str, Any] = {"variant": str(variant), "kernel": variant.kernel, "nodes": variant.case.num_nodes}
        row |= {"past": getattr(variant.case, "past", None), "errors": errors}
        if is_right(errors):
            row["seconds"], row["bytes"] = measure(variant)
            row["floor ratio"] = row["seconds"] * bandwidth / row["bytes"]
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"bandwidth": bandwidth, "rows": rows}, indent=1))

    sizes = list(dict.fromkeys((row["kernel"], row["nodes"], row["past"]) for row in rows))
    for size in sizes:
        of_size = [row for row in rows if (row["kernel"], row["nodes"], row["past"]) == size]
        timed = sorted((row for row in of_size if "seconds" in row), key=lambda row: row["seconds"])
        for row in [*timed, *(row for row in of_size if "seconds" not in row)]:
            if "seconds" not in row:
                print(f"  not timed                              {row['variant']}  {row['errors']}")
                continue
            errors = row["errors"]
            print(
                f"{row['seconds'] * 1e6:9.1f} us {row['bytes'] / 1e6:8.1f} MB {row['floor ratio']:6.2f} x floor"
                f"  error {errors['output']:.1e} state {errors['state']:.1e}  {row['variant']}"
            )
        print(flush=True)


if __name__ == "__main__":
    main()
