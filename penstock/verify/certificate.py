"""A certificate: for each promise engaged, not engaged or unknown, with its evidence and what it is about.

`unknown` is what a crash, a time-out, a failed import or a missing GPU gives; never `not engaged`. A certificate is
plain JSON, and says under which conditions it was issued: device, interpreter, and how far model and batches were cut.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from penstock.errors import UsageError


class Verdict(StrEnum):
    """What is known about a promise."""

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
    "logits.not_materialised": "logits of all tokens are never in memory at once",
    "packing.isolated": "sequences are packed, and do not see each other",
    "attention": "the attention that was asked for is the one that ran",
    "bf16": "linear layers compute in bf16",
    "gradient_checkpointing": "layers are computed again in the backward pass",
    "lora": "only adapters are trained",
    "loss.finite": "loss and gradient are finite at every step",
    "loss.equal": "the loss equals that of the model without Liger's kernels",
    "data.cache_hit": "the prepared data is found, not made again",
    "data.collate_ahead": "batches are made while the step runs",
    "data.masks": "every row trains something, stop tokens included",
    "data.packing": "packed rows are full",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What a verdict is about: a package as it was really imported."""

    package: str
    version: str | None
    file: str | None
    commit: str | None = None  # of a checkout; with `+changes` where files differ from it

    def __str__(self) -> str:
        text = f"{self.package} {self.version or '(version unknown)'} {self.file or ''}".rstrip()
        return f"{text} at commit {self.commit}" if self.commit else text


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise, the verdict on it, and why."""

    promise: str
    verdict: Verdict
    evidence: tuple[str, ...]
    asked: bool | None = None  # whether the configuration promises it; None where that can't be told
    about: tuple[Subject, ...] = ()


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
        """The verdict on a promise; one that was not looked at is unknown."""
        return next((f.verdict for f in self.findings if f.promise == promise), Verdict.UNKNOWN)

    def broken(self, required: Iterable[str]) -> list[str]:
        """Required promises that are not engaged for certain."""
        return [promise for promise in required if self.verdict(promise) is not Verdict.ENGAGED]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def required_promises(given: Sequence[str]) -> list[str]:
    """Names of promises, given one by one or with commas; unknown names are errors."""
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PROMISES:
            close = difflib.get_close_matches(name, PROMISES, n=1, cutoff=0.4)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(PROMISES)}."
            raise UsageError(f"--require {name}: no such promise. {hint}")
    return names


def unknown(promises: Iterable[str], reason: str, about: tuple[Subject, ...] = ()) -> list[Finding]:
    """Findings that nothing could be found out."""
    return [Finding(promise, Verdict.UNKNOWN, (reason,), None, about) for promise in promises]
