"""Prints a certificate as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.look.terminal.console import Terminal
from penstock.verify.certificate import ALWAYS_REQUIRED, Certificate, Verdict

_COLOURS = {Verdict.ENGAGED: "green", Verdict.NOT_ENGAGED: "red", Verdict.UNKNOWN: "yellow"}


def certificate_table(certificate: Certificate, broken: Iterable[str] = ()) -> RenderableType:
    """The conditions, one row per finding, then the packages, remedies and broken promises."""
    table = Table("promise", "verdict", "asked", "evidence", box=None, pad_edge=False)
    before: tuple[str, ...] = ()
    for finding in certificate.findings:
        verdict = Text(finding.verdict.value, style=_COLOURS[finding.verdict])
        asked = {True: "yes", False: "no", None: ""}[finding.asked]
        evidence = "as above" if finding.evidence == before else "\n".join(finding.evidence)
        table.add_row(finding.promise, verdict, asked, Text(evidence))
        before = finding.evidence
    rank = f" (rank {certificate.rank} of {certificate.world_size})" if certificate.world_size > 1 else ""
    lines = [f"{certificate.target}{rank}", *(f"  {condition}" for condition in certificate.conditions)]
    packages = dict.fromkeys(str(package) for finding in certificate.findings for package in finding.about)
    after = [*(f"about {package}" for package in packages), *certificate.remedies]
    after += [f"required but {certificate.verdict(promise)}: {promise}{_always(promise)}" for promise in broken]
    return Group(Text("\n".join(lines)), table, Text("\n".join(after)))


def _always(promise: str) -> str:
    return " (required of every run: loss and gradient must be finite)" if promise == ALWAYS_REQUIRED else ""


def print_certificate(certificate: Certificate, broken: Iterable[str] = ()) -> None:
    """Prints a certificate to standard output."""
    Terminal().print(certificate_table(certificate, broken), highlight=False, soft_wrap=False)
