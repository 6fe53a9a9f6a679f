"""Metrics of a run: a JSON line per step and evaluation, a loss plot and, optionally, TensorBoard events.

    OUTPUT/metrics.jsonl   {"step": 12, "epoch": 0, "loss": …, "lr": …, "tokens": …, "data_wait": …, …}
                           {"step": 12, "eval_loss": …, …}
    OUTPUT/loss.svg

Steps are counted from 1. A run that resumes from a checkpoint first drops later lines, so that apart from timings the
file equals that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock.train.config import LogConfig
from penstock.train.output.plot import loss_plot

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
