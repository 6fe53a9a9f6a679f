"""The torch adapters, used the way a training script would use them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.errors import UsageError
from penstock.load.loader import Loader
from penstock.load.view import View
from tests.support.feed_data import mixture, pair_view, plains, view

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("torch.utils.data")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # from third-party libraries

from penstock.load.torch_datasets import Collator, MapRows, Stream, hf_dataset  # noqa: E402


def tiny_model() -> Any:
    """A small language model whose attention supports packed rows."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("options", [{}, {"collate": "packed"}], ids=["padded", "packed"])
def test_tensors_are_the_arrays(options: dict[str, Any]) -> None:
    arrays = plains(Loader(view(), batch_size=4, **options))
    run = list(Loader(view(), batch_size=4, framework="torch", **options))
    tensors = [
        batch.holding({k: v if isinstance(v, int) else v.numpy() for k, v in batch.tensors.items()}) for batch in run
    ]
    assert plains(tensors) == arrays
    assert all(isinstance(value, torch.Tensor | int) for batch in run for value in batch.tensors.values())
    meta = Loader(view(), batch_size=4, framework="torch", device="meta", pin_memory=False, **options).batch(0)
    assert meta.tensors["input_ids"].device.type == "meta"


def test_the_core_imports_no_torch() -> None:
    code = (
        "import sys, penstock.load.loader\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("collate", ["padded", "packed"])
def test_a_plain_loop(collate: str) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with Loader(view(), batch_size=8, epochs=3, collate=collate, framework="torch") as load:
        for batch in load:
            loss = model(**batch.inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert losses[-1] < losses[0] and np.isfinite(losses).all()


def test_packed_rows_have_the_loss_of_their_sequences_alone() -> None:
    """Packing leaks nothing: the loss of a packed row is that of its sequences, one by one."""
    model = tiny_model().eval()
    served = view()
    batch = Loader(served, batch_size=2, collate="packed", capacity=104, align=8, framework="torch").batch(0)
    with torch.no_grad():
        packed = float(model(**batch.inputs).loss) * batch.counts.trained
        alone = 0.0
        for item in batch.items.tolist():
            example = served.example(item)
            labels = torch.from_numpy(example.labels)[None]
            count = int((labels[0, 1:] != -100).sum())
            alone += float(model(torch.from_numpy(example.input_ids)[None], labels=labels).loss) * count
    assert packed == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("collated", [False, True], ids=["loader", "collator"])
def test_packed_sequences_are_isolated_in_a_model_that_caches(collated: bool) -> None:
    """Most models use a cache by default, and then transformers ignores the bounds of packed sequences."""
    model, served = tiny_model().eval(), view()
    inputs = Loader(served, batch_size=1, collate="packed", capacity=104, framework="torch").batch(0).inputs
    if collated:
        rows = MapRows(served, capacity=104)
        inputs = Collator(rows)([rows[0]])
    end = int(inputs["cu_seq_lens_q"][1])
    assert end < inputs["input_ids"].shape[1] and model.config.use_cache
    changed = inputs["input_ids"].clone()
    changed[:, :end] += 1
    with torch.no_grad():
        before, after = model(**inputs).logits, model(**{**inputs, "input_ids": changed}).logits
    assert torch.equal(before[:, end:], after[:, end:]) and not torch.equal(before[:, :end], after[:, :end])


def test_zero_loss_rows_change_no_loss() -> None:
    model = tiny_model().eval()
    full = Loader(view(2), batch_size=2, framework="torch").batch(0)
    filled = Loader(view(2), batch_size=5, framework="torch", seed=0).batch(0)
    with torch.no_grad():
        losses = [float(model(**batch.inputs).loss) for batch in (full, filled)]
    assert filled.counts.filler_rows == 3 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    load = Loader(
        view(), batch_size=8, micro_batch=4, collate="packed", framework="torch",
        rank=accelerator.process_index, world_size=accelerator.num_processes, device=str(accelerator.device),
    )  # fmt: skip
    model = tiny_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(load)
    steps = 0
    for batch in load:
        loss = model(**batch.inputs, num_items_in_batch=batch.step_weight).loss
        accelerator.backward(loss * accelerator.num_processes)
        if batch.ends_step:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == load.steps


def gradients(served: View, world_size: int = 1, **options: Any) -> torch.Tensor:
    """The gradient of the first step by the loop in the docs, summed over ranks."""
    model = tiny_model()
    for rank in range(world_size):
        load = Loader(served, batch_size=8, framework="torch", rank=rank, world_size=world_size, **options)
        for micro in range(load.micros):
            batch = load.batch(0, micro)
            loss = model(**batch.inputs, num_items_in_batch=batch.step_weight).loss
            loss.backward()  # DDP averages over ranks, hence the factor in the docs
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(
    "options", [{}, {"collate": "packed"}, {"world_size": 2}, {"collate": "packed", "world_size": 2}]
)
def test_micro_batches_change_no_gradient(options: dict[str, Any]) -> None:
    served = view(40, train_on="last_assistant_message")  # the trained weight varies widely between micro-batches
    whole = gradients(served, **{**options, "world_size": 1})
    for micro_batch in (1, 2, 4, 8):
        cut = gradients(served, micro_batch=micro_batch, **options)
        assert float((cut - whole).norm() / whole.norm()) < 1e-4, micro_batch


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_dataloader_serves_the_same_stream(workers: int) -> None:
    load = Loader(view(), batch_size=8, micro_batch=3, epochs=2, framework="torch", prefetch=1)
    wanted = [batch.inputs for batch in load]
    load.seek(2)
    stream = Stream(load)
    loader = datasets.DataLoader(stream, batch_size=None, num_workers=workers)
    served = list(loader)
    assert len(stream) == len(wanted) and len(served) == len(wanted) - 2 * load.micros
    for ours, theirs in zip(served, wanted[2 * load.micros :], strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("capacity", [None, 100])
def test_map_rows_hold_every_example_once(capacity: int | None) -> None:
    served = view(train_on="all_tokens")  # also the first ones
    rows = MapRows(served, capacity)
    ids = [token for row in range(len(rows)) for token in rows[row]["input_ids"].tolist()]
    assert sorted(ids) == sorted(t for number in range(len(served)) for t in served.example(number).input_ids.tolist())
    assert len(rows) == (37 if capacity is None else Loader(served, batch_size=1, collate="packed", capacity=100).steps)
    for row in range(len(rows)):
        feature = rows[row]
        assert len(feature["input_ids"]) <= (capacity or 64) and len(feature["labels"]) == len(feature["input_ids"])
        if capacity:
            assert sum(feature["seq_lengths"]) == len(feature["position_ids"])
            assert (feature["labels"][feature["position_ids"] == 0] == -100).all()
    copy = pickle.loads(pickle.dumps(rows))
    assert [copy[3][name].tolist() for name in ("input_ids", "labels")] == [
        rows[3][n].tolist() for n in ("input_ids", "labels")
    ]
    for outside in (len(rows), -1):
        with pytest.raises(IndexError, match=f"row {outside} of {len(rows)}"):
            rows[outside]
    if capacity:
        before = [rows[row]["seq_lengths"] for row in range(len(rows))]
        rows.set_epoch(1)
        assert sorted(map(sorted, before)) == sorted(sorted(rows[row]["seq_lengths"]) for row in range(len(rows)))


def _ids(feature: dict[str, Any]) -> list[int]:
    ids: list[int] = feature["input_ids"].tolist()
    return ids


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("copied", [False, True])
def test_epochs_reach_workers_that_persist(start: str, copied: bool) -> None:
    rows = MapRows(view(), 100)
    rows = pickle.loads(pickle.dumps(rows)) if copied else rows
    load = datasets.DataLoader(
        rows,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=start,
        collate_fn=_ids,
    )
    for epoch in (0, 3, 1):
        rows.set_epoch(epoch)
        expected = MapRows(view(), 100)
        expected.set_epoch(epoch)
        assert list(load) == [expected[row]["input_ids"].tolist() for row in range(len(expected))]


def test_epochs_reach_a_dataset_of_hugging_face() -> None:
    pytest.importorskip("datasets")
    rows = MapRows(view(), 100)
    wrapped = deepcopy(hf_dataset(rows))
    before = [wrapped[row]["input_ids"].tolist() for row in range(len(rows))]
    rows.set_epoch(1)
    after = [wrapped[row]["input_ids"].tolist() for row in range(len(rows))]
    assert after != before
    assert after == [rows[row]["input_ids"].tolist() for row in range(len(rows))]


def test_map_rows_of_a_mixture_and_of_pairs() -> None:
    rows = MapRows(mixture(), 90)
    assert sum(len(rows[row]["seq_lengths"]) for row in range(len(rows))) == 29
    with pytest.raises(UsageError, match="preference pairs"):
        MapRows(pair_view())


@pytest.mark.parametrize("capacity", [None, 100])
@pytest.mark.parametrize("drop_columns", [True, False])
def test_transformers_trainer(tmp_path: Path, capacity: int | None, drop_columns: bool) -> None:
    transformers = pytest.importorskip("transformers")
    rows = MapRows(view(), capacity)
    trainer = transformers.Trainer(
        model=tiny_model(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=4,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            learning_rate=1e-2,
            remove_unused_columns=drop_columns,
            dataloader_num_workers=0,
        ),
        train_dataset=rows,
        data_collator=Collator(rows),
    )
    trainer.train()
    assert trainer.state.global_step == 4 and np.isfinite(trainer.state.log_history[0]["loss"])
    batch = next(iter(trainer.get_train_dataloader()))
    assert ("cu_seq_lens_q" in batch) == (capacity is not None) and ("attention_mask" in batch) == (capacity is None)


@pytest.mark.parametrize("capacity", [None, 100])
def test_trl_sft(tmp_path: Path, tokenizer: Path, capacity: int | None) -> None:
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    rows = MapRows(view(), capacity)
    trainer = trl.SFTTrainer(
        model=tiny_model(),
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=2,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            packing=False,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        ),
        train_dataset=hf_dataset(rows),
        data_collator=Collator(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(str(tokenizer)),
    )
    trainer.train()
    assert trainer.state.global_step == 2 and np.isfinite(trainer.state.log_history[0]["loss"])


def test_collator_gives_what_the_loader_gives() -> None:
    served = view()
    for capacity in (None, 100):
        rows = MapRows(served, capacity, seed=5)
        options: dict[str, Any] = {"collate": "packed", "capacity": 100} if capacity else {"shuffle": False}
        load = Loader(served, batch_size=1, seed=5, framework="torch", **options)
        for row, batch in enumerate(load):
            ours = Collator(rows)([rows[row]])
            assert ours.keys() == batch.inputs.keys()
            assert all(torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(batch.inputs[name])) for name in ours)


def test_the_weighted_loop_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "feed.md").read_text()
    (code,) = [block for block in page.split("```python\n") if "cross_entropy" in block]
    served = view(40, train_on="customized")
    found = []
    for options in ({}, {"micro_batch": 2}, {"micro_batch": 1, "collate": "packed"}):
        model = tiny_model()
        load = Loader(served, batch_size=40, framework="torch", seed=1, **options)
        for batch in load:
            names: dict[str, Any] = {"model": model, "batch": batch}
            exec(code.partition("```")[0], names)
            names["loss"].backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert load.steps == 1
    assert all(float((one - found[0]).norm() / found[0].norm()) < 1e-4 for one in found)


class FakeCuda:
    """Stands in for torch.cuda: a main thread on device 1, whose prefetch threads are on device 0, as in CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[Any] = []
        self.recorded: list[Any] = []
        main = threading.get_ident()
        patched = {
            "is_available": lambda: True,
            "current_device": lambda: 1 if threading.get_ident() == main else 0,
            "Stream": lambda device: SimpleNamespace(record_event=lambda: f"copied to {device}"),
            "stream": lambda stream: nullcontext(),
            "current_stream": self._current_stream,
        }
        for name, value in patched.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.recorded.append(stream.device))
        monkeypatch.setattr("penstock.load.torch_datasets._moved", lambda tensors, device: tensors)

    def _current_stream(self, device: Any = None) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.waited.append((str(device), event)), device=str(device))


@pytest.mark.parametrize(("device", "found"), [("cuda", "cuda:1"), ("cuda:3", "cuda:3")])
@pytest.mark.parametrize("ahead", [0, 2])
def test_the_stream_of_the_batch_waits_for_its_copy(
    device: str, found: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device belongs to a thread, and the current stream to a device: neither may be the prefetcher's."""
    cuda = FakeCuda(monkeypatch)
    loader = Loader(view(), batch_size=30, framework="torch", device=device, prefetch=ahead)
    batches = list(loader)
    assert cuda.waited == [(found, f"copied to {found}")] * len(batches)
    assert set(cuda.recorded) == {found}
    loader.batch(1)
    assert len(cuda.waited) == len(batches) + 1


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match=r"device='gpu': Expected one of cpu, cuda"):
        Loader(view(), batch_size=4, framework="torch", device="gpu").batch(0)
    if not torch.cuda.is_available():
        with pytest.raises(
            UsageError, match=r"device='cuda:0', but torch finds no CUDA device here\. Leave device out"
        ):
            next(iter(Loader(view(), batch_size=4, framework="torch", device="cuda:0")))
