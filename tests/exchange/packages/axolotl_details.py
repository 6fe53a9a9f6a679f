"""Masks rows as Axolotl's own strategy for chat templates does: axolotl_details.py TOKENIZER TEMPLATE ROWS."""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.update(AXOLOTL_IS_PREPROCESS="1", AXOLOTL_DO_NOT_TRACK="1")
    from axolotl.prompt_strategies.chat_template import load
    from axolotl.utils.dict import DictDefault
    from transformers import AutoTokenizer

    model, template, rows = map(Path, sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template.read_text()
    entry = {"roles_to_train": ["assistant"], "train_on_eos": "turn", "message_field_training_detail": "train_detail"}
    config = DictDefault(chat_template="tokenizer_default", train_on_inputs=False, sequence_len=1 << 20)
    strategy = load(tokenizer, config, ds_cfg=DictDefault(entry))
    found = [strategy.tokenize_prompt(json.loads(line)) for line in rows.read_text().splitlines()]
    print(json.dumps([{"ids": list(row["input_ids"]), "labels": list(row["labels"])} for row in found]))
