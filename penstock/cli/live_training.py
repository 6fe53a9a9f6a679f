"""Shows the progress of a training run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.build.progress import Progress
from penstock.look.progress import PLAIN_EVERY, amount, duration, progress_line
from penstock.train.metrics import EvalReport, Report, StepReport
from penstock.train.reference import Scored


class LiveTraining:
    """Shows steps and evaluations on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._last = 0.0
        self._rate = 0.0  # seconds per step, smoothed

    def __enter__(self) -> LiveTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, report: Report) -> None:
        match report:
            case EvalReport():
                self._console.print(eval_line(report), highlight=False, soft_wrap=True)
            case StepReport() if self._console.is_terminal:
                if self._live is None:  # only now: preparing shows its own live line
                    self._live = Live(console=self._console, transient=True, refresh_per_second=8)
                    self._live.start()
                self._live.update(Text(self._step_line(report), style="cyan"))
            case StepReport():
                line = self._step_line(report)
                if time.monotonic() - self._last >= PLAIN_EVERY or report.step == report.steps:
                    self._last = time.monotonic()
                    self._console.print(line, highlight=False, soft_wrap=True)

    def _step_line(self, report: StepReport) -> str:
        self._rate = report.seconds if not self._rate else 0.9 * self._rate + 0.1 * report.seconds
        return step_line(report, self._rate * (report.steps - report.step))


def step_line(report: StepReport, left: float) -> str:
    """One line with loss, speed, efficiency, data wait and the time left."""
    measures = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in report.measures.items() if "acc" in name]
    parts = [
        f"step {report.step}/{report.steps}",
        f"loss {report.loss:.4f}",
        *measures,
        f"lr {report.lr:.2e}",
        f"{amount(report.tokens_per_second)} tokens/s",
        f"{100 * report.efficiency:.1f}% full",
        f"data wait {100 * report.data_wait / max(report.seconds, 1e-9):.1f}%",
        f"{duration(left)} left",
    ]
    return " · ".join(parts)


def preparing_line(progress: Progress | Scored) -> str:
    """One line with the progress of a build, or of scoring with the reference model."""
    if isinstance(progress, Progress):
        return progress_line(progress)
    rate = progress.pairs / max(progress.seconds, 1e-9)
    left = f" · {duration((progress.total - progress.pairs) / rate)} left" if progress.pairs else ""
    return f"reference: {progress.pairs:,} of {progress.total:,} pairs scored · {rate:.1f} pairs/s{left}"


def eval_line(report: EvalReport) -> str:
    """One line with the means of an evaluation."""
    measures = "".join(f" · {name.replace('_', ' ')} {value:.3f}" for name, value in report.measures.items())
    return f"step {report.step} · evaluation loss {report.loss:.4f}{measures}"
