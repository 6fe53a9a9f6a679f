"""Sources in, a dataset out: finds what is there already, has the rest made, and commits the manifest last.

Slices are found while earlier ones are worked on, so work starts at once and memory does not grow with the data.
Every step leaves only whole files behind: a build that is killed anywhere goes on with the slices that are missing.
Any number of processes may run it on the same data at once: they share the slices through claims.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.build.finding import SliceFinder
from penstock.build.finish import commit_dataset, note_sources, row_places, write_quarantine
from penstock.build.limits import worker_count
from penstock.build.options import OnBadRow, OnMiss, PrepareOptions
from penstock.build.place import chosen_cache, position
from penstock.build.pool import Setup, Task, run_here, run_workers
from penstock.build.progress import OnProgress, Progress
from penstock.build.recipe import Recipe, make_recipe
from penstock.build.slice_job import SliceReport
from penstock.chat.formats_detect import detect
from penstock.chat.formats_json import parse_row
from penstock.errors import RowError, StoreError
from penstock.sources import Slice, SourceSet, discover, model_folder
from penstock.store.claims import Claims
from penstock.store.dataset import StoredDataset
from penstock.store.manifest import Manifest, dataset_key, read_manifest, shard_name
from penstock.store.memo import PlanMemo
from penstock.store.shard import read_shard

log = logging.getLogger("penstock")

SMALL_BYTES = 6 << 20  # starting worker processes for less would cost more than it saves
POLL = 0.3  # seconds between looks at what other processes have finished


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
        self.cache, self._notice = chosen_cache(options)
        self.sources: SourceSet = discover(sources, split=options.split, config=options.config, revision=options.revision)
        self.model = model_folder.load(options.tokenizer, revision=options.tokenizer_revision)
        self.mapping = detect(self._sample(), options)
        self.recipe: Recipe = make_recipe(options, self.mapping, self.model)
        self.progress = Progress(workers=worker_count(options.workers), bytes_total=self._bytes_total())
        self._rank, self._world_size = position(options)
        self._finder = SliceFinder(self.sources, PlanMemo(self.cache), options.max_row_bytes)
        self._on_progress = on_progress
        self._slices: list[Slice] = []
        self._made: set[str] = set()

    def _sample(self) -> list[dict[str, Any]]:
        """The first rows, to tell the format by; bad ones are reported when their turn comes."""
        rows: list[dict[str, Any]] = []
        first: RowError | None = None
        for row in self.sources.peek():
            try:
                rows.append(parse_row(row))
            except RowError as error:
                first = first or error.at(self.sources.files[0].name)
        if not rows and first is not None:
            raise first
        return rows

    def _bytes_total(self) -> int:
        plain = all(not f.kind.is_streamed for f in self.sources.files)
        return sum(f.path.stat().st_size for f in self.sources.files) if plain else 0

    def run(self) -> Outcome:
        """Open the dataset, after building what is missing of it."""
        for warning in (*self._notice, *self.model.warnings):
            log.warning("%s", warning)
        found = None if self.options.force else self._find()
        if found is not None:
            return self._outcome(found, hit=True)
        if self.options.on_miss is OnMiss.ERROR:
            raise StoreError(
                f"the dataset is not in {self.cache.root}, and on_miss is 'error'. Prepare it first with `penstock prepare`; "
                "`penstock cache explain` says what differs from the nearest one."
            )
        self._build()
        return self._outcome(self._commit(), hit=False)

    # -- finding the whole dataset --------------------------------------------------------------------------------

    def _find(self) -> Manifest | None:
        """The dataset, if it can be known to be there without reading the data."""
        slices = self._finder.known()
        if slices is None:
            return None
        self._use_earlier_date(slices)
        path = self.cache.dataset_path(self._key(slices)) / "manifest.json"
        if not path.is_file():
            return None
        manifest = read_manifest(path)
        if not all(self.cache.has_shard(name) for name in manifest.shards.names):
            return None
        self._slices = slices
        self.progress.slices_reused = len(slices)
        self._refuse_rejected(manifest)
        return manifest

    def _key(self, slices: list[Slice], recipe: Recipe | None = None) -> str:
        return dataset_key((recipe or self.recipe).digest, [(s.file, s.digest) for s in slices])

    def _use_earlier_date(self, slices: list[Slice]) -> None:
        """Without --date, the same data prepared on another day is reused, and this is said."""
        if self.recipe.date is None or self.options.date is not None:
            return
        pointer = self.cache.root / "memo" / "dates" / self._key(slices, replace(self.recipe, date=None))
        try:
            earlier = datetime.date.fromisoformat(pointer.read_text())
        except (OSError, ValueError):
            return
        if earlier != self.recipe.date:
            log.warning("the template prints the date: reusing what was prepared with %s (--date sets another)", earlier)
            self.recipe = replace(self.recipe, date=earlier)

    def _refuse_rejected(self, manifest: Manifest) -> None:
        if manifest.ledger["rejected"] and self.options.on_bad_row is OnBadRow.ERROR:
            for name, part in zip(manifest.shards.names, self._slices, strict=True):
                if read_shard(self.cache.shard_path(name))[1].rejected:
                    raise self._first_rejected(name, part)

    # -- making what is missing -----------------------------------------------------------------------------------

    def _build(self) -> None:
        """Do our share of the slices, then wait for or take over what others have claimed."""
        self.cache.keep_tokenizer(self.model.tokenizer_json)
        setup = Setup(self.recipe, self.cache, self.model.tokenizer_json, self.options.fast)
        claims = Claims(self.cache.root / "claims")
        left: list[Task] = []
        try:
            self._dispatch(setup, self._first_pass(claims, left), claims)
            while left:
                before = len(left)
                self._dispatch(setup, self._next_pass(claims, left), claims)
                self._tell()
                if left and len(left) == before:
                    self.progress.waiting = True
                    time.sleep(POLL)
        finally:
            claims.close()
            self.progress.waiting = False

    def _dispatch(self, setup: Setup, tasks: Iterator[Task], claims: Claims) -> None:
        def done(task: Task, report: SliceReport) -> None:
            claims.release(task.name)
            self.progress.add(report)
            self._tell()
            if report.rejected and self.options.on_bad_row is OnBadRow.ERROR:
                raise self._first_rejected(task.name, task.slice)

        def retry(task: Task, how: str) -> None:
            self.progress.retries += 1
            log.warning("a worker died on %s: %s; the slice is tried once more", task.place, how)

        if self.progress.workers == 1 or 0 < self.progress.bytes_total <= SMALL_BYTES:
            self.progress.workers = 1
            run_here(setup, tasks, done)
        else:
            run_workers(setup, tasks, self.progress.workers, done, retry)

    def _first_pass(self, claims: Claims, left: list[Task]) -> Iterator[Task]:
        """Our slices, found as they are asked for; those of other ranks or processes go to `left`."""
        digest = self.recipe.digest
        for number, found in enumerate(self._finder.find()):
            task = Task(shard_name(digest, found.digest), found, self.sources.files[found.file].path)
            self._slices.append(found.without_data())
            if task.name in self._made:
                continue  # the same bytes stand elsewhere in the data; one shard serves both
            ours = number % self._world_size == self._rank
            if self._is_there(task):
                self._reuse(task)
            elif ours and self._take(task, claims):
                yield task
            else:
                left.append(replace(task, slice=found.without_data()))

    def _next_pass(self, claims: Claims, left: list[Task]) -> Iterator[Task]:
        """What others have not finished and do not seem to be working on."""
        waiting, left[:] = left[:], []
        free: list[Task] = []
        for task in waiting:
            if task.name in self._made or self._is_there(task):
                self.progress.slices_elsewhere += task.name not in self._made
            elif self._take(task, claims):
                free.append(task)
            else:
                left.append(task)
        yield from self._with_data(free)

    def _is_there(self, task: Task) -> bool:
        return not self.options.force and self.cache.has_shard(task.name)

    def _take(self, task: Task, claims: Claims) -> bool:
        if not claims.take(task.name):
            return False
        if self._is_there(task):  # finished by another process since we looked
            claims.release(task.name)
            self._reuse(task)
            return False
        self._made.add(task.name)
        return True

    def _reuse(self, task: Task) -> None:
        self.progress.slices_reused += 1
        self.progress.bytes_seen += task.slice.size
        self._tell()
        if self.options.on_bad_row is OnBadRow.ERROR and self.cache.shard_note(task.name)["rejected"]:
            raise self._first_rejected(task.name, task.slice)

    def _with_data(self, tasks: list[Task]) -> Iterator[Task]:
        """Tasks taken over from others; streamed sources are read again for their bytes."""
        streamed = {(t.slice.file, t.slice.first_row): t for t in tasks if t.slice.kind.is_streamed}
        yield from (t for t in tasks if not t.slice.kind.is_streamed)
        if streamed:
            for found in self._finder.find():
                task = streamed.pop((found.file, found.first_row), None)
                if task is not None:
                    yield replace(task, slice=found)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress)

    def _first_rejected(self, name: str, part: Slice) -> RowError:
        entry = read_shard(self.cache.shard_path(name))[1].rejected[0]
        (where,) = row_places(self.sources.files[part.file], part, [entry["row"]])
        return RowError(entry["kind"], entry["reason"], entry["remedy"], where)

    # -- finishing ------------------------------------------------------------------------------------------------

    def _commit(self) -> Manifest:
        names = [shard_name(self.recipe.digest, s.digest) for s in self._slices]
        return commit_dataset(self.cache, self._key(self._slices), self.recipe, names, self._slices)

    def _outcome(self, manifest: Manifest, *, hit: bool) -> Outcome:
        if not hit:
            note_sources(self.cache, manifest, self.sources, self._slices, self.model.name)
        quarantine = None
        if manifest.ledger["rejected"]:
            target = self.options.quarantine_file
            quarantine = write_quarantine(self.cache, manifest, self.sources, self._slices, target)
        warnings = (*self._notice, *self.model.warnings, *manifest.ledger["warnings"])
        dataset = StoredDataset(self.cache, manifest)
        return Outcome(dataset, hit, self.progress, warnings, self.mapping.describe(), quarantine)
