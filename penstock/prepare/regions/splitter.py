"""Splits rendered conversations into segments; an assistant's region consists of header, body, stop and tail. `parts`
then divides the bodies.

Every byte of a text lies in exactly one segment, only text printed by an assistant message is labelled as such, and a
row with uncertain headers has unknown regions rather than guessed ones. Markers inside messages have no effect: headers
are matched only at the start of a region, stops only at its end. Creating a splitter takes about 40 small renders, each
batch a few numpy passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from penstock.arrays import Bool, UInt8
from penstock.errors import RowError
from penstock.prepare.chat.conversation import Message, Part, Role
from penstock.prepare.chat.notes import Note
from penstock.prepare.modes import ReasoningInContent, RegionsMode, Straddle
from penstock.prepare.regions.calibrate import (
    ProbeRenders,
    Renderer,
    foreign_literals,
    literals_of_others,
    observe,
    render_probes,
)
from penstock.prepare.regions.dropped import find_dropped
from penstock.prepare.regions.headers import Boundaries, StopFinder, learn_end_tokens, learn_headers, stops_answers
from penstock.prepare.regions.last_stops import LastStops, token_after_every_answer
from penstock.prepare.regions.markers import learn_markers
from penstock.prepare.regions.parts import BodyDivider
from penstock.prepare.regions.segments import Bodies, Segments, Spans, run_lengths, to_segments
from penstock.prepare.regions.structure import Finder, HeaderFinder, structural_cuts, tagged_cuts
from penstock.prepare.template.printed import MessageFlag
from penstock.prepare.template.rendered import Rendered

_NO_STOP = (
    "the template prints no stop token after a plain answer: the model can't learn to stop; "
    "--stop next_marker trains the token after the turn where the model's own end-of-sequence ids name it, "
    "--stop append also ends the last answer of a row with it"
)
_STOP_OUTSIDE = (
    "the template prints {} after every answer, but not as a part of it, so it is not trained and the model can't "
    "learn to stop; --stop next_marker trains it if it is one of the model's own end-of-sequence ids"
)
_NOTHING_TO_APPEND = (
    "--stop append: none of the model's own end-of-sequence tokens follows the answers of this template, so none is "
    "appended"
)


class Splitter:
    """Splits the rendered conversations of one recipe into segments."""

    warnings: tuple[str, ...]

    def __init__(
        self,
        renderer: Renderer,
        *,
        special_tokens: frozenset[str],
        eos_token: str | None,
        mode: RegionsMode,
        reasoning_in_content: ReasoningInContent = ReasoningInContent.AUTO,
        straddle: Straddle = Straddle.INSIDE,
        next_markers: Iterable[str] = (),
        appends_stops: bool = False,
        only_last: bool = False,
        why_unknown: str = "",
    ) -> None:
        """`only_last`: only the last answers of conversations are meant to be trained."""
        self._only_last = only_last
        self._tagged = mode is RegionsMode.AUTO and renderer.has_generation
        probes = render_probes(renderer)
        observations = observe(renderer, probes)
        self.boundaries = Boundaries(special_tokens)
        literals = literals_of_others(probes), foreign_literals(renderer)
        self._markers = learn_markers(observations, *literals, self.boundaries.markers)
        headers = learn_headers(observations, self.boundaries, self._markers)
        self._finder = HeaderFinder(renderer, headers)
        self._has_headers = bool(headers.prompts)
        end_tokens = learn_end_tokens(observations, special_tokens, eos_token)
        self._stops = StopFinder(end_tokens)
        warnings = []
        if why_unknown or (not headers.prompts and not self._tagged):
            warnings.append(f"regions are unknown: {why_unknown or _why_no_headers(renderer, probes)}")
        self._next_markers = [marker.encode() for marker in next_markers]
        if observations and not self._next_markers and not stops_answers(observations, end_tokens):
            outside = token_after_every_answer(probes, special_tokens)
            warnings.append(_STOP_OUTSIDE.format(outside) if outside else _NO_STOP)
        self.last_stops = LastStops(probes, self._next_markers) if appends_stops and not self._tagged else None
        if appends_stops and not self.last_stops:
            warnings.append(_NOTHING_TO_APPEND)
        self.warnings = (*warnings, *(self._disagreements(probes.rendered) if self._tagged else ()))
        self._divider = BodyDivider(headers.opening, reasoning_in_content=reasoning_in_content, straddle=straddle)
        self._divider.learn(renderer, lambda rendered: self.cut(rendered, spans_of(rendered), self._finder))

    @property
    def is_tagged(self) -> bool:
        """Whether the template's own tags decide what is trained."""
        return self._tagged

    def split(self, rendered: Rendered) -> tuple[Segments, dict[int, RowError]]:
        """Cut a batch into segments; also returns errors for rows that must be refused."""
        spans = spans_of(rendered)
        segments = self.divide(self.cut(rendered, spans, self._finder), rendered)
        errors, dropped = find_dropped(rendered)
        unlike = self._finder.unlike_inference(rendered, spans, only_last=self._only_last)
        unlike = unlike[segments.known[unlike]]
        differs = {Note.PROMPT_DIFFERS: unlike} if len(unlike) else {}
        return replace(segments, notes={**segments.notes, **dropped, **differs}), errors

    @property
    def has_regions(self) -> bool:
        """Whether the assistant's words can be told from the rest."""
        return self._has_headers or self._tagged

    @property
    def finder(self) -> HeaderFinder:
        """Finds headers in rendered text."""
        return self._finder

    def cut(
        self,
        rendered: Rendered,
        spans: Spans,
        finder: Finder,
        context: Bool | None = None,
        *,
        tagged: bool | None = None,
    ) -> Segments:
        """Segments with their notes; `finder` finds headers, and messages marked in `context` are not trained.

        `tagged` overrides whether the template's own tags decide.
        """
        tagged = self._tagged if tagged is None else tagged
        if tagged:
            outcome = tagged_cuts(rendered, spans, rendered.known, self._stops)
        else:
            markers = self._markers, self._next_markers
            roles = rendered.message_roles
            outcome = structural_cuts(rendered, spans, roles, finder, self._stops, *markers, context)
        known, reason = rendered.known.copy(), Note.SPAN_UNOWNED if tagged else Note.HEADER_UNKNOWN
        known[list(outcome.lost)] = False
        found = {reason: outcome.lost, Note.NO_STOP: outcome.unstopped}
        notes = {note: np.array(sorted(rows), np.int64) for note, rows in found.items() if rows}
        return to_segments(outcome.cuts, rendered, known, notes)

    def divide(self, segments: Segments, rendered: Rendered) -> Segments:
        """Divides the bodies of assistants into parts."""
        bodies = Bodies.of(segments, rendered)
        whole = bodies.parts != Part.GLUE
        parts = segments.parts.copy()
        parts[bodies.numbers[whole]] = bodies.parts[whole]
        segments = replace(segments, parts=parts)
        return segments if whole.all() else self._divider.divide(segments, rendered, bodies.taken(~whole))

    def _disagreements(self, rendered: Rendered) -> Iterator[str]:
        """Warnings about tags that disagree with the structure."""
        spans = spans_of(rendered)
        structure = _byte_parts(self.cut(rendered, spans, self._finder, tagged=False))
        author = _byte_parts(self.cut(rendered, spans, self._finder, tagged=True))
        trained = (author == Part.BODY) | (author == Part.STOP)
        visible = np.frombuffer(rendered.data, np.uint8) > ord(" ")
        calling = (rendered.message_flags & MessageFlag.HAS_CALLS) > 0
        of_calls = np.zeros(len(visible), np.bool_)
        for start, end in zip(spans.starts[calling[spans.numbers]], spans.ends[calling[spans.numbers]], strict=True):
            of_calls[start:end] = True
        if (~trained & visible & of_calls & (structure == Part.BODY)).any():
            yield "the template's {% generation %} tags leave tool calls out; --regions structure trains them"
        if (trained & (structure == Part.HEADER)).any():
            yield "the template's {% generation %} tags train a header; --regions structure leaves it out"
        if (~trained & (structure == Part.STOP)).any():
            yield "the template's {% generation %} tags leave the stop token out; --regions structure trains it"


def _why_no_headers(renderer: Renderer, probes: ProbeRenders) -> str:
    """Why a template's headers can't be found."""
    asked: list[Message] = [{"role": "user", "content": "q"}]
    try:
        without, prompt = renderer.plain(asked), renderer.plain(asked, add_generation_prompt=True)
    except RowError as error:
        return f"{error.reason}, as it does with every conversation that Penstock tried"
    if not probes.conversations:
        return "the template refuses every conversation that Penstock tried"
    if without == prompt:
        return "the template has no generation prompt, so headers can't be told from what the assistant writes"
    return (
        "the template does not begin answers with its generation prompt, so their headers can't be told from the text"
    )


def spans_of(rendered: Rendered) -> Spans:
    """Adds the batch-wide number and the role of its message to each span."""
    numbers = rendered.message_offsets[rendered.span_rows] + rendered.span_messages
    return Spans(
        rendered.span_rows,
        rendered.span_messages,
        numbers,
        rendered.message_roles[numbers],
        rendered.span_starts,
        rendered.span_ends,
    )


def _byte_parts(segments: Segments) -> UInt8:
    """The part of every byte of assistant messages; GLUE for all other bytes."""
    parts = np.where(segments.roles == Role.ASSISTANT, segments.parts, np.uint8(Part.GLUE))
    return np.repeat(parts, run_lengths(segments))
