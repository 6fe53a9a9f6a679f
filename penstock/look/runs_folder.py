"""A training run's folder as a report shows it: curves from `metrics.jsonl`, verdicts from `certificate.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.errors import UsageError
from penstock.look.charts import running_mean

Points = list[tuple[float, float]]


class TrainingRun(NamedTuple):
    """The metrics and certificate of a training run."""

    name: str
    steps: int
    loss: Points
    smooth: Points
    evaluations: Points
    figures: tuple[tuple[str, str], ...]
    findings: tuple[tuple[str, str, str], ...]  # promise, verdict, evidence


def training_run(folder: Path) -> TrainingRun:
    """Read a run's folder. Either file may be missing, but not both."""
    metrics, certificate = folder / "metrics.jsonl", folder / "certificate.json"
    if not metrics.is_file() and not certificate.is_file():
        raise UsageError(f"{folder}: not a run's folder, for it has neither metrics.jsonl nor certificate.json")
    lines = [orjson.loads(line) for line in metrics.read_bytes().splitlines()] if metrics.is_file() else []
    steps = [line for line in lines if "loss" in line]
    loss = [(float(line["step"]), _float(line["loss"])) for line in steps]
    evaluations = [(float(line["step"]), _float(line["eval_loss"])) for line in lines if "eval_loss" in line]
    return TrainingRun(
        folder.name, len(steps), loss, running_mean(loss), evaluations, tuple(_figures(steps)), _findings(certificate)
    )


def _float(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _figures(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not steps:
        return []
    seconds, waited = sum(line["seconds"] for line in steps), sum(line["data_wait"] for line in steps)
    tokens, trained = sum(line["tokens"] for line in steps), sum(line["trained"] for line in steps)
    return [
        ("steps", f"{len(steps):,}"),
        ("last loss", f"{_float(steps[-1]['loss']):.4g}"),
        ("tokens seen", f"{tokens:,}, {trained:,} trained"),
        ("places filled", f"{sum(line['efficiency'] for line in steps) / len(steps):.1%}"),
        ("waited for data", f"{waited / seconds:.1%} of the time" if seconds else "0%"),
    ]


def _findings(certificate: Path) -> tuple[tuple[str, str, str], ...]:
    if not certificate.is_file():
        return ()
    return tuple(
        (finding["promise"], finding["verdict"], "; ".join(finding["evidence"]))
        for finding in orjson.loads(certificate.read_bytes())["findings"]
    )
