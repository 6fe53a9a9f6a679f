"""The `tokenizer/` folder of an export: the dataset's own tokenizer.json, plus the files that transformers needs."""

from __future__ import annotations

import orjson

from penstock.export.folder import ExportFolder
from penstock.view.examples import Examples


def write_tokenizer(dataset: Examples, folder: ExportFolder) -> None:
    """Writes the tokenizer, if the dataset has one (in-memory examples don't)."""
    tokenizer_json: bytes | None = getattr(dataset, "tokenizer_json", None)
    if tokenizer_json is None:
        return
    special = dict(dataset.recipe["special_tokens"])
    template = dataset.recipe["templates"].get("default")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    files = {
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": orjson.dumps(config, option=orjson.OPT_INDENT_2),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    for name, data in files.items():
        with folder.new(f"tokenizer/{name}") as file:
            file.write(data)
