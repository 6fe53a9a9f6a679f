"""Runs `penstock verify`: runs the target, runs it without Liger, examines packing and data, and judges the facts.

Each observation is a job in its own process; if a job fails, its promises are unknown and the others are unaffected.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from penstock import child
from penstock.train.verify.certificate import Certificate, Finding, PackageInfo, Verdict, unknown
from penstock.train.verify.judge import (
    batch_findings,
    compare_losses,
    data_findings,
    engaged_kernels,
    isolation_finding,
    judge_run,
)
from penstock.train.verify.observations import DataFacts, IsolationCase, RunFacts
from penstock.train.verify.probe_jobs import JobKind, ProbeJob

# ---- supervisor ------------------------------------------------------------------------------------------------------
#
# Starts the probe process, sends it jobs and waits for answers, within a time limit.
#
# The supervising process imports neither torch nor transformers. Whatever happens to a probe is returned as a `Failure`
# with a reason; when time runs out, the probe is killed.


GRACE = 5.0  # seconds for the probe process to report that it killed a fork


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job produced no facts."""

    reason: str


class Supervisor:
    """Runs jobs in other processes, one at a time, within a total time limit."""

    def __init__(self, limit: float) -> None:
        self._ends = time.monotonic() + limit
        self._limit = limit
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._buffer = b""
        self._jobs = 0

    def observe(self, job: ProbeJob, limit: float | None = None) -> dict[str, Any] | Failure:
        """Runs a job and returns its facts; `limit`: seconds for this job alone."""
        self._jobs += 1
        left = self._ends - time.monotonic()
        ends = self._ends if limit is None else min(self._ends, time.monotonic() + limit)
        if left <= 0:
            return Failure(f"the time limit of {self._limit:.0f} s expired before it could run")
        try:
            process = self._started()
            assert process.stdin is not None
            request = {"job": self._with_port(job).to_json(), "until": ends - min(GRACE, left / 4)}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = self._answer(left)
        except (OSError, ValueError) as error:
            self.close()
            return Failure(f"lost the connection to the probe process: {error}")
        if answer is None:
            code = process.poll()
            self.close()
            ended = "no answer within the time limit" if code is None else f"the probe process exited with code {code}"
            return Failure(f"{ended} of {self._limit:.0f} s" if code is None else ended)
        return Failure(str(answer["failure"])) if "failure" in answer else dict(answer["facts"])

    def _with_port(self, job: ProbeJob) -> ProbeJob:
        """Under a launcher, gives each job its own rendezvous port; all ranks count alike."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return job
        base = int(os.environ.get("MASTER_PORT", "29500"))
        return replace(job, port=1024 + (base + 7 + self._jobs - 1024) % 60000)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        reading, writing = os.pipe()
        environment = child.environment({"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
        environment.setdefault("TRITON_INTERPRET", "1")  # removed below if there is a GPU
        if _has_gpu():
            environment.pop("TRITON_INTERPRET")
        self._process = subprocess.Popen(
            child.command("penstock.train.verify.probe", str(writing)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            env=environment,
            start_new_session=True,
        )
        os.close(writing)
        self._answers, self._buffer = reading, b""
        return self._process

    def _answer(self, patience: float) -> dict[str, Any] | None:
        """The next answer; None if it doesn't arrive in time."""
        ends = time.monotonic() + patience
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, ends - time.monotonic()))
            read = os.read(self._answers, 1 << 16) if ready else b""
            if not read:
                return None
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Kills the probe process and anything it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            self._process = None
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1


def _has_gpu() -> bool:
    """Whether the probes can use a GPU, determined without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(os.path.exists(place) for place in ("/dev/nvidia0", "/dev/kfd"))  # noqa: PTH110


@contextmanager
def supervised(limit: float) -> Iterator[Supervisor]:
    """A supervisor whose processes end with the `with` block."""
    supervisor = Supervisor(limit)
    try:
        yield supervisor
    finally:
        supervisor.close()


# ---- bisection -------------------------------------------------------------------------------------------------------
#
# Bisects Liger's kernels to find those that cause a wrong loss.
#
# Takes about log2(kernels) + 1 runs of the target per faulty kernel.


IsWrong = Callable[[tuple[str, ...]], bool | None]  # runs with these kernels off; None: the run failed


def bisect_kernels(kernels: Sequence[str], is_wrong: IsWrong, override: Callable[[list[str]], str]) -> list[str]:
    """Finds the faulty kernels of a run that is wrong with all of them on and right with all off.

    Returns remedies: sentences with the configuration override that disables the faulty kernels.
    """
    found: list[str] = []
    while len(found) < len(kernels):
        faulty = _find_one([kernel for kernel in kernels if kernel not in found], kernels, is_wrong)
        if faulty is None:
            return [_remedy(found, override, "A run of the bisection failed, so it is not complete.")]
        found.append(faulty)
        still = is_wrong(tuple(found))
        if still is None:
            return [_remedy(found, override, "A run of the bisection failed, so it is not complete.")]
        if not still:
            return [_remedy(found, override, "The loss is then correct.")]
    return [_remedy(found, override, "No smaller set of kernels is enough.")]


def _find_one(candidates: list[str], kernels: Sequence[str], is_wrong: IsWrong) -> str | None:
    """Finds one faulty kernel by halving the set that stays on."""
    while len(candidates) > 1:
        half = candidates[: len(candidates) // 2]
        wrong = is_wrong(tuple(kernel for kernel in kernels if kernel not in half))
        if wrong is None:
            return None
        candidates = half if wrong else candidates[len(half) :]
    return candidates[0]


def _remedy(found: list[str], override: Callable[[list[str]], str], outcome: str) -> str:
    if not found:
        return outcome
    return f"The difference comes from Liger's {' and '.join(found)}. To disable: {override(found)}. {outcome}"


# ---- verifier --------------------------------------------------------------------------------------------------------


OFF = ("rms_norm", "rope", "mlp", "cross_entropy", "fused_linear_cross_entropy", "fused_dpo_loss")
RUN_PROMISES = (
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
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify (a Penstock configuration or a factory), and the limits of the probes."""

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
        """The target's display name."""
        return " ".join(filter(None, (self.factory, self.config, *self.overrides)))

    def job(self, kind: JobKind) -> ProbeJob:
        """A job of this kind for the target."""
        target = {
            "config": self.config,
            "method": self.method,
            "overrides": list(self.overrides),
            "factory": self.factory,
        }
        return ProbeJob(kind, target, (), self.steps, self.layers, self.tokens)


def verify(options: VerifyOptions, on_progress: OnProgress = lambda _: None) -> Certificate:
    """Verifies a target; `on_progress` receives a line before each job."""
    with supervised(options.limit) as supervisor:
        return _Verification(options, supervisor, on_progress).certificate()


class _Verification:
    def __init__(self, options: VerifyOptions, supervisor: Supervisor, on_progress: OnProgress) -> None:
        self._options, self._supervisor, self._on_progress = options, supervisor, on_progress
        self._findings: list[Finding] = []
        self._conditions: list[str] = []
        self._remedies: list[str] = []

    def certificate(self) -> Certificate:
        self._on_progress("running the target")
        found = self._supervisor.observe(self._options.job(JobKind.RUN))
        if isinstance(found, Failure):
            self._findings += unknown(RUN_PROMISES, f"the run: {found.reason}")
            self._packing(True if self._options.factory else None, (), promised=None)
        else:
            self._judge(cast(RunFacts, found))
        if self._options.factory is None:
            self._data()
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        parts = (tuple(self._conditions), tuple(self._findings), tuple(self._remedies))
        return Certificate(self._options.name, *parts, rank, world)

    def _judge(self, facts: RunFacts) -> None:
        self._conditions += conditions(facts)
        self._findings += judge_run(facts)
        about = _about(self._findings)
        self._compare(facts)
        packing = facts["promised"].get("packing")
        self._findings += batch_findings(cast("dict[str, Any] | None", facts["batches"]), bool(packing), about)
        self._packing(packing, about, promised=facts["promised"])

    def _compare(self, facts: RunFacts) -> None:
        """Compares the loss with that of the same target without Liger's kernels."""
        ran = engaged_kernels(facts)
        about = _about(self._findings, "liger.rms_norm")
        if not ran:
            reason = facts["liger_error"] or "none of Liger's kernels ran, so there is nothing to compare"
            self._findings += unknown(["loss.equal"], reason, about)
            return
        if self._options.factory is not None and facts["kernels"]["fused_dpo_loss"]["forward"]:
            reason = "a fused DPO loss created by a factory can't be turned off from outside"
            self._findings += unknown(["loss.equal"], reason, about)
            return
        self._on_progress("running it without Liger's kernels")
        plain = self._without(OFF)
        if isinstance(plain, Failure):
            self._findings += unknown(["loss.equal"], f"the run without Liger: {plain.reason}", about)
            return
        verdict, words = compare_losses(facts, plain)
        self._findings.append(Finding("loss.equal", verdict, (words,), True, about))
        if verdict is Verdict.NOT_ENGAGED:
            self._bisect(facts, plain, ran)

    def _without(self, off: tuple[str, ...]) -> RunFacts | Failure:
        found = self._supervisor.observe(replace(self._options.job(JobKind.RUN), off=off))
        return found if isinstance(found, Failure) else cast(RunFacts, found)

    def _bisect(self, facts: RunFacts, plain: RunFacts, ran: list[str]) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._remedies.append(
                "Run penstock verify without a launcher to find the kernel that causes the difference."
            )
            return

        def is_wrong(off: tuple[str, ...]) -> bool | None:
            self._on_progress(f"running it without {', '.join(off) or 'nothing'}")
            found = self._without(off)
            return None if isinstance(found, Failure) else compare_losses(found, plain)[0] is Verdict.NOT_ENGAGED

        self._remedies += bisect_kernels(ran, is_wrong, _override(facts))

    def _packing(self, asked: bool | None, about: tuple[PackageInfo, ...], promised: dict[str, Any] | None) -> None:
        """Tests the isolation of packed sequences; trainers that don't pack are not run again."""
        if promised and asked is False:
            evidence = ("the configuration does not pack: one sequence per row",)
            self._findings.append(Finding("packing.isolated", Verdict.NOT_ENGAGED, evidence, False, about))
            return
        self._on_progress("testing the isolation of packed sequences")
        found = self._supervisor.observe(self._options.job(JobKind.ISOLATION))
        if isinstance(found, Failure):
            self._findings += unknown(["packing.isolated"], f"the experiment: {found.reason}", about)
            return
        cases = cast(list[IsolationCase], found["cases"])
        self._findings.append(isolation_finding(cases, asked, about))

    def _data(self) -> None:
        self._on_progress("examining the data")
        found = self._supervisor.observe(self._options.job(JobKind.DATA))
        if isinstance(found, Failure):
            promises = ("data.cache_hit", "data.collate_ahead", "data.masks")
            self._findings += unknown(promises, f"the data: {found.reason}")
            return
        about = tuple(s for s in _about(self._findings, "packing.isolated") if s.package == "penstock")
        self._findings += data_findings(cast(DataFacts, found), about)


def conditions(facts: RunFacts) -> list[str]:
    """The conditions of a run, for the certificate."""
    found = [f"device {facts['device']}", *facts["conditions"]]
    if facts["interpreted"]:
        found.insert(1, "no GPU: Triton's kernels run in its interpreter, which tests wiring and numbers, not speed")
    if facts["error"] is not None:
        found.append(f"the run ended early: {facts['error']}")
    return found


def _about(findings: list[Finding], promise: str | None = None) -> tuple[PackageInfo, ...]:
    """The packages that the findings on `promise`, or all findings, are about."""
    chosen = [f for f in findings if promise is None or f.promise == promise]
    return tuple(dict.fromkeys(package for finding in chosen for package in finding.about))


def _override(facts: RunFacts) -> Callable[[list[str]], str]:
    """Returns a function that formats the configuration override that turns kernels off."""
    if facts["promised"].get("penstock"):
        names = {"fused_linear_cross_entropy": "fused_loss", "fused_dpo_loss": "fused_loss"}
        return lambda kernels: " ".join(f"liger.{names.get(kernel, kernel)}=false" for kernel in kernels)

    def flags(kernels: list[str]) -> str:
        parts = {"mlp": "swiglu: false, geglu: false"}
        inner = ", ".join(parts.get(kernel, f"{kernel}: false") for kernel in kernels)
        return f"liger_kernel_config: {{{inner}}}"

    return flags
