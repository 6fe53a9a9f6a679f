"""Prints the documents of exports as OLMo-core's own numpy dataset classes read them: olmo.py WORK FOLDER…"""

import json
import os
import sys
from pathlib import Path

from olmo_core.data import NumpyPackedFSLDatasetConfig, NumpyPaddedFSLDatasetConfig, TokenizerConfig
from olmo_core.data.types import NumpyDatasetDType
from olmo_core.data.utils import get_labels


def padded(facts: dict, common: dict) -> object:
    """One document per item."""
    return NumpyPaddedFSLDatasetConfig(sequence_length=facts["longest"], **common).build()


def packed(facts: dict, common: dict) -> object:
    """Several documents per item, packed by OLMo-core."""
    length = 1 << facts["longest"].bit_length()
    return NumpyPackedFSLDatasetConfig(
        sequence_length=length, generate_doc_lengths=True, use_array_if_local=False, **common
    ).build()


def items(dataset: object) -> list[dict]:
    """Everything that a dataset returns for its items."""
    dataset.prepare()
    found = []
    for number in range(len(dataset)):
        item = dataset[number]
        labels = get_labels({name: item[name][None] for name in ("input_ids", "label_mask")})[0]
        lengths = item["doc_lens"].tolist() if "doc_lens" in item else None
        ids, mask = item["input_ids"].tolist(), item["label_mask"].tolist()
        found.append({"ids": ids, "mask": mask, "labels": labels.tolist(), "lengths": lengths})
    return found


if __name__ == "__main__":
    os.environ["OLMO_DATA_PREP_USE_ARRAY_IF_LOCAL"] = "0"  # use the bounds in csv.gz: chats contain eos tokens
    answers = []
    for folder in map(Path, sys.argv[2:]):
        facts = json.loads((folder / "penstock.json").read_text())["facts"]
        paths = sorted(map(str, folder.glob("token_ids_part_*.npy")))
        common = {
            "tokenizer": TokenizerConfig(vocab_size=facts["vocab_size"], eos_token_id=2, pad_token_id=0),
            "dtype": NumpyDatasetDType(facts["dtype"]),
            "paths": paths,
            "label_mask_paths": [path.replace("token_ids", "labels_mask") for path in paths],
            "work_dir": sys.argv[1],
        }
        answers.append({"padded": items(padded(facts, common)), "packed": items(packed(facts, common))})
    print(json.dumps(answers))
