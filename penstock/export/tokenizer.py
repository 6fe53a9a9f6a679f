"""The `tokenizer/` of an export: the very tokenizer.json of the dataset, and what transformers needs beside it."""

from __future__ import annotations

import orjson

from penstock.export.folder import Folder
from penstock.view.examples import Examples


def write_tokenizer(dataset: Examples, folder: Folder) -> None:
    """Write the tokenizer, where the dataset has one (examples in memory have none)."""
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
