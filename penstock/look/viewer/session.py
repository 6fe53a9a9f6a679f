"""The state of a running viewer: the dataset, its view, and cached results.

Pages run in threads. One lock guards the shared state; it is held only while a cached result is computed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import orjson
import pyarrow as pa

from penstock.arrays import Bool, Int64, UInt8
from penstock.errors import PenstockError
from penstock.load.example import Example, place_of, resolved_view
from penstock.load.options import LossPolicy, Overlong, PlanOptions, UnknownRegions, ViewOptions
from penstock.load.plan import Plan
from penstock.load.view import View
from penstock.load.windows import Rows, row_hashes
from penstock.look.compare import DatasetDiff, compare
from penstock.look.options import SHARDS_OPEN, LookOptions, open_to_look
from penstock.look.report import report_figures
from penstock.look.survey import Extents, Flag, UInt16, repeated, survey, whole
from penstock.look.tokens import ROLE_NAMES, TokenBytes, example_of, safe_bytes, text_of, visible_text
from penstock.prepare.chat.conversation import BODY_PARTS, Part, Role
from penstock.prepare.encode.columns import Columns
from penstock.store.dataset import Dataset

# ---- searching -------------------------------------------------------------------------------------------------------
# Text search over all rows, shard by shard: one vectorised gather turns ids into bytes, which are then scanned.
#
# Case is ignored for ASCII letters; other characters are compared exactly. A shard of a million tokens takes about 50
# ms and is mapped only while it is read, so memory stays flat. Hits are yielded as they are found; callers can stop at
# any time.


_AROUND: Final = 60  # bytes shown before and after a hit


class Hit(NamedTuple):
    """The first match in a row."""

    row: int
    before: str
    match: str
    after: str


class Scanned(NamedTuple):
    """The hits in one shard; `rows` is the number of rows scanned so far."""

    rows: int
    hits: list[Hit]


class Searcher:
    """Searches one dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._sides = 2 if dataset.is_preference else 1
        self._bounds = np.concatenate(([0], np.cumsum(dataset.shards.examples // self._sides)))

    def scan(self, text: str, first: int = 0, among: Bool | None = None) -> Iterator[Scanned]:
        """Yield hits from row `first` onwards, shard by shard; `among` restricts the rows."""
        needle = _lower(text.encode())
        for shard in range(int(np.searchsorted(self._bounds, first, side="right")) - 1, len(self._dataset.shards)):
            start, end = int(self._bounds[shard]), int(self._bounds[shard + 1])
            if among is not None and not among[start:end].any():
                yield Scanned(end, [])
                continue
            columns = self._dataset.shards.read(shard)
            hits = [
                hit
                for hit in self._hits(columns, needle, start)
                if hit.row >= first and (among is None or among[hit.row])
            ]
            yield Scanned(end, hits)

    def _hits(self, columns: Columns, needle: bytes, before: int) -> Iterator[Hit]:
        """One hit per row; a match never spans two sequences."""
        data, ends = self._decoded(columns, self._lower)
        rows = ends[columns.id_offsets[1:].astype(np.int64)]  # where each sequence ends, in bytes
        last, shown = -1, list[tuple[int, int]]()
        for match in re.finditer(re.escape(needle), data):
            sequence = int(np.searchsorted(rows, match.start(), side="right"))
            row = sequence // self._sides
            if row != last and match.end() <= rows[sequence]:
                last = row
                shown.append((match.start(), sequence))
        if not shown:
            return
        original, _ = self._decoded(columns, self._plain)
        for at, sequence in shown:
            start, end = int(rows[sequence - 1]) if sequence else 0, int(rows[sequence])
            yield Hit(
                before + sequence // self._sides,
                _clipped(original[max(start, at - _AROUND) : at], max(start, at - _AROUND) > start, left=True),
                visible_text(original[at : at + len(needle)]),
                _clipped(original[at + len(needle) : min(end, at + len(needle) + _AROUND)], False, left=False),
            )

    def _decoded(self, columns: Columns, table: pa.Array) -> tuple[bytes, Int64]:
        """The text of a shard, and the start of each token in it."""
        ids = np.ascontiguousarray(columns.ids)
        taken = table.take(pa.Array.from_buffers(pa.from_numpy_dtype(ids.dtype), len(ids), [None, pa.py_buffer(ids)]))
        _, offsets, data = taken.buffers()
        ends = np.frombuffer(offsets, np.int64, len(ids) + 1)
        return (b"" if data is None else data.to_pybytes()), ends

    @cached_property
    def _plain(self) -> pa.Array:
        return _table(self._dataset.vocabulary.token_bytes)

    @cached_property
    def _lower(self) -> pa.Array:
        return _table([_lower(token) for token in self._dataset.vocabulary.token_bytes])


def _lower(text: bytes) -> bytes:
    """Lower-case ASCII letters; everything else, and the length, is unchanged."""
    return text.lower()


def _table(tokens: list[bytes]) -> pa.Array:
    """Tokens as an Arrow array, made from its buffers: `pa.array` would import pandas."""
    offsets = np.concatenate(([0], np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))))
    data = pa.py_buffer(b"".join(tokens))
    return pa.Array.from_buffers(pa.large_binary(), len(tokens), [None, pa.py_buffer(offsets), data])


def _clipped(text: bytes, cut: bool, *, left: bool) -> str:
    """The text around a hit, without partial characters at its edges."""
    while left and cut and text and text[0] & 0xC0 == 0x80:
        text = text[1:]
    if not left:
        text = text.decode("utf-8", "ignore").encode()
    return ("… " if cut else "") + visible_text(text).replace("\n", " ")


# ---- catalog ---------------------------------------------------------------------------------------------------------
#
# The catalog behind the viewer's filters: 12 bytes per row, read in the background within a second or two.
#
# Until it is ready, rows are listed directly from their shards; a page that filters or sorts waits for it.


class Filters(NamedTuple):
    """Which rows to list, and in which order; None and empty values match any row."""

    role: str = ""
    part: str = ""
    shortest: int | None = None
    longest: int | None = None
    least: int | None = None  # trained share in percent
    most: int | None = None
    warning: str = ""
    source: int | None = None
    sort: str = ""

    @property
    def any(self) -> bool:
        """Whether any filter is set."""
        return self != Filters()


Bits = TypeVar("Bits", UInt8, UInt16)
SORTS = {"": "row number", "longest": "longest first", "shortest": "shortest first", "least": "least trained first"}


class Catalog:
    """Lengths, trained tokens, roles, parts and flags of all rows under one loss policy."""

    def __init__(self, dataset: Dataset, settings: ViewOptions) -> None:
        self._dataset, self._settings = dataset, settings
        self._sides = 2 if dataset.is_preference else 1
        self._ready = threading.Event()
        self._error: PenstockError | None = None
        self.done = 0
        self.shards = len(dataset.shards)
        self.bounds = np.concatenate(([0], np.cumsum(dataset.shards.examples // self._sides)))
        rows = int(self.bounds[-1])
        self._lengths, self._trained = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._roles, self._flags = np.zeros(rows, np.uint8), np.zeros(rows, np.uint8)
        self._parts = np.zeros(rows, np.uint16)
        self._starting = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Start reading in the background; called after the first page is sent."""
        with self._starting:
            if not self._started:
                self._started = True
                threading.Thread(target=self._fill, name="catalog", daemon=True).start()

    def rows(self, filters: Filters) -> Int64 | None:
        """The rows that pass, in order; None: all of them, in their own order."""
        if not filters.any:
            return None
        self._wait()
        chosen = np.flatnonzero(self._passing(filters))
        match filters.sort:
            case "longest":
                return chosen[np.argsort(-self._lengths[chosen], kind="stable")]
            case "shortest":
                return chosen[np.argsort(self._lengths[chosen], kind="stable")]
            case "least":
                return chosen[np.argsort(self._shares[chosen], kind="stable")]
        return chosen

    def flags(self) -> dict[str, int]:
        """The number of rows per warning."""
        self._wait()
        counts = {str(flag.name).lower(): int(np.count_nonzero(self._flags & flag)) for flag in Flag}
        return {name: count for name, count in counts.items() if count}

    @property
    def ready(self) -> bool:
        """Whether all rows have been read."""
        return self._ready.is_set()

    @property
    def _shares(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return self._trained / np.maximum(self._lengths, 1)

    def _passing(self, filters: Filters) -> Bool:
        keep = np.ones(len(self._lengths), np.bool_)
        if filters.role:
            keep &= self._roles & (1 << Role[filters.role.upper()].value) != 0
        if filters.part:
            keep &= self._parts & (1 << Part[filters.part.upper()].value) != 0
        if filters.shortest is not None:
            keep &= self._lengths >= filters.shortest
        if filters.longest is not None:
            keep &= self._lengths <= filters.longest
        if filters.least is not None:
            keep &= self._shares * 100 >= filters.least
        if filters.most is not None:
            keep &= self._shares * 100 <= filters.most
        if filters.warning:
            keep &= self._flags & Flag[filters.warning.upper()] != 0
        if filters.source is not None:
            sources = np.asarray(self._dataset.manifest.shards.sources)
            keep &= np.repeat(sources == filters.source, np.diff(self.bounds))
        return keep

    def _wait(self) -> None:
        self.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def _fill(self) -> None:
        try:
            hashes = [self._shard(shard) for shard in range(self.shards)]
            if hashes:
                self._flags |= np.where(repeated(np.concatenate(hashes)), Flag.DUPLICATE, 0).astype(np.uint8)
        except PenstockError as error:
            self._error = error
        finally:
            self._ready.set()

    def _shard(self, shard: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        rows = Rows.of(self._dataset.shards.read(shard))
        own, limit = slice(int(self.bounds[shard]), int(self.bounds[shard + 1])), self._settings.max_length
        extents = whole(rows)
        if limit is not None and self._settings.overlong is Overlong.TRUNCATE:
            extents = Extents(*extents[:2], np.minimum(extents.ends, limit), extents.trained_from)
        seen = survey(rows, extents, self._settings.mask, self._settings.overlong, self._dataset.token_id("bos_token"))
        sizes = rows.sizes.reshape(-1, self._sides)
        self._lengths[own] = sizes.sum(axis=1)
        self._trained[own] = seen.trained.reshape(-1, self._sides).sum(axis=1)
        self._roles[own] = _either(seen.roles, self._sides)
        self._parts[own] = _either(seen.parts, self._sides)
        overlong = (sizes.max(axis=1) > limit) if limit is not None else np.zeros(len(sizes), np.bool_)
        self._flags[own] = _either(seen.flags, self._sides) | np.where(overlong, Flag.OVERLONG, 0).astype(np.uint8)
        self.done = shard + 1
        return row_hashes(rows.columns).copy()


def _either(values: Bits, sides: int) -> Bits:
    """The bits of a row: those of its sequence, or of both sides of a pair combined."""
    joined: Bits = np.bitwise_or.reduce(values.reshape(-1, sides), axis=1)
    return joined


# ---- session ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")
_PREVIEW: Final = 40  # tokens of a message in the list
_HEADER: Final = 8  # tokens of a message's first line
_PLANS: Final = 4  # cached, for paging


class Listing(NamedTuple):
    """A row in the list."""

    row: int
    place: str
    tokens: int
    trained: int
    turns: list[tuple[str, str]]  # role and start of the first question and the last answer


class Session:
    """One dataset, or two to compare, under the options of the command."""

    def __init__(self, dataset: Dataset, options: LookOptions, against: Dataset | None = None) -> None:
        self.dataset, self.options, self.against = dataset, options, against
        self.settings = resolved_view(dataset, options.view)
        self.messages = list[str]()
        self.sides = 2 if dataset.is_preference else 1
        self._lock = threading.RLock()
        self._origin_lock = threading.Lock()
        self._plans: dict[PlanOptions, Plan] = {}
        dataset.shards.keep_open = SHARDS_OPEN
        self.catalog = Catalog(dataset, self.settings)

    @cached_property
    def name(self) -> str:
        """The name of the source, or the number of sources."""
        names = self.dataset.source_names
        return names[0] if len(names) == 1 else f"{len(names)} sources" if names else self.dataset.key[:15]

    @cached_property
    def sources(self) -> dict[int, str]:
        """Names of the sources that have rows."""
        return {source: self.dataset.source_name(source) for source in sorted({*self.dataset.manifest.shards.sources})}

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token id."""
        return safe_bytes(self.dataset)

    @cached_property
    def searcher(self) -> Searcher:
        """The text search over the dataset."""
        return Searcher(self.dataset)

    def view(self) -> View:
        """The view of the command's options, scanned once."""
        return self._once("view", lambda: open_to_look(self.dataset, self.options, self.messages.append))

    def figures(self) -> dict[str, Any]:
        """The variables of the report's template."""
        view = self.view()
        return self._once("figures", lambda: report_figures(view, self.options.capacity, None))

    def comparison(self) -> DatasetDiff | None:
        """The differences from the other dataset, if there is one."""
        other = self.against
        if other is None:
            return None
        return self._once("comparison", lambda: compare(self.dataset, other, self.settings.mask))

    def plan(self, settings: PlanOptions) -> Plan:
        """A plan of batches; the last few are cached."""
        view = self.view()
        with self._lock:
            if settings not in self._plans:
                while len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[settings] = Plan(view, settings)
            return self._plans[settings]

    def sequences(self, row: int, policy: LossPolicy) -> list[tuple[str, Example, int]]:
        """The complete sequences of a row, with the length of their common prompt."""
        mask = self.settings.mask._replace(policy=policy)
        if not self.dataset.is_preference:
            return [("", example_of(self.dataset, row, mask), 0)]
        found = [example_of(self.dataset, 2 * row + side, mask) for side in (0, 1)]
        prompt = self._prompt(row)
        for example in found:
            example.loss_weights[:prompt] = 0
        return [(name, example, prompt) for name, example in zip(("chosen", "rejected"), found, strict=True)]

    def _prompt(self, row: int) -> int:
        """The common prompt of one pair."""
        drop = ViewOptions(train_on=LossPolicy.ALL_TOKENS, regions_unknown=UnknownRegions.DROP)
        whole = self._once("pairs", lambda: View(self.dataset, drop))
        at = int(np.searchsorted(whole.index.rows, row))
        return int(whole.index.prompts[at]) if at < len(whole) and int(whole.index.rows[at]) == row else 0

    def listing(self, row: int) -> Listing:
        """A row for the list."""
        place = place_of(self.dataset, row)
        parts = self.sequences(row, self.settings.policy)
        tokens, trained = sum(len(e) for _, e, _ in parts), sum(int(e.loss_mask.sum()) for _, e, _ in parts)
        name = "{}, row {:,}".format(*self.dataset.file_row(*place))
        return Listing(row, name, tokens, trained, self._turns(parts[0][1]))

    def _turns(self, example: Example) -> list[tuple[str, str]]:
        """The start of the first user message and of the last assistant message, or of the whole row."""
        runs, found = example.runs, list[tuple[str, str]]()
        starts = runs.ends.astype(np.int64) - runs.lengths
        for role, which in ((Role.USER, 0), (Role.ASSISTANT, -1)):
            own = np.flatnonzero(runs.by(role) & runs.of_part(*BODY_PARTS))
            own = own[runs.messages[own] == runs.messages[own[which]]] if len(own) else own
            if len(own):
                start = int(starts[own[0]])
                found.append((ROLE_NAMES[role], self._beginning(example, start, int(runs.ends[own[-1]]) - start)))
        return found or [("text", self._beginning(example, 0, len(example)))]

    def _beginning(self, example: Example, start: int, length: int) -> str:
        ids = example.input_ids[start : start + min(length, _PREVIEW)]
        text = text_of(self._without_header(ids).tolist(), self.token_bytes)
        return text.replace("↵\n", " ") + ("…" if length > _PREVIEW else "")

    def _without_header(self, ids: Int64) -> Int64:
        """Preview text, without special tokens and the template's first line of a message."""
        special = self.dataset.vocabulary.special
        marked = special[np.minimum(ids, len(special) - 1)]
        if len(ids) and marked[0]:
            ends = [at for at, token in enumerate(ids[:_HEADER].tolist()) if self.token_bytes[token].endswith(b"\n")]
            first = ends[0] + 1 if ends else 0
            ids, marked = ids[first:], marked[first:]
        return ids[~marked]

    def source_json(self, row: int) -> tuple[str, str]:
        """The source row as indented JSON, and the error if it can't be read."""
        try:
            with self._origin_lock:
                raw = self.dataset.conversations.source_row(row)
        except (PenstockError, OSError) as error:
            return "", str(error)
        try:
            return orjson.dumps(orjson.loads(raw), option=orjson.OPT_INDENT_2).decode(), ""
        except orjson.JSONDecodeError:
            return raw.decode("utf-8", "backslashreplace"), ""

    def _once(self, name: str, make: Callable[[], T]) -> T:
        with self._lock:
            kept: dict[str, Any] = self.__dict__.setdefault("_kept", {})
            if name not in kept:
                kept[name] = make()
            value: T = kept[name]
            return value
