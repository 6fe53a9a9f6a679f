"""KTO: labels kept from the row to the batch, a loss that is TRL's, and runs that learn from it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, load_from_disk
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

import penstock as ps
from penstock.errors import RowError, UnsupportedError, UsageError
from penstock.train.config import KtoConfig
from penstock.train.kto import Kto
from penstock.train.objective import Policy
from penstock.train.reference import FrozenReference
from penstock.train.run import train
from tests.train.runs import Config, losses, metrics

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": f"{a} plus {b} is", "completion": f" {a + b + (not good) * 7}, I think.", "label": good}
    for a, b, good in [(1, 2, True), (30, 4, False), (7, 7, False), (9, 12, True), (5, 5, True), (10, 2, False)] * 4
]
VIEW: dict[str, Any] = {"train_on": "last_assistant_turn"}


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    path = tmp_path / "kto.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def chat(row: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    return {"messages": messages, "label": row["label"]}


@pytest.mark.parametrize("form", ["jsonl", "messages", "csv", "numbers", "numbers beside messages"])
def test_labels_are_kept(form: str, tokenizer: Path, tmp_path: Path) -> None:
    rows: Any = ROWS
    options: dict[str, Any] = {}
    match form:
        case "messages":
            rows = [chat(row) for row in ROWS]
        case "numbers":
            rows = [{**row, "label": int(row["label"])} for row in ROWS]
        case "numbers beside messages":
            rows, options = [chat({**row, "label": int(row["label"])}) for row in ROWS], {"format": "kto"}
        case "csv":
            rows = tmp_path / "kto.csv"
            with rows.open("w", newline="") as file:
                writer = csv.DictWriter(file, ROWS[0])
                writer.writeheader()
                writer.writerows(ROWS)
    ds = ps.prepare(rows, tokenizer=tokenizer, cache=tmp_path / "c", **options)
    assert "labelled" in repr(ds)
    assert "label_false" not in ds.ledger.notes
    view = ds.view(**VIEW)
    wanted = [row["label"] for row in ROWS]
    assert [example.desirable for example in view] == wanted
    found = {}
    for batch in ps.mix({"a": (view, 1.0), "b": (view, 1.0)}).loader(batch_size=7, seed=3, epochs=1):
        assert "desirable" not in batch.inputs
        for place, good in zip(batch.rows, batch.tensors["desirable"].tolist()[: len(batch.items)], strict=True):
            found[place.row] = bool(good)
    assert found == dict(enumerate(wanted))


def test_what_is_no_label(tokenizer: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": tmp_path}
    classes = [{**row, "label": number} for number, row in enumerate(ROWS)]
    assert "labelled" not in repr(ps.prepare(classes, **options))
    with pytest.raises(RowError, match=r"<list>:25: column 'label' is 'maybe'; expected true or false"):
        ps.prepare([*ROWS, {**ROWS[0], "label": "maybe"}], **options)
    plain = ps.prepare(ROWS, format="prompt_completion", **options)
    assert plain.view()[0].desirable is None
    labelled = ps.prepare(ROWS, **options)
    with pytest.raises(UsageError, match="holds labelled answers"):
        ps.mix({"a": (labelled, 1.0), "b": (plain, 1.0)})
    with pytest.raises(UsageError, match="--to hf has no place for the labels of answers .KTO.. Use trl"):
        labelled.view(**VIEW).export("hf", tmp_path / "out")
    with pytest.raises(UsageError, match="labelled answers .KTO. can't be packed"):
        labelled.view(**VIEW).export("trl", tmp_path / "out", capacity=64)
    turns = [{"messages": [*chat(row)["messages"], *chat(row)["messages"]], "label": row["label"]} for row in ROWS]
    with pytest.raises(UsageError, match="24 of 24 rows have untrained tokens after the first trained one"):
        ps.prepare(turns, **options).view(train_on="all_assistant_messages").export("trl", tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["texts", "messages"])
def test_trl_reads_the_export(form: str, models: Path, tokenizer: Path, tmp_path: Path) -> None:
    """TRL's own preparation of the exported texts, and of the rows, has the exported ids and labels."""
    rows = ROWS if form == "texts" else [chat(row) for row in ROWS]
    view = ps.prepare(rows, tokenizer=tokenizer, cache=tmp_path / "c").view(**VIEW)
    view.export("trl", tmp_path / "out")
    exported = load_from_disk(tmp_path / "out")
    assert set(exported.column_names) == {"prompt", "completion", "prompt_ids", "completion_ids", "label"}
    tails = 0
    for row, item in zip(exported, view, strict=True):
        ids = row["prompt_ids"] + row["completion_ids"]
        tails += len(item) - len(ids)
        assert ids == item.input_ids.tolist()[: len(ids)]
        assert row["completion_ids"] == item.input_ids[item.loss_mask].tolist()
    given = Dataset.from_list(
        ROWS
        if form == "texts"
        else [{"prompt": row["messages"][:1], "completion": row["messages"][1:], "label": row["label"]} for row in rows]
    )
    found = [_kto_trainer(models, tokenizer, data, tmp_path).train_dataset for data in (exported, given)]
    assert tails == (0 if form == "texts" else len(rows))  # ChatML's newline, which TRL scores
    for theirs, tail in ((found[0], 0), (found[1], tails // len(rows))):
        assert list(theirs["prompt_ids"]) == list(exported["prompt_ids"])
        assert list(theirs["label"]) == list(exported["label"]) == [row["label"] for row in rows]
        assert [ids[: len(ids) - tail] for ids in theirs["completion_ids"]] == list(exported["completion_ids"])


def _kto_trainer(models: Path, tokenizer: Path, rows: Dataset, place: Path) -> KTOTrainer:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / "llama"))
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "max_length": None}
    return KTOTrainer(
        model,
        ref_model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / "llama")),
        args=KTOConfig(str(place / "trl"), per_device_train_batch_size=6, **quiet),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 1.3)])
def test_the_loss_is_trls(weights: tuple[float, float], models: Path, examples: Path, tmp_path: Path) -> None:
    """From the same rows: ids, masks, mismatched answers and losses."""
    tokenizer = AutoTokenizer.from_pretrained(examples / "tokenizer")

    def tiny(seed: int) -> Any:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / "llama"))

    model, reference = tiny(0), tiny(1)
    size = 6
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "max_length": None}
    trainer = KTOTrainer(
        model,
        ref_model=reference,
        args=KTOConfig(
            str(tmp_path / "trl"),
            beta=0.3,
            per_device_train_batch_size=size,
            train_sampling_strategy="sequential",
            desirable_weight=weights[0],
            undesirable_weight=weights[1],
            **quiet,
        ),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )
    model.train()
    policy = Policy(model, model, torch.device("cpu"), None)
    settings = KtoConfig(beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1])
    objective = Kto(policy, FrozenReference(reference, reference), settings, Accelerator(cpu=True))
    view = ps.prepare(ROWS, tokenizer=tokenizer, cache=tmp_path / "c").view(**VIEW)
    loader = view.loader(batch_size=size, shuffle=False, epochs=1, framework="torch")
    compared = 0
    for batch, theirs in zip(loader, trainer.get_train_dataloader(), strict=True):
        sums = objective.loss(batch)
        expected = trainer.compute_loss(model, theirs)
        assert (sums.loss / objective.weight(batch)).item() == pytest.approx(expected.item(), abs=1e-5)
        assert sums.loss.item() / size != pytest.approx(0.5, abs=1e-3)
        compared += len(batch.items)
    assert compared == len(ROWS)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft with transformers 5.23
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run(rank: int, config: Config, labelled: Path, cache: Path) -> None:
    data = {"sources": [str(labelled)], "prepare": {"cache": str(cache)}}
    more = {"view": VIEW, "lora": {"rank": rank}, "optim": {"lr": 1e-2}}
    values = config("kto", data=data, loader={"batch_size": 8, "steps": 12}, **more)
    train("kto", values)
    assert losses(values)[0] == pytest.approx(0.5, abs=1e-3)
    assert losses(values)[-1] < 0.45
    assert {"kl", "reward_desirable", "reward_undesirable", "desirable"} <= metrics(values)[-1].keys()


def test_the_labelled_answer_is_trained_by_default(config: Config, labelled: Path, cache: Path) -> None:
    data = {"sources": [str(labelled)], "prepare": {"cache": str(cache)}}
    values = config("kto", data=data, loader={"batch_size": 8, "steps": 1})
    train("kto", values)
    assert len(losses(values)) == 1


def test_what_can_not_be(config: Config, labelled: Path, cache: Path) -> None:
    data = {"sources": [str(labelled)], "prepare": {"cache": str(cache)}}
    with pytest.raises(UsageError, match="a label judges the last answer alone"):
        train("kto", config("kto", data=data, view={"train_on": "all_assistant_messages"}))
    with pytest.raises(UsageError, match="micro_batch must be 2 or more"):
        train("kto", config("kto", data=data, loader={"micro_batch": 1}))
    with pytest.raises(
        UnsupportedError, match="consists of labelled answers .KTO.. Use `penstock train kto`. To ignore"
    ):
        train("sft", config(data=data))
    with pytest.raises(UsageError, match="kto is set, and this is `penstock train sft`"):
        train("sft", config(data=data, kto={"beta": 0.5}))
    with pytest.raises(UnsupportedError, match="single conversations. Use `penstock train sft`"):
        train("kto", config("sft", view=VIEW))
