"""Configurations: YAML, overrides, and errors that state the remedy."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.load.options import LoaderOptions
from penstock.train.config import FIXED, TrainConfig, flat, plain, read_config
from tools.train_reference import keys_list, loader_list

pytestmark = pytest.mark.slow

EXAMPLE = {"model": {"init": "x"}, "data": {"sources": ["a.jsonl", {"path": ["b", "c"], "weight": 0.3}]}}


def test_overrides_replace_values() -> None:
    config = read_config(
        EXAMPLE, ["optim.lr=1e-5", "data.sources.0.examples=500", "loader.collate=packed", "lora.targets=q_proj"]
    )
    assert config.optim.lr == 1e-5
    assert [source.path for source in config.data.sources] == [("a.jsonl",), ("b", "c")]
    assert (config.data.sources[0].examples, config.data.sources[1].weight) == (500, 0.3)
    assert config.lora.targets == ("q_proj",)
    assert EXAMPLE["data"] == {"sources": ["a.jsonl", {"path": ["b", "c"], "weight": 0.3}]}


def test_round_trip() -> None:
    config = read_config(EXAMPLE, ["view.holdout=0.05", "optim.betas=[0.8, 0.9]"])
    assert read_config(plain(config)) == config
    assert flat(plain(config))["optim.betas"] == [0.8, 0.9]


def test_example_configurations(examples: Path) -> None:
    for name in ("sft.yaml", "dpo.yaml"):
        assert read_config(examples / name).data.sources


def test_empty_sections_are_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  init: x\nlora:\n")
    assert read_config(path).lora == TrainConfig().lora


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "unknown option 'optim.lrr'. Did you mean 'lr'?"),
        ("opti.lr=1", "unknown option 'opti'. Did you mean 'optim'?"),
        ("data.sources.0.wieght=2", "unknown option 'data.sources.0.wieght'. Did you mean 'weight'?"),
        ("data.sources.5.weight=1", "'5' is not the index of an entry; there are 2"),
        ("optim.lr=abc", "optim.lr='abc' is not possible. Use a number"),
        ("optim=3", "optim=3: expected a section"),
        ("model.precision=fp8", "model.precision='fp8' is unknown. Use one of: auto, fp32, bf16-mixed, bf16"),
        ("loader.batch_size", "expected section.key=value"),
        ("loader.batch_size=[", "not valid YAML"),
    ],
)
def test_errors(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_config(EXAMPLE, [override])


def test_keys_with_an_earlier_place_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock")
    old = {"feed": {"batch_size": 4, "ahead": 0}, "data": {"sources": ["a"], "max_length": 9}, "eval": {"holdout": 5}}
    config = read_config(old, ["data.train_on=all_tokens"])
    new = {
        "loader": {"batch_size": 4, "prefetch": 0},
        "data": {"sources": ["a"]},
        "view": {"max_length": 9, "train_on": "all_tokens", "holdout": 5},
    }
    assert config == read_config(new)
    assert "feed.batch_size is read as loader.batch_size" in caplog.messages
    assert "eval.holdout is read as view.holdout" in caplog.messages
    with pytest.raises(UsageError, match=r"'feed.steps' means 'loader.steps', which is given too"):
        read_config({"loader": {"steps": 3}}, ["feed.steps=4"])
    with pytest.raises(UsageError, match=r"unknown option 'loader.batchsize'. Did you mean 'batch_size'\?"):
        read_config({"feed": {"batchsize": 3}})


@pytest.mark.parametrize("key", FIXED)
def test_what_the_run_sets_itself_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match=rf"{key} can't be set: .*\. Leave it out\."):
        read_config(EXAMPLE, [f"{key}=1"])
    assert key not in flat(plain(TrainConfig())) and f"`{key}`" not in keys_list()


def test_what_the_run_sets_itself_is_refused_in_a_record() -> None:
    with pytest.raises(UsageError, match=r"loader.seed can't be set: the whole run has one `seed`"):
        read_config(TrainConfig(loader=LoaderOptions(batch_size=2, seed=3)))


def test_a_loader_section_keeps_the_default_batch_size() -> None:
    assert read_config({"loader": {"epochs": 2}}).loader == LoaderOptions(batch_size=32, epochs=2)


def test_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Pass the path of a YAML file"):
        read_config(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UsageError, match="expected sections"):
        read_config(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "twice.yaml").write_text("optim: {lr: 1e-5}\nloader:\n  epochs: 1\noptim:\n  warmup: 3\n")
    with pytest.raises(UsageError, match="optim is set twice, first in line 1"):  # or lr would silently be the default
        read_config(tmp_path / "twice.yaml")
    with pytest.raises(UsageError, match="not valid YAML"):
        read_config(tmp_path / "broken.yaml")


def test_every_option_has_help() -> None:
    for section in fields(TrainConfig):
        kind = type(getattr(TrainConfig(), section.name))
        for option in fields(kind) if is_dataclass(kind) else [section]:
            assert option.metadata["help"], f"{section.name}.{option.name}"


def test_docs_list_every_key_and_option(examples: Path) -> None:
    assert keys_list() in (examples.parent / "docs" / "train.md").read_text()
    assert loader_list() in (examples.parent / "docs" / "feed.md").read_text()
