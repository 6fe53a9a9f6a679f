"""A process that prepares a few rows imports no library that it doesn't need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHILD = """
import sys
import penstock as ps
ps.prepare(sys.argv[1], tokenizer=sys.argv[2], cache=sys.argv[3])
print(sorted({"pandas", "torch", "transformers", "datasets", "gigatoken"} & sys.modules.keys()))
"""


def test_a_small_build_imports_no_large_library(examples: Path, tokenizer: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"".join((examples / "data" / "chats.jsonl").read_bytes().splitlines(keepends=True)[:5]))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(tokenizer), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout == "[]\n"


def test_comparing_tokenizers_imports_no_torch(tokenizer: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-X", "importtime", "-m", "penstock.prepare.tokenizer.auto", tokenizer]
    done = subprocess.run([*command, tokenizer / "tokenizer.json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["difference"] == ""
    assert "transformers" in done.stderr
    assert "torch._C" not in done.stderr
