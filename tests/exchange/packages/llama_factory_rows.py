"""Loads an export as LLaMA-Factory does for its tokenized_path: llama_factory_rows.py FOLDER.

The package pins conflicting dependencies, so the function that loads the data is compiled from its source.
"""

import json
import sys

from bare import definitions
from datasets import DatasetDict, load_from_disk

if __name__ == "__main__":
    names = definitions("llamafactory.data.data_utils", {"get_dataset_module"}, {"DatasetDict": DatasetDict})
    module = names["get_dataset_module"](load_from_disk(sys.argv[1]))
    print(json.dumps(module["train_dataset"].to_list()))
