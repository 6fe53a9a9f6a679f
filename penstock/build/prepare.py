"""Sources in, a dataset out: finds what is there already, has the rest made, and commits the manifest last.

Slices are found while earlier ones are worked on, so work starts at once and memory does not grow with the data.
Every step leaves only whole files behind: a build that is killed anywhere goes on with the slices that are missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from penstock.build.limits import worker_count
from penstock.build.options import OnBadRow, PrepareOptions
from penstock.build.pool import Setup, Task, run_here, run_workers
from penstock.build.progress import OnProgress, Progress
from penstock.build.recipe import Recipe, make_recipe
from penstock.build.slice_job import SliceReport
from penstock.chat.formats import Format
from penstock.chat.formats_detect import detect
from penstock.chat.formats_json import parse_row
from penstock.errors import RowError, SourceError
from penstock.sources import Slice, SourceSet, discover, model_folder
from penstock.store.cache import Cache
from penstock.store.claims import Claims
from penstock.store.dataset import StoredDataset
from penstock.store.files import write_whole
from penstock.store.manifest import Manifest, ShardTable, dataset_key, read_manifest, shard_name
from penstock.store.shard import canonical, read_shard

log = logging.getLogger("penstock")

SMALL_BYTES = 6 << 20  # starting worker processes for less would cost more than it saves
POLL = 0.5  # seconds between looks at what other processes have finished


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `prepare` did."""

    dataset: StoredDataset
    hit: bool
    progress: Progress
    warnings: tuple[str, ...]
    format: str
    quarantine: Path | None


class Builder:
    """One run of prepare."""

    def __init__(self, sources: Sequence[str | Path], options: PrepareOptions, on_progress: OnProgress | None) -> None:
        self.options = options
        self.cache = Cache(options.cache)
        self.cache.prepare_root()
        self.sources: SourceSet = discover(
            sources, split=options.split, config=options.config, revision=options.revision
        )
        self.model = model_folder.load(options.tokenizer, revision=options.tokenizer_revision)
        self.mapping = detect([parse_row(row) for row in self.sources.peek()], options)
        self.recipe: Recipe = make_recipe(options, self.mapping, self.model)
        self.progress = Progress(workers=worker_count(options.workers), bytes_total=self._bytes_total())
        self._on_progress = on_progress
        self._slices: list[Slice] = []
        self._ours: set[str] = set()
        self._lock = threading.Lock()

    def _bytes_total(self) -> int:
        plain = all(not f.kind.is_streamed for f in self.sources.files)
        return sum(f.path.stat().st_size for f in self.sources.files) if plain else 0

    def run(self) -> Outcome:
        """Build what is missing and open the dataset."""
        for warning in self.model.warnings:
            log.warning("%s", warning)
        self.cache.keep_tokenizer(self.model.tokenizer_json)
        setup = Setup(self.recipe, self.cache, self.model.tokenizer_json, self.options.fast)
        claims = Claims(self.cache.root / "claims")
        try:
            self._build(setup, claims)
        finally:
            claims.close()
        return self._finish()

    # -- making what is missing -----------------------------------------------------------------------------------

    def _build(self, setup: Setup, claims: Claims) -> None:
        """Do our share of the slices, then wait for or take over what others have claimed."""
        taken_elsewhere: list[Task] = []
        self._dispatch(setup, self._tasks(claims, taken_elsewhere), claims)
        if not self._slices:
            raise SourceError("the sources have no rows. Check the files, or the --split.")
        while taken_elsewhere:
            self.progress.waiting = True
            left = [task for task in taken_elsewhere if not self.cache.has_shard(task.name)]
            self.progress.slices_elsewhere += len(taken_elsewhere) - len(left)
            free = [task for task in left if claims.take(task.name)]
            if free:
                self._dispatch(setup, self._with_data(free), claims)
            taken_elsewhere = [task for task in left if task.name not in self._ours]
            self._tell()
            if taken_elsewhere and not free:
                time.sleep(POLL)
        self.progress.waiting = False

    def _dispatch(self, setup: Setup, tasks: Iterator[Task], claims: Claims) -> None:
        def done(task: Task, report: SliceReport) -> None:
            claims.release(task.name)
            self._ours.add(task.name)
            self.progress.add(report)
            self._tell()
            if report.rejected and self.options.on_bad_row is OnBadRow.ERROR:
                raise self._first_rejected(task.name, task.slice)

        def retry(task: Task, how: str) -> None:
            self.progress.retries += 1
            log.warning("a worker died on %s: %s; the slice is tried once more", task.place, how)

        if self.progress.workers == 1 or self._is_small():
            self.progress.workers = 1
            run_here(setup, tasks, done)
        else:
            run_workers(setup, tasks, self.progress.workers, done, retry)

    def _is_small(self) -> bool:
        return 0 < self.progress.bytes_total <= SMALL_BYTES

    def _tasks(self, claims: Claims, elsewhere: list[Task]) -> Iterator[Task]:
        """Slices to do, found as they are asked for."""
        digest = self.recipe.digest
        for found in self.sources.slices(max_row_bytes=self.options.max_row_bytes):
            name = shard_name(digest, found.digest)
            known = name in self._ours
            self._slices.append(found.without_data())
            task = Task(name, found, self.sources.files[found.file].path)
            if known:
                continue  # the same bytes stand elsewhere in the data; one shard serves both
            if self.cache.has_shard(name):
                self._reuse(task)
            elif claims.take(name):
                if self.cache.has_shard(name):  # finished by another process since we looked
                    claims.release(name)
                    self._reuse(task)
                else:
                    self._ours.add(name)
                    yield task
            else:
                elsewhere.append(replace(task, slice=found.without_data()))

    def _reuse(self, task: Task) -> None:
        self.progress.slices_reused += 1
        self.progress.bytes_seen += task.slice.size
        self._tell()
        if self.options.on_bad_row is OnBadRow.ERROR and self.cache.shard_note(task.name)["rejected"]:
            raise self._first_rejected(task.name, task.slice)

    def _with_data(self, tasks: list[Task]) -> Iterator[Task]:
        """Tasks taken over from others; streamed sources are read again for their bytes."""
        if not any(task.slice.kind.is_streamed for task in tasks):
            yield from tasks
            return
        wanted = {(task.slice.file, task.slice.first_row): task for task in tasks}
        for found in self.sources.slices(max_row_bytes=self.options.max_row_bytes):
            task = wanted.get((found.file, found.first_row))
            if task is not None:
                yield replace(task, slice=found)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress)

    def _first_rejected(self, name: str, place: Slice) -> RowError:
        _, meta = read_shard(self.cache.shard_path(name))
        entry = meta.rejected[0]
        return RowError(entry["kind"], entry["reason"], entry["remedy"], self._where(place, entry))

    def _where(self, place: Slice, entry: dict[str, Any]) -> str:
        return f"{self.sources.files[place.file].name}:{entry['line']}"

    # -- finishing ------------------------------------------------------------------------------------------------

    def _finish(self) -> Outcome:
        """Commit the manifest, unless it is there already."""
        names = [shard_name(self.recipe.digest, s.digest) for s in self._slices]
        key = dataset_key(self.recipe.digest, [(s.file, s.digest) for s in self._slices])
        path = self.cache.dataset_path(key) / "manifest.json"
        hit = path.is_file() and not self.progress.slices_done
        if not path.is_file():
            self._manifest(key, names).commit(self.cache)
        manifest = read_manifest(path)
        self._note(key)
        quarantine = self._write_quarantine(key, names) if manifest.ledger["rejected"] else None
        dataset = StoredDataset(self.cache, manifest)
        warnings = (*self.model.warnings, *manifest.ledger["warnings"])
        return Outcome(dataset, hit, self.progress, warnings, self.mapping.describe(), quarantine)

    def _manifest(self, key: str, names: list[str]) -> Manifest:
        notes = [self.cache.shard_note(name) for name in names]
        metas = [read_shard(self.cache.shard_path(name))[1] for name in names]
        table = ShardTable(
            names=names,
            digests=[note["digest"] for note in notes],
            bytes=[note["bytes"] for note in notes],
            sources=[s.file for s in self._slices],
            first_rows=[s.first_row for s in self._slices],
            rows=[s.rows for s in self._slices],
            examples=[meta.ledger["examples"] for meta in metas],
            tokens=[meta.ledger["tokens"] for meta in metas],
        )
        ledger = _summed([meta.ledger for meta in metas])
        proof = {"rows": sum(len(meta.proof["rows"]) for meta in metas)}
        return Manifest(key, self.recipe.as_json(), table, ledger, proof, self.mapping.format is Format.PREFERENCE)

    def _note(self, key: str) -> None:
        """What is good to know beside the dataset, and changes with every run."""
        notes = {
            "files": [{"path": str(f.path.absolute()), "name": f.name, "kind": f.kind.value} for f in self.sources.files],
            "slices": [s.to_json() for s in self._slices],
            "tokenizer": self.model.name,
            "used": time.time(),
        }
        write_whole(self.cache.dataset_path(key) / "notes.json", canonical(notes), self.cache.tmp, "notes")

    def _write_quarantine(self, key: str, names: list[str]) -> Path:
        path = self.options.quarantine_file or self.cache.dataset_path(key) / "quarantine.jsonl"
        lines: list[bytes] = []
        for name, place in zip(names, self._slices, strict=True):
            for entry in read_shard(self.cache.shard_path(name))[1].rejected:
                located = {"where": self._where(place, entry), **entry, "row": place.first_row + entry["row"]}
                lines.append(orjson.dumps(located))
        write_whole(Path(path).absolute(), b"\n".join(lines) + b"\n", self.cache.tmp, "quarantine")
        return Path(path)


def _summed(ledgers: list[Any]) -> dict[str, Any]:
    """The ledger of a dataset: the sum of its slices'."""
    total: dict[str, Any] = {
        name: sum(ledger[name] for ledger in ledgers) for name in ("rows", "kept", "examples", "tokens", "regions_unknown")
    }
    for name in ("rejected", "notes"):
        total[name] = dict(sorted(sum((Counter(ledger[name]) for ledger in ledgers), Counter()).items()))
    total["warnings"] = sorted({warning for ledger in ledgers for warning in ledger["warnings"]})
    return total


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome for machines."""
    dataset, progress = outcome.dataset, outcome.progress
    values = {k: v for k, v in asdict(progress).items() if k not in ("started", "first_report", "waiting")}
    return {
        "key": dataset.key,
        "path": str(dataset.path),
        "hit": outcome.hit,
        "examples": len(dataset),
        "tokens": dataset.tokens,
        "format": outcome.format,
        "ledger": dict(dataset.ledger),
        "proof": dict(dataset.manifest.proof),
        "warnings": list(outcome.warnings),
        "quarantine": str(outcome.quarantine) if outcome.quarantine else None,
        "seconds": round(progress.seconds, 3),
        "build": values,
    }
