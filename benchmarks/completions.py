"""Compares string prompts and completions with TRL's SFTTrainer: ids, masks and the stop token, row by row.

    python -m benchmarks.completions --data FILE.jsonl … --models FOLDER … [--rows 500]

Takes the first question and answer of each conversation as `prompt` and `completion`; prompts end in one of the ways
that are usual: as they stand, or with a space, a newline, or `Answer:`. Prints JSON: equal rows by model, and the first
that differ. Exit code 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import penstock as ps

ENDS = ("", " ", "\n", "\n\nAnswer:", "\nAnswer: ")
Prepared = tuple[list[int], list[bool]]  # ids, and which of them are trained


def completions(files: Sequence[Path], rows: int) -> list[dict[str, str]]:
    """Prompts and completions of the files, about as many of each."""
    share = -(-rows // len(files))
    found = [row for file in files for row in islice(_pairs(file), share)]
    ends = (ENDS[number % len(ENDS)] for number in range(len(found)))
    return [{"prompt": prompt + end, "completion": answer} for (prompt, answer), end in zip(found, ends, strict=True)]


def _pairs(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_bytes().splitlines():
        said = {message["role"]: message["content"] for message in reversed(json.loads(line)["messages"])}
        if isinstance(said.get("user"), str) and isinstance(said.get("assistant"), str):
            yield said["user"], said["assistant"]


def prepared_by_trl(rows: Sequence[dict[str, str]], tokenizer: Path, folder: Path) -> list[Prepared]:
    """The ids and masks of TRL's SFTTrainer."""
    import datasets
    import transformers
    import trl

    own: Any = transformers.AutoTokenizer.from_pretrained(str(tokenizer))
    size: dict[str, int] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=len(own), num_attention_heads=1, num_key_value_heads=1, **size)
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=trl.SFTConfig(output_dir=str(folder / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=None),
        train_dataset=datasets.Dataset.from_list(list(rows)),
        processing_class=own,
    )
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in trainer.train_dataset]


def prepared(rows: Sequence[dict[str, str]], tokenizer: Path, folder: Path) -> list[Prepared]:
    """Our ids and masks."""
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    view = ps.prepare(source, tokenizer=str(tokenizer), cache=folder / "cache", workers="1").view()
    return [(view.example(k).input_ids.tolist(), view.example(k).loss_mask.tolist()) for k in range(len(rows))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders with a tokenizer")
    parser.add_argument("--rows", type=int, default=500)
    arguments = parser.parse_args()
    rows = completions(arguments.data, arguments.rows)[: arguments.rows]
    results = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            pairs = zip(prepared(rows, model, Path(folder)), prepared_by_trl(rows, model, Path(folder)), strict=True)
            differ = [rows[number] for number, (ours, theirs) in enumerate(pairs) if ours != theirs]
        results[model.name] = {"rows": len(rows), "equal": len(rows) - len(differ), "first_differing": differ[:3]}
    print(json.dumps(results, indent=2, ensure_ascii=False))
    return 1 if any(result["first_differing"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
