"""Saves the final model in Hugging Face format, with its tokenizer and the template it was trained with.

    OUTPUT/model/   config.json, model.safetensors (or only the adapters), tokenizer.json, chat_template.jinja, …

Written under a temporary name and renamed; `tokenizer.json` is byte for byte the one that encoded the training data.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.store.dataset import StoredDataset
from penstock.tokenizer.auto import PLAIN_CLASSES, compare
from penstock.train.config import TrainConfig
from penstock.train.data import Served, tokenizer_of, views_of
from penstock.train.output.checkpoint import sync_tree, written_whole

if TYPE_CHECKING:
    from accelerate import Accelerator


def save_model(accelerator: Accelerator, model: Any, config: TrainConfig, served: Served) -> Path:
    """Writes the final model; call it on all ranks."""
    target, temporary = config.output / "model", config.output / ".writing-model"
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        plain = accelerator.unwrap_model(model)
        if config.lora.rank and config.lora.merge:
            plain, weights = plain.merge_and_unload(), None
        with written_whole(target, temporary):
            plain.save_pretrained(temporary, state_dict=weights)
            _save_tokenizer(temporary, config, served)
            sync_tree(temporary)
        if target.exists():
            replaced = config.output / ".replaced-model"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
            temporary.rename(target)
            shutil.rmtree(replaced)
        else:
            temporary.rename(target)
    accelerator.wait_for_everyone()
    return target


def _save_tokenizer(folder: Path, config: TrainConfig, served: Served) -> None:
    dataset = views_of(served)[0].dataset
    assert isinstance(dataset, StoredDataset), "runs train on prepared datasets"
    tokenizer = _tokenizer(config, dataset)
    template = dataset.recipe["templates"].get("default")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(dataset.tokenizer_json)
    if compare(folder, dataset.tokenizer_json).difference:  # its class would modify the tokenizer
        file = folder / "tokenizer_config.json"
        known = json.loads(file.read_text())
        file.write_text(json.dumps({**known, "tokenizer_class": PLAIN_CLASSES[0]}, indent=2, ensure_ascii=False))


def _tokenizer(config: TrainConfig, dataset: StoredDataset) -> Any:
    """The tokenizer as transformers loads it, or a generic one if there is only a tokenizer.json."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    name = Path(tokenizer_of(config.model)).expanduser()
    revision = config.model.revision if config.model.tokenizer is None else None
    try:
        return AutoTokenizer.from_pretrained(
            str(name.parent if name.is_file() else tokenizer_of(config.model)),
            revision=revision,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError):
        tokenizer = Tokenizer.from_str(dataset.tokenizer_json.decode())
        special = dataset.recipe["special_tokens"]
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]
