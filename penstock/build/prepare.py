"""Sources in, a dataset out: finds what is there already, has the rest made, and commits the manifest last.

Slices are found while earlier ones are worked on, so work starts at once and memory does not grow with the data.
Every step leaves only whole files behind: a build that is killed anywhere goes on with the slices that are missing.
Any number of processes may run it on the same data at once: they share the slices through claims.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.build.auto_check import AutoCheck, auto_model
from penstock.build.dates import earlier_date, remember_date
from penstock.build.finding import SliceFinder
from penstock.build.finish import note_sources, row_places, usable_manifest, write_quarantine
from penstock.build.inputs import with_inputs
from penstock.build.limits import worker_count
from penstock.build.options import OnBadRow, OnDropped, OnMiss, OnUnwritable, PrepareOptions, TokenizerAs
from penstock.build.place import chosen_place, position, spare_place
from penstock.build.pool import Setup, job_here, run_here, run_workers
from penstock.build.progress import OnProgress, Progress, SliceReport
from penstock.build.recipe import Recipe, make_recipe
from penstock.build.sharing import Sharing
from penstock.build.worker_process import Task
from penstock.chat.formats import Format
from penstock.chat.formats_detect import detect, format_columns
from penstock.chat.formats_json import parse_row
from penstock.chat.notes import Note, reason_and_remedy
from penstock.errors import CorruptError, RowError, SourceError, StoreError
from penstock.native import native
from penstock.regions.modes import TurnsMode
from penstock.sources import KeepData, Slice, SourceSet, discover
from penstock.store.cache import Cache
from penstock.store.claims import lease
from penstock.store.dataset import StoredDataset
from penstock.store.files import is_readable_file
from penstock.store.gc import clean_orphans
from penstock.store.manifest import Manifest, dataset_key, shard_name
from penstock.store.memo import PlanMemo
from penstock.store.trust import CheckedFiles, Trust
from penstock.tokenizer import load_tokenizer, tokenizer_of_object

if TYPE_CHECKING:
    from penstock.build.slice_job import SliceJob
    from penstock.store.shard import ShardMeta

log = logging.getLogger("penstock")

_LOSSES = frozenset(note.value for note in Note if note.is_loss)
SMALL_BYTES = 6 << 20  # starting worker processes for less would cost more than it saves
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 2.0  # seconds between looks at what other processes have finished
ATTEMPTS = 8  # at a build whose shards vanish or turn out damaged; pauses included, they take some ten seconds
SAMPLED_ROWS = 100  # on which both ways of rendering turns are compared
NOT_COMPILED = (
    "Penstock was installed without a compiler, so its inner loops run in Python: the result is the same, only slower. "
    "With a C compiler at hand, install it again."
)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn what the system says about a file, and no stage has explained, into an error of ours."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or 'a file'}: {error.strerror or error}. Look after the disk or file server; "
            "finished slices stay, the same command goes on from there."
        ) from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `prepare` did."""

    dataset: StoredDataset
    hit: bool
    progress: Progress
    warnings: tuple[str, ...]
    format: str
    quarantine: Path | None
    tokenizer: str = ""  # how it compares with AutoTokenizer; '' for a hit


class Builder:
    """One run of prepare."""

    @_told()
    def __init__(
        self,
        sources: Iterable[object],
        options: PrepareOptions,
        on_progress: OnProgress | None,
        tokenizer: object = None,
    ) -> None:
        """`sources` are paths, hub names or rows in memory; `tokenizer` an object in place of the option."""
        self.options = options
        self._place = chosen_place(options)
        self.notices = [*self._place.notices]
        self.sources: SourceSet = discover(
            with_inputs(sources, self._place),
            split=options.split,
            limit=options.limit,
            config=options.config,
            revision=options.revision,
        )
        by_auto = options.tokenizer_as is TokenizerAs.AUTO
        if tokenizer is not None:
            self.model = tokenizer_of_object(tokenizer)
        else:
            self.model = load_tokenizer(options.tokenizer, revision=options.tokenizer_revision, for_auto=by_auto)
        if by_auto and tokenizer is None:
            self.model = auto_model(self.cache, self.model)
        self.notices += self.model.warnings
        self.mapping = detect(self._sample(), options)
        self.recipe: Recipe = make_recipe(options, self.mapping, self.model)
        workers, capped = worker_count(options.workers)
        self.notices += [capped] if capped else []
        self.progress = Progress(workers=workers, bytes_total=self._bytes_total())
        self._finder = SliceFinder(self.sources, PlanMemo(self.cache), options.max_row_bytes)
        self._on_progress = on_progress
        self._slices: list[Slice] = []
        self._checked = CheckedFiles()
        self._doubted = False  # has the dataset files of other users that this one had not checked before?
        self._auto: AutoCheck | None = None

    @property
    def cache(self) -> Cache:
        """The cache that is looked into and built in."""
        return self._place.cache

    def _sample(self) -> list[dict[str, Any]]:
        """The first rows, to tell the format by; bad ones are reported when their turn comes."""
        rows: list[dict[str, Any]] = []
        first: RowError | None = None
        for row in self.sources.peek(max_row_bytes=self.options.max_row_bytes, columns=format_columns(self.options)):
            try:
                rows.append(parse_row(row))
            except RowError as error:
                first = first or error.at(self.sources.files[0].name)
        if not rows and first is not None:
            raise first
        return rows

    def _bytes_total(self) -> int:
        if not self.sources.is_whole:
            return 0  # known once the split's slices are
        plain = all(not f.kind.is_streamed for f in self.sources.files)
        return sum(f.path.stat().st_size for f in self.sources.files) if plain else 0

    @_told()
    def run(self) -> Outcome:
        """Open the dataset, after building what is missing of it."""
        for notice in self.notices:
            log.warning("%s", notice)
        clean_orphans(self.cache)
        found = None if self.options.force else self._find()
        if found is None and self.options.on_miss is OnMiss.ERROR:
            raise StoreError(
                f"the dataset is not in {self.cache.root}, and on_miss is 'error'. "
                "Prepare it first with `penstock prepare`; `penstock cache explain` says what differs from the nearest."
            )
        if found is None and self._place.obstacle is not None:
            self._move(self._place.obstacle)
            found = None if self.options.force else self._find()
        return self._outcome(found, hit=True) if found is not None else self._built()

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        log.warning("%s", text)

    def _move(self, obstacle: StoreError) -> None:
        """The cache can't be written: build in a temporary place, if that is wanted."""
        if self.options.on_unwritable is OnUnwritable.ERROR:
            raise obstacle
        self._place = spare_place(self._place)
        self._notice(*self._place.notices)
        clean_orphans(self.cache)
        self._finder = SliceFinder(self.sources, PlanMemo(self.cache), self.options.max_row_bytes)

    # -- finding the whole dataset --------------------------------------------------------------------------------

    def look(self) -> list[Slice]:
        """All slices, after reading the data if they are not known; settles the date. Encodes nothing."""
        slices = self._finder.known() or [part.without_data() for part in self._finder.find()]
        self._settle_date(slices[0])
        return slices

    def _find(self) -> Manifest | None:
        """The dataset; without reading the data, unless nothing could be built anyway."""
        may_build = self.options.on_miss is OnMiss.BUILD and self._place.obstacle is None
        if may_build and self._finder.known() is None:
            return None
        slices = self.look()
        manifest = usable_manifest(self.cache, self._key(slices))
        if manifest is None or not self._all_there(manifest.shards.names):
            return None
        self._slices = slices
        if not self._are_sound(manifest.shards.names) or not self._is_sound(manifest):
            return None
        self.progress.slices_reused = len(slices)
        self._refuse_rejected(manifest)
        return manifest

    def _key(self, slices: list[Slice]) -> str:
        return dataset_key(self.recipe.digest, [(s.file, s.first_row, s.digest) for s in slices])

    def _all_there(self, names: list[str]) -> bool:
        return all(self.cache.has_shard(name) for name in names)

    # -- what other users wrote -----------------------------------------------------------------------------------

    def _unchecked(self, key: str) -> list[Path]:
        """The dataset's files that others wrote and this user has not checked: shards, and the manifest."""
        if self.cache.trust is Trust.ALL:
            return []
        paths = [*map(self.cache.shard_path, self._names()), self.cache.dataset_path(key) / "manifest.json"]
        foreign = [path for path in dict.fromkeys(paths) if self.cache.tree.is_foreign(path)]
        return [] if not foreign or self._checked.knows(foreign) else foreign

    def _are_sound(self, names: list[str]) -> bool:
        """Are the shards that others wrote what the references make of their rows, by a sample?"""
        unchecked = self._unchecked(self._key(self._slices))
        self._doubted = bool(unchecked)
        doubtful = {path.stem for path in unchecked} & set(names)
        if not doubtful:
            return True
        from penstock.build.foreign import ForeignCheck

        check = ForeignCheck(self.cache, self.recipe, self.model.tokenizer_json, self.sources.files, self.progress)
        refused = check.refused(self._finder.find(), doubtful, self._notice)
        if self._place.obstacle is None:
            for name, why in refused.items():
                self.cache.mark_bad(name, why)
        return not refused

    def _is_sound(self, manifest: Manifest) -> bool:
        """Is the manifest the one that its shards make? Asked where another user wrote it, or we made a shard."""
        path = self.cache.dataset_path(manifest.key) / "manifest.json"
        foreign = self._doubted and self.cache.tree.is_foreign(path)
        if not foreign and not self.progress.slices_done:
            return True
        from penstock.build.commit import manifest_of

        made = manifest_of(self.cache, manifest.key, self.recipe, manifest.shards.names, self._slices)
        return made.to_bytes() == manifest.to_bytes()

    def _settle_date(self, first: Slice) -> None:
        """Without --date, the same data prepared on another day is reused, and this is said."""
        if self.options.date is None and not self.options.force:
            earlier = earlier_date(self.cache, self.recipe, first)
            if earlier is not None:
                told = f"the template prints the date: reusing what was prepared with {earlier} (--date sets another)"
                self._notice(told)
                self.recipe = replace(self.recipe, date=earlier)

    def _refuse_rejected(self, manifest: Manifest) -> None:
        if manifest.ledger["rejected"] and self.options.on_bad_row is OnBadRow.ERROR:
            for name, part in zip(manifest.shards.names, self._slices, strict=True):
                if self._meta(name).rejected:
                    raise self._first_rejected(name, part)
        if any(note in _LOSSES for note in manifest.ledger["notes"]) and self.options.on_dropped is OnDropped.ERROR:
            for name, part in zip(manifest.shards.names, self._slices, strict=True):
                self._refuse_losses(name, part)

    def _refuse_losses(self, name: str, part: Slice) -> None:
        """Raise for the first row of a slice of which the model sees or learns less than it holds."""
        noted = {note: runs[0] for note, runs in self._meta(name).noted.items() if note in _LOSSES}
        if noted:
            row, note = min((row, note) for note, row in noted.items())
            (where,) = row_places(self.sources.files[part.file], part, [row])
            raise RowError(note, *reason_and_remedy(Note(note)), where)

    # -- making what is missing -----------------------------------------------------------------------------------

    def _built(self) -> Outcome:
        """Build and commit; again what vanished meanwhile (a gc that ran beside us) or turned out to be damaged."""
        from penstock.build.commit import commit_dataset

        if native is None and self.options.fast:
            self._notice(NOT_COMPILED)
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(SHORTEST_WAIT * 2**attempt, LONGEST_WAIT))  # a gc on a slow disk may still be under way
            force = self.options.force and attempt == 0
            try:
                self._build(force)
                names = self._names()
                with lease(self.cache.tree, [*names, self.recipe.tokenizer]):
                    if not self.cache.all_present(names) or not self._are_sound(names):
                        continue
                    key = self._key(self._slices)
                    there = None if force else usable_manifest(self.cache, key)
                    if there is not None and not self._is_sound(there):
                        there = None
                    manifest = there or commit_dataset(self.cache, key, self.recipe, names, self._slices)
                return self._outcome(manifest, hit=there is not None and not self.progress.slices_done)
            except CorruptError:
                if attempt == ATTEMPTS - 1:
                    raise
                self._mark_damaged()
        raise StoreError(
            f"{self.cache.root}: shards vanish as soon as they are made. Does something clean this folder?"
        )

    def _names(self) -> list[str]:
        """Of the shards of the slices found so far."""
        return [shard_name(self.recipe.digest, part.digest) for part in self._slices]

    def _mark_damaged(self) -> None:
        for name in self._names():
            if self.cache.has_shard(name):
                try:
                    self._meta(name)
                except CorruptError as error:
                    log.warning("%s; it is made again", error)
                    self.cache.mark_bad(name, str(error))

    def _build(self, force: bool) -> None:
        """Do our share of the slices, then wait for or take over what others have claimed."""
        here = self.progress.workers == 1 or 0 < self.progress.bytes_total <= SMALL_BYTES
        if here:
            self.progress.workers = 1
        if self.sources.limit is None and (known := self._finder.planned()) is not None:
            self.progress.bytes_total = sum(part.size for part in known)
        found = self._finder.find(KeepData.ALL if here else KeepData.STREAMED)
        first = next(found)
        self._settle_date(first)
        remember_date(self.cache, self.recipe, first, overwrite=force)
        slices = chain((first,), found)
        del first  # so that its data does not stay
        self.cache.store_tokenizer(self.model.tokenizer_json)
        setup = Setup(self.recipe, self.cache, self.model.tokenizer_json, self.options.fast)
        job = job_here(setup)
        self._auto = AutoCheck(self.cache, self.model, self.options.tokenizer_as, plain=not self.recipe.templates)
        self._auto.start()
        sharing = Sharing(self.cache, self._finder, self.sources.files, self.recipe.digest, force=force)
        self._slices, pause = sharing.slices, SHORTEST_WAIT
        rank, world_size = position(self.options)
        try:
            self._dispatch(setup, job, sharing.own(slices, rank, world_size, self._reuse), sharing)
            while sharing.left:
                before = self.progress.slices_done
                self._dispatch(setup, job, sharing.others(self._finished_elsewhere), sharing)
                self.progress.waiting = bool(sharing.left)
                self._tell()
                if sharing.left:
                    pause = SHORTEST_WAIT if self.progress.slices_done > before else min(pause * 1.5, LONGEST_WAIT)
                    time.sleep(pause)
            self._auto.look(wait=True)
        finally:
            self._auto.close()
            sharing.close()
            self.progress.waiting = False
        clean_orphans(self.cache)  # of processes that were still dying, or died, while we worked

    def _dispatch(self, setup: Setup, job: Callable[[], SliceJob], tasks: Iterator[Task], sharing: Sharing) -> None:
        def done(task: Task, report: SliceReport) -> None:
            sharing.release(task)
            self.progress.add(report)
            self._tell()
            if self._auto is not None:
                self._auto.look()
            if report.rejected and self.options.on_bad_row is OnBadRow.ERROR:
                raise self._first_rejected(task.name, task.slice)
            if report.losses and self.options.on_dropped is OnDropped.ERROR:
                self._refuse_losses(task.name, task.slice)

        def retry(task: Task, how: str) -> None:
            self.progress.retries += 1
            log.warning("a worker died on %s: %s; the slice is tried once more", task.place, how)

        if self.progress.workers == 1:
            run_here(job, tasks, done)
        else:
            run_workers(setup, tasks, self.progress.workers, done, retry)

    def _reuse(self, task: Task) -> None:
        self.progress.slices_reused += 1
        self._seen(task)

    def _finished_elsewhere(self, task: Task) -> None:
        self.progress.slices_elsewhere += 1
        self._seen(task)

    def _seen(self, task: Task) -> None:
        self.progress.bytes_seen += task.slice.size
        self._tell()
        strict = self.options.on_bad_row is OnBadRow.ERROR, self.options.on_dropped is OnDropped.ERROR
        if not any(strict) or not self.cache.has_shard(task.name):
            return
        note = self.cache.shard_note(task.name)
        if strict[0] and note["rejected"] and self._meta(task.name).rejected:
            raise self._first_rejected(task.name, task.slice)
        if strict[1] and note.get("losses"):
            self._refuse_losses(task.name, task.slice)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress)

    def _meta(self, name: str) -> ShardMeta:
        from penstock.store.shard import read_shard  # needs pyarrow, which a hit does without

        return read_shard(self.cache.shard_path(name))[1]

    def _first_rejected(self, name: str, part: Slice) -> RowError:
        entry = self._meta(name).rejected[0]
        (where,) = row_places(self.sources.files[part.file], part, [entry["row"]])
        return RowError(entry["kind"], entry["reason"], entry["remedy"], where)

    def _compare_turns(self, manifest: Manifest) -> None:
        """Say what is lost where the template rewrites turns that the data has reasoning for."""
        dropped = manifest.ledger["notes"].get(Note.REASONING_DROPPED.value)
        if not dropped or self.recipe.turns is TurnsMode.FAITHFUL or self.recipe.mapping.format is Format.PREFERENCE:
            return
        from penstock.build.turns_compared import compare_turns

        limit, columns = self.options.max_row_bytes, self.recipe.mapping.read_columns
        rows = self.sources.peek(SAMPLED_ROWS, max_row_bytes=limit, columns=columns)
        compared = compare_turns(self.recipe, self.model.tokenizer_json, rows)
        if compared.turns:
            self._notice(str(compared))

    def _nothing_kept(self, manifest: Manifest, quarantine: Path) -> SourceError:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in manifest.ledger["rejected"].items())
        parts = zip(manifest.shards.names, self._slices, strict=True)
        first = next(self._first_rejected(name, part) for name, part in parts if self._meta(name).rejected)
        return SourceError(
            f"no row is left: on_bad_row=quarantine set all {manifest.ledger['rows']:,} of them aside ({kinds}). "
            f"The first: {first}. All are in {quarantine}."
        )

    # -- finishing ------------------------------------------------------------------------------------------------

    def _outcome(self, manifest: Manifest, *, hit: bool) -> Outcome:
        if not is_readable_file(self.cache.tokenizer_path(self.recipe.tokenizer)):
            with contextlib.suppress(StoreError):  # only needed to show tokens; others' caches may be read-only
                self.cache.store_tokenizer(self.model.tokenizer_json)
        note_sources(self.cache, manifest.key, self.sources, self._slices, self.model.name)
        quarantine = None
        if manifest.ledger["rejected"]:
            target = self.options.quarantine_file
            quarantine = write_quarantine(self.cache, manifest, self.sources, self._slices, target)
            if not manifest.ledger["kept"]:
                raise self._nothing_kept(manifest, quarantine)
        compared = "" if self._auto is None else self._auto.summary
        if self._auto is not None and self._auto.warning:
            self._notice(self._auto.warning)
        if not hit:
            self._compare_turns(manifest)
        warnings = (*self.notices, *manifest.ledger["warnings"])
        dataset = StoredDataset(self.cache, manifest)
        dataset.mark_used(now=True)  # `latest` means it
        if self._doubted and (checked := self._unchecked(manifest.key)):
            self._checked.remember(checked)
        return Outcome(dataset, hit, self.progress, warnings, self.mapping.describe(), quarantine, compared)
