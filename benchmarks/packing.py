"""Compares packing with TRL's packer: time, fill of rows, uniformity of steps, balance of work across ranks.

    python -m benchmarks.packing [--count 1000000] [--json FILE]

On chat-like (capacity 8192) and reasoning-like (16384) lengths, all in one run:

planned        seconds to plan an epoch and find its first step
trl            seconds of TRL's `bfd` on the same lengths (on a part of them, scaled up; without real tokens)
efficiency     tokens / (rows × capacity), also of TRL and of global best-fit decreasing
scatter        deviation of a step's mean length from the epoch's, in standard errors of a random partition: root mean
               square over steps of 64 rows (and of 8), the maximum, and the share that exceeds 3 (`beyond_3`)
balance        max / mean over 8 ranks of Σ length², averaged over steps of 64 rows and of 8 rows
seek           seconds to find step 1,000,000 for the first time, and then another step, packed and padded

Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.arrays import Int32
from penstock.load.assemble import shares, work_of
from penstock.load.options import PlanOptions
from penstock.load.plan import Plan
from tests.support.lengths import Lengths, best_fit_decreasing, chat_like, reasoning_like

CASES: Final = {"chat-like": (chat_like, 8192), "reasoning-like": (reasoning_like, 16384)}
TRL_ROWS: Final = 50_000
STEPS: Final = 3000  # maximum number of steps to examine per epoch


def trl_packer(lengths: Int32, capacity: int) -> tuple[float, int]:
    """Seconds and rows of TRL's packer as users run it, 1000 rows at a time, with one-byte tokens."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    tokens = pa.LargeListArray.from_arrays(offsets, np.zeros(int(offsets[-1]), np.int8))
    table = datasets.Dataset(pa.table({"input_ids": tokens}))
    began = time.perf_counter()
    packed = pack_dataset(table, capacity, "bfd", {"keep_in_memory": True, "load_from_cache_file": False})
    return time.perf_counter() - began, len(packed)


def sampled_steps(plan: Plan) -> range:
    """Full steps, spread over the epoch."""
    full = plan.steps_in(0) - 1
    return range(0, full, max(full // STEPS, 1))


def scatter(lengths: Int32, plan: Plan) -> dict[str, float]:
    """Deviation of full steps' mean lengths from the epoch's, in standard errors of a random partition."""
    found = []
    for step in sampled_steps(plan):
        own = lengths[plan.at(step).items]
        found.append((own.mean() - lengths.mean()) / (lengths.std() / np.sqrt(len(own))))
    errors = np.abs(found)
    rms = float(np.sqrt(np.mean(errors**2)))
    return {"rms": rms, "largest": float(errors.max()), "beyond_3": float(np.mean(errors > 3)), "steps": len(errors)}


def balance(lengths: Int32, plan: Plan, ranks: int = 8) -> dict[str, float]:
    """Mean over steps of max / mean Σ length² over ranks, balanced and in the plan's order."""
    rows, even, plain = plan.settings.batch_size, [], []
    for step in sampled_steps(plan):
        taken = plan.at(step)
        work = work_of(lengths[taken.items].astype(np.float64), taken.counts)
        loads = [sum(work[row] for row in rank[0]) for rank in shares(work, rows, ranks, None)]
        even.append(max(loads) / np.mean(loads))
        unbalanced = work.reshape(ranks, -1).sum(axis=1)
        plain.append(unbalanced.max() / unbalanced.mean())
    return {"balanced": float(np.mean(even)), "as planned": float(np.mean(plain))}


def seek(served: Lengths, capacity: int | None) -> dict[str, float]:
    firsts = []
    for _ in range(3):
        began = time.perf_counter()
        plan = Plan(served, PlanOptions(64, capacity))
        plan.at(1_000_000)
        firsts.append(time.perf_counter() - began)
    first = min(firsts)
    began = time.perf_counter()
    plan.at(999_983)
    return {"first": first, "then": time.perf_counter() - began}


def measure(name: str, count: int) -> dict[str, Any]:
    """All figures of one case."""
    draw, capacity = CASES[name]
    lengths = draw(count)
    served, tokens = Lengths(lengths), int(lengths.sum(dtype=np.int64))
    times, processor = [], []
    for _ in range(3):
        began, used = time.perf_counter(), time.process_time()
        plan = Plan(served, PlanOptions(64, capacity))
        plan.at(0)
        times.append(time.perf_counter() - began)
        processor.append(time.process_time() - used)
    rows = (plan.steps_in(0) - 1) * 64 + len(plan.at(plan.steps_in(0) - 1).counts)
    part = lengths[:TRL_ROWS]
    trl_seconds, trl_rows = trl_packer(part, capacity)
    decreasing = best_fit_decreasing(lengths, capacity)
    return {
        "lengths": count,
        "planned seconds": min(times),
        "planned seconds, all runs": times,
        "planned processor seconds": min(processor),
        "trl seconds, scaled": trl_seconds * count / len(part),
        "times as fast as trl": trl_seconds * count / len(part) / min(times),
        "efficiency": tokens / (rows * capacity),
        "efficiency, global best-fit decreasing": tokens / (decreasing * capacity),
        "efficiency, trl": int(part.sum(dtype=np.int64)) / (trl_rows * capacity),
        "scatter, 64 rows": scatter(lengths, plan),
        "scatter, 8 rows": scatter(lengths, Plan(served, PlanOptions(8, capacity))),
        "balance, 64 rows": balance(lengths, plan),
        "balance, 8 rows": balance(lengths, Plan(served, PlanOptions(8, capacity))),
        "bytes a row, kept": plan.nbytes / count,
        "seek packed": seek(served, capacity),
        "seek padded": seek(served, None),
    }


def missed_targets(result: dict[str, Any]) -> list[str]:
    """The targets that the figures miss."""
    per_million = 1e6 / result["lengths"]
    targets = {
        "planned in 0.6 s per million": result["planned seconds"] * per_million < 0.6,
        "within 0.1 points of best-fit decreasing": result["efficiency"]
        > result["efficiency, global best-fit decreasing"] - 0.001,
        "mean length of every step of 64 rows within 3 standard errors": result["scatter, 64 rows"]["largest"] < 3,
        "work of 64 rows over 8 ranks": result["balance, 64 rows"]["balanced"] <= 1.1,
        "packed seek": result["seek packed"]["first"] * per_million < 0.6 and result["seek packed"]["then"] < 0.05,
        "padded seek": result["seek padded"]["first"] < 0.05,
    }
    return [name for name, kept in targets.items() if not kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results, failed = {}, False
    for name in CASES:
        results[name] = measure(name, arguments.count)
        print(f"\n{name}")
        for figure, value in results[name].items():
            print(f"  {figure:42}", json.dumps(value, default=float))
        for target in missed_targets(results[name]):
            failed = True
            print(f"  MISSED: {target}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
