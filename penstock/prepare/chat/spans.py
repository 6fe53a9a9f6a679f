"""Reads the marked spans of messages, and keeps them in place when content changes its form.

A message has them under `spans`, or under `train_detail` as Axolotl does; a text part of its content under `spans`.
Templates never see these keys. Positions are code points of the text as given.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.errors import RowError
from penstock.prepare.chat.conversation import Marked, Message
from penstock.prepare.chat.json_rows import describe_type

SPAN_KEYS = frozenset(("spans", "train_detail"))
LARGEST_WEIGHT = 3.4e38  # weights are stored as 32-bit floats
_SPAN = 'A span is {"start": 0, "end": 5, "weight": 0}'
_DETAIL = 'An entry of train_detail is {"begin_offset": 0, "end_offset": 4, "train": false}'
_POSITIONS = "Count code points, as Python's len does"

Places = Marked | tuple[Marked, ...]  # of a content, or of each of its parts


class MarkedSpans(NamedTuple):
    """The marked spans of one message, and their weights in the same order."""

    places: Places
    weights: tuple[float, ...]


_NO_SPANS = MarkedSpans((), ())


def take_spans(message: Message, where: str) -> MarkedSpans | None:
    """Removes the spans of a checked message and of its parts, and returns them."""
    spans, details = message.pop("spans", None), message.pop("train_detail", None)
    content = message.get("content")
    if spans is not None and details is not None:
        raise RowError("bad_span", f"{where} has both spans and train_detail", "Keep one")
    if type(content) is list:
        found = _of_parts(content, where)
        if spans or details:
            key = "spans" if spans else "train_detail"
            raise RowError("bad_span", f"{where}.{key}: the content is a list", "Give each part its own spans")
    else:
        text = content or ""
        found = _read_spans(spans, text, f"{where}.spans")
        if details is not None:
            found = _read_details(details, text, f"{where}.train_detail")
    if found.weights and message["role"] != "assistant":
        raise RowError(
            "bad_span",
            f"{where} has spans, and its role is {message['role']}; only answers have spans",
            "Remove them, or give the whole message a weight",
        )
    return found if found.weights else None


def _of_parts(parts: list[Any], where: str) -> MarkedSpans:
    found = []
    for number, part in enumerate(parts):
        here = f"{where}.content[{number}]"
        found.append(_read_spans(part.pop("spans", None), part["text"], f"{here}.spans"))
    places: Any = tuple(own.places for own in found)
    return MarkedSpans(places, tuple(weight for own in found for weight in own.weights))


def _read_spans(spans: object, text: str, where: str) -> MarkedSpans:
    if spans is None:
        return _NO_SPANS
    found = []
    for here, span in _listed(spans, text, where, _SPAN):
        for key, value in span.items():
            if key not in ("start", "end", "weight") and value is not None:
                raise RowError("bad_span", f"{here} has an unknown key {key!r}", _SPAN)
        start, end = _position(span, "start", here, _SPAN), _position(span, "end", here, _SPAN)
        if not 0 <= start < end <= len(text):
            raise RowError(
                "bad_span",
                f"{here} is from {start} to {end}; expected 0 <= start < end <= {len(text)}, the length of its text",
                _POSITIONS,
            )
        found.append(((start, end), _weight(span.get("weight"), here)))
    found.sort()
    for (before, _), (after, _) in pairwise(found):
        if after[0] < before[1]:
            raise RowError(
                "bad_span",
                f"{where} has overlapping spans, {before[0]} to {before[1]} and {after[0]} to {after[1]}",
                "Keep one of them, or split them where they overlap",
            )
    return MarkedSpans(tuple(place for place, _ in found), tuple(weight for _, weight in found))


def _read_details(details: object, text: str, where: str) -> MarkedSpans:
    """Reads Axolotl's `train_detail`, whose ends are inclusive.

    Text is trained if any entry trains it, so entries may overlap, and text that no entry names is not trained. An end
    may be one too large, as Axolotl ignores what lies after the text. It also ignores further keys.
    """
    trained: list[tuple[int, int]] = []
    for here, detail in _listed(details, text, where, _DETAIL):
        begin = _position(detail, "begin_offset", here, _DETAIL)
        end = _position(detail, "end_offset", here, _DETAIL)
        if not 0 <= begin <= end <= len(text) or begin == len(text):
            raise RowError(
                "bad_span",
                f"{here} is from {begin} to {end}; "
                f"expected 0 <= begin_offset <= end_offset <= {len(text) - 1}, the last character of its text",
                _POSITIONS,
            )
        if type(detail.get("train")) is not bool:
            raise RowError("bad_span", f"{here}.train is {_shown(detail.get('train'))}; expected true or false")
        if detail["train"]:
            trained.append((begin, min(end + 1, len(text))))
    found: list[tuple[tuple[int, int], float]] = []
    position = 0
    for start, end in sorted(trained):
        if start > position:
            found.append(((position, start), 0.0))
        if end > position:
            if found and found[-1][1] and start <= position:
                start = found.pop()[0][0]
            found.append(((start, end), 1.0))
            position = end
    if position < len(text) and details:
        found.append(((position, len(text)), 0.0))
    return MarkedSpans(tuple(place for place, _ in found), tuple(weight for _, weight in found))


def _listed(value: object, text: str, where: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the spans of a text, each with its place in the row."""
    if type(value) is not list:
        raise RowError("bad_span", f"{where} is {describe_type(value)}, not a list", remedy)
    if value and not text:
        raise RowError("bad_span", f"{where}: the content has no text", "Remove the spans, or give it text")
    for number, span in enumerate(value):
        here = f"{where}[{number}]"
        if type(span) is not dict:
            raise RowError("bad_span", f"{here} is {describe_type(span)}, not an object", remedy)
        yield here, span


def _position(span: dict[str, Any], key: str, where: str, remedy: str) -> int:
    value = span.get(key)
    if type(value) is int:
        return value
    raise RowError("bad_span", f"{where}.{key} is {_shown(value)}; expected an integer", remedy)


def _weight(value: object, where: str) -> float:
    if value is None:
        return 1.0
    if type(value) in (bool, int, float) and 0 <= value <= LARGEST_WEIGHT:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise RowError(
        "bad_span", f"{where}.weight is {_shown(value)}; expected true, false or a number from 0 to {LARGEST_WEIGHT:g}"
    )


def _shown(value: object) -> str:
    return repr(value) if type(value) in (int, float, str) else describe_type(value)


# ---- content that changes its form


def moved(places: Places, given: object, content: object) -> Places:
    """Returns the places in a content that was given in another form: its parts joined, or as one part."""
    if given is content:
        return places
    flat: Any = places
    if type(given) is list:
        ends = [0]
        for part in given:
            ends.append(ends[-1] + len(part["text"]))
        flat = tuple((start + own, end + own) for own, part in zip(ends, flat, strict=False) for start, end in part)
    return (flat,) if type(content) is list else flat
