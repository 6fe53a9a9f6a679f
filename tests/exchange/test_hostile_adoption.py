"""Damaged and hostile sources of `adopt`: each is refused in one line that names the file, and nothing is committed."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import penstock as ps
from penstock.errors import PenstockError

pytestmark = pytest.mark.slow

IDS = [[10, 11, 12, 13], [7], [20, 21]]
MASK = [[0, 1, 1, 0], [1], [1, 1]]
FLAT_IDS, FLAT_MASK = [*chain(*IDS)], [*chain(*MASK)]
NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    """A source to write into a folder, and part of the expected message."""

    name: str
    write: Callable[[Path], Path | None]  # returns the source; None: the folder
    says: str
    options: dict[str, Any] = {}  # noqa: RUF012


def _lines(rows: list[Any], name: str = "rows.jsonl") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / name).write_text("".join(f"{text}\n" for text in texts))
        return folder / name

    return write


def _parquet(**columns: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pq.write_table(pa.table(columns), folder / "rows.parquet")
        return folder / "rows.parquet"

    return write


def _bytes(name: str, data: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    """A good file whose bytes are changed."""

    def write(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data(_good(path.suffix)))
        return path

    return write


def _good(suffix: str) -> bytes:
    table = pa.table(
        {"input_ids": pa.array(IDS, pa.list_(pa.int32())), "loss_mask": pa.array(MASK, pa.list_(pa.int8()))}
    )
    sink = pa.BufferOutputStream()
    match suffix:
        case ".parquet":
            pq.write_table(table, sink)
        case ".arrow":
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        case _:
            text = b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist())
            return {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix, bytes)(text)
    return sink.getvalue().to_pybytes()


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _values() -> Iterator[Case]:
    """Wrong values in the columns of JSON lines and Parquet."""
    row = {"input_ids": IDS[0], "loss_mask": MASK[0]}
    for text, says in {
        "3.5": "has the value 3.5", "3.0": "must hold integers", "-1": "the id -1 is not one of",
        "99999": "the id 99999",
        "2147483648": "the id 2147483648", "9223372036854775808": "rows.jsonl", "18446744073709551615": "rows.jsonl",
        "1e30": "must hold integers", "1e400": "rows.jsonl:2", "true": "rows.jsonl:2", '"5"': "rows.jsonl",
        "null": "missing value",
        "[1]": "rows.jsonl", "{}": "rows.jsonl", "NaN": "not valid JSON", "-0.0": "must hold integers",
    }.items():  # fmt: skip
        for column in ("input_ids", "tokens"):
            first = {column: [5, 6]}
            yield Case(f"{column} {text}", _lines([first, f'{{"{column}": [1, {text}]}}']), says)
    for column in ("loss_weights", "loss_mask", "assistant_masks", "completion_mask"):
        for value in (NAN, INF, -INF, -1.0, -0.5, 1e39):
            weights = [[0.0, 1.0, value, 1.0], [1.0], [1.0, 1.0]]
            yield Case(f"{column} {value}", _parquet(input_ids=IDS, **{column: weights}), "finite number from 0 up")
        yield Case(f"{column} -1", _lines([row, {"input_ids": [5], column: [-1]}][1:]), "finite number from 0 up")
        yield Case(f"{column} text", _lines([{"input_ids": [5], column: ["1"]}]), "not numbers")
        yield Case(f"{column} short", _lines([{"input_ids": [5, 6], column: [1]}]), "2 ids but 1 entries")
        yield Case(f"{column} null", _lines([{"input_ids": [5, 6], column: [1, None]}]), "missing value")
        yield Case(
            f"{column} absent later", _lines([{"input_ids": [5], column: [1]}, {"input_ids": [5]}]), ":2: no value"
        )
        yield Case(
            f"{column} absent first", _lines([{"input_ids": [5]}, {"input_ids": [5], column: [1]}]), ":1: no value"
        )
    yield Case("fractions", _parquet(input_ids=[[1, 3.5]]), "row 1: 'input_ids' has the value 3.5 of type float64")
    yield Case("whole floats", _parquet(tokens=[[1.0, 3.0]]), "must hold integers")
    yield Case("bools", _parquet(input_ids=[[True, False]]), "must hold integers")
    yield Case("texts", _parquet(input_ids=[["a"]]), "string, indices=int32, ordered=0>, not numbers")
    yield Case("no list", _parquet(input_ids=[1, 2]), "not a list per row")
    yield Case("null row", _parquet(input_ids=[[1], None]), "row 2: no value")
    yield Case(
        "huge", _parquet(input_ids=pa.array([[2**64 - 1]], pa.list_(pa.uint64()))), "is not one of the tokenizer"
    )
    yield Case("negative", _parquet(input_ids=[[5], [-5]]), "row 2: the id -5 is not one of")
    yield Case("fractional label", _parquet(input_ids=[[5]], labels=[[5.0]]), "must hold integers")
    yield Case("shifted labels", _parquet(input_ids=[[5, 6]], labels=[[6, -100]]), "must not be shifted")


def _shapes() -> Iterator[Case]:
    """Packed rows, SkyRL's short masks and pairs that contradict themselves."""
    ids, mask = [[1, 2, 3, 4, 5]], [[1, 1, 1, 1, 1]]
    for column, values in (
        ("seq_lengths", ([3], [5, 1], [6, -1], [-1, 6], [2, -2, 5], [], [2.5, 2.5])),
        ("seq_start_id", ([1], [0, 6], [0, 3, 2], [0, -1], [], [0.5])),
    ):
        for value in values:
            kind = pa.list_(pa.float64() if any(isinstance(v, float) for v in value) else pa.int64())
            says = "must hold integers" if 0.5 in value or 2.5 in value else "do not add up"
            packed = {"input_ids": ids, "loss_mask": mask, column: pa.array([value], kind)}
            yield Case(f"{column} {value}", _parquet(**packed), says)
    for actions, given in ((4, [1, 1]), (6, [1] * 6), (None, [1]), ("2", [1, 1]), (-1, [1]), (2.5, [1, 1])):
        row = {"input_ids": ids[0], "loss_mask": given, "num_actions": actions}
        yield Case(f"num_actions {actions}", _lines([row]), "rows.jsonl:1: num_actions is")
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}
    for name in ("prompt_ids", "rejected_ids"):
        yield Case(f"no {name}", _lines([{k: v for k, v in pair.items() if k != name}]), f"no column '{name}'")
    for name, value, says in (
        ("prompt_ids", [1.5], "must hold integers"), ("chosen_ids", None, "no value"), ("rejected_ids", [-4],
        "the id -4"),
        ("chosen_mask", [1, 1], "1 ids but 2 entries"), ("rejected_mask", [], "2 ids but 0"),
        ("rejected_weights", [1, -1], "finite number"), ("chosen_weights", [1e39], "finite number"),
    ):  # fmt: skip
        yield Case(f"pair {name} {value}", _lines([pair | {name: value}]), says)
    yield Case("pairs and rows", _lines([pair, {"input_ids": [1]}]), "rows.jsonl")


def _files() -> Iterator[Case]:
    """Damaged, truncated and misnamed files."""
    for name, cuts in (("rows.parquet", (4, 30, 0.5, -8, -1)), ("rows.arrow", (4, 30, 0.5, 0.8))):
        for cut in cuts:
            yield Case(f"{name} cut {cut}", _bytes(name, lambda d, c=cut: d[: int(c * len(d)) if c % 1 else c]), name)
    for name in ("rows.jsonl.gz", "rows.jsonl.zst"):
        for cut in (3, 12, 0.5, -1):
            yield Case(f"{name} cut {cut}", _bytes(name, lambda d, c=cut: d[: int(c * len(d)) if c % 1 else c]), name)
        yield Case(f"{name} flipped", _bytes(name, lambda d: _flipped(d, len(d) // 2)), name)
        yield Case(f"{name} not packed", _bytes(name, lambda _: b'{"input_ids": [1]}\n'), "not a")
    for at in (-9, -100):
        yield Case(
            f"parquet flipped {at}", _bytes("rows.parquet", lambda d, a=at: _flipped(d, len(d) + a)), "rows.parquet"
        )
    yield Case("parquet page", _bytes("rows.parquet", lambda d: d[:4] + b"\xff" * 40 + d[44:]), "rows.parquet")
    yield Case("text as parquet", _bytes("rows.parquet", lambda _: b'{"input_ids": [1]}\n'), "not a Parquet file")
    yield Case("text as arrow", _bytes("rows.arrow", lambda _: b'{"input_ids": [1]}\n'), "not an Arrow file")
    yield Case("arrow offsets", _bytes("rows.arrow", _with_wrong_offsets), "rows.arrow")
    for name in ("rows.parquet", "rows.arrow", "rows.jsonl", "rows.jsonl.gz"):
        yield Case(f"empty {name}", _bytes(name, lambda _: b""), "empty")
    for text, says in (
        ('{"input_ids": [1', ":1: not valid JSON"), ("[1, 2]", "The rows of an array are JSON objects"), ("5",
        ":1: a row must"),
        ("{'input_ids': [1]}", "not valid JSON"), ("{" * 3000, "not valid JSON"), ("{}", "no column input_ids"),
        ('{"input_ids": [1]}\n{"input_ids": [', ":2: not valid JSON"), ('{"input_ids": [1]} x', "not valid JSON"),
        ('{"messages": []}', "Use `penstock prepare`"), ('[{"input_ids": [1]}, {"input_ids": [1.5]}]', "rows.jsonl"),
        ('[{"input_ids": [1]}, {"inp', "rows.jsonl"), ("\0\0\0", "rows.jsonl"), ("\n\n \n", "no rows"),
    ):  # fmt: skip
        yield Case(f"lines {text[:24]!r}", _lines([text]), says)
    yield Case("utf-16", _bytes("rows.jsonl", lambda d: d.decode().encode("utf-16")), "UTF-16")
    yield Case("csv", _lines(["input_ids", "1"], "rows.csv"), "csv can't be adopted")
    yield Case(
        "a folder's name", lambda folder: (folder / "rows.jsonl").mkdir() or folder / "rows.jsonl", "nothing to adopt"
    )  # type: ignore[func-returns-value]
    yield Case("a folder inside", lambda folder: (folder / "rows.jsonl").mkdir(), "rows.jsonl")


def _with_wrong_offsets(data: bytes) -> bytes:
    """An Arrow file whose list offsets lead outside of the values."""
    offsets = np.array([0, 4, 5, 7], np.int32).tobytes()
    assert data.count(offsets) == 2
    return data.replace(offsets, np.array([0, 4, 5, 2_000_000_000], np.int32).tobytes(), 1)


def _saved() -> Iterator[Case]:
    """`save_to_disk` folders whose descriptions lead elsewhere or nowhere."""

    def folder_with(state: str, name: str = "state.json", inside: str = "saved") -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            (folder / inside).mkdir(parents=True)
            for data in (folder / "secret.arrow", folder / inside / "data.arrow"):
                data.write_bytes(_good(".arrow"))
            (folder / inside / name).write_text(state.replace("ABSOLUTE", str(folder)))
            return folder / inside

        return write

    for listed in (
        "../secret.arrow",
        "ABSOLUTE/secret.arrow",
        "a/../../secret.arrow",
        "",
        ".",
        "..",
        "no.arrow",
        "a\\u0000b",
    ):
        says = "is missing" if listed == "no.arrow" else "not a file in this folder"
        yield Case(f"lists {listed!r}", folder_with(f'{{"_data_files": [{{"filename": "{listed}"}}]}}'), says)
    good = '"_data_files": [{"filename": "data.arrow"}]'
    for state in (
        "", "[]", "{", "{}", "null", '{"_data_files": 5}', '{"_data_files": [5]}', '{"_data_files": [{}]}',
        '{"_data_files": [{"filename": null}]}', '{"_data_files": []}', '{"_data_files": null}',
        f'{{{good}, "_indices_files": [{{"filename": "i.arrow"}}]}}',
    ):  # fmt: skip
        yield Case(f"state {state}", folder_with(state), "saved")
    for state in (
        "", "{}", '{"splits": ["../saved"]}', '{"splits": [".."]}', '{"splits": ["ABSOLUTE"]}', '{"splits": 5}',
        '{"splits": ["train"]}', '{"splits": [null]}', '{"splits": []}',
    ):  # fmt: skip
        yield Case(f"dict {state}", folder_with(state, "dataset_dict.json"), "saved")


def _indexed(change: dict[str, Any]) -> Callable[[Path], None]:
    """A Megatron dataset, with some of its parts changed."""

    def write(folder: Path) -> None:
        for name, code, itemsize in (("tokens", 4, 4), ("loss_mask", 2, 1)):
            own = {key.removeprefix(f"{name}."): value for key, value in change.items() if key.startswith(name)}
            lengths, values = own.get("lengths", [4, 1, 2]), FLAT_IDS if name == "tokens" else FLAT_MASK
            offsets = own.get("offsets", [0, 4 * itemsize, 5 * itemsize])
            head = struct.pack(
                "<QBQQ", own.get("version", 1), own.get("code", code), own.get("count", 3), own.get("documents", 4)
            )
            index = own.get("magic", b"MMIDIDX\0\0") + head + np.array(lengths, "<i4").tobytes()
            index += np.array(offsets, "<i8").tobytes() + np.arange(4, dtype="<i8").tobytes()
            data = np.array(own.get("values", values), np.int32 if itemsize == 4 else np.int8).tobytes()
            (folder / f"{name}.idx").write_bytes(index[: own.get("cut")])
            (folder / f"{name}.bin").write_bytes(data[: own.get("size")])
        for name in change.get("missing", ()):
            (folder / name).unlink()

    return write


def _megatron() -> Iterator[Case]:
    outside, damaged = "are not within the 7 tokens", "can't be read"
    for changes, says in (
        ({"offsets": [-4, 16, 20]}, outside), ({"offsets": [0, 16, -8]}, outside), ({"offsets": [0, 16, 24]}, outside),
        ({"offsets": [0, 16, 2**62]}, outside), ({"lengths": [4, -1, 2]}, outside), ({"lengths": [-4, 1, 2]}, outside),
        ({"lengths": [4, 1, 3]}, outside), ({"lengths": [2**31 - 1, 1, 2]}, outside), ({"offsets": [1, 16, 20]},
        "not the start of an id"),
        ({"offsets": [0, 18, 20]}, "not the start of an id"), ({"offsets": [0, 12, 20]}, "overlap"),
        ({"offsets": [0, 16, 16]}, "overlap"),
        ({"magic": b"MMIDIDX\0\1"}, "not the index"), ({"version": 2}, damaged), ({"code": 6}, damaged),
        ({"code": 7}, damaged),
        ({"code": 0}, damaged), ({"code": 200}, damaged), ({"count": 2**63}, damaged), ({"count": 40}, damaged),
        ({"documents": 2**40}, damaged), ({"cut": 9}, "not the index"), ({"cut": 33}, "not the index"),
        ({"cut": 40}, damaged),
        ({"cut": 60}, damaged), ({"cut": -1}, damaged), ({"cut": 0}, "not the index"), ({"size": 27}, "not a multiple"),
        ({"size": 24}, "are not within the 6 tokens"), ({"size": 0}, "are not within the 0 tokens"),
        ({"values": [1, 2, 3, -4, 5, 6, 7]}, "the id -4"), ({"values": [1, 2, 3, 4, 5, 6, 99999]},
        "row 3: the id 99999"),
    ):  # fmt: skip
        yield Case(f"tokens {changes}", _indexed({f"tokens.{k}": v for k, v in changes.items()}), says)
    for changes, says in (
        ({"values": [0, 1, 1, -1, 1, 1, 1]}, "row 1: 'loss_mask' has the value -1"), ({"lengths": [3, 2, 2]},
        "overlap"),
        ({"lengths": [4, 0, 2]}, "differ"), ({"offsets": [0, -1, 5]}, outside), ({"size": 6},
        "are not within the 6"), ({"cut": 50}, damaged),
    ):  # fmt: skip
        yield Case(f"mask {changes}", _indexed({f"loss_mask.{k}": v for k, v in changes.items()}), says)
    yield Case("no bin", _indexed({"missing": ["tokens.bin"]}), "tokens.bin: can't be read")
    yield Case("no mask bin", _indexed({"missing": ["loss_mask.bin"]}), "loss_mask.bin: can't be read")

    def without_index(folder: Path) -> Path:
        _indexed({"missing": ["tokens.idx"]})(folder)
        return folder / "tokens.bin"

    yield Case("no idx", without_index, "tokens.idx: can't be read")


def _olmo(change: dict[str, Any]) -> Callable[[Path], None]:
    """A part of OLMo-core, with some of its files changed."""

    def write(folder: Path) -> None:
        ids = np.array(change.get("ids", FLAT_IDS), np.uint16).tobytes()
        (folder / "token_ids_part_0000.npy").write_bytes(ids[: change.get("size")])
        mask = bytes(change.get("mask", FLAT_MASK))
        (folder / "labels_mask_part_0000.npy").write_bytes(mask)
        bounds = gzip.compress(change.get("bounds", "0,4\n4,5\n5,7\n").encode(), mtime=0)
        (folder / "token_ids_part_0000.csv.gz").write_bytes(change.get("packed", lambda data: data)(bounds))
        if "manifest" in change:
            (folder / "penstock.json").write_text(change["manifest"])
        for name in change.get("missing", ()):
            (folder / name).unlink()

    return write


def _olmo_cases() -> Iterator[Case]:
    outside, damaged = "are not within the 7 tokens", "is not the start and end of a document"
    for bounds, says in {
        "-4,4\n4,5\n5,7\n": outside, "0,4\n4,5\n-2,7\n": outside, "0,4\n5,4\n5,7\n": outside,
        "0,4\n4,5\n5,8\n": outside,
        "0,4\n4,-1\n": outside, "0,4\n3,7\n": "overlap", "0,7\n0,7\n": "overlap", "0,4.5\n": damaged,
        "0,4\nx,7\n": damaged,
        "0\n": damaged, ",\n": damaged, "0,\n": damaged, "0,1e3\n": damaged, f"0,{10**30}\n": damaged,
        "nan,4\n": damaged,
        "0,4\n" + "7,7\n" * 20: "more documents than", "0" * 100_000: damaged, "": "no bounds of documents",
        "0;4\n": damaged,
    }.items():  # fmt: skip
        yield Case(f"bounds {bounds[:20]!r}", _olmo({"bounds": bounds}), says)
    for name, packed in (
        ("truncated", lambda data: data[:-9]), ("cut short", lambda data: data[:12]),
        ("flipped", lambda data: _flipped(data, -6)),
        ("not gzip", lambda _: b"0,4\n4,5\n5,7\n"), ("empty", lambda _: b""), ("zeros", lambda _: bytes(40)),
    ):  # fmt: skip
        yield Case(f"gzip {name}", _olmo({"packed": packed}), "csv.gz")
    for change, says in (
        ({"mask": [0, 1, 7, 0, 1, 1, 1]}, "byte 2 is 7"), ({"mask": [1, 1]}, "2 entries for 7 tokens"),
        ({"mask": []}, "0 entries for 7"),
        ({"size": 13}, "not a multiple"), ({"size": 12}, "for 6 tokens"), ({"size": 0}, "for 0 tokens"),
        ({"ids": [1, 2, 3, 4, 5, 6, 60_000]}, "row 3: the id 60000"), ({"missing": ["token_ids_part_0000.csv.gz"]},
        "is missing"),
        ({"manifest": "{"}, "does not give the type"), ({"manifest": "{}"}, "does not give the type"),
        ({"manifest": '{"facts": {"dtype": "float32"}}'}, "does not give the type"), ({"manifest": "[]"},
        "does not give the type"),
        ({"manifest": '{"facts": {"dtype": "uint32"}}'}, "not a multiple"),
    ):  # fmt: skip
        yield Case(f"olmo {change}", _olmo(change), says)
    yield Case("dtype", _olmo({}), "dtype='float32': expected", {"dtype": "float32"})
    yield Case("wider dtype", _olmo({"ids": FLAT_IDS[:-1]}), "not a multiple", {"dtype": "uint64"})


CASES = [*_values(), *_shapes(), *_files(), *_saved(), *_megatron(), *_olmo_cases()]


def test_the_cases_are_many() -> None:
    assert len(CASES) >= 129


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_refused_in_one_line(case: Case, tokenizer: Path, place: Path) -> None:
    source = place / "source"
    source.mkdir()
    path = case.write(source) or source
    with pytest.raises(PenstockError) as error:
        ps.adopt(path, tokenizer=tokenizer, cache=place / "cache", check_tokenizer="warn", **case.options)
    text = str(error.value)
    assert case.says in text
    assert "\n" not in text.rstrip()
    assert len(text) < 600
    assert "source" in text or case.options
    assert not list(place.glob("cache/datasets/*"))
