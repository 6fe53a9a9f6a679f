"""Compares the ids of tokenizer.json with AutoTokenizer: differences are found and named, and the option decides."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from penstock.build import auto_check
from penstock.build.options import prepare_options
from penstock.build.outcome import Outcome
from penstock.build.run import Builder
from penstock.errors import TokenizerError, UsageError
from penstock.prepare.tokenizer import auto
from penstock.prepare.tokenizer.auto import compare, load_auto, uses_file_as_is
from penstock.prepare.tokenizer.files import load_tokenizer
from penstock.train.data import _opened
from tests.support.spm_tokenizers import SHAPES

TURNS = [{"role": "user", "content": "It's 12345 now, isn't it?"}, {"role": "assistant", "content": "  Yes: 67,890."}]
TEMPLATE = "{% for m in messages %}<s> {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s> {% endif %}"


def folder_of(path: Path, tokenizer_json: bytes, config: dict[str, Any], /, **files: Any) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_bytes(tokenizer_json)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """Like GPT-4o's tokenizer: its pre-tokenizer differs from GPT2Tokenizer's."""
    tokenizer = Tokenizer(models.BPE())
    rule = pre_tokenizers.Split("\n", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [rule, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["It's 12345 now, isn't it? a  b Hello, world! 1,000,000"] * 5, trainer)
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATE, "eos_token": "</s>"}
    return folder_of(tmp_path / "gpt2", tokenizer.to_str().encode(), config)


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., Path]:
    """Like Mistral's first tokenizer: LlamaTokenizer replaces its normaliser."""
    config = {"tokenizer_class": "LlamaTokenizer", "chat_template": TEMPLATE, "eos_token": "</s>"}

    def made(**files: Any) -> Path:
        return folder_of(tmp_path / "llama", SHAPES["mistral"](), config, **files)

    return made


@pytest.fixture
def rows(write_rows: Callable[..., Path]) -> Path:
    return write_rows([{"messages": TURNS}] * 5)


def build(rows: Path, folder: Path, cache: Path, **options: Any) -> Outcome:
    given = {"tokenizer": str(folder), "cache": cache, "workers": "1", **options}
    return Builder([rows], prepare_options(given), None).run()


def ids_of_auto(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(folder))
    ids: list[int] = auto.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    return ids


def test_a_difference_in_the_pre_tokenizer_is_found(gpt2: Path) -> None:
    found = compare(gpt2, load_tokenizer(gpt2).tokenizer_json)
    assert found.name.startswith("GPT2Tokenizer of transformers ")
    assert found.difference.startswith("pre_tokenizer: ")
    assert "for example '" in found.difference and " with the file and " in found.difference


def test_a_difference_in_the_normaliser_is_found(llama: Callable[..., Path]) -> None:
    folder = llama()
    found = compare(folder, load_tokenizer(folder).tokenizer_json)
    assert found.name.startswith("LlamaTokenizer") and found.difference.startswith("normalizer: ")


@pytest.mark.parametrize("files", [{}, {"config": {"model_type": "mistral"}}], ids=["alone", "with config.json"])
def test_the_comparison_agrees_with_the_ids(llama: Callable[..., Path], files: dict[str, Any]) -> None:
    """Holds for any release of transformers, whatever the tokenizer class does."""
    folder = llama(**files)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = Tokenizer.from_str(load_auto(folder).tokenizer_json.decode())
    texts = ["<s> hello", "a  b", " x", "<s>hello</s> you", "I am fine."]
    same = all(ours.encode(text).ids == theirs.encode(text).ids for text in texts)
    assert bool(compare(folder, load_tokenizer(folder).tokenizer_json).difference) is not same


def test_a_folder_without_a_class_is_used_as_is(tokenizer: Path, tmp_path: Path) -> None:
    data = (tokenizer / "tokenizer.json").read_bytes()
    for number, config in enumerate(({}, {"tokenizer_class": "PreTrainedTokenizerFast"})):
        folder = folder_of(tmp_path / str(number), data, {**config, "eos_token": "<|im_end|>"})
        assert uses_file_as_is(folder)
        assert compare(folder, load_tokenizer(folder).tokenizer_json).difference == ""
    assert not uses_file_as_is(folder_of(tmp_path / "typed", data, {}, config={"model_type": "llama"}))


def test_remote_code_is_not_run(gpt2: Path) -> None:
    config = json.loads((gpt2 / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}}
    (gpt2 / "tokenizer_config.json").write_text(json.dumps(config))
    marker = gpt2 / "ran"
    (gpt2 / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    found = compare(gpt2, load_tokenizer(gpt2).tokenizer_json)
    assert not found.difference and not marker.exists()


def test_a_difference_stops_the_build(rows: Path, gpt2: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(TokenizerError) as caught:
            build(rows, gpt2, tmp_path / "cache")
        text = str(caught.value)
        assert "tokenizer.json and AutoTokenizer (GPT2Tokenizer of transformers" in text
        assert "tokenizer_as='auto'" in text and "tokenizer_as='file'" in text and "PreTrainedTokenizerFast" in text
    assert not list((tmp_path / "cache").glob("datasets/*/manifest.json"))


def test_the_remedies_work(rows: Path, gpt2: Path, tmp_path: Path) -> None:
    by_auto = build(rows, gpt2, tmp_path / "cache", tokenizer_as="auto")
    by_file = build(rows, gpt2, tmp_path / "cache", tokenizer_as="file")
    config = json.loads((gpt2 / "tokenizer_config.json").read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    fixed = folder_of(tmp_path / "fixed", (gpt2 / "tokenizer.json").read_bytes(), config)
    plain = build(rows, fixed, tmp_path / "cache", force=True)
    ids = [outcome.dataset.input_ids(0).tolist() for outcome in (by_auto, by_file, plain)]
    assert ids[0] == ids_of_auto(gpt2) != ids[1]
    assert ids[1] == ids[2] == ids_of_auto(fixed)
    assert by_file.dataset.key == plain.dataset.key != by_auto.dataset.key
    assert by_auto.dataset.recipe["tokenizer_as"] == "auto" and "tokenizer_as" not in by_file.dataset.recipe
    assert any("give different ids" in warning for warning in by_file.warnings)
    assert by_file.tokenizer.endswith("gives other ids than tokenizer.json, which is used")
    assert "goes by tokenizer.json, too" in plain.tokenizer


def test_the_comparison_is_cached(rows: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("loaded again")

    build(rows, gpt2, tmp_path / "cache", tokenizer_as="auto")
    build(rows, gpt2, tmp_path / "cache", tokenizer_as="file")
    monkeypatch.setattr(auto_check, "load_auto", never)
    monkeypatch.setattr(auto_check, "compare", never)
    for how in ("auto", "file"):
        again = build(rows, gpt2, tmp_path / "cache", tokenizer_as=how, force=True)
        assert again.tokenizer
    (gpt2 / "special_tokens_map.json").write_text("{}")
    with pytest.raises(AssertionError, match="loaded again"):
        build(rows, gpt2, tmp_path / "cache", tokenizer_as="file", force=True)


def test_without_transformers(rows: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "is_installed", lambda: False)
    monkeypatch.setattr(auto_check, "is_installed", lambda: False)
    outcome = build(rows, gpt2, tmp_path / "cache")
    assert outcome.tokenizer == "not compared with AutoTokenizer: transformers is not installed"
    with pytest.raises(TokenizerError, match="needs transformers"):
        build(rows, gpt2, tmp_path / "cache", tokenizer_as="auto")


def test_the_comparison_is_quick(deepseek: Path, tmp_path: Path) -> None:
    """With 128k tokens, beyond importing transformers."""
    import transformers  # noqa: F401

    folder = Path(shutil.copytree(deepseek, tmp_path / "deepseek"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    data = load_tokenizer(folder).tokenizer_json
    compare(folder, data)
    begin = time.process_time()
    compare(folder, data)
    assert time.process_time() - begin < 0.5


def test_the_comparison_runs_in_another_process(rows: Path, gpt2: Path, tmp_path: Path) -> None:
    """As from the command line: the process of the build doesn't import transformers."""
    program = (
        "import sys, penstock as ps\n"
        "source, tokenizer, cache = sys.argv[1:]\n"
        "try:\n"
        "    ps.prepare(source, tokenizer=tokenizer, cache=cache, workers=1)\n"
        "except ps.PenstockError as error:\n"
        "    print('give different ids' in str(error), 'transformers' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(rows), str(gpt2), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_training_accepts_only_datasets_of_its_tokenizer(
    rows: Path, gpt2: Path, tokenizer: Path, tmp_path: Path
) -> None:
    for how in ("auto", "file"):
        dataset = build(rows, gpt2, tmp_path / "cache", tokenizer_as=how).dataset
        assert _opened(dataset.path, str(gpt2), None).key == dataset.key
        with pytest.raises(UsageError, match="prepared with a different tokenizer"):
            _opened(dataset.path, str(tokenizer), None)


def test_a_vocabulary_that_transformers_converts(rows: Path, gpt2: Path, tmp_path: Path) -> None:
    file = gpt2 / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    (gpt2 / "vocab.json").write_text(json.dumps(model["vocab"]))
    (gpt2 / "merges.txt").write_text("".join(" ".join(merge) + "\n" for merge in model["merges"]))
    file.unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer.json \(found: .*tokenizer_as='auto'"):
        build(rows, gpt2, tmp_path / "cache")
    dataset = build(rows, gpt2, tmp_path / "cache", tokenizer_as="auto").dataset
    assert dataset.input_ids(0).tolist() == ids_of_auto(gpt2)


@pytest.mark.parametrize(
    ("name", "words"), [("tekken.json", "mistral-common"), ("qwen.tiktoken", "convert_tiktoken_to_fast")]
)
def test_other_vocabularies_are_refused_with_a_remedy(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    for for_auto in (False, True):
        with pytest.raises(TokenizerError, match=words):
            load_tokenizer(tmp_path, for_auto=for_auto)
