"""Writes the figures of `benchmarks.all` into the README and docs/benchmarks.md, and draws their charts.

    python -m benchmarks.page [--results benchmarks/results.json]

Figures are between marks such as `<!-- grid -->` and `<!-- end of grid -->`; nobody types them. A test checks that the
pages are what this program makes of the results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.all import RESULTS, TEN
from benchmarks.prepare import SLOWER

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "scale-out.md")
REAL_GRID = RESULTS.with_name("real_grid.json")
IMAGES = ROOT / "docs" / "images"
BUSY = 1.3  # wall time over CPU time
Results = Mapping[str, Any]
Models = Mapping[str, Mapping[str, Any]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose first `left` columns are text, and the others figures."""
    rule = "|".join("---" if column < left else "---:" for column in range(len(head)))
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([first, f"|{rule}|", *others])


def models(results: Results) -> Models:
    """The figures of each model of the grid."""
    found = {name: result["result"]["models"] for name, result in _done(results) if name.startswith("prepare ")}
    return {name: one for named in found.values() for name, one in named.items()}


def _done(results: Results) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, result) for name, result in results["benchmarks"].items() if "result" in result)


def _result(results: Results, name: str) -> Any:
    return results["benchmarks"][name]["result"]


# ---- preparing


def extremes(results: Results) -> str:
    """The worst model of `benchmarks.all` beside the best."""
    return _extremes(models(results))


def real_extremes(_: Results) -> str:
    """The same of the longer run on real conversations."""
    return _extremes(json.loads(REAL_GRID.read_text())["models"])


def _extremes(found: Models) -> str:
    """The worst model beside the best, of byte-level BPE and of all else."""
    figures = {
        "× transformers": ("mixed", "times_transformers", "{:.1f}"),
        "× transformers, tool traces": ("traces", "times_transformers", "{:.1f}"),
        "of the encoder's first pass": ("mixed", "share_of_first_pass", "{:.2f}"),
    }
    rows = []
    for kind, slower in (("byte-level BPE", False), ("SentencePiece", True)):
        for label, (part, figure, shown) in figures.items():
            values = [
                (result[part][figure]["cpu"], name)
                for name, result in found.items()
                if figure in result.get(part, {}) and (name in SLOWER) is slower
            ]
            if values:
                worst, best = (f"{shown.format(value)} ({name})" for value, name in (min(values), max(values)))
                rows.append([label, kind, worst, best])
    return table(["one worker, CPU time", "tokenizers", "worst", "best"], rows, left=2)


def peers(results: Results) -> str:
    """What people use, on the same rows, and why their rows differ."""
    found = _result(results, "peers")
    rows: dict[str, list[str]] = {}
    for name, row in measured(found).items():
        peer, _, _processes = name.partition(",")
        differing = [f"{row[key]:,}" if key in row else "?" for key in ("other_tokens", "other_masks")]
        line = rows.setdefault(peer, [peer, *differing])
        line.append(f"{row['seconds']:.1f}, {row['cpu_seconds']:.1f} ({row['penstock_is_faster_cpu']:.1f} ×)")
    lines = [[*line, *["-"] * (5 - len(line))] for line in rows.values()]
    head = ["start-up included", "other tokens", "other masks", "1 process: s, CPU s (Penstock ×)", "2 processes"]
    return "\n".join([table(head, lines), *_remarks(found), *_busy(found)])


def measured(found: Results) -> Results:
    """The peers that ran."""
    return {name: row for name, row in found.items() if "left_out" not in row}


def _remarks(found: Results) -> list[str]:
    """A line for each reason why peers were left out or their rows differ."""
    reasons: dict[str, dict[str, None]] = {}
    for name, row in found.items():
        if reason := row.get("left_out", row.get("why")):
            reasons.setdefault(reason, {})[name.partition(",")[0]] = None
    return ["", *(f"- {', '.join(names)}: {reason}." for reason, names in reasons.items())] if reasons else []


def _busy(found: Results) -> list[str]:
    """A warning if other programs took CPU time: transformers' loop does nothing but compute."""
    loop = found.get("transformers, 1 process")
    if loop is None or loop["seconds"] < BUSY * loop["cpu_seconds"]:
        return []
    shown = f"{loop['seconds']:.1f} s of wall time for {loop['cpu_seconds']:.1f} s of CPU time"
    return ["", f"**The machine was busy** in this run (transformers: {shown}), so wall times mean little here."]


# ---- everything else


def others(results: Results) -> str:
    """Memory, training end to end, the feed, exports and Ray, a line each."""
    memory, steps = _result(results, "memory"), _result(results, "end to end")["simulated"]
    collate, packing = _result(results, "collate"), _result(results, "packing")
    speeds, scale = _result(results, "export")["speed"], _result(results, "scale")
    few, many, rare = (max(memory[name]["workers"]) for name in ("rows", "ten times the rows", "identifiers"))
    parent = memory["ten times the rows"]["parent"]
    waits = {way: [one[way]["waiting"] / one[way]["seconds"] for one in steps.values()] for way in ("usual", "warm")}
    faster = {kind: [one[kind]["times as fast"] for one in collate.values() if kind in one] for kind in KINDS}
    hidden = [100 * one["hidden"] for one in collate.values() if "hidden" in one]
    planned = [one["planned seconds"] for one in packing.values()]
    full = [100 * one["efficiency"] for one in packing.values()]
    exported = ", ".join(f"{name} {one['tokens_per_second'] / 1e6:.0f}" for name, one in speeds.items())
    lines = [
        f"**Memory**: a worker peaks at {few:.0f} MB, at {many:.0f} MB with ten times the rows, and at {rare:.0f} MB "
        f"on random identifiers; the parent at {parent:.0f} MB.",
        f"**Training**, simulated steps of {', '.join(f'{int(rate):,}' for rate in steps)} tokens/s: tokenizing on the "
        f"fly waits for {', '.join(f'{share:.0%}' for share in waits['usual'])} of the time, Penstock with a filled "
        f"cache for {', '.join(f'{share:.1%}' for share in waits['warm'])}.",
        f"**Collating**: {_range(faster['padded'])} (padded) and {_range(faster['packed'])} (packed) times as fast as "
        f"transformers and TRL; prefetching hides {_range(hidden, '.0f')}% of it.",
        f"**Packing** a million sequences: planned in {_range(planned, '.2f')} s, rows {_range(full, '.2f')}% full.",
        f"**Exports**, million tokens/s: {exported}.",
        f"**Ray**, two slots: {scale['engines']['ray_over_local_megabytes_per_second']:.2f} of local workers' "
        f"throughput; ten times the slices take {scale['driver']['growth']:.2f} times the driver's memory.",
    ]
    found = [name for name in FLOORS if name in results["benchmarks"]]
    lines[:0] = (_slowest(_result(results, name), *FLOORS[name]) for name in found)
    return "\n".join(f"- {line}" for line in lines)


FLOORS = {
    "floor": ("templates", "**Templates**, {count}", "Qwen2.5's"),
    "texts": ("texts", "**Kinds of text**, {count} with tokenizers", "plain English's"),
}


def _slowest(found: Results, group: str, what: str, ordinary: str) -> str:
    """The slowest template or kind of text."""
    speeds = sorted((one["speed"], name) for name, one in found[group].items() if "speed" in one)
    (slowest, name), least = speeds[0], found["floors"][group]
    below = sum(speed < least for speed, _ in speeds)
    return (
        f"{what.format(count=len(speeds))}: the slowest, {name}, runs at {slowest:.2f} of {ordinary} speed; {below} "
        f"miss {least}."
    )


KINDS = ("padded", "packed")


def _range(values: Sequence[float], shown: str = ".1f") -> str:
    return f"{min(values):{shown}} to {max(values):{shown}}"


def planning(results: Results) -> str:
    """Predictions of a dry run over what happened."""
    names = {"lines": "JSON lines", "gzip": "the same, gzip", "parquet": "Parquet", "folder": "files with broken rows"}
    rows = [
        [names[name], *(f"{predicted / real:.2f}" for predicted, real in found.values())]
        for name, found in _result(results, "estimate").items()
    ]
    return table(["predicted / real", "rows", "tokens", "disk", "time"], rows)


def targets(results: Results) -> str:
    """How many benchmarks met all their targets, and which did not."""
    found = {name: result for name, result in results["benchmarks"].items() if "result" in result}
    missed = [name for name, result in found.items() if result["exit"]]
    lost = [name for name in results["benchmarks"] if name not in found]
    named = [f"{first} {rest}" if rest else first for first, rest in _grouped(missed)]
    shown = f"{len(found) - len(missed)} of {len(found)} runs met all targets; missed by {', '.join(named) or 'none'}."
    return shown + (f" Could not run: {', '.join(lost)}." if lost else "")


def _grouped(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names with the same first word as one: `prepare (all 10)`, or the words after it."""
    for first, group in groupby(names, key=lambda name: name.split()[0]):
        rest = [name.partition(" ")[2] for name in group]
        yield first, f"(all {len(rest)})" if first == "prepare" and len(rest) == len(TEN) else ", ".join(rest)


COMPARED = ("penstock", "transformers", "tokenizers", "gigatoken", "datasets", "trl")


def machine(results: Results) -> str:
    """What the figures depend on."""
    found = results["machine"]
    packages = ", ".join(f"{name} {found['packages'][name]}" for name in COMPARED if name in found["packages"])
    return f"{found['cores']} cores of {found['processor']}, Python {found['python']}; {packages}."


BLOCKS: dict[str, Callable[[Results], str]] = {
    "extremes": extremes,
    "real extremes": real_extremes,
    "peers": peers,
    "others": others,
    "planning": planning,
    "targets": targets,
    "machine": machine,
}


# ---- charts

BAR, GAP, NAME, WIDTH = 18, 8, 230, 720


def bars(title: str, values: Mapping[str, float]) -> str:
    """A horizontal bar for each value, for light and dark pages."""
    most, height = max(values.values()), len(values) * (BAR + GAP) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>text{font:13px sans-serif;fill:#24292f}rect{fill:#0969da}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}rect{fill:#4493f8}}</style>",
        f'<text x="0" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(values.items()):
        y, width = 32 + number * (BAR + GAP), (WIDTH - NAME - 60) * value / most
        lines.append(f'<text x="{NAME - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="{NAME}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>')
        lines.append(f'<text x="{NAME + width + 6:.1f}" y="{y + 14}">{value:.1f}</text>')
    return "\n".join([*lines, "</svg>", ""])


def charts(results: Results) -> dict[str, str]:
    """The charts by file name."""
    times = {name: result["mixed"]["times_transformers"]["cpu"] for name, result in models(results).items()}
    faster = {
        name: row["penstock_is_faster"]
        for name, row in measured(_result(results, "peers")).items()
        if not name.startswith("penstock")
    }
    return {
        "benchmarks-grid.svg": bars(
            "Times as fast as transformers with masks, one core", dict(sorted(times.items(), key=lambda item: item[1]))
        ),
        "benchmarks-peers.svg": bars("Times as fast as, start-up included", faster),
    }


def filled(text: str, results: Results) -> str:
    """A page with its figures replaced."""
    for name, make in BLOCKS.items():
        marks = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        if re.search(marks, text, re.DOTALL):
            try:
                block = make(results)
            except KeyError as missing:
                block = f"Not measured in this run ({missing})."
            text = re.sub(marks, lambda match, block=block: f"{match[1]}{block}\n{match[2]}", text, flags=re.DOTALL)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = json.loads(parser.parse_args().results.read_text())
    for page in PAGES:
        page.write_text(filled(page.read_text(), results))
    for name, drawn in charts(results).items():
        (IMAGES / name).write_text(drawn)


if __name__ == "__main__":
    main()
