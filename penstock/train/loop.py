"""The training loop: steps, evaluations and checkpoints, in an order that a resumed run repeats exactly.

A step takes its micro-batches from the feed (and measures the wait), sums the weight of the global batch over all
ranks, runs forward and backward with the loss divided by it, clips, and steps. So each loss is the mean over the global
batch, however it is split into micro-batches and ranks. If a loss or gradient is not finite, the run ends before the
weights change, and the error names the source rows.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.feed.batch import Batch, Counts
from penstock.feed.loader import Loader
from penstock.train.config import TrainConfig
from penstock.train.data import source_rows
from penstock.train.errors import NonFiniteError
from penstock.train.evaluate import Evaluator, group_means
from penstock.train.objectives.objective import Objective, Policy
from penstock.train.output.checkpoint import Checkpoints
from penstock.train.output.metrics import MetricsWriter, Report, StepReport
from penstock.train.output.tracking import Tracking
from penstock.train.schedule import learning_rate
from penstock.train.signals import Signals

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("penstock")
MOST_ROWS = 20  # to name in an error
OnReport = Callable[[Report], None]


@dataclass(slots=True)
class Trainer:
    """A run that is ready to train."""

    config: TrainConfig
    accelerator: Accelerator
    policy: Policy
    optimizer: Any
    objective: Objective
    loader: Loader
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    metrics: MetricsWriter
    tracking: Tracking
    signals: Signals
    on_report: OnReport | None = None

    def resume(self) -> int:
        """Resumes from the last checkpoint, if any; returns the number of completed steps."""
        saved = self.checkpoints.last()
        if saved is not None:
            self.checkpoints.restore(saved)
            self.loader.load_state_dict(saved.feed)
            log.info("resuming from %s", saved.path)
        done = 0 if saved is None else saved.step
        self.metrics.begin(done)
        self.tracking.begin()
        return done

    def fit(self, done: int) -> int:
        """Trains from step `done` to the end or until a signal; returns the number of completed steps."""
        assert self.loader.steps is not None
        self.policy.model.train()
        feed = iter(self.loader)
        with self.signals.deferring(), self.loader:
            for step in range(done, self.loader.steps):
                report, stopping = self._step(step, feed)
                self._emit(report)
                done = step + 1
                last = done == self.loader.steps
                every = self.config.eval.every
                if self.evaluator is not None and ((every and done % every == 0) or last):
                    self._emit(self.evaluator.run(done))
                if last or stopping or self._is_due(done):
                    self.checkpoints.save(done, self.loader.state_dict())
                    self.metrics.draw()
                if stopping:
                    break
        return done

    def _is_due(self, done: int) -> bool:
        every = self.config.checkpoint.every
        return every is not None and done % every == 0

    def close(self) -> None:
        """Plots the losses, and closes the metrics and the trackers."""
        try:
            self.metrics.close()
        finally:
            self.tracking.close()

    def _emit(self, report: Report) -> None:
        self.metrics.add(report)
        self.tracking.add(report)
        if self.on_report is not None:
            self.on_report(report)

    def _step(self, step: int, feed: Iterator[Batch]) -> tuple[StepReport, bool]:
        """Takes one optimiser step; also returns whether any rank was asked to stop."""
        started = time.perf_counter()
        batches = [next(feed) for _ in range(self.loader.micros)]
        wait = time.perf_counter() - started
        (total,) = self._summed([sum(self.objective.weight(batch) for batch in batches)])
        losses, measures, groups = self._backward(batches, total)
        held = [float(sum(column)) for column in zip(*(batch.counts for batch in batches), strict=True)]
        stop = float(self.signals.received)
        names = sorted(measures)
        by_group = [value for name in sorted(groups) for value in groups[name]]
        sums = self._summed([sum(losses), stop, *held, *(measures[name] for name in names), *by_group])
        loss, stopping = sums[0] / (total or 1.0), sums[1] > 0
        if stopping and not self.signals.received:
            self.signals.received = signal.SIGTERM  # another rank got the signal; all stop together
        if not math.isfinite(loss):
            self._refuse(step, f"the loss is {loss}", batches, losses)
        lr = learning_rate(self.config.optim, step, self.loader.steps or 1)
        norm = self._update(lr)
        if not math.isfinite(norm):
            self._refuse(step, f"the loss is {loss:g}, but the norm of its gradient is {norm}", batches, losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        counts = Counts(*(int(value) for value in sums[2:7]))
        report = StepReport(
            step=step + 1,
            steps=self.loader.steps or 0,
            epoch=batches[0].epoch,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            sequences=counts.sequences,
            tokens=counts.tokens,
            trained=counts.trained,
            efficiency=counts.tokens / self._places(counts),
            data_wait=wait,
            seconds=time.perf_counter() - started,
            measures={
                **{name: value / (total or 1.0) for name, value in zip(names, sums[7:], strict=False)},
                **group_means(sorted(groups), sums[7 + len(names) :]),
            },
        )
        return report, stopping

    def _places(self, counts: Counts) -> int:
        """The number of token positions in a step."""
        plan = self.loader.settings.plan
        if plan.capacity is None:
            return max(counts.tokens + counts.padding, 1)
        slots = self.loader.settings.world_size * -(-plan.batch_size // self.loader.settings.world_size)
        return max(slots - counts.filler_rows, 1) * plan.capacity

    def _backward(
        self, batches: Sequence[Batch], total: float
    ) -> tuple[list[float], Mapping[str, float], Mapping[str, tuple[float, float]]]:
        """Computes gradients of the mean loss over the global batch; returns the losses, summed measures and groups."""
        # Gradients are averaged over ranks but the loss is a sum over ranks, hence the factor.
        scale = self.accelerator.num_processes / (total or 1.0)
        losses: list[torch.Tensor] = []
        measures: dict[str, torch.Tensor] = {}
        groups: dict[str, torch.Tensor] = {}
        for batch in batches:
            alone = not batch.ends_step and self.accelerator.num_processes > 1
            with self.accelerator.no_sync(self.policy.model) if alone else nullcontext():
                sums = self.objective.loss(batch)
                self.accelerator.backward(sums.loss * scale)
            losses.append(sums.loss.detach())
            for name, value in sums.measures.items():
                measures[name] = measures[name] + value if name in measures else value
            for name, pair in sums.groups.items():
                groups[name] = groups[name] + torch.stack(pair) if name in groups else torch.stack(pair)
        found = {name: (float(pair[0]), float(pair[1])) for name, pair in groups.items()}
        return [float(loss) for loss in losses], {name: float(value) for name, value in measures.items()}, found

    def _update(self, lr: float) -> float:
        """Sets the learning rate and clips the gradient; returns its norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        limit = math.inf if self.config.optim.clip is None else self.config.optim.clip
        norm = self.accelerator.clip_grad_norm_(self.policy.model.parameters(), limit)
        return 0.0 if norm is None else float(norm)

    def _summed(self, values: Sequence[float]) -> list[float]:
        """Sums values over all ranks."""
        if self.accelerator.num_processes == 1:
            return list(values)
        exact = torch.float32 if self.accelerator.device.type == "mps" else torch.float64
        tensor = torch.tensor(values, dtype=exact, device=self.accelerator.device)
        summed: list[float] = self.accelerator.reduce(tensor, "sum").tolist()
        return summed

    def _refuse(self, step: int, what: str, batches: Sequence[Batch], losses: Sequence[float]) -> None:
        """Raises an error that names the step and the rows (all rows of the step if it is unclear which)."""
        from accelerate.utils import gather_object

        wrong = [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        items = [int(item) for batch in wrong for item in batch.items]
        named = gather_object(source_rows(self.loader.served, items))  # type: ignore[arg-type]
        if not named:
            items = [int(item) for batch in batches for item in batch.items]
            named = gather_object(source_rows(self.loader.served, items))  # type: ignore[arg-type]
        more = f" and {len(named) - MOST_ROWS} more" if len(named) > MOST_ROWS else ""
        raise NonFiniteError(
            f"step {step + 1}: {what}. Rows in the batch: {', '.join(named[:MOST_ROWS])}{more}. "
            f"The weights are still those of step {step}. Inspect the rows with `penstock show`, lower optim.lr, or "
            "change model.precision."
        )
