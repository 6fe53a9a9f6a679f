"""Renders the HTML templates of the report, the viewer and notebooks: jinja2 with autoescape and custom filters."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from penstock.load.options import LossPolicy
from penstock.look.tokens import run_html
from penstock.printable import printable

# ---- charts ----------------------------------------------------------------------------------------------------------
# Computes the geometry of charts, which `pages/charts.html` draws as SVG.
#
# Charts use classes only, without colours or style attributes: the page's stylesheet styles them for dark and light
# themes, and a strict content security policy applies. Every mark has a title, and every chart is accompanied by a
# table or a sentence with the same figures.


WIDTH: Final = 720
HEIGHT: Final = 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 18, 28
_MOST_POINTS: Final = 600  # more would be indistinguishable


class Bar(NamedTuple):
    """One bar of a histogram; `lost` if it is beyond the marker line."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lost: bool


class Tick(NamedTuple):
    """A mark on an axis."""

    at: float
    text: str


class BarChart(NamedTuple):
    """Bars with their axes; `line` is the position of the marker."""

    bars: list[Bar]
    xs: list[Tick]
    ys: list[Tick]
    line: float | None
    flip: bool  # whether the marker's label is on its left


class Curve(NamedTuple):
    """Lines as SVG points, with axes."""

    lines: list[tuple[str, str]]  # class, points
    dots: list[tuple[float, float, str]]
    xs: list[Tick]
    ys: list[Tick]


def histogram(
    bins: Sequence[tuple[int, int, int]], unit: str, marker: int | None = None, *, log: bool = True
) -> BarChart:
    """Bars of (low, high, count), on a logarithmic axis for lengths; counts are linear."""

    def at(value: float) -> float:
        return math.log2(max(value, 0.5)) if log else value

    low, high = at(bins[0][0]), max(at(bins[-1][1]), at(marker) if marker else -1.0)
    scale = (WIDTH - LEFT - RIGHT) / max(high - low, 1e-9)
    most = max((count for _, _, count in bins), default=0) or 1
    room = HEIGHT - TOP - BOTTOM
    bars = []
    for start, end, count in bins:
        height = max(room * count / most, 1.5) if count else 0.0
        x = LEFT + (at(start) - low) * scale
        span = f"{start:,}" if end - start == 1 else f"{start:,} to {end - 1:,}"
        title = f"{span} {unit}: {count:,} sequences"
        width = max((at(end) - at(start)) * scale - 1.5, 1)
        bars.append(Bar(x, HEIGHT - BOTTOM - height, width, height, title, marker is not None and start >= marker))
    line = None if marker is None else LEFT + (at(marker) - low) * scale
    xs = [Tick(LEFT + (at(value) - low) * scale, f"{value:,}") for value in _ticks(bins, log)]
    ys = [Tick(HEIGHT - BOTTOM - room * part, _count(most * part)) for part in (0, 0.5, 1)]
    return BarChart(bars, xs, ys, line, line is not None and line > WIDTH * 0.7)


def _ticks(bins: Sequence[tuple[int, int, int]], log: bool) -> list[int]:
    low, high = bins[0][0], bins[-1][1]
    if not log:
        step = max(1, -(-(high - low) // 12))
        return list(range(low, high, step))
    powers = [2**bit for bit in range(max(low, 1).bit_length() - 1, high.bit_length() + 1)]
    inside = [power for power in powers if low <= power <= high]
    return inside[:: -(-len(inside) // 10) or 1]


def _count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


Points = Sequence[tuple[float, float]]


def curve(lines: Sequence[tuple[str, Points]], dots: Points = ()) -> Curve:
    """Lines through (step, value) points, each with a class, and single dots. Non-finite values are omitted."""
    kept = [(name, [point for point in points if math.isfinite(point[1])]) for name, points in lines]
    marks = [dot for dot in dots if math.isfinite(dot[1])]
    every = [point for _, points in kept for point in points] + marks or [(0.0, 0.0)]
    last = max(x for x, _ in every) or 1
    low, high = min(y for _, y in every), max(y for _, y in every)
    high = high if high > low else low + 1

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / last
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - point[1]) / (high - low)

    drawn = []
    for name, points in kept:
        thinned = points[:: -(-len(points) // _MOST_POINTS) or 1]
        drawn.append((name, " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, thinned))))
    xs = [Tick(place((last * part, low))[0], f"{last * part:,.0f}") for part in (0, 0.25, 0.5, 0.75, 1)]
    ys = [Tick(place((0, low + (high - low) * part))[1], f"{low + (high - low) * part:.3g}") for part in (0, 0.5, 1)]
    return Curve(drawn, [(*place(dot), f"step {dot[0]:,.0f}: {dot[1]:.4g}") for dot in marks], xs, ys)


def running_mean(points: Sequence[tuple[float, float]], window: int = 20) -> list[tuple[float, float]]:
    """The moving average over the last `window` values."""
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    firsts = [max(0, end - window) for end in range(1, len(points) + 1)]
    return [
        (points[end - 1][0], (sums[end] - sums[first]) / (end - first))
        for end, first in enumerate(firsts, start=1)
    ]  # fmt: skip


# ---- html ------------------------------------------------------------------------------------------------------------


PAGES: Final = Path(__file__).parent / "pages"


def render(template: str, **values: Any) -> str:
    """Render a page; anything that is not Markup is escaped."""
    return environment().get_template(template).render(**values)


def stylesheet() -> Markup:
    """The stylesheet of all pages, for inlining."""
    return _file("look.css")


def script() -> Markup:
    """The script of all pages, for inlining."""
    return _file("look.js")


def source_hash(text: str) -> str:
    """The source expression of an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def environment() -> Environment:
    """The templates, with their filters; an undefined name is an error."""
    made = Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(number=number, short=short, percent=percent, plural=plural)
    made.globals.update(
        histogram=histogram, curve=curve, run_html=run_html, POLICIES=[policy.value for policy in LossPolicy]
    )
    return made


def _printable(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _file(name: str) -> Markup:
    return Markup((PAGES / name).read_text(encoding="utf-8"))  # noqa: S704  our own file


def number(value: float) -> str:
    """`1,234`."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def short(value: float) -> str:
    """`1.2 M`: about three digits, for headlines that show the exact number nearby."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.3g} {unit}"
    return f"{value:,}"


def percent(part: float, whole: float = 1.0) -> str:
    """A percentage with enough digits to differ from 0 and from 100."""
    if not whole:
        return "0%"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "<0.1%"
    if 99.9 < share < 100:
        return ">99.9%"
    return f"{share:.1f}%".replace(".0%", "%")


def plural(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def link(path: str, parameters: Mapping[str, object]) -> str:
    """A path with a query string, without empty parameters."""
    from urllib.parse import urlencode

    given = {name: value for name, value in parameters.items() if value not in (None, "", ())}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path
