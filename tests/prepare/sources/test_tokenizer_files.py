"""Reading a tokenizer's files, completing them, and refusing unsupported ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import TemplateError, TokenizerError
from penstock.prepare.tokenizer.files import load_tokenizer
from penstock.prepare.tokenizer.vocabulary import Vocabulary


@pytest.fixture
def folder(tokenizer: Path, tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    return tmp_path


def configure(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_files_win_over_the_configuration(folder: Path) -> None:
    configure(
        folder, chat_template="from the configuration", bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>"
    )
    assert load_tokenizer(folder).template() == {"default": "from the configuration"}
    assert load_tokenizer(folder / "tokenizer.json").special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "chat_template.jinja").write_text("from the file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert load_tokenizer(folder).template() == {"default": "from the file", "tool_use": "with tools"}
    assert load_tokenizer(folder).template("tool_use") == {"default": "with tools"}


def test_tokens_declared_only_in_the_configuration_are_added_like_transformers(folder: Path) -> None:
    from transformers import AddedToken, PreTrainedTokenizerFast

    size = Vocabulary((folder / "tokenizer.json").read_bytes()).size
    flags = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    declared = {str(size): {"content": "<|new|>", **flags}}
    configure(folder, added_tokens_decoder=declared, bos_token="<bos>")
    model = load_tokenizer(folder)
    assert "lacks 2 token(s)" in model.warnings[0]
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        added_tokens_decoder={size: AddedToken("<|new|>", **flags)},
        bos_token="<bos>",
    )
    vocabulary = Vocabulary(model.tokenizer_json)
    assert vocabulary.id_of("<|new|>") == oracle.convert_tokens_to_ids("<|new|>") == size
    assert vocabulary.id_of("<bos>") == oracle.convert_tokens_to_ids("<bos>") == size + 1
    assert {"<|new|>", "<bos>"} <= vocabulary.special_contents


def test_a_complete_tokenizer_json_is_unchanged(tokenizer: Path) -> None:
    model = load_tokenizer(tokenizer)
    assert model.tokenizer_json == (tokenizer / "tokenizer.json").read_bytes()
    assert model.warnings == ()


def test_unsupported_tokenizers_raise(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="the folder does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    configure(folder, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(TemplateError, match="several chat templates and no default: rag. Choose one with template="):
        load_tokenizer(folder).template()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="invalid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("not json")
    with pytest.raises(TokenizerError, match="not a valid tokenizer.json"):
        load_tokenizer(folder)
