"""Equal rows from every kind of source give equal tokens; named templates and variables are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import penstock as ps


@pytest.fixture(scope="module")
def rows(examples: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (examples / "data" / "chats.jsonl").read_text().splitlines()][:60]


def tokens(ds: ps.Dataset) -> list[list[int]]:
    return [ds.input_ids(i).tolist() for i in range(len(ds))]


@pytest.fixture(scope="module")
def expected(rows: list[dict[str, Any]], tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("plain")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tokens(ps.prepare(path, tokenizer=tokenizer, cache=folder / "c"))


def write(kind: str, rows: list[dict[str, Any]], folder: Path) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    match kind:
        case "array":
            path = folder / "rows.json"
            path.write_text(json.dumps(rows, indent=2))
        case "zst":
            path = folder / "rows.jsonl.zst"
            path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
        case "parquet":
            path = folder / "rows.parquet"
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
        case "save_to_disk":
            path = folder / "saved"
            datasets.Dataset.from_list(rows).save_to_disk(str(path))
        case "dataset_dict":
            path = folder / "saved"
            parts = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:3])}
            datasets.DatasetDict(parts).save_to_disk(str(path))
        case _:
            path = folder / "folder"
            path.mkdir()
            (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:30]))
            (path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[30:]))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["array", "zst", "parquet", "save_to_disk", "dataset_dict", "folder"])
def test_every_kind_of_source(
    kind: str, rows: list[dict[str, Any]], expected: list[list[int]], tokenizer: Path, tmp_path: Path
) -> None:
    ds = ps.prepare(write(kind, rows, tmp_path), tokenizer=tokenizer, cache=tmp_path / "c")
    assert tokens(ds) == expected
    said = ds.conversation(59)["messages"]
    assert [m["content"] for m in said] == [m["content"] for m in rows[59]["messages"]]


def test_splits_reuse_the_slices_of_the_whole(
    rows: list[dict[str, Any]], expected: list[list[int]], tokenizer: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = ps.prepare(path, tokenizer=tokenizer, cache=tmp_path / "c", split="train[:10]+train[-10:]")
    assert tokens(ds) == expected[:10] + expected[-10:]
    assert ds.locate(10).row == 50


def test_the_tool_use_template_renders_rows_with_tools(
    rows: list[dict[str, Any]], tokenizer: Path, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    own = (tokenizer / "chat_template.jinja").read_text()
    named = [{"name": "default", "template": own}, {"name": "tool_use", "template": "TOOLS\n" + own}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = ps.prepare(path, tokenizer=folder, cache=tmp_path / "c")
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=named)
    for i in range(len(ds)):
        said = ds.conversation(i)
        ids = oracle.apply_chat_template(said["messages"], tools=said["tools"], tokenize=True, return_dict=False)
        assert ds.input_ids(i).tolist() == list(ids)


def test_variables_and_date(tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}{% if shout %}!{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "chat_template_kwargs": {"shout": False}}) + "\n")
    ds = ps.prepare(
        path,
        tokenizer=tokenizer,
        template=template,
        date="2024-07-26",
        template_vars={"shout": True},
        cache=tmp_path / "cache",
    )
    table = ds.vocabulary.token_bytes
    texts = [b"".join(table[t] for t in ds.input_ids(i).tolist()) for i in range(2)]
    assert [t.split(b"<|")[0] for t in texts] == [b"26 Jul 2024!", b"26 Jul 2024"]


def test_shards_are_small_and_mapped(
    expected: list[list[int]], rows: list[dict[str, Any]], tokenizer: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = ps.prepare(path, tokenizer=tokenizer, cache=tmp_path / "c")
    columns = ds.shards.columns(0)
    assert columns.ids.dtype == np.uint16
    assert not columns.ids.flags.owndata
    assert not columns.ids.flags.writeable
