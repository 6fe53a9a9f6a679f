"""One slice through all stages: rows → text and regions → segments → ids → the shard's columns.

    rows ──► TemplateRenderer.render_rows ──► Splitter.split ──► encode_texts ──► ExampleBatch.columns
      └─ those that the machine leaves: RowReader ──► Adapter ──► TemplateRenderer.render ──┘

A pipeline belongs to a recipe and to one process. Work goes in batches, so that memory stays bounded whatever the slice
holds. Every row ends as examples or as a rejected row with its reason: the ledger adds up by construction.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.build.batch import Ending, ExampleBatch, encode_texts, joined, piece_texts, surrounded
from penstock.build.options import Arguments, DroppedCalls, Eos, SpecialText
from penstock.build.reading import (
    SliceState,
    encoder_panic,
    no_template,
    special_text,
    stretches,
    too_large,
    unbroken,
)
from penstock.build.recipe import NO_DATE, Recipe
from penstock.build.seams import Seams, reseamed, unseamed
from penstock.chat.conversation import Conversation, Part
from penstock.chat.notes import Note, NotedRows
from penstock.chat.rows import RowReader
from penstock.chat.special_text import SpecialText as SpecialTextFinder
from penstock.encode.encoder import Encoder
from penstock.encode.nfc import NfcNormalizer
from penstock.encode.vocabulary import Vocabulary
from penstock.errors import EncoderPanic, RowError
from penstock.regions.arrange import Arranger
from penstock.regions.chain_segments import split_chains
from penstock.regions.modes import TurnsMode
from penstock.regions.segments import Segments
from penstock.regions.splitter import Splitter
from penstock.sources import SliceRows
from penstock.store.columns import Columns
from penstock.template.rendered import Rendered
from penstock.template.renderer import TemplateRenderer

DROPPED = "tool_calls_dropped"


@dataclass(slots=True)
class SliceResult:
    """What became of a slice."""

    columns: Columns
    rejected: list[dict[str, Any]]  # row (in the slice), kind, reason, remedy
    noted: NotedRows  # of the rows that were kept
    nulls_dropped: int  # fields that Arrow added
    rows: int
    engines: dict[str, Counter[str]]  # stage -> why the reference served -> rows
    fresh: list[int] = field(default_factory=list)  # rows that took a path through the template for the first time


class _Read(NamedTuple):
    """A conversation that was read in Python, and where it comes from."""

    row: int
    side: int
    conversation: Conversation


@dataclass(slots=True)
class _Examples:
    """Rendered examples on their way to the encoder."""

    rows: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    segments: Segments = field(default_factory=lambda: piece_texts((), Ending())[1])
    heads: list[int] = field(default_factory=list)  # how many segments of its row's last example each begins with
    seams: list[int] = field(default_factory=list)  # where a text is encoded in two parts; 0: nowhere

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
        """Only these examples are left."""
        self.rows = [self.rows[k] for k in numbers]
        self.sides = [self.sides[k] for k in numbers]
        self.texts = [self.texts[k] for k in numbers]
        self.heads = [self.heads[k] for k in numbers]
        self.seams = [self.seams[k] for k in numbers]
        self.segments = self.segments.taken(np.array(numbers, np.int64))


class Rendering:
    """Everything that one template needs."""

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
        )
        cuts = [token for token in vocabulary.cuts if token in template or token in recipe.special_tokens.values()]
        self.seams = Seams(encoder, cuts)
        self.arranger = Arranger(self.splitter.boundaries, cuts, self.seams.straddles, may_tear=vocabulary.byte_level)
        self.renderer.forget_paths()  # those that the probes took


class Pipeline:
    """The stages of a recipe, ready to take slices."""

    def __init__(self, recipe: Recipe, tokenizer_json: bytes, *, fast: bool = True) -> None:
        self.recipe = recipe
        self.fast = fast
        self.vocabulary = Vocabulary(tokenizer_json)
        self.encoder = Encoder(tokenizer_json, self.vocabulary, fast=fast)
        self.normaliser = NfcNormalizer(self.vocabulary)
        self.ending = self._ending()
        self.reader = RowReader(recipe.mapping)
        self.seams = Seams(self.encoder, self.vocabulary.cuts)
        self._special_text = SpecialTextFinder(self.vocabulary.special_contents)
        self.renderings = {
            name: Rendering(recipe, text, self.vocabulary, self.encoder, fast)
            for name, text in recipe.templates.items()
        }
        # With a second template for tools, a row must be read to know which one renders it.
        self._usual = self.renderings.get("default") if "tool_use" not in self.renderings else None
        if self._usual is not None and not self._usual.renderer.reads_rows:
            self._usual = None

    @property
    def warnings(self) -> list[str]:
        """What the user should know about this recipe."""
        return [w for r in self.renderings.values() for w in r.splitter.warnings]

    def _ending(self) -> Ending:
        """What follows plain texts."""
        token = self.recipe.special_tokens.get("eos_token", "")
        if self.recipe.eos is Eos.NEVER or not token:
            return Ending()
        own = self.encoder.reference([token.encode()]).ids.tolist()
        if self.recipe.eos is Eos.AUTO and self.encoder.suffix[-len(own) :] == own:
            return Ending()
        return Ending(token, always=self.recipe.eos is Eos.ALWAYS)

    @property
    def paths(self) -> tuple[int, int]:
        """How many ways through the templates' branches have been taken and compared, and how many there are."""
        found = [r.renderer.paths for r in self.renderings.values()]
        return sum(taken for taken, _ in found), sum(total for _, total in found)

    def way(self, conversation: Conversation) -> str:
        """Which template renders a conversation; '' for plain text."""
        if conversation.pieces is not None:
            return ""
        return "tool_use" if conversation.tools is not None and "tool_use" in self.renderings else "default"

    def run(self, rows: SliceRows) -> SliceResult:
        """Take a slice through all stages."""
        state = SliceState()
        with _collector_off():
            parts = [self._examples(rows, stretch, state) for stretch in stretches(rows.rows)]
        batch = joined([p for p in parts if len(p.rows)], self.vocabulary.dtype)
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, rows.rows), np.uint64, len(rows.rows))
        columns = batch.columns(hashes, format=self.recipe.mapping.format)
        rejected = [state.rejected[row] for row in sorted(state.rejected)]
        engines = {"render": state.render, "encode": state.encode}
        fresh = sorted(set(state.fresh))
        return SliceResult(columns, rejected, state.notes, rows.nulls_dropped, len(rows.rows), engines, fresh)

    def _examples(self, rows: SliceRows, stretch: range, state: SliceState) -> ExampleBatch:
        """All examples of a stretch of rows, in order; rows with an error are rejected whole."""
        left = list(stretch)
        for number in [number for number in rows.oversize if number in stretch]:
            state.reject(number, too_large(rows.oversize[number], self.recipe.max_row_bytes))
            left.remove(number)
        examples = _Examples()
        if self._usual is not None:
            left = self._render_rows(self._usual, rows.rows, left, examples, state)
        plain = self._render_read(rows.rows, left, examples, state)
        parts: list[ExampleBatch] = []
        if examples.rows:
            parts.append(self._encode(examples, state))
        if plain.rows:
            parts.append(surrounded(self._encode(plain, state), self.encoder.prefix, self.encoder.suffix))
        places = examples.rows + plain.rows, examples.sides + plain.sides, examples.heads + plain.heads
        if not parts:
            return joined([])
        batch = parts[0] if len(parts) == 1 else joined(parts)
        batch.rows, batch.sides, batch.heads = (np.array(numbers, np.int64) for numbers in places)
        if np.any(np.diff(batch.rows) < 0) or batch.sides.any():
            order = np.lexsort((batch.sides, batch.rows))
            batch = batch.taken(order) if np.any(np.diff(order) < 0) else batch
        state.encode += batch.reference
        return batch.without(state.rejected) if state.rejected else batch

    def _encode(self, examples: _Examples, state: SliceState) -> ExampleBatch:
        """Encode texts, but for those that can't be: their rows are rejected, and they leave the examples."""
        sizes = self.encoder.oversized_pieces(examples.texts)
        self._reject(examples, {k: unbroken(size) for k, size in sizes.items()}, state)
        try:
            batch = self._encoded(examples)
        except EncoderPanic:
            self._reject(examples, self._panics(examples), state)
            batch = self._encoded(examples)
        return self._checked(examples, batch, state) if self.recipe.turns is TurnsMode.FAITHFUL else batch

    def _encoded(self, examples: _Examples) -> ExampleBatch:
        texts, segments, counts = unseamed(examples.texts, examples.segments, examples.seams)
        batch = encode_texts(texts, segments, self.encoder, self.normaliser, self.vocabulary)
        return reseamed(batch, counts)

    def _checked(self, examples: _Examples, batch: ExampleBatch, state: SliceState) -> ExampleBatch:
        """Turns whose answers do not begin behind the tokens of their prompts become context."""
        for example, message in self.seams.torn(examples.texts, examples.segments, batch):
            own = slice(int(batch.segment_offsets[example]), int(batch.segment_offsets[example + 1]))
            parts, messages = batch.parts[own], batch.messages[own]
            parts[messages == message] = Part.CONTEXT
            state.note([(examples.rows[example], Note.TURN_STRADDLES)])
        return batch

    def _panics(self, examples: _Examples) -> dict[int, RowError]:
        """Which texts an engine panics at, found one by one."""
        found: dict[int, RowError] = {}
        for k, text in enumerate(examples.texts):
            try:
                own = examples.segments.taken(np.array([k]))
                encode_texts([text], own, self.encoder, self.normaliser, self.vocabulary)
            except EncoderPanic as panic:
                found[k] = encoder_panic(panic)
        return found

    def _reject(self, examples: _Examples, errors: dict[int, RowError], state: SliceState) -> None:
        for k, error in errors.items():
            state.reject(examples.rows[k], error)
        if errors:
            examples.keep([k for k in range(len(examples.texts)) if k not in errors])

    def _end_notes(self, read: _Read) -> list[Note]:
        """Whether plain text was given an end, or could not be."""
        if self.recipe.eos is Eos.AUTO and not self.recipe.special_tokens.get("eos_token"):
            return [Note.NO_EOS]
        text = "".join(text for _, text in read.conversation.pieces or ())
        return [Note.EOS_APPENDED] if self.ending.after(text) else []

    # ---- rows that the machine reads

    def _render_rows(
        self, rendering: Rendering, rows: Sequence[bytes], numbers: list[int], examples: _Examples, state: SliceState
    ) -> list[int]:
        """Render usual rows from their bytes; the rows that are left."""
        found = rendering.renderer.render_rows([rows[n] for n in numbers], self._only_conversation)
        places = [numbers[k] for k in found.rows]
        if self.recipe.turns is TurnsMode.FAITHFUL:
            self._add_chains(rendering, found.rendered, places, examples, state)
        else:
            segments = self._split(rendering, found.rendered, places, state)
            examples.add(places, [0] * len(places), found.texts, segments)
        state.fresh += [numbers[k] for k in found.fresh]
        return [numbers[k] for k in found.left]

    def _only_conversation(self, row: bytes) -> Conversation:
        return self.reader.conversations(row)[0]

    # ---- rows that are read in Python

    def _render_read(
        self, rows: Sequence[bytes], numbers: Sequence[int], examples: _Examples, state: SliceState
    ) -> _Examples:
        """Read rows, and render those that need a template; the others are the answer."""
        ways: dict[str, list[_Read]] = {}
        for number in numbers:
            try:
                found = self._adapted(rows[number])
            except RowError as error:
                state.reject(number, error.with_traceback(None))  # its frames hold the rows
                continue
            if any(way == "" and self._is_rejected(number, conversation, state) for way, conversation in found):
                continue
            for side, (way, conversation) in enumerate(found):
                side = side if conversation.label is None else int(not conversation.label)
                ways.setdefault(way, []).append(_Read(number, side, conversation))
        plain = _Examples()
        if without := ways.pop("", []):
            state.note((e.row, note) for e in without for note in (*e.conversation.notes, *self._end_notes(e)))
            texts = piece_texts([e.conversation for e in without], self.ending)
            plain.add([e.row for e in without], [e.side for e in without], *texts)
        for way, members in ways.items():
            rendering = self.renderings[way]
            rendered = rendering.renderer.render([e.conversation for e in members])
            places = [e.row for e in members]
            if self.recipe.turns is TurnsMode.FAITHFUL:
                self._add_chains(rendering, rendered, places, examples, state)
                continue
            segments = self._split(rendering, rendered, places, state)
            examples.add(places, [e.side for e in members], rendered.texts, segments)
        return plain

    def _is_rejected(self, number: int, plain: Conversation, state: SliceState) -> bool:
        """Whether a row of plain text has a special token and must not have one."""
        token = self._special_text.first(plain)
        if token is None:
            return False
        if self.recipe.special_tokens_in_text is SpecialText.REJECT:
            state.reject(number, special_text(token))
            return True
        state.note([(number, Note.SPECIAL_TEXT)])
        return False

    def _adapted(self, row: bytes) -> list[tuple[str, Conversation]]:
        """The conversations of a row in the form that their template takes, with the template's name."""
        found: list[tuple[str, Conversation]] = []
        for conversation in self.reader.conversations(row):
            way = self.way(conversation)
            if way and not self.renderings:
                raise no_template()
            found.append((way, self.renderings[way].renderer.adapter.adapt(conversation) if way else conversation))
        return found

    # ---- both

    def refusals(self, rendered: Rendered, dropped: dict[int, RowError]) -> dict[int, RowError]:
        """The conversations of a batch that are rejected, given those whose messages the template drops."""
        if self.recipe.dropped_tool_calls is DroppedCalls.KEEP:
            dropped = {k: error for k, error in dropped.items() if error.kind != DROPPED}
        special: dict[int, RowError] = {}
        if self.recipe.special_tokens_in_text is SpecialText.REJECT:
            special = {k: special_text(token) for k, token in rendered.special.items()}
        return {**special, **dropped, **rendered.errors}

    def _split(self, rendering: Rendering, rendered: Rendered, rows: Sequence[int], state: SliceState) -> Segments:
        """Cut the rendered texts of rows into segments, and reject what must be."""
        segments, dropped = rendering.splitter.split(rendered)
        self._tell(rendered, segments, dropped, rows, state)
        return segments

    def _add_chains(
        self, rendering: Rendering, rendered: Rendered, rows: Sequence[int], examples: _Examples, state: SliceState
    ) -> None:
        """Add the examples of rows in which every assistant turn has the context that inference shows."""
        found = split_chains(rendering.arranger, rendering.splitter, rendered)
        self._tell(rendered, found.segments, found.errors, rows, state)
        places = [rows[row] for row in found.rows.tolist()]
        examples.add(
            places, found.order.tolist(), found.texts, found.segments, found.heads.tolist(), found.seams.tolist()
        )

    def _tell(
        self,
        rendered: Rendered,
        segments: Segments,
        dropped: dict[int, RowError],
        rows: Sequence[int],
        state: SliceState,
    ) -> None:
        """Note what happened to conversations, and reject what must be."""
        if self.recipe.dropped_tool_calls is DroppedCalls.KEEP:
            state.note((rows[k], Note.CALLS_DROPPED) for k, e in dropped.items() if e.kind == DROPPED)
        if self.recipe.special_tokens_in_text is not SpecialText.REJECT:
            state.note((rows[k], Note.SPECIAL_TEXT) for k in rendered.special)
        places = np.array(rows, np.int64)
        state.note_rows(rendered.notes, places)
        state.note_rows(segments.notes, places)
        for k, error in self.refusals(rendered, dropped).items():
            state.reject(rows[k], error)
        state.render += rendered.reference


@contextmanager
def _collector_off() -> Iterator[None]:
    """Batches are many small objects without cycles; walking them again and again would take 5% of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
