"""Builds a dataset from sources: reuses shards from the cache, prepares the missing ones, commits the manifest last.

Slices are found while earlier ones are prepared, so work starts immediately and memory doesn't grow with the data.
Files appear only when they are complete, so a build that is killed at any point resumes with the missing slices.
Any number of processes may build the same data at the same time: they divide the slices through claims.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from penstock.build.auto_check import AutoCheck
from penstock.build.find import Search, position, remember_date
from penstock.build.options import OnBadRow, OnDropped, OnMiss, PrepareOptions, RunnerKind
from penstock.build.outcome import Outcome, finish, refuse_bad_rows, refuse_shard
from penstock.build.progress import OnProgress, SliceReport
from penstock.build.workers.local import InProcess, WorkerProcesses
from penstock.build.workers.process import Task, system_failure
from penstock.build.workers.runner import Setup, SliceRunner, worker_count
from penstock.build.workers.sharing import Sharing
from penstock.errors import CorruptError, StoreError
from penstock.native import native
from penstock.prepare.sources.reading import KeepData
from penstock.prepare.sources.remote import clear_spool
from penstock.prepare.sources.slices import Slice
from penstock.store.gc import clean_orphans
from penstock.store.manifest import Manifest

log = logging.getLogger("penstock")

SMALL_BYTES = 6 << 20  # below this, starting worker processes costs more than it saves
MANY_FILES = 3000  # above this, a notice recommends to join them
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


class Builder:
    """One run of `prepare`: finds the dataset, or builds what is missing and commits it."""

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
        self.search = Search(sources, options, tokenizer)
        self.progress = self.search.progress
        self.progress.workers, capped = worker_count(options.workers) if self._is_local else (0, "")
        self.search.notices += [capped] if capped else []
        self._on_progress = on_progress
        self._auto: AutoCheck | None = None

    @property
    def _is_local(self) -> bool:
        return self.options.runner is RunnerKind.LOCAL

    @_os_errors_explained()
    def run(self) -> Outcome:
        """Opens the dataset, after building what is missing."""
        search, force = self.search, self.options.force
        for notice in search.notices:
            log.warning("%s", notice)
        clean_orphans(search.cache)
        try:
            found = None if force else search.find()
            if found is None and self.options.on_miss is OnMiss.ERROR:
                raise StoreError(
                    f"the dataset is not in {search.cache.address}, and on_miss is 'error'. Prepare it first with "
                    "`penstock prepare`; `penstock cache explain` shows how the nearest one differs."
                )
            if found is None and search.obstacle is not None:
                search.redirect()
                found = None if force else search.find()
            if found is None:
                return self._build_and_commit()
            refuse_bad_rows(search, found)
            return finish(search, found, None, hit=True)
        finally:
            clear_spool()

    def _build_and_commit(self) -> Outcome:
        """Builds and commits. Retries if shards disappear meanwhile (a concurrent gc) or are damaged."""
        search, files = self.search, self.search.sources.files
        if native is None and self.options.fast:
            search.notice(NOT_COMPILED)
        if len(files) > MANY_FILES:
            search.notice(
                f"{len(files):,} files: each becomes a slice and two files in the cache, however small it is. Fewer "
                "and larger files are prepared faster; runs of small uncompressed .jsonl files are joined."
            )
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(SHORTEST_WAIT * 2**attempt, LONGEST_WAIT))  # a gc on a slow disk may still be running
            force = self.options.force and attempt == 0
            try:
                with self._build(force) as runner:
                    manifest, is_new = self._commit(force)
                    if manifest is not None:
                        hit = not is_new and not self.progress.slices_done
                        return finish(search, manifest, self._auto, hit=hit, runner=runner)
            except CorruptError:
                if attempt == ATTEMPTS - 1:
                    raise
                self._mark_damaged()
        raise StoreError(
            f"{search.cache.address}: shards disappear as soon as they are written. Does another program delete them?"
        )

    def _commit(self, force: bool) -> tuple[Manifest | None, bool]:
        """Commits the manifest, unless there is one; None if a shard is gone or refused. Also whether it is new."""
        from penstock.build.commit import commit_dataset

        search, names = self.search, self.search.names
        with search.cache.lease([*names, search.recipe.tokenizer]):
            if not search.cache.all_present(names) or not search.are_sound(names):
                return None, False
            existing = None if force else search.manifest()
            must_agree = search.unchecked or self.progress.slices_done
            if existing is not None and (not must_agree or search.agrees(existing)):
                return existing, False
            return commit_dataset(search.cache, search.key, search.recipe, names, search.slices), True

    def _mark_damaged(self) -> None:
        cache = self.search.cache
        for name in self.search.names:
            if cache.has_shard(name):
                try:
                    cache.structure(name)
                except CorruptError as error:
                    log.warning("%s; rebuilding it", error)
                    cache.mark_bad(name, str(error))

    @contextlib.contextmanager
    def _build(self, force: bool) -> Iterator[SliceRunner]:
        """Prepares our share of the slices, then waits for or takes over those that other processes claimed."""
        search, cache, finder = self.search, self.search.cache, self.search.finder
        in_process = self._is_local and (self.progress.workers == 1 or 0 < self.progress.bytes_total <= SMALL_BYTES)
        if search.sources.limit is None and (known := finder.planned()) is not None:
            self.progress.bytes_total = sum(part.size for part in known)
        found = finder.find(KeepData.ALL if in_process else KeepData.STREAMED)
        first = next(found)
        search.settle_date(first)
        recipe, tokenizer_json = search.recipe, search.model.tokenizer_json
        remember_date(cache, recipe, first, overwrite=force)
        slices = chain((first,), found)
        del first  # frees its data
        cache.store_tokenizer(tokenizer_json)
        sharing = Sharing(cache, finder, search.sources.files, recipe.digest, force=force, one_host=self._is_local)
        search.slices = sharing.slices
        setup = Setup(recipe, cache, tokenizer_json, self.options.fast, search.sources.size)
        with contextlib.closing(self._runner(setup, in_process=in_process)) as runner:
            self._auto = AutoCheck(cache, search.model, self.options.tokenizer_as, plain=not recipe.templates)
            try:
                self._auto.start()
                self._share(runner, sharing, slices)
                self._auto.poll(wait=True)
            finally:
                self._auto.close()
                sharing.close()
                self.progress.waiting = False
            clean_orphans(cache)  # of processes that died during this build
            yield runner

    def _share(self, runner: SliceRunner, sharing: Sharing, slices: Iterator[Slice]) -> None:
        rank, world_size = position(self.options)
        pause = SHORTEST_WAIT
        self._dispatch(runner, sharing.own(slices, rank, world_size, self._reuse), sharing)
        while sharing.pending:
            before = self.progress.slices_done
            self._dispatch(runner, sharing.others(self._finished_elsewhere), sharing)
            self.progress.waiting = bool(sharing.pending)
            self._report_progress()
            if sharing.pending:
                pause = SHORTEST_WAIT if self.progress.slices_done > before else min(pause * 1.5, LONGEST_WAIT)
                time.sleep(pause)

    def _runner(self, setup: Setup, *, in_process: bool) -> SliceRunner:
        match self.options.runner:
            case RunnerKind.LOCAL:
                return InProcess(setup) if in_process else WorkerProcesses(setup, self.progress.workers)
            case RunnerKind.RAY:
                from penstock.build.workers.ray import RayRunner

                return RayRunner(setup, self.options.workers, self.options.ray_address)

    def _dispatch(self, runner: SliceRunner, tasks: Iterator[Task], sharing: Sharing) -> None:
        def done(task: Task, report: SliceReport) -> None:
            sharing.claims.release(task.name)
            self.progress.workers, self.progress.nodes = runner.workers, runner.nodes
            self.progress.add(report)
            self._report_progress()
            if self._auto is not None:
                self._auto.poll()
            refuse_shard(self.search, task.name, task.slice, rejected=report.rejected, losses=report.losses)

        def retry(lost: Sequence[Task], how: str) -> None:
            self.progress.retries += 1
            self.progress.slices_retried += len(lost)
            log.warning("a worker died on %s: %s; retrying the slice once", lost[-1].location, how)

        runner.run(tasks, done, retry)

    def _reuse(self, task: Task) -> None:
        self.progress.slices_reused += 1
        self._seen(task)

    def _finished_elsewhere(self, task: Task) -> None:
        self.progress.slices_elsewhere += 1
        self._seen(task)

    def _seen(self, task: Task) -> None:
        self.progress.bytes_seen += task.slice.size
        self._report_progress()
        is_strict = self.options.on_bad_row is OnBadRow.ERROR or self.options.on_dropped is OnDropped.ERROR
        if is_strict and self.search.cache.has_shard(task.name):
            record = self.search.cache.shard_record(task.name)
            losses = record.get("losses")
            refuse_shard(self.search, task.name, task.slice, rejected=record["rejected"], losses=losses)

    def _report_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress)
