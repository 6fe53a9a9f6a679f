"""The certificate: a verdict per promise (engaged, not engaged, unknown) with its evidence and the packages involved.

A crash, a time-out, a failed import or a missing GPU gives `unknown`, never `not engaged`. A certificate serialises to
plain JSON and states its conditions: device, Triton interpreter, and how far model and batches were cut.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.errors import UsageError


class Verdict(StrEnum):
    """Whether a promise was kept, as far as was observed."""

    ENGAGED = "engaged"
    NOT_ENGAGED = "not engaged"
    UNKNOWN = "unknown"


PROMISES: Mapping[str, str] = {
    "liger.rms_norm": "Liger's RMSNorm runs",
    "liger.rope": "Liger's rotary embeddings run",
    "liger.mlp": "Liger's SwiGLU or GeGLU runs",
    "liger.cross_entropy": "Liger's cross entropy runs",
    "liger.fused_linear_cross_entropy": "Liger's loss fused with the last layer runs",
    "liger.fused_dpo_loss": "Liger's fused DPO loss runs",
    "logits.not_materialised": "the logits of all tokens are never in memory at once",
    "packing.isolated": "sequences are packed and do not attend to each other",
    "attention": "the requested attention implementation is the one that ran",
    "bf16": "linear layers compute in bf16",
    "gradient_checkpointing": "layers are recomputed in the backward pass",
    "lora": "only adapters are trained",
    "loss.finite": "loss and gradient are finite at every step",
    "loss.equal": "the loss equals that of the model without Liger's kernels",
    "data.cache_hit": "prepared data is reused, not prepared again",
    "data.collate_ahead": "batches are collated while the step runs",
    "data.masks": "every row has trained tokens, stop tokens included",
    "data.packing": "packed rows are full",
}

ALWAYS_REQUIRED = "loss.finite"


@dataclass(frozen=True, slots=True)
class PackageInfo:
    """A package as it was actually imported: version, file and, in a checkout, commit."""

    package: str
    version: str | None
    file: str | None
    commit: str | None = None  # of a checkout; with `+changes` if files differ from it

    def __str__(self) -> str:
        text = f"{self.package} {self.version or '(version unknown)'} {self.file or ''}".rstrip()
        return f"{text} at commit {self.commit}" if self.commit else text


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on a promise, and the evidence for it."""

    promise: str
    verdict: Verdict
    evidence: tuple[str, ...]
    asked: bool | None = None  # whether the configuration asks for it; None if unknown
    about: tuple[PackageInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """All findings about one target, on one rank."""

    target: str
    conditions: tuple[str, ...]
    findings: tuple[Finding, ...]
    remedies: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1

    def verdict(self, promise: str) -> Verdict:
        """The verdict on a promise; unknown if it was not examined."""
        return next((f.verdict for f in self.findings if f.promise == promise), Verdict.UNKNOWN)

    def broken(self, required: Iterable[str]) -> list[str]:
        """The required promises whose verdict is not engaged or unknown, and `loss.finite` if it was seen to fail.

        No certificate can stand for a run whose loss or gradient is not finite, whatever else is required.
        """
        found = [promise for promise in required if self.verdict(promise) is not Verdict.ENGAGED]
        if self.verdict(ALWAYS_REQUIRED) is Verdict.NOT_ENGAGED and ALWAYS_REQUIRED not in found:
            found.append(ALWAYS_REQUIRED)
        return found

    def to_json(self) -> dict[str, Any]:
        """The certificate as JSON-compatible values."""
        return asdict(self)


def required_promises(values: Sequence[str]) -> list[str]:
    """Parses `--require` values, which may be comma-separated; unknown names are errors."""
    names = [name.strip() for text in values for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PROMISES:
            close = difflib.get_close_matches(name, PROMISES, n=1, cutoff=0.4)
            hint = f"Did you mean {close[0]!r}?" if close else f"Available: {', '.join(PROMISES)}."
            raise UsageError(f"--require {name}: no such promise. {hint}")
    return names


def unknown(promises: Iterable[str], reason: str, about: tuple[PackageInfo, ...] = ()) -> list[Finding]:
    """Findings with verdict unknown, all for the same reason."""
    return [Finding(promise, Verdict.UNKNOWN, (reason,), None, about) for promise in promises]


# ---- packages --------------------------------------------------------------------------------------------------------
#
# The packages that a process imported, with version, file and, in a checkout, git commit.


PACKAGES = ("penstock", "torch", "transformers", "trl", "accelerate", "peft", "liger_kernel", "triton")


def imported_packages(extra: Iterable[str] = ()) -> list[PackageInfo]:
    """Describes the relevant packages, and any `extra` modules, that this process has imported."""
    return [_describe(name) for name in (*PACKAGES, *extra) if name in sys.modules]


def _describe(name: str) -> PackageInfo:
    file = getattr(sys.modules[name], "__file__", None)
    return PackageInfo(name, _version(name), file, commit_of(Path(file)) if file else None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = getattr(sys.modules[name], "__version__", None)
        return None if found is None else str(found)


def commit_of(file: Path) -> str | None:
    """The commit that a file is checked out from; None outside a checkout or if git doesn't track it."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return None  # an environment inside a checkout is not part of it
    folder = str(file.resolve().parent)
    try:
        tracked = _git(folder, "ls-files", "--error-unmatch", file.name)
        if tracked.returncode:
            return None
        commit = _git(folder, "rev-parse", "HEAD").stdout.strip()
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".").stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return f"{commit}+changes" if changed else commit or None


def _git(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Without optional locks: a probe that is killed must not leave an index.lock in the user's checkout.
    command = ["git", "--no-optional-locks", "-C", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10)
