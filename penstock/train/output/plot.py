"""Plots the loss as a small SVG without a plotting library.

A thin line shows the losses, a thick one their running mean, and dots the evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 40
MOST_POINTS = 2000  # more would be indistinguishable

Points = Sequence[tuple[float, float]]


class _Frame(NamedTuple):
    """Maps values to positions in the image."""

    steps: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.steps

    def y(self, loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - loss) / (self.high - self.low)


def loss_plot(train: Points, evaluations: Points, title: str) -> str:
    """Returns the SVG; points that are not finite are omitted."""
    train = _thinned([point for point in train if math.isfinite(point[1])])
    evaluations = [point for point in evaluations if math.isfinite(point[1])]
    losses = [loss for _, loss in (*train, *evaluations)] or [0.0]
    steps = max([step for step, _ in (*train, *evaluations)] or [1])
    low, high = min(losses), max(losses)
    margin = (high - low) * 0.05 or 1.0
    frame = _Frame(max(steps, 1), low - margin, high + margin)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{_escaped(title)}</text>',
        *_axes(frame),
        _line(train, frame, "#9ec5e8", 1),
        _line(_smooth(train), frame, "#1f6fb2", 2),
        *[f'<circle cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="4" fill="#d1495b"/>' for s, v in evaluations],
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _thinned(points: Points) -> Points:
    return points[:: -(-len(points) // MOST_POINTS)] if points else points


def _smooth(points: Points) -> Points:
    """A running mean over about a twentieth of the run."""
    keep = 1 - 1 / max(len(points) / 20, 1)
    smooth: list[tuple[float, float]] = []
    for step, loss in points:
        smooth.append((step, loss if not smooth else keep * smooth[-1][1] + (1 - keep) * loss))
    return smooth


def _line(points: Points, frame: _Frame, colour: str, width: int) -> str:
    path = " ".join(f"{frame.x(step):.1f},{frame.y(loss):.1f}" for step, loss in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _axes(frame: _Frame) -> list[str]:
    grid: list[str] = []
    for value in _ticks(frame.low, frame.high):
        y = frame.y(value)
        grid.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        grid.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(0, frame.steps):
        grid.append(f'<text x="{frame.x(value):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{value:g}</text>')
    grid.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    return grid


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between low and high."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / size)
    number: Callable[[int], float] = lambda n: round(n * size, 10)  # noqa: E731
    return [number(n) for n in range(first, math.floor(high / size) + 1)]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
