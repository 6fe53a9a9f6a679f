"""Cuts by the template's own `{% generation %}` blocks, byte for byte.

A span is the body (and stop) of the assistant message that owns most of it; text of that message before the span is
header, text after it is tail. The end of a span is inclusive, as in transformers. A row with a span that no assistant
message owns is lost. A batch takes a few numpy passes and one comparison at the end of each span.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.arrays import Bool, Int64
from penstock.chat.conversation import Part, Role
from penstock.regions.cuts import Cuts, PartCuts, Pieces
from penstock.regions.stops import StopFinder
from penstock.template.rendered import Rendered


class _Spans(NamedTuple):
    rows: Int64
    starts: Int64
    ends: Int64


def tagged_cuts(regions: Rendered, pieces: Pieces, known: Bool, stops: StopFinder) -> PartCuts:
    """Cuts at spans; a row with a span that no assistant message owns is lost."""
    spans = _disjoint(regions, known)
    owners = _owners(pieces, spans)
    lost = set(spans.rows[owners < 0].tolist())
    if lost:
        certain = known & ~np.isin(np.arange(len(known)), list(lost))
        pieces = pieces.take(np.flatnonzero(certain[pieces.rows]))
        return tagged_cuts(regions, pieces, certain, stops)._replace(lost=lost)
    stop = np.stack(stops.find(regions.data, spans.starts, spans.ends), axis=1)
    last_of_message = np.append(np.diff(pieces.numbers[owners]) != 0, np.ones(min(1, len(owners)), np.bool_))
    unstopped = set(spans.rows[(stop[:, 0] == stop[:, 1]) & last_of_message].tolist())
    return PartCuts(_label(regions, pieces, spans, owners, stop), lost, unstopped)


def _disjoint(regions: Rendered, known: Bool) -> _Spans:
    """The spans of known rows, in order, without empty ones and with nested ones merged."""
    keep = known[regions.span_rows] & (regions.span_ends > regions.span_starts)
    rows, starts, ends = regions.span_rows[keep].astype(np.int64), regions.span_starts[keep], regions.span_ends[keep]
    order = np.argsort(starts, kind="stable")
    rows, starts, ends = rows[order], starts[order], ends[order]
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    fresh = np.concatenate((np.ones(min(1, len(ends)), np.bool_), starts[1:] >= reach[:-1]))
    lasts = np.concatenate((np.flatnonzero(fresh)[1:] - 1, [len(ends) - 1])) if len(ends) else np.empty(0, np.int64)
    return _Spans(rows[fresh], starts[fresh], reach[lasts])


def _owners(pieces: Pieces, spans: _Spans) -> Int64:
    """The assistant piece with the most text in each span, or for a span of glue the preceding one; -1 if none."""
    first = np.searchsorted(pieces.ends, spans.starts, side="right")
    stop = np.searchsorted(pieces.starts, spans.ends, side="left")
    assistants = np.flatnonzero(pieces.roles == Role.ASSISTANT)
    owners = np.full(len(spans.starts), -1, np.int64)
    single = stop - first == 1
    owners[single] = np.where(pieces.roles[first[single]] == Role.ASSISTANT, first[single], -1)
    for index in np.flatnonzero(~single).tolist():
        low, high = int(first[index]), int(stop[index])
        if high > low:
            own = low + np.flatnonzero(pieces.roles[low:high] == Role.ASSISTANT)
            shared = np.minimum(pieces.ends[own], spans.ends[index]) - np.maximum(
                pieces.starts[own], spans.starts[index]
            )
            owners[index] = own[shared.argmax()] if len(own) else -1
        else:  # such as the end-of-sequence token after all messages
            before = int(np.searchsorted(assistants, low, side="left")) - 1
            if before >= 0 and pieces.rows[assistants[before]] == spans.rows[index]:
                owners[index] = assistants[before]
    return owners


def _label(regions: Rendered, pieces: Pieces, spans: _Spans, owners: Int64, stop: Int64) -> Cuts:
    """Cuts at spans, at their stops and at the edges of pieces outside spans, and labels the runs in between."""
    edges = np.concatenate((pieces.starts, pieces.ends))
    span = np.searchsorted(spans.starts, edges, side="left") - 1
    if len(spans.starts):
        edges = edges[(span < 0) | (edges >= spans.ends[span])]
    ends = np.unique(np.concatenate((edges, regions.text_ends, spans.starts, spans.ends, stop.ravel())))
    starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    span, inside = _covering(spans.starts, spans.ends, starts)
    piece, covered = _covering(pieces.starts, pieces.ends, starts)
    roles, messages = np.full(len(ends), Role.NONE, np.uint8), np.full(len(ends), -1, np.int32)
    parts = np.full(len(ends), Part.GLUE, np.uint8)
    roles[covered], messages[covered] = pieces.roles[piece[covered]], pieces.messages[piece[covered]]
    parts[covered] = Part.BODY
    outside = covered & (roles == Role.ASSISTANT) & ~inside
    if len(owners):
        numbers = pieces.numbers[owners]
        after = outside & (span >= 0) & (numbers[span] == pieces.numbers[np.maximum(piece, 0)])
        in_stop = inside & (stop[span, 0] <= starts) & (starts < stop[span, 1])
        roles[inside], messages[inside] = Role.ASSISTANT, pieces.messages[owners[span[inside]]]
        parts[inside], parts[in_stop] = Part.BODY, Part.STOP
        inclusive = inside & (ends == spans.ends[span])
    else:
        after, inclusive = np.zeros(len(ends), np.bool_), np.zeros(len(ends), np.bool_)
    parts[outside], parts[after] = Part.HEADER, Part.TAIL
    return Cuts(ends, roles, parts, messages, inclusive)


def _covering(starts: Int64, ends: Int64, points: Int64) -> tuple[Int64, Bool]:
    """The last interval that starts at or before each point (-1 if none), and whether it covers the point."""
    last = np.searchsorted(starts, points, side="right") - 1
    covered = (last >= 0) & (points < ends[last]) if len(starts) else np.zeros(len(points), np.bool_)
    return last, covered
