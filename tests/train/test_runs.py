"""Complete runs: losses fall, preferences are learned, and the outputs are usable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.train.reference import Scored
from penstock.train.run import train
from tests.train.runs import Config, losses, metrics

pytestmark = pytest.mark.slow


def test_loss_halves(config: Config, examples: Path) -> None:
    values = config(
        loader={"collate": "packed", "capacity": 128, "steps": 60}, optim={"lr": 1e-2}, view={"holdout": 20}
    )
    outcome = train("sft", values)
    assert outcome.signal == 0
    assert outcome.steps == 60
    found = losses(values)
    assert len(found) == 60
    assert found[-1] < found[0] / 2
    assert metrics(values)[-1]["eval_loss"] < found[0] / 2
    assert 0.9 < metrics(values)[0]["efficiency"] <= 1
    assert "<polyline" in (outcome.output / "loss.svg").read_text()


def test_final_model_loads_in_transformers(config: Config, examples: Path) -> None:
    outcome = train("sft", config(loader={"steps": 2}))
    assert outcome.model is not None
    model = AutoModelForCausalLM.from_pretrained(outcome.model)
    tokenizer = AutoTokenizer.from_pretrained(outcome.model)
    assert (outcome.model / "tokenizer.json").read_bytes() == (examples / "tokenizer" / "tokenizer.json").read_bytes()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model(**ids).logits.isfinite().all()


def test_tokenizer_json_alone(config: Config, examples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes((examples / "tokenizer" / name).read_bytes())
    for name in ("alone", "alone/tokenizer.json"):
        values = config(name=name.replace("/", "-"), loader={"steps": 1})
        values["model"]["tokenizer"] = str(tmp_path / name)
        outcome = train("sft", values)
        assert outcome.model is not None
        assert (
            AutoTokenizer.from_pretrained(outcome.model).chat_template == (folder / "chat_template.jinja").read_text()
        )


@pytest.mark.parametrize("reference", ["cached", "live"])
def test_preferences_are_learned(config: Config, reference: str) -> None:
    values = config("dpo", loader={"steps": 12}, dpo={"reference": reference})
    train("dpo", values)
    lines = metrics(values)
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert lines[-1]["reward_accuracy"] > 0.9 > lines[0]["reward_accuracy"]
    assert lines[-1]["reward_margin"] > 0


def test_cached_references_equal_live_ones_and_are_reused(config: Config, cache: Path) -> None:
    live, cached = config("dpo", "live", dpo={"reference": "live"}), config("dpo", "cached", view={"max_length": 96})
    live["view"]["max_length"] = 96
    train("dpo", live)
    train("dpo", cached)
    np.testing.assert_allclose(losses(live), losses(cached), atol=1e-6)
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("datasets/*/reference/*.npy")}
    assert kept
    train("dpo", config("dpo", "again", view={"max_length": 96}, optim={"lr": 1e-4}))
    assert kept == {path: path.stat().st_mtime_ns for path in cache.glob("datasets/*/reference/*.npy")}
    train("dpo", config("dpo", "other", view={"max_length": 96}, seed=1, loader={"steps": 1}))  # other random weights
    assert len(list(cache.glob("datasets/*/reference/*.npy"))) == len(kept) + 1


def scored_pairs(folder: Path) -> list[np.ndarray[Any, Any]]:
    """Which pairs of each stored file have values."""
    return [~np.isnan(np.load(path)).any(axis=1) for path in sorted(folder.rglob("*.npy"))]


def test_only_visited_pairs_are_scored(config: Config, tmp_path: Path) -> None:
    own = {"prepare": {"cache": str(tmp_path / "cache")}}
    seen: list[Scored] = []
    short = config("dpo", "short", data=own, loader={"batch_size": 4, "steps": 3})
    train("dpo", short, on_scored=seen.append)
    assert (seen[0].pairs, seen[-1].pairs, seen[-1].total) == (0, 12, 12)
    (shared,) = scored_pairs(tmp_path / "cache" / "datasets")
    (kept,) = scored_pairs(tmp_path / "short" / "reference")
    assert shared.sum() == kept.sum() == 12 < len(shared)
    before = np.load(next((tmp_path / "cache" / "datasets").rglob("*.npy")))
    whole = config("dpo", "whole", data=own, loader={"batch_size": 16, "steps": None, "epochs": 1})
    train("dpo", whole, on_scored=seen.append)
    assert (seen[-1].pairs, seen[-1].total) == (len(shared) - 12,) * 2  # those that the first run has not scored
    after = np.load(next((tmp_path / "cache" / "datasets").rglob("*.npy")))
    assert not np.isnan(after).any()
    assert np.array_equal(after[shared], before[shared])  # never replaced: other runs may use them


def test_references_of_a_resumed_run_are_those_it_began_with(config: Config, tmp_path: Path) -> None:
    def values(name: str) -> dict[str, Any]:
        own = {"prepare": {"cache": str(tmp_path / f"cache-{name}")}}
        return config("dpo", name, data=own, loader={"batch_size": 6, "steps": 6}, checkpoint={"every": 2})

    def fail(report: Any) -> None:
        if report.step == 5:
            raise KeyboardInterrupt

    train("dpo", values("uninterrupted"))
    with pytest.raises(KeyboardInterrupt):
        train("dpo", values("resumed"), on_report=fail)
    (stored,) = (tmp_path / "cache-resumed" / "datasets").rglob("*.npy")
    np.save(stored, np.load(stored) * np.float32(1.0001))  # as if another run had stored others meanwhile
    seen: list[Scored] = []
    train("dpo", values("resumed"), on_scored=seen.append)
    assert not seen
    assert losses(values("resumed")) == losses(values("uninterrupted"))
    train("dpo", values("resumed"), "checkpoint.resume=anyway", "loader.steps=7", on_scored=seen.append)
    assert 0 < seen[-1].total <= 6  # the pairs of the additional step


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_adapters(config: Config, method: str, models: Path) -> None:
    values = config(method, lora={"rank": 4, "dropout": 0.1}, loader={"steps": 8}, optim={"lr": 2e-2})
    if method == "dpo":
        values["dpo"] = {"reference": "live"}
    outcome = train(method, values)
    assert losses(values)[-1] < losses(values)[0]
    assert outcome.model is not None
    assert (outcome.model / "adapter_model.safetensors").is_file()
    (checkpoint,) = (outcome.output / "checkpoints").iterdir()
    assert (checkpoint / "model.safetensors").stat().st_size < 60_000


def test_merged_adapters(config: Config) -> None:
    outcome = train("sft", config(lora={"rank": 4, "merge": True}, loader={"steps": 2}))
    assert outcome.model is not None
    assert not (outcome.model / "adapter_config.json").exists()
    AutoModelForCausalLM.from_pretrained(outcome.model)


def test_mixture_by_weights_and_counts(config: Config, examples: Path) -> None:
    chats = str(examples / "data" / "chats.jsonl")
    sources = [
        {"path": chats, "weight": 0.25, "name": "some"},
        {"path": chats, "examples": 20, "prepare": {"split": "train[:50]"}},
    ]
    values = config(data={"sources": sources}, loader={"batch_size": 8, "steps": None, "epochs": 2})
    outcome = train("sft", values)
    assert outcome.steps == 2 * 15  # 100 + 20 examples per epoch
    assert sum(line["sequences"] for line in metrics(values)) == 240


def test_model_options(config: Config) -> None:
    plain, saving = config(name="plain"), config(name="saving", model="qwen3")
    saving["model"] = {**plain["model"], "gradient_checkpointing": True, "attention": "eager"}
    train("sft", plain)
    train("sft", saving)
    np.testing.assert_allclose(losses(plain), losses(saving), atol=1e-5)
    mixed = config(name="mixed")
    mixed["model"]["precision"] = "bf16-mixed"
    train("sft", mixed)
    np.testing.assert_allclose(losses(plain), losses(mixed), atol=0.05)
    assert losses(plain) != losses(mixed)


def test_example_mean(config: Config) -> None:
    padded, packed = config(name="padded", loss={"mean": "example"}), config(name="packed", loss={"mean": "example"})
    rows = {"batch_size": 100, "micro_batch": 1, "steps": 1}  # all of the data, so that both see the same rows
    for values in (padded, packed):
        values["data"]["prepare"] = {**values["data"]["prepare"], "split": "train[:100]"}
    padded["loader"], packed["loader"] = {**rows, "micro_batch": 20}, {**rows, "collate": "packed", "capacity": 128}
    train("sft", padded)
    train("sft", packed)
    np.testing.assert_allclose(losses(padded), losses(packed), atol=1e-5)
