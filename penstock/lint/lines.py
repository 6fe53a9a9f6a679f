"""A lint report for people: what was read, then what is wrong, then what can't be told."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.lint.linting import Finding, Report, Standing


def report_lines(report: Report) -> Iterator[str]:
    """The lines of a report."""
    for entry in report.classes:
        version = entry.version or "version unknown"
        yield f"{entry.spec}: {len(entry.keys)} keys, {entry.package} {version}"
        yield from (f"  read {line}" for line in entry.read)
        yield from (f"  not resolved: {reason}" for reason in entry.unresolved)
    accepted = [finding.key for finding in report.findings if finding.standing is Standing.ACCEPTED]
    yield f"{report.origin}: {len(accepted)} of {len(report.findings)} keys accepted"
    for standing in (Standing.REFUSED, Standing.UNKNOWN):
        for finding in report.findings:
            if finding.standing is standing:
                yield _line(finding)
    yield from (f"  no effect {effect.key}: {effect.reason}." for effect in report.effects)
    yield from (f"  differs   {entry.key}: {entry.reason}." for entry in report.differences)


def _line(finding: Finding) -> str:
    parts = [f"  {finding.standing:<9} {finding.key}: {finding.by}."]
    if finding.replaced:
        parts.append(f"{finding.replaced[0].upper()}{finding.replaced[1:]}.")
    elif finding.nearest:
        parts.append(f"Did you mean {', '.join(finding.nearest)}?")
    return " ".join(parts)
