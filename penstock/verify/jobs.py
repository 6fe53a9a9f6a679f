"""What a probe can be asked to do, and the doing of it inside the probe's process. Jobs and results travel as JSON."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any


class Kind(StrEnum):
    """What is observed."""

    RUN = "run"
    ISOLATION = "isolation"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Job:
    """One observation of one target, with some of Liger's kernels turned off."""

    kind: Kind
    target: dict[str, Any]
    off: tuple[str, ...] = ()
    steps: int = 2
    layers: int = 2
    tokens: int = 16
    port: int | None = None  # of the processes that work together

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """From plain values."""
        return cls(**{**values, "kind": Kind(values["kind"]), "off": tuple(values["off"])})


def done(job: Job) -> dict[str, Any]:
    """Do a job in this process."""
    import torch

    from penstock.verify.targets import Limits, Spec

    if job.port is not None:  # processes of a launcher meet again for every job, at a place of its own
        os.environ |= {"MASTER_PORT": str(job.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # what is so small only loses by being shared out
    spec = Spec(**{**job.target, "overrides": tuple(job.target.get("overrides", ()))})
    with tempfile.TemporaryDirectory(prefix="penstock-verify-", ignore_cleanup_errors=True) as folder:
        cut = not torch.cuda.is_available()
        limits = Limits(
            steps=job.steps,
            layers=job.layers if cut else None,
            tokens=job.tokens if cut else None,
            folder=Path(folder),
        )
        match job.kind:
            case Kind.RUN:
                return dict(_run(spec, limits, job))
            case Kind.ISOLATION:
                return {"cases": _isolation(spec, limits)}
            case Kind.DATA:
                return dict(_data(spec, limits))


def _repair_interpreter() -> None:
    """Where there is no GPU, Triton's interpreter; without triton there is nothing to repair."""
    import torch

    if torch.cuda.is_available():
        return
    try:
        from penstock.verify.interpreter import repair

        repair()
    except ImportError:
        return  # the watch reports what can't be imported


def _run(spec: Any, limits: Any, job: Job) -> dict[str, Any]:
    from penstock.verify.kernels import without
    from penstock.verify.observe import Watch
    from penstock.verify.targets import made

    _repair_interpreter()
    target = None
    with Watch(limits.steps, limits.micros) as watch, without(job.off if spec.factory else ()):
        target = made(spec, limits, None, job.off)
        target.run()
    extra = (spec.factory.partition(":")[0],) if spec.factory else ()
    conditions = target.conditions if target is not None else []
    facts = watch.facts(target.promised if target is not None else {}, conditions, extra)
    facts["batches"] = target.batches() if target is not None else None
    return dict(facts)


def _isolation(spec: Any, limits: Any) -> list[Any]:
    from penstock.verify import isolation
    from penstock.verify.canaries import Canaries, in_trl
    from penstock.verify.kernels import FLAGS, import_errors, without
    from penstock.verify.targets import BareModel, Step, made, uses_trl

    limits = replace(limits, tokens=None if limits.tokens is None else 64)
    off = tuple(FLAGS) if import_errors()[0] is None else ()  # attention is none of Liger's, and it is slow here
    canaries = Canaries(vocabulary=512)
    with without(off if spec.factory else ()):
        if spec.factory is None:
            return [isolation.caught_case("as trained", made(spec, limits, canaries, tuple(off)), None)]
        with in_trl(canaries) if uses_trl(spec) else nullcontext():
            target = made(spec, limits, canaries, off)
        if isinstance(target, BareModel):
            return list(isolation.cases_of(target.model))
        if isinstance(target, Step):
            return []
        return [isolation.caught_case("as trained", target, target.model)]


def _data(spec: Any, limits: Any) -> dict[str, Any]:
    from penstock.train.reading import read_config
    from penstock.verify.own_data import data_facts, explanations
    from penstock.verify.own_trainer import with_first_rows

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
