"""hf:// addresses, against a server with the Hub's API: commits are pinned, mistakes are explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from penstock.errors import UsageError
from penstock.prepare.sources.hub import parse_hub_url
from tests.support.object_servers import hub_server

pytestmark = pytest.mark.slow

ROWS = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]} for n in range(9)]
LINES = b"".join(orjson.dumps(row) + b"\n" for row in ROWS)
COMMIT = "c0ffee" * 6 + "cafe"
SCRIPT = """
import json, sys
from penstock.errors import PenstockError
from penstock.prepare.sources.discover import discover
import penstock as ps
for url, options in json.load(sys.stdin):
    try:
        print(json.dumps([file.name for file in discover(url, **options).files]))
    except PenstockError as error:
        print(json.dumps(str(error)))
dataset = ps.prepare("hf://datasets/owner/chats/sp ace.jsonl", tokenizer=sys.argv[1], cache=sys.argv[2], workers=1)
local = ps.prepare(sys.argv[3], tokenizer=sys.argv[1], cache=sys.argv[2], workers=1)
print(json.dumps([dataset.key == local.key, "obstore" in sys.modules]))
"""


def test_files_of_the_hub(tokenizer: Path, tmp_path: Path) -> None:
    files = {"data/train-00000-of-00001.jsonl": LINES, "data/test-00000-of-00001.jsonl": LINES, "sp ace.jsonl": LINES}
    (tmp_path / "local.jsonl").write_bytes(LINES)
    place = f"hf://datasets/owner/chats@{COMMIT}"
    train, test = f"{place}/data/train-00000-of-00001.jsonl", f"{place}/data/test-00000-of-00001.jsonl"
    cases: list[tuple[str, dict[str, str], object]] = [
        ("data/train-00000-of-00001.jsonl", {}, [train]),
        ("data", {}, [train]),
        ("data", {"split": "test", "revision": "v2"}, [test]),
        ("data/*.jsonl", {}, [test, train]),
        ("dta", {}, f"{place}/dta: no such object or folder. Did you mean {place}/data?"),
        ("x", {"revision": "v9"}, "hf://datasets/owner/chats@v9/: the repository has no revision 'v9'."),
    ]
    with hub_server(files) as address:
        given = [(f"hf://datasets/owner/chats/{path}", options) for path, options, _ in cases]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tokenizer), str(tmp_path / "cache"), str(tmp_path / "local.jsonl")],
            input=json.dumps(given),
            env={**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[:-1] == [expected for _, _, expected in cases]
    assert found[-1] == [True, False]  # the same dataset; huggingface_hub alone served it


def test_addresses() -> None:
    assert parse_hub_url("hf:/datasets/o/n@v1/a/b c") == ("datasets", "o/n", "v1", "a/b c")
    assert parse_hub_url("hf://datasets/o/n") == ("datasets", "o/n", "main", "")
    with pytest.raises(UsageError, match=r"Write it as hf://datasets/owner/name/path"):
        parse_hub_url("hf://owner/name/x")
    with pytest.raises(UsageError, match=r"names a revision, and so does revision='v2'"):
        parse_hub_url("hf://datasets/o/n@v1/x", "v2")
