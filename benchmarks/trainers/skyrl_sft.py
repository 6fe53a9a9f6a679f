"""SkyRL's own preparation, as its `SFTTrainer` does it: reads the file, tokenizes, masks and saves its cache.

    .exits/bin/python -m benchmarks.trainers.skyrl_sft MODEL TEMPLATE ROWS PROCESSES OUT

The trainer's module also imports the training backends, which fail to import on Python 3.11, so what prepares the data
is compiled from its source, unchanged. Its worker processes thus import less than with SkyRL itself.
"""

import functools
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace

from bare import definitions
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer

from benchmarks.prepared import PreparedRows, Stopwatch

SOURCES = {
    "skyrl.train.config.sft_config": ["TrainOnWhat"],
    "skyrl.train.generators.utils": [
        "encode_messages_subset", "get_generation_prompt_ids", "_find_generation_prompt_boundary",
        "get_response_ids_and_loss_mask_from_messages",
    ],
    "skyrl.train.sft_trainer": [
        "_NORMALIZED_KEYS", "_parse_tools_str", "_coerce_tools", "_normalize_tool_call_payload",
        "_normalize_chat_messages", "_unbatch", "_tokenize_chat_last_assistant", "_tokenize_chat_all_assistants",
        "tokenize_chat_example", "_tokenize_chat_slice_worker", "_compute_cache_key", "_get_cache_path",
        "_load_from_cache", "_save_to_cache", "SFTTrainer._load_and_tokenize",
    ],
}  # fmt: skip
skyrl = {
    "__name__": __name__, "AutoTokenizer": AutoTokenizer, "Dataset": Dataset, "StrEnum": StrEnum,
    "functools": functools, "json": json, "load_dataset": load_dataset, "logger": logging.getLogger("skyrl"),
    "mp": multiprocessing, "os": os, "tempfile": tempfile,
}  # fmt: skip
for module, names in SOURCES.items():
    definitions(module, names, skyrl)
_tokenize_chat_slice_worker = skyrl["_tokenize_chat_slice_worker"]  # SkyRL's processes look for it here


def prepare(model: Path, template: Path, rows: Path, processes: int) -> PreparedRows:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template.read_text()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        shutil.copy(rows, source / "train.jsonl")
        settings = SimpleNamespace(
            cache_dir=str(Path(folder, "cache")), disable_cache=False, force_recache=False, max_length=None,
            messages_key="messages", model=SimpleNamespace(path=str(model)),
            num_workers=processes if processes > 1 else 0, system_key="system", tools_key="tools",
            train_on_what=skyrl["TrainOnWhat"].ALL_ASSISTANT_MESSAGES,
        )  # fmt: skip
        trainer = SimpleNamespace(sft_cfg=settings, tokenizer=tokenizer, is_vlm=False, processor=None)
        with Stopwatch() as watch:
            found = skyrl["_load_and_tokenize"](trainer, str(source), "train")
    masks = [[0] * (len(row["input_ids"]) - row["num_actions"]) + row["loss_mask"] for row in found]
    return PreparedRows.of(watch, [row["input_ids"] for row in found], masks)


if __name__ == "__main__":
    given, out = sys.argv[1:-1], Path(sys.argv[-1])
    prepare(*map(Path, given[:3]), int(given[3])).write(out)
