"""Observations as plain values, sent as JSON from the probe's process to the one that judges them."""

from __future__ import annotations

from typing import Any, TypedDict


class KernelFacts(TypedDict):
    """One of Liger's kernels: completed calls, calls seen by the profiler, and how many modules it patches."""

    forward: int
    backward: int
    profiled: int
    names: list[str]
    patched: int
    modules: int


class StepFacts(TypedDict):
    """Losses per backward call and gradient norms per optimiser step, in order; None if not finite."""

    losses: list[float | None]
    gradients: list[float | None]


class BatchFacts(TypedDict):
    """Counts over the batches of a trainer."""

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
    promised: dict[str, Any]  # what the configuration asks for, as far as the target exposes it
    liger_error: str | None  # why Liger's layer kernels can't be imported
    liger_dpo_error: str | None
    liger_support: list[str] | None  # kernels that Liger has for this architecture; None if it has none
    kernels: dict[str, KernelFacts]
    steps: StepFacts
    attention: str | None
    operations: dict[str, int]  # profiled operators that identify the attention implementation
    vocabulary: int | None
    tokens: int  # in the largest forward pass
    logit_rows: int  # rows of the largest tensor as wide as the vocabulary
    head_rows: int  # rows of the largest output of the LM head
    linear_dtypes: dict[str, int]
    layer_forwards: int
    layer_recomputed: int
    layer_backwards: int
    parameters: int
    trainable: int
    adapters: int
    graphs: int  # captured by torch.compile
    batches: BatchFacts | None
    error: str | None  # what ended the run early
    packages: list[dict[str, str | None]]


class IsolationCase(TypedDict):
    """One experiment: how much the other sequences' hidden states moved when one sequence was changed."""

    name: str
    packed: bool
    own: float  # movement of the changed sequence: the positive control
    others: float
    noise: float  # between two identical runs
    sequences: int
    error: str | None


class DataFacts(TypedDict):
    """Facts about data prepared by Penstock."""

    hit: bool | None
    reasons: list[str]
    rows: int
    kept: int
    tokens: int
    trained: int
    untrained_rows: int  # dropped because they have no trained token
    stops: int
    stops_trained: int
    packed: bool
    efficiency: float | None
    prefetch: int
    collate_seconds: float
    waits: list[float]
    step_seconds: float
