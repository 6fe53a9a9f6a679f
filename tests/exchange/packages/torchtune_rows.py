"""Packs and collates an export with torchtune's own code: torchtune_rows.py FOLDER LENGTH.

Importing all of `torchtune` needs a torchao that doesn't support this torch; these modules don't need it.
"""

import json
import sys

from bare import without_init
from datasets import load_dataset

if __name__ == "__main__":
    without_init("torchtune", "torchtune.data", "torchtune.datasets", "torchtune.modules")
    from torchtune.data._collate import padded_collate_sft
    from torchtune.datasets._packed import PackedDataset

    dataset = load_dataset(sys.argv[1], split="train", cache_dir=sys.argv[3])
    rows = list(dataset)
    packs = PackedDataset(dataset, max_seq_len=int(sys.argv[2]))
    packed = [{name: packs[n][name].tolist() for name in ("tokens", "labels", "seq_lens")} for n in range(len(packs))]
    batch = {name: tensor.tolist() for name, tensor in padded_collate_sft(rows[:4]).items()}
    print(json.dumps({"packed": packed, "batch": batch}))
