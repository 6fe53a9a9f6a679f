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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from penstock.arrays import Int64
from penstock.errors import NonFiniteError, UnsupportedError, UsageError
from penstock.load.collate import Batch, Counts
from penstock.load.loader import Loader
from penstock.load.options import Collate
from penstock.load.view import Served
from penstock.train.checkpoint import Checkpoints
from penstock.train.config import OptimConfig, ReferenceMode, Schedule, TrainConfig
from penstock.train.data import Data, source_rows
from penstock.train.kto import Kto
from penstock.train.metrics import EvalReport, MetricsWriter, Report, StepReport, Tracking
from penstock.train.model import add_adapters, check_fits, dtypes_of, embeddings, load_model, weights_digest
from penstock.train.objective import Dpo, FusedDpo, Groups, Objective, Policy, Sft
from penstock.train.reference import (
    AdapterReference,
    CachedReferences,
    FrozenReference,
    LiveReferences,
    OnScored,
    ReferenceStore,
)
from penstock.train.run_process import Signals
from penstock.train.validation import Method, check_isolation

if TYPE_CHECKING:
    from accelerate import Accelerator


# ---- schedule --------------------------------------------------------------------------------------------------------
#
# AdamW and its learning rate, which depends only on the step, so there is no scheduler state to save.


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable weights; weight decay applies to matrices but not to norms and biases."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trained if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """The number of warm-up steps, from a fraction of the run or a number."""
    if config.warmup < 0 or config.warmup != config.warmup:
        raise UsageError(f"optim.warmup={config.warmup} is neither a fraction of the run nor a number of steps.")
    if config.warmup < 1:
        return int(config.warmup * steps)
    warmup = int(config.warmup)
    if warmup >= steps:
        raise UsageError(
            f"optim.warmup={warmup} steps, but the run has only {steps}; the peak would never be reached. "
            "Lower it, or train longer."
        )
    return warmup


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of a step (from 0) in a run of `steps` steps."""
    warmup = warmup_steps(config, steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(steps - warmup, 1)
    match config.schedule:
        case Schedule.CONSTANT:
            share = 1.0
        case Schedule.LINEAR:
            share = 1 - done
        case Schedule.COSINE:
            share = 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.final + (1 - config.final) * share)


# ---- evaluate --------------------------------------------------------------------------------------------------------
#
# Evaluation: the mean of the objective over held-out data, each item once, unshuffled.


class Evaluator:
    """Evaluates an objective over a loader."""

    def __init__(self, accelerator: Accelerator, policy: Policy, objective: Objective, loader: Loader) -> None:
        self._accelerator, self._policy, self._objective, self._loader = accelerator, policy, objective, loader

    def run(self, step: int) -> EvalReport:
        """Evaluates after `step` steps; the model is left in training mode."""
        started = time.perf_counter()
        sums: dict[str, float] = {"weight": 0.0, "loss": 0.0}
        self._policy.model.eval()
        with torch.no_grad():
            for batch in self._loader:
                found = self._objective.loss(batch)
                sums["weight"] += self._objective.weight(batch)
                sums["loss"] += float(found.loss)
                for name, value in found.measures.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                for name, pair in found.groups.items():
                    for k, value in enumerate(pair):
                        sums[f"{name} {k}"] = sums.get(f"{name} {k}", 0.0) + float(value)
        self._policy.model.train()
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self._accelerator.device)
        total = dict(zip(names, self._accelerator.reduce(values, "sum").tolist(), strict=True))
        weight = total.pop("weight") or 1.0
        loss = total.pop("loss") / weight
        groups = sorted({name.rpartition(" ")[0] for name in total if " " in name})
        means = group_means(groups, [total.pop(f"{name} {k}") for name in groups for k in range(2)])
        measures = {name: value / weight for name, value in total.items()}
        return EvalReport(step, loss, time.perf_counter() - started, {**measures, **means})


def group_means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The means of groups, given the sum of losses and of weights of each in turn; groups without weight have none."""
    return {name: loss / weight for name, loss, weight in zip(names, sums[0::2], sums[1::2], strict=True) if weight}


# ---- loop ------------------------------------------------------------------------------------------------------------


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
        settings = self.loader.settings
        if settings.capacity is None:
            return max(counts.tokens + counts.padding, 1)
        _, world_size = settings.ranks
        slots = world_size * -(-settings.batch_size // world_size)
        return max(slots - counts.filler_rows, 1) * settings.capacity

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
        named = gather_object(source_rows(self.loader.served, items))
        if not named:
            items = [int(item) for batch in batches for item in batch.items]
            named = gather_object(source_rows(self.loader.served, items))
        more = f" and {len(named) - MOST_ROWS} more" if len(named) > MOST_ROWS else ""
        raise NonFiniteError(
            f"step {step + 1}: {what}. Rows in the batch: {', '.join(named[:MOST_ROWS])}{more}. "
            f"The weights are still those of step {step}. Inspect the rows with `penstock show`, lower optim.lr, or "
            "change model.precision."
        )


# ---- assembly --------------------------------------------------------------------------------------------------------
#
# Assembles model, adapters, optimiser, reference and objectives from the configuration.
#
# The order matters: a live reference is copied and the weights are hashed before anything changes them, adapters are
# added before the optimiser is created, and packing is tested on the model exactly as it will be trained.


Items = Callable[[], Int64]  # numbers of items, which take a moment to find


class Assembly(NamedTuple):
    """A model prepared for (distributed) training, with its optimiser and objective."""

    policy: Policy
    optimizer: Any
    objectives: Callable[
        [Served, Items], Objective
    ]  # the objective over a view or mixture, of which `Items` are visited


def assemble(
    method: Method, config: TrainConfig, data: Data, accelerator: Accelerator, on_scored: OnScored = lambda _: None
) -> Assembly:
    """Loads, checks and prepares the model. Random weights and adapters depend on torch's seed."""
    device = accelerator.device
    plain = load_model(config, device, fuse_loss=method is Method.SFT)
    check_fits(plain, _vocabulary(data.train), max(_longest(data.train), _longest(data.held_out)))
    name = weights_digest(plain) if method is Method.DPO and config.dpo.reference is ReferenceMode.CACHED else ""
    frozen = None
    live = method is Method.KTO or (method is Method.DPO and config.dpo.reference is ReferenceMode.LIVE)
    if live and not config.lora.rank:
        frozen = FrozenReference.copied(plain, device)
    adapted = add_adapters(plain, config.lora) if config.lora.rank else plain
    model, optimizer = accelerator.prepare(adapted, make_optimizer(adapted, config.optim))
    policy = Policy(model, plain, device, dtypes_of(config.model.precision, device).autocast)
    if config.loader.collate is Collate.PACKED:
        _check_packing(policy)
    if method is Method.SFT:
        fused = config.liger.enabled and config.liger.fused_loss
        return Assembly(policy, optimizer, lambda served, _: Sft(policy, config.loss.mean, fused, Groups(served)))
    reference = frozen or (AdapterReference(policy, adapted) if config.lora.rank else FrozenReference(model, plain))
    if method is Method.KTO:
        limit = config.view.max_length
        return Assembly(
            policy, optimizer, lambda served, _: Kto(policy, reference, config.kto, accelerator, limit, Groups(served))
        )
    return Assembly(policy, optimizer, _dpo(config, policy, reference, name, accelerator, on_scored))


def _dpo(
    config: TrainConfig,
    policy: Policy,
    reference: AdapterReference | FrozenReference,
    name: str,
    accelerator: Accelerator,
    on_scored: OnScored,
) -> Callable[[Served, Items], Objective]:
    """Returns a factory of DPO objectives; cached references are loaded or computed when it is called."""
    chosen, live = config.dpo, LiveReferences(policy, reference)
    if config.liger.enabled and config.liger.fused_loss:
        return lambda *_: FusedDpo(policy, reference, chosen.beta)
    if chosen.reference is ReferenceMode.LIVE:
        return lambda served, _: Dpo(policy, live, chosen.beta, chosen.label_smoothing, Groups(served))
    identity = f"{name} {config.model.precision} {policy.autocast} {policy.plain.config._attn_implementation}"
    rows = config.loader.micro_batch or -(-config.loader.batch_size // accelerator.num_processes)
    store = ReferenceStore(accelerator, live, identity, rows, config.output, on_scored)

    def objective(served: Served, items: Items) -> Objective:
        references = CachedReferences(store.values(served, items()), policy.device)
        return Dpo(policy, references, chosen.beta, chosen.label_smoothing, Groups(served))

    return objective


def _check_packing(policy: Policy) -> None:
    attention = str(policy.plain.config._attn_implementation)
    if attention.startswith("flex") and policy.device.type == "cpu":
        raise UnsupportedError(f"loader.collate=packed: attention {attention!r} does not run on the CPU. Use sdpa.")

    def forward(tensors: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = policy(tensors).logits.float()
            return logits

    policy.model.eval()
    check_isolation(forward, embeddings(policy.plain), attention)
    policy.model.train()


def _vocabulary(served: Served) -> int:
    return served.views[0].dataset.vocabulary.size


def _longest(served: Served | None) -> int:
    return 0 if served is None else int(served.lengths.max(initial=0))
