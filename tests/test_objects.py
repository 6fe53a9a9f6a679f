"""The object-store client against a real S3 server, with faults injected on the way, a web server and a folder."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from penstock.errors import ObjectChanged, ObjectError, ObjectMissing, UsageError
from penstock.objects import PIECE_BYTES, ObjectStore, _etag, open_object_store, parse_url
from tests.support.object_servers import Proxy, web_server

ODD_NAMES = ["a b.jsonl", "p%20q", "q?x#y", "ünï/é", "st*ar[1]", "pl+us", "~&<>", "a=b/c:d@e,f;g", "日本/語"]


@pytest.fixture
def store(s3: Proxy) -> ObjectStore:
    return open_object_store(f"s3://{s3.bucket}")[0]


@pytest.mark.parametrize("path", ODD_NAMES)
def test_objects_are_written_read_and_listed(path: str, store: ObjectStore) -> None:
    assert store.put(path, b"0123456789")
    info = store.head(path)
    assert (info.path, info.size, bool(info.etag)) == (path, 10, True)
    assert store.get(path) == b"0123456789"
    assert store.get_range(path, 2, 5, info.etag) == b"234"
    assert store.get_range(path, 5, 5) == b""
    assert [found.path for found in store.list()] == [path]
    store.delete(path)
    store.delete(path)
    assert not list(store.list())


def test_empty_objects(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.head("empty").size == 0
    assert list(store.stream("empty")) == []


def test_folders(store: ObjectStore) -> None:
    for path in ("a/1", "a/b/2", "a/b/3", "ab/4", "5"):
        store.put(path, b"x")
    assert [info.path for info in store.list("a")] == ["a/1", "a/b/2", "a/b/3"]
    objects, folders = store.children("a")
    assert ([info.path for info in objects], folders) == (["a/1"], ["a/b"])
    assert store.children()[1] == ["a", "ab"]


def test_conditional_writes(store: ObjectStore) -> None:
    assert store.put("x", b"1", if_absent=True)
    assert not store.put("x", b"2", if_absent=True)
    etag = store.head("x").etag
    assert store.replace("x", b"3", etag)
    assert not store.replace("x", b"4", etag)
    assert not store.replace("missing", b"4", etag)
    assert store.get("x") == b"3"


def test_streams_are_read_ahead_in_pieces(s3: Proxy, store: ObjectStore) -> None:
    data = bytes(range(256)) * (PIECE_BYTES // 256 * 2 + 100)
    store.put("large", data)
    s3.clear()
    assert b"".join(store.stream("large")) == data
    assert b"".join(store.stream("large", start=len(data) - 10)) == data[-10:]
    assert len(s3.requests) == 2 + 3 + 1  # heads, pieces
    stream = store.stream("large")
    next(stream)
    stream.close()


def test_a_changed_object_is_an_error(store: ObjectStore) -> None:
    store.put("x", b"1" * PIECE_BYTES * 2)
    info = store.head("x")
    stream = store.stream("x", info=info)
    store.put("x", b"2" * PIECE_BYTES * 2)
    with pytest.raises(ObjectChanged, match=r"/x: the object changed while it was read .* Run again once nothing"):
        b"".join(stream)
    with pytest.raises(ObjectChanged):
        store.get_range("x", 0, 3, info.etag)


@pytest.mark.parametrize("fault", ["503", "500", "drop", "cut", "429"])
def test_passing_faults_are_retried(fault: str, s3: Proxy, store: ObjectStore) -> None:
    store.put("x", b"0123456789")
    count = [0]

    def twice(method: str, path: str, number: int) -> str | None:
        count[0] += method == "GET"
        return fault if method == "GET" and count[0] <= 2 else None

    s3.fault = twice
    assert store.get_range("x", 0, 10) == b"0123456789"
    assert count[0] == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("503", r"the store answers 503 SlowDown, also after 3 retries\. It is overloaded or down: run again later"),
        ("drop", r"the store can't be reached, also after 3 retries\. Check the endpoint"),
        pytest.param(
            "cut", r"the answer ended early 5 times in a row \(.*\)\. Check the network", marks=pytest.mark.slow
        ),
        ("expired", r"the credentials have expired \(400 ExpiredToken\)\. Set AWS_ACCESS_KEY_ID"),
        ("403", r"access denied \(403 SlowDown\)\. Set AWS_ACCESS_KEY_ID"),
        ("409", r"another request changes it at the same time \(409 SlowDown\)\. Run again"),
        ("501", r"the store does not support this request \(501 SlowDown\)\. Penstock needs conditional writes"),
    ],
)
def test_lasting_faults_are_explained(fault: str, message: str, s3: Proxy, store: ObjectStore) -> None:
    store.put("x", b"0123456789")
    s3.fault = lambda method, path, number: fault
    with pytest.raises(ObjectError, match=message) as caught:
        store.get_range("x", 0, 10)
    assert str(caught.value).startswith(f"s3://{s3.bucket}/x: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    if fault in ("expired", "403"):  # the answer to HEAD has no body; the cause is found all the same
        with pytest.raises(ObjectError, match=message):
            store.head("x")


def test_a_conflict_is_no_existing_object(s3: Proxy, store: ObjectStore) -> None:
    """Stores answer 409 to an object that exists and to two requests at once, which lost a plain put."""
    s3.fault = lambda method, path, number: "409" if method == "PUT" else None
    for conditional in (False, True):
        with pytest.raises(ObjectError, match="another request changes it at the same time"):
            store.put("x", b"1", if_absent=conditional)
    s3.clear()
    store.put("x", b"1")
    s3.fault = lambda method, path, number: "409" if method == "PUT" else None
    assert store.put("x", b"2", if_absent=True) is False


def test_time_outs(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STORE_TIMEOUT", "0.2")
    monkeypatch.setenv("PENSTOCK_STORE_RETRIES", "1")
    store, _ = open_object_store(f"s3://{s3.bucket}")
    store.put("x", b"0123456789")
    s3.fault = lambda method, path, number: "delay:1"
    with pytest.raises(
        ObjectError, match=r"did not answer within 0\.2 s, also after 1 retries.*PENSTOCK_STORE_TIMEOUT"
    ):
        store.get("x")


def test_what_is_missing(s3: Proxy, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectMissing, match=rf"s3://{s3.bucket}/nope: no such object"):
        store.head("nope")
    other, path = open_object_store("s3://no-such-bucket/x")
    for call in (lambda: other.get(path), lambda: list(other.list())):
        with pytest.raises(ObjectMissing, match="there is no bucket s3://no-such-bucket"):
            call()
    with pytest.raises(ObjectError, match=r"/a//b: .*empty path segment"):
        store.get("a//b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PENSTOCK_STORE_RETRIES", "1")
    with pytest.raises(ObjectError, match=r"can't be reached, also after 1 retries"):
        open_object_store("s3://bucket/x")[0].get("x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://example.com")
    with pytest.raises(ObjectError, match=r"not encrypted"):
        open_object_store("s3://bucket/x")[0].get("x")


def test_web_servers(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "x%20.jsonl").write_bytes(b"0123456789")
    with web_server(tmp_path) as address:
        store, path = open_object_store(f"{address}/a%20b/x%2520.jsonl?key=secret")
        assert path == "a b/x%20.jsonl"
        assert store.head(path).size == 10
        assert store.get_range(path, 2, 4) == b"23"
        with pytest.raises(ObjectMissing, match=r"/a%20b/nope: no such object") as caught:
            store.head("a b/nope")
        assert "secret" not in str(caught.value)


def test_local_folders(tmp_path: Path) -> None:
    store, path = open_object_store(f"file://{tmp_path}/x y")
    assert store.put(path, b"0123", if_absent=True)
    assert not store.put(path, b"4567", if_absent=True)
    assert (tmp_path / "x y").read_bytes() == b"0123"
    assert store.get_range(path, 1, 3, store.head(path).etag) == b"12"


def test_urls() -> None:
    assert parse_url("s3:/b/c d/e")[:3] == ("s3", "b", "c d/e")  # as Path writes it
    assert parse_url("abfss://box@acc.dfs.core.windows.net/a")[:4] == ("abfss", "box", "a", "acc")
    for url in ("ftp://x/y", "s3://", "a/b"):
        with pytest.raises(UsageError):
            parse_url(url)


def test_etags_are_quoted_alike() -> None:
    for given, expected in (
        ("0x8D", '"0x8D"'),
        ('"0x8D"', '"0x8D"'),
        ('W/"1"', 'W/"1"'),
        ("1-2-3", "1-2-3"),
        (None, ""),
    ):
        assert _etag({"e_tag": given}) == expected


def test_without_the_extra() -> None:
    """The client is imported only when it is used; without it the error names the extra."""
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "import penstock.objects as o, penstock.errors as e\n"
        "try: o.open_object_store('s3://b/c')\n"
        "except e.ObjectError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'penstock[stores]'" in done.stdout


def test_a_forked_process_is_told_so(s3: Proxy) -> None:
    """The client's threads are gone there, so that a request would never end."""
    store, _ = open_object_store(f"s3://{s3.bucket}/x")
    store.put("x/a", b"1")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        try:
            store.get("x/a")
        except ObjectError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert b"multiprocessing_context='spawn'" in os.read(read, 4096)
    os.close(read)
