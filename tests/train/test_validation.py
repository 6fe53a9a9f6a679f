"""Unsupported configurations are rejected before training, and a non-finite loss or gradient ends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import NonFiniteError, PenstockError, UnsupportedError, UsageError
from penstock.train import objective
from penstock.train.objective import sft_terms
from penstock.train.run import train
from tests.train.runs import Config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("liger.enabled=true", "can't be imported|need a GPU"),
        ("loader.collate=pairs", "does not fit"),
        ("loader.collate=tree", "relies on its own attention mask.* Use loader.collate=packed or padded"),
        ("model.attention=flash_attention_2", "rejected by transformers"),
        ("model.attention=nonsense", "rejected by transformers"),
        ("view.max_length=null", "longest sequence"),
        ("lora={rank: 2, targets: [nothing]}", "lora.targets"),
        ("optim.warmup=50", "never be reached"),
        ("eval.every=5", "nothing to evaluate on"),
        ("dpo.beta=0.2", "dpo is set, and this is `penstock train sft`"),
        ("checkpoint.keep=0", "checkpoint.keep=0"),
        ("loader.micro_batch=0", "loader.micro_batch=0 is not possible. Use an integer of 1 or more"),
        ("loader.steps=0", "loader.steps=0 is not possible"),
        ("seed=-1", "seed=-1 is not possible. Use an integer of 0 or more"),
        ("view.holdout=1.0", "a fraction between 0 and 1"),
        ("optim.clip=0", "stop all learning"),
        ("model.path=x", "either model.path"),
        ("data.sources=[]", "data.sources is empty"),
        ("data.sources=nowhere.jsonl", "nowhere.jsonl"),
        ("data.prepare.tokeniser=x", "unknown option 'tokeniser'. Did you mean 'tokenizer'?"),
        ("loader.epochs=3", "both set the length of the run"),
    ],
)
def test_rejected_for_sft(config: Config, override: str, reason: str, models: Path) -> None:
    short = json.loads((models / "llama" / "config.json").read_text()) | {"max_position_embeddings": 130}
    (models / "short").mkdir(exist_ok=True)
    (models / "short" / "config.json").write_text(json.dumps(short))
    values = config(model="short")
    with pytest.raises(PenstockError, match=reason):
        train("sft", values, override)
    assert not Path(values["output"], "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("liger.enabled=true", "dpo.reference=live"),
        ("loader.collate=packed", "DPO trains on pairs"),
        ("loss.mean=example", "Remove it"),
        ("dpo.label_smoothing=0.7", "below 0.5"),
        ("loader.capacity=100", "pairs can't be packed"),
    ],
)
def test_rejected_for_dpo(config: Config, override: str, reason: str) -> None:
    with pytest.raises(PenstockError, match=reason):
        train("dpo", config("dpo"), override)


def test_wrong_kind_of_data(config: Config) -> None:
    with pytest.raises(UnsupportedError, match="single conversations. Use `penstock train sft`"):
        train("dpo", config("sft"))
    with pytest.raises(UnsupportedError, match="preference pairs. Use `penstock train dpo`"):
        train("sft", config("dpo"))


def test_vocabulary_larger_than_the_model(config: Config, models: Path) -> None:
    small = json.loads((models / "llama" / "config.json").read_text()) | {"vocab_size": 100}
    (models / "small").mkdir(exist_ok=True)
    (models / "small" / "config.json").write_text(json.dumps(small))
    with pytest.raises(UnsupportedError, match="588 tokens but the model only 100 embeddings"):
        train("sft", config(model="small"))


def test_leaky_packing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without position_ids nothing isolates packed sequences, and the experiment detects it."""
    forward_inputs = objective.forward_inputs

    def leaking(model: Any, tensors: Any) -> dict[str, Any]:
        inputs = forward_inputs(model, tensors)
        return {"input_ids": inputs["input_ids"]}

    packed = {"collate": "packed", "capacity": 128, "steps": 2}
    train("sft", config(name="fine", loader=packed))
    monkeypatch.setattr(objective, "forward_inputs", leaking)
    values = config(name="leaks", loader=packed)
    with pytest.raises(
        UnsupportedError, match="packed sequences of this model attend to each other.*loader.collate=padded"
    ):
        train("sft", values)
    assert not Path(values["output"]).exists()


def test_packing_with_a_model_that_cannot_isolate(config: Config, models: Path) -> None:
    """Mamba's state carries over the whole row unless its kernels are installed."""
    (models / "mamba").mkdir(exist_ok=True)
    settings = {"model_type": "mamba", "vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    (models / "mamba" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match="packed sequences of this model attend to each other"):
        train("sft", config(model="mamba", loader={"collate": "packed", "capacity": 128}))


def test_non_finite_loss(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def poisoned(logits: torch.Tensor, wanted: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        losses, weights = sft_terms(logits, wanted)
        return losses * (float("nan") if calls == 8 else 1.0), weights  # step 4, second of two micro-batches

    monkeypatch.setattr(objective, "sft_terms", poisoned)
    values = config(loader={"batch_size": 4, "micro_batch": 2, "steps": 9})
    with pytest.raises(NonFiniteError, match=r"step 4: the loss is nan") as caught:
        train("sft", values)
    assert str(caught.value).count("chats.jsonl row ") == 2


def test_non_finite_gradient(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(logits: torch.Tensor, wanted: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses, weights = sft_terms(logits, wanted)
        return losses + (losses * 0).sqrt() * 0, weights  # finite, but its gradient is not

    monkeypatch.setattr(objective, "sft_terms", poisoned)
    with pytest.raises(NonFiniteError, match="norm of its gradient is nan"):
        train("sft", config())


def test_fused_loss_rejects_fractional_weights(config: Config, write_rows: Any, examples: Path) -> None:
    row = json.loads((examples / "data" / "chats.jsonl").read_text().splitlines()[1])
    row["messages"][-1]["weight"] = 0.5
    with pytest.raises(UnsupportedError, match="only supports message weights of 0 and 1"):
        train("sft", config(data={"sources": [str(write_rows([row]))]}), "liger.enabled=true")


def test_fused_dpo_loss_equals_the_unfused_one(config: Config) -> None:
    pytest.importorskip("liger_kernel")
    from tests.train.runs import metrics

    plain = config("dpo", "plain", dpo={"reference": "live"}, loader={"batch_size": 7, "micro_batch": 3, "steps": 4})
    kernels = {"enabled": True, "rms_norm": False, "rope": False, "mlp": False, "fused_loss": True}
    fused = {**plain, "output": plain["output"] + "-fused", "liger": kernels}
    train("dpo", plain)
    train("dpo", fused)
    for one, other in zip(metrics(plain), metrics(fused), strict=True):
        for name in ("loss", "reward_accuracy", "reward_margin", "grad_norm"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name


def test_usage_error(config: Config) -> None:
    with pytest.raises(UsageError):
        train("sft", config(), "loader.batch_size=0")
