"""Exports read by the trainers' own code, in the environment created by `make exits`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

import penstock as ps
from benchmarks.prepared import PreparedRows
from penstock.exchange.export import export
from penstock.load.view import View
from penstock.prepare.chat.conversation import Role
from tests.exchange.conftest import EXITS, ROOT, Ask
from tests.support.memory_dataset import MemoryDataset
from tests.support.splitting import trl_template
from tests.support.view_rows import chat

pytestmark = pytest.mark.slow


def listed(view: Any) -> list[dict[str, list[int]]]:
    items = [view[int(item)] for item in view.epoch_indices(0)]
    return [{"ids": item.input_ids.tolist(), "mask": item.loss_mask.tolist()} for item in items]


def wide(count: int = 23) -> View:
    """A view with ids above 65,535."""
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 30, (count, 2)).tolist()
    made = [chat((Role.USER, u), (Role.ASSISTANT, a), first_id=65_500 + 7 * n) for n, (u, a) in enumerate(sizes)]
    return MemoryDataset.of(made, shard_rows=5).view()


def section(title: str) -> str:
    """A section of docs/coming-from.md."""
    (found,) = re.findall(
        rf"^## {title}\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "coming-from.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


def block(title: str, language: str = "python") -> str:
    """The first code block of a section."""
    found = re.search(rf"^```{language}\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


SECTIONS = {"Axolotl": "axolotl", "LLaMA-Factory": "llamafactory", "SkyRL": "skyrl", "TRL": "trl", "verl": "verl"}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_options_of_a_section_are_those_of_the_package(title: str, ask: Ask) -> None:
    """Every name in the first column of the section's tables is in the sources of the release that `make exits` has."""
    del ask  # skips where the packages are not installed
    (package,) = EXITS.parent.parent.glob(f"lib/python3*/site-packages/{SECTIONS[title]}")
    words: set[str] = set()
    for suffix in ("py", "yaml"):
        for path in package.rglob(f"*.{suffix}"):
            words.update(re.findall(r"\w+", path.read_text(errors="replace")))
    lines = section(title).splitlines()
    names = {name for line in lines if line.startswith("|") for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert len(names) > 4
    assert [name for name in sorted(names) if not set(re.findall(r"\w{3,}", name)) <= words] == []


def served(which: str, dataset: ps.Dataset) -> Any:
    match which:
        case "chats":
            return dataset.view(max_length=90)
        case "mixture":
            parts = {"a": (dataset.view(holdout=0.2), 0.5), "b": (dataset.view(train_on="last_assistant_message"), 1.0)}
            return ps.mix(parts, 1)
        case _:
            return wide()


VIEWS = ("chats", "mixture", "wide")


def test_olmo_core_reads_documents_and_masks(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    views = {which: served(which, dataset) for which in VIEWS}
    for which, view in views.items():
        exported = export(view, "olmo", place / which, part_tokens=4000)
        assert exported.manifest["facts"]["dtype"] == ("uint32" if which == "wide" else "uint16")
    answers = ask("olmo", place / "work", *(place / which for which in VIEWS))
    for view, found in zip(views.values(), answers, strict=True):
        wanted = listed(view)
        assert [_unpadded(item, own) for item, own in zip(found["padded"], wanted, strict=True)] == wanted
        documents = [document for item in found["packed"] for document in _documents(item)]
        assert _sorted(documents) == _sorted(wanted)  # the packer reorders documents
        for item in (*found["padded"], *found["packed"]):
            shifted = [token if counts else -100 for token, counts in zip(item["ids"], item["mask"], strict=True)][1:]
            assert item["labels"][: len(shifted)] == shifted


def _unpadded(item: dict[str, Any], wanted: dict[str, list[int]]) -> dict[str, list[int]]:
    length = len(wanted["ids"])
    assert not any(item["ids"][length:])
    assert not any(item["mask"][length:])
    return {"ids": item["ids"][:length], "mask": item["mask"][:length]}


def _documents(item: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The documents of a packed row, without the padding at its end, which has no loss."""
    ends = np.cumsum(item["lengths"]).tolist()
    slices = [slice(end - length, end) for length, end in zip(item["lengths"], ends, strict=True)]
    found = [{"ids": item["ids"][own], "mask": item["mask"][own]} for own in slices]
    return [document for document in found if any(document["mask"])]


def _sorted(documents: Any) -> list[str]:
    return sorted(map(json.dumps, documents))


def test_megatron_core_reads_sequences_and_masks(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    views = {which: served(which, dataset) for which in VIEWS}
    for which, view in views.items():
        export(view, "megatron", place / which, part_tokens=1000)
    answers = ask("megatron_rows", *(place / which for which in VIEWS))
    for view, found in zip(views.values(), answers, strict=True):
        assert found["rows"] == listed(view)
        assert found["documents"] == len(found["rows"])


def test_axolotl_recognises_tokenized_rows(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    view = dataset.view(max_length=90)
    view.export("axolotl", place / "out", part_tokens=4000)
    (entry,) = yaml.safe_load(block("Axolotl", "yaml"))["datasets"]
    found = ask("axolotl_rows", json.dumps({**entry, "path": str(place / "out")}))
    assert found["prompter"] == "UnsupportedPrompter"  # Axolotl's choice for tokenized rows
    assert [row["input_ids"] for row in found["rows"]] == [item.input_ids.tolist() for item in view]
    assert [row["labels"] for row in found["rows"]] == [item.labels.tolist() for item in view]


def test_llama_factory_reads_the_same_rows(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    view = dataset.view(max_length=90)
    view.export("axolotl", place / "out")
    rows = ask("llama_factory_rows", place / "out")
    assert [row["input_ids"] for row in rows] == [item.input_ids.tolist() for item in view]
    assert [row["labels"] for row in rows] == [item.labels.tolist() for item in view]


def test_olmo_core_recipe_in_the_docs(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    dataset.view(max_length=4096).export("olmo", place / "chats-olmo")
    (place / "recipe.py").write_text(block("open-instruct and OLMo-core"))
    done = subprocess.run([EXITS, "recipe.py"], cwd=place, capture_output=True, text=True, check=True)
    assert f"{dataset.view().ledger.trained} trained tokens" in done.stdout


def test_torchtune_packs_and_collates_the_rows(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    view = dataset.view(max_length=90)
    view.export("torchtune", place / "out", part_tokens=4000)
    found = ask("torchtune_rows", place / "out", 128, place / "cache")
    tokens, labels = [], []
    for pack in found["packed"]:
        used = [length for length in pack["seq_lens"] if length]
        ends = np.cumsum(used).tolist()
        tokens += [pack["tokens"][end - length : end] for length, end in zip(used, ends, strict=True)]
        labels += [pack["labels"][end - length : end] for length, end in zip(used, ends, strict=True)]
    kept = [
        n for n, mask in enumerate(labels) if set(mask) != {-100}
    ]  # padding at the end of a pack counts as a sequence
    assert [tokens[n][: len(item)] for n, item in zip(kept, view, strict=True)] == [i.input_ids.tolist() for i in view]
    assert [labels[n][: len(item)] for n, item in zip(kept, view, strict=True)] == [i.labels.tolist() for i in view]


def test_skyrl_reads_the_rows_from_its_cache(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    settings = {
        "dataset_name": "chats",
        "dataset_split": "train",
        "model_path": "tiny",
        "max_length": 90,
        "messages_key": "messages",
        "train_on_what": "all_assistant_messages",
        "tools_key": None,
        "system_key": None,
    }
    where = Path(ask("skyrl_rows", place, json.dumps(settings))["path"])
    view = dataset.view(max_length=90)
    view.export("skyrl_cache", where)
    found = ask("skyrl_rows", place, json.dumps(settings))
    assert [row["input_ids"] for row in found["rows"]] == [item.input_ids.tolist() for item in view]
    for row, item in zip(found["rows"], view, strict=True):
        assert [0] * (len(item) - row["num_actions"]) + row["loss_mask"] == item.loss_mask.astype(int).tolist()
    for sequence, mask, item in zip(found["batch"]["sequences"], found["batch"]["loss_mask"], view, strict=False):
        assert sequence[-len(item) :] == item.input_ids.tolist()
        trained = [token for token, counts in zip(sequence[-len(mask) :], mask, strict=True) if counts]
        assert trained == item.input_ids[item.loss_mask].tolist()


@pytest.mark.parametrize("train_on", ["all_assistant_messages", "all_tokens"])
def test_skyrl_reads_pretokenized_rows(dataset: ps.Dataset, ask: Ask, place: Path, train_on: Any) -> None:
    view = dataset.view(max_length=90, train_on=train_on)
    view.export("skyrl", place / "out", part_tokens=4000)
    checkout = [os.environ["PENSTOCK_SKYRL"]] if "PENSTOCK_SKYRL" in os.environ else []
    found = ask("skyrl_pretokenized", place / "out" / "data", *checkout)
    if found is None:
        pytest.skip("SkyRL's release has no pretokenized reader: set PENSTOCK_SKYRL to a checkout")
    assert [row["input_ids"] for row in found] == [item.input_ids.tolist() for item in view]
    for row, item in zip(found, view, strict=True):
        mask = [0] * (len(item) - row["num_actions"]) + row["loss_mask"]
        assert mask == [0, *item.loss_mask[1:].astype(int).tolist()]
        assert row["num_actions"] < len(item)


def test_verl_dataset_class_in_the_docs(dataset: ps.Dataset, ask: Ask, place: Path) -> None:
    (place / "prepared.py").write_text(block("verl"))
    view = dataset.view(max_length=90)
    view.export("verl", place / "out", part_tokens=4000)
    found = ask("verl_rows", place / "prepared.py", place / "out")
    assert [row["input_ids"] for row in found["rows"]] == [item.input_ids.tolist() for item in view]
    assert [row["loss_mask"] for row in found["rows"]] == [item.loss_mask.astype(int).tolist() for item in view]
    first = [view[n].input_ids for n in range(3)]
    assert found["flat"]["input_ids"] == np.concatenate(first).tolist()
    assert found["flat"]["position_ids"] == [place for ids in first for place in range(len(ids))]


@pytest.mark.parametrize("trainer", ["axolotl_sft", "skyrl_sft"])
def test_trainers_prepare_the_same_tokens_and_masks(
    trainer: str, ask: Ask, place: Path, examples: Path, tokenizer: Path
) -> None:
    """What `benchmarks.peers` measures, on a template without tags, with two processes."""
    del ask  # skips where the packages are not installed
    rows = [json.loads(line) for line in (examples / "data" / "chats.jsonl").read_text().splitlines()]
    plain = [
        row for row in rows if set(row) == {"messages"} and all(set(m) == {"role", "content"} for m in row["messages"])
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain[:60]))
    given = [tokenizer, tokenizer / "chat_template.jinja", place / "rows.jsonl", 2, place / "out.npz"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place)}
    command = [str(EXITS), "-m", f"benchmarks.trainers.{trainer}", *map(str, given)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    theirs = PreparedRows.read(place / "out.npz")
    ours = ps.prepare(place / "rows.jsonl", tokenizer=tokenizer, cache=place / "cache", workers=1).view()
    assert [row.tolist() for row in theirs.ids] == [item.input_ids.tolist() for item in ours]
    assert [row.tolist() for row in theirs.masks] == [item.loss_mask.tolist() for item in ours]


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_axolotl_trains_the_same_details(tokenizer: Path, ask: Ask, place: Path) -> None:
    """Entries end between tokens; elsewhere Axolotl trains a token of which two characters lie in an entry. Of a
    character with several tokens, it may train one that lies in no entry."""
    (place / "own.jinja").write_text(PLAIN)
    encoder, rng = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), np.random.default_rng(3)
    rows = []
    for text in (
        "The Rhine flows through Cologne.",
        "Bern lies on the Aare, doesn't it?",
        "def f(x):\n    return x + 1\n",
    ):
        ends = sorted({0} | {end for _, end in encoder.encode(text).offsets})
        for count in (1, 2, 3, 0):
            cuts = sorted(rng.choice(ends, min(2 * count, len(ends) // 2 * 2), replace=False).tolist())
            details = [
                {"begin_offset": start, "end_offset": end - 1, "train": bool(rng.integers(4))}
                for start, end in zip(cuts[::2], cuts[1::2], strict=True)
            ]
            ask_for = {"role": "user", "content": "q"}
            answer = {"role": "assistant", "content": text, **({"train_detail": details} if count else {})}
            rows.append({"messages": [ask_for, answer]})
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs = ask("axolotl_details", tokenizer, place / "own.jinja", place / "rows.jsonl")
    ours = ps.prepare(
        place / "rows.jsonl", tokenizer=tokenizer, template=place / "own.jinja", cache=place / "cache", workers=1
    )
    view = ours.view(max_length=None, overlong="error")
    found = {int(view.index.rows[k]): view[k] for k in range(len(view))}
    assert len(found) == len(rows)
    for number, row in enumerate(theirs):
        assert row["ids"] == found[number].input_ids.tolist()
        assert row["labels"] == found[number].labels.tolist(), rows[number]


@pytest.mark.parametrize(
    ("template", "mode", "answers"),
    [
        ("qwen3", "auto", [{"content": "Rhein"}, {"content": "Aare", "reasoning_content": "r"}]),
        (None, "split", [{"content": "<think>\n\n</think>Bern"}, {"content": "<think>r</think>Bern"}]),
    ],
)
def test_swift_leaves_the_same_empty_thinking_out(
    tokenizer: Path, ask: Ask, place: Path, template: str | None, mode: str, answers: list[dict[str, str]]
) -> None:
    """ms-swift also leaves out an empty block that an answer itself contains, as `split` does. White space after such a
    block is a part of the answer here."""
    (place / "own.jinja").write_text(trl_template(template) if template else PLAIN)
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]} for answer in answers]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"template": place / "own.jinja", "cache": place / "cache", "reasoning_in_content": mode}
    ours = ps.prepare(place / "rows.jsonl", tokenizer=tokenizer, workers=1, **options)
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def texts(parts: str) -> list[str]:
        view = ours.view(parts=parts)
        return [decoder.decode(item.input_ids[item.loss_mask].tolist(), skip_special_tokens=False) for item in view]

    scaled = ask("swift_loss_scale", "ignore_empty_think", json.dumps(texts("body")))
    assert [any(not weight for _, weight in pieces) for pieces in scaled] == [True, False]
    assert texts("-empty_reasoning,-stop") == ["".join(text for text, weight in pieces if weight) for pieces in scaled]
