"""Prints the sequences of exports as Megatron-Core's IndexedDataset reads them: megatron_rows.py FOLDER…"""

import json
import sys
from pathlib import Path

from megatron.core.datasets.indexed_dataset import IndexedDataset

if __name__ == "__main__":
    answers = []
    for folder in map(Path, sys.argv[1:]):
        tokens, masks = (IndexedDataset(str(folder / name)) for name in ("tokens", "loss_mask"))
        rows = [{"ids": tokens[n].tolist(), "mask": masks[n].tolist()} for n in range(len(tokens))]
        answers.append({"rows": rows, "documents": len(tokens.document_indices) - 1})
    print(json.dumps(answers))
