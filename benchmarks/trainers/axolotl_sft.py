"""Axolotl's own preparation, as `axolotl preprocess` calls it: reads the file, tokenizes, masks and saves the dataset.

    .exits/bin/python -m benchmarks.trainers.axolotl_sft MODEL TEMPLATE ROWS PROCESSES OUT

Imports are inside the function: `datasets` starts processes that import this module again.
"""

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.prepared import PreparedRows, Stopwatch


def prepare(model: Path, template: Path, rows: Path, processes: int) -> PreparedRows:
    os.environ.update(AXOLOTL_IS_PREPROCESS="1", AXOLOTL_DO_NOT_TRACK="1")
    from axolotl.utils.data.sft import prepare_datasets
    from axolotl.utils.dict import DictDefault
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template.read_text()
    with tempfile.TemporaryDirectory() as folder:
        config = DictDefault(
            datasets=[{"path": str(rows), "ds_type": "json", "type": "chat_template"}],
            chat_template="tokenizer_default",
            dataset_num_proc=processes,
            dataset_prepared_path=folder,
            excess_length_strategy="raise",
            is_preprocess=True,
            sequence_len=1 << 20,  # nothing is cut
            shuffle_merged_datasets=False,  # rows are compared in order
            val_set_size=0,
        )
        with Stopwatch() as watch:
            dataset, *_ = prepare_datasets(config, tokenizer)
        labels = dataset["labels"]
        return PreparedRows.of(watch, list(dataset["input_ids"]), [[k != -100 for k in row] for row in labels])


if __name__ == "__main__":
    given, out = sys.argv[1:-1], Path(sys.argv[-1])
    prepare(*map(Path, given[:3]), int(given[3])).write(out)
