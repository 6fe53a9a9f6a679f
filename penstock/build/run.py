"""Builds a dataset from sources: reuses shards from the cache, prepares the missing ones, commits the manifest last.

Slices are found while earlier ones are prepared, so work starts immediately and memory doesn't grow with the data.
Files appear only when they are complete, so a build that is killed at any point resumes with the missing slices.
Any number of processes may build the same data at the same time: they divide the slices through claims.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.build.auto_check import AutoCheck, auto_model
from penstock.build.find import choose_cache, earlier_date, position, remember_date, temporary_cache
from penstock.build.inputs import store_inputs
from penstock.build.options import EngineKind, OnBadRow, OnDropped, OnMiss, OnUnwritable, PrepareOptions
from penstock.build.outcome import note_sources, row_locations, usable_manifest, write_quarantine
from penstock.build.progress import OnProgress, Progress, SliceReport
from penstock.build.slice_plans import PlanMemo, SliceFinder
from penstock.build.workers.local import InProcess, WorkerProcesses
from penstock.build.workers.process import Task, system_failure
from penstock.build.workers.runner import Setup, SliceEngine, worker_count
from penstock.build.workers.sharing import Sharing
from penstock.errors import CorruptError, RowError, SourceError, StoreError
from penstock.native import native
from penstock.prepare.chat.formats import Format, detect, format_columns
from penstock.prepare.chat.json_rows import parse_row
from penstock.prepare.chat.notes import LOSSES, Note, reason_and_remedy
from penstock.prepare.modes import TokenizerAs, TurnsMode
from penstock.prepare.recipe import Recipe, make_recipe
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.reading import KeepData
from penstock.prepare.sources.remote import clear_spool
from penstock.prepare.sources.slices import Slice, identity
from penstock.prepare.sources.source_set import SourceSet
from penstock.prepare.tokenizer.files import load_tokenizer, tokenizer_of_object
from penstock.store.cache import Cache
from penstock.store.dataset import Dataset
from penstock.store.files import is_readable_file
from penstock.store.gc import clean_orphans
from penstock.store.manifest import Manifest, dataset_key, shard_name

if TYPE_CHECKING:
    from penstock.store.shard import ShardMeta

log = logging.getLogger("penstock")

SMALL_BYTES = 6 << 20  # below this, starting worker processes costs more than it saves
MANY_FILES = 3000  # above this, a notice recommends to join them
READ_BYTES = 64 << 20  # up to this, files are read to find a hit (0.1 s) rather than starting a build
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 2.0  # seconds between checks for slices that other processes have finished
ATTEMPTS = 8  # if shards disappear or are damaged; about ten seconds in total, pauses included
NOT_COMPILED = (
    "Penstock was installed without a C compiler, so its inner loops run in Python: slower, with the same result. "
    "Install a C compiler, then reinstall Penstock."
)


@contextlib.contextmanager
def _os_errors_explained() -> Iterator[None]:
    """Raises StoreError for an error of the system that no stage has turned into an error of its own."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        text = system_failure(error)
        if text is None:
            raise
        raise StoreError(f"{text} Run the same command again: finished slices are kept.") from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of `prepare`."""

    dataset: Dataset
    hit: bool
    progress: Progress
    warnings: tuple[str, ...]
    format: str
    quarantine: Path | None
    tokenizer: str = ""  # the result of the comparison with AutoTokenizer; '' for a hit


class Builder:
    """One run of `prepare`."""

    @_os_errors_explained()
    def __init__(
        self,
        sources: Iterable[object],
        options: PrepareOptions,
        on_progress: OnProgress | None,
        tokenizer: object = None,
    ) -> None:
        """`sources` are paths, hub names or rows in memory; `tokenizer` is an object that replaces the option."""
        self.options = options
        self._location = choose_cache(options)
        self.notices = [*self._location.notices]
        self._memo = PlanMemo(self.cache, rehash=options.rehash)
        self.sources: SourceSet = discover(
            store_inputs(sources, self._location),
            split=options.split,
            limit=options.limit,
            config=options.config,
            revision=options.revision,
            recall=self._memo.kind,
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
        workers, capped = worker_count(options.workers) if options.engine is EngineKind.LOCAL else (0, "")
        self.notices += [capped] if capped else []
        self.progress = Progress(workers=workers, bytes_total=self._bytes_total())
        self._finder = SliceFinder(self.sources, self._memo, options.max_row_bytes)
        self._on_progress = on_progress
        self._slices: list[Slice] = []
        self._unchecked: list[Path] = []  # files of the dataset that others wrote and this user never checked
        self._auto: AutoCheck | None = None

    @property
    def cache(self) -> Cache:
        """The cache to search and to build in."""
        return self._location.cache

    def first_rows(self) -> list[bytes]:
        """Returns the rows that the format is detected from. The cache has those of objects that were read before."""
        limit, columns = self.options.max_row_bytes, format_columns(self.options)
        how = [str(self.sources.split), limit, None if columns is None else sorted(columns)]
        rows = self._memo.sample(self.sources.files, how)
        if rows is None:
            rows = self.sources.peek(max_row_bytes=limit, columns=columns)
            self._memo.put_sample(self.sources.files, how, rows)
        return rows

    def _sample(self) -> list[dict[str, Any]]:
        """Returns the first rows, parsed; bad ones are reported when their slice is prepared."""
        rows: list[dict[str, Any]] = []
        first: RowError | None = None
        for row in self.first_rows():
            try:
                rows.append(parse_row(row))
            except RowError as error:
                first = first or error.at(self.sources.files[0].name)
        if not rows and first is not None:
            raise first
        return rows

    def _bytes_total(self) -> int:
        if not self.sources.is_whole:
            return 0  # unknown until the slices of the split are
        plain = all(not f.kind.is_streamed for f in self.sources.files)
        return sum(identity(f.path).size for f in self.sources.files) if plain else 0

    @_os_errors_explained()
    def run(self) -> Outcome:
        """Opens the dataset, after building what is missing."""
        for notice in self.notices:
            log.warning("%s", notice)
        clean_orphans(self.cache)
        found = None if self.options.force else self._find()
        if found is None and self.options.on_miss is OnMiss.ERROR:
            raise StoreError(
                f"the dataset is not in {self.cache.address}, and on_miss is 'error'. "
                "Prepare it first with `penstock prepare`; `penstock cache explain` shows how the nearest one differs."
            )
        if found is None and self._location.obstacle is not None:
            self._redirect(self._location.obstacle)
            found = None if self.options.force else self._find()
        try:
            return self._outcome(found, hit=True) if found is not None else self._build_and_commit()
        finally:
            clear_spool()

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        log.warning("%s", text)

    def _redirect(self, obstacle: StoreError) -> None:
        """Switches to a temporary cache if the cache can't be written and the options allow it."""
        if self.options.on_unwritable is OnUnwritable.ERROR:
            raise obstacle
        self._location = temporary_cache(self._location)
        self._notice(*self._location.notices)
        clean_orphans(self.cache)
        self._finder = SliceFinder(
            self.sources, PlanMemo(self.cache, rehash=self.options.rehash), self.options.max_row_bytes
        )

    # -- finding the whole dataset --------------------------------------------------------------------------------

    def slices_if_known(self) -> list[Slice] | None:
        """Returns all slices, or None if the data must be read to find them."""
        return self._finder.known()

    def known_files(self) -> Mapping[int, tuple[Slice, ...]]:
        """Returns the slices of the files that were read before, by ordinal."""
        return self._finder.known_files

    def find_slices(self) -> list[Slice]:
        """Returns all slices, reading the data if necessary, and settles the date. Encodes nothing."""
        slices = self._finder.known() or [part.without_data() for part in self._finder.find()]
        self._settle_date(slices[0])
        return slices

    def _find(self) -> Manifest | None:
        """Returns the dataset's manifest on a hit.

        Reads the data if they are small, if the options say so, or if building is not allowed; otherwise data that were
        never cut into slices are a miss.
        """
        may_build = self.options.on_miss is OnMiss.BUILD and self._location.obstacle is None
        is_plain = all(isinstance(f.path, Path) and not f.kind.is_streamed for f in self.sources.files)
        is_costly = not is_plain or self._finder.unknown_bytes > READ_BYTES
        if may_build and is_costly and self._finder.known() is None and not self.options.rehash:
            return None
        slices = self.find_slices()
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
        self.cache.refresh(names)
        return all(self.cache.has_shard(name) for name in names)

    # -- checking what other users wrote --------------------------------------------------------------------------

    def _are_sound(self, names: list[str]) -> bool:
        """Whether a sample of rows in the shards of other users agrees with the references."""
        self._unchecked = self.cache.unchecked(names, self._key(self._slices))
        to_check = {path.stem for path in self._unchecked} & set(names)
        if not to_check:
            return True
        from penstock.build.recheck import ForeignCheck

        check = ForeignCheck(self.cache, self.recipe, self.model.tokenizer_json, self.sources.files, self.progress)
        refused = check.refused(self._finder.find(), to_check, self._notice)
        if self._location.obstacle is None:
            for name, why in refused.items():
                self.cache.mark_bad(name, why)
        return not refused

    def _is_sound(self, manifest: Manifest) -> bool:
        """Whether the manifest agrees with its shards. Checked if it or one of them is new or another user's."""
        if not self._unchecked and not self.progress.slices_done:
            return True
        from penstock.build.commit import manifest_of

        expected = manifest_of(self.cache, manifest.key, self.recipe, manifest.shards.names, self._slices)
        return expected.to_bytes() == manifest.to_bytes()

    def _settle_date(self, first: Slice) -> None:
        """Without --date, takes the date of an earlier build of the same data, with a notice."""
        if self.options.date is None and not self.options.force:
            earlier = earlier_date(self.cache, self.recipe, first)
            if earlier is not None:
                self._notice(
                    f"the template prints the date: reusing what was prepared with {earlier} (--date sets another)"
                )
                self.recipe = replace(self.recipe, date=earlier)

    def _refuse_rejected(self, manifest: Manifest) -> None:
        if manifest.ledger["rejected"] and self.options.on_bad_row is OnBadRow.ERROR:
            for name, part in zip(manifest.shards.names, self._slices, strict=True):
                if self._meta(name).rejected:
                    raise self._first_rejected(name, part)
        if any(note in LOSSES for note in manifest.ledger["notes"]) and self.options.on_dropped is OnDropped.ERROR:
            for name, part in zip(manifest.shards.names, self._slices, strict=True):
                self._refuse_dropped(name, part)

    def _refuse_dropped(self, name: str, part: Slice) -> None:
        """Raises RowError for the first row of a slice with a part that the model neither sees nor learns."""
        noted = {note: runs[0] for note, runs in self._meta(name).noted.items() if note in LOSSES}
        if noted:
            row, note = min((row, note) for note, row in noted.items())
            (where,) = row_locations(self.sources.files[part.file], part, [row])
            raise RowError(note, *reason_and_remedy(Note(note), self.recipe.as_json()), where)

    # -- building what is missing ---------------------------------------------------------------------------------

    def _build_and_commit(self) -> Outcome:
        """Builds and commits. Retries if shards disappear meanwhile (a concurrent gc) or are damaged."""
        from penstock.build.commit import commit_dataset

        if native is None and self.options.fast:
            self._notice(NOT_COMPILED)
        if len(self.sources.files) > MANY_FILES:
            self._notice(
                f"{len(self.sources.files):,} files: each becomes a slice and three files in the cache, however "
                "small it is. Fewer and larger files are prepared faster: join JSON lines with `cat`."
            )
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(SHORTEST_WAIT * 2**attempt, LONGEST_WAIT))  # a gc on a slow disk may still be running
            force = self.options.force and attempt == 0
            try:
                self._build(force)
                names = self._names()
                with self.cache.lease([*names, self.recipe.tokenizer]):
                    if not self.cache.all_present(names) or not self._are_sound(names):
                        continue
                    key = self._key(self._slices)
                    existing = None if force else usable_manifest(self.cache, key)
                    if existing is not None and not self._is_sound(existing):
                        existing = None
                    manifest = existing or commit_dataset(self.cache, key, self.recipe, names, self._slices)
                return self._outcome(manifest, hit=existing is not None and not self.progress.slices_done)
            except CorruptError:
                if attempt == ATTEMPTS - 1:
                    raise
                self._mark_damaged()
        raise StoreError(
            f"{self.cache.address}: shards disappear as soon as they are written. Does another program delete them?"
        )

    def _names(self) -> list[str]:
        """Names of the shards of the slices found so far."""
        return [shard_name(self.recipe.digest, part.digest) for part in self._slices]

    def _mark_damaged(self) -> None:
        for name in self._names():
            if self.cache.has_shard(name):
                try:
                    self._meta(name)
                except CorruptError as error:
                    log.warning("%s; rebuilding it", error)
                    self.cache.mark_bad(name, str(error))

    def _build(self, force: bool) -> None:
        """Prepares our share of the slices, then waits for or takes over those that other processes claimed."""
        is_small = self.progress.workers == 1 or 0 < self.progress.bytes_total <= SMALL_BYTES
        in_process = is_small and self.options.engine is EngineKind.LOCAL
        if self.sources.limit is None and (known := self._finder.planned()) is not None:
            self.progress.bytes_total = sum(part.size for part in known)
        found = self._finder.find(KeepData.ALL if in_process else KeepData.STREAMED)
        first = next(found)
        self._settle_date(first)
        remember_date(self.cache, self.recipe, first, overwrite=force)
        slices = chain((first,), found)
        del first  # frees its data
        self.cache.store_tokenizer(self.model.tokenizer_json)
        setup = Setup(self.recipe, self.cache, self.model.tokenizer_json, self.options.fast)
        engine = self._engine(setup, in_process=in_process)
        self._auto = AutoCheck(self.cache, self.model, self.options.tokenizer_as, plain=not self.recipe.templates)
        self._auto.start()
        here = self.options.engine is EngineKind.LOCAL
        sharing = Sharing(self.cache, self._finder, self.sources.files, self.recipe.digest, force=force, one_host=here)
        self._slices, pause = sharing.slices, SHORTEST_WAIT
        rank, world_size = position(self.options)
        try:
            self._dispatch(engine, sharing.own(slices, rank, world_size, self._reuse), sharing)
            while sharing.pending:
                before = self.progress.slices_done
                self._dispatch(engine, sharing.others(self._finished_elsewhere), sharing)
                self.progress.waiting = bool(sharing.pending)
                self._report_progress()
                if sharing.pending:
                    pause = SHORTEST_WAIT if self.progress.slices_done > before else min(pause * 1.5, LONGEST_WAIT)
                    time.sleep(pause)
            self._auto.poll(wait=True)
        finally:
            engine.close()
            self._auto.close()
            sharing.close()
            self.progress.waiting = False
        clean_orphans(self.cache)  # of processes that died during this build

    def _engine(self, setup: Setup, *, in_process: bool) -> SliceEngine:
        match self.options.engine:
            case EngineKind.LOCAL:
                return InProcess(setup) if in_process else WorkerProcesses(setup, self.progress.workers)
            case EngineKind.RAY:
                from penstock.build.workers.ray import RayEngine

                return RayEngine(setup, self.options.workers, self.options.ray_address)

    def _dispatch(self, engine: SliceEngine, tasks: Iterator[Task], sharing: Sharing) -> None:
        def done(task: Task, report: SliceReport) -> None:
            sharing.claims.release(task.name)
            self.progress.workers, self.progress.nodes = engine.workers, engine.nodes
            self.progress.add(report)
            self._report_progress()
            if self._auto is not None:
                self._auto.poll()
            if report.rejected and self.options.on_bad_row is OnBadRow.ERROR:
                raise self._first_rejected(task.name, task.slice)
            if report.losses and self.options.on_dropped is OnDropped.ERROR:
                self._refuse_dropped(task.name, task.slice)

        def retry(lost: Sequence[Task], how: str) -> None:
            self.progress.retries += 1
            self.progress.slices_retried += len(lost)
            log.warning("a worker died on %s: %s; retrying the slice once", lost[-1].location, how)

        engine.run(tasks, done, retry)

    def _reuse(self, task: Task) -> None:
        self.progress.slices_reused += 1
        self._seen(task)

    def _finished_elsewhere(self, task: Task) -> None:
        self.progress.slices_elsewhere += 1
        self._seen(task)

    def _seen(self, task: Task) -> None:
        self.progress.bytes_seen += task.slice.size
        self._report_progress()
        strict = self.options.on_bad_row is OnBadRow.ERROR, self.options.on_dropped is OnDropped.ERROR
        if not any(strict) or not self.cache.has_shard(task.name):
            return
        note = self.cache.shard_record(task.name)
        if strict[0] and note["rejected"] and self._meta(task.name).rejected:
            raise self._first_rejected(task.name, task.slice)
        if strict[1] and note.get("losses"):
            self._refuse_dropped(task.name, task.slice)

    def _report_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress)

    def _meta(self, name: str) -> ShardMeta:
        return self.cache.structure(name)[1]

    def _first_rejected(self, name: str, part: Slice) -> RowError:
        entry = self._meta(name).rejected[0]
        (where,) = row_locations(self.sources.files[part.file], part, [entry["row"]])
        return RowError(entry["kind"], entry["reason"], entry["remedy"], where)

    def _compare_turns(self, manifest: Manifest) -> None:
        """Warns, from a sample of rows, how much reasoning the template drops."""
        dropped = manifest.ledger["notes"].get(Note.REASONING_DROPPED.value)
        if not dropped or self.recipe.turns is TurnsMode.FAITHFUL or self.recipe.mapping.format is Format.PREFERENCE:
            return
        from penstock.build.turns_preview import SAMPLED_ROWS, preview

        limit, columns = self.options.max_row_bytes, self.recipe.mapping.read_columns
        rows = self.sources.peek(SAMPLED_ROWS, max_row_bytes=limit, columns=columns)
        if told := preview(self.recipe, self.model.tokenizer_json, rows):
            self._notice(told)

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
            with contextlib.suppress(StoreError):  # only needed to show tokens; other users' caches may be read-only
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
        if manifest.lacks_regions:
            self._notice("no row has known regions, so only train_on='all_tokens' works; use another --template")
        warnings = (*self.notices, *manifest.ledger["warnings"])
        dataset = Dataset(self.cache, manifest)
        dataset.shards.mark_used(now=True)  # makes it the `latest` dataset
        if self._unchecked:
            self.cache.remember_checked(manifest.key)
        return Outcome(dataset, hit, self.progress, warnings, self.mapping.describe(), quarantine, compared)
