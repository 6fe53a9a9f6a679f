"""What a run writes down: a JSON line per step and per evaluation, a loss plot, TensorBoard's events where asked for.

    OUTPUT/metrics.jsonl   {"step": 12, "epoch": 0, "loss": …, "lr": …, "tokens": …, "data_wait": …, …}
                           {"step": 12, "eval_loss": …, …}
    OUTPUT/loss.svg

Steps count from 1: those that are done. A run that goes on from a checkpoint first drops the lines after it, so that
the file is that of an undisturbed run, but for times.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock.train.config import LogConfig
from penstock.train.plot import loss_plot

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of a run. Counts are of the whole global batch, times are of this rank."""

    step: int  # steps done, this one included
    steps: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    sequences: int
    tokens: int
    trained: int
    efficiency: (
        float  # the part of the batch's places (cells of padded rows, capacity of packed ones) that holds tokens
    )
    data_wait: float  # seconds that the step waited for its batches
    seconds: float
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks."""
        return self.tokens / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """A flat object."""
        values = asdict(self)
        measures = values.pop("measures")
        return {**values, "tokens_per_second": round(self.tokens_per_second, 1), **measures}


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation, after so many steps."""

    step: int
    loss: float
    seconds: float
    measures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A flat object; names begin with eval_."""
        values = {"loss": self.loss, "seconds": self.seconds, **self.measures}
        return {"step": self.step, **{f"eval_{name}": value for name, value in values.items()}}


Report = StepReport | EvalReport


class MetricsWriter:
    """Writes reports; on other ranks than the first it writes nothing."""

    def __init__(self, output: Path, config: LogConfig, *, writes: bool) -> None:
        self._path, self._plot = output / "metrics.jsonl", output / "loss.svg"
        self._config, self._title, self._writes = config, output.name, writes
        self._events: Any = None

    def begin(self, done: int) -> None:
        """Start after so many steps; what the file says of later ones is dropped."""
        if not self._writes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _cut(self._path, done)
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(self._path.parent / "tensorboard")
            self._events = SummaryWriter(folder, purge_step=done + 1)

    def add(self, report: Report) -> None:
        """Write one line, and have it on its way to the disk."""
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
        """Draw the losses so far."""
        if not self._writes:
            return
        lines = read_metrics(self._path)
        train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        evaluations = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
        self._plot.write_text(loss_plot(train, evaluations, self._title), encoding="utf-8")

    def close(self) -> None:
        """Finish what is being written."""
        self.draw()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; damaged ones, and one that was cut off by a kill, are left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [line for raw in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1] if (line := _line(raw)) is not None]


def _line(raw: bytes) -> dict[str, Any] | None:
    """A line of a metrics file; None where it is damaged."""
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def _cut(path: Path, done: int) -> None:
    """Keep the lines of steps that are done. Damaged lines are dropped, and this is said."""
    damaged = sum(_line(raw) is None for raw in path.read_bytes().split(b"\n")[:-1]) if path.exists() else 0
    if damaged:
        log.warning("%s: %d damaged lines are dropped", path, damaged)
    kept = [line for line in read_metrics(path) if line["step"] <= done]
    temporary = path.with_suffix(".writing")
    temporary.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
    temporary.replace(path)
