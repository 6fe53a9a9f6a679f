"""Parts of a region: header, body, stop and tail. Rendered conversations become segments here.

Enters: conversations and their `Regions`. Leaves: `Segments`, and an error for each row whose tool calls the template
drops. Guarantees that every byte of a text lies in exactly one segment, that only what an assistant message printed is
labelled as an assistant's, and that a row whose headers are not certain has unknown regions rather than guessed ones.
Markers inside messages change nothing: headers are looked for only at a region's start, stops only at its end.
Costs calibration once (some 40 small renders), then a few microseconds a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.chat.calibrate import Engine, Rendered, observe, render_probes
from penstock.chat.conversation import Conversation, Part, Role
from penstock.chat.cuts import Pieces, run_lengths, to_segments
from penstock.chat.dropped import Facts, find_dropped, read_facts
from penstock.chat.headers import learn_headers
from penstock.chat.modes import RegionsMode as RegionsMode
from penstock.chat.regions import Regions, Segments, UInt8
from penstock.chat.stops import StopFinder, learn_end_tokens, stops_answers
from penstock.chat.structure import HeaderFinder, structural_cuts
from penstock.chat.tagged import tagged_cuts
from penstock.errors import RowError

_NO_STOP = "the template prints no stop token after a plain answer: the model can't learn to stop"
_NO_HEADERS = (
    "the template's assistant headers can't be told from what the assistant writes "
    "(it has no generation prompt, or refuses plain conversations): regions are unknown"
)


class Splitter:
    """Splits the regions of one recipe's conversations into parts."""

    warnings: tuple[str, ...]

    def __init__(
        self, engine: Engine, *, special_tokens: frozenset[str], eos_token: str | None, mode: RegionsMode
    ) -> None:
        self._tagged = mode is RegionsMode.AUTO and engine.has_generation
        rendered = render_probes(engine)
        observations = observe(engine, rendered)
        headers = learn_headers(observations, special_tokens)
        self._finder = HeaderFinder(engine, special_tokens, headers)
        end_tokens = learn_end_tokens(observations, special_tokens, eos_token)
        self._stops = StopFinder(end_tokens)
        warnings = []
        if not headers.prompts and not self._tagged:
            warnings.append(_NO_HEADERS)
        if observations and not stops_answers(observations, end_tokens):
            warnings.append(_NO_STOP)
        self.warnings = (*warnings, *(self._doubts(rendered) if self._tagged else ()))

    @property
    def is_tagged(self) -> bool:
        """Whether the author's tags decide what is trained."""
        return self._tagged

    def settles(self, previous: Role, opening: bytes, header: bytes, ending: bytes) -> bool:
        """Whether every answer that begins and ends like this has this header, and a stop that lies in its ending."""
        return self._finder.settles(previous, opening, header) and self._stops.settles(ending)

    def split(self, conversations: Sequence[Conversation], regions: Regions) -> tuple[Segments, dict[int, RowError]]:
        """Cut a batch into segments; rows that must be refused are in the second value."""
        facts = read_facts(conversations)
        pieces = _pieces(regions, facts)
        segments = self._segments(conversations, regions, facts, pieces, self._tagged)
        errors, dropped = find_dropped(conversations, regions, facts, pieces, segments)
        segments.notes.update(dropped)
        return segments, errors

    def _segments(
        self, conversations: Sequence[Conversation], regions: Regions, facts: Facts, pieces: Pieces, tagged: bool
    ) -> Segments:
        if tagged:
            outcome = tagged_cuts(regions, pieces, regions.known, self._stops)
        else:
            outcome = structural_cuts(conversations, regions, pieces, facts.roles, self._finder, self._stops)
        known, reason = regions.known.copy(), "span_unowned" if tagged else "header_unknown"
        known[list(outcome.lost)] = False
        notes = +Counter({reason: len(outcome.lost), "no_stop": len(outcome.silent)})
        return to_segments(outcome.cuts, regions, known, notes)

    def _doubts(self, rendered: Rendered) -> Iterator[str]:
        """Where the author's tags disagree with the structure."""
        conversations, regions = rendered
        facts = read_facts(conversations)
        pieces = _pieces(regions, facts)
        structure = _byte_parts(self._segments(conversations, regions, facts, pieces, tagged=False))
        author = _byte_parts(self._segments(conversations, regions, facts, pieces, tagged=True))
        trained = (author == Part.BODY) | (author == Part.STOP)
        if (trained & (structure == Part.HEADER)).any():
            yield "the template's {% generation %} tags train a header; --regions structure leaves it out"
        if (~trained & (structure == Part.STOP)).any():
            yield "the template's {% generation %} tags leave the stop token out; --regions structure trains it"


def _pieces(regions: Regions, facts: Facts) -> Pieces:
    """The pieces with the numbers and roles of their messages in the batch."""
    numbers = facts.offsets[regions.piece_rows] + regions.piece_messages
    roles = facts.roles[numbers]
    return Pieces(regions.piece_rows, regions.piece_messages, numbers, roles, regions.piece_starts, regions.piece_ends)


def _byte_parts(segments: Segments) -> UInt8:
    """The part of every byte of an assistant's, GLUE for all else."""
    parts = np.where(segments.roles == Role.ASSISTANT, segments.parts, np.uint8(Part.GLUE))
    return np.repeat(parts, run_lengths(segments))
