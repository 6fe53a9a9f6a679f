"""Prepares the bundled data, inspects it, changes the loss mask without encoding again, and trains a few steps."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import penstock as ps

HERE = Path(__file__).parent
PENSTOCK = [sys.executable, "-m", "penstock.cli"]


def run(*arguments: str) -> None:
    """Run the penstock command, showing it first."""
    print(f"\n$ penstock {' '.join(arguments)}", flush=True)
    subprocess.run([*PENSTOCK, *arguments], check=True, cwd=HERE.parent)


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        chats = str(HERE / "data" / "chats.jsonl")
        tokenizer = str(HERE / "tokenizer")
        run("prepare", chats, "--tokenizer", tokenizer, "--cache", cache)
        run("prepare", chats, "--tokenizer", tokenizer, "--cache", cache)  # a cache hit: the content is the same

        ds = ps.prepare(chats, tokenizer=tokenizer, cache=cache)
        run("show", str(ds.path), "--row", "0")
        run("stats", str(ds.path))

        print("\nThe same tokens under other views (nothing is encoded again):")
        for options in (
            {},
            {"train_on": "last_assistant_message"},
            {"max_length": 48, "overlong": "drop"},
            {"holdout": 0.1},
        ):
            view = ds.view(**options)
            trained = sum(int(view[i].loss_mask.sum()) for i in range(len(view)))
            options_text = ", ".join(f"{name}={value!r}" for name, value in options.items())
            print(f"  view({options_text}): {len(view)} rows, {trained} trained tokens")

        print("\nA few steps on a tiny model with random weights, packed rows, prefetched batches:")
        changes = (f"output={cache}/run", f"data.prepare.cache={cache}", "loader.epochs=1")
        run("train", "sft", "examples/sft.yaml", *changes)

        report = Path(tempfile.gettempdir()) / "penstock-demo.html"
        run("report", str(ds.path), "--max-length", "128", "--run", f"{cache}/run", "-o", str(report))
        print("\nOpen the report in a browser. To browse the rows themselves:")
        print("  penstock prepare examples/data/chats.jsonl --tokenizer examples/tokenizer")
        print(f"  penstock view {ds.key[:15]}    # needs pip install 'penstock[look]'")


if __name__ == "__main__":
    main()
