"""Cuts assistant regions by structure: header, body, stop and tail.

Headers come from tables learned at calibration, stops from the template's end tokens. Rows with an uncertain header are
cut as if they had no spans. Each assistant message takes two short comparisons; if no table determines its header, its
prompt is rendered, up to 16 times per row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.arrays import Bool, Int64, UInt8
from penstock.errors import RowError
from penstock.prepare.chat.conversation import Conversation, Part, Role
from penstock.prepare.regions.calibrate import Renderer, observe, render_probes
from penstock.prepare.regions.headers import Headers, StopFinder, begins_with, learn_headers
from penstock.prepare.regions.markers import TurnMarkers
from penstock.prepare.regions.segments import Crossing, Cuts, PartCuts, Spans
from penstock.prepare.template.rendered import Rendered

_MAX_PROMPTS_PER_ROW = 16  # bounds the renders for a long conversation
_OWN_VARIABLES = len(Role)  # context of rows with their own template variables, which the table lacks
_MAX_TABLES = 256
_ASKING = (Role.SYSTEM, Role.USER, Role.TOOL)  # after which inference asks for an answer
_RUNS = np.array([Part.GLUE, Part.HEADER, Part.BODY, Part.STOP, Part.TAIL], np.uint8)


class HeaderFinder:
    """Finds where the headers of assistant messages end."""

    def __init__(self, renderer: Renderer, headers: Headers) -> None:
        self._renderer, self._headers = renderer, headers
        self._candidates = [*(headers.candidates(role) for role in Role), ()]
        unlike = {role: headers.prompts_unlike_headers(role) for role in _ASKING}
        self._at_inference = {role: prompts for role, prompts in unlike.items() if prompts}
        self._tables: dict[str, Headers] = {}

    def find(self, regions: Rendered, opening: Spans, previous: UInt8) -> tuple[Int64, set[int]]:
        """Where each assistant message's header ends, given its first span, and the rows where that is uncertain."""
        contexts = previous.copy()
        if regions.own_variables is not None:
            contexts[regions.own_variables[opening.rows]] = _OWN_VARIABLES
        text = np.frombuffer(regions.data, np.uint8)
        found = opening.starts.copy()
        unresolved: list[int] = []
        for context in np.flatnonzero(np.bincount(contexts)).tolist():
            left = np.flatnonzero(contexts == context)
            for candidate in self._candidates[context]:
                if not len(left):
                    break
                begins = begins_with(text, opening.starts[left], opening.ends[left], candidate)
                found[left[begins]] += len(candidate)
                left = left[~begins]
            unresolved += left.tolist()
        lost: set[int] = set()
        rendered_prompts: Counter[int] = Counter()
        for index in sorted(unresolved):
            row = int(opening.rows[index])
            if row not in lost:
                role = Role(int(previous[index]))
                own = self._resolve(regions.conversation(row), regions, opening, index, role, rendered_prompts)
                if own is None:
                    lost.add(row)
                else:
                    found[index] += len(own)
        return found, lost

    def unlike_inference(self, regions: Rendered, spans: Spans, *, only_last: bool) -> Int64:
        """Rows with an answer, or a last one, that begins with none of the prompts inference shows in its context.

        Free of charge where a template begins all answers with its generation prompt.
        """
        if not self._at_inference and regions.own_variables is None:
            return np.empty(0, np.int64)
        opening = spans.take(_first_and_last(spans, len(regions.message_roles))[0])
        if only_last:
            opening = opening.take(np.flatnonzero(np.diff(opening.rows, append=-1)))
        if regions.message_weights is not None:
            opening = opening.take(np.flatnonzero(regions.message_weights[opening.numbers] != 0))
        previous = _previous_roles(opening, regions.message_roles)
        text, found = np.frombuffer(regions.data, np.uint8), np.zeros(len(previous), np.bool_)
        own = found.copy() if regions.own_variables is None else regions.own_variables[opening.rows]
        for role, prompts in self._at_inference.items():
            left = np.flatnonzero((previous == role) & ~own)
            for prompt in prompts:
                left = left[~begins_with(text, opening.starts[left], opening.ends[left], prompt)]
            found[left] = True
        for index in np.flatnonzero(own & np.isin(previous, _ASKING)).tolist():
            table = self._table(regions.conversation(int(opening.rows[index])))
            prompts = table.prompts_unlike_headers(Role(int(previous[index])))
            start, end = int(opening.starts[index]), int(opening.ends[index])
            found[index] = bool(prompts) and not regions.data[start:end].startswith(prompts)
        return np.unique(opening.rows[found]).astype(np.int64)

    def find_repeated(self, data: bytes, later: Spans) -> Int64:
        """Where a repeated header ends in later spans of messages."""
        ends = zip(later.starts.tolist(), later.ends.tolist(), strict=True)
        return np.array([start + len(self._headers.opening(data[start:end])) for start, end in ends], np.int64)

    def _resolve(
        self,
        conversation: Conversation,
        regions: Rendered,
        opening: Spans,
        index: int,
        previous: Role,
        rendered_prompts: Counter[int],
    ) -> bytes | None:
        """Determines the header of one region from the row's own table, or by rendering its prompt."""
        headers = self._table(conversation)
        row, start, end = int(opening.rows[index]), int(opening.starts[index]), int(opening.ends[index])
        region = regions.data[start:end]
        agreed = headers.agreed(previous, region)
        if agreed is not None or not headers.prompts:
            return agreed
        rendered_prompts[row] += 1
        if rendered_prompts[row] > _MAX_PROMPTS_PER_ROW:
            return None
        before = conversation.messages[: int(opening.messages[index])]
        try:
            text = self._renderer.plain(before, conversation.tools, conversation.variables, add_generation_prompt=True)
        except RowError:
            return headers.for_any_context(region)
        prompt, low = text.encode(), int(regions.text_ends[row - 1]) if row else 0
        if prompt.startswith(regions.data[low:start]):
            return headers.for_prompt(prompt[start - low :], region)
        if regions.data.startswith(prompt, low, end):
            return headers.for_empty_prompt(region)
        return headers.for_prompt_suffix(prompt, region)

    def _table(self, conversation: Conversation) -> Headers:
        """The table for a row's own variables. It depends on nothing else, so caching affects only speed."""
        if not conversation.variables:
            return self._headers
        key = json.dumps(conversation.variables, sort_keys=True, default=repr)
        if key not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            rendered = render_probes(self._renderer, conversation.variables)
            seen, known = observe(self._renderer, rendered), self._headers
            self._tables[key] = learn_headers(seen, known.boundaries, known.markers)
        return self._tables[key]


class Finder(Protocol):
    """Finds where the headers of assistant messages end."""

    def find(self, regions: Rendered, opening: Spans, previous: UInt8) -> tuple[Int64, set[int]]: ...
    def find_repeated(self, data: bytes, later: Spans) -> Int64: ...


def structural_cuts(
    regions: Rendered,
    spans: Spans,
    roles: UInt8,
    finder: Finder,
    stops: StopFinder,
    markers: TurnMarkers,
    next_markers: Sequence[bytes] = (),
    context: Bool | None = None,
) -> PartCuts:
    """Cuts at headers and stops; `roles` are the roles of all messages of the batch.

    Rows with a body that holds a turn marker are lost, unless its message is only `context`. If a turn has no stop,
    one of `next_markers` that follows it counts as its stop.
    """
    opens, closes = _first_and_last(spans, len(roles))
    opening = spans.take(opens)
    header_ends, lost = finder.find(regions, opening, _previous_roles(opening, roles))
    bodies = spans.starts.copy()
    bodies[opens] = header_ends
    repeated = spans.roles == Role.ASSISTANT
    repeated[opens] = False
    later = np.flatnonzero(repeated)
    bodies[later] = finder.find_repeated(regions.data, spans.take(later))
    stop_starts, stop_ends = spans.ends.copy(), spans.ends.copy()
    stop_starts[closes], stop_ends[closes] = stops.find(regions.data, bodies[closes], spans.ends[closes])
    trained = spans.roles == Role.ASSISTANT
    if context is not None:
        trained &= ~context[spans.numbers]
    lost |= markers.uncertain_rows(regions, spans, np.flatnonzero(trained), bodies, stop_starts)
    if lost:
        certain = ~np.isin(spans.rows, list(lost))
        spans, bodies = spans.take(np.flatnonzero(certain)), bodies[certain]
        stop_starts, stop_ends = stop_starts[certain], stop_ends[certain]
        _, closes = _first_and_last(spans, len(roles))
    if next_markers:
        open_ended = closes[stop_starts[closes] == stop_ends[closes]]
        spans, bodies, stop_ends = _extend_to_markers(regions, spans, bodies, stop_ends, open_ended, next_markers)
    unstopped = set(spans.rows[closes][stop_starts[closes] == stop_ends[closes]].tolist())
    return PartCuts(_interleave(regions, spans, bodies, stop_starts, stop_ends), lost, unstopped)


def _extend_to_markers(
    regions: Rendered, spans: Spans, bodies: Int64, stop_ends: Int64, closes: Int64, markers: Sequence[bytes]
) -> tuple[Spans, Int64, Int64]:
    """Extends turns without a stop over the marker that follows, taking it from the text after them."""
    starts, ends, bodies, stop_ends = spans.starts.copy(), spans.ends.copy(), bodies.copy(), stop_ends.copy()
    limits = regions.text_ends[spans.rows]
    for index in closes.tolist():
        end = int(ends[index])
        size = max((len(m) for m in markers if regions.data.startswith(m, end, int(limits[index]))), default=0)
        follows = index + 1 < len(starts) and starts[index + 1] < end + size
        if not size or (follows and ends[index + 1] < end + size):
            continue
        ends[index] = stop_ends[index] = end + size
        if follows:
            starts[index + 1] = end + size
            bodies[index + 1] = max(bodies[index + 1], end + size)
    return spans._replace(starts=starts, ends=ends), bodies, stop_ends


def _previous_roles(opening: Spans, roles: UInt8) -> UInt8:
    """The roles of the messages before those of some spans."""
    return np.where(opening.messages > 0, roles[opening.numbers - 1], np.uint8(Role.NONE))


def _first_and_last(spans: Spans, messages: int) -> tuple[Int64, Int64]:
    """The first and the last span of each assistant message, in text order."""
    own = np.flatnonzero(spans.roles == Role.ASSISTANT)
    first, last = np.full(messages, -1, np.int64), np.full(messages, -1, np.int64)
    first[spans.numbers[own][::-1]] = own[::-1]
    last[spans.numbers[own]] = own
    return own[first[spans.numbers[own]] == own], own[last[spans.numbers[own]] == own]


def _interleave(regions: Rendered, spans: Spans, bodies: Int64, stop_starts: Int64, stop_ends: Int64) -> Cuts:
    """Five runs per span (preceding glue, header, body, stop, tail), and the glue at the end of each text."""
    rows = len(regions.text_ends)
    total = 5 * len(spans.rows) + rows
    tails = 5 * np.searchsorted(spans.rows, np.arange(rows), side="right") + np.arange(rows)
    of_spans = np.ones(total, np.bool_)
    of_spans[tails] = False
    ends, messages = np.empty(total, np.int64), np.full(total, -1, np.int32)
    roles, parts = np.full(total, Role.NONE, np.uint8), np.full(total, Part.GLUE, np.uint8)
    ends[tails] = regions.text_ends
    ends[of_spans] = np.stack((spans.starts, bodies, stop_starts, stop_ends, spans.ends), axis=1).ravel()
    glue = np.array([True, False, False, False, False])
    roles[of_spans] = np.where(glue, np.uint8(Role.NONE), spans.roles[:, None]).ravel()
    messages[of_spans] = np.where(glue, np.int32(-1), spans.messages[:, None]).ravel()
    parts[of_spans] = np.tile(_RUNS, len(bodies))
    return Cuts(ends, roles, parts, messages, np.zeros(total, np.uint8))


# ---- cuts by the template's own `{% generation %}` blocks, called tags here
#
# A tag is the body (and stop) of the assistant message that owns most of it; text of that message before the tag is
# header, text after it is tail. A token that crosses the end of a tag belongs to it, as in transformers. A row with a
# tag that no assistant message owns is lost. A batch takes a few numpy passes and one comparison per tag.


class _Tags(NamedTuple):
    rows: Int64
    starts: Int64
    ends: Int64


def tagged_cuts(regions: Rendered, spans: Spans, known: Bool, stops: StopFinder) -> PartCuts:
    """Cuts at tags; a row with a tag that no assistant message owns is lost."""
    tags = _disjoint(regions, known)
    owners = _owners(spans, tags)
    lost = set(tags.rows[owners < 0].tolist())
    if lost:
        certain = known & ~np.isin(np.arange(len(known)), list(lost))
        spans = spans.take(np.flatnonzero(certain[spans.rows]))
        return tagged_cuts(regions, spans, certain, stops)._replace(lost=lost)
    stop = np.stack(stops.find(regions.data, tags.starts, tags.ends), axis=1)
    last_of_message = np.append(np.diff(spans.numbers[owners]) != 0, np.ones(min(1, len(owners)), np.bool_))
    unstopped = set(tags.rows[(stop[:, 0] == stop[:, 1]) & last_of_message].tolist())
    return PartCuts(_label(regions, spans, tags, owners, stop), lost, unstopped)


def _disjoint(regions: Rendered, known: Bool) -> _Tags:
    """The tags of known rows, in order, without empty ones and with nested ones merged."""
    keep = known[regions.tag_rows] & (regions.tag_ends > regions.tag_starts)
    rows, starts, ends = regions.tag_rows[keep].astype(np.int64), regions.tag_starts[keep], regions.tag_ends[keep]
    order = np.argsort(starts, kind="stable")
    rows, starts, ends = rows[order], starts[order], ends[order]
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    fresh = np.concatenate((np.ones(min(1, len(ends)), np.bool_), starts[1:] >= reach[:-1]))
    lasts = np.concatenate((np.flatnonzero(fresh)[1:] - 1, [len(ends) - 1])) if len(ends) else np.empty(0, np.int64)
    return _Tags(rows[fresh], starts[fresh], reach[lasts])


def _owners(spans: Spans, tags: _Tags) -> Int64:
    """The assistant span with the most text in each tag, or for a tag of glue the preceding one; -1 if none."""
    first = np.searchsorted(spans.ends, tags.starts, side="right")
    stop = np.searchsorted(spans.starts, tags.ends, side="left")
    assistants = np.flatnonzero(spans.roles == Role.ASSISTANT)
    owners = np.full(len(tags.starts), -1, np.int64)
    single = stop - first == 1
    owners[single] = np.where(spans.roles[first[single]] == Role.ASSISTANT, first[single], -1)
    for index in np.flatnonzero(~single).tolist():
        low, high = int(first[index]), int(stop[index])
        if high > low:
            own = low + np.flatnonzero(spans.roles[low:high] == Role.ASSISTANT)
            shared = np.minimum(spans.ends[own], tags.ends[index]) - np.maximum(spans.starts[own], tags.starts[index])
            owners[index] = own[shared.argmax()] if len(own) else -1
        else:  # such as the end-of-sequence token after all messages
            before = int(np.searchsorted(assistants, low, side="left")) - 1
            if before >= 0 and spans.rows[assistants[before]] == tags.rows[index]:
                owners[index] = assistants[before]
    return owners


def _label(regions: Rendered, spans: Spans, tags: _Tags, owners: Int64, stop: Int64) -> Cuts:
    """Cuts at tags, at their stops and at the edges of spans outside tags, and labels the runs in between."""
    edges = np.concatenate((spans.starts, spans.ends))
    tag = np.searchsorted(tags.starts, edges, side="left") - 1
    if len(tags.starts):
        edges = edges[(tag < 0) | (edges >= tags.ends[tag])]
    ends = np.unique(np.concatenate((edges, regions.text_ends, tags.starts, tags.ends, stop.ravel())))
    starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    tag, inside = _covering(tags.starts, tags.ends, starts)
    span, covered = _covering(spans.starts, spans.ends, starts)
    roles, messages = np.full(len(ends), Role.NONE, np.uint8), np.full(len(ends), -1, np.int32)
    parts = np.full(len(ends), Part.GLUE, np.uint8)
    roles[covered], messages[covered] = spans.roles[span[covered]], spans.messages[span[covered]]
    parts[covered] = Part.BODY
    outside = covered & (roles == Role.ASSISTANT) & ~inside
    if len(owners):
        numbers = spans.numbers[owners]
        after = outside & (tag >= 0) & (numbers[tag] == spans.numbers[np.maximum(span, 0)])
        in_stop = inside & (stop[tag, 0] <= starts) & (starts < stop[tag, 1])
        roles[inside], messages[inside] = Role.ASSISTANT, spans.messages[owners[tag[inside]]]
        parts[inside], parts[in_stop] = Part.BODY, Part.STOP
        crossing = np.where(inside & (ends == tags.ends[tag]), Crossing.OWN, Crossing.LATER).astype(np.uint8)
    else:
        after, crossing = np.zeros(len(ends), np.bool_), np.zeros(len(ends), np.uint8)
    parts[outside], parts[after] = Part.HEADER, Part.TAIL
    return Cuts(ends, roles, parts, messages, crossing)


def _covering(starts: Int64, ends: Int64, points: Int64) -> tuple[Int64, Bool]:
    """The last interval that starts at or before each point (-1 if none), and whether it covers the point."""
    last = np.searchsorted(starts, points, side="right") - 1
    covered = (last >= 0) & (points < ends[last]) if len(starts) else np.zeros(len(points), np.bool_)
    return last, covered
