"""The final model, in Hugging Face format, with its tokenizer and the template it was trained with.

    OUTPUT/model/   config.json, model.safetensors (or the adapters alone), tokenizer.json, chat_template.jinja, …

Written under a temporary name and renamed; `tokenizer.json` is, byte for byte, the one that made the training data.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.store.dataset import StoredDataset
from penstock.train.checkpoint import sync_tree
from penstock.train.config import TrainConfig
from penstock.train.data import Served, tokenizer_of, views_of

if TYPE_CHECKING:
    from accelerate import Accelerator


def save_model(accelerator: Accelerator, model: Any, config: TrainConfig, served: Served) -> Path:
    """Write the final model; all ranks call it."""
    target, temporary = config.output / "model", config.output / ".writing-model"
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        plain = accelerator.unwrap_model(model)
        if config.lora.rank and config.lora.merge:
            plain, weights = plain.merge_and_unload(), None
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
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(config.model))
    dataset = views_of(served)[0].dataset
    template = dataset.recipe["templates"].get("default")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if isinstance(dataset, StoredDataset):
        (folder / "tokenizer.json").write_bytes(dataset.tokenizer_json)
