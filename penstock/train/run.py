"""A whole run: configuration in, trained model out. What can't be is refused first, from the cheapest check on.

check the configuration → prepare the data → load the model → check that they fit and that packing isolates
→ resume → train → write the final model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arguments import LoaderArguments
from penstock.build.progress import OnProgress
from penstock.feed.loader import Loader
from penstock.feed.settings import Collate
from penstock.train.config import TrainConfig
from penstock.train.data import Data, Served, has_fractional_weights, open_data
from penstock.train.errors import PromiseError, TrainError
from penstock.train.journal import Journal, Report, StepReport
from penstock.train.lock import locked
from penstock.train.promises import Method, check_config
from penstock.train.reading import Given, read_config
from penstock.train.signals import Signals

if TYPE_CHECKING:
    from accelerate import Accelerator

    from penstock.train.loop import OnReport, Trainer


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    output: Path
    steps: int  # done, those of earlier runs included
    model: Path | None  # the final model; None when a signal ended the run
    signal: int  # the signal that ended it, or 0
    first: StepReport | None  # of this process
    last: StepReport | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "output": str(self.output),
            "steps": self.steps,
            "model": None if self.model is None else str(self.model),
            "signal": self.signal,
            "first": None if self.first is None else self.first.to_json(),
            "last": None if self.last is None else self.last.to_json(),
        }


def train_sft(config: Given, *overrides: str, **callbacks: Any) -> Outcome:
    """Supervised fine-tuning, by a YAML file, a mapping or a `TrainConfig`, and overrides such as `optim.lr=1e-5`.

    Callbacks: `on_progress` while data is prepared, `on_report` after every step and evaluation.
    """
    return train(Method.SFT, config, overrides, **callbacks)


def train_dpo(config: Given, *overrides: str, **callbacks: Any) -> Outcome:
    """Direct preference optimisation; arguments as of `train_sft`."""
    return train(Method.DPO, config, overrides, **callbacks)


def train_kto(config: Given, *overrides: str, **callbacks: Any) -> Outcome:
    """Learning from answers labelled as good or bad; arguments as of `train_sft`."""
    return train(Method.KTO, config, overrides, **callbacks)


def train(
    method: Method,
    config: Given,
    overrides: Iterable[str] = (),
    *,
    on_progress: OnProgress | None = None,
    on_report: OnReport | None = None,
) -> Outcome:
    """Train by a method; `train_sft`, `train_dpo` and `train_kto` call this."""
    chosen = read_config(config, overrides)
    check_config(chosen, method)
    signals = Signals()
    with signals.handled(), locked(chosen.output):
        data = open_data(chosen, on_progress)
        _check_data(chosen, method, data)
        return _trained(method, chosen, data, signals, on_report)


def _check_data(config: TrainConfig, method: Method, data: Data) -> None:
    for served in (data.train, data.held_out):
        if served is None:
            continue
        wanted = Method.DPO if served.is_preference else Method.KTO if served.is_labelled else Method.SFT
        if wanted is not method:
            labels = " To leave the labels out of account, prepare with format: messages or prompt_completion."
            raise PromiseError(
                f"the data holds {wanted.data}: that is for `penstock train {wanted}`."
                f"{labels if wanted is Method.KTO else ''}"
            )
    if config.liger.enabled and config.liger.fused_loss and has_fractional_weights(data.train):
        raise PromiseError(
            "liger.fused_loss knows no weights of messages but 0 and 1, and the data has others. "
            "Set liger.fused_loss=false."
        )


def _trained(method: Method, config: TrainConfig, data: Data, signals: Signals, on_report: OnReport | None) -> Outcome:
    from penstock.train.final import save_model

    seen: list[StepReport] = []

    def report(entry: Report) -> None:
        if isinstance(entry, StepReport):
            seen[1:] = [entry]
        if on_report is not None:
            on_report(entry)

    trainer = _ready(method, config, data, signals, report)
    done = trainer.resumed()
    with _explained(config.output):
        try:
            done = trainer.fit(done)
        finally:
            trainer.journal.close()
            trainer.tracking.close()
        finished = done == trainer.loader.steps
        path = save_model(trainer.accelerator, trainer.policy.model, config, data.train) if finished else None
    stopped = 0 if finished else signals.received
    return Outcome(config.output, done, path, stopped, seen[0] if seen else None, seen[-1] if seen else None)


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    """What the system refuses, in clear words."""
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"{error.filename or output}: {error.strerror or error}. Once that is mended, run the same command again: "
            "it goes on from the last checkpoint."
        ) from error


def _ready(method: Method, config: TrainConfig, data: Data, signals: Signals, on_report: OnReport) -> Trainer:
    """Everything loaded, checked and prepared for distribution."""
    from accelerate.utils import set_seed

    from penstock.train.assembly import assemble
    from penstock.train.checkpoint import Checkpoints
    from penstock.train.evaluate import Evaluator
    from penstock.train.loop import Trainer
    from penstock.train.schedule import warmup_steps
    from penstock.train.tracking import Tracking

    accelerator = _accelerator(config)
    loader = _loader(config, data.train, accelerator)
    warmup_steps(config.optim, loader.steps or 1)
    checkpoints = Checkpoints(accelerator, config)
    checkpoints.last()  # refuses what it can't go on from, before the model is loaded
    set_seed(config.seed)
    policy, optimizer, objectives = assemble(method, config, data, accelerator)
    evaluator = None
    if data.held_out is not None:
        held_out = _loader(config, data.held_out, accelerator, evaluates=True)
        evaluator = Evaluator(accelerator, policy, objectives(data.held_out), held_out)
    objective = objectives(data.train)
    set_seed(config.seed + accelerator.process_index)  # ranks start alike, then draw dropout of their own
    return Trainer(
        config=config,
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        objective=objective,
        loader=loader,
        evaluator=evaluator,
        checkpoints=checkpoints,
        journal=Journal(config.output, config.log, writes=accelerator.is_main_process),
        tracking=Tracking(accelerator, config),
        signals=signals,
        on_report=on_report,
    )


def _accelerator(config: TrainConfig) -> Accelerator:
    import torch
    from accelerate import Accelerator

    # Precision is ours: accelerate's would also turn the logits of every position to fp32.
    return Accelerator(
        mixed_precision="no",
        cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        log_with=list(config.log.trackers) or None,
        project_dir=str(config.output),
    )


def _loader(config: TrainConfig, served: Served, accelerator: Accelerator, *, evaluates: bool = False) -> Loader:
    feed = config.feed
    options: LoaderArguments = {
        "batch_size": feed.batch_size,
        "micro_batch": feed.micro_batch or (1 if feed.collate is Collate.PACKED else None),
        "capacity": feed.capacity,
        "seed": config.seed,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "ahead": feed.ahead,
        "framework": "torch",
        "device": str(accelerator.device) if accelerator.device.type == "cuda" else None,
    }
    if feed.collate is not None:
        options["collate"] = feed.collate
    if evaluates:
        options.update({"shuffle": False, "epochs": 1})
    else:
        options.update({"tail": feed.tail, "epochs": feed.epochs, "steps": feed.steps})
    return Loader(served, **options)
