"""From facts about packing and about Penstock's own data to verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from penstock.verify.certificate import Finding, Subject, Verdict
from penstock.verify.facts import DataFacts, IsolationCase

ENGAGED, NOT_ENGAGED, UNKNOWN = Verdict.ENGAGED, Verdict.NOT_ENGAGED, Verdict.UNKNOWN
FULL = 0.9  # how full packed rows are expected to be


def isolation_verdict(case: IsolationCase) -> tuple[Verdict, str]:
    """Whether the sequences of one experiment are kept apart."""
    moved = f"{case['name']}: changing one of {case['sequences']} sequences moved its own states by {case['own']:.2g}"
    if case["error"] is not None:
        return UNKNOWN, f"{case['name']}: {case['error']}"
    if not case["packed"]:
        return NOT_ENGAGED, f"{case['name']}: every row holds one sequence, nothing is packed"
    if not case["own"] > max(10 * case["noise"], 1e-6):
        return UNKNOWN, f"{moved}: the experiment has no power"
    shown = f"{moved} and those of the others by {case['others']:.2g} (noise {case['noise']:.2g})"
    if case["others"] > max(2 * case["noise"], 1e-5 * case["own"]):
        return NOT_ENGAGED, f"contaminated. {shown}"
    return ENGAGED, f"isolated. {shown}"


def isolation_finding(cases: Sequence[IsolationCase], asked: bool | None, about: tuple[Subject, ...]) -> Finding:
    """The verdict on packing: of a trainer on what it passes; of a bare model on lengths with positions."""
    verdicts = [isolation_verdict(case) for case in cases]
    if not verdicts:
        return Finding("packing.isolated", UNKNOWN, ("the target shows no batches",), asked, about)
    return Finding("packing.isolated", verdicts[-1][0], tuple(words for _, words in verdicts), asked, about)


def data_findings(facts: DataFacts, about: tuple[Subject, ...]) -> Iterator[Finding]:
    """The verdicts on Penstock's own data."""
    yield Finding("data.cache_hit", ENGAGED if facts["hit"] else NOT_ENGAGED, tuple(facts["reasons"]), True, about)
    yield _ahead(facts, about)
    share = 100 * facts["trained"] / max(facts["tokens"], 1)
    sound = facts["stops"] > 0 and facts["stops_trained"] == facts["stops"]
    verdict = UNKNOWN if not facts["stops"] else ENGAGED if sound else NOT_ENGAGED
    evidence = (
        f"{facts['trained']:,} of {facts['tokens']:,} tokens trained ({share:.1f}%)",
        f"{facts['stops_trained']} of {facts['stops']} trained turns end with their stop token",
        f"{facts['untrained_rows']} of {facts['rows']} rows train nothing; they are dropped and counted",
    )
    yield Finding("data.masks", verdict, evidence, True, about)
    if facts["efficiency"] is not None:
        full = f"packed rows are {100 * facts['efficiency']:.2f}% full"
        yield Finding("data.packing", ENGAGED if facts["efficiency"] >= FULL else NOT_ENGAGED, (full,), True, about)


def _ahead(facts: DataFacts, about: tuple[Subject, ...]) -> Finding:
    promise = "data.collate_ahead"
    if not facts["ahead"]:
        return Finding(promise, NOT_ENGAGED, ("feed.ahead is 0: batches are made in the loop",), False, about)
    wait, made = median(facts["waits"]) if facts["waits"] else 0.0, facts["collate_seconds"]
    shown = (
        f"making a batch takes {1e3 * made:.2f} ms; with {1e3 * facts['step_seconds']:.0f} ms between batches, "
        f"the next one was waited for {1e3 * wait:.3f} ms (median of {len(facts['waits'])})"
    )
    return Finding(promise, ENGAGED if wait < max(made / 3, 2e-4) else NOT_ENGAGED, (shown,), True, about)
