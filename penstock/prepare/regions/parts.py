"""Divides the bodies of assistant messages into parts: reasoning, content, calls, and what the template prints around.

Text that a field of the message printed gets the part of that field, text between fields is `markup`. Bodies keep their
bounds, so that the union of all parts is the body. The cost is a few numpy passes over the bodies and fields, and one
look-up for each gap between fields; equal gaps are divided once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64, UInt8
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.modes import ReasoningInContent, Straddle
from penstock.prepare.regions.calibrate import Renderer, render_probes
from penstock.prepare.regions.markup import Gap, Kind, Markup, markup_probes
from penstock.prepare.regions.segments import PART_OF_FIELD, TOOL, Bodies, Crossing, Segments, gathered
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.tracing.tracer import content_fields
from penstock.prepare.template.turns import FIELD_BITS, MARK_SHIFT, Field

_MARKUP = (Part.REASONING_MARKUP, Part.CALL_MARKUP, Part.EMPTY_REASONING, Part.MARKUP)
_EMPTY_BLOCK = re.compile(rb"(?:<think>)?\s*</think>")
_KIND_OF = {
    Part.REASONING: Kind.REASONING,
    Part.REASONING_MARKUP: Kind.REASONING,
    Part.EMPTY_REASONING: Kind.REASONING,
    Part.CONTENT: Kind.CONTENT,
    Part.CALL_NAME: Kind.CALL,
    Part.CALL_ARGUMENTS: Kind.ARGUMENTS,
    TOOL: Kind.TOOL,
}
_KINDS, _IS_MARKUP = np.zeros(256, np.uint8), np.zeros(256, np.bool_)  # by part
_KINDS[[*_KIND_OF]], _IS_MARKUP[[*_MARKUP]] = [*_KIND_OF.values()], True
_MAX_CACHED: Final = 1 << 14


class BodyDivider:
    """Divides the bodies of one template's answers into parts."""

    def __init__(
        self,
        header_of: Callable[[bytes], bytes],
        *,
        reasoning_in_content: ReasoningInContent = ReasoningInContent.AUTO,
        straddle: Straddle = Straddle.INSIDE,
    ) -> None:
        """`header_of` returns the header that opens a text, which a template's own tags may include in a body."""
        self._splits, self._straddle = reasoning_in_content is ReasoningInContent.SPLIT, straddle
        self._header_of = header_of
        self._divisions = _Divisions(Markup((), header_of))

    def learn(self, renderer: Renderer, segments_of: Callable[[Rendered], Segments]) -> None:
        """Learns what the template prints around reasoning and calls."""
        rendered = render_probes(renderer, conversations=markup_probes()).rendered
        bodies = Bodies.of(segments_of(rendered), rendered)
        gaps = _Gaps.of(bodies, self._fields(bodies, rendered))
        self._divisions = _Divisions(Markup(gaps.texts(rendered.data), self._header_of))

    def divide(self, segments: Segments, rendered: Rendered, bodies: Bodies) -> Segments:
        """The same segments, with some bodies divided into parts."""
        fields = self._fields(bodies, rendered)
        runs = _joined(fields, self._divisions.runs(_Gaps.of(bodies, fields), rendered.data))
        return self._inserted(segments, rendered, bodies, runs)

    def _fields(self, bodies: Bodies, rendered: Rendered) -> _Runs:
        """The fields inside of bodies."""
        runs = rendered.fields
        counts = bodies.field_counts
        at = np.arange(counts.sum()) + np.repeat(bodies.first_fields - (np.cumsum(counts) - counts), counts)
        of_body = np.repeat(np.arange(len(counts)), counts)
        labels = runs.labels[at]
        starts = np.maximum(runs.starts[at], bodies.starts[of_body])
        ends = np.minimum(runs.ends[at], bodies.ends[of_body])
        field = labels & FIELD_BITS
        parts = PART_OF_FIELD[field]
        thought = (field == Field.THOUGHT) | (field == Field.THINK_TAG)
        if thought.any():
            if self._splits:
                _mark_empty(rendered.data, starts, ends, parts, np.flatnonzero(thought))
            else:  # thoughts are content where the tags around them are
                tagged = np.unique(bodies.messages[of_body[field == Field.THINK_TAG]])
                parts[thought & np.isin(bodies.messages[of_body], tagged)] = Part.CONTENT
        return _Runs(of_body, starts, ends, parts, labels >> MARK_SHIFT)

    def _inserted(self, segments: Segments, rendered: Rendered, bodies: Bodies, runs: _Runs) -> Segments:
        """The segments with bodies replaced by their runs."""
        counts = np.ones(len(segments.ends), np.int64)
        counts[bodies.numbers] = np.bincount(runs.bodies, minlength=len(bodies.numbers))
        offsets = np.concatenate(([0], np.cumsum(counts)))
        at = np.arange(len(runs.bodies)) + np.repeat(
            offsets[bodies.numbers] - np.concatenate(([0], np.cumsum(counts[bodies.numbers])[:-1])),
            counts[bodies.numbers],
        )
        made = segments.picked(np.repeat(np.arange(len(counts)), counts), offsets[segments.offsets])
        is_last, of_tool = np.diff(runs.bodies, append=-1) != 0, runs.parts == TOOL
        made.ends[at] = runs.ends - bodies.text_starts[runs.bodies]
        made.parts[at] = np.where(of_tool, np.uint8(Part.BODY), runs.parts)
        made.roles[at[of_tool]] = Role.TOOL
        made.crossing[at[~is_last]] = self._crossings(runs)[~is_last]  # the last run keeps the body's own
        return self._weighted(made, rendered, bodies, runs, at) if runs.marks.any() else made

    def _crossings(self, runs: _Runs) -> UInt8:
        """To which side a token belongs that crosses the end of a run."""
        rule = crossings_of(runs.parts)
        after = np.append(runs.marks[1:], 0)
        border = runs.marks != after
        stays = (runs.marks == 0) if self._straddle is Straddle.INSIDE else (after == 0)
        rule[border] = np.where(stays[border], Crossing.NEXT, Crossing.LATER) | Crossing.ON_SPAN
        return rule

    def _weighted(self, made: Segments, rendered: Rendered, bodies: Bodies, runs: _Runs, at: Int64) -> Segments:
        """Multiplies the weights of messages by those of marked spans."""
        weights = made.some_weights().copy()
        for run in np.flatnonzero(runs.marks).tolist():
            body, place = runs.bodies[run], at[run]
            given = rendered.conversation(int(bodies.rows[body])).span_weights or ()
            weight = (given[int(bodies.places[body])] or ())[int(runs.marks[run]) - 1]
            weights[place] = weight if np.isnan(weights[place]) else weights[place] * weight
        return replace(made, weights=weights)


class _Runs(NamedTuple):
    """Runs of bodies, in order; places are absolute."""

    bodies: Int64  # the number of each run's body
    starts: Int64
    ends: Int64
    parts: UInt8  # `Part`, or `TOOL`
    marks: npt.NDArray[np.int32]  # number of the marked span; 0: none


class _Gaps(NamedTuple):
    """Texts of bodies that no field printed; places are absolute."""

    bodies: Int64
    starts: Int64
    ends: Int64
    contexts: Int64  # the kinds before and after, and whether it is the first text of its message's body

    @classmethod
    def of(cls, bodies: Bodies, fields: _Runs) -> _Gaps:
        count = len(bodies.numbers)
        of_body = np.concatenate((fields.bodies, np.arange(count)))
        order = np.argsort(of_body, kind="stable")  # the fields of each body, then its end
        of_body = of_body[order]
        ends = np.concatenate((fields.starts, bodies.ends))[order]
        after = np.concatenate((_KINDS[fields.parts], np.zeros(count, np.uint8)))[order].astype(np.int64)
        field_ends = np.concatenate((fields.ends, bodies.ends))[order]
        opens = np.diff(of_body, prepend=-1) > 0
        starts = np.where(opens, bodies.starts[of_body], np.concatenate(([0], field_ends[:-1]))[: len(opens)])
        before = np.where(opens, 0, np.concatenate(([0], after[:-1]))[: len(opens)])
        contexts = (before * len(Kind) + after) * 2 + (opens & bodies.is_first[of_body])
        at = np.flatnonzero(starts < ends)
        return cls(of_body[at], starts[at], ends[at], contexts[at])

    def texts(self, data: bytes) -> list[Gap]:
        """All gaps."""
        return [_gap(data[s:e], c) for s, e, c in zip(*(column.tolist() for column in self[1:]), strict=True)]


def _gap(text: bytes, context: int) -> Gap:
    kinds, is_first = divmod(context, 2)
    return Gap(text, Kind(kinds // len(Kind)), Kind(kinds % len(Kind)), bool(is_first))


class _Divisions:
    """How gaps are divided."""

    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        self._known: dict[tuple[bytes, int], int] = {}  # text and context -> number
        self._offsets, self._sizes, self._parts = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8)

    def runs(self, gaps: _Gaps, data: bytes) -> _Runs:
        """The runs of all gaps."""
        numbers = self._numbers(gaps, data)
        places, offsets = gathered(self._offsets, numbers)
        counts = np.diff(offsets)
        sizes = self._sizes[places]
        ends = np.cumsum(sizes)
        ends += np.repeat(gaps.starts - np.concatenate(([0], ends))[offsets[:-1]], counts)
        return _Runs(
            np.repeat(gaps.bodies, counts), ends - sizes, ends, self._parts[places], np.zeros(len(ends), np.int32)
        )

    def _numbers(self, gaps: _Gaps, data: bytes) -> Int64:
        if len(self._known) >= _MAX_CACHED:
            self._known, self._offsets, self._sizes = {}, self._offsets[:1], self._sizes[:0]
            self._parts = self._parts[:0]
        columns = zip(gaps.starts.tolist(), gaps.ends.tolist(), gaps.contexts.tolist(), strict=True)
        keys = [(data[start:end], context) for start, end, context in columns]
        known = self._known
        if new := [key for key in dict.fromkeys(keys) if key not in known]:
            divided = [self._markup.divide(_gap(*key)) for key in new]
            known.update(zip(new, range(len(known), len(known) + len(new)), strict=True))
            ends = self._offsets[-1] + np.cumsum([len(runs) for runs in divided])
            self._offsets = np.concatenate((self._offsets, ends))
            pairs = np.array([run for runs in divided for run in runs], np.int64).reshape(-1, 2)
            self._sizes = np.concatenate((self._sizes, pairs[:, 0]))
            self._parts = np.concatenate((self._parts, pairs[:, 1].astype(np.uint8)))
        return np.fromiter(map(known.__getitem__, keys), np.int64, len(keys))


def _joined(fields: _Runs, gaps: _Runs) -> _Runs:
    """All runs in order. Neighbours of the same part and mark become one, with the start of the last of them."""
    order = np.argsort(np.concatenate((fields.starts, gaps.starts)), kind="stable")
    pairs: Iterable[tuple[Any, Any]] = zip(fields, gaps, strict=True)
    runs = _Runs(*(np.concatenate(pair)[order] for pair in pairs))
    differs = (np.diff(runs.bodies) != 0) | (np.diff(runs.parts) != 0) | (np.diff(runs.marks) != 0)
    return _Runs(*(column[np.append(differs, True)] for column in runs))


def _mark_empty(data: bytes, starts: Int64, ends: Int64, parts: UInt8, thoughts: Int64) -> None:
    """Labels blocks without text as empty reasoning."""
    apart = np.flatnonzero(starts[thoughts[1:]] != ends[thoughts[:-1]]) + 1
    for block in np.split(thoughts, apart):
        if _EMPTY_BLOCK.fullmatch(data, starts[block[0]], ends[block[-1]]):
            parts[block] = Part.EMPTY_REASONING


# ---- texts without a template


def parts_of_text(text: str, mode: ReasoningInContent) -> list[tuple[int, Part]]:
    """The parts of an assistant's text, and how many bytes each has."""
    if mode is not ReasoningInContent.SPLIT:
        return [(len(text.encode()), Part.CONTENT)]
    fields = content_fields(text)
    starts = [0, *(end for end, _ in fields)]
    parts = [int(PART_OF_FIELD[field]) for _, field in fields]
    for k, (end, field) in enumerate(fields):
        if field is Field.THOUGHT and not text[starts[k] : end].strip():
            for near in range(max(0, k - 1), k + 2):
                parts[near] = Part.EMPTY_REASONING if fields[near][1] is not Field.CONTENT else parts[near]
    found: list[tuple[int, Part]] = []
    for part, group in groupby(zip(parts, starts, starts[1:], strict=False), key=itemgetter(0)):
        size = sum(len(text[start:end].encode()) for _, start, end in group)
        found += [(size, Part(part))] if size else []
    return found


def crossings_of(parts: npt.NDArray[Any]) -> UInt8:
    """Which of two consecutive parts gets a token that crosses their border: fields before markup, else the later."""
    markup = _IS_MARKUP[parts]
    following = np.concatenate((markup[1:], [False]))
    return np.where(following & ~markup, Crossing.NEXT, Crossing.LATER).astype(np.uint8)
