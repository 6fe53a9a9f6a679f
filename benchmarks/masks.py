"""Compares loss masks and segments with those of another checkout, token by token.

    python -m benchmarks.conformance --masks-against CHECKOUT --tokenizer FOLDER --data FILE.jsonl … [--sample 20]

Both checkouts prepare the same rows at the same time, each in its own process (`segments`); if a process dies or hangs,
its template is reported and the run continues. Per template the report counts the rows with equal tokens, with equal
masks under each loss policy and with equal segments (role, part, message number and weight of every token), summarises
the changes, and shows the first row of each kind of change in context. Masks are compared only if the tokens are equal.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.material import Files
from benchmarks.segments import POLICIES
from benchmarks.servers import ROOT, Server, ServerDiedError
from penstock.prepare.chat.conversation import Part

ROLES = ("none", "system", "user", "assistant", "tool", "other")  # numbers of the file format
ORIGIN = ("role", "part", "message", "weight")
BEFORE, AFTER = 24, 12  # tokens shown around a difference
Arrays = Mapping[str, Any]


class Checkout:
    """A process that runs a checkout's code; restarted after a crash or time-out."""

    def __init__(self, folder: Path, name: str, seconds: float) -> None:
        self.name = name
        script = str(ROOT / "benchmarks" / "segments.py")
        self._server = Server(["-P", script], folder, seconds)
        module = Path(self._server.start()["penstock"])
        if not module.is_relative_to(folder.resolve()):
            raise SystemExit(f"{folder} has no penstock package: {module} would be used instead")

    def dump(self, request: dict[str, Any]) -> str | None:
        """Serves a request; returns the error, if any."""
        try:
            error: str | None = self._server.ask(request).get("error")
        except ServerDiedError as died:
            error = str(died)
        return error

    def close(self) -> None:
        self._server.close()


@dataclass
class MaskTally:
    """Counts for one template over all data."""

    rows: int = 0  # in both; each side of a pair counts
    only_here: int = 0
    only_there: int = 0
    tokens: int = 0
    masks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POLICIES, 0))
    segments: int = 0
    changes: Counter[str] = field(default_factory=Counter)  # rows by kind of change
    shown: list[str] = field(default_factory=list)  # the first row of each kind
    errors: list[str] = field(default_factory=list)

    @property
    def perfect(self) -> bool:
        return not (self.changes or self.errors or self.only_here or self.only_there)


class MaskComparison:
    """Compares two dumps of the same files."""

    def __init__(self, here: Arrays, there: Arrays, files: Files, decoder: Any, tally: MaskTally) -> None:
        self._here, self._there, self._files = here, there, files
        self._decoder, self._tally = decoder, tally

    def run(self) -> None:
        """Compares every row that both have."""
        if self._all_equal():
            rows = len(self._here["row"])
            self._tally.rows += rows
            self._tally.tokens += rows
            self._tally.segments += rows
            for policy in POLICIES:
                self._tally.masks[policy] += rows
            return
        places = [
            {place: k for k, place in enumerate(zip(*(a[n].tolist() for n in ("source", "row", "side")), strict=True))}
            for a in (self._here, self._there)
        ]
        self._tally.only_here += len(places[0].keys() - places[1].keys())
        self._tally.only_there += len(places[1].keys() - places[0].keys())
        for place, k in places[0].items():
            if place in places[1]:
                self._tally.rows += 1
                self._compare(place, k, places[1][place])
        for missing, kept in (("there", 0), ("here", 1)):
            for place in sorted(places[kept].keys() - places[1 - kept].keys())[:1]:
                self._note(f"refused {missing}", f"refused {missing}: {self._name(place)}")

    def _all_equal(self) -> bool:
        """Whether everything is equal, which is the usual case, without looking at single rows."""
        return all(
            np.array_equal(values, self._there[name], equal_nan=name == "weight") for name, values in self._here.items()
        )

    def _compare(self, place: tuple[int, int, int], a: int, b: int) -> None:
        here, there = _row(self._here, a), _row(self._there, b)
        tally = self._tally
        if not np.array_equal(here["ids"], there["ids"]):
            self._note("tokens", f"tokens of {self._name(place)}")
            return
        tally.tokens += 1
        for policy in POLICIES:
            served = self._here[f"{policy} served"][a] == self._there[f"{policy} served"][b]
            differs = here[policy] != there[policy]
            if served and not differs.any():
                tally.masks[policy] += 1
            elif differs.any():
                self._show(place, here, there, differs, policy)
            else:
                self._note(f"{policy}: served", f"{self._name(place)}: {policy}: served by one only, with equal masks")
        differs = np.zeros(len(here["ids"]), bool)
        for name in ORIGIN:
            same = here[name] == there[name]
            differs |= ~(same | (np.isnan(here[name]) & np.isnan(there[name])) if name == "weight" else same)
        if differs.any():
            self._show(place, here, there, differs, "segments")
        else:
            tally.segments += 1

    def _show(self, place: tuple[int, int, int], here: Arrays, there: Arrays, differs: Any, what: str) -> None:
        """Counts each kind of change once per row, and shows the first of each kind."""
        kinds = _kinds(here, there)
        starts = np.flatnonzero(differs & ~np.concatenate(([False], differs[:-1] & (kinds[1:] == kinds[:-1]))))
        seen = set()
        for start in starts.tolist():
            kind = f"{what}: {_origin(there, start)} → {_origin(here, start)}"
            if kind in seen:
                continue
            seen.add(kind)
            end = start + 1
            while end < len(differs) and differs[end] and kinds[end] == kinds[start]:
                end += 1
            self._note(
                kind,
                f"{self._name(place)} tokens {start}:{end}\n          {kind}"
                f" (message {there['message'][start]} → {here['message'][start]})\n"
                f"          {self._text(here['ids'], start, end)}",
            )

    def _note(self, kind: str, text: str) -> None:
        if kind not in self._tally.changes:
            self._tally.shown.append(text)
        self._tally.changes[kind] += 1

    def _name(self, place: tuple[int, int, int]) -> str:
        source, row, side = place
        return self._files.name(source, row) + (" (rejected)" if side else "")

    def _text(self, ids: Any, start: int, end: int) -> str:
        before, inside, after = (
            self._decoder.decode(part.tolist(), skip_special_tokens=False)
            for part in (ids[max(0, start - BEFORE) : start], ids[start:end], ids[end : end + AFTER])
        )
        if len(inside) > 200:
            inside = f"{inside[:90]} … {inside[-90:]}"
        return repr(f"{before}⟦{inside}⟧{after}")


def _row(arrays: Arrays, number: int) -> dict[str, Any]:
    first, last = arrays["offsets"][number : number + 2]
    return {name: arrays[name][first:last] for name in ("ids", *ORIGIN, *POLICIES)}


def _kinds(here: Arrays, there: Arrays) -> Any:
    """A number per token for its pair of origins."""
    return sum(
        side[name].astype(np.int64) << shift
        for side, name, shift in ((here, "role", 0), (here, "part", 8), (there, "role", 16), (there, "part", 24))
    )


def _origin(arrays: Arrays, token: int) -> str:
    role, part = int(arrays["role"][token]), int(arrays["part"][token])
    return f"{ROLES[role]}/{Part(part).name.lower()}"


def compare_masks(
    against: Path, tokenizer: Path, templates: Mapping[str, str], data: Sequence[Files], seconds: float
) -> dict[str, MaskTally]:
    """Compares this checkout with another over all templates, printing results as they arrive."""
    from tokenizers import Tokenizer

    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tallies: dict[str, MaskTally] = {}
    names = " ".join(f"{name[:24]:>24}" for name in POLICIES)
    print(f"{'template':36} {'rows':>6} {'tokens':>6} {names} {'segments':>8}")
    sides = (Checkout(ROOT, "here", seconds), Checkout(against, "there", seconds))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        try:
            for name, template in templates.items():
                tally = tallies[name] = MaskTally()
                file = Path(scratch) / "template.jinja"
                file.write_text(template)
                for files in data:
                    outs = [f"{scratch}/{side.name}.npz" for side in sides]
                    requests = [
                        {"data": files.paths, "tokenizer": str(tokenizer.absolute()), "template": str(file), "out": out}
                        for out in outs
                    ]
                    errors = list(pool.map(Checkout.dump, sides, requests))
                    if any(errors):
                        _note_errors(errors, tally)
                        continue
                    here, there = (dict(np.load(out)) for out in outs)
                    MaskComparison(here, there, files, decoder, tally).run()
                _print(name, tally)
        finally:
            for side in sides:
                side.close()
    return tallies


def _note_errors(errors: Sequence[str | None], tally: MaskTally) -> None:
    """Records errors, unless both checkouts refuse with the same message."""
    if errors[0] != errors[1]:
        tally.errors += [f"{where}: {e}" for where, e in zip(("here", "there"), errors, strict=True) if e]


def _print(name: str, tally: MaskTally) -> None:
    masks = " ".join(f"{count:24}" for count in tally.masks.values())
    print(f"{name:36} {tally.rows:6} {tally.tokens:6} {masks} {tally.segments:8}")
    if tally.only_here or tally.only_there:
        print(f"    rows only here: {tally.only_here}, only there: {tally.only_there}")
    for error in tally.errors:
        print(f"    ERROR {error}")
    for (kind, count), text in zip(tally.changes.items(), tally.shown, strict=True):
        print(f"    {count:6} rows {kind}\n        e.g. {text}")
    sys.stdout.flush()


def mask_report(tallies: Mapping[str, MaskTally]) -> dict[str, Any]:
    """The figures as JSON."""
    return {name: {**tally.__dict__, "perfect": tally.perfect} for name, tally in tallies.items()}
