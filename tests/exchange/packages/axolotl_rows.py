"""Loads an export as Axolotl's own data loading does: axolotl_rows.py DATASET-ENTRY-AS-JSON."""

import json
import sys

from axolotl.utils.data.shared import load_dataset_with_config
from axolotl.utils.data.wrappers import get_dataset_wrapper
from axolotl.utils.dict import DictDefault

if __name__ == "__main__":
    config = DictDefault(json.loads(sys.argv[1]))
    dataset = load_dataset_with_config(config, use_auth_token=False)
    wrapped, prompter = get_dataset_wrapper(
        config, tokenizer=None, cfg=DictDefault({}), dataset_base_type=None, dataset=dataset
    )
    rows = [dict(row) for row in wrapped]
    print(json.dumps({"rows": rows, "prompter": type(prompter).__name__}))
