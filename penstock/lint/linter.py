"""Lints a configuration: which class accepts each key, which keys are refused, which are unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.lint.config_class import ConfigClass
from penstock.lint.config_values import ConfigValues, KeyDifference, differences
from penstock.lint.history import replacement
from penstock.lint.rules import NoEffect, RuleContext, find_ineffective

# Keys that launchers consume before passing on the rest.
LAUNCHER_KEYS = {"config", "env"}


class KeyStatus(StrEnum):
    """Whether the classes accept a key; unknown if a base could not be resolved."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KeyFinding:
    """The status of one key, and what to use instead."""

    key: str
    value: Any
    status: KeyStatus
    by: str  # the class that accepts it, or why it is refused or unknown
    nearest: tuple[str, ...] = ()
    replaced: str | None = None


@dataclass(frozen=True, slots=True)
class LintReport:
    """The findings about a configuration."""

    origin: str
    classes: tuple[ConfigClass, ...]
    findings: tuple[KeyFinding, ...]
    ineffective: tuple[NoEffect, ...]
    differences: tuple[KeyDifference, ...]

    @property
    def sound(self) -> bool:
        """Whether every key is accepted and effective, and file and command line agree."""
        accepted = all(finding.status is KeyStatus.ACCEPTED for finding in self.findings)
        return accepted and not self.ineffective and not self.differences

    @property
    def refused(self) -> bool:
        """Whether something is definitely wrong; unknown keys don't count."""
        wrong = any(finding.status is KeyStatus.REFUSED for finding in self.findings)
        return wrong or bool(self.ineffective) or bool(self.differences)

    @property
    def mostly_unknown(self) -> bool:
        """Whether too few keys could be checked for the report to mean anything."""
        unknown = sum(finding.status is KeyStatus.UNKNOWN for finding in self.findings)
        return 2 * unknown > len(self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {
            "origin": self.origin,
            "classes": [
                {
                    "for": entry.spec,
                    "package": entry.package,
                    "version": entry.version,
                    "file": str(entry.file),
                    "line": entry.line,
                    "commit": entry.commit,
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
                    "standing": finding.status.value,
                    "by": finding.by,
                    "nearest": list(finding.nearest),
                    "replaced": finding.replaced,
                }
                for finding in self.findings
            ],
            "effects": [{"key": effect.key, "reason": effect.reason} for effect in self.ineffective],
            "differences": [{"key": entry.key, "reason": entry.reason} for entry in self.differences],
            "sound": self.sound,
        }


def lint(config: ConfigValues, classes: Sequence[ConfigClass], command: ConfigValues | None = None) -> LintReport:
    """Lints the values of a file; `command`: values passed by a launcher, which are compared with the file's."""
    passed = command if command is not None else config
    keys = {**config.values, **passed.values}
    findings = tuple(_finding(key, value, classes) for key, value in keys.items())
    found = find_ineffective(RuleContext(passed.values, classes))
    compared = differences(config, command) if command is not None else []
    return LintReport(config.origin, tuple(classes), findings, tuple(found), tuple(compared))


def _finding(key: str, value: Any, classes: Sequence[ConfigClass]) -> KeyFinding:
    for entry in classes:
        if key in entry.keys:
            place = entry.keys[key]
            return KeyFinding(key, value, KeyStatus.ACCEPTED, f"{entry.name} ({place.file}:{place.line})")
    if key in LAUNCHER_KEYS:
        return KeyFinding(key, value, KeyStatus.ACCEPTED, "consumed by the launcher")
    known = {name for entry in classes for name in entry.keys}
    replaced = replacement(key, _owners(classes), known)
    nearest = tuple(difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6))
    missing = [reason for entry in classes for reason in entry.unresolved]
    if missing:
        return KeyFinding(key, value, KeyStatus.UNKNOWN, f"not resolved: {'; '.join(missing)}", nearest, replaced)
    names = " or ".join(f"{entry.name} of {entry.package} {entry.version or entry.commit or '?'}" for entry in classes)
    return KeyFinding(key, value, KeyStatus.REFUSED, f"no field of {names}", nearest, replaced)


def _owners(classes: Sequence[ConfigClass]) -> set[str]:
    """The classes whose removed keys apply: those linted, and their bases."""
    return {f"{entry.package}.{entry.name}" for entry in classes} | {o for entry in classes for o in entry.lineage}


def report_lines(report: LintReport) -> Iterator[str]:
    """Formats a report for people: what was read, then refused, unknown, ineffective and differing keys."""
    for entry in report.classes:
        known = [entry.version, f"commit {entry.commit}" if entry.commit else None]
        origin = ", ".join(filter(None, known)) or "version unknown"
        yield f"{entry.spec}: {len(entry.keys)} keys, {entry.package} {origin}"
        yield from (f"  read {line}" for line in entry.read)
        yield from (f"  not resolved: {reason}" for reason in entry.unresolved)
    accepted = [finding.key for finding in report.findings if finding.status is KeyStatus.ACCEPTED]
    yield f"{report.origin}: {len(accepted)} of {len(report.findings)} keys accepted"
    for status in (KeyStatus.REFUSED, KeyStatus.UNKNOWN):
        for finding in report.findings:
            if finding.status is status:
                yield _line(finding)
    yield from (f"  no effect {effect.key}: {effect.reason}." for effect in report.ineffective)
    yield from (f"  differs   {entry.key}: {entry.reason}." for entry in report.differences)
    if report.mostly_unknown:
        yield "Most keys can't be checked: pass the folders of the unresolved packages with --search, or install them."


def _line(finding: KeyFinding) -> str:
    parts = [f"  {finding.status:<9} {finding.key}: {finding.by}."]
    if finding.replaced:
        parts.append(f"{finding.replaced[0].upper()}{finding.replaced[1:]}.")
    elif finding.nearest:
        parts.append(f"Did you mean {', '.join(finding.nearest)}?")
    return " ".join(parts)
