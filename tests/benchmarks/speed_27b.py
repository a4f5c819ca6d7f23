"""How fast a fork is at 27B size: each figure beside the floor measured in the same process. Not a test.

    python tests/benchmarks/speed_27b.py patched/ddtree --out tests/records/h200-qwen3.6-27b-fast.json \
        --entry dflash:dflash_generate --entry ddtree:ddtree_generate --arg tree_budget=64

The result is written after every section, so a run that is cut off keeps what it has measured. On a CPU, with
`--model tiny-hybrid` and small `--contexts`, it goes through the same sections in a minute and replays nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ddaudit.auditor.facts.entries import find_entries
from ddaudit.auditor.reports.run_report import format_run
from ddaudit.runtime import crop_cache, keep_in_cache, make_cache
from ddaudit.runtime.caches.mode import eager_only, replay_log
from ddaudit.runtime.caches.takeover import cache_argument
from ddaudit.runtime.checks.decoding import clock
from ddaudit.runtime.models.loading import Target, choose_device, load_target
from ddaudit.runtime.running.metering import metered, peak_memory_bytes, reset_peak_memory
from ddaudit.runtime.running.profiling import kv_bytes, measure_floor, num_bytes, state_bytes
from ddaudit.runtime.running.run import RunOptions, parse_argument, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddaudit.auditor.record import Entry, Floor, RunRecord

START = time.perf_counter()
ACCEPTED = 4
"""Nodes kept of each tree in the loops of our own."""
WARM_UP = 3
"""Rounds before those that are timed: kernels are compiled and graphs captured in them."""
LIMITS = {"one token": 1.2, "chain of 16": 1.3, "tree of 64": 1.4}
"""What a replayed forward should take at most, in times of reading the weights."""


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


class Bench:
    """The target, and the result so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        device = choose_device(options.device)
        say(f"loading {options.model}")
        self.target: Target = load_target(
            options.model, random_weights=True, loader="causal-lm", dtype=options.dtype, device=device, seed=0
        )
        self.model = self.target.model
        self.result: dict[str, Any] = {
            "model": self.target.description,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "python_version": platform.python_version(),
            "torch_version": torch.__version__,
            "transformers_version": transformers.__version__,
            "fork": options.fork.resolve().name,
        }
        self.floor: Floor | None = None
        self._prefill_s = 0.0

    def write(self) -> None:
        # Beside it first: a run that is cut off while it writes keeps the file from before.
        beside = self.options.out.with_suffix(".part")
        beside.write_text(json.dumps(self.result, indent=2) + "\n", encoding="utf-8")
        beside.replace(self.options.out)

    # -- forwards of our own -----------------------------------------------------------------------------------

    def measure_floor(self) -> None:
        self.floor = measure_floor(self.model)
        self.result["floor"] = asdict(self.floor)
        say(f"floor: {self.floor.copy_bytes_per_s / 1e9:.0f} GB/s, weights in {1000 * self.floor.weight_read_s:.2f} ms")

    def forwards(self) -> None:
        """One token, a chain and a tree, replayed and eager, at each context."""
        self.result["forwards"] = found = {}
        for context in self.options.contexts:
            for mode in ("replayed", "eager"):
                with eager_only(mode == "eager"), replay_log() as log:
                    rows = self._forwards_at(context, self.options.rounds if mode == "replayed" else 6)
                found[f"{context} {mode}"] = {**rows, "num_graphs": log.num_graphs, "refusals": log.refusals}
                self.write()

    def _forwards_at(self, context: int, rounds: int) -> dict[str, Any]:
        shapes = {"one token": [-1], "chain of 16": chain(16), "chain of 64": chain(64), "tree of 64": tree(64)}
        rows: dict[str, Any] = {}
        reset_peak_memory(self.model.device)
        cache = self._filled(context)
        rows["prefill_s"] = self._prefill_s
        for name, parents in shapes.items():
            for _ in range(WARM_UP):
                self._round(cache, parents, cache.get_seq_length())
            with metered(self.model, None, 0, self.model.device) as meter:
                for _ in range(rounds):
                    self._round(cache, parents, cache.get_seq_length())
            seconds = {stage: total / rounds for stage, total in meter.stage_s().items() if stage != "draft"}
            rows[name] = {**seconds, "x_weights": seconds["verify"] / self._weight_read_s, "limit": LIMITS.get(name)}
            say(f"{context:6d} {name:12s} verify {1000 * seconds['verify']:.2f} ms, {rows[name]['x_weights']:.2f} x")
        rows["memory"] = self._memory(cache, cache.get_seq_length())
        return rows

    def long_text(self) -> None:
        """Tree after tree over many tokens: the memory and the number of graphs must level off."""
        points: list[dict[str, int]] = []
        with replay_log() as log:
            cache, parents = self._filled(self.options.contexts[0]), tree(64)
            start = cache.get_seq_length()
            step = self.options.long_tokens // 4
            for end in range(step, self.options.long_tokens + 1, step):
                while cache.get_seq_length() - start < end:
                    self._round(cache, parents, cache.get_seq_length())
                memory = self._memory(cache, cache.get_seq_length())
                points.append({"tokens": end, "num_graphs": log.num_graphs, **memory})
                say(f"{end} tokens: {log.num_graphs} graphs, {memory['allocated_bytes'] / 1e9:.3f} GB allocated")
                self.result["long_text"] = points
                self.write()

    def _filled(self, context: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._vocabulary, (1, context), generator=generator).to(self.model.device)
        cache = make_cache(self.model)
        begin = clock(self.model.device)
        with torch.inference_mode():
            self._call(ids, cache, torch.arange(context, device=ids.device)[None], logits_to_keep=1)
        self._prefill_s = clock(self.model.device) - begin
        return cache

    def _round(self, cache: Any, parents: list[int], start: int) -> None:
        """Verify and commit as forks do: ids, positions and a mask made anew, hidden states asked for."""
        device, length = self.model.device, len(parents)
        depths, visible = [], torch.eye(length, dtype=torch.bool)
        for node, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if parent >= 0:
                visible[node] |= visible[parent]
        ids = torch.arange(length, device=device)[None] % self._vocabulary
        positions = start + torch.tensor([depths], device=device)
        arguments: dict[str, Any] = {}
        is_tree = parents != chain(length)
        if is_tree:
            mask = torch.zeros(1, 1, length, start + length, dtype=self.model.dtype, device=device)
            mask[..., start:].masked_fill_(~visible.to(device), torch.finfo(self.model.dtype).min)
            arguments["attention_mask"] = mask
        with torch.inference_mode():
            self._call(ids, cache, positions, output_hidden_states=True, **arguments)
            if is_tree:
                path = [length - 1]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                keep_in_cache(cache, start, path[:ACCEPTED])
            else:
                crop_cache(cache, start + 1)

    def _call(self, ids: torch.Tensor, cache: Any, positions: torch.Tensor, **arguments: Any) -> None:
        name = cache_argument(self.model)
        self.model(ids, position_ids=positions, use_cache=True, **{name: cache}, **arguments)

    def _memory(self, cache: Any, length: int) -> dict[str, int]:
        device = self.model.device
        held = num_bytes(self.model.parameters()) + kv_bytes(cache, length) + state_bytes(cache)
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        peak = peak_memory_bytes(device)
        return {"allocated_bytes": allocated, "peak_bytes": peak, "peak_over_weights_and_cache": peak - held}

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def _weight_read_s(self) -> float:
        if self.floor is None:
            self.measure_floor()
        assert self.floor is not None
        return self.floor.weight_read_s

    # -- the fork's own rounds ---------------------------------------------------------------------------------

    def fork(self, name: str, context: int, new_tokens: int, drafter: str, eager: bool, checks_state: bool) -> None:
        options = RunOptions(
            model=self.options.model, random_weights=True, drafter=drafter, dtype=self.options.dtype,
            device=self.options.device, max_new_tokens=new_tokens, num_prompts=1, prompt_tokens=context,
            checks_state=checks_state, eager=eager, profile=True,
        )  # fmt: skip
        arguments = [parse_argument(text) for text in self.options.arg]

        def keep(record: RunRecord) -> None:
            self.result.setdefault("runs", {})[name] = record.to_json()
            self.write()

        record = run(self.options.fork, self._entries(), arguments, options, say, self.target, keep)
        keep(record)
        print(format_run(record), flush=True)
        self.result.setdefault("table", []).extend(table_rows(name, record))

    def _entries(self) -> list[Entry]:
        found = find_entries(self.options.fork)
        wanted = self.options.entry or [entry.name for entry in found]
        return [entry for entry in found if entry.name in wanted]


def chain(length: int) -> list[int]:
    return list(range(-1, length - 1))


def tree(num_nodes: int, longest: int = 16) -> list[int]:
    """A main path, then branches of it as long as there are nodes left: the shape of a budgeted tree. The last node
    hangs on the end of the main path, so that its path is a long one."""
    parents = chain(min(longest - 1, num_nodes - 1))
    depth = len(parents)
    branch = 0
    while len(parents) < num_nodes - 1:
        parents.append(branch % depth if branch < depth else len(parents) - depth)
        branch += 1
    return [*parents, depth - 1]


def table_rows(name: str, record: RunRecord) -> list[dict[str, Any]]:
    """Tokens a second and the mean round of each row of one run, beside the floor of that run."""
    rows: list[dict[str, Any]] = []
    plain, replayed = record.plain, record.plain_replayed
    if plain:
        rows.append(
            {"run": name, "entry": "plain decoding", "tokens_per_s": plain.tokens_per_s, "verdict": "reference"}
        )
    for entry in [replayed, *record.entries] if replayed else record.entries:
        row = {
            "run": name,
            "entry": entry.name,
            "execution": record.execution,
            "tokens_per_s": entry.tokens_per_s,
            "over_plain": entry.tokens_per_s / plain.tokens_per_s if plain and plain.tokens_per_s else None,
            "over_replayed": entry.tokens_per_s / replayed.tokens_per_s if replayed and replayed.tokens_per_s else None,
            "acceptance_length_mean": entry.acceptance_length_mean,
            "nominal_acceptance_of_a_chain": record.nominal_acceptance,
            "rounds": entry.rounds,
            "round_ms": {cost.name: 1000 * cost.seconds for cost in entry.costs},
            "peak_memory_bytes": entry.peak_memory_bytes,
            "verdict": entry.verdict,
            "error": entry.error,
        }
        if record.floor and entry.costs:
            row["round_x_weights"] = entry.costs[-1].seconds / record.floor.weight_read_s
        rows.append(row)
    return rows


def sections(bench: Bench) -> dict[str, Callable[[], None]]:
    """In the order of what a run that is cut off should have."""
    options = bench.options
    first, *others = options.contexts
    few = options.new_tokens // 4

    def fork(name: str, context: int, new: int, drafter: str = "", eager: bool = False, state: bool = False) -> Any:
        return lambda: bench.fork(name, context, new, drafter or options.drafter, eager, state)

    return {
        "floor": bench.measure_floor,
        "scripted": fork("scripted", first, options.new_tokens),
        "forwards": bench.forwards,
        "random-drafter": fork("random-drafter", first, few, drafter="random"),
        "eager": fork("eager", first, few, eager=True),
        **{f"scripted-{context}": fork(f"scripted-{context}", context, few) for context in others},
        "long-text": bench.long_text,
        "random-drafter-eager": fork("random-drafter-eager", first, few // 2, drafter="random", eager=True),
        "state": fork("state", first, few, state=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fork", type=Path, help="a fork made by `ddaudit fix`")
    parser.add_argument("--out", type=Path, required=True, help="JSON, written after every section")
    parser.add_argument("--model", default="qwen3.6-27b", help="a built-in profile, built with random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafter", default="scripted:0.8+random")
    parser.add_argument("--entry", action="append", default=[], help="default: all that are found")
    parser.add_argument("--arg", action="append", default=[], help="NAME=VALUE for the entries, as for `ddaudit run`")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=20, help="of each forward that is timed")
    parser.add_argument("--sections", nargs="+", help="only these")
    parser.add_argument("--budget-s", type=float, default=500, help="begin no section after so many seconds")
    options = parser.parse_args()
    bench = Bench(options)
    todo = sections(bench)
    if unknown := set(options.sections or ()) - set(todo):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(todo)}")
    for name, section in todo.items():
        if options.sections and name not in options.sections:
            continue
        if time.perf_counter() - START > options.budget_s:
            say(f"no time for {name}")
            bench.result.setdefault("skipped", []).append(name)
            continue
        say(f"== {name}")
        begin = time.perf_counter()
        try:
            section()
        except Exception as error:  # the next section may still be measured
            bench.result.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:1000]
            say(f"{name} failed: {type(error).__name__}: {error}")
        bench.result.setdefault("section_s", {})[name] = time.perf_counter() - begin
        bench.write()
        # What one section leaves is not the next one's memory.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    say("done")
    for row in bench.result.get("table", []):
        print(json.dumps({key: value for key, value in row.items() if not isinstance(value, dict)}))
    sys.exit(1 if bench.result.get("errors") else 0)


if __name__ == "__main__":
    main()
