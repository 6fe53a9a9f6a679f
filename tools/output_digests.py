"""Digests of everything that `prepare` and `export` write, to compare two versions of the code byte for byte.

    python -m tools.output_digests --tokenizer FOLDER … --output before.json FILE …
    python -m tools.output_digests --tokenizer FOLDER … --compare before.json FILE …

Each file is prepared with each tokenizer, in `conversation` and in `faithful` turns, with a fixed date. Covered are the
shards, the manifest, and an export in every format that serves the data. Refusals count as output, by the class of the
error. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import blake3

import penstock as ps
from penstock.exchange.formats import format_names

DATE = "2026-01-01"


def digests(source: Path, tokenizer: Path, limit: int | None) -> Iterator[tuple[str, str]]:
    """Names and digests of what one file becomes."""
    for turns in ("conversation", "faithful"):
        label = f"{source.name} {tokenizer.name} {turns}"
        with tempfile.TemporaryDirectory(prefix="penstock-digests-") as folder:
            try:
                dataset = ps.prepare(
                    source, tokenizer=tokenizer, cache=f"{folder}/cache", workers=1, date=DATE, turns=turns,
                    on_bad_row="quarantine", limit=limit, progress=False,
                )  # fmt: skip
            except ps.PenstockError as error:
                yield label, type(error).__name__
                continue
            for number in range(len(dataset.shards)):
                yield f"{label} shard {number}", digest(dataset.shards.file(number))
            yield f"{label} manifest", digest(dataset.path / "manifest.json")
            for name in format_names():
                try:
                    dataset.view(regions_unknown="drop").export(name, f"{folder}/{name}")
                except ps.PenstockError as error:
                    yield f"{label} {name}", type(error).__name__
                    continue
                files = sorted(path for path in Path(folder, name).rglob("*") if path.is_file())
                for path in files:
                    yield f"{label} {name} {path.relative_to(folder)}", digest(path)


def digest(path: Path) -> str:
    """The digest of a file's bytes."""
    return blake3.blake3(path.read_bytes()).hexdigest()


def main() -> int:
    """Writes or compares the digests."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, help="rows per file")
    parser.add_argument("--output", type=Path, help="where to write the digests")
    parser.add_argument("--compare", type=Path, help="digests of another version")
    given = parser.parse_args()
    found = {
        name: value for t in given.tokenizer for file in given.files for name, value in digests(file, t, given.limit)
    }
    if given.output:
        given.output.write_text(json.dumps(found, indent=1))
    expected = json.loads(given.compare.read_text()) if given.compare else found
    differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    for name in differing:
        print(f"differs: {name}: {expected.get(name, 'missing')} -> {found.get(name, 'missing')}")
    print(f"{len(found)} outputs, {len(differing)} differ")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
