"""Targets of verification: a trainer, model or step returned by a factory, or `penstock train` with a configuration.

A target runs its training loop in this process until the observer ends it. It cuts model and batches to the limits,
writes only to a temporary folder, and reports to no tracker.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.train.verify.observations import BatchFacts
from penstock.train.verify.probe_inputs import Canaries, shrink_model


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """How to create a target: from a Penstock configuration, or from a factory `module:function`."""

    config: str | None = None
    method: str | None = None
    overrides: tuple[str, ...] = ()
    factory: str | None = None


@dataclass(slots=True)
class ProbeLimits:
    """Limits of a probe's run. None: not cut."""

    steps: int = 2
    micros: int = 8
    layers: int | None = 2
    tokens: int | None = 16
    rows: int = 2
    folder: Path = field(default_factory=Path)


class Target(Protocol):
    """Something that trains."""

    model: Any  # None if unknown before training starts
    conditions: list[str]
    promised: dict[str, Any]

    def run(self) -> None:
        """Trains until the observer has seen enough."""
        ...

    def batches(self) -> BatchFacts | None:
        """Counts over the batches, if the target exposes them."""
        ...


def make_target(
    spec: TargetSpec, limits: ProbeLimits, canaries: Canaries | None = None, off: tuple[str, ...] = ()
) -> Target:
    """Creates the target of a factory or a configuration; `off`: kernels to disable in Penstock's trainer."""
    if spec.factory is None:
        from penstock.train.verify.penstock_trainer import PenstockTrainer

        return PenstockTrainer(spec, limits, canaries, off)
    result = _called(spec)
    trainers = sys.modules.get("transformers.trainer")
    if trainers is not None and isinstance(result, trainers.Trainer):
        from penstock.train.verify.hf_trainer import HfTrainer

        return HfTrainer(result, limits, canaries)
    if isinstance(result, nn.Module):
        return BareModel(result, limits)
    if callable(result):
        return StepFunction(result)
    raise UsageError(
        f"--target {spec.factory} returned {type(result).__name__}; expected a transformers or TRL trainer, a model, "
        "or a function that runs one training step."
    )


def uses_trl(spec: TargetSpec) -> bool:
    """Whether a factory's module mentions TRL; importing TRL just to find out would take seconds."""
    module = inspect.getmodule(_factory(spec))
    return "trl" in sys.modules or (module is not None and "trl" in inspect.getsource(module))


def _factory(spec: TargetSpec) -> Callable[..., Any]:
    assert spec.factory is not None
    name, colon, function = spec.factory.partition(":")
    if not colon:
        raise UsageError(f"--target {spec.factory}: expected module:function, such as my_module:make_trainer.")
    here, top = Path.cwd(), name.partition(".")[0]
    if ((here / top).is_dir() or (here / f"{top}.py").is_file()) and str(here) not in sys.path:
        sys.path.insert(0, str(here))  # otherwise the current folder may hold anything
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"--target {spec.factory}: {name!r} can't be imported from {Path.cwd()}: {error}. "
            "Run it where the module is, or set PYTHONPATH."
        ) from error
    factory: Callable[..., Any] | None = getattr(module, function, None)
    if factory is None:
        raise UsageError(f"--target {spec.factory}: module {name!r} has no {function!r}.")
    return factory


def _called(spec: TargetSpec) -> Any:
    factory = _factory(spec)
    parameters = inspect.signature(factory).parameters.values()
    takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return factory(spec.config) if takes and spec.config is not None else factory()


class BareModel:
    """A bare model, trained with its own loss on random tokens by plain gradient descent."""

    def __init__(self, model: nn.Module, limits: ProbeLimits) -> None:
        self._limits = limits
        self.model: Any = model
        self.promised: dict[str, Any] = {}
        cut = shrink_model(model, limits.layers) if limits.layers is not None else None
        self.conditions = ["random tokens", *filter(None, [cut])]

    def run(self) -> None:
        """Takes gradient descent steps on a single batch."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = self.model.to(device).train()
        vocabulary = model.get_input_embeddings().weight.shape[0]
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (self._limits.rows, self._limits.tokens or 64), generator=draw).to(device)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(self._limits.steps):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def batches(self) -> None:
        """None: the tokens are random."""
        return


class StepFunction:
    """A function that runs one training step."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.model = None
        self.conditions = ["batches and model as the function creates them"]
        self.promised: dict[str, Any] = {}

    def run(self) -> None:
        """Calls it until the observer ends the loop, at most 16 times in case it never calls backward."""
        for _ in range(16):
            self._step()

    def batches(self) -> None:
        """None: the batches are inside the function."""
        return
