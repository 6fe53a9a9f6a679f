"""LLaMA-Factory's own preparation, with its own template: reads the file, tokenizes, masks and saves the dataset.

    .exits/bin/python -m benchmarks.trainers.llama_factory_sft MODEL TEMPLATE ROWS PROCESSES OUT

LLaMA-Factory re-implements templates; TEMPLATE is that of Qwen2.5, whose counterpart is `qwen`. It imports
`torchaudio`, which text does not need, so an empty module stands in.
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path

from benchmarks.prepared import PreparedRows, Stopwatch


def prepare(model: Path, _: Path, rows: Path, processes: int) -> PreparedRows:
    os.environ.update(DISABLE_VERSION_CHECK="1")
    from transformers.utils import is_torchaudio_available

    if not is_torchaudio_available():  # transformers remembers the answer
        sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    from llamafactory.data.loader import get_dataset
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from transformers import AutoTokenizer, Seq2SeqTrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        columns = {"messages": "messages"}
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        entry = {"file_name": str(rows), "formatting": "sharegpt", "columns": columns}
        entry["tags"] = {**tags, "system_tag": "system"}
        Path(folder, "dataset_info.json").write_text(json.dumps({"rows": entry}))
        data = DataArguments(
            template="qwen", dataset="rows", dataset_dir=folder, cutoff_len=1 << 20,
            preprocessing_num_workers=processes if processes > 1 else None, tokenized_path=str(Path(folder, "out")),
        )  # fmt: skip
        training = Seq2SeqTrainingArguments(folder, report_to=[], use_cpu=True)
        template = get_template_and_fix_tokenizer(tokenizer, data)
        with Stopwatch() as watch:
            found = get_dataset(template, ModelArguments(str(model)), data, training, "sft", tokenizer)
        dataset = found["train_dataset"]
        labels = dataset["labels"]
        return PreparedRows.of(watch, list(dataset["input_ids"]), [[k != -100 for k in row] for row in labels])


if __name__ == "__main__":
    given, out = sys.argv[1:-1], Path(sys.argv[-1])
    prepare(*map(Path, given[:3]), int(given[3])).write(out)
