"""Renders rows and conversations, each with the fastest engine that is exact for it.

The machine serves most rows straight from their bytes, as well as conversations that were read in Python. The
reference serves rows that the machine gives up on, and every row if it gives up on nearly all probes. Both engines are
compared on these probe conversations before any row is served. Creating a renderer takes about 0.2 s.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import RowError
from penstock.native import RenderedBatch, RowFlag, RowStatus
from penstock.prepare.chat.adapt import Adapter, SpecialTextFinder
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.formats import ColumnMapping
from penstock.prepare.chat.notes import Note, joined_notes
from penstock.prepare.template.bytecode import NotCompiled
from penstock.prepare.template.compiler import CompiledTemplate, can_read, conversation_layout, encoded, row_layout
from penstock.prepare.template.probes import PROBES, first_difference, first_region_error
from penstock.prepare.template.reference import Reference, template_refusal
from penstock.prepare.template.rendered import FieldRuns, Rendered, merge
from penstock.prepare.template.turns import FieldColumn, SpanColumn, TagColumn, Turns

_LEFT = (RowStatus.UNREAD, RowStatus.GAVE_UP)
_NOTES = {Note[str(flag.name)]: flag.value for flag in RowFlag if flag not in (RowFlag.KNOWN, RowFlag.OWN_VARIABLES)}
_NOT_JSON = "text or keys that JSON can't hold"  # lone surrogates, keys other than text


class RenderedRows(NamedTuple):
    """The result of rendering raw rows with the machine."""

    rendered: Rendered
    rows: list[int]  # the row of each conversation in `rendered`
    texts: list[bytes]
    left: list[int]  # rows that must be read in Python
    fresh: list[int]  # rows that took a branch of the template in a new direction


class TemplateRenderer:
    """One chat template with its special tokens, variables and date.

    `mapping` tells the machine how to read rows. Messages are searched for special tokens (`special_text`), and for
    those `added_tokens` with which the template marks turns. With `turns`, every assistant turn is also rendered
    separately, as inference sees it.
    """

    def __init__(
        self,
        template: str,
        *,
        special_tokens: Mapping[str, str | list[str]],
        variables: Mapping[str, Any],
        date: datetime.date,
        mapping: ColumnMapping | None = None,
        special_text: Iterable[str] = (),
        added_tokens: Iterable[str] = (),
        turns: bool = False,
        arguments_as_given: bool = False,
        fast: bool = True,
    ) -> None:
        self._with_turns = turns
        self.reference = Reference(template, special_tokens=special_tokens, variables=variables, date=date)
        self.has_generation = self.reference.has_generation
        self.plain = self.reference.plain
        self.adapter = Adapter(self.plain, arguments_as_given=arguments_as_given)
        self.special_text = SpecialTextFinder({*special_text, *_turn_markers(self.plain, added_tokens)})
        self.last_stops: Callable[[Rendered], Rendered] | None = None  # appends stops, if the recipe asks for them
        self._rows: CompiledTemplate | None = None
        self._conversations: CompiledTemplate | None = None
        self.why_reference = "the fast engine is switched off"
        self.why_unknown = ""  # why no row of this template has regions
        if fast:
            base = {"documents": None, "add_generation_prompt": False, **special_tokens, **variables}
            self.why_reference = self._compile(template, base, date, mapping)
        self._check_on_probes()

    def _compile(
        self, template: str, base: Mapping[str, Any], date: datetime.date, mapping: ColumnMapping | None
    ) -> str:
        """Compile the template for the machine; returns the reason if that fails, or an empty string."""
        needles = self.special_text.needles
        try:
            tree = self.reference.parse(template)
            self._conversations = CompiledTemplate(tree, base, date, conversation_layout(needles))
            if mapping is not None and can_read(mapping):
                self._rows = CompiledTemplate(tree, base, date, row_layout(mapping, self.adapter.needs, needles))
        except NotCompiled as reason:
            return f"the template uses {reason}"
        return ""

    def _check_on_probes(self) -> None:
        """Check the machine and the regions on the probes; either is disabled if it is wrong."""
        expected = self.reference.render(PROBES)
        if self._conversations is not None:
            served = self._render_machine(self._conversations, PROBES)
            self.why_reference = first_difference(served, expected) or _why_never(served)
            self._conversations.forget()
        if self.why_reference:
            self._rows = self._conversations = None
        self.why_unknown = first_region_error(expected, PROBES)  # last: hides the regions compared above

    @property
    def reads_rows(self) -> bool:
        """Whether `render_rows` can be used."""
        return self._rows is not None

    @property
    def paths(self) -> tuple[int, int]:
        """How many branch directions of the template have been taken, and how many there are."""
        found = [machine.paths for machine in (self._rows, self._conversations) if machine is not None]
        return max(found, default=(0, 0))

    def forget_paths(self) -> None:
        """Mark every branch as not taken yet, so that each is compared again."""
        for machine in (self._rows, self._conversations):
            if machine is not None:
                machine.forget()

    # ---- rows

    def render_rows(self, rows: list[bytes], read: Callable[[bytes], Conversation]) -> RenderedRows:
        """Render rows from their bytes. `read` parses a row if its conversation is needed later."""
        assert self._rows is not None
        batch = self._rows.render_turns(rows) if self._with_turns else self._rows.render(rows)
        status = np.frombuffer(batch.status, np.uint8)
        left = np.flatnonzero(np.isin(status, _LEFT)).tolist()
        fresh = np.flatnonzero(np.frombuffer(batch.fresh, np.bool_)).tolist()

        def conversation(number: int) -> Conversation:
            return self.adapter.adapt(read(rows[kept[number]]))

        kept = list(range(len(rows)))
        texts = batch.texts
        rendered = self._rendered(batch, conversation)
        if left:
            kept = np.flatnonzero(~np.isin(status, _LEFT)).tolist()
            texts = [texts[number] for number in kept]
            rendered = _select(rendered, kept)
        rendered = self._finished(rendered)
        return RenderedRows(rendered, kept, rendered.texts if self.last_stops else texts, left, fresh)

    # ---- conversations

    def render(self, conversations: Sequence[Conversation]) -> Rendered:
        """Render conversations that have been adapted to the template."""
        rendered = None if self._conversations is None else self._render_machine(self._conversations, conversations)
        if rendered is None:
            return self.render_reference(conversations)
        return self._finished(rendered)

    def render_reference(self, conversations: Sequence[Conversation], why: str = "") -> Rendered:
        """Render conversations with the reference only."""
        return self._finished(self._render_reference(conversations, why))

    def _render_reference(self, conversations: Sequence[Conversation], why: str) -> Rendered:
        rendered = self.reference.render(conversations, why or self.why_reference or "the reference was asked for")
        special = {k: t for k, c in enumerate(conversations) if (t := self.special_text.first(c)) is not None}
        for k in rendered.errors:
            special.pop(k, None)
        if self._with_turns:
            usual = [None if k in rendered.errors or c.texts is not None else c for k, c in enumerate(conversations)]
            rendered = replace(rendered, turns=self.reference.turns(usual))
        return replace(rendered, special=special, **_conversation_fields(conversations, rendered))

    def _render_machine(self, machine: CompiledTemplate, conversations: Sequence[Conversation]) -> Rendered:
        rows = [encoded(c) if c.texts is None else None for c in conversations]
        batch = (machine.render_turns if self._with_turns else machine.render)([row or b"" for row in rows])
        rendered = self._rendered(batch, conversations.__getitem__)
        left = [k for k, status in enumerate(batch.status) if status in _LEFT]
        if not left:
            return replace(rendered, **_conversation_fields(conversations, rendered))
        why = {k: _NOT_JSON if rows[k] is None else str(batch.reasons[k]) for k in left}
        served = self._render_reference([conversations[k] for k in left], "counted below")
        counted = Counter(
            why[k] for n, k in enumerate(left) if n not in served.errors and conversations[k].texts is None
        )
        served = replace(served, reference=counted)
        kept = [k for k in range(len(rows)) if k not in why]
        whole = merge([(_select(rendered, kept), kept), (served, left)], conversations.__getitem__)
        return replace(whole, **_conversation_fields(conversations, whole))

    # ---- records

    def _finished(self, rendered: Rendered) -> Rendered:
        """Hides uncertain regions, and appends stops."""
        if self.why_unknown:
            return rendered.without_regions()
        return self.last_stops(rendered) if self.last_stops else rendered

    def _rendered(self, batch: RenderedBatch, conversation: Callable[[int], Conversation]) -> Rendered:
        """Converts the machine's arrays; rows that were not rendered have an empty text."""
        ends = np.frombuffer(batch.ends, np.int64)
        starts = np.concatenate(([0], ends))[:-1]
        spans = np.frombuffer(batch.spans, np.int32).reshape(-1, len(SpanColumn))
        tags = np.frombuffer(batch.tags, np.int32).reshape(-1, len(TagColumn))
        span_rows, tag_rows = spans[:, SpanColumn.ROW], tags[:, TagColumn.ROW]
        span_base, tag_base = starts[span_rows].astype(np.int64), starts[tag_rows].astype(np.int64)
        flags = np.frombuffer(batch.row_flags, np.uint8)
        own_variables = (flags & RowFlag.OWN_VARIABLES.value) > 0
        found = np.frombuffer(batch.needles, np.int32)
        refused = (
            [k for k, status in enumerate(batch.status) if status == RowStatus.REFUSED] if any(batch.status) else []
        )
        errors: dict[int, RowError] = {k: template_refusal(str(batch.reasons[k])) for k in refused}
        return Rendered(
            data=batch.data,
            text_ends=ends,
            known=(flags & RowFlag.KNOWN.value) > 0,
            span_rows=span_rows,
            span_messages=spans[:, SpanColumn.MESSAGE],
            span_starts=span_base + spans[:, SpanColumn.START],
            span_ends=span_base + spans[:, SpanColumn.END],
            tag_rows=tag_rows,
            tag_starts=tag_base + tags[:, TagColumn.START],
            tag_ends=tag_base + tags[:, TagColumn.END],
            message_offsets=np.concatenate(([0], np.cumsum(np.frombuffer(batch.counts, np.int32), dtype=np.int64))),
            message_roles=np.frombuffer(batch.roles, np.uint8),
            message_flags=np.frombuffer(batch.flags, np.uint8),
            conversation=conversation,
            own_variables=own_variables if own_variables.any() else None,
            message_weights=np.frombuffer(batch.weights, np.float32) if batch.weights else None,
            special={k: self.special_text.needles[found[k]] for k in np.flatnonzero(found >= 0).tolist()},
            notes={note: np.flatnonzero(flags & bit) for note, bit in _NOTES.items() if (flags & bit).any()},
            errors=errors,
            fields=FieldRuns.of(np.frombuffer(batch.fields, np.int32).reshape(-1, len(FieldColumn)), starts),
            turns=Turns.of(*batch[-5:]) if self._with_turns else None,
        )


def _why_never(served: Rendered) -> str:
    """The most common reason why the machine gave up, if it served hardly any conversation."""
    gave_up, accepted = served.reference.total(), len(served.known) - len(served.errors)
    return served.reference.most_common(1)[0][0] if gave_up > 0.9 * accepted else ""


def _turn_markers(plain: Callable[..., str], added_tokens: Iterable[str]) -> set[str]:
    """The added tokens that the template prints around messages, except those around reasoning, which models write."""
    asked = [{"role": "user", "content": "⟦q⟧"}, {"role": "assistant", "content": "⟦a⟧"}] * 2
    try:
        text = plain(asked).rpartition("⟦q⟧")[0]
    except RowError:
        return set()
    return {token for token in added_tokens if token in text and "think" not in token}


def _select(rendered: Rendered, kept: list[int]) -> Rendered:
    """Keeps some of the conversations; the others must have neither text nor messages."""
    place = np.full(len(rendered.text_ends), -1, np.int64)
    place[kept] = np.arange(len(kept))
    numbers = place.tolist()
    counts = np.diff(rendered.message_offsets)[kept]
    variables = rendered.own_variables
    return replace(
        rendered,
        text_ends=rendered.text_ends[kept],
        known=rendered.known[kept],
        span_rows=place[rendered.span_rows].astype(np.int32),
        tag_rows=place[rendered.tag_rows].astype(np.int32),
        message_offsets=np.concatenate(([0], np.cumsum(counts))),
        own_variables=None if variables is None else variables[kept],
        special={numbers[k]: token for k, token in rendered.special.items()},
        notes={note: place[rows] for note, rows in rendered.notes.items()},
        errors={numbers[k]: error for k, error in rendered.errors.items()},
        turns=None if rendered.turns is None else rendered.turns.moved(place),
        fields=rendered.fields.moved(place, np.zeros(len(place), np.int64)),
    )


def _conversation_fields(conversations: Sequence[Conversation], rendered: Rendered) -> dict[str, Any]:
    """The fields of `Rendered` that come from conversations read in Python: weights, notes and `own_variables`."""
    weights = variables = None
    if any(c.weights for c in conversations):
        counts = np.diff(rendered.message_offsets).tolist()  # 0 for a conversation that the machine refused
        given = [(c.weights or (None,) * n)[:n] for c, n in zip(conversations, counts, strict=True)]
        weights = np.array([np.nan if w is None else w for own in given for w in own], np.float32)
    if any(c.variables for c in conversations):
        variables = np.array([bool(c.variables) for c in conversations])
    found: dict[Note, list[int]] = {}
    for k, conversation in enumerate(conversations):
        if k not in rendered.errors:
            for note in conversation.notes:
                found.setdefault(note, []).append(k)
    own = {note: np.array(rows, np.int64) for note, rows in found.items()}
    return {
        "message_weights": weights,
        "own_variables": variables,
        "notes": joined_notes(rendered.notes, own) if own else rendered.notes,
    }
