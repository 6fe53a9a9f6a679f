"""Measures the speed of the reference engines, relative to transformers.

    python -m benchmarks.reference --data FILE.jsonl … --model FOLDER … [--rows 60] [--rounds 3]

Rows reach the reference renderer if a template does not compile or a row is unusual, and both reference engines in
checks. For each model and file, the same rows are prepared by the reference renderer with the fast encoder (`rendered`)
and by both references (`both`), and encoded by transformers' `apply_chat_template` (with masks if the template has
{% generation %} tags), in turns; speeds are CPU time, the best of several rounds. Every row is compared token by token.
Prints JSON. Exits with 1 if a ratio is below 1.5 or a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clock import DATE, stop_clock
from benchmarks.meters import chosen, conversations
from benchmarks.oracle import Oracle, has_null_content
from penstock.build.options import prepare_options
from penstock.prepare.chat.formats import detect
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import make_recipe
from penstock.prepare.slice_record import SliceRecord
from penstock.prepare.sources.slices import SliceRows
from penstock.prepare.tokenizer.files import load_tokenizer

TIMES = 1.5


def pipelines(model: Path, lines: Sequence[bytes]) -> dict[str, Pipeline]:
    """Pipelines without the machine, with the fast encoder and without it."""
    folder = load_tokenizer(model)
    options = prepare_options(
        {"tokenizer": str(model), "date": str(DATE), "dropped_tool_calls": "keep", "on_bad_row": "quarantine"}
    )
    recipe = make_recipe(options, detect([json.loads(line) for line in lines[:20]], options), folder)
    both, rendered = (Pipeline(recipe, folder.tokenizer_json, fast=fast) for fast in (False, True))
    rendered.renderings = both.renderings
    rendered._usual = None
    rendered.encoder.encode([b"a b " * 1_000_000])  # enough to start the fast engine
    return {"rendered": rendered, "both": both}


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """The CPU seconds and the result of a call."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def same_tokens(record: SliceRecord, expected: Sequence[list[int]]) -> bool:
    """Whether a result has exactly these examples."""
    columns = record.columns
    ends = columns.id_offsets.tolist()
    found = [columns.ids[ends[k] : ends[k + 1]].tolist() for k in range(columns.examples)]
    return found == list(expected)


def measure(model: Path, file: Path, count: int, rounds: int) -> dict[str, Any] | None:
    """Both ratios on the first rows of a file that the template accepts; None if there are none."""
    lines, given = conversations(str(model), file.read_bytes().splitlines()[:count])
    kept = [number for number, conversation in enumerate(given) if not has_null_content(conversation)]
    lines, given = [lines[number] for number in kept], [given[number] for number in kept]
    if not lines:
        return None
    oracle, templates = Oracle(model), load_tokenizer(model).templates

    def peer() -> list[list[int]]:
        return [
            oracle.tokenizer.apply_chat_template(
                one["messages"], tools=one["tools"], chat_template=chosen(templates, one), tokenize=True,
                return_dict=True, return_assistant_tokens_mask="generation %}" in chosen(templates, one),
                **one["variables"],
            )["input_ids"]
            for one in given
        ]  # fmt: skip

    rows, expected = SliceRows(lines, list(range(1, len(lines) + 1))), peer()
    ours, theirs, same = pipelines(model, lines), [], True
    times: dict[str, list[float]] = {name: [] for name in ours}
    for _ in range(rounds):
        theirs.append(cpu(peer)[0])
        for name, pipeline in ours.items():
            took, record = cpu(lambda pipeline=pipeline: pipeline.run(rows))  # type: ignore[misc]
            times[name].append(took)
            same &= same_tokens(record, expected)
    ratios = {name: round(min(theirs) / min(own), 2) for name, own in times.items()}
    return {"model": model.name, "file": file.stem, "rows": len(lines), "same_tokens": same, **ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="folders with a tokenizer and template")
    parser.add_argument("--rows", type=int, default=60, help="of each file")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    stop_clock()
    pairs = [(model, file) for model in arguments.model for file in arguments.data]
    measured = [measure(model, file, arguments.rows, arguments.rounds) for model, file in pairs]
    found = [one for one in measured if one is not None]
    missed = [one for one in found if not one["same_tokens"] or min(one["rendered"], one["both"]) < TIMES]
    print(json.dumps({"target": TIMES, "results": found, "missed": len(missed)}, indent=2))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
