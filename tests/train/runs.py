"""Shared by the training tests: the type of the `config` fixture, and readers of a run's metrics."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.train.metrics import read_metrics

Config = Callable[..., dict[str, Any]]


def metrics(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics that a run wrote."""
    return read_metrics(Path(config["output"]) / "metrics.jsonl")


def losses(config: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in metrics(config) if "loss" in line]


def environment() -> dict[str, str]:
    """The environment of subprocesses."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}
