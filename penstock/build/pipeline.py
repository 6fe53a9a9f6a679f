"""One slice through all stages: rows → conversations → text and regions → ids and segments → the shard's columns.

A pipeline belongs to a recipe and to one process; making it costs about 2 s (engines, calibration), then it does
20 to 35 MB/s per core. Work goes in batches, so that memory stays bounded whatever the slice holds.
Every row ends as examples or as a rejected row with its reason: the ledger adds up by construction.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from penstock.build.batch import ExampleBatch, encode_pieces, encode_texts, given_weights, joined, reordered
from penstock.build.options import DroppedCalls
from penstock.build.reading import Batch, Drafting, Reading, SliceState
from penstock.build.recipe import NO_DATE, Recipe
from penstock.chat.adapt import Adapter
from penstock.chat.conversation import Conversation
from penstock.chat.engine import TemplateEngine
from penstock.chat.formats import Format
from penstock.chat.parts import Splitter
from penstock.chat.plain_rows import PlainRows
from penstock.chat.regions import Segments
from penstock.chat.stencil import Filled
from penstock.chat.stencils import Stencils
from penstock.encode.encoder import Encoder
from penstock.encode.normalise import Normaliser
from penstock.encode.vocabulary import Vocabulary
from penstock.errors import RowError
from penstock.sources import Rows
from penstock.store.columns import Columns

DROPPED = "tool_calls_dropped"
_RENDERED = (Format.MESSAGES, Format.SHAREGPT, Format.ALPACA, Format.QUERY_RESPONSE)  # always messages


@dataclass(slots=True)
class SliceResult:
    """What became of a slice."""

    columns: Columns
    rejected: list[dict[str, Any]]  # row (in the slice), kind, reason, remedy
    notes: Counter[str]
    rows: int
    engines: dict[str, Counter[str]]  # stage -> why the reference served (or no stencil) -> rows


class _Rendering:
    """Everything that one template needs."""

    def __init__(self, recipe: Recipe, template: str, vocabulary: Vocabulary, fast: bool) -> None:
        self.engine = TemplateEngine(
            template,
            special_tokens=recipe.special_tokens,
            variables=recipe.template_vars,
            date=recipe.date or NO_DATE,
            fast=fast,
        )
        self.adapter = Adapter(self.engine.plain)
        self.splitter = Splitter(
            self.engine,
            special_tokens=vocabulary.special_contents,
            eos_token=recipe.special_tokens.get("eos_token"),
            mode=recipe.regions,
        )
        plain = None
        if self.engine.locality is not None and PlainRows.can_read(recipe.mapping) and not self.adapter.needs.no_text:
            plain = PlainRows(recipe.mapping, self.engine.locality, tools="tool_use" not in recipe.templates)
        names = {} if plain is None else plain.roles
        self.stencils = Stencils(self.engine, self.splitter, names, self.adapter)
        self.drafting = Drafting(plain, self.stencils.draft) if plain is not None and self.stencils.active else None


class Pipeline:
    """The stages of a recipe, ready to take slices."""

    def __init__(self, recipe: Recipe, tokenizer_json: bytes, *, fast: bool = True) -> None:
        self.recipe = recipe
        self.fast = fast
        self.vocabulary = Vocabulary(tokenizer_json)
        self.encoder = Encoder(tokenizer_json, self.vocabulary, fast=fast)
        self.normaliser = Normaliser(self.vocabulary)
        self.renderings = {
            name: _Rendering(recipe, text, self.vocabulary, fast) for name, text in recipe.templates.items()
        }
        drafting = self.renderings["default"].drafting if fast and "default" in self.renderings else None
        self._reading = Reading(recipe, self.vocabulary.special_contents, drafting)
        self.reader = self._reading.reader
        self._one_way = recipe.mapping.format in _RENDERED and "tool_use" not in self.renderings

    @property
    def warnings(self) -> list[str]:
        """What the user should know about this recipe."""
        return [w for r in self.renderings.values() for w in r.splitter.warnings]

    def run(self, rows: Rows) -> SliceResult:
        """Take a slice through all stages."""
        state = SliceState(rows.rows)
        with _collector_off():
            parts = [self._examples(batch, state) for batch in self._reading.batches(rows, state)]
        batch = joined([p for p in parts if len(p.rows)], self.vocabulary.dtype)
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, rows.rows), np.uint64, len(rows.rows))
        if rows.nulls_dropped:
            state.notes["arrow nulls dropped"] += rows.nulls_dropped
        columns = batch.columns(hashes, preference=self.recipe.mapping.format is Format.PREFERENCE)
        rejected = [state.rejected[row] for row in sorted(state.rejected)]
        engines = {"stencil": state.stencil, "render": state.render, "encode": state.encode}
        return SliceResult(columns, rejected, state.notes, len(rows.rows), engines)

    def _examples(self, batch: Batch, state: SliceState) -> ExampleBatch:
        """All examples of a batch, in the order of their rows; rows with an error are rejected whole."""
        groups: dict[str, list[int]] = {"default": list(range(len(batch.rows)))}
        if not self._one_way:
            groups.clear()
            for k, conversation in enumerate(batch.conversations):
                groups.setdefault(self.way(conversation), []).append(k)
        parts: list[ExampleBatch] = []
        order: list[int] = []
        for way, members in groups.items():
            part, failed = (
                (encode_pieces(batch.taken(members), self.encoder, self.normaliser, self.vocabulary), {})
                if way == ""
                else self._rendered(way, members, batch, state)
            )
            for k, error in failed.items():
                state.reject(batch.rows[members[k]], error)
            parts.append(part)
            order += members
        merged = parts[0] if len(parts) == 1 else reordered(joined(parts), order)
        merged.rows = np.asarray(batch.rows, np.int64)
        merged.sides = np.asarray(batch.sides, np.int64)
        state.encode += merged.reference
        return merged.without(state.rejected) if state.rejected else merged

    def way(self, conversation: Conversation | None) -> str:
        """Which template renders a conversation (None: a plain one); '' for plain text."""
        if conversation is None:
            return "default"
        if conversation.pieces is not None:
            return ""
        return "tool_use" if conversation.tools is not None and "tool_use" in self.renderings else "default"

    def _rendered(
        self, way: str, members: list[int], batch: Batch, state: SliceState
    ) -> tuple[ExampleBatch, dict[int, RowError]]:
        rendering = self.renderings[way]
        failed: dict[int, RowError] = {}

        def whole(k: int, conversation: Conversation | None) -> Conversation:
            """A conversation in the form that the template takes; one with no such form is told in `failed`."""
            try:
                if conversation is None:
                    (conversation,) = self.reader.conversations(state.rows[batch.rows[members[k]]])
                return rendering.adapter.adapt(conversation)
            except RowError as error:
                failed[k] = error.with_traceback(None)  # its frames hold this very dict
                return conversation or Conversation([])

        given = [c and whole(k, c) for k, c in enumerate(batch.conversations[k] for k in members)]
        filled, why = self._filled(rendering, members, given, batch)
        rest = range(len(given)) if filled is None else sorted(set(range(len(given))).difference(filled.rows))
        left = [given[k] or whole(k, None) for k in rest]
        found: dict[int, RowError] = {}
        if filled is None:
            texts, segments, found = self._split(rendering, left, state)
        else:
            texts, segments = filled.texts, filled.segments
            if left:
                more, segments_of_more, found = self._split(rendering, left, state)
                texts, segments = texts + more, segments.followed_by(segments_of_more)
            texts, segments = _in_order(texts, segments, [*filled.rows, *rest])
        refused = {rest[k]: error for k, error in found.items()}
        usual = rendering.stencils.why_not or "messages with more, or less, than words and calls"
        state.stencil.update(
            why.get(k, usual if self.fast else "stencils are switched off")
            for k in rest
            if k not in refused and k not in failed
        )
        state.notes += segments.notes
        weights = {**given_weights(given), **{k: batch.weights[m] for k, m in enumerate(members) if m in batch.weights}}
        part = encode_texts(texts, segments, weights, self.encoder, self.normaliser, self.vocabulary)
        return part, {**refused, **failed}

    def _filled(
        self, rendering: _Rendering, members: list[int], given: list[Conversation | None], batch: Batch
    ) -> tuple[Filled | None, dict[int, str]]:
        """What stencils can serve, by place among the members; and why they can't serve others."""
        if not self.fast or not rendering.stencils.active:
            return None, {}
        draft = rendering.stencils.draft()
        if batch.draft is not None and rendering is self.renderings["default"]:
            draft = batch.draft
            places = {batch.rows[member]: place for place, member in enumerate(members)}
            draft.rows = [places[batch.start + number] for number in draft.rows]
            draft.left = {places[batch.start + number]: reason for number, reason in draft.left.items()}
        for place, conversation in enumerate(given):
            if conversation is not None:
                draft.add(place, conversation)
        return rendering.stencils.fill(draft), draft.left

    def _split(
        self, rendering: _Rendering, conversations: list[Conversation], state: SliceState
    ) -> tuple[list[bytes], Segments, dict[int, RowError]]:
        """Texts, segments and refused rows, by the template engine and the splitter."""
        regions = rendering.engine.render(conversations)
        segments, refused = rendering.splitter.split(conversations, regions)
        if self.recipe.dropped_tool_calls is DroppedCalls.KEEP:
            kept = {k for k, error in refused.items() if error.kind == DROPPED}
            state.notes["tool calls dropped by the template"] += len(kept)
            refused = {k: error for k, error in refused.items() if k not in kept}
        state.render += regions.reference
        return regions.texts, segments, {**refused, **regions.errors}


def _in_order(texts: list[bytes], segments: Segments, places: list[int]) -> tuple[list[bytes], Segments]:
    """The texts with their segments, each at its place."""
    if places == sorted(places):
        return texts, segments
    order = np.argsort(places)
    return list(map(texts.__getitem__, order.tolist())), segments.taken(order)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Rows are many small objects without cycles; to walk them again and again would take 5 to 10% of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
