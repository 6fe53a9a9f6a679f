"""Prepares data with whichever Penstock is on PYTHONPATH and dumps every token's mask and origin.

    PYTHONPATH=CHECKOUT python -P benchmarks/segments.py

Run by path, so that `benchmarks` of one checkout can drive `penstock` of another; only the public API is used. It first
prints the location of its `penstock`. Then it reads requests from standard input, one JSON object per line: {"data":
[files], "tokenizer", "template", "out"}, writes an .npz file to `out` for each, and answers {} or {"error": …}. Arrays:

    source, row, side      per example: its origin
    offsets                first token of each example, and the total
    ids                    per token
    role, part, message    per token: its segment
    weight                 per token: the weight of its message; NaN if the row has none
    POLICY                 per token: the loss mask under this policy
    POLICY served          per example: whether the view includes it (regions known, something trained)
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import warnings
from typing import Any

import numpy as np

POLICIES = ("all_assistant_messages", "all_messages", "all_user_and_system_messages")
DATE = "2026-01-01"  # the same for both checkouts


def dump(request: dict[str, Any]) -> None:
    """Prepares files and writes the mask and origin of each token."""
    import penstock as ps

    with tempfile.TemporaryDirectory() as cache:
        dataset = ps.prepare(
            *request["data"], tokenizer=request["tokenizer"], template=request["template"], cache=cache, workers=1,
            on_bad_row="quarantine", dropped_tool_calls="keep", date=DATE,
        )  # fmt: skip
        found = segments(dataset)
        for policy in POLICIES:
            found[policy], found[f"{policy} served"] = masks(dataset, policy, found["offsets"])
    np.savez(request["out"], **found)


def segments(dataset: Any) -> dict[str, Any]:
    """The concatenated columns of all shards, with segments repeated for each of their tokens."""
    parts: dict[str, list[Any]] = {}
    table = dataset.manifest.shards
    for shard in range(len(dataset.shards.examples)):
        columns = dataset.shards.columns(shard)
        count = columns.examples
        lengths = run_lengths(columns)
        weights = columns.segment_weights
        for name, values in {
            "source": np.full(count, table.sources[shard]),
            "row": table.first_rows[shard] + columns.rows.astype(np.int64),
            "side": np.zeros(count, np.uint8) if columns.sides is None else columns.sides,
            "length": np.diff(columns.id_offsets),
            "ids": columns.ids[columns.id_offsets[0] : columns.id_offsets[count]],
            "role": np.repeat(columns.segment_roles, lengths),
            "part": np.repeat(columns.segment_parts, lengths),
            "message": np.repeat(columns.segment_messages, lengths),
            "weight": np.full(lengths.sum(), np.nan, np.float32) if weights is None else np.repeat(weights, lengths),
        }.items():
            parts.setdefault(name, []).append(values)
    found = {name: np.concatenate(values) for name, values in parts.items()}
    found["offsets"] = np.concatenate(([0], np.cumsum(found.pop("length"))))
    return found


def run_lengths(columns: Any) -> Any:
    """The number of tokens in each segment; `segment_ends` are relative to their example."""
    ends = columns.segment_ends.astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    first = columns.segment_offsets[:-1][np.diff(columns.segment_offsets) > 0]
    lengths[first] = ends[first]
    return lengths


def masks(dataset: Any, policy: str, offsets: Any) -> tuple[Any, Any]:
    """The loss mask of every token, and which examples the view includes."""
    mask, served = np.zeros(offsets[-1], bool), np.zeros(len(offsets) - 1, bool)
    view = dataset.view(train_on=policy, max_length=None, regions_unknown="drop")
    for item, number in enumerate(view.index.rows.tolist()):
        found = view[item]
        sides = (found.chosen, found.rejected) if dataset.is_preference else (found,)
        for example, side in enumerate(sides, start=number * len(sides)):
            mask[offsets[example] : offsets[example + 1]] = side.loss_mask
            served[example] = True
    return mask, served


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # keep library output out of the answers
    warnings.simplefilter("ignore")
    print(json.dumps({"penstock": importlib.util.find_spec("penstock").origin}), file=out, flush=True)
    for line in sys.stdin:
        answer: dict[str, str] = {}
        try:
            dump(json.loads(line))
        except Exception as error:  # one template's failure must not end the run
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
