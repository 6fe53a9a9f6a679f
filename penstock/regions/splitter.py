"""Splits rendered conversations into segments; an assistant's region consists of header, body, stop and tail.

Every byte of a text lies in exactly one segment, only text printed by an assistant message is labelled as such, and a
row with uncertain headers has unknown regions rather than guessed ones. Markers inside messages have no effect: headers
are matched only at the start of a region, stops only at its end. Creating a splitter takes about 40 small renders, each
batch a few numpy passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from penstock.arrays import UInt8
from penstock.chat.conversation import Part, Role
from penstock.chat.notes import Note, joined_notes
from penstock.errors import RowError
from penstock.regions.calibrate import Engine, observe, render_probes
from penstock.regions.chain_labels import PromptEnds, labelled, with_answers
from penstock.regions.chains import Chains
from penstock.regions.cuts import Pieces, run_lengths, to_segments
from penstock.regions.dropped import find_dropped
from penstock.regions.headers import learn_headers
from penstock.regions.modes import RegionsMode as RegionsMode
from penstock.regions.segments import Segments
from penstock.regions.stops import StopFinder, learn_end_tokens, stops_answers
from penstock.regions.structure import HeaderFinder, structural_cuts
from penstock.regions.tagged import tagged_cuts
from penstock.template.rendered import Rendered

_NO_STOP = (
    "the template prints no stop token after a plain answer: the model can't learn to stop; "
    "--stop next-marker trains the token after the turn where the model's own end-of-sequence ids name it"
)
_NO_HEADERS = (
    "the template's assistant headers can't be told from what the assistant writes "
    "(it has no generation prompt, or refuses plain conversations): regions are unknown"
)


class Splitter:
    """Splits the rendered conversations of one recipe into segments."""

    warnings: tuple[str, ...]

    def __init__(
        self,
        engine: Engine,
        *,
        special_tokens: frozenset[str],
        eos_token: str | None,
        mode: RegionsMode,
        next_markers: Iterable[str] = (),
    ) -> None:
        self._tagged = mode is RegionsMode.AUTO and engine.has_generation
        probes = render_probes(engine)
        observations = observe(engine, probes)
        headers = learn_headers(observations, special_tokens)
        self._finder = HeaderFinder(engine, special_tokens, headers)
        self.boundaries = headers.boundaries
        self._has_headers = bool(headers.prompts)
        end_tokens = learn_end_tokens(observations, special_tokens, eos_token)
        self._stops = StopFinder(end_tokens)
        warnings = []
        if not headers.prompts and not self._tagged:
            warnings.append(_NO_HEADERS)
        self._next_markers = [marker.encode() for marker in next_markers]
        if observations and not self._next_markers and not stops_answers(observations, end_tokens):
            warnings.append(_NO_STOP)
        self.warnings = (*warnings, *(self._disagreements(probes.rendered) if self._tagged else ()))

    @property
    def is_tagged(self) -> bool:
        """Whether the template's own tags decide what is trained."""
        return self._tagged

    def split(self, rendered: Rendered) -> tuple[Segments, dict[int, RowError]]:
        """Cut a batch into segments; also returns errors for rows that must be refused."""
        pieces = _pieces(rendered)
        segments = self._segments(rendered, pieces, self._tagged)
        errors, dropped = find_dropped(rendered)
        return replace(segments, notes=joined_notes(segments.notes, dropped)), errors

    def split_chains(self, chains: Chains) -> tuple[Segments, dict[int, RowError]]:
        """Cut examples whose prompts and answers are known; errors are keyed by conversation."""
        rendered = chains.rendered
        if not self._has_headers and not self._tagged:
            rendered = rendered.without_regions()
        pieces = with_answers(_pieces(rendered), chains)
        if self._tagged:
            outcome = tagged_cuts(rendered, pieces, rendered.known, self._stops)
        else:
            finder = PromptEnds(chains, self._finder)
            outcome = structural_cuts(rendered, pieces, rendered.message_roles, finder, self._stops, self._next_markers)
        known = rendered.known.copy()
        known[list(outcome.lost)] = False
        found = {Note.SPAN_UNOWNED: outcome.lost, Note.NO_STOP: outcome.unstopped}
        notes = {note: np.array(sorted(rows), np.int64) for note, rows in found.items() if rows}
        segments = labelled(to_segments(outcome.cuts, rendered, known, {}), chains)
        errors, dropped = find_dropped(rendered)
        of_rows = {note: np.unique(chains.rows[rows]) for note, rows in joined_notes(notes, dropped).items()}
        segments = replace(segments, notes=joined_notes(of_rows, chains.notes))
        return segments, {int(chains.rows[example]): error for example, error in errors.items()}

    def _segments(self, rendered: Rendered, pieces: Pieces, tagged: bool) -> Segments:
        if tagged:
            outcome = tagged_cuts(rendered, pieces, rendered.known, self._stops)
        else:
            roles, markers = rendered.message_roles, self._next_markers
            outcome = structural_cuts(rendered, pieces, roles, self._finder, self._stops, markers)
        known, reason = rendered.known.copy(), Note.SPAN_UNOWNED if tagged else Note.HEADER_UNKNOWN
        known[list(outcome.lost)] = False
        found = {reason: outcome.lost, Note.NO_STOP: outcome.unstopped}
        notes = {note: np.array(sorted(rows), np.int64) for note, rows in found.items() if rows}
        return to_segments(outcome.cuts, rendered, known, notes)

    def _disagreements(self, rendered: Rendered) -> Iterator[str]:
        """Warnings about tags that disagree with the structure."""
        pieces = _pieces(rendered)
        structure = _byte_parts(self._segments(rendered, pieces, tagged=False))
        author = _byte_parts(self._segments(rendered, pieces, tagged=True))
        trained = (author == Part.BODY) | (author == Part.STOP)
        if (trained & (structure == Part.HEADER)).any():
            yield "the template's {% generation %} tags train a header; --regions structure leaves it out"
        if (~trained & (structure == Part.STOP)).any():
            yield "the template's {% generation %} tags leave the stop token out; --regions structure trains it"


def _pieces(rendered: Rendered) -> Pieces:
    """Adds the batch-wide number and the role of its message to each piece."""
    numbers = rendered.message_offsets[rendered.piece_rows] + rendered.piece_messages
    return Pieces(
        rendered.piece_rows,
        rendered.piece_messages,
        numbers,
        rendered.message_roles[numbers],
        rendered.piece_starts,
        rendered.piece_ends,
    )


def _byte_parts(segments: Segments) -> UInt8:
    """The part of every byte of assistant messages; GLUE for all other bytes."""
    parts = np.where(segments.roles == Role.ASSISTANT, segments.parts, np.uint8(Part.GLUE))
    return np.repeat(parts, run_lengths(segments))
