"""Seams: the token boundaries between a prompt and its answer.

A server encodes the prompt alone, so the tokens before an answer must be those of the prompt. If both are encoded as
one text, the answer's first token may absorb the end of the prompt (a newline, if the answer starts with one). Such
turns are detected before encoding, and encoded in two parts; any others are found by comparing tokens, and are not
trained. A turn takes a few microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.literals import Literals
from penstock.native import native
from penstock.prepare.chat.conversation import BODY_PARTS, Part, Role
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.example_batch import ExampleBatch
from penstock.prepare.regions.segments import Segments

_MARKER_WINDOW = 64  # bytes before a seam that are searched first for the prompt's last marker
_HEAD = 200  # bytes of an answer that decide its first token
_MAX_CACHED = 4096


class Seams:
    """The tokens around the ends of prompts, for one tokenizer and the markers of a template."""

    def __init__(self, encoder: Encoder, cuts: Sequence[str]) -> None:
        self._encoder = encoder
        self._cuts = tuple(token.encode() for token in cuts if token)
        self._markers = Literals(self._cuts)
        self._known: dict[bytes, npt.NDArray[Any]] = {}
        self._straddles: dict[tuple[bytes, bytes], bool] = {}

    def straddles(self, prompt: bytes, answer: bytes) -> bool:
        """Whether the first token of an answer would absorb the end of its prompt."""
        tail, head = self._tail(prompt), answer[:_HEAD]
        marker = self._markers.find(head, 1)  # which starts a token
        key = tail, head[: marker[0]] if marker else head.decode(errors="ignore").encode()
        known = self._straddles.get(key)
        if known is None:
            alone, joined = self._ids(tail), self._encoder.reference([b"".join(key)]).ids
            known = not np.array_equal(joined[: len(alone)], alone)
            if len(self._straddles) >= _MAX_CACHED:
                self._straddles.clear()
            self._straddles[key] = known
        return known

    def mismatches(
        self, texts: Sequence[bytes], segments: Segments, batch: ExampleBatch, seams: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The (example, message) of answers that don't start right after the tokens of their prompt.

        After a seam, text before the answer (white space before a tag) was also encoded separately.
        """
        examples, answers = _answer_starts(segments)
        if not len(examples):
            return []
        is_first = answers == segments.offsets[examples]
        sizes, tokens = (np.where(is_first, 0, ends[answers - 1]) for ends in (segments.ends, batch.ends))
        data, starts = b"".join(texts), np.cumsum([0, *map(len, texts)])[examples]
        ends, cuts = starts + sizes, np.array(seams, np.int64)[examples]
        starts = np.where((cuts > 0) & (cuts < sizes), starts + cuts, self._last_markers(data, starts, ends))
        numbers: dict[bytes, int] = {}
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        of_tail = np.array([numbers.setdefault(data[start:end], len(numbers)) for start, end in places])
        order, counts = np.argsort(of_tail, kind="stable"), np.bincount(of_tail, minlength=len(numbers))
        last, wrong = batch.offsets[examples] + tokens, np.zeros(len(examples), np.bool_)
        for tail, same in zip(numbers, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            expected = self._ids(tail)
            wrong[same] = tokens[same] < len(expected)
            same = same[tokens[same] >= len(expected)]
            wrong[same] = (batch.ids[last[same, None] + np.arange(-len(expected), 0)] != expected).any(axis=1)
        return list(zip(examples[wrong].tolist(), segments.messages[answers[wrong]].tolist(), strict=True))

    def _tail(self, prompt: bytes) -> bytes:
        """The prompt from its last marker to its end, or all of it if it has none."""
        return prompt[int(self._last_markers(prompt, np.zeros(1, np.int64), np.array([len(prompt)]))[0]) :]

    def _last_markers(self, data: bytes, starts: Int64, ends: Int64) -> Int64:
        """Where the last marker of each prompt data[start:end] starts, or the prompt if it has none."""
        if not self._cuts:
            return starts
        if native is not None:
            return np.frombuffer(native.last_markers(data, starts, ends, _MARKER_WINDOW, self._cuts), np.int64)
        found = starts.copy()
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            for first in (max(start, end - _MARKER_WINDOW), start):
                if places := [place for place, _ in self._markers.spans(data[first:end])]:
                    found[number] = first + places[-1]
                    break
        return found

    def _ids(self, tail: bytes) -> npt.NDArray[Any]:
        known = self._known.get(tail)
        if known is None:
            known = self._encoder.reference([tail]).ids
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[tail] = known
        return known


def _answer_starts(segments: Segments) -> tuple[Int64, Int64]:
    """The example and the number of each segment that starts the trained part of an assistant message."""
    examples = np.repeat(np.arange(len(segments.offsets) - 1), np.diff(segments.offsets))
    is_trained = (segments.roles == Role.ASSISTANT) & np.isin(segments.parts, (*BODY_PARTS, Part.STOP))
    trained = np.flatnonzero(is_trained)
    is_first = np.ones(len(trained), np.bool_)
    if len(trained) > 1:
        same = (examples[trained[1:]] == examples[trained[:-1]]) & (
            segments.messages[trained[1:]] == segments.messages[trained[:-1]]
        )
        is_first[1:] = ~same
    return examples[trained[is_first]], trained[is_first]


def split_at_seams(
    texts: list[bytes], segments: Segments, seams: Sequence[int]
) -> tuple[list[bytes], Segments, list[int]]:
    """Splits texts at their seams (0 for none), which are ends of segments. Returns the parts, their segments, and the
    number of parts per text."""
    if not any(seams):
        return texts, segments, [1] * len(texts)
    parts: list[bytes] = []
    offsets, ends = [0], segments.ends.copy()
    for example, (text, seam) in enumerate(zip(texts, seams, strict=True)):
        last = int(segments.offsets[example + 1])
        if seam:
            first = int(segments.offsets[example])
            middle = first + int(np.searchsorted(segments.ends[first:last], seam, side="right"))
            ends[middle:last] -= seam
            parts += [text[:seam], text[seam:]]
            offsets += [middle, last]
        else:
            parts.append(text)
            offsets.append(last)
    counts = [2 if seam else 1 for seam in seams]
    known = np.repeat(segments.known, counts)
    return parts, replace(segments, offsets=np.array(offsets, np.int64), ends=ends, known=known), counts


def cut_at_seams(segments: Segments, seams: Sequence[int]) -> Segments:
    """Cuts each segment that a seam (0 for none) crosses, because text before the seam is encoded separately."""
    places, examples = [], []
    for example in np.flatnonzero(seams).tolist():
        first, last = segments.offsets[example : example + 2].tolist()
        at = first + int(np.searchsorted(segments.ends[first:last], seams[example]))
        if at < last and segments.ends[at] != seams[example]:
            places.append(at)
            examples.append(example)
    if not places:
        return segments
    chosen = np.sort(np.concatenate((np.arange(len(segments.ends)), places)))
    added = np.cumsum(np.bincount(examples, minlength=len(seams)))
    cut = segments.picked(chosen, segments.offsets + np.concatenate(([0], added)))
    ends = cut.ends.copy()
    ends[np.array(places) + np.arange(len(places))] = [seams[example] for example in examples]
    return replace(cut, ends=ends)


def merge_parts(batch: ExampleBatch, counts: list[int]) -> ExampleBatch:
    """Merges the parts of each text back into one example."""
    if max(counts, default=1) == 1:
        return batch
    last = np.cumsum(counts)
    firsts = last - counts
    part_starts = batch.offsets[:-1]
    shift = part_starts - np.repeat(part_starts[firsts], counts)
    batch.ends = batch.ends + np.repeat(shift, np.diff(batch.segment_offsets))
    batch.offsets = np.concatenate(([0], batch.offsets[last]))
    batch.segment_offsets = np.concatenate(([0], batch.segment_offsets[last]))
    return batch
