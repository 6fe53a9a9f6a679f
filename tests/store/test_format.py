"""Asserts what docs/internals/format.md says about the bytes on disk."""

from __future__ import annotations

import re
from pathlib import Path

import blake3
import orjson
import pyarrow as pa
import pytest
import xxhash

from penstock.digests import digest
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.sources.slices import Slice
from penstock.store.dataset import Dataset
from penstock.store.files import writer_name
from tests.store.conftest import Prepare

pytestmark = pytest.mark.usefixtures("small_slices")
NAME = re.compile(r"b3-[0-9a-f]{64}")


@pytest.fixture
def dataset(prepare: Prepare, data: Path) -> Dataset:
    return prepare(data).dataset


def parts_digest(*parts: bytes) -> str:
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return "b3-" + hasher.hexdigest()


def as_json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def test_names(dataset: Dataset) -> None:
    assert digest(b"a", b"bc") == parts_digest(b"a", b"bc")
    recipe = parts_digest(b"recipe", as_json(dataset.recipe))
    slices = [Slice.from_json(entry) for entry in dataset.origins["slices"]]
    assert dataset.shards.names == [parts_digest(b"shard", recipe.encode(), part.digest.encode()) for part in slices]
    order = as_json([[part.file, part.first_row, part.digest] for part in slices])
    assert dataset.key == parts_digest(b"dataset", recipe.encode(), order)


def test_paths_on_disk(dataset: Dataset) -> None:
    root = dataset.cache.root
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    expected = {f"datasets/{dataset.key}/{name}" for name in ("manifest.json", "notes.json", "used")}
    expected |= {f"shards/{name[3:5]}/{name}.{suffix}" for name in dataset.shards.names for suffix in ("arrow", "json")}
    expected |= {"penstock-cache.json", f"tokenizers/{dataset.recipe['tokenizer']}.json"}
    memos = {name for name in found if re.fullmatch(r"memo/[0-9a-f]{2}/b3-[0-9a-f]{64}\.json", name)}
    assert found - memos == expected
    assert re.fullmatch(r"\w+-[0-9a-f]{8}\.\d+\.\d+", writer_name())


def test_the_marker(dataset: Dataset) -> None:
    assert (dataset.cache.root / "penstock-cache.json").read_bytes() == b'{"format":1}'


def test_a_shard(dataset: Dataset, data: Path) -> None:
    path = dataset.cache.shard_path(dataset.shards.names[1])
    reader = pa.ipc.open_file(path)
    assert reader.num_record_batches == 1
    assert [(field.name, str(field.type)) for field in reader.schema] == [
        ("input_ids", "list<item: uint16>"),
        ("segment_ends", "list<item: uint32>"),
        ("segment_roles", "list<item: uint8>"),
        ("segment_parts", "list<item: uint8>"),
        ("segment_messages", "list<item: int32>"),
        ("row", "uint32"),
        ("row_hash", "uint64"),
    ]
    (key,) = reader.schema.metadata
    meta = orjson.loads(reader.schema.metadata[key])
    assert key == b"penstock"
    assert reader.schema.metadata[key] == as_json(meta)
    assert (meta["format"], set(meta)) == (1, {"format", "ledger", "proof", "rejected"})
    ledger = meta["ledger"]
    counts = {"rows", "kept", "rejected", "examples", "tokens", "regions_unknown", "crossings", "notes", "warnings"}
    assert set(ledger) == counts
    assert ledger["rows"] == ledger["kept"] + sum(ledger["rejected"].values())
    batch = reader.get_batch(0).to_pydict()
    first = dataset.manifest.shards.first_rows[1]
    rows = data.read_bytes().splitlines()
    assert batch["row_hash"] == [xxhash.xxh3_64_intdigest(rows[first + row]) for row in batch["row"]]
    assert [ends[-1] for ends in batch["segment_ends"]] == [len(ids) for ids in batch["input_ids"]]


def test_a_shard_read_by_the_page_alone_gives_the_masks_of_the_view(dataset: Dataset) -> None:
    """Nothing here is ours but the text of the page, which lists the numbers of roles and parts."""
    page = (Path(__file__).parent.parent.parent / "docs" / "internals" / "format.md").read_text()
    roles, parts = (
        {name: int(number) for number, name in re.findall(r"(\d+) `?(\w+)", re.search(rf"^{what}: .*$", page, re.M)[0])}
        for what in ("Roles", "Parts")
    )
    assert roles | {"any": 5} == {role.name.lower(): int(role) for role in Role if role is not Role.OTHER} | {"any": 5}
    assert parts == {part.name.lower(): int(part) for part in Part}
    view, item = Dataset(dataset.cache, dataset.manifest).view(), 0
    for name in dataset.shards.names:
        columns = pa.ipc.open_file(dataset.cache.shard_path(name)).get_batch(0).to_pydict()
        for k, ids in enumerate(columns["input_ids"]):
            mask: list[bool] = []
            for end, role, part in zip(
                *(columns[f"segment_{what}"][k] for what in ("ends", "roles", "parts")), strict=True
            ):
                is_body = part in (parts["body"], parts["stop"]) or part >= parts["reasoning"]
                trained = role == roles["assistant"] and is_body
                mask += [trained] * (end - len(mask))
            assert view[item].input_ids.tolist() == ids
            assert view[item].loss_mask.tolist() == mask
            item += 1
    assert item == len(view) == 400


def test_the_note_of_a_shard(dataset: Dataset) -> None:
    shard = dataset.cache.shard_path(dataset.shards.names[0])
    note = orjson.loads(dataset.cache.shard_path(dataset.shards.names[0]).with_suffix(".json").read_bytes())
    names = {
        "bytes",
        "checked",
        "digest",
        "encoder",
        "engines",
        "host",
        "losses",
        "mismatches",
        "paths",
        "rejected",
        "seal",
    }
    assert set(note) == names | {"rejected", "seal"}
    assert note["bytes"] == shard.stat().st_size
    assert note["digest"] == "b3-" + blake3.blake3(shard.read_bytes()).hexdigest()


def test_the_manifest(dataset: Dataset) -> None:
    data = (dataset.path / "manifest.json").read_bytes()
    value = orjson.loads(data)
    assert data == as_json(value)
    assert set(value) == {"format", "key", "recipe", "shards", "ledger", "proof", "preference", "digest"}
    assert value.pop("digest") == parts_digest(b"manifest", as_json(value))
    assert value["format"] == 1
    table = value["shards"]
    assert set(table) == {"names", "slices", "digests", "bytes", "sources", "first_rows", "rows", "examples", "tokens"}
    assert all(NAME.fullmatch(name) for name in (*table["names"], *table["digests"]))
    assert sum(table["rows"]) == value["ledger"]["rows"] == 400
    assert str(dataset.cache.root).encode() not in data


def test_a_tokenizer(dataset: Dataset) -> None:
    path = dataset.cache.tokenizer_path(dataset.recipe["tokenizer"])
    assert path.stem == "b3-" + blake3.blake3(path.read_bytes()).hexdigest()


def test_the_format_page_documents_every_column_and_key(dataset: Dataset) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "internals" / "format.md").read_text()
    reader = pa.ipc.open_file(dataset.cache.shard_path(dataset.shards.names[0]))
    manifest = orjson.loads((dataset.path / "manifest.json").read_bytes())
    for name in (*reader.schema.names, *manifest["shards"]):
        assert f"`{name}`" in page
    for name in manifest:
        assert f'"{name}"' in page
