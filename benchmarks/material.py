"""The files used in a comparison: all rows, or a seeded sample that keeps the original line numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Files:
    """Files with the same row format, so that one `prepare` can read them."""

    paths: list[str]
    lines: list[list[int]]  # per file, the original line numbers of its rows, from 1

    def name(self, source: int, row: int) -> str:
        """The original file:line of a row."""
        return f"{Path(self.paths[source]).name}:{self.lines[source][row]}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sampled(data: Sequence[Path], sample: int | None, folder: Path) -> list[Files]:
    """Copies samples of the files to a folder, with preference data separate."""
    kinds: dict[bool, Files] = {}
    for path in data:
        rows = path.read_bytes().splitlines(keepends=True)
        numbers = list(range(len(rows)))
        if sample is not None and sample < len(rows):
            numbers = sorted(random.Random(0).sample(numbers, sample))
        target = folder / path.name
        target.write_bytes(b"".join(rows[number] for number in numbers))
        files = kinds.setdefault(b'"chosen"' in rows[0], Files([], []))
        files.paths.append(str(target))
        files.lines.append([number + 1 for number in numbers])
    return list(kinds.values())
