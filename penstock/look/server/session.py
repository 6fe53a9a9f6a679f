"""The state of a running viewer: the dataset, its view, and cached results.

Pages run in threads. One lock guards the shared state; it is held only while a cached result is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import orjson

from penstock.api import Dataset, View
from penstock.arrays import Int64
from penstock.errors import PenstockError
from penstock.look.compare import DatasetDiff, compare
from penstock.look.options import SHARDS_OPEN, LookOptions, open_to_look
from penstock.look.report import report_figures
from penstock.look.server.catalog import Catalog
from penstock.look.server.searching import Searcher
from penstock.look.stats import source_names
from penstock.look.tokens import TokenBytes, example_of, safe_bytes, text_of
from penstock.pack.plan import Plan
from penstock.pack.settings import PlanSettings
from penstock.view.example import Example
from penstock.view.examples import place_of
from penstock.view.settings import LossPolicy, UnknownRegions, ViewSettings

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
        self.settings = options.view
        self.messages = list[str]()
        self.sides = 2 if dataset.is_preference else 1
        self._lock = threading.RLock()
        self._origin_lock = threading.Lock()
        self._plans: dict[PlanSettings, Plan] = {}
        dataset.keep_open = SHARDS_OPEN
        self.catalog = Catalog(dataset, self.settings)

    @cached_property
    def name(self) -> str:
        """The name of the source, or the number of sources."""
        names = source_names(self.dataset)
        return names[0] if len(names) == 1 else f"{len(names)} sources" if names else self.dataset.key[:15]

    @cached_property
    def sources(self) -> dict[int, str]:
        """Names of the sources that have rows."""
        names = source_names(self.dataset)
        numbers = sorted(set(self.dataset.manifest.shards.sources))
        return {number: names.get(number, f"source {number}") for number in numbers}

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
        return self._once("comparison", lambda: compare(self.dataset, other, self.settings.train_on))

    def plan(self, settings: PlanSettings) -> Plan:
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
        if not self.dataset.is_preference:
            return [("", example_of(self.dataset, row, policy), 0)]
        found = [example_of(self.dataset, 2 * row + side, policy) for side in (0, 1)]
        prompt = self._prompt(row)
        for example in found:
            example.loss_weights[:prompt] = 0
        return [(name, example, prompt) for name, example in zip(("chosen", "rejected"), found, strict=True)]

    def _prompt(self, row: int) -> int:
        """The common prompt of one pair."""
        drop = ViewSettings(train_on=LossPolicy.ALL_TOKENS, regions_unknown=UnknownRegions.DROP)
        whole = self._once("pairs", lambda: View(self.dataset, drop).scanned())
        at = int(np.searchsorted(whole.numbers, row))
        return int(whole.prompts[at]) if at < len(whole) and int(whole.numbers[at]) == row else 0

    def listing(self, row: int) -> Listing:
        """A row for the list."""
        place = place_of(self.dataset, row)
        parts = self.sequences(row, self.settings.train_on)
        tokens, trained = sum(len(e) for _, e, _ in parts), sum(int(e.loss_mask.sum()) for _, e, _ in parts)
        name = self.sources.get(place.source, f"source {place.source}")
        return Listing(row, f"{name}, row {place.row:,}", tokens, trained, self._turns(parts[0][1]))

    def _turns(self, example: Example) -> list[tuple[str, str]]:
        """The start of the first user message and of the last assistant message, or of the whole row."""
        runs, found = example.runs, list[tuple[str, str]]()
        starts = runs.ends.astype(np.int64) - runs.lengths
        for role, which in (("user", 0), ("assistant", -1)):
            own = np.flatnonzero((runs.roles == {"user": 2, "assistant": 3}[role]) & (runs.parts == 2))
            if len(own):
                start, length = int(starts[own[which]]), int(runs.lengths[own[which]])
                found.append((role, self._beginning(example, start, length)))
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
                raw = self.dataset.origin.source_row(row)
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
