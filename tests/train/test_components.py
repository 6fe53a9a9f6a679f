"""Learning-rate schedule, loss plot, metrics file and progress lines."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import pytest

from penstock.cli.live_training import eval_line, step_line
from penstock.errors import UsageError
from penstock.train.config import LogConfig, OptimConfig, Schedule
from penstock.train.loop import learning_rate, warmup_steps
from penstock.train.metrics import EvalReport, MetricsWriter, StepReport, loss_plot, read_metrics
from penstock.train.run import train
from tests.train.runs import Config, losses

pytestmark = pytest.mark.slow


def report(step: int, loss: float = 1.0) -> StepReport:
    return StepReport(step, 10, 0, loss, 1e-3, 0.5, 4, 1000, 300, 0.9, 0.001, 0.1, {"reward_accuracy": 0.75})


@pytest.mark.parametrize("schedule", list(Schedule))
def test_learning_rate_schedule(schedule: Schedule) -> None:
    config = OptimConfig(lr=1.0, schedule=schedule, warmup=0.1, final=0.2)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(1.0 if schedule is Schedule.CONSTANT else 0.2, abs=0.02)


def test_warmup_steps() -> None:
    assert warmup_steps(OptimConfig(warmup=7), 100) == 7
    assert warmup_steps(OptimConfig(warmup=0.03), 1) == 0
    with pytest.raises(UsageError, match="never be reached"):
        warmup_steps(OptimConfig(warmup=100), 100)


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, 2.0), (2, 2.0)], [(n, 1 / n) for n in range(1, 5000)]])
def test_loss_plot_is_valid_svg(points: list[tuple[float, float]]) -> None:
    text = loss_plot(points, points[:2], "a < b & c")
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    assert "a &lt; b &amp; c" in text


def test_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, LogConfig(), writes=True)
    writer.begin(0)
    for step in (1, 2, 3):
        writer.add(report(step))
    writer.add(EvalReport(3, 0.5, 1.0, {"reward_accuracy": 1.0}))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo')  # cut off by a kill
    again = MetricsWriter(tmp_path, LogConfig(), writes=True)
    again.begin(2)
    again.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard(config: Config) -> None:
    pytest.importorskip("tensorboard")
    values = config(loader={"steps": 2}, log={"tensorboard": True})
    train("sft", values)
    assert len(losses(values)) == 2
    assert list(Path(values["output"], "tensorboard").glob("events*"))


def test_progress_lines() -> None:
    line = step_line(report(3), 61)
    for part in (
        "step 3/10",
        "loss 1.0000",
        "reward accuracy 0.750",
        "10.0k tokens/s",
        "90.0% full",
        "data wait 1.0%",
        "1:01",
    ):
        assert part in line
    assert eval_line(EvalReport(3, 0.5, 1.0)) == "step 3 · evaluation loss 0.5000"
