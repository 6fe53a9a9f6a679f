"""Lint a configuration: for each key, accepted, refused or undecided, and by whose word.

Enters: what a file or a command line gives, and the classes that will read it. Leaves: a `Report`. Nothing is imported:
the answer is about source files, which the report names with their versions.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.lint.accepts import Accepted
from penstock.lint.effects import Effect, Settings, effects
from penstock.lint.given import Difference, Given, differences
from penstock.lint.history import ARGS, became

# Keys that launchers take for themselves before they hand the rest on.
LAUNCHER_KEYS = {"config", "env"}


class Standing(StrEnum):
    """What becomes of a key."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """What becomes of one key, and what to do about it."""

    key: str
    value: Any
    standing: Standing
    by: str  # who accepts it, or why it is refused or undecided
    nearest: tuple[str, ...] = ()
    replaced: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found about a configuration."""

    origin: str
    classes: tuple[Accepted, ...]
    findings: tuple[Finding, ...]
    effects: tuple[Effect, ...]
    differences: tuple[Difference, ...]

    @property
    def sound(self) -> bool:
        """Whether every key is accepted and has its effect, and file and command line agree."""
        accepted = all(finding.standing is Standing.ACCEPTED for finding in self.findings)
        return accepted and not self.effects and not self.differences

    @property
    def refused(self) -> bool:
        """Whether something is wrong for certain; what is unknown is not."""
        wrong = any(finding.standing is Standing.REFUSED for finding in self.findings)
        return wrong or bool(self.effects) or bool(self.differences)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "origin": self.origin,
            "classes": [
                {
                    "for": entry.spec,
                    "package": entry.package,
                    "version": entry.version,
                    "file": str(entry.file),
                    "line": entry.line,
                    "keys": len(entry.keys),
                    "read": list(entry.read),
                    "unresolved": list(entry.unresolved),
                }
                for entry in self.classes
            ],
            "keys": [
                {
                    "key": finding.key,
                    "value": finding.value,
                    "standing": finding.standing.value,
                    "by": finding.by,
                    "nearest": list(finding.nearest),
                    "replaced": finding.replaced,
                }
                for finding in self.findings
            ],
            "effects": [{"key": effect.key, "reason": effect.reason} for effect in self.effects],
            "differences": [{"key": entry.key, "reason": entry.reason} for entry in self.differences],
            "sound": self.sound,
        }


def lint(given: Given, classes: Sequence[Accepted], command: Given | None = None) -> Report:
    """What becomes of each key of a configuration; `command`: what a launcher passes, to compare it with."""
    passed = command if command is not None else given
    keys = {**given.values, **passed.values}
    findings = tuple(_finding(key, value, classes) for key, value in keys.items())
    found = effects(Settings(passed.values, classes))
    compared = differences(given, command) if command is not None else []
    return Report(given.origin, tuple(classes), findings, tuple(found), tuple(compared))


def _finding(key: str, value: Any, classes: Sequence[Accepted]) -> Finding:
    for entry in classes:
        if key in entry.keys:
            place = entry.keys[key]
            return Finding(key, value, Standing.ACCEPTED, f"{entry.name} ({place.file}:{place.line})")
    if key in LAUNCHER_KEYS:
        return Finding(key, value, Standing.ACCEPTED, "the launcher's own")
    known = {name for entry in classes for name in entry.keys}
    replaced = became(key, _owners(classes), known)
    nearest = tuple(difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6))
    missing = [reason for entry in classes for reason in entry.unresolved]
    if missing:
        return Finding(key, value, Standing.UNKNOWN, f"not resolved: {'; '.join(missing)}", nearest, replaced)
    names = " or ".join(f"{entry.name} of {entry.package} {entry.version or '?'}" for entry in classes)
    return Finding(key, value, Standing.REFUSED, f"no field of {names}", nearest, replaced)


def _owners(classes: Sequence[Accepted]) -> set[str]:
    """The classes whose history counts: those named, and transformers' arguments where they are a base."""
    owners = {f"{entry.package}.{entry.name}" for entry in classes}
    if any(line.startswith("transformers ") for entry in classes for line in entry.read):
        owners.add(ARGS)
    return owners
