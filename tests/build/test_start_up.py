"""What a small build does without: a process that prepares a few rows pays for no library that it does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
