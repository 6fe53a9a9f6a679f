"""What is verified: a trainer, a model or a step, made by a factory; or Penstock's own trainer, by its configuration.

A target runs its training loop in this process until the watch ends it. It cuts model and batches where the limits say
so, writes nothing but into a temporary folder, and reports to no tracker.
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
from penstock.verify.canaries import Canaries
from penstock.verify.cutting import cut_model
from penstock.verify.facts import BatchFacts


@dataclass(frozen=True, slots=True)
class Spec:
    """How to make a target: a Penstock configuration, or `module:function`."""

    config: str | None = None
    method: str | None = None
    overrides: tuple[str, ...] = ()
    factory: str | None = None


@dataclass(slots=True)
class Limits:
    """How far a probe may go. None: not cut."""

    steps: int = 2
    micros: int = 8
    layers: int | None = 2
    tokens: int | None = 16
    rows: int = 2
    folder: Path = field(default_factory=Path)


class Target(Protocol):
    """Something that trains."""

    model: Any  # None where it is not known before it trains
    conditions: list[str]
    promised: dict[str, Any]

    def run(self) -> None:
        """Train until the watch has seen enough."""
        ...

    def batches(self) -> BatchFacts | None:
        """What the batches held, where the target shows them."""
        ...


def made(spec: Spec, limits: Limits, canaries: Canaries | None = None, off: tuple[str, ...] = ()) -> Target:
    """The target that a factory or a configuration stands for; `off`: kernels that our own trainer leaves out."""
    if spec.factory is None:
        from penstock.verify.own_trainer import OwnTrainer

        return OwnTrainer(spec, limits, canaries, off)
    result = _called(spec)
    trainers = sys.modules.get("transformers.trainer")
    if trainers is not None and isinstance(result, trainers.Trainer):
        from penstock.verify.hf_trainer import HfTrainer

        return HfTrainer(result, limits, canaries)
    if isinstance(result, nn.Module):
        return BareModel(result, limits)
    if callable(result):
        return Step(result)
    raise UsageError(
        f"--target {spec.factory} returned {type(result).__name__}. Return a transformers or TRL trainer, a model, "
        "or a function that runs one training step."
    )


def uses_trl(spec: Spec) -> bool:
    """Whether a factory's module has to do with TRL; importing TRL only for that would take seconds."""
    module = inspect.getmodule(_factory(spec))
    return "trl" in sys.modules or (module is not None and "trl" in inspect.getsource(module))


def _factory(spec: Spec) -> Callable[..., Any]:
    assert spec.factory is not None
    name, colon, function = spec.factory.partition(":")
    if not colon:
        raise UsageError(f"--target {spec.factory}: expected module:function, such as my_module:make_trainer.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    factory: Callable[..., Any] | None = getattr(importlib.import_module(name), function, None)
    if factory is None:
        raise UsageError(f"--target {spec.factory}: module {name!r} has no {function!r}.")
    return factory


def _called(spec: Spec) -> Any:
    factory = _factory(spec)
    parameters = inspect.signature(factory).parameters.values()
    takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return factory(spec.config) if takes and spec.config is not None else factory()


class BareModel:
    """A model by itself: random tokens, its own loss, plain gradient descent."""

    def __init__(self, model: nn.Module, limits: Limits) -> None:
        self._limits = limits
        self.model: Any = model
        self.promised: dict[str, Any] = {}
        cut = cut_model(model, limits.layers) if limits.layers is not None else None
        self.conditions = ["random tokens", *filter(None, [cut])]

    def run(self) -> None:
        """Steps of gradient descent on one batch."""
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
        """Random tokens say nothing."""
        return


class Step:
    """A function that runs one training step."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.model = None
        self.conditions = ["batches and model as the function makes them"]
        self.promised: dict[str, Any] = {}

    def run(self) -> None:
        """Call it until the watch has seen enough; a step without a backward call would never end."""
        for _ in range(16):
            self._step()

    def batches(self) -> None:
        """They are the function's own."""
        return
