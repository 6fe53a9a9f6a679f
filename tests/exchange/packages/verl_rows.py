"""Reads an export with the docs' dataset class and verl's own loader and collator: verl_rows.py CLASS-FILE FOLDER."""

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.import_utils import load_extern_object

if __name__ == "__main__":
    kind = load_extern_object(sys.argv[1], "Prepared")
    files = sorted(map(str, Path(sys.argv[2]).glob("data/*.parquet")))
    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 10_000})
    dataset = kind(parquet_files=files, tokenizer=None, config=config, processor=None, max_samples=-1)
    rows = [{name: value.tolist() for name, value in dataset[n].items()} for n in range(len(dataset))]
    batch = SFTTensorCollator("no_padding")([dataset[n] for n in range(3)])
    flat = {name: batch[name].values().tolist() for name in ("input_ids", "loss_mask", "position_ids")}
    print(json.dumps({"rows": rows, "flat": flat}))
