"""Grows a dataset to any size by repeating its conversations with the words of each message shuffled.

    python -m benchmarks.grow --data FILE.jsonl … --megabytes 500 --out grown.jsonl

Plain copies would flatter every cache; shuffled words keep the statistics of the text (lengths, roles, tool calls,
scripts) but are new text. Words are separated by spaces or, in text with few spaces (Chinese), by punctuation.
Preference rows are omitted, so that the result has a single format. The same seed gives the same bytes. Runs at about
40 MB/s.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

MATERIAL = Path(__file__).parent.parent / "examples" / "data"
FEW_SPACES = 20  # characters per space
CLAUSE = re.compile("(?=[，。！？；：、])")


def material(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of the files that are single conversations; files without one are an error."""
    rows = [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]
    found = [row for row in rows if "messages" in row and "chosen" not in row]
    if files and not found:
        raise SystemExit(
            f"{', '.join(map(str, files))}: none of {len(rows)} rows has a `messages` column; "
            "preference rows are left out. Give a file of conversations with --data."
        )
    return found


def shuffled_text(text: str, random: np.random.Generator) -> str:
    """The same words in another order."""
    words = text.split(" ")
    joint = " "
    if len(words) * FEW_SPACES < len(text) and not text.isascii():
        words, joint = CLAUSE.split(text), ""
    order = np.array(words, object)
    random.shuffle(order)
    return joint.join(order)


def shuffled_row(row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """A row with the words of each message shuffled and everything else unchanged."""
    messages = [
        {**message, "content": shuffled_text(message["content"], random)}
        if isinstance(message.get("content"), str)
        else message
        for message in row["messages"]
    ]
    return {**row, "messages": messages}


def grown(rows: Sequence[dict[str, Any]], size: int, seed: int = 0) -> Iterator[bytes]:
    """Yields JSON lines made from the rows, reshuffled on each pass, until they have `size` bytes."""
    if not rows:
        raise SystemExit("there are no rows to grow: does the chat template refuse all of them?")
    random = np.random.default_rng(seed)
    written = 0
    while True:
        for number in random.permutation(len(rows)).tolist():
            line = orjson.dumps(shuffled_row(rows[number], random)) + b"\n"
            yield line
            written += len(line)
            if written >= size:
                return


def grow(files: Sequence[Path], size: int, out: Path, seed: int = 0) -> Path:
    """Writes a file grown from the conversations in `files`."""
    return grow_rows(material(files), size, out, seed)


def grow_rows(rows: Sequence[dict[str, Any]], size: int, out: Path, seed: int = 0) -> Path:
    """Writes a file grown from `rows`."""
    with out.open("wb") as file:
        file.writelines(grown(rows, size, seed))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    grow(arguments.data, int(arguments.megabytes * 1e6), arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
