"""Weights & Biases, TensorBoard, MLflow and others, through accelerate's trackers. The first rank alone has them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.train.config import LogConfig, TrainConfig
from penstock.train.config_reader import flat, plain
from penstock.train.errors import UnsupportedError
from penstock.train.metrics import Report

if TYPE_CHECKING:
    from accelerate import Accelerator

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
