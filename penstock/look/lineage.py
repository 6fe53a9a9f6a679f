"""The provenance of a dataset: recipe, sources, engines and checks, as (name, text) pairs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import orjson

from penstock.store.dataset import StoredDataset
from penstock.store.files import read_regular
from penstock.view.mixture import BaseMixture


@dataclass(frozen=True, slots=True)
class Lineage:
    """The provenance of a dataset; `templates` by name."""

    key: str
    name: str
    facts: tuple[tuple[str, str], ...]
    engines: tuple[tuple[str, str], ...]
    templates: Mapping[str, str]
    rejected: tuple[str, ...]  # the first rejected rows


def lineage(dataset: StoredDataset) -> Lineage:
    """Read the provenance from the manifest and the notes stored with the shards."""
    recipe, notes = dataset.recipe, dataset.notes
    files = file_names(dataset)
    mapping = recipe.get("mapping") or {}
    facts = {
        "dataset": dataset.key,
        "sources": ", ".join(files[:6]) + (f" and {len(files) - 6:,} more" if len(files) > 6 else ""),
        "row format": str(mapping.get("format", "")),
        "tokenizer": f"{notes.get('tokenizer', '')} ({recipe['tokenizer'][:15]}…)".strip(),
        "special tokens": ", ".join(f"{name} {text}" for name, text in recipe.get("special_tokens", {}).items()),
        "template variables": _plain(recipe.get("template_vars")),
        "date in templates": str(recipe.get("date") or ""),
        "regions": str(recipe.get("regions", "")),
        "special tokens in text": str(recipe.get("special_tokens_in_text", "")),
        "reference engines": ", ".join(f"{name} {text}" for name, text in recipe.get("references", {}).items()),
        "shards": f"{len(dataset.shards):,}, {sum(dataset.manifest.shards.bytes):,} bytes",
    }
    return Lineage(
        dataset.key,
        _name(files) or dataset.key[:15],
        tuple((name, text) for name, text in facts.items() if text),
        tuple(_engines(dataset)),
        recipe.get("templates") or {},
        tuple(_rejected(dataset)),
    )


def mixture_lineage(mixture: BaseMixture) -> Lineage:
    """The members of a mixture, in place of one dataset's provenance."""
    facts = []
    for name, share in mixture.shares.items():
        amount = f"{share.per_epoch:,} of {len(share.view):,} items per epoch, train_on {share.view.settings.train_on}"
        dataset = share.view.dataset
        files = file_names(dataset) if isinstance(dataset, StoredDataset) else []
        facts.append((name, ", ".join(filter(None, (amount, _name(files), dataset.key)))))
    return Lineage(mixture.digest, f"Mixture of {', '.join(mixture.shares)}", tuple(facts), (), {}, ())


def file_names(dataset: StoredDataset) -> list[str]:
    """The names of the source files, as they were given."""
    return [str(file.get("name", "")) for file in dataset.notes.get("files", []) if isinstance(file, dict)]


def _name(files: list[str]) -> str:
    """A title: one file's own name, without its folder, or the number of files."""
    return PurePath(files[0]).name if len(files) == 1 else f"{len(files)} sources" if files else ""


def _plain(value: Any) -> str:
    return orjson.dumps(value).decode() if value else ""


def _engines(dataset: StoredDataset) -> list[tuple[str, str]]:
    """The engines used and the checks against the references, from the notes stored with the shards."""
    checked = mismatches = 0
    encoders, reasons = Counter[str](), Counter[str]()
    paths = set[tuple[int, ...]]()
    for shard in dataset.shards:
        with contextlib.suppress(OSError, orjson.JSONDecodeError, TypeError, ValueError, AttributeError):
            note = orjson.loads(read_regular(dataset.cache.shard_path(shard).with_suffix(".json")))
            checked += int(note.get("checked", 0))
            mismatches += int(note.get("mismatches", 0))
            encoders[str(note.get("encoder", ""))] += 1
            paths.add(tuple(note.get("paths", ())))
            for stage, why in note.get("engines", {}).items():
                reasons.update({f"{stage}: {reason}": int(count) for reason, count in why.items()})
    found = [("encoder", ", ".join(name for name in encoders if name))]
    found += [
        ("rendered or encoded more slowly", f"{count:,} rows, {reason}") for reason, count in reasons.most_common(5)
    ]
    if checked:
        differed = f", {mismatches:,} differed and were redone" if mismatches else ", all equal"
        found.append(("spot check", f"{checked:,} rows compared with the reference engines{differed}"))
    return [(name, text) for name, text in found if text]


def _rejected(dataset: StoredDataset, most: int = 5) -> list[str]:
    """The first rejected rows. Shards are opened only if the ledger counts any."""
    found = list[str]()
    if not dataset.ledger["rejected"]:
        return found
    for shard in range(len(dataset.shards)):
        for row in dataset.shard_meta(shard).rejected:
            number = dataset.manifest.shards.first_rows[shard] + int(row.get("row", 0))
            found.append(f"row {number:,}: {row.get('reason', row.get('kind', ''))}")
            if len(found) == most:
                return found
    return found
