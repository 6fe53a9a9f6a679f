"""Prepares the same rows with Penstock and with what people use: the time, and the rows whose tokens or masks differ.

    python -m benchmarks.peers --model FOLDER [--data FILE.jsonl …] [--megabytes 24] [--rounds 2] [--json FILE]

Peers are a loop over transformers' `apply_chat_template` with masks, `datasets.map(num_proc=…)` around it, and TRL's
`SFTTrainer`, which prepares its data when it is constructed (with a tiny model). Each runs in a new process; its clock
starts after imports and loading, and stops when the tokens are where a trainer can read them. For Penstock that
includes starting its engines and workers and committing the dataset. All use trl's template with {% generation %} tags
for the model, so that all make masks. Rounds alternate; the fastest of each is compared. Exits with 1 if a token
differs from transformers' own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.grow import MATERIAL, grow_rows, material
from benchmarks.models import trl_templates

ROOT = Path(__file__).parent.parent
Result = tuple[float, list[Sequence[int]], list[Sequence[int]]]  # seconds, ids and masks


def _tokenizer(model: Path, template: str) -> Any:
    from benchmarks.oracle import reference_tokenizer

    found = reference_tokenizer(model)
    found.chat_template = template
    return found


def _encode(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    encoded = tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}


def transformers_loop(model: Path, template: str, rows: list[dict[str, Any]], _: int) -> Result:
    tokenizer = _tokenizer(model, template)
    began = time.perf_counter()
    encoded = [_encode(row, tokenizer) for row in rows]
    seconds = time.perf_counter() - began
    return seconds, [e["input_ids"] for e in encoded], [e["assistant_masks"] for e in encoded]


def datasets_map(model: Path, template: str, rows: list[dict[str, Any]], processes: int) -> Result:
    import datasets

    tokenizer = _tokenizer(model, template)
    with tempfile.TemporaryDirectory() as folder:
        given = datasets.Dataset.from_list([{"row": json.dumps(row)} for row in rows])
        began = time.perf_counter()
        found = given.map(
            _encode_json, fn_kwargs={"tokenizer": tokenizer}, num_proc=processes if processes > 1 else None,
            cache_file_name=str(Path(folder, "cache.arrow")), remove_columns=["row"],
        )  # fmt: skip
        seconds = time.perf_counter() - began
        return seconds, list(found["input_ids"]), list(found["assistant_masks"])


def _encode_json(row: dict[str, str], tokenizer: Any) -> dict[str, Any]:
    return _encode(json.loads(row["row"]), tokenizer)  # Arrow would add null keys to messages


def trl_trainer(model: Path, template: str, rows: list[dict[str, Any]], processes: int) -> Result:
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = _tokenizer(model, template)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tiny = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    network = LlamaForCausalLM(tiny)
    given = datasets.Dataset.from_list([{"messages": row["messages"]} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, max_length=None, assistant_only_loss=True, dataset_num_proc=processes if processes > 1 else None,
            report_to=[], use_cpu=True, bf16=False,
        )  # fmt: skip
        began = time.perf_counter()
        trainer = SFTTrainer(network, args=config, train_dataset=given, processing_class=tokenizer)
        seconds = time.perf_counter() - began
        found = trainer.train_dataset
        return seconds, list(found["input_ids"]), [[k != -100 for k in labels] for labels in found["labels"]]


def penstock(model: Path, template: str, rows: list[dict[str, Any]], processes: int) -> Result:
    import penstock as ps

    with tempfile.TemporaryDirectory() as folder:
        file, chat = Path(folder, "rows.jsonl"), Path(folder, "template.jinja")
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        chat.write_text(template)
        began = time.perf_counter()
        dataset = ps.prepare(
            file, tokenizer=str(model), template=str(chat), cache=Path(folder, "cache"), workers=processes,
            progress=False, tokenizer_as="file",
        )  # fmt: skip
        seconds = time.perf_counter() - began
        view = dataset.view()
        examples = [view[number] for number in range(len(view))]
        return seconds, [e.input_ids for e in examples], [e.loss_mask for e in examples]


PEERS: dict[str, Callable[[Path, str, list[dict[str, Any]], int], Result]] = {
    "transformers": transformers_loop,
    "datasets.map": datasets_map,
    "TRL SFTTrainer": trl_trainer,
    "penstock": penstock,
}


def run_peer(name: str, model: Path, template: Path, file: Path, processes: int, out: Path) -> None:
    """In a process of its own: prepares the rows, and writes the seconds and a hash of each row."""
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    seconds, ids, masks = PEERS[name](model, template.read_text(), rows, processes)
    found = [
        [xxhash.xxh3_64_hexdigest(np.asarray(row, kind).tobytes()) for row in column]
        for column, kind in ((ids, np.int64), (masks, np.bool_))
    ]
    out.write_text(json.dumps({"seconds": seconds, "ids": found[0], "masks": found[1]}))


def compare(model: Path, file: Path, template: str, cores: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Runs all peers, with one process and with all cores."""
    chat = folder / "template.jinja"
    chat.write_text(template)
    best: dict[tuple[str, int], dict[str, Any]] = {}
    runs = [(name, count) for count in dict.fromkeys((1, cores)) for name in PEERS]
    for _ in range(rounds):
        for name, count in runs:
            if name == "transformers" and count > 1:
                continue
            out = folder / "out.json"
            command = [sys.executable, "-m", "benchmarks.peers", "--peer", name, "--model", str(model)]
            command += ["--data", str(file), str(chat), str(out), "--processes", str(count)]
            quiet = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
            subprocess.run(command, check=True, cwd=ROOT, env=quiet, stdout=subprocess.DEVNULL)
            found = json.loads(out.read_text())
            if (name, count) not in best or found["seconds"] < best[name, count]["seconds"]:
                best[name, count] = found
    truth = best["transformers", 1]
    ours = {count: best["penstock", count]["seconds"] for _, count in runs}
    return {
        f"{name}, {count} {'process' if count == 1 else 'processes'}": {
            "seconds": found["seconds"],
            "penstock_is_faster": found["seconds"] / ours[count],
            "rows": len(found["ids"]),
            "other_tokens": sum(a != b for a, b in zip(found["ids"], truth["ids"], strict=True)),
            "other_masks": sum(a != b for a, b in zip(found["masks"], truth["masks"], strict=True)),
        }
        for (name, count), found in best.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--template", default="qwen2_5_training", help="one of trl's, with generation tags")
    parser.add_argument("--data", nargs="+", type=Path, default=[MATERIAL / "chats.jsonl"])
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        file, chat, out = arguments.data
        run_peer(arguments.peer, arguments.model, chat, file, arguments.processes, out)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        rows = [{key: row[key] for key in ("messages", "tools") if row.get(key)} for row in material(arguments.data)]
        plain = [row for row in rows if "tools" not in row and not any("tool_calls" in m for m in row["messages"])]
        file = grow_rows(plain, int(arguments.megabytes * 1e6), Path(scratch, "rows.jsonl"))
        cores = len(os.sched_getaffinity(0))
        template = trl_templates()[arguments.template]
        found = compare(arguments.model, file, template, cores, arguments.rounds, Path(scratch))
    print(f"{'':30} {'seconds':>8} {'penstock ×':>10} {'rows':>8} {'other tokens':>12} {'other masks':>11}")
    for name, row in found.items():
        figures = f"{row['seconds']:8.1f} {row['penstock_is_faster']:10.1f} {row['rows']:8,}"
        print(f"{name:30} {figures} {row['other_tokens']:12,} {row['other_masks']:11,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    wrong = [name for name, row in found.items() if name.startswith("penstock") and row["other_tokens"]]
    print(f"MISSED: other tokens: {', '.join(wrong)}" if wrong else "all tokens equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
