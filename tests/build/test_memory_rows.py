"""Rows in memory: the same tokens as from a file, cached by content, and never a wrong hit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import penstock as ps
from penstock.errors import SourceError, TokenizerError, UsageError
from penstock.store.cache import Cache
from penstock.store.gc import collect_garbage

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(examples: Path) -> Rows:
    return [json.loads(line) for line in (examples / "data/chats.jsonl").read_text().splitlines()]


def ids(dataset: ps.Dataset) -> list[list[int]]:
    return [dataset.input_ids(number).tolist() for number in range(dataset.shards.total)]


def hit(dataset: ps.Dataset, *sources: Any, **options: Any) -> bool:
    """Whether another call is a hit that builds nothing."""
    made: list[int] = []
    again = ps.prepare(*sources, on_progress=lambda p: made.append(p.slices_done), **options)
    return again.key == dataset.key and not any(made)


def test_rows_in_memory_give_the_tokens_of_the_file(
    rows: Rows, tokenizer: Path, examples: Path, tmp_path: Path
) -> None:
    options = {"tokenizer": tokenizer, "cache": tmp_path}
    expected = ids(ps.prepare(examples / "data/chats.jsonl", **options))
    data = datasets.Dataset.from_list(rows)
    for source in (rows, tuple(rows), data, data.data.table, pd.DataFrame(rows)):
        dataset = ps.prepare(source, **options)
        assert ids(dataset) == expected
        assert hit(dataset, source, **options)
        assert dataset.conversation(7)["messages"][0]["content"] == rows[7]["messages"][0]["content"]
    assert hit(ps.prepare(rows, **options), iter(rows), **options)


def test_selections_of_a_dataset_are_different_content(rows: Rows, tokenizer: Path, tmp_path: Path) -> None:
    options = {"tokenizer": tokenizer, "cache": tmp_path}
    data = datasets.Dataset.from_list(rows)
    plain, shuffled, few = (ps.prepare(d, **options) for d in (data, data.shuffle(seed=1), data.select(range(9))))
    assert len({plain.key, shuffled.key, few.key}) == 3
    assert sorted(ids(shuffled)) == sorted(ids(plain))
    assert ids(few) == ids(plain)[:9]
    same_fingerprint = data.select(range(len(data) - 1, -1, -1))
    same_fingerprint._fingerprint = data._fingerprint
    assert ids(ps.prepare(same_fingerprint, **options)) == ids(plain)[::-1]


def test_a_changed_row_is_never_a_hit(rows: Rows, tokenizer: Path, tmp_path: Path) -> None:
    options = {"tokenizer": tokenizer, "cache": tmp_path}
    mine = json.loads(json.dumps(rows[:5]))
    before = ps.prepare(mine, **options)
    mine[3]["messages"][-1]["content"] += "!"
    after = ps.prepare(mine, **options)
    assert ids(before)[:3] == ids(after)[:3]
    assert ids(before)[3] != ids(after)[3]


def test_a_damaged_input_is_rewritten(rows: Rows, tokenizer: Path, tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(rows[:5])
    first = ps.prepare(data, tokenizer=tokenizer, cache=tmp_path)
    (kept,) = (tmp_path / "inputs").glob("*/*.arrow")
    other = ps.prepare(datasets.Dataset.from_list(rows[5:10]), tokenizer=tokenizer, cache=tmp_path)
    (another,) = set((tmp_path / "inputs").glob("*/*.arrow")) - {kept}
    kept.write_bytes(another.read_bytes())
    assert ids(ps.prepare(data, tokenizer=tokenizer, cache=tmp_path)) == ids(first) != ids(other)


def test_a_hit_on_a_hundred_thousand_rows_takes_under_a_second(tokenizer: Path, tmp_path: Path) -> None:
    """The second call turns no row into Python values: the dataset yields Arrow tables only."""
    options = {"tokenizer": tokenizer, "cache": tmp_path}
    table = pa.table({"text": [f"row {n}" for n in range(100_000)]})
    data = datasets.Dataset(table)
    first = ps.prepare(data, **options)
    assert len(first) == 100_000
    began = time.perf_counter()
    assert hit(first, data, **options)
    assert time.perf_counter() - began < 1


class Listening(datasets.Dataset):
    """Counts accesses by row."""

    asked = 0

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            Listening.asked += 1
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walked row by row")


def test_a_dataset_is_not_iterated_row_by_row(tokenizer: Path, tmp_path: Path) -> None:
    data = Listening(pa.table({"text": ["a", "b"]}))
    ps.prepare(data, tokenizer=tokenizer, cache=tmp_path)
    assert Listening.asked == 0


def test_a_tokenizer_object_gives_the_ids_of_its_folder(rows: Rows, tokenizer: Path, tmp_path: Path) -> None:
    auto = AutoTokenizer.from_pretrained(tokenizer)
    auto("padded", padding="max_length", max_length=8, truncation=True)  # leaves settings in the backend
    by_object = ps.prepare(rows, tokenizer=auto, cache=tmp_path)
    assert ids(by_object) == ids(ps.prepare(rows, tokenizer=tokenizer, cache=tmp_path))
    assert hit(by_object, rows, tokenizer=auto, cache=tmp_path)
    auto.chat_template = auto.chat_template + "\n"
    assert ps.prepare(rows, tokenizer=auto, cache=tmp_path).key != by_object.key
    plain = ps.prepare(
        [{"text": "Hi"}], tokenizer=Tokenizer.from_file(str(tokenizer / "tokenizer.json")), cache=tmp_path
    )
    assert ids(plain)[0] == auto("Hi")["input_ids"]
    with pytest.raises(TokenizerError, match="no fast backend"):
        ps.prepare(rows, tokenizer=object(), cache=tmp_path)


@pytest.mark.parametrize(
    ("source", "error", "expected"),
    [
        ([{"text": "a"}, "b"], SourceError, r"<list>:2: a row is a str \('b'\), not a dict"),
        ([{"text": {1, 2}}], SourceError, "<list>:1: the row can't be written as JSON"),
        ([{"text": "a\ud800"}], SourceError, "<list>:1: the row can't be written as JSON"),
        ({"train": [], "test": []}, UsageError, r"Give one split of a DatasetDict \(data\['train'\]\)"),
        (7, UsageError, "can't take rows from a int"),
        ([], UsageError, "there are no rows: the list is empty"),
    ],
)
def test_objects_that_are_not_rows_are_refused(
    source: Any, error: type[Exception], expected: str, tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=expected):
        ps.prepare(source, tokenizer=tokenizer, cache=tmp_path)


def test_a_bad_row_is_named_by_its_number(tokenizer: Path, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(ps.PenstockError, match="<list>:2: role 'bot' is unknown"):
        ps.prepare([good, {"messages": [{"role": "bot", "content": "a"}]}], tokenizer=tokenizer, cache=tmp_path)


def command(*arguments: object, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *map(str, arguments)], input=stdin, capture_output=True
    )


def test_standard_input_and_limit(examples: Path, tokenizer: Path, tmp_path: Path) -> None:
    data = (examples / "data/chats.jsonl").read_bytes()
    prepare = ("prepare", "-", "--tokenizer", tokenizer, "--cache", tmp_path, "--json")
    first, again, few = (json.loads(command(*prepare, *more, stdin=data).stdout) for more in ((), (), ("--limit", "7")))
    assert [first["hit"], again["hit"], few["hit"]] == [False, True, False]
    assert [first["examples"], again["key"], few["examples"]] == [400, first["key"], 7]
    whole, short = (ps.open(tmp_path / "datasets" / found["key"]) for found in (first, few))
    assert ids(short) == ids(whole)[:7]
    twice = command(*prepare, "-", stdin=data)
    assert twice.returncode == 2
    assert b"given twice" in twice.stderr
    assert b"<stdin>: there are no rows" in command(*prepare, stdin=b"").stderr


def test_limit_of_a_split(examples: Path, tokenizer: Path, tmp_path: Path) -> None:
    options = {"tokenizer": tokenizer, "cache": tmp_path}
    whole = ps.prepare(examples / "data/chats.jsonl", **options)
    part = ps.prepare(examples / "data/chats.jsonl", split="train[10:20]+train[-5:]", limit=12, **options)
    assert ids(part) == ids(whole)[10:20] + ids(whole)[-5:-3]
    with pytest.raises(UsageError, match="limit=0 is not possible. Use an integer of 1 or more"):
        ps.prepare([], limit=0, **options)


def test_inputs_are_removed_with_their_datasets(rows: Rows, tokenizer: Path, tmp_path: Path) -> None:
    ps.prepare(rows[:3], tokenizer=tokenizer, cache=tmp_path)
    cache = Cache(tmp_path)
    collect_garbage(cache, older_than=-1.0)
    assert len(list((tmp_path / "inputs").glob("*/*"))) == 1
    collect_garbage(cache, older_than=-1.0, drop_unused=-1.0)
    assert not list((tmp_path / "inputs").glob("*/*"))


def test_a_read_only_cache_serves_rows_in_memory(rows: Rows, tokenizer: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    first = ps.prepare(rows[:3], tokenizer=tokenizer, cache=tmp_path / "c")
    for folder in ((tmp_path / "c"), (tmp_path / "c" / "tmp")):
        folder.chmod(0o555)
    assert ps.prepare(rows[:3], tokenizer=tokenizer, cache=tmp_path / "c").path == first.path


def test_progress_in_a_script(rows: Rows, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.prepare(rows[:3], tokenizer=tokenizer, cache=tmp_path)
    assert capsys.readouterr() == ("", "")  # no progress on a pipe
    ps.prepare(rows[:3], tokenizer=tokenizer, cache=tmp_path, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "penstock: 3 rows" in err
    assert "found in the cache" in err
