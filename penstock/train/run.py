"""Runs training from configuration to final model. Checks come first, the cheapest ones before the others.

validate the configuration → prepare the data → load the model → check that they fit and that packing isolates
→ resume → train → save the final model
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.build.progress import OnProgress
from penstock.errors import TrainError, UnsupportedError
from penstock.load.loader import Loader, open_loader
from penstock.load.options import Collate, Framework, IncompleteStep
from penstock.load.view import Served
from penstock.train.config import ConfigSource, TrainConfig, read_config
from penstock.train.data import Data, OnStatus, has_fractional_weights, open_data
from penstock.train.metrics import MetricsWriter, Report, StepReport
from penstock.train.run_process import Signals, output_lock
from penstock.train.validation import Method, check_config, method_named

if TYPE_CHECKING:
    from accelerate import Accelerator

    from penstock.train.loop import OnReport, Trainer
    from penstock.train.reference import OnScored, Scored


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run."""

    output: Path
    steps: int  # completed, including those before a resume
    model: Path | None  # the final model; None if a signal ended the run
    signal: int  # the signal that ended the run, or 0
    first: StepReport | None  # of this process
    last: StepReport | None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        return {
            "output": str(self.output),
            "steps": self.steps,
            "model": None if self.model is None else str(self.model),
            "signal": self.signal,
            "first": None if self.first is None else self.first.to_json(),
            "last": None if self.last is None else self.last.to_json(),
        }


def train(
    method: str,
    config: ConfigSource,
    *overrides: str,
    on_progress: OnProgress | None = None,
    on_report: OnReport | None = None,
    on_status: OnStatus | None = None,
    on_scored: OnScored | None = None,
) -> TrainResult:
    """Train with `sft`, `dpo` or `kto`, as a YAML file, a mapping or a `TrainConfig` says.

    Overrides are written as on the command line: `"optim.lr=1e-5"`. `on_progress` is called while data is prepared,
    `on_scored` while the reference model scores pairs, `on_report` after every step and evaluation, `on_status` with
    what happens before the first step.
    """
    objective, say = method_named(method), on_status or _silent
    chosen = read_config(config, overrides)
    check_config(chosen, objective)
    signals = Signals()
    with signals.handled(), output_lock(chosen.output):
        _check_output(chosen.output)
        data = open_data(chosen, on_progress, say)
        _check_data(chosen, objective, data)
        say(f"model: loading {chosen.model.path or chosen.model.init}")
        return _trained(objective, chosen, data, signals, on_report, say, on_scored or _silent)


def _silent(_: object) -> None:
    """Nobody listens."""


def _check_output(output: Path) -> None:
    """Refuse an output that can't be written, before the model is loaded. The lock has shown that files can be made."""
    for name in ("checkpoints", "model"):
        path = output / name
        if path.exists() and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
            why = "you may not write to it" if path.is_dir() else "it is not a folder"
            raise TrainError(f"{path}: {why}. Choose another output, or mend that first.")
    for name in ("metrics.jsonl", "loss.svg"):
        if (output / name).exists() and not os.access(output / name, os.W_OK):
            raise TrainError(f"{output / name}: you may not write to it. Choose another output, or mend that first.")


def _check_data(config: TrainConfig, method: Method, data: Data) -> None:
    for served in (data.train, data.held_out):
        if served is None:
            continue
        wanted = Method.DPO if served.is_preference else Method.KTO if served.is_labelled else Method.SFT
        if wanted is not method:
            labels = " To ignore the labels, prepare with format: messages or prompt_completion."
            raise UnsupportedError(
                f"the data consists of {wanted.data}. Use `penstock train {wanted}`."
                f"{labels if wanted is Method.KTO else ''}"
            )
    if config.liger.enabled and config.liger.fused_loss and has_fractional_weights(data.train):
        raise UnsupportedError(
            "liger.fused_loss only supports message weights of 0 and 1, and the data has others. "
            "Set liger.fused_loss=false."
        )


def _trained(
    method: Method,
    config: TrainConfig,
    data: Data,
    signals: Signals,
    on_report: OnReport | None,
    on_status: OnStatus,
    on_scored: OnScored,
) -> TrainResult:
    from penstock.train.checkpoint import save_model

    seen: list[StepReport] = []

    def report(entry: Report) -> None:
        if isinstance(entry, StepReport):
            seen[1:] = [entry]
        if on_report is not None:
            on_report(entry)

    def scored(progress: Scored) -> None:
        if not progress.pairs:
            on_status(f"reference: scoring the {progress.total:,} pairs that this run visits and no run has scored yet")
        on_scored(progress)

    trainer = _ready(method, config, data, signals, report, scored)
    done = trainer.resume()
    on_status(_described(trainer, done))
    with _explained(config.output):
        try:
            done = trainer.fit(done)
        except BaseException:
            with suppress(OSError):  # on a full disk, too: the first error is the one to report
                trainer.close()
            raise
        trainer.close()
        finished = done == trainer.loader.steps
        path = save_model(trainer.accelerator, trainer.policy.model, config, data.train) if finished else None
    stopped = 0 if finished else signals.received
    return TrainResult(config.output, done, path, stopped, seen[0] if seen else None, seen[-1] if seen else None)


def _described(trainer: Trainer, done: int) -> str:
    """What is about to be trained, in a line."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in trainer.policy.model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, takes in sizes if takes)
    steps = trainer.loader.steps or 0
    at = f"resuming from step {done} of {steps}" if 0 < done < steps else f"{steps} steps"
    if done >= steps:
        at = f"all {steps} steps are done already"
    where = f"{trainer.accelerator.device} × {trainer.accelerator.num_processes}"
    share = f"{trained:,} of {total:,} parameters trained ({trained / max(total, 1):.1%})"
    return f"training: {share}, on {where}, {at}"


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    """Turns OS errors into errors that state the remedy."""
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"{error.filename or output}: {error.strerror or error}. Once this is fixed, run the same command again: "
            "it resumes from the last checkpoint."
        ) from error


def _ready(
    method: Method, config: TrainConfig, data: Data, signals: Signals, on_report: OnReport, on_scored: OnScored
) -> Trainer:
    """Loads, checks and prepares everything for (distributed) training."""
    from accelerate.utils import set_seed

    from penstock.train.checkpoint import Checkpoints
    from penstock.train.loop import Evaluator, Trainer, assemble, warmup_steps
    from penstock.train.metrics import Tracking

    accelerator = _accelerator(config)
    loader = _loader(config, data.train, accelerator)
    warmup_steps(config.optim, loader.steps or 1)
    checkpoints = Checkpoints(accelerator, config)
    saved = checkpoints.last()  # raises before the model is loaded if the run can't resume
    done, steps = 0 if saved is None else saved.step, loader.steps or 0
    set_seed(config.seed)
    policy, optimizer, objectives = assemble(method, config, data, accelerator, on_scored)
    evaluator = None
    if data.held_out is not None and done < steps:
        held_out = _loader(config, data.held_out, accelerator, evaluates=True)
        judge = objectives(data.held_out, lambda: held_out.plan.visited(0, held_out.steps or 0))
        evaluator = Evaluator(accelerator, policy, judge, held_out)
    objective = objectives(data.train, lambda: loader.plan.visited(done, steps))
    set_seed(config.seed + accelerator.process_index)  # same initial weights on all ranks, different dropout
    return Trainer(
        config=config,
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        objective=objective,
        loader=loader,
        evaluator=evaluator,
        checkpoints=checkpoints,
        metrics=MetricsWriter(config.output, config.log, writes=accelerator.is_main_process),
        tracking=Tracking(accelerator, config),
        signals=signals,
        on_report=on_report,
    )


def _accelerator(config: TrainConfig) -> Accelerator:
    import torch
    from accelerate import Accelerator

    # We handle precision ourselves: accelerate would also convert the logits of all positions to fp32.
    return Accelerator(
        mixed_precision="no",
        cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        log_with=list(config.log.trackers) or None,
        project_dir=str(config.output),
    )


def _loader(config: TrainConfig, served: Served, accelerator: Accelerator, *, evaluates: bool = False) -> Loader:
    given = config.loader
    options = replace(
        given,
        micro_batch=given.micro_batch or (1 if given.collate is Collate.PACKED else None),
        seed=config.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        framework=Framework.TORCH,
        device=str(accelerator.device) if accelerator.device.type == "cuda" else None,
    )
    if evaluates:
        options = replace(options, shuffle=False, incomplete_step=IncompleteStep.FILL, epochs=1, steps=None)
    return open_loader(served, options)
