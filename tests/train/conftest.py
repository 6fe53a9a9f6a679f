"""Tiny random models, small data, runs of a few steps. A single thread makes runs reproducible on a busy machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import Config

COMMON = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, **HEADS, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2": {
        **COMMON,
        **HEADS,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "qwen3": {**COMMON, **HEADS, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    "gpt2": {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 512},
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json for each architecture."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in ARCHITECTURES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(models: Path, cache: Path, examples: Path, tmp_path: Path) -> Config:
    """Returns `make(method, name, **sections)`, which builds a small configuration; sections update the defaults."""

    def make(method: str = "sft", name: str = "run", model: str = "llama", **sections: Any) -> dict[str, Any]:
        source = "chats.jsonl" if method == "sft" else "pairs.jsonl"
        values: dict[str, dict[str, Any]] = {
            "model": {"init": str(models / model), "tokenizer": str(examples / "tokenizer")},
            "data": {"sources": [str(examples / "data" / source)], "prepare": {"cache": str(cache)}},
            "view": {"max_length": 128},
            "loader": {"batch_size": 8, "steps": 6},
            "optim": {"lr": 3e-3},
        }
        for section, value in sections.items():
            values[section] = {**values.get(section, {}), **value} if isinstance(value, dict) else value
        return {"output": str(tmp_path / name), **values}

    return make
