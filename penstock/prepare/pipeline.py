"""Runs a slice through all stages: rows → text and regions → segments → ids → the shard's columns.

    rows ──► TemplateRenderer.render_rows ──► Splitter.split ──► encode_texts ──► ExampleBatch.columns
      └─ rows the C machine can't read: RowReader ──► Adapter ──► TemplateRenderer.render ──┘

A pipeline belongs to one recipe and one process. Rows are processed in batches, so memory stays bounded whatever the
slice holds. Every row ends as examples or as a rejected row with its reason: the ledger adds up by construction.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from penstock.errors import EncoderPanic, RowError
from penstock.prepare.chat.adapt import SpecialTextFinder
from penstock.prepare.chat.conversation import Conversation, Part
from penstock.prepare.chat.formats import Format
from penstock.prepare.chat.notes import Note
from penstock.prepare.chat.rows import RowReader
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.example_batch import (
    Ending,
    ExampleBatch,
    concatenate_batches,
    encode_texts,
    plain_texts,
    with_prefix_and_suffix,
)
from penstock.prepare.faithful.arrange import Arranger, split_chains
from penstock.prepare.faithful.seams import Seams, cut_at_seams, merge_parts, split_at_seams
from penstock.prepare.modes import Arguments, DroppedCalls, Eos, SpecialText, Straddle, TurnsMode
from penstock.prepare.recipe import NO_DATE, Recipe
from penstock.prepare.regions.segments import Segments
from penstock.prepare.regions.splitter import Splitter
from penstock.prepare.slice_record import (
    SliceRecord,
    SliceState,
    batch_ranges,
    encoder_panic,
    lost_spans,
    no_template,
    shown,
    special_text,
    straddled,
    too_large,
    unbroken,
)
from penstock.prepare.sources.slices import SliceRows
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.renderer import TemplateRenderer
from penstock.prepare.tokenizer.vocabulary import Vocabulary

DROPPED = "tool_calls_dropped"
_NO_SEGMENTS = plain_texts((), Ending())[1]


class _Read(NamedTuple):
    """A conversation that was read in Python, with its row and side."""

    row: int
    side: int
    conversation: Conversation


@dataclass(slots=True)
class _Examples:
    """Rendered examples to be encoded."""

    rows: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    segments: Segments = _NO_SEGMENTS
    heads: list[int] = field(default_factory=list)  # number of leading segments shared with the row's last example
    seams: list[int] = field(default_factory=list)  # the byte at which a text is encoded in two parts; 0 for none

    def add(
        self,
        rows: Sequence[int],
        sides: Sequence[int],
        texts: Sequence[bytes],
        segments: Segments,
        heads: Sequence[int] | None = None,
        seams: Sequence[int] | None = None,
    ) -> None:
        self.segments = self.segments.followed_by(segments) if self.rows else segments
        self.rows += rows
        self.sides += sides
        self.texts += texts
        self.heads += [0] * len(rows) if heads is None else heads
        self.seams += [0] * len(rows) if seams is None else seams

    def keep(self, numbers: Sequence[int]) -> None:
        """Drops all other examples."""
        self.rows = [self.rows[k] for k in numbers]
        self.sides = [self.sides[k] for k in numbers]
        self.texts = [self.texts[k] for k in numbers]
        self.heads = [self.heads[k] for k in numbers]
        self.seams = [self.seams[k] for k in numbers]
        self.segments = self.segments.taken(np.array(numbers, np.int64))


class Rendering:
    """The renderer, splitter and arranger of one template."""

    def __init__(self, recipe: Recipe, template: str, vocabulary: Vocabulary, encoder: Encoder, fast: bool) -> None:
        self.renderer = TemplateRenderer(
            template,
            special_tokens=recipe.special_tokens,
            variables=recipe.template_vars,
            date=recipe.date or NO_DATE,
            mapping=recipe.mapping,
            special_text=vocabulary.special_contents,
            added_tokens=[token.content for token in vocabulary.added],
            turns=recipe.turns is TurnsMode.FAITHFUL,
            arguments_as_given=recipe.arguments is Arguments.AS_GIVEN,
            fast=fast,
        )
        self.splitter = Splitter(
            self.renderer,
            special_tokens=vocabulary.special_contents,
            eos_token=recipe.special_tokens.get("eos_token"),
            mode=recipe.regions,
            next_markers=[token.content for token in vocabulary.added if token.id in recipe.end_ids],
            appends_stops=recipe.appends_stops,
            reasoning_in_content=recipe.reasoning_in_content,
            straddle=recipe.straddle,
            only_last=recipe.mapping.format in (Format.PREFERENCE, Format.KTO),
            why_unknown=self.renderer.why_unknown,
        )
        self.renderer.last_stops = self.splitter.last_stops
        cuts = [token for token in vocabulary.cuts if token in template or token in recipe.special_tokens.values()]
        self.seams = Seams(encoder, cuts)
        self.arranger = Arranger(self.splitter.boundaries, cuts, self.seams.straddles, may_tear=vocabulary.byte_level)
        self.renderer.forget_paths()  # paths taken by the probes don't count


class Pipeline:
    """The stages of a recipe, ready to run slices."""

    def __init__(
        self, recipe: Recipe, tokenizer_json: bytes, *, fast: bool = True, encoder: Encoder | None = None
    ) -> None:
        """`encoder` is one of the same tokenizer, if it is loaded already."""
        self.recipe = recipe
        self.fast = fast
        self.encoder = encoder or Encoder(tokenizer_json, Vocabulary(tokenizer_json), fast=fast)
        self.vocabulary = self.encoder.vocabulary
        self.ending = self._ending()
        self.reader = RowReader(recipe.mapping)
        self.seams = Seams(self.encoder, self.vocabulary.cuts)
        self._special_text = SpecialTextFinder(self.vocabulary.special_contents)
        self.renderings = {
            name: Rendering(recipe, text, self.vocabulary, self.encoder, fast)
            for name, text in recipe.templates.items()
        }
        self.warnings = [w for r in self.renderings.values() for w in r.splitter.warnings]
        # With a separate template for tools, a row must be read to choose between them.
        self._usual = self.renderings.get("default") if "tool_use" not in self.renderings else None
        if self._usual is not None and not self._usual.renderer.reads_rows:
            self._usual = None

    def _ending(self) -> Ending:
        """Returns the token to append to plain texts."""
        token = self.recipe.special_tokens.get("eos_token", "")
        if self.recipe.eos is Eos.NEVER or not token:
            return Ending()
        own = self.encoder.reference([token.encode()]).ids.tolist()
        if self.recipe.eos is Eos.AUTO and self.encoder.suffix[-len(own) :] == own:
            return Ending()
        return Ending(token, always=self.recipe.eos is Eos.ALWAYS)

    def run(self, rows: SliceRows, *, by_reference: bool = False, window: int = 0) -> SliceRecord:
        """Runs a slice through all stages.

        With `by_reference`, only the reference engines are used, to compare with; a `window` then limits the bytes
        that are encoded of a long conversation.
        """
        state = SliceState(by_reference, window)
        with _collector_off():
            parts = [self._examples(rows, batch_range, state) for batch_range in batch_ranges(rows.rows)]
        batch = concatenate_batches([p for p in parts if len(p.rows)], self.vocabulary.dtype)
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, rows.rows), np.uint64, len(rows.rows))
        columns = batch.columns(hashes, format=self.recipe.mapping.format)
        return SliceRecord(
            columns,
            rejected=[{**state.rejected[row], "data": shown(rows.rows[row])} for row in sorted(state.rejected)],
            noted=state.notes,
            nulls_dropped=rows.nulls_dropped,
            rows=len(rows.rows),
            bytes=sum(map(len, rows.rows)),
            crossings=batch.crossings() if batch.crossed.any() else {},
            engines={"render": state.render, "encode": state.encode},
            encoder=(self.encoder.engine, self.encoder.not_served),
            paths=0 if by_reference else sum(r.renderer.paths[0] for r in self.renderings.values()),
            warnings=self.warnings,
            fresh=sorted(set(state.fresh)),
            cut=state.cut,
        )

    def _examples(self, rows: SliceRows, batch_range: range, state: SliceState) -> ExampleBatch:
        """Returns all examples of a range of rows, in order; rejects rows with an error as a whole."""
        left = list(batch_range)
        for number in [number for number in rows.oversize if number in batch_range]:
            state.reject(number, too_large(rows.oversize[number], self.recipe.max_row_bytes))
            left.remove(number)
        examples = _Examples()
        if self._usual is not None and not state.by_reference:
            left = self._render_rows(self._usual, rows.rows, left, examples, state)
        plain = self._render_read(rows.rows, left, examples, state)
        parts: list[ExampleBatch] = []
        if examples.rows:
            parts.append(self._encode(examples, state))
        if plain.rows:
            parts.append(with_prefix_and_suffix(self._encode(plain, state), self.encoder.prefix, self.encoder.suffix))
        origins = examples.rows + plain.rows, examples.sides + plain.sides, examples.heads + plain.heads
        if not parts:
            return concatenate_batches([])
        batch = parts[0] if len(parts) == 1 else concatenate_batches(parts)
        batch.rows, batch.sides, batch.heads = np.array(origins, np.int64)
        if np.any(np.diff(batch.rows) < 0) or batch.sides.any():
            order = np.lexsort((batch.sides, batch.rows))
            batch = batch.taken(order) if np.any(np.diff(order) < 0) else batch
        state.encode += batch.fallbacks
        if self.recipe.mapping.format is Format.PREFERENCE:
            state.note((row, Note.SIDES_EQUAL) for row in batch.equal_pairs())
        if self.recipe.straddle is Straddle.ERROR:
            for number in batch.straddled_rows():
                state.reject(number, straddled())
        return batch.without(state.rejected) if state.rejected else batch

    def _encode(self, examples: _Examples, state: SliceState) -> ExampleBatch:
        """Encodes texts. Rejects the rows of those that can't be encoded, and removes them from the examples."""
        if sizes := self.encoder.oversized_texts(examples.texts):
            self._reject(examples, {k: unbroken(size) for k, size in sizes.items()}, state)
        if state.window and max(map(len, examples.texts), default=0) > state.window:
            self._cut(examples, state)
        texts, counts = examples.texts, [1] * len(examples.texts)
        segments = examples.segments
        if any(examples.seams):
            segments = examples.segments = cut_at_seams(segments, examples.seams)
            texts, segments, counts = split_at_seams(texts, segments, examples.seams)
        try:
            batch = encode_texts(texts, segments, self.encoder, reference=state.by_reference)
        except EncoderPanic:
            if not (panics := self._panics(examples, state)):
                raise
            self._reject(examples, panics, state)
            return self._encode(examples, state)
        if self.recipe.turns is TurnsMode.FAITHFUL:
            return self._checked(examples, merge_parts(batch, counts), state)
        return batch

    def _cut(self, examples: _Examples, state: SliceState) -> None:
        """Cuts long texts at the first end of a turn beyond the window: a special token, which no other spans."""
        texts, segments = examples.texts, examples.segments
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        of_text = np.repeat(np.arange(len(texts)), np.diff(segments.offsets))
        closing = np.flatnonzero((segments.parts == Part.STOP) & (segments.ends >= state.window))
        np.minimum.at(lengths, of_text[closing], segments.ends[closing])
        keep = np.flatnonzero(segments.ends <= lengths[of_text])
        offsets = np.concatenate(([0], np.cumsum(np.bincount(of_text[keep], minlength=len(texts)))))
        examples.segments = segments.picked(keep, offsets)
        has_sides = self.recipe.mapping.format is Format.PREFERENCE
        for k, length in enumerate(lengths.tolist()):
            if length < len(texts[k]):
                texts[k] = texts[k][:length]
                state.cut.add((examples.rows[k], examples.sides[k] if has_sides else 0))

    def _checked(self, examples: _Examples, batch: ExampleBatch, state: SliceState) -> ExampleBatch:
        """Turns answers that don't start right after the tokens of their prompt into context."""
        for example, message in self.seams.mismatches(examples.texts, examples.segments, batch, examples.seams):
            own = slice(int(batch.segment_offsets[example]), int(batch.segment_offsets[example + 1]))
            parts, messages = batch.parts[own], batch.messages[own]
            parts[messages == message] = Part.CONTEXT
            state.note([(examples.rows[example], Note.TURN_STRADDLES)])
        return batch

    def _panics(self, examples: _Examples, state: SliceState) -> dict[int, RowError]:
        """Finds the texts on which an engine panics, by encoding them one by one."""
        found: dict[int, RowError] = {}
        for k, text in enumerate(examples.texts):
            try:
                own = examples.segments.taken(np.array([k]))
                encode_texts([text], own, self.encoder, reference=state.by_reference)
            except EncoderPanic as panic:
                found[k] = encoder_panic(panic)
        return found

    def _reject(self, examples: _Examples, errors: dict[int, RowError], state: SliceState) -> None:
        for k, error in errors.items():
            state.reject(examples.rows[k], error)
        examples.keep([k for k in range(len(examples.texts)) if k not in errors])

    def _end_notes(self, read: _Read) -> list[Note]:
        """Returns the notes on the end-of-sequence token of a plain text: appended, or missing."""
        if self.recipe.eos is Eos.AUTO and not self.recipe.special_tokens.get("eos_token"):
            return [Note.NO_EOS]
        text = "".join(text for _, text in read.conversation.texts or ())
        return [Note.EOS_APPENDED] if self.ending.after(text) else []

    # ---- rows that the C machine reads

    def _render_rows(
        self, rendering: Rendering, rows: Sequence[bytes], numbers: list[int], examples: _Examples, state: SliceState
    ) -> list[int]:
        """Renders rows from their bytes. Returns those that the C machine can't read."""
        found = rendering.renderer.render_rows([rows[n] for n in numbers], self._only_conversation)
        origins = [numbers[k] for k in found.rows], [0] * len(found.rows)
        self._add(rendering, found.rendered, origins, found.texts, examples, state)
        state.fresh += [numbers[k] for k in found.fresh]
        return [numbers[k] for k in found.left]

    def _only_conversation(self, row: bytes) -> Conversation:
        return self.reader.conversations(row)[0]

    # ---- rows that are read in Python

    def _render_read(
        self, rows: Sequence[bytes], numbers: Sequence[int], examples: _Examples, state: SliceState
    ) -> _Examples:
        """Reads rows and renders those that need a template. Returns the examples of plain text."""
        by_template: dict[str, list[_Read]] = {}
        for number in numbers:
            try:
                found = self._adapted(rows[number])
            except RowError as error:
                state.reject(number, error.with_traceback(None))  # its frames hold the rows
                continue
            if any(name == "" and self._is_rejected(number, conversation, state) for name, conversation in found):
                continue
            for side, (name, conversation) in enumerate(found):
                side = side if conversation.label is None else int(not conversation.label)
                by_template.setdefault(name, []).append(_Read(number, side, conversation))
        plain = _Examples()
        if without := by_template.pop("", []):
            state.note((e.row, note) for e in without for note in (*e.conversation.notes, *self._end_notes(e)))
            mode = self.recipe.reasoning_in_content
            texts, segments = plain_texts([e.conversation for e in without], self.ending, mode)
            plain.add([e.row for e in without], [e.side for e in without], texts, segments)
        for name, members in by_template.items():
            rendering = self.renderings[name]
            render = rendering.renderer.render_reference if state.by_reference else rendering.renderer.render
            origins = [e.row for e in members], [e.side for e in members]
            rendered = render([e.conversation for e in members])
            first = len(examples.rows)
            self._add(rendering, rendered, origins, rendered.texts, examples, state)
            if marked := {e.row for e in members if e.conversation.spans}:
                known = zip(examples.rows[first:], examples.segments.known[first:].tolist(), strict=True)
                for row in marked.intersection(row for row, is_known in known if not is_known):
                    state.reject(row, lost_spans())
        return plain

    def _is_rejected(self, number: int, plain: Conversation, state: SliceState) -> bool:
        """Rejects or notes a row of plain text with a special token; returns whether it was rejected."""
        token = self._special_text.first(plain)
        if token is None:
            return False
        if self.recipe.special_tokens_in_text is SpecialText.REJECT:
            state.reject(number, special_text(token))
            return True
        state.note([(number, Note.SPECIAL_TEXT)])
        return False

    def _adapted(self, row: bytes) -> list[tuple[str, Conversation]]:
        """Returns the conversations of a row as their template accepts them, with its name; '' for plain text."""
        found: list[tuple[str, Conversation]] = []
        for conversation in self.reader.conversations(row):
            if conversation.texts is not None:
                found.append(("", conversation))
                continue
            if not self.renderings:
                raise no_template()
            name = "tool_use" if conversation.tools is not None and "tool_use" in self.renderings else "default"
            found.append((name, self.renderings[name].renderer.adapter.adapt(conversation)))
        return found

    # ---- all rows

    def _add(
        self,
        rendering: Rendering,
        rendered: Rendered,
        origins: tuple[Sequence[int], Sequence[int]],  # the row and the side of each conversation
        texts: Sequence[bytes],
        examples: _Examples,
        state: SliceState,
    ) -> None:
        """Splits rendered conversations into segments, adds their examples, and records notes and rejections."""
        rows, sides = origins
        if self.recipe.turns is TurnsMode.FAITHFUL:  # every assistant turn in the context of inference
            found = split_chains(rendering.arranger, rendering.splitter, rendered)
            segments, dropped = found.segments, found.errors
            of_rows, numbers = [rows[row] for row in found.rows.tolist()], (found.order, found.heads, found.seams)
            order, heads, seams = (array.tolist() for array in numbers)
            examples.add(of_rows, order, found.texts, segments, heads, seams)
        else:
            segments, dropped = rendering.splitter.split(rendered)
            examples.add(rows, sides, texts, segments)
        errors: dict[int, RowError] = {}
        if self.recipe.special_tokens_in_text is SpecialText.REJECT:
            errors = {k: special_text(token) for k, token in rendered.special.items()}
        elif rendered.special:
            state.note((rows[k], Note.SPECIAL_TEXT) for k in rendered.special)
        if self.recipe.dropped_tool_calls is DroppedCalls.KEEP:
            state.note((rows[k], Note.CALLS_DROPPED) for k, error in dropped.items() if error.kind == DROPPED)
            dropped = {k: error for k, error in dropped.items() if error.kind != DROPPED}
        for k, error in {**errors, **dropped, **rendered.errors}.items():
            state.reject(rows[k], error)
        row_numbers = np.array(rows, np.int64)
        state.note_rows(rendered.notes, row_numbers)
        state.note_rows(segments.notes, row_numbers)
        state.render += rendered.reference


@contextmanager
def _collector_off() -> Iterator[None]:
    """Disables the cyclic garbage collector: batches are many small objects without cycles, and scanning them
    repeatedly would take 5% of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
