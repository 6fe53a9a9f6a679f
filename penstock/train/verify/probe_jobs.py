"""The jobs of a probe, and how they run inside its process. Jobs and results are sent as JSON."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np


class JobKind(StrEnum):
    """What a job observes."""

    RUN = "run"
    ISOLATION = "isolation"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """One observation of one target, with some of Liger's kernels turned off."""

    kind: JobKind
    target: dict[str, Any]
    off: tuple[str, ...] = ()
    steps: int = 2
    layers: int = 2
    tokens: int = 16
    port: int | None = None  # where the ranks of a launcher rendezvous

    def to_json(self) -> dict[str, Any]:
        """The job as JSON-compatible values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ProbeJob:
        """The inverse of `to_json`."""
        return cls(**{**values, "kind": JobKind(values["kind"]), "off": tuple(values["off"])})


def run_job(job: ProbeJob) -> dict[str, Any]:
    """Runs a job in this process."""
    import torch

    from penstock.train.verify.target import ProbeLimits, TargetSpec

    if job.port is not None:  # the ranks of a launcher meet again for each job, on its own port
        os.environ |= {"MASTER_PORT": str(job.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # too small to gain from threads
    spec = TargetSpec(**{**job.target, "overrides": tuple(job.target.get("overrides", ()))})
    with tempfile.TemporaryDirectory(prefix="penstock-verify-", ignore_cleanup_errors=True) as folder:
        cut = not torch.cuda.is_available()
        limits = ProbeLimits(
            steps=job.steps,
            layers=job.layers if cut else None,
            tokens=job.tokens if cut else None,
            folder=Path(folder),
        )
        match job.kind:
            case JobKind.RUN:
                return dict(_run(spec, limits, job))
            case JobKind.ISOLATION:
                return {"cases": _isolation(spec, limits)}
            case JobKind.DATA:
                return dict(_data(spec, limits))


def _repair_interpreter() -> None:
    """Patches Triton's interpreter if there is no GPU; without triton there is nothing to do."""
    import torch

    if torch.cuda.is_available():
        return
    try:
        repair()
    except ImportError:
        return  # the observer reports failed imports


def _run(spec: Any, limits: Any, job: ProbeJob) -> dict[str, Any]:
    from penstock.train.verify.kernels import kernels_disabled
    from penstock.train.verify.observer import Observer
    from penstock.train.verify.target import make_target

    _repair_interpreter()
    target = None
    with Observer(limits.steps, limits.micros) as observer, kernels_disabled(job.off if spec.factory else ()):
        target = make_target(spec, limits, None, job.off)
        target.run()
    extra = (spec.factory.partition(":")[0],) if spec.factory else ()
    conditions = target.conditions if target is not None else []
    facts = observer.facts(target.promised if target is not None else {}, conditions, extra)
    facts["batches"] = target.batches() if target is not None else None
    return dict(facts)


def _isolation(spec: Any, limits: Any) -> list[Any]:
    from penstock.train.verify import isolation
    from penstock.train.verify.kernels import FLAGS, import_errors, kernels_disabled
    from penstock.train.verify.probe_inputs import Canaries, patch_trl
    from penstock.train.verify.target import BareModel, StepFunction, make_target, uses_trl

    limits = replace(limits, tokens=None if limits.tokens is None else 64)
    # Liger has no attention kernels, and the others only slow the experiment down.
    off = tuple(FLAGS) if import_errors()[0] is None else ()
    canaries = Canaries(vocabulary=512)
    with kernels_disabled(off if spec.factory else ()):
        if spec.factory is None:
            return [isolation.trainer_case("as trained", make_target(spec, limits, canaries, tuple(off)), None)]
        with patch_trl(canaries) if uses_trl(spec) else nullcontext():
            target = make_target(spec, limits, canaries, off)
        if isinstance(target, BareModel):
            return list(isolation.model_cases(target.model))
        if isinstance(target, StepFunction):
            return []
        return [isolation.trainer_case("as trained", target, target.model)]


def _data(spec: Any, limits: Any) -> dict[str, Any]:
    from penstock.train.config import read_config
    from penstock.train.verify.penstock_data import data_facts, explanations
    from penstock.train.verify.penstock_trainer import with_first_rows

    config = read_config(spec.config, spec.overrides)
    found = list(explanations(config))
    missed = [entry for entry in found if not entry.hit]
    reasons = [
        f"{entry.slices - entry.found} of {entry.slices} slices to encode"
        + (f"; nearest {entry.nearest}: {'; '.join(entry.differences)}" if entry.nearest else "")
        for entry in missed
    ] or [f"{entry.slices} slices under {entry.key}" for entry in found]
    if missed:
        config = with_first_rows(config, limits.folder / "cache")
    return dict(data_facts(config, not missed, reasons))


# ---- interpreter -----------------------------------------------------------------------------------------------------
#
# Patches Triton's interpreter so that Liger's kernels run without a GPU.
#
# `TRITON_INTERPRET=1` must be set before triton is imported. As of triton 3.9 the interpreter has four gaps, which
# `repair` fills. The interpreter tests wiring and numbers, not speed: a step of 28 tokens and 2 layers takes about 2 s.


def repair() -> None:
    """Patches the interpreter. Call it after importing triton and before any kernel runs."""
    import torch
    from triton.runtime import interpreter

    _wrap_floats(interpreter)
    _compute_bf16_in_fp32(interpreter)
    kernel = interpreter.InterpretedFunction
    kernel.run = torch._dynamo.disable(kernel.run)  # type: ignore[no-untyped-call]
    _replace_libdevice()


def _wrap_floats(interpreter: Any) -> None:
    """Wraps Python floats in tensors: kernels receive them bare but expect a typed value."""
    import triton.language as tl

    plain = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return plain(argument)

    interpreter._implicit_cvt = converted


def _compute_bf16_in_fp32(interpreter: Any) -> None:
    """Computes bf16 in fp32: the interpreter stores it as integers and does integer arithmetic, mostly yielding NaN."""
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    binary, unary = builder.binary_op, builder.unary_op

    def widened(self: Any, handle: Any) -> Any:
        return self.create_fp_ext(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def narrowed(self: Any, result: Any) -> Any:
        if result.data.dtype == np.bool_:  # a comparison
            return result
        return self.create_fp_trunc(result, tl.bfloat16)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if tl.bfloat16 not in (left.dtype.scalar, right.dtype.scalar):
            return binary(self, left, right, operation)
        return narrowed(self, binary(self, widened(self, left), widened(self, right), operation))

    def unary_op(self: Any, argument: Any, operation: Any) -> Any:
        if argument.dtype.scalar != tl.bfloat16:
            return unary(self, argument, operation)
        return narrowed(self, unary(self, widened(self, argument), operation))

    builder.binary_op, builder.unary_op = binary_op, unary_op


def _replace_libdevice() -> None:
    """Replaces libdevice functions, which are stubs in the interpreter, with Triton's own."""
    import liger_kernel.ops
    import triton.language as tl

    def tanh(x: Any) -> Any:
        return 2 * tl.sigmoid(2 * x) - 1

    def rsqrt(x: Any) -> Any:
        return tl.math.rsqrt(x)

    assert liger_kernel.ops
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_kernel.ops"):
            for function in (tanh, rsqrt):
                found = getattr(module, function.__name__, None)
                if found is not None and not isinstance(found, type(module)):
                    setattr(module, function.__name__, function)
