"""Compares collating with transformers' collators and random reads with `datasets`, on equal tensors in one run.

    python -m benchmarks.collate [--rows 20000] [--json FILE]

padded         batches of 32 examples, compared with `DataCollatorForSeq2Seq`
packed         the same batches flattened, compared with `DataCollatorWithFlattening` with all its fields
reads          random examples as tensors, compared with `datasets` and `with_format("torch")`
hidden         the share of the collation time that is hidden if a step takes as long as collating (and twice as long)

Theirs get Python lists that are already in memory; ours reads its examples from memory-mapped shards, builds labels
from the loss policy and, in the loader, computes the order of rows too. Ratios are of medians, with both sides measured
alternately in blocks. Exits with 1 if a target is missed or a tensor differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from penstock.arrays import Int64
from penstock.load.collate import Batch, Padding, packed, padded
from penstock.load.gather import Gatherer
from penstock.load.loader import Loader
from penstock.load.prefetch import Prefetcher
from penstock.load.torch_datasets import MapRows, TensorConverter
from penstock.load.view import View
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.columns import Columns
from penstock.store.shard import ShardMeta, encode_shard, read_shard
from tests.support.memory_dataset import MemoryDataset

ROWS: Final = 32
MEAN_LENGTHS: Final = (300, 800, 2000)
TURN: Final = [
    (Role.USER, Part.BODY), (Role.ASSISTANT, Part.HEADER), (Role.ASSISTANT, Part.BODY),
    (Role.ASSISTANT, Part.STOP), (Role.ASSISTANT, Part.TAIL),
]  # fmt: skip


def shard(lengths: Int64, first_row: int, rng: np.random.Generator) -> Columns:
    """Chats of the given lengths in tokens, with one to four turns each."""
    turns = np.clip(lengths // 64, 1, 4)
    segments = turns * len(TURN)
    offsets = np.concatenate(([0], np.cumsum(segments)))
    number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], segments)
    ends = (number + 1) * np.repeat(lengths, segments) // np.repeat(segments, segments)
    tokens = np.concatenate(([0], np.cumsum(lengths)))
    return Columns(
        ids=rng.integers(0, 50_000, int(tokens[-1])).astype(np.uint32),
        id_offsets=tokens,
        segment_offsets=offsets,
        segment_ends=ends.astype(np.uint32),
        segment_roles=np.tile(np.array([role for role, _ in TURN], np.uint8), int(turns.sum())),
        segment_parts=np.tile(np.array([part for _, part in TURN], np.uint8), int(turns.sum())),
        segment_messages=(number // len(TURN) * 2 + (number % len(TURN) > 0)).astype(np.int32),
        segment_weights=None,
        rows=np.arange(first_row, first_row + len(lengths), dtype=np.uint32),
        row_hashes=rng.integers(0, 2**63, len(lengths)).astype(np.uint64),
        sides=None,
    )


def make_view(folder: Path, rows: int, mean: int) -> View:
    """A view over real, memory-mapped shard files."""
    rng = np.random.default_rng(mean)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.18, 0.6, rows), 16, 16 * mean).astype(np.int64)
    shards = []
    for number, first in enumerate(range(0, rows, 1000)):
        path = folder / f"{mean}-{number}.arrow"
        path.write_bytes(encode_shard(shard(lengths[first : first + 1000], first, rng), ShardMeta({}, [], {})))
        shards.append(read_shard(path)[0])
    return MemoryDataset(tuple(shards), f"b3-benchmark-{mean}").view()


def in_turn(ours: Callable[[int], object], theirs: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """Median seconds of both, measured in ten alternating blocks so that both see the same noise."""
    times: tuple[list[float], list[float]] = ([], [])
    block = -(-rounds // 10)
    for first in range(0, rounds, block):
        for side, call in zip(times, (ours, theirs), strict=True):
            for number in range(first, min(first + block, rounds)):
                began = time.perf_counter()
                call(number)
                side.append(time.perf_counter() - began)
    return float(np.median(times[0])), float(np.median(times[1]))


def compare(ours: Callable[[int], Any], theirs: Callable[[int], Any], rounds: int) -> dict[str, float]:
    """Checks that the tensors are equal, then compares the times."""
    mine, other = ours(0), theirs(0)
    for name, value in other.items():
        assert torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(value)), f"{name} differs"
    own, peer = in_turn(ours, theirs, rounds)
    return {"ours, ms": own * 1e3, "theirs, ms": peer * 1e3, "times as fast": peer / own}


def collators(view: View, rounds: int) -> dict[str, dict[str, float]]:
    """Padded and packed batches of one view."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, PreTrainedTokenizerFast

    gather, convert = Gatherer(view), TensorConverter(pin_memory=False, device=None)
    order = np.random.default_rng(0).permutation(len(view))[: rounds * ROWS].reshape(rounds, ROWS)
    features = [
        [{"input_ids": e.input_ids.tolist(), "labels": e.labels.tolist()} for e in map(view.example, items.tolist())]
        for items in order
    ]
    backend = Tokenizer(models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    seq2seq = DataCollatorForSeq2Seq(tokenizer)
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return {
        "padded": compare(
            lambda at: convert(padded(gather(order[at]), 0, Padding())[0]), lambda at: seq2seq(features[at]), rounds
        ),
        "packed": compare(
            lambda at: convert(packed(gather(order[at]), 1, 0, Padding())[0]),
            lambda at: flattening(features[at]),
            rounds,
        ),
    }


def loader_speed(view: View, rounds: int) -> dict[str, float]:
    """The speed of a complete serial loader, including the order of rows."""
    times = {}
    for collate, options in (("padded", {}), ("packed", {"capacity": int(view.lengths.max())})):
        loader = Loader(view, batch_size=ROWS, steps=rounds, collate=collate, framework="torch", prefetch=0, **options)  # type: ignore[arg-type]
        list(loader)
        began, tokens = time.perf_counter(), 0
        for batch in loader:
            tokens += batch.counts.tokens
        times[f"{collate}, million tokens a second"] = tokens / (time.perf_counter() - began) / 1e6
    return times


def stored_copy(view: View, folder: str) -> Any:
    """The same examples in a memory-mapped `datasets` folder."""
    import datasets

    datasets.disable_progress_bars()
    examples = (view.example(number) for number in range(len(view)))
    rows = [{"input_ids": example.input_ids, "labels": example.labels} for example in examples]
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return datasets.load_from_disk(folder).with_format("torch")


def reads(view: View, rounds: int) -> dict[str, dict[str, float]]:
    """Random examples as tensors: one at a time, and 32 at once."""
    rows, order = MapRows(view), np.random.default_rng(1).permutation(len(view))
    together = order[: rounds // 20 * ROWS].reshape(-1, ROWS).tolist()

    def one(at: int) -> dict[str, Any]:
        example = view.example(order[at])
        return {"input_ids": torch.from_numpy(example.input_ids), "labels": torch.from_numpy(example.labels)}

    def many(at: int) -> list[dict[str, Any]]:
        return [{name: torch.from_numpy(row[name]) for name in row} for row in rows.__getitems__(together[at])]

    with tempfile.TemporaryDirectory() as folder:
        stored = stored_copy(view, folder)
        alone = compare(one, lambda at: stored[int(order[at])], rounds)
        own, peer = in_turn(many, lambda at: stored[together[at]], len(together))
    return {
        "one at a time": alone,
        "32 at once": {"ours, ms": own * 1e3, "theirs, ms": peer * 1e3, "times as fast": peer / own},
    }


def hidden(view: View, factor: float) -> dict[str, float]:
    """The share of the collation time that a loop doesn't wait for if a step takes `factor` times as long.

    Collation is timed in the thread where it happens; a step takes as long as the mean so far or the last batch,
    whichever is longer, so that it is never shorter than collating, even on a busy machine.
    """
    capacity = int(view.lengths.max())
    loader = Loader(view, batch_size=64, collate="packed", capacity=capacity, steps=150, prefetch=0)
    loader.batch(0)  # build the plan first, as in a run
    taken: list[float] = []

    def produce(step: int) -> Batch:
        began = time.perf_counter()
        batch = loader.batch(step)
        taken.append(time.perf_counter() - began)
        return batch

    waited = stepping = 0.0
    with Prefetcher(produce, 0, len(loader), slots=2) as prefetcher:
        for step in range(len(loader)):
            began = time.perf_counter()
            prefetcher.get(step)
            served = time.perf_counter()
            time.sleep(factor * max(float(np.mean(taken)), taken[-1]))
            waited, stepping = waited + served - began, stepping + time.perf_counter() - served
    return {"collating, s": sum(taken), "step, s": stepping, "waited, s": waited, "hidden": 1 - waited / sum(taken)}


def measure(rows: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mean in MEAN_LENGTHS:
            view = make_view(Path(folder), rows if mean < 2000 else rows // 4, mean)
            rounds = 100 if mean < 2000 else 40
            results[f"{mean} tokens a row"] = {**collators(view, rounds), "loader": loader_speed(view, rounds)}
            if mean == MEAN_LENGTHS[0]:
                small = make_view(Path(folder), 4000, mean + 1)
                results["random reads"] = reads(small, 2000)
            if mean == MEAN_LENGTHS[1]:
                results["hidden, step as long as collating"] = hidden(view, 1.0)
                results["hidden, step twice as long"] = hidden(view, 2.0)
    return results


def missed_targets(results: dict[str, Any]) -> list[str]:
    """The targets that the figures miss."""
    targets = {"random reads 5 times": results["random reads"]["one at a time"]["times as fast"] >= 5}
    for mean in MEAN_LENGTHS:
        found = results[f"{mean} tokens a row"]
        targets[f"padded 30 times at {mean}"] = found["padded"]["times as fast"] >= 30
        targets[f"packed {5 if mean < 800 else 10} times at {mean}"] = found["packed"]["times as fast"] >= (
            5 if mean < 800 else 10
        )
    targets["90% hidden"] = results["hidden, step as long as collating"]["hidden"] >= 0.9
    return [name for name, kept in targets.items() if not kept]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = measure(chosen.rows)
    for name, value in results.items():
        print(name)
        for figure, found in value.items():
            print(f"  {figure:30}", json.dumps(found))
    failed = missed_targets(results)
    for target in failed:
        print(f"MISSED: {target}")
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
