"""Sources by URL against a real S3 server: the dataset of the local file, each byte read once, faults included."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from penstock.build import run as build_prepare
from penstock.build.options import prepare_options
from penstock.build.outcome import Outcome
from penstock.build.run import Builder
from penstock.errors import ObjectChanged, ObjectError, PenstockError, SourceError, UsageError
from penstock.objects import ObjectStore, open_object_store
from penstock.prepare.sources import columnar, kinds, reading, text_slices
from penstock.prepare.sources import remote as remote_path
from penstock.prepare.sources import remote as spool
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.slices import SliceSizes
from tests.support.object_servers import Proxy, Request, web_server

pytestmark = pytest.mark.slow

SMALL = SliceSizes(4_000, 8_000, 16_000)
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "a",
    "in",
    "is",
    "it",
    "you",
    "that",
    "he",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
    "I",
    "his",
    "they",
]


def rows(count: int = 150, seed: int = 0) -> list[dict[str, Any]]:
    chance = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=words))

    return [
        {"messages": [{"role": "user", "content": text(20)}, {"role": "assistant", "content": text(60)}]}
        for _ in range(count)
    ]


def lines(of: list[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in of)


def parquet(of: list[dict[str, Any]], group: int) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(of), out, row_group_size=group)
    return out.getvalue()


def arrow(of: list[dict[str, Any]]) -> bytes:
    table, out = pa.Table.from_pylist(of), io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return out.getvalue()


def cells(of: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["messages"])
    writer.writerows([json.dumps(row["messages"])] for row in of)
    return out.getvalue().encode()


KINDS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": lines,
    "small groups.parquet": lambda of: parquet(of, 20),
    "one group.parquet": lambda of: parquet(of, 10_000),
    "a.arrow": arrow,
    "a.jsonl.gz": lambda of: gzip.compress(lines(of)),
    "a.jsonl.zst": lambda of: zstandard.compress(lines(of)),
    "a.json": lambda of: orjson.dumps(of),
    "a.csv": cells,
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slices, so that small data has many of them."""
    monkeypatch.setitem(text_slices.cut_text.__kwdefaults__, "sizes", SMALL)
    monkeypatch.setattr(reading, "SLICE_SIZES", SMALL)
    monkeypatch.setattr(columnar.cut_units, "__defaults__", (SMALL,))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces of objects, in this process."""
    monkeypatch.setattr(remote_path, "HEAD_BYTES", 1_024)
    monkeypatch.setattr(remote_path, "PIECE_BYTES", 4_096)
    monkeypatch.setattr(text_slices.text_runs, "__defaults__", (4_096,))
    monkeypatch.setattr(kinds, "HEAD_BYTES", 1_024)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two worker processes, however small the data and the machine."""
    monkeypatch.setattr(build_prepare, "worker_count", lambda asked: (2, ""))
    monkeypatch.setattr(build_prepare, "SMALL_BYTES", 0)


@pytest.fixture
def store(s3: Proxy) -> ObjectStore:
    return open_object_store(f"s3://{s3.bucket}")[0]


@pytest.fixture
def prepare(tokenizer: Path, tmp_path: Path) -> Callable[..., Outcome]:
    def run(*sources: Any, cache: str = "cache", **options: Any) -> Outcome:
        given = {"tokenizer": tokenizer, "cache": tmp_path / cache, "fast": False, "workers": "1"} | options
        return Builder(list(sources), prepare_options(given), None).run()

    return run


def result(cache: Path) -> dict[str, bytes]:
    files = [*cache.glob("shards/*/*.arrow"), *cache.glob("datasets/*/manifest.json")]
    return {str(path.relative_to(cache)): path.read_bytes() for path in files}


def reads(s3: Proxy) -> list[Request]:
    return [r for r in s3.requests if r.method == "GET" and "list-type" not in r.path]


Prepare = Callable[..., Outcome]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", KINDS)
def test_the_dataset_is_that_of_the_local_file(
    name: str, s3: Proxy, store: ObjectStore, prepare: Prepare, tmp_path: Path
) -> None:
    data = KINDS[name](rows())
    (tmp_path / name).write_bytes(data)
    prepare(tmp_path / name, cache="local")
    store.put(f"data/{name}", data)
    s3.clear()
    found = prepare(f"s3://{s3.bucket}/data/{name}")
    assert len(found.dataset.shards) > 3
    assert result(tmp_path / "cache") == result(tmp_path / "local")
    assert s3.bytes_read <= 1.1 * len(data)
    assert all(request.range for request in reads(s3))

    s3.clear()  # unchanged: nothing is read
    assert prepare(f"s3://{s3.bucket}/data/{name}").hit
    assert reads(s3) == []

    shutil.rmtree(tmp_path / "cache" / "shards")  # the plan is known: slices are read, each once
    shutil.rmtree(tmp_path / "cache" / "datasets")
    assert not prepare(f"s3://{s3.bucket}/data/{name}").hit
    assert result(tmp_path / "cache") == result(tmp_path / "local")
    assert s3.bytes_read <= 1.1 * len(data)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", ["a.jsonl", "one group.parquet"])
def test_workers_read_what_they_need(
    name: str, s3: Proxy, store: ObjectStore, prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = KINDS[name](rows())
    (tmp_path / name).write_bytes(data)
    prepare(tmp_path / name, cache="local")
    store.put(f"data/{name}", data)
    s3.clear()
    prepare(f"s3://{s3.bucket}/data/{name}")
    assert result(tmp_path / "cache") == result(tmp_path / "local")
    assert s3.bytes_read <= 1.1 * len(data)
    shutil.rmtree(tmp_path / "cache" / "shards")
    shutil.rmtree(tmp_path / "cache" / "datasets")
    s3.clear()
    prepare(f"s3://{s3.bucket}/data/{name}")
    assert result(tmp_path / "cache") == result(tmp_path / "local")
    assert s3.bytes_read <= 1.1 * len(data) + 2 * 4096
    if name == "a.jsonl":
        assert len(reads(s3)) >= 5  # a request for each slice
        assert not list(Path(spool.own_spool().folder).iterdir())


def test_splits_and_limits_are_those_of_the_local_file(
    s3: Proxy, store: ObjectStore, prepare: Prepare, tmp_path: Path
) -> None:
    for name in ("a.jsonl", "small groups.parquet"):
        data = KINDS[name](rows(80))
        (tmp_path / name).write_bytes(data)
        store.put(name, data)
        for options in ({"split": "train[10%:70%]+train[-5:]"}, {"limit": 37}):
            local = prepare(tmp_path / name, cache="local", **options)
            remote = prepare(f"s3://{s3.bucket}/{name}", cache="remote", **options)
            assert remote.dataset.key == local.dataset.key
    assert result(tmp_path / "remote") == result(tmp_path / "local")


def test_a_changed_object_is_never_a_hit(s3: Proxy, store: ObjectStore, prepare: Prepare, tmp_path: Path) -> None:
    url = f"s3://{s3.bucket}/a.jsonl"
    first, second = lines(rows(seed=1)), lines(rows(seed=2))
    second = second[: len(first)].ljust(len(first), b"\n")  # of the same size
    second = second[: second.rfind(b"\n", 0, -1) + 1] if not second.endswith(b"}\n") else second
    store.put("a.jsonl", first)
    one = prepare(url)
    store.put("a.jsonl", second)
    two = prepare(url)
    assert not two.hit
    assert two.dataset.key != one.dataset.key
    store.put("a.jsonl", first)  # what it was: the store's ETag says so
    s3.clear()
    again = prepare(url)
    assert again.hit
    assert again.dataset.key == one.dataset.key
    assert reads(s3) == []


def test_rows_are_traced_to_their_object(s3: Proxy, store: ObjectStore, prepare: Prepare) -> None:
    store.put("bad.jsonl", lines(rows(20)) + b'{"messages": 7}\n')
    with pytest.raises(PenstockError, match=rf"s3://{s3.bucket}/bad.jsonl:21: "):
        prepare(f"s3://{s3.bucket}/bad.jsonl")
    store.put("good.jsonl", lines(rows(20)))
    from penstock.build.conversations import ConversationReader

    dataset = prepare(f"s3://{s3.bucket}/good.jsonl").dataset
    assert ConversationReader(dataset).conversation(3)["messages"] == rows(20)[3]["messages"]
    store.put("good.jsonl", lines(rows(20, seed=5)))
    with pytest.raises(SourceError, match=r"good.jsonl: (changed|row \d+ has changed)"):
        ConversationReader(dataset).conversation(3)


# -- faults, with small pieces: many requests -------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["a.jsonl", "small groups.parquet", "a.jsonl.gz"])
def test_passing_faults_change_nothing(
    name: str, s3: Proxy, store: ObjectStore, prepare: Prepare, tmp_path: Path
) -> None:
    data = KINDS[name](rows(120))
    (tmp_path / name).write_bytes(data)
    prepare(tmp_path / name, cache="local")
    store.put(name, data)
    faults = ["503", "cut", "drop", "500", None, None]
    s3.fault = lambda method, path, number: faults[number % 6] if number % 2 else None
    prepare(f"s3://{s3.bucket}/{name}")
    assert result(tmp_path / "cache") == result(tmp_path / "local")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("503", "the store answers 503 SlowDown, also after 1 retries"),
        ("expired", r"the credentials have expired \(400 ExpiredToken\)"),
        ("403", "access denied"),
        ("cut", "the answer ended early"),
        ("delay:2", r"did not answer within 0.5 s, also after 1 retries"),
    ],
)
def test_lasting_faults_lose_nothing(
    fault: str,
    message: str,
    s3: Proxy,
    store: ObjectStore,
    prepare: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The build fails with a clear error in its middle; the next run reuses the finished slices."""
    monkeypatch.setenv("PENSTOCK_STORE_RETRIES", "1")
    monkeypatch.setenv("PENSTOCK_STORE_TIMEOUT", "0.5" if fault.startswith("delay") else "10")
    monkeypatch.setattr("penstock.objects.CUT_RETRIES", 1)
    data = lines(rows())
    store.put("a.jsonl", data)
    url = f"s3://{s3.bucket}/a.jsonl"
    s3.fault = lambda method, path, number: fault if len(reads(s3)) > len(data) // 4096 // 2 else None
    with pytest.raises(ObjectError, match=message) as caught:
        prepare(url)
    assert str(caught.value).startswith(f"{url}: ")
    s3.clear()
    done = len(result(tmp_path / "cache"))
    again = prepare(url)
    assert again.progress.slices_reused == done > 0
    (tmp_path / "a.jsonl").write_bytes(data)
    prepare(tmp_path / "a.jsonl", cache="local")
    assert result(tmp_path / "cache") == result(tmp_path / "local")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["a.jsonl", "small groups.parquet", "a.jsonl.zst"])
def test_an_object_that_changes_while_it_is_read_is_an_error(
    name: str, s3: Proxy, store: ObjectStore, prepare: Prepare, tmp_path: Path, s3_endpoint: str
) -> None:
    store.put(name, KINDS[name](rows(seed=1)))
    other = KINDS[name](rows(seed=2))
    swapped: list[int] = []

    def swap(method: str, path: str, number: int) -> None:
        if len(reads(s3)) >= 2 and not swapped:
            swapped.append(number)
            open_object_store(f"s3://{s3.bucket}")[0].put(name, other)

    s3.fault = swap
    with pytest.raises(ObjectChanged, match=r"the object changed while it was read.*Run again once nothing writes"):
        prepare(f"s3://{s3.bucket}/{name}")
    s3.clear()
    prepare(f"s3://{s3.bucket}/{name}")
    (tmp_path / name).write_bytes(other)
    local = prepare(tmp_path / name, cache="local")
    assert (tmp_path / "cache" / "datasets" / local.dataset.key).exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "small groups.parquet", "a.arrow", "a.json"])
def test_truncated_objects(name: str, s3: Proxy, store: ObjectStore, prepare: Prepare) -> None:
    store.put(name, KINDS[name](rows(100))[:-30])
    with pytest.raises(SourceError, match=r"truncated|ends inside|not closed|is missing") as caught:
        prepare(f"s3://{s3.bucket}/{name}")
    assert f"s3://{s3.bucket}/{name}" in str(caught.value)


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(store: ObjectStore) -> None:
    for name in (
        "data/a.jsonl", "data/b.jsonl", "data/more/c.jsonl", "data/.hidden.jsonl", "data/readme.md",
        "split/train-00000-of-00001.jsonl", "split/test-00000-of-00001.jsonl",
        "odd/sp ace+ü#?%41.jsonl", "odd/st*r[1].jsonl", "odd/str1.jsonl", "empty/nothing.jsonl",
    ):  # fmt: skip
        store.put(name, b"" if name.startswith("empty") else lines(rows(2)))


def found(s3: Proxy, *urls: str, **options: Any) -> list[str]:
    sources = discover([f"s3://{s3.bucket}/{url}" for url in urls], **options)
    return [file.name.removeprefix(f"s3://{s3.bucket}/") for file in sources.files]


@pytest.mark.usefixtures("tree")
def test_names_patterns_and_folders(s3: Proxy) -> None:
    assert found(s3, "data/b.jsonl", "data/a.jsonl") == ["data/b.jsonl", "data/a.jsonl"]
    assert found(s3, "data/*.jsonl") == ["data/a.jsonl", "data/b.jsonl"]
    assert found(s3, "data/**/*.jsonl") == ["data/a.jsonl", "data/b.jsonl", "data/more/c.jsonl"]
    assert found(s3, "d*/[!a].jsonl") == ["data/b.jsonl"]
    assert found(s3, "data/?.jsonl") == ["data/a.jsonl", "data/b.jsonl"]
    assert found(s3, "data/.h*.jsonl") == ["data/.hidden.jsonl"]
    assert found(s3, "data") == found(s3, "data/") == ["data/a.jsonl", "data/b.jsonl", "data/more/c.jsonl"]
    assert found(s3, "split") == ["split/train-00000-of-00001.jsonl"]
    assert found(s3, "split", split="test[:1]") == ["split/test-00000-of-00001.jsonl"]
    assert found(s3, "odd/sp ace+ü#?%41.jsonl") == ["odd/sp ace+ü#?%41.jsonl"]
    assert found(s3, "odd/st*r[1].jsonl") == ["odd/st*r[1].jsonl"]  # an object of this very name comes first
    assert found(s3, "odd/st*1*.jsonl") == ["odd/st*r[1].jsonl", "odd/str1.jsonl"]
    assert [str(f.path) for f in discover(Path(f"s3://{s3.bucket}/data/a.jsonl")).files] == [
        f"s3://{s3.bucket}/data/a.jsonl"
    ]


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data/aa.jsonl", r"data/aa.jsonl: no such object or folder. Did you mean s3://bucket-\w+/data/a.jsonl\?"),
        ("dta", r"Did you mean s3://bucket-\w+/data\?"),
        ("zzz", r"no such object or folder. s3://bucket-\w+ holds data, empty, odd, split\."),
        ("no/such/x.jsonl", r"There is nothing below s3://bucket-\w+/no/such either"),
        ("data/*.parquet", "no object matches this pattern"),
        ("empty/nothing.jsonl", "the file is empty"),
        ("empty", "the file is empty"),
        ("data/more/", ""),
    ],
)
def test_what_is_not_there(url: str, message: str, s3: Proxy) -> None:
    if not message:
        assert found(s3, url) == ["data/more/c.jsonl"]
        return
    with pytest.raises(SourceError, match=message):
        found(s3, url)


def test_options_of_other_sources(s3: Proxy) -> None:
    with pytest.raises(SourceError, match="revision applies to Hugging Face datasets"):
        found(s3, "x", revision="main")
    with pytest.raises(SourceError, match="config applies to Hugging Face datasets by name"):
        found(s3, "x", config="en")
    with pytest.raises(ObjectError, match="there is no bucket s3://no-such-bucket"):
        discover("s3://no-such-bucket/")
    with pytest.raises(SourceError, match="selected twice"):
        store = open_object_store(f"s3://{s3.bucket}")[0]
        store.put("d/a.jsonl", lines(rows(2)))
        found(s3, "d/a.jsonl", "d/*.jsonl")


def test_files_by_url(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_bytes(lines(rows(2)))
    for url in (f"file://{tmp_path}/a%20b.jsonl", f"file://{tmp_path}/a b.jsonl", f"file://{tmp_path}/*.jsonl"):
        (file,) = discover(url).files
        assert file.path == tmp_path / "a b.jsonl"


# -- web servers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "small groups.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("how", ["usual", "no ranges", "no etags"])
def test_web_servers(name: str, how: str, prepare: Prepare, tmp_path: Path) -> None:
    data = KINDS[name](rows(100))
    (tmp_path / name).write_bytes(data)
    prepare(tmp_path / name, cache="local")
    with web_server(tmp_path, ranges=how != "no ranges", etags=how != "no etags") as address:
        url = f"{address}/{name.replace(' ', '%20')}?key=secret"
        prepare(url)
        assert result(tmp_path / "cache") == result(tmp_path / "local")
        assert prepare(url).hit or how == "no etags"
        assert "secret" not in "".join(p.read_text() for p in tmp_path.glob("cache/datasets/*/notes.json"))
        with pytest.raises(SourceError, match=r"/nope.jsonl: no such object"):
            prepare(f"{address}/nope.jsonl")
        with pytest.raises(SourceError, match="a web server can't be searched for a pattern"):
            prepare(f"{address}/*.jsonl")


def test_the_spool_is_bounded_and_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = spool.Spool(tmp_path, limit=100)
    for number in range(5):
        small.put(str(number), b"x" * 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    small.reserve(100)
    for number in range(5, 9):
        small.put(str(number), b"x" * 40)
    assert len(list(tmp_path.iterdir())) == 5
    small.clear()
    assert not list(tmp_path.iterdir())
    shutil.rmtree(tmp_path)
    small.put("full", b"x")  # the disk fails: nothing is kept, nothing is lost
    tmp_path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{spool.PREFIX}{2**22 + 1}-dead").mkdir()
    (tmp_path / f"{spool.PREFIX}1-alive").mkdir()
    spool._sweep()
    assert [path.name for path in tmp_path.iterdir()] == [f"{spool.PREFIX}1-alive"]


def test_schemes_that_are_not_served() -> None:
    with pytest.raises(UsageError, match="ftp addresses are not supported. Supported are s3://, gs://"):
        discover("ftp://server/a.jsonl")


def test_the_client_is_imported_only_for_urls(tokenizer: Path, examples: Path, tmp_path: Path) -> None:
    code = (
        "import sys, penstock as ps\n"
        f"ps.prepare({str(examples / 'data' / 'chats.jsonl')!r}, tokenizer={str(tokenizer)!r}, "
        f"cache={str(tmp_path / 'c')!r}, workers=1)\n"
        "assert not {'obstore', 'boto3', 'ray'} & set(sys.modules)\n"
        "sys.modules['obstore'] = None\n"
        f"try: ps.prepare('s3://bucket/a.jsonl', tokenizer={str(tokenizer)!r}, cache={str(tmp_path / 'c')!r})\n"
        "except ps.PenstockError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'penstock[stores]'" in done.stdout


KILLED = """
import sys
import time
from penstock.build.options import prepare_options
from penstock.build.run import Builder
from penstock.prepare.sources import reading
from penstock.prepare.sources.slices import SliceSizes
from penstock.prepare.sources import text_slices
small = SliceSizes(4_000, 8_000, 16_000)
text_slices.cut_text.__kwdefaults__["sizes"] = small
text_slices.text_runs.__defaults__ = (4_096,)
reading.SLICE_SIZES = small
options = {"tokenizer": sys.argv[2], "cache": sys.argv[3], "fast": False, "workers": "1"}
Builder([sys.argv[1]], prepare_options(options), None).run()
"""


def test_a_killed_build_resumes(
    s3: Proxy, store: ObjectStore, prepare: Prepare, tokenizer: Path, tmp_path: Path
) -> None:
    """Killed at the first, second and third shard; then one undisturbed run."""
    data = lines(rows())
    store.put("a.jsonl", data)
    url, cache = f"s3://{s3.bucket}/a.jsonl", tmp_path / "cache"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for shards in (1, 2, 3):
        command = [sys.executable, "-c", KILLED, url, str(tokenizer), str(cache)]
        build = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)})
        while len(list(cache.glob("shards/*/*.arrow"))) < shards and build.poll() is None:
            time.sleep(0.005)
        build.kill()
        build.wait()
    assert len(list(temporary.glob("penstock-spool-*"))) <= 1  # the next run sweeps the spool of a killed one
    again = prepare(url)
    assert again.progress.slices_reused >= 3
    (tmp_path / "a.jsonl").write_bytes(data)
    prepare(tmp_path / "a.jsonl", cache="local")
    assert result(cache) == result(tmp_path / "local")
