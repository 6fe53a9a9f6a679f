"""The whole of `penstock verify`: run the target, run it without Liger, examine packing and data, judge.

Every observation is a job in a process of its own; a job that fails makes its promises unknown and leaves the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from penstock.verify.certificate import Certificate, Finding, Subject, Verdict, unknown
from penstock.verify.culprit import culprits
from penstock.verify.facts import DataFacts, IsolationCase, RunFacts
from penstock.verify.jobs import Job, Kind
from penstock.verify.judge import batch_findings, compared, engaged_kernels, judged
from penstock.verify.judge_data import data_findings, isolation_finding
from penstock.verify.supervise import Failure, Supervisor, supervised

OFF = ("rms_norm", "rope", "mlp", "cross_entropy", "fused_linear_cross_entropy", "fused_dpo_loss")
OF_A_RUN = (
    "liger.rms_norm",
    "liger.rope",
    "liger.mlp",
    "liger.cross_entropy",
    "liger.fused_linear_cross_entropy",
    "logits.not_materialised",
    "attention",
    "bf16",
    "gradient_checkpointing",
    "lora",
    "loss.finite",
    "loss.equal",
)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to verify: a Penstock configuration, or what a factory makes."""

    config: str | None = None
    method: str | None = None
    overrides: tuple[str, ...] = ()
    factory: str | None = None
    limit: float = 600.0
    steps: int = 2
    layers: int = 2
    tokens: int = 16

    @property
    def name(self) -> str:
        """As people call it."""
        return " ".join(filter(None, (self.factory, self.config, *self.overrides)))

    def job(self, kind: Kind) -> Job:
        """A job about it."""
        target = {
            "config": self.config,
            "method": self.method,
            "overrides": list(self.overrides),
            "factory": self.factory,
        }
        return Job(kind, target, (), self.steps, self.layers, self.tokens)


def verify(wanted: Wanted, say: Say = lambda _: None) -> Certificate:
    """A certificate for a target; `say` hears what is being looked at."""
    with supervised(wanted.limit) as supervisor:
        return _Verification(wanted, supervisor, say).certificate()


class _Verification:
    def __init__(self, wanted: Wanted, supervisor: Supervisor, say: Say) -> None:
        self._wanted, self._supervisor, self._say = wanted, supervisor, say
        self._findings: list[Finding] = []
        self._conditions: list[str] = []
        self._remedies: list[str] = []

    def certificate(self) -> Certificate:
        self._say("running the target")
        found = self._supervisor.observe(self._wanted.job(Kind.RUN))
        if isinstance(found, Failure):
            self._findings += unknown(OF_A_RUN, f"the run: {found.reason}")
            self._packing(True if self._wanted.factory else None, (), promised=None)
        else:
            self._judge(cast(RunFacts, found))
        if self._wanted.factory is None:
            self._data()
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        parts = (tuple(self._conditions), tuple(self._findings), tuple(self._remedies))
        return Certificate(self._wanted.name, *parts, rank, world)

    def _judge(self, facts: RunFacts) -> None:
        self._conditions += conditions(facts)
        self._findings += judged(facts)
        about = _about(self._findings)
        self._compare(facts)
        packing = facts["promised"].get("packing")
        self._findings += batch_findings(cast("dict[str, Any] | None", facts["batches"]), bool(packing), about)
        self._packing(packing, about, promised=facts["promised"])

    def _compare(self, facts: RunFacts) -> None:
        """The loss against that of the same target without Liger's kernels."""
        ran = engaged_kernels(facts)
        about = _about(self._findings, "liger.rms_norm")
        if not ran:
            reason = facts["liger_error"] or "no kernel of Liger ran, so there is nothing to compare"
            self._findings += unknown(["loss.equal"], reason, about)
            return
        if self._wanted.factory is not None and facts["kernels"]["fused_dpo_loss"]["forward"]:
            reason = "a fused DPO loss that a factory made can't be turned off from outside"
            self._findings += unknown(["loss.equal"], reason, about)
            return
        self._say("running it without Liger's kernels")
        plain = self._without(OFF)
        if isinstance(plain, Failure):
            self._findings += unknown(["loss.equal"], f"the run without Liger: {plain.reason}", about)
            return
        verdict, words = compared(facts, plain)
        self._findings.append(Finding("loss.equal", verdict, (words,), True, about))
        if verdict is Verdict.NOT_ENGAGED:
            self._bisect(facts, plain, ran)

    def _without(self, off: tuple[str, ...]) -> RunFacts | Failure:
        found = self._supervisor.observe(replace(self._wanted.job(Kind.RUN), off=off))
        return found if isinstance(found, Failure) else cast(RunFacts, found)

    def _bisect(self, facts: RunFacts, plain: RunFacts, ran: list[str]) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._remedies.append(
                "Run penstock verify without a launcher: it then finds the kernel that makes the difference."
            )
            return

        def is_wrong(off: tuple[str, ...]) -> bool | None:
            self._say(f"running it without {', '.join(off) or 'nothing'}")
            found = self._without(off)
            return None if isinstance(found, Failure) else compared(found, plain)[0] is Verdict.NOT_ENGAGED

        self._remedies += culprits(ran, is_wrong, _override(facts))

    def _packing(self, asked: bool | None, about: tuple[Subject, ...], promised: dict[str, Any] | None) -> None:
        """Examine what packed sequences see; trainers that do not pack are not run again for it."""
        if promised and asked is False:
            evidence = ("the configuration does not pack: one sequence a row",)
            self._findings.append(Finding("packing.isolated", Verdict.NOT_ENGAGED, evidence, False, about))
            return
        self._say("examining what packed sequences see")
        found = self._supervisor.observe(self._wanted.job(Kind.ISOLATION))
        if isinstance(found, Failure):
            self._findings += unknown(["packing.isolated"], f"the experiment: {found.reason}", about)
            return
        cases = cast(list[IsolationCase], found["cases"])
        self._findings.append(isolation_finding(cases, asked, about))

    def _data(self) -> None:
        self._say("looking at the data")
        found = self._supervisor.observe(self._wanted.job(Kind.DATA))
        if isinstance(found, Failure):
            promises = ("data.cache_hit", "data.collate_ahead", "data.masks")
            self._findings += unknown(promises, f"the data: {found.reason}")
            return
        about = tuple(s for s in _about(self._findings, "packing.isolated") if s.package == "penstock")
        self._findings += data_findings(cast(DataFacts, found), about)


def conditions(facts: RunFacts) -> list[str]:
    """Under which conditions facts were found."""
    found = [f"device {facts['device']}", *facts["conditions"]]
    if facts["interpreted"]:
        found.insert(1, "no GPU: Triton's kernels run in its interpreter, which proves wiring and numbers, not speed")
    if facts["error"] is not None:
        found.append(f"the run ended early: {facts['error']}")
    return found


def _about(findings: list[Finding], promise: str | None = None) -> tuple[Subject, ...]:
    """The subjects of a finding, or of all."""
    chosen = [f for f in findings if promise is None or f.promise == promise]
    return tuple(dict.fromkeys(subject for finding in chosen for subject in finding.about))


def _override(facts: RunFacts) -> Callable[[list[str]], str]:
    """How a configuration turns kernels off, in its own words."""
    if facts["promised"].get("penstock"):
        names = {"fused_linear_cross_entropy": "fused_loss", "fused_dpo_loss": "fused_loss"}
        return lambda kernels: " ".join(f"liger.{names.get(kernel, kernel)}=false" for kernel in kernels)

    def flags(kernels: list[str]) -> str:
        parts = {"mlp": "swiglu: false, geglu: false"}
        inner = ", ".join(parts.get(kernel, f"{kernel}: false") for kernel in kernels)
        return f"liger_kernel_config: {{{inner}}}"

    return flags
