"""Adopts tokenized data: chunks of rows become content-addressed shards, and a manifest commits them.

If it is killed, the next run reuses the shards it wrote. The tokenizer is checked: every id must be in its vocabulary,
and a sample is decoded and re-encoded, which reveals a wrong tokenizer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.build.commit import make_manifest
from penstock.digests import FORMAT_VERSION, bytes_digest, canonical
from penstock.errors import SourceError, StoreError, TokenizerError
from penstock.exchange.adopt_raw import Chunk, columns_of, megatron_chunks, olmo_chunks
from penstock.exchange.adopt_tables import table_chunks
from penstock.exchange.options import AdoptOptions, Check
from penstock.prepare.recipe import STAGES_VERSION
from penstock.prepare.sources.folders import FoundFile, LocalFolder, read_folder
from penstock.prepare.sources.kinds import detect_kind
from penstock.prepare.sources.slices import SourceFile
from penstock.prepare.tokenizer.files import TokenizerFiles, load_tokenizer
from penstock.prepare.tokenizer.reference import reference_encoder
from penstock.prepare.tokenizer.vocabulary import Vocabulary
from penstock.store.cache import Cache, open_cache
from penstock.store.dataset import Dataset
from penstock.store.manifest import dataset_key, recipe_digest, shard_name
from penstock.store.shard import ShardMeta, encode_shard

SAMPLE: Final = 256  # sequences to decode and re-encode, a few from each shard
PER_SHARD: Final = 8


class _Slice(NamedTuple):
    """A chunk's position and digest, for the manifest."""

    file: int
    first_row: int
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """An adopted dataset."""

    dataset: Dataset
    made: int  # shards written by this run
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        dataset = self.dataset
        counts = {"shards": len(dataset.shards), "made": self.made, "examples": len(dataset), "tokens": dataset.tokens}
        return {"key": dataset.key, "path": dataset.address, **counts, "warnings": list(self.warnings)}


def adopt(sources: Sequence[str | os.PathLike[str]], options: AdoptOptions) -> Adopted:
    """Creates a dataset from tokenized rows."""
    model = load_tokenizer(options.tokenizer, revision=options.tokenizer_revision)
    vocabulary = Vocabulary(model.tokenizer_json)
    paths = [Path(source).expanduser() for source in sources]
    cache = open_cache(options.cache)
    recipe = _recipe(model)
    made_by, sample = recipe_digest(recipe), _Sample(model, vocabulary)
    slices, names, made, preference = list[_Slice](), list[str](), 0, set[bool]()
    warnings = list[str]()
    for number, path in enumerate(paths):
        for chunk in _chunks(path, options, vocabulary.size, warnings):
            sample.check(chunk)
            preference.add(chunk.prompts is not None)
            if len(preference) > 1:
                raise SourceError(f"{chunk.places.file}: some rows are pairs and some are not. Adopt them separately.")
            part = _Slice(number, chunk.first_row, chunk.rows, chunk.digest)
            name = shard_name(made_by, part.digest)
            if not cache.has_shard(name):
                if not made:
                    cache.prepare_root()
                _commit(cache, name, chunk, vocabulary)
                made += 1
            slices.append(part)
            names.append(name)
    if not slices:
        raise SourceError(f"{', '.join(map(str, paths))}: no rows.")
    warnings += sample.verdict(options.check_tokenizer)
    cache.store_tokenizer(model.tokenizer_json)
    key = dataset_key(made_by, [(part.file, part.first_row, part.digest) for part in slices])
    with cache.lease([*names, str(recipe["tokenizer"])]):
        manifest = make_manifest(cache, key, recipe, names, slices, preference=preference == {True})
        manifest.commit(cache)
    _note_sources(cache, key, paths, model)
    return Adopted(Dataset(cache, manifest), made, tuple(warnings))


def _recipe(model: TokenizerFiles) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "stages": STAGES_VERSION,
        "adopted": True,
        "templates": {},
        "special_tokens": dict(model.special_tokens),
        "tokenizer": bytes_digest(model.tokenizer_json),
    }


def _chunks(path: Path, options: AdoptOptions, vocabulary: int, warnings: list[str]) -> Iterator[Chunk]:
    """The chunks of a source, whose format is detected."""
    if path.suffix in (".idx", ".bin"):
        return megatron_chunks(path.with_suffix(""), warnings)
    if Path(f"{path}.idx").exists():
        return megatron_chunks(path, warnings)
    if not path.exists():
        raise SourceError(f"{path} does not exist.")
    if path.is_dir() and any(path.glob("token_ids_part_*.npy")):
        return olmo_chunks(path, options.dtype, vocabulary, warnings)
    if (path / "tokens.idx").exists():
        return megatron_chunks(path / "tokens", warnings)
    found = _folder_files(path) if path.is_dir() else [FoundFile(path, str(path))]
    files = [SourceFile(n, file.path, detect_kind(file.path, file.name), file.name) for n, file in enumerate(found)]
    return table_chunks(files, options.mask)


def _folder_files(path: Path) -> list[FoundFile]:
    """The files of a `save_to_disk` folder, or the Parquet or JSON files in a folder or its folder `data`."""
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        found = read_folder(LocalFolder(path), str(path)).files
        splits = sorted({file.split for file in found})
        if len(splits) > 1:
            raise SourceError(f"{path} has the splits {', '.join(splits)}. Pass the folder of one: {path / splits[0]}")
        return found
    for suffix in (".parquet", ".jsonl"):
        paths = sorted(path.glob(f"*{suffix}")) or sorted(path.glob(f"data/*{suffix}"))
        if paths:
            return [FoundFile(file, str(file)) for file in paths]
    raise SourceError(
        f"{path} contains nothing to adopt. Expected a save_to_disk folder, Parquet, JSON lines, "
        "token_ids_part_*.npy or .bin/.idx."
    )


def _commit(cache: Cache, name: str, chunk: Chunk, vocabulary: Vocabulary) -> None:
    columns = columns_of(chunk, vocabulary.dtype)
    kept = len(np.unique(chunk.owners))
    ledger = {
        "rows": chunk.rows,
        "kept": kept,
        "examples": len(chunk.lengths),
        "tokens": len(chunk.ids),
        "regions_unknown": len(chunk.lengths) if chunk.weights is None else 0,
        "rejected": {},
        "crossings": {},
        "notes": {},
        "warnings": [],
    }
    data = encode_shard(columns, ShardMeta(ledger, [], {"rows": []}))
    cache.commit_shard(name, data, {"rejected": 0})


def _note_sources(cache: Cache, key: str, paths: Sequence[Path], model: TokenizerFiles) -> None:
    files = [{"path": str(path.absolute()), "name": path.name, "kind": "adopted"} for path in paths]
    notes = canonical({"files": files, "slices": [], "tokenizer": model.name})
    with contextlib.suppress(StoreError):  # notes are optional
        cache.write_file(cache.dataset_path(key) / "notes.json", notes, "notes", durable=False)


class _Sample:
    """Checks ids against a tokenizer on a sample of sequences."""

    def __init__(self, model: TokenizerFiles, vocabulary: Vocabulary) -> None:
        self._name, self._size = model.name, vocabulary.size
        self._bytes = vocabulary.token_bytes
        self._encoder = reference_encoder(model.tokenizer_json)
        self._added = {token.id for token in vocabulary.added}
        self._known = np.zeros(vocabulary.size, np.bool_)
        self._known[[*vocabulary.tokens.values(), *(token.id for token in vocabulary.added)]] = True
        self._tried = self._equal = 0
        self._first: str | None = None

    def check(self, chunk: Chunk) -> None:
        """Raises an error for an unknown id, and re-encodes a few sequences."""
        outside = (chunk.ids < 0) | (chunk.ids >= self._size)
        wrong = np.flatnonzero(outside | ~self._known[np.where(outside, 0, chunk.ids)])
        ends = np.cumsum(chunk.lengths)
        if len(wrong):
            where = chunk.places.of(chunk.owners[np.searchsorted(ends, wrong[0], side="right")])
            what = (
                "which its vocabulary leaves out" if not outside[wrong[0]] else f"but the largest is {self._size - 1}"
            )
            raise TokenizerError(
                f"{where}: the id {chunk.ids[wrong[0]]} is not one of the tokenizer {self._name!r}, {what}. "
                "Pass the tokenizer that the rows were made with."
            )
        for number in range(min(PER_SHARD, len(ends), SAMPLE - self._tried)):
            ids = chunk.ids[ends[number] - chunk.lengths[number] : ends[number]].tolist()
            self._tried += 1
            self._equal += self._round_trips(ids)

    def _round_trips(self, ids: list[int]) -> bool:
        """Whether re-encoding gives the same ids: as spelled, as decoded, or without prepended spaces."""
        spelled = b"".join([self._bytes[token] for token in ids]).decode("utf-8", "replace")
        decoded = self._encoder.decode(ids)
        for text in (spelled, decoded, self._without_prepended(ids)):
            if self._encoder.encode([text.encode()])[0].tolist() == ids:
                return True
        self._first = self._first or spelled[:80]
        return False

    def _without_prepended(self, ids: list[int]) -> str:
        """The text without the space that SentencePiece-style tokenizers prepend to it and after added tokens."""
        pieces, prepended = [], True
        for token in ids:
            piece = self._bytes[token]
            pieces.append(piece[1:] if prepended and piece[:1] == b" " else piece)
            prepended = token in self._added
        return b"".join(pieces).decode("utf-8", "replace")

    def verdict(self, check: Check) -> tuple[str, ...]:
        """Returns a warning if some sampled rows differ, and raises an error if most of them do."""
        different = self._tried - self._equal
        if not different:
            return ()
        what = (
            f"{different} of {self._tried} sampled rows re-encode to different ids with the tokenizer {self._name!r}; "
            f"the first is {self._first!r}"
        )
        if 2 * different > self._tried and check is Check.ERROR:
            raise TokenizerError(
                f"{what}. Pass the tokenizer that the rows were made with, or --check-tokenizer warn if this is it."
            )
        return (what,)
