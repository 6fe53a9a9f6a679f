"""Independent readers for every format, written from the formats' specifications without Penstock's code."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Sequence = tuple[list[int], list[bool]]  # ids, and which of them are trained
Row = list[Sequence]


def read(to: str, folder: Path) -> list[Row]:
    """The rows of an export, each a list of sequences; a pair has the chosen and the rejected side."""
    return list(READERS[to](folder))


def table(folder: Path) -> list[dict[str, Any]]:
    """The rows of all Arrow or Parquet files, in the documented order."""
    if (folder / "state.json").exists():
        names = [file["filename"] for file in json.loads((folder / "state.json").read_text())["_data_files"]]
        tables = [pa.ipc.open_stream((folder / name).read_bytes()).read_all() for name in names]
    else:
        tables = [pq.read_table(path) for path in sorted((folder / "data").glob("*.parquet"))]
    return [row for found in tables for row in found.to_pylist()]


def _split(row: Row, lengths: list[int]) -> Row:
    ((ids, mask),) = row
    cuts = np.cumsum([0, *lengths]).tolist()
    assert cuts[-1] == len(ids) == len(mask)
    return [(ids[a:b], mask[a:b]) for a, b in pairwise(cuts)]


def _labelled(ids: list[int], labels: list[int]) -> Sequence:
    assert len(ids) == len(labels)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return ids, [label != -100 for label in labels]


def _plain(rows: list[dict[str, Any]]) -> Iterator[Row]:
    for row in rows:
        if "prompt_ids" in row:
            prompt, unscored = row["prompt_ids"], [False] * len(row["prompt_ids"])
            sides = ("chosen", "rejected")
            yield [(prompt + row[f"{s}_ids"], unscored + list(map(bool, row[f"{s}_mask"]))) for s in sides]
            continue
        mask = row.get("loss_mask")
        whole = (row["input_ids"], list(map(bool, mask))) if mask else _labelled(row["input_ids"], row["labels"])
        yield _split([whole], row.get("seq_lengths", [len(whole[0])]))


def _trl(folder: Path) -> Iterator[Row]:
    for row in table(folder):
        if "prompt_ids" in row:
            prompt = row["prompt_ids"]
            sides = (row["chosen_ids"], row["rejected_ids"])
            yield [(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for ids in sides]
            continue
        whole = _labelled(row["input_ids"], row["labels"])
        assert whole[1] == list(map(bool, row["assistant_masks"])) == list(map(bool, row["completion_mask"]))
        yield _split([whole], row.get("seq_lengths", [len(whole[0])]))


def _axolotl(folder: Path) -> Iterator[Row]:
    for row in table(folder):
        assert list(row) == ["input_ids", "attention_mask", "labels"]
        assert row["attention_mask"] == [1] * len(row["input_ids"])
        yield [_labelled(row["input_ids"], row["labels"])]


def _skyrl_cache(folder: Path) -> Iterator[Row]:
    for row in table(folder):
        assert len(row["loss_mask"]) == row["num_actions"] < len(row["input_ids"]) == len(row["attention_mask"])
        before = len(row["input_ids"]) - row["num_actions"]
        yield [(row["input_ids"], [False] * before + list(map(bool, row["loss_mask"])))]


def _torchtune(folder: Path) -> Iterator[Row]:
    return ([_labelled(row["tokens"], row["labels"])] for row in table(folder))


def _nemo(folder: Path) -> Iterator[Row]:
    """The mask at t is for predicting t+1, as in GPTSFTPackedDataset: mask[s:e-1] goes with labels ids[s+1:e]."""
    for row in table(folder):
        ids, bounds = row["input_ids"], [*row["seq_start_id"], len(row["input_ids"])]
        found: Row = []
        for s, e in pairwise(bounds):
            assert row["loss_mask"][e - 1] == 0
            found.append((ids[s:e], [False, *map(bool, row["loss_mask"][s : e - 1])]))
        yield found


def _olmo(folder: Path) -> Iterator[Row]:
    dtype = json.loads((folder / "penstock.json").read_text())["facts"]["dtype"]
    for path in sorted(folder.glob("token_ids_part_*.npy")):
        ids = np.fromfile(path, dtype)
        mask = np.fromfile(path.with_name(path.name.replace("token_ids", "labels_mask")), np.bool_)
        assert len(ids) == len(mask)
        upto = 0
        with gzip.open(path.with_suffix(".csv.gz"), "rt") as lines:
            for line in lines:
                start, end = map(int, line.split(","))
                assert start == upto
                upto = end
                yield [(ids[start:end].tolist(), mask[start:end].tolist())]
        assert upto == len(ids)


def indexed(path: Path) -> list[list[int]]:
    """The sequences of a Megatron .bin/.idx pair."""
    index = path.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
    assert (version, documents) == (1, sequences + 1)
    dtype = np.dtype({1: np.uint8, 4: np.int32, 8: np.uint16}[code])
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    assert np.frombuffer(index, "<i8", documents, 34 + 12 * sequences).tolist() == list(range(documents))
    assert len(index) == 34 + 12 * sequences + 8 * documents
    data = path.with_suffix(".bin").read_bytes()
    assert len(data) == lengths.sum() * dtype.itemsize
    return [np.frombuffer(data, dtype, n, at).tolist() for n, at in zip(lengths, pointers, strict=True)]


def _megatron(folder: Path) -> Iterator[Row]:
    if (folder / "data").exists():
        yield from _nemo(folder)
        return
    for ids, mask in zip(indexed(folder / "tokens"), indexed(folder / "loss_mask"), strict=True):
        yield [(ids, list(map(bool, mask)))]


def _jsonl(folder: Path) -> Iterator[Row]:
    lines = [line for path in sorted((folder / "data").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return _plain([json.loads(line) for line in lines])


READERS = {
    "axolotl": _axolotl,
    "hf": lambda folder: _plain(table(folder)),
    "jsonl": _jsonl,
    "megatron": _megatron,
    "nemo": _nemo,
    "olmo": _olmo,
    "parquet": lambda folder: _plain(table(folder)),
    "skyrl": lambda folder: _plain(table(folder)),
    "skyrl_cache": _skyrl_cache,
    "torchtune": _torchtune,
    "trl": _trl,
    "verl": lambda folder: _plain(table(folder)),
}
