"""The loop: steps, evaluations and checkpoints, in an order that a resumed run repeats exactly.

A step: take its micro-batches from the feed (and measure the wait), agree with all ranks on the weight of the global
batch, run forward and backward with the loss divided by it, clip, step. Every loss is therefore the mean over the whole
global batch, however it is cut into micro-batches and ranks. A loss or gradient that is no number ends the run before
the weights change, with the rows that made it.
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
from penstock.train.checkpoint import Checkpoints
from penstock.train.config import TrainConfig
from penstock.train.data import places
from penstock.train.errors import NonFiniteError
from penstock.train.evaluate import Evaluator, group_means
from penstock.train.journal import Journal, Report, StepReport
from penstock.train.objective import Objective, Policy
from penstock.train.schedule import rate
from penstock.train.signals import Signals
from penstock.train.tracking import Tracking

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("penstock")
MOST_ROWS = 20  # named in an error
OnReport = Callable[[Report], None]


@dataclass(slots=True)
class Trainer:
    """All that a run needs, made ready."""

    config: TrainConfig
    accelerator: Accelerator
    policy: Policy
    optimizer: Any
    objective: Objective
    loader: Loader
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    journal: Journal
    tracking: Tracking
    signals: Signals
    on_report: OnReport | None = None

    def resumed(self) -> int:
        """Go on from the last checkpoint, if there is one; the steps that are done."""
        saved = self.checkpoints.last()
        if saved is not None:
            self.checkpoints.restore(saved)
            self.loader.load_state_dict(saved.feed)
            log.info("going on from %s", saved.path)
        done = 0 if saved is None else saved.step
        self.journal.begin(done)
        self.tracking.begin()
        return done

    def fit(self, done: int) -> int:
        """Train from `done` steps on; the number of steps done when the run ended, or a signal ended it."""
        assert self.loader.steps is not None
        self.policy.model.train()
        feed = iter(self.loader)
        with self.signals.deferring(), self.loader:
            for step in range(done, self.loader.steps):
                report, stopping = self._step(step, feed)
                self._tell(report)
                done = step + 1
                last = done == self.loader.steps
                every = self.config.eval.every
                if self.evaluator is not None and ((every and done % every == 0) or last):
                    self._tell(self.evaluator.run(done))
                if last or stopping or self._is_due(done):
                    self.checkpoints.save(done, self.loader.state_dict())
                    self.journal.draw()
                if stopping:
                    break
        return done

    def _is_due(self, done: int) -> bool:
        every = self.config.checkpoint.every
        return every is not None and done % every == 0

    def _tell(self, report: Report) -> None:
        self.journal.add(report)
        self.tracking.add(report)
        if self.on_report is not None:
            self.on_report(report)

    def _step(self, step: int, feed: Iterator[Batch]) -> tuple[StepReport, bool]:
        """One optimiser step; whether some rank was asked to stop."""
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
            self.signals.received = signal.SIGTERM  # another rank was told; we stop together
        if not math.isfinite(loss):
            self._refuse(step, f"the loss is {loss}", batches, losses)
        lr = rate(self.config.optim, step, self.loader.steps or 1)
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
        """What the rows of a step could hold."""
        plan = self.loader.settings.plan
        if plan.capacity is None:
            return max(counts.tokens + counts.padding, 1)
        slots = self.loader.settings.world_size * -(-plan.batch_size // self.loader.settings.world_size)
        return max(slots - counts.filler_rows, 1) * plan.capacity

    def _backward(
        self, batches: Sequence[Batch], total: float
    ) -> tuple[list[float], Mapping[str, float], Mapping[str, tuple[float, float]]]:
        """Gradients of the mean loss over the global batch; the sums of each micro-batch, and those by group."""
        # Ranks' gradients are averaged, and the loss is a sum over ranks: hence the factor.
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
        """Set the learning rate and clip; the norm of the gradient before."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        limit = math.inf if self.config.optim.clip is None else self.config.optim.clip
        norm = self.accelerator.clip_grad_norm_(self.policy.model.parameters(), limit)
        return 0.0 if norm is None else float(norm)

    def _summed(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        if self.accelerator.num_processes == 1:
            return list(values)
        exact = torch.float32 if self.accelerator.device.type == "mps" else torch.float64
        tensor = torch.tensor(values, dtype=exact, device=self.accelerator.device)
        summed: list[float] = self.accelerator.reduce(tensor, "sum").tolist()
        return summed

    def _refuse(self, step: int, what: str, batches: Sequence[Batch], losses: Sequence[float]) -> None:
        """End the run: say in which step, and by which rows (all of the step, where that is unclear)."""
        from accelerate.utils import gather_object

        wrong = [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        items = [int(item) for batch in wrong for item in batch.items]
        named = gather_object(places(self.loader.served, items))  # type: ignore[arg-type]
        if not named:
            items = [int(item) for batch in batches for item in batch.items]
            named = gather_object(places(self.loader.served, items))  # type: ignore[arg-type]
        more = f" and {len(named) - MOST_ROWS} more" if len(named) > MOST_ROWS else ""
        raise NonFiniteError(
            f"step {step + 1}: {what}. Rows of the batch: {', '.join(named[:MOST_ROWS])}{more}. "
            f"The weights are those of step {step}. Look at the rows with `penstock show`, lower optim.lr, or use "
            "another model.precision."
        )
