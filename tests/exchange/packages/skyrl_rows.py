"""Reads an export through SkyRL's own cache and collator: skyrl_rows.py CACHE KEY-SETTINGS-AS-JSON.

`skyrl.backends` does not import on Python 3.11, so the functions that read the format are compiled from its source.
"""

import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from bare import definitions
from datasets import Dataset


class TrainingInputBatch(dict):
    metadata: dict


if __name__ == "__main__":
    cache, settings = sys.argv[1], json.loads(sys.argv[2])
    names = {"_compute_cache_key", "_get_cache_path", "_load_from_cache", "collate_sft_batch"}
    known = {"json": json, "os": os, "torch": torch, "Dataset": Dataset, "TensorList": list}
    known |= {"TrainingInputBatch": TrainingInputBatch, "logger": logging.getLogger()}
    skyrl = definitions("skyrl.train.sft_trainer", names, known)
    path = skyrl["_get_cache_path"](cache, skyrl["_compute_cache_key"](**settings))
    if not Path(path).is_dir():
        print(json.dumps({"path": path}))
        sys.exit()
    rows = skyrl["_load_from_cache"](path)
    batch = skyrl["collate_sft_batch"](rows[:5], SimpleNamespace(pad_token_id=0))
    tensors = {name: batch[name].tolist() for name in ("sequences", "attention_mask", "loss_mask")}
    print(json.dumps({"path": path, "rows": rows, "batch": tensors}))
