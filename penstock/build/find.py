"""Finds what a run of `prepare` is about: its cache, sources, tokenizer and recipe, and whether the dataset is there.

A dated template prints the date on which the same data was first prepared, unless `--date` sets one. A small file in
the cache holds it; its name is a digest of the recipe without its date and of the first slice. The file is written
before the first shard, so a build that is killed before midnight resumes with the same date, appending rows on another
day only prepares the new slices, and a copy of the data is a hit. The date is used as long as the first shard with that
date exists, or the build may still be running.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.build.auto_check import auto_model
from penstock.build.inputs import store_inputs
from penstock.build.options import OnMiss, OnUnwritable, PrepareOptions
from penstock.build.progress import Progress
from penstock.build.slice_plans import SliceFinder, SlicePlans
from penstock.digests import digest
from penstock.errors import CorruptError, RowError, StoreError, UsageError
from penstock.prepare.chat.formats import detect, format_columns
from penstock.prepare.chat.json_rows import parse_row
from penstock.prepare.modes import TokenizerAs
from penstock.prepare.recipe import Recipe, make_recipe
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.remote import is_local
from penstock.prepare.sources.slices import Slice
from penstock.prepare.sources.source_set import SourceSet
from penstock.prepare.tokenizer.files import load_tokenizer, tokenizer_of_object
from penstock.ranks import launched
from penstock.store.cache import Cache, open_cache
from penstock.store.files import explain_os_errors, is_readable_file
from penstock.store.gc import clean_orphans
from penstock.store.manifest import Manifest, dataset_key, read_manifest, shard_name

log = logging.getLogger("penstock")

READ_BYTES = 64 << 20  # up to this, files are read to find a hit (0.1 s) rather than starting a build
MAX_AGE = datetime.timedelta(days=1)  # of a build that has not committed its first shard


@dataclass(frozen=True, slots=True)
class ChosenCache:
    """A cache folder. `obstacle` says why it can't be written, if so; it still serves hits."""

    cache: Cache
    notices: tuple[str, ...] = ()
    obstacle: StoreError | None = None


def choose_cache(options: PrepareOptions) -> ChosenCache:
    """Returns the cache folder in which to find the dataset, and to build it if the folder can be written."""
    if options.no_cache:
        cache = Cache(tempfile.mkdtemp(prefix="penstock-"), trust=options.trust)
        cache.prepare_root()
        return ChosenCache(cache, (f"--no-cache: the dataset is built in {cache.root}; delete it when you are done",))
    cache = open_cache(options.cache, options.trust, options.local_cache, options.local_cache_bytes)
    cache.check_marker()  # refuses a folder of other files, whatever --on-unwritable says
    try:
        cache.prepare_root()
    except StoreError as obstacle:
        return ChosenCache(cache, obstacle=obstacle)
    return ChosenCache(cache)


def temporary_cache(location: ChosenCache) -> ChosenCache:
    """Returns the folder to build in if the cache can't be written: one per host, user and cache, so that all
    processes with the same obstacle share it."""
    name = f"penstock-{os.getuid()}-{digest(str(location.cache.root).encode())[3:15]}"
    folder = Path(tempfile.gettempdir()) / name
    with explain_os_errors(folder, "can't be created"), contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreError(
            f"{folder} belongs to another user, so nothing is built there. Choose another folder with --cache."
        )
    temporary = Cache(folder, trust=location.cache.trust)
    temporary.prepare_root()
    return ChosenCache(temporary, (f"{location.obstacle} Building in {temporary.root} instead.",))


class Search:
    """The cache, sources, tokenizer and recipe of one run, and the dataset if the cache has it."""

    def __init__(self, sources: Iterable[object], options: PrepareOptions, tokenizer: object = None) -> None:
        """`sources` are paths, hub names or rows in memory; `tokenizer` is an object that replaces the option."""
        self.options = options
        self._location = choose_cache(options)
        self.notices = [*self._location.notices]
        self._plans = SlicePlans(self.cache, rehash=options.rehash)
        self.sources: SourceSet = discover(
            store_inputs(sources, self._writable),
            split=options.split,
            limit=options.limit,
            config=options.config,
            revision=options.revision,
            recall=self._plans.kinds,
        )
        self._plans.put_kinds(self.sources.files)
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
        self.finder = SliceFinder(self.sources, self._plans, options.max_row_bytes)
        self.progress = Progress(bytes_total=self._bytes_total())
        self.slices: list[Slice] = []  # of the dataset, once they are known
        self.unchecked: list[Path] = []  # files of the dataset that others wrote and this user never checked

    @property
    def cache(self) -> Cache:
        """The cache to search and to build in."""
        return self._location.cache

    def _writable(self) -> Cache:
        """The cache for rows in memory. A read-only one still serves hits of them, stored where a build would be."""
        return self.cache if self.obstacle is None else temporary_cache(self._location).cache

    @property
    def obstacle(self) -> StoreError | None:
        """Why the cache can't be written, if so."""
        return self._location.obstacle

    def notice(self, text: str) -> None:
        """Warns the user, now and in the outcome."""
        self.notices.append(text)
        log.warning("%s", text)

    def redirect(self) -> None:
        """Switches to a temporary cache if the cache can't be written and the options allow it."""
        if self._location.obstacle is None:
            return
        if self.options.on_unwritable is OnUnwritable.ERROR:
            raise self._location.obstacle
        self._location = temporary_cache(self._location)
        self.notice(*self._location.notices)
        clean_orphans(self.cache)
        plans = SlicePlans(self.cache, rehash=self.options.rehash)
        self.finder = SliceFinder(self.sources, plans, self.options.max_row_bytes)

    # -- rows and slices ------------------------------------------------------------------------------------------

    def first_rows(self) -> list[bytes]:
        """Returns the rows that the format is detected from. The cache has those of objects that were read before."""
        limit, columns = self.options.max_row_bytes, format_columns(self.options)
        how = [str(self.sources.split), limit, None if columns is None else sorted(columns)]
        rows = self._plans.sample(self.sources.files, how)
        if rows is None:
            rows = self.sources.peek(max_row_bytes=limit, columns=columns)
            self._plans.put_sample(self.sources.files, how, rows)
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
        plain = all(f.kind.is_as_large for f in self.sources.files)
        return self.sources.size if plain else 0  # unknown until the slices are

    def find_slices(self) -> list[Slice]:
        """Returns all slices, reading the data if necessary, and settles the date. Encodes nothing."""
        slices = self.finder.known() or [part.without_data() for part in self.finder.find()]
        self.settle_date(slices[0])
        return slices

    def settle_date(self, first: Slice) -> None:
        """Without --date, takes the date of an earlier build of the same data, with a notice."""
        if self.options.date is None and not self.options.force:
            earlier = earlier_date(self.cache, self.recipe, first)
            if earlier is not None:
                self.notice(
                    f"the template prints the date: reusing what was prepared with {earlier} (--date sets another)"
                )
                self.recipe = replace(self.recipe, date=earlier)

    # -- the dataset ----------------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The key of the dataset with the slices found."""
        return dataset_key(self.recipe.digest, [(s.file, s.first_row, s.digest) for s in self.slices])

    @property
    def names(self) -> list[str]:
        """The names of the shards of the slices found."""
        return [shard_name(self.recipe.digest, part.digest) for part in self.slices]

    def find(self) -> Manifest | None:
        """Returns the dataset's manifest on a hit.

        Reads the data if they are small, if the options say so, or if building is not allowed; otherwise data that were
        never cut into slices are a miss.
        """
        may_build = self.options.on_miss is OnMiss.BUILD and self.obstacle is None
        is_plain = all(f.kind.is_as_large and is_local(f.path) for f in self.sources.files)
        is_costly = not is_plain or self.finder.unknown_bytes > READ_BYTES
        if may_build and is_costly and self.finder.known() is None and not self.options.rehash:
            return None
        self.slices = self.find_slices()
        manifest = self.manifest()
        if manifest is None:
            return None
        names = manifest.shards.names
        self.cache.refresh(names)
        if not all(self.cache.has_shard(name) for name in names) or not self.are_sound(names):
            return None
        if self.unchecked and not self.agrees(manifest):
            return None
        self.progress.slices_reused = len(self.slices)
        return manifest

    def manifest(self) -> Manifest | None:
        """Returns the dataset's manifest, or None if it is missing, damaged or unreadable and must be rebuilt."""
        key = self.key
        path = self.cache.find_dataset(key)
        if not is_readable_file(path):
            return None
        try:
            manifest = read_manifest(path)
        except CorruptError as error:
            log.warning("%s; rebuilding it", error)
            return None
        return manifest if manifest.key == key else None

    def are_sound(self, names: list[str]) -> bool:
        """Whether a sample of rows in the shards of other users agrees with the references."""
        self.unchecked = self.cache.unchecked(names, self.key)
        to_check = {path.stem for path in self.unchecked} & set(names)
        if not to_check:
            return True
        from penstock.build.recheck import ForeignCheck

        check = ForeignCheck(self.cache, self.recipe, self.model.tokenizer_json, self.sources.files, self.progress)
        refused = check.refused(self.finder.find(), to_check, self.notice)
        if self.obstacle is None:
            for name, why in refused.items():
                self.cache.mark_bad(name, why)
        return not refused

    def agrees(self, manifest: Manifest) -> bool:
        """Whether a manifest, which may be another user's, agrees with its shards."""
        from penstock.build.commit import manifest_of

        expected = manifest_of(self.cache, manifest.key, self.recipe, manifest.shards.names, self.slices)
        return expected.to_bytes() == manifest.to_bytes()


def position(options: PrepareOptions) -> tuple[int, int]:
    """Returns rank and world size: from the options, or from the launcher."""
    rank, size = options.rank, options.world_size
    if rank is None and size is None and (found := launched()) is not None:
        return found.rank, found.world_size
    rank, size = rank or 0, size or 1
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} --world-size {size}: the rank must be from 0 to world size - 1")
    return rank, size


def earlier_date(cache: Cache, recipe: Recipe, first: Slice) -> datetime.date | None:
    """Returns the date that data starting with this slice was prepared with before, if it differs from the recipe's."""
    if recipe.date is None:
        return None
    try:
        found = datetime.date.fromisoformat(cache.read_file(_path(cache, recipe, first)).decode())
    except (OSError, ValueError):
        return None
    if found == recipe.date:
        return None
    has_shard = cache.has_shard(shard_name(replace(recipe, date=found).digest, first.digest))
    return found if has_shard or abs(recipe.date - found) <= MAX_AGE else None


def remember_date(cache: Cache, recipe: Recipe, first: Slice, *, overwrite: bool) -> None:
    """Records the date of a build that starts. An earlier date that is still valid is kept, unless `overwrite`."""
    if recipe.date is None or not (overwrite or earlier_date(cache, recipe, first) is None):
        return
    path = _path(cache, recipe, first)
    with contextlib.suppress(StoreError, OSError):  # the build works without it
        given = recipe.date.isoformat().encode()
        if _known(cache, path) != given:
            cache.write_file(path, given, "date", durable=False)


def _known(cache: Cache, path: Path) -> bytes | None:
    try:
        return cache.read_file(path)
    except FileNotFoundError:
        return None


def _path(cache: Cache, recipe: Recipe, first: Slice) -> Path:
    name = digest(b"date", replace(recipe, date=None).digest.encode(), first.digest.encode())
    return cache.root / "memo" / "dates" / name
