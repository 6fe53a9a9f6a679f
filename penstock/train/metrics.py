"""Metrics of a run: a JSON line per step and evaluation, a loss plot and, optionally, TensorBoard events.

    OUTPUT/metrics.jsonl   {"step": 12, "epoch": 0, "loss": …, "lr": …, "tokens": …, "data_wait": …, …}
                           {"step": 12, "eval_loss": …, …}
    OUTPUT/loss.svg

Steps are counted from 1. A run that resumes from a checkpoint first drops later lines, so that apart from timings the
file equals that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from penstock.errors import UnsupportedError, UsageError
from penstock.train.config import LogConfig, TrainConfig, flat, plain

if TYPE_CHECKING:
    from accelerate import Accelerator


# ---- plot ------------------------------------------------------------------------------------------------------------
#
# Plots the loss as a small SVG without a plotting library.
#
# A thin line shows the losses, a thick one their running mean, and dots the evaluations.


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
        _plot_line(train, frame, "#9ec5e8", 1),
        _plot_line(_smooth(train), frame, "#1f6fb2", 2),
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


def _plot_line(points: Points, frame: _Frame, colour: str, width: int) -> str:
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


# ---- metrics ---------------------------------------------------------------------------------------------------------


log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of a run. Counts cover the global batch, times are those of this rank."""

    step: int  # steps completed, including this one
    steps: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    sequences: int
    tokens: int
    trained: int
    efficiency: float  # tokens / positions (those of padded rows, or the capacity of packed ones)
    data_wait: float  # seconds spent waiting for batches
    seconds: float
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """The report as a flat JSON object."""
        values = asdict(self)
        measures = values.pop("measures")
        return {**values, "tokens_per_second": round(self.tokens_per_second, 1), **measures}


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation, after `step` steps."""

    step: int
    loss: float
    seconds: float
    measures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as a flat JSON object; names start with eval_."""
        values = {"loss": self.loss, "seconds": self.seconds, **self.measures}
        return {"step": self.step, **{f"eval_{name}": value for name, value in values.items()}}


Report = StepReport | EvalReport


class MetricsWriter:
    """Writes reports, on the first rank only."""

    def __init__(self, output: Path, config: LogConfig, *, writes: bool) -> None:
        self._path, self._plot = output / "metrics.jsonl", output / "loss.svg"
        self._config, self._title, self._writes = config, output.name, writes
        self._events: Any = None

    def begin(self, done: int) -> None:
        """Starts after `done` steps; lines of later steps are dropped."""
        if not self._writes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(self._path, done)
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(self._path.parent / "tensorboard")
            self._events = SummaryWriter(folder, purge_step=done + 1)

    def add(self, report: Report) -> None:
        """Appends a line to the file."""
        if not self._writes:
            return
        values = report.to_json()
        with self._path.open("ab") as file:
            file.write(orjson.dumps(values) + b"\n")
        if self._events is not None:
            for name, value in values.items():
                if name != "step":
                    self._events.add_scalar(name, value, report.step)

    def draw(self) -> None:
        """Plots the losses so far."""
        if not self._writes:
            return
        lines = read_metrics(self._path)
        train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        evaluations = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
        write_whole(self._plot, loss_plot(train, evaluations, self._title).encode())

    def close(self) -> None:
        """Plots the losses and closes the event file."""
        self.draw()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads a metrics file, skipping damaged lines and one cut off by a kill."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [line for raw in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1] if (line := _line(raw)) is not None]


def _line(raw: bytes) -> dict[str, Any] | None:
    """Parses a line of a metrics file; None if it is damaged."""
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    losses = (line.get(name, 0.0) for name in ("loss", "eval_loss"))
    return line if all(type(loss) in (int, float) for loss in losses) else None


def _drop_after(path: Path, done: int) -> None:
    """Drops lines after step `done`, and damaged lines, with a warning."""
    damaged = sum(_line(raw) is None for raw in path.read_bytes().split(b"\n")[:-1]) if path.exists() else 0
    if damaged:
        log.warning("%s: dropped %d damaged lines", path, damaged)
    kept = [line for line in read_metrics(path) if line["step"] <= done]
    write_whole(path, b"".join(orjson.dumps(line) + b"\n" for line in kept))


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name and renames it; leaves nothing behind if that fails."""
    temporary = path.with_name(f".writing-{path.name}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


# ---- tracking --------------------------------------------------------------------------------------------------------
#
# Weights & Biases, TensorBoard, MLflow and others, through accelerate's trackers. The first rank alone has them.


# The name of a tracker in accelerate, and the package it needs.
PACKAGES = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "comet_ml": "comet_ml",
    "aim": "aim",
    "clearml": "clearml",
    "swanlab": "swanlab",
    "trackio": "trackio",
}


def check_trackers(config: LogConfig) -> None:
    """Refuse trackers that are unknown or not installed."""
    for name in config.trackers:
        if name not in PACKAGES:
            raise UsageError(f"log.trackers: {name!r} is unknown; expected {', '.join(PACKAGES)}.")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UnsupportedError(
                f"log.trackers: {name} is not installed. pip install {PACKAGES[name]}, or leave it out."
            )


class Tracking:
    """Sends reports to the trackers of a run; to none where none is asked for."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig) -> None:
        self._accelerator, self._config = accelerator, config
        self._names = config.log.trackers

    def begin(self) -> None:
        """Start a run of each tracker, with the configuration."""
        if not self._names:
            return
        name = self._config.log.run_name or self._config.output.name
        own: dict[str, dict[str, Any]] = {
            "wandb": {"name": name, "dir": str(self._config.output)},
            "mlflow": {"run_name": name},
        }
        settings = {key: _simple(value) for key, value in flat(plain(self._config)).items()}
        self._accelerator.init_trackers(
            self._config.log.project, settings, {tracker: own[tracker] for tracker in self._names if tracker in own}
        )

    def add(self, report: Report) -> None:
        """Log one report."""
        if self._names:
            values = {name: value for name, value in report.to_json().items() if name != "step"}
            self._accelerator.log(values, step=report.step)

    def close(self) -> None:
        """Have the trackers finish."""
        if self._names:
            for tracker in self._accelerator.trackers:
                tracker.finish()


def _simple(value: Any) -> int | float | str | bool:
    return value if isinstance(value, int | float | str | bool) else str(value)
