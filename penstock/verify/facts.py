"""What probes observe, as plain values that travel as JSON from the process that ran to the one that judges."""

from __future__ import annotations

from typing import Any, TypedDict


class KernelFacts(TypedDict):
    """One of Liger's kernels: completed calls, what the profiler saw, and how many modules are patched with it."""

    forward: int
    backward: int
    profiled: int
    names: list[str]
    patched: int
    modules: int


class StepFacts(TypedDict):
    """Numbers of the backward calls and optimiser steps, in order; None stands for what is not finite."""

    losses: list[float | None]
    gradients: list[float | None]


class BatchFacts(TypedDict):
    """What the batches of a trainer held."""

    rows: int
    cells: int
    tokens: int
    trained: int
    rows_untrained: int
    stops: int
    stops_trained: int
    keys: list[str]


class RunFacts(TypedDict):
    """A short training run."""

    device: str
    interpreted: bool
    conditions: list[str]
    model_type: str | None
    promised: dict[str, Any]  # what the configuration says, as far as the target tells
    liger_error: str | None  # why Liger's layer kernels can't be imported here
    liger_dpo_error: str | None
    liger_support: list[str] | None  # kernels that Liger has for this architecture; None: none at all
    kernels: dict[str, KernelFacts]
    steps: StepFacts
    attention: str | None
    operations: dict[str, int]  # of the profiler: those that tell which attention ran
    vocabulary: int | None
    tokens: int  # of the largest forward pass
    logit_rows: int  # rows of the largest tensor as wide as the vocabulary
    head_rows: int  # rows of the largest output of the last layer's module
    linear_dtypes: dict[str, int]
    layer_forwards: int
    layer_recomputed: int
    layer_backwards: int
    parameters: int
    trainable: int
    adapters: int
    graphs: int  # captured by torch.compile
    batches: BatchFacts | None
    error: str | None  # what ended the run before its time
    subjects: list[dict[str, str | None]]


class IsolationCase(TypedDict):
    """One experiment: how far the hidden states of the others moved when one sequence was changed."""

    name: str
    packed: bool
    own: float  # of the changed sequence: the positive control
    others: float
    noise: float  # between two equal runs
    sequences: int
    error: str | None


class DataFacts(TypedDict):
    """What Penstock's own data says."""

    hit: bool | None
    reasons: list[str]
    rows: int
    kept: int
    tokens: int
    trained: int
    untrained_rows: int  # dropped since nothing of them is trained
    stops: int
    stops_trained: int
    packed: bool
    efficiency: float | None
    ahead: int
    collate_seconds: float
    waits: list[float]
    step_seconds: float
