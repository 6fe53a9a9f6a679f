"""Writes the figures of `benchmarks.all` into the README and docs/benchmarks.md, and draws their charts.

    python -m benchmarks.page [--results benchmarks/results.json]

Tables stand between marks such as `<!-- grid -->` and `<!-- end of grid -->`; nobody types them. A test checks that the
pages are what this program makes of the results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.all import RESULTS
from benchmarks.prepare import SLOWER

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "planning.md")
REAL_GRID = RESULTS.with_name("real_grid.json")
IMAGES = ROOT / "docs" / "images"
BUSY = 1.3  # wall time over CPU time
Results = Mapping[str, Any]
Models = Mapping[str, Mapping[str, Any]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose first `left` columns are text, and the others figures."""
    lines = [head, ["---" if column < left else "---:" for column in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def models(results: Results) -> Models:
    """The figures of each model of the grid."""
    found = {name: result["result"]["models"] for name, result in _done(results) if name.startswith("prepare ")}
    return {name: one for named in found.values() for name, one in named.items()}


def _done(results: Results) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, result) for name, result in results["benchmarks"].items() if "result" in result)


def _result(results: Results, name: str) -> Any:
    return results["benchmarks"][name]["result"]


# ---- preparing


def grid(results: Results) -> str:
    """The models of `benchmarks.all`."""
    return _grid(models(results))


def real_grid(_: Results) -> str:
    """More models, on real conversations and for longer, from a run of its own."""
    return _grid(json.loads(REAL_GRID.read_text())["models"])


def _grid(found: Models) -> str:
    """Slowest first, by the ratio to transformers."""
    rows = []
    ordered = sorted(found.items(), key=lambda item: item[1]["mixed"]["times_transformers"]["cpu"])
    for name, result in ordered:
        mixed, parts = result["mixed"], [result[part] for part in ("mixed", "traces") if part in result]
        rows.append([
            name,
            f"{mixed['megabytes_per_second']['penstock']['cpu']:.1f}",
            f"{mixed['times_transformers']['cpu']:.1f}",
            f"{mixed['share_of_gigatoken']['cpu']:.2f}",
            f"{result['traces']['times_transformers']['cpu']:.1f}" if "traces" in result else "-",
            f"{mixed['start_up']['cpu']:.1f}",
            f"{sum(p['equal_rows'] for p in parts):,} of {sum(p['compared_rows'] for p in parts):,}",
        ])  # fmt: skip
    head = ["model", "MB/s", "× transformers", "of the encoder alone", "tool traces ×", "start-up, CPU s", "rows equal"]
    return table(head, rows)


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
        "of the encoder alone": ("mixed", "share_of_gigatoken", "{:.2f}"),
    }
    rows = []
    for kind, slower in (("byte-level BPE", False), ("SentencePiece", True)):
        for label, (part, figure, shown) in figures.items():
            values = [
                (result[part][figure]["cpu"], name)
                for name, result in found.items()
                if part in result and (name in SLOWER) is slower
            ]
            if values:
                worst, best = (f"{shown.format(value)} ({name})" for value, name in (min(values), max(values)))
                rows.append([label, kind, worst, best])
    return table(["one worker, CPU time", "tokenizers", "worst", "best"], rows, left=2)


def kinds(results: Results) -> str:
    """One model on short chats, long tool traces and mixed scripts."""
    parts = {
        "short chats": _result(results, "kind chats")["models"]["qwen2_5"]["mixed"],
        "long tool traces": models(results)["qwen2_5"]["traces"],
        "Chinese and mixed scripts": _result(results, "kind scripts")["models"]["qwen2_5"]["mixed"],
    }
    rows = [
        [
            name,
            f"{part['megabytes_per_second']['penstock']['cpu']:.1f}",
            f"{part['times_transformers']['cpu']:.1f}",
            f"{part['share_of_gigatoken']['cpu']:.2f}",
            f"{part['equal_rows']:,} of {part['compared_rows']:,}",
        ]
        for name, part in parts.items()
    ]
    return table(["Qwen2.5", "MB/s", "× transformers", "of the encoder alone", "rows equal"], rows)


def peers(results: Results) -> str:
    """What people use, on the same rows, and why their rows differ."""
    found = _result(results, "peers")
    times = ("seconds", "cpu_seconds", "penstock_is_faster", "penstock_is_faster_cpu")
    counts = ("rows", "other_tokens", "other_masks")
    rows = [
        [name, *(f"{row[key]:.1f}" for key in times), *(f"{row[key]:,}" if key in row else "?" for key in counts)]
        for name, row in measured(found).items()
    ]
    head = ["start-up included", "wall s", "CPU s", "Penstock ×, wall", "Penstock ×, CPU", *map(_spaced, counts)]
    return "\n".join([table(head, rows), *_remarks(found), *_busy(found)])


def measured(found: Results) -> Results:
    """The peers that ran."""
    return {name: row for name, row in found.items() if "left_out" not in row}


def _remarks(found: Results) -> list[str]:
    """A line for each peer that was left out or whose rows differ; process counts that differ alike share one."""
    remarks = [
        f"- {name.partition(',')[0]}: {remark}."
        for name, row in found.items()
        if (remark := row.get("left_out", row.get("why")))
    ]
    return ["", *dict.fromkeys(remarks)] if remarks else []


def _busy(found: Results) -> list[str]:
    """A warning if other programs took CPU time: transformers' loop does nothing but compute."""
    loop = found.get("transformers, 1 process")
    if loop is None or loop["seconds"] < BUSY * loop["cpu_seconds"]:
        return []
    shown = f"{loop['seconds']:.1f} s of wall time for {loop['cpu_seconds']:.1f} s of CPU time"
    return ["", f"**The machine was busy** in this run (transformers: {shown}), so wall times mean little here."]


def _spaced(name: str) -> str:
    return name.replace("_", " ")


# ---- everything else


def memory(results: Results) -> str:
    """Peak memory of the parent and the workers, in MB."""
    found = _result(results, "memory")
    names = ("rows", "ten times the rows", "identifiers")
    rows = [
        [name, f"{found[name]['parent']:.0f}", ", ".join(f"{worker:.0f}" for worker in found[name]["workers"])]
        for name in names
    ]
    return table(["peak memory, MB", "parent", "workers"], rows)


def end_to_end(results: Results) -> str:
    """Seconds, and the share of them that the step waits for data."""
    rows = []
    for rate, ways in _result(results, "end to end")["simulated"].items():
        shown = [_waiting(ways[way]) for way in ("usual", "cold", "warm")]
        rows.append([f"{int(rate):,}", *shown])
    return table(["tokens/s of the step", "usual, s", "cold, s", "warm, s"], rows)


def _waiting(way: Mapping[str, float]) -> str:
    return f"{way['seconds']:.1f} ({way['waiting'] / way['seconds']:.1%} waiting)"


def feed(results: Results) -> str:
    """Collation and packing."""
    packed = _result(results, "packing")
    rows = []
    for name, found in _result(results, "collate").items():
        for kind in ("padded", "packed"):
            if kind in found:
                rows.append([f"collate, {kind}, {name}", f"{found[kind]['times as fast']:.1f} × transformers and TRL"])
        if "hidden" in found:
            rows.append([f"collate, {name}", f"{found['hidden']:.1%} of the time"])
    for name, found in packed.items():
        rows.append([f"plan, {name}", f"{found['planned seconds']:.2f} s for {found['lengths']:,}"])
        rows.append([f"efficiency, {name}", f"{found['efficiency']:.2%}"])
    return table(["feed", "figure"], rows, left=2)


def exports(results: Results) -> str:
    """Speed of each exit, beside copying its files."""
    rows = [
        [name, f"{one['tokens_per_second'] / 1e6:.0f}", f"{one['of_copy']:.2f}"]
        for name, one in _result(results, "export")["speed"].items()
    ]
    return table(["export", "million tokens/s", "of a copy's speed"], rows)


def ray(results: Results) -> str:
    """The Ray engine beside local workers, and its driver."""
    found = _result(results, "scale")
    engines, driver = found["engines"], found["driver"]
    rows = [
        ["throughput, of the local engine's", f"{engines['ray_over_local_megabytes_per_second']:.2f}"],
        ["the same in CPU time", f"{engines['ray_over_local_megabytes_per_cpu_second']:.2f}"],
        ["driver's memory with ten times the slices", f"{driver['growth']:.2f} ×"],
    ]
    return table(["Ray, two slots", "figure"], rows)


def planning(results: Results) -> str:
    """Predictions of a dry run over what happened."""
    names = {"lines": "JSON lines", "gzip": "the same, gzip", "parquet": "Parquet", "folder": "files with broken rows"}
    rows = [
        [names[name], *(f"{predicted / real:.2f}" for predicted, real in found.values())]
        for name, found in _result(results, "estimate").items()
    ]
    return table(["predicted / real", "rows", "tokens", "disk", "time"], rows)


def others(results: Results) -> str:
    """Whether every benchmark met its targets, with the command that repeats it."""
    rows = []
    for name, result in results["benchmarks"].items():
        state = {0: "met", 1: "missed"}.get(result["exit"], "failed") if "result" in result else "could not run"
        rows.append([name, state, f"{result['seconds']:.0f}", f"`{result['command']}`"])
    return table(["benchmark", "targets", "s", "command"], rows, left=2)


def machine(results: Results) -> str:
    """What the figures depend on."""
    found = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return f"{found['cores']} cores of {found['processor']}, Python {found['python']}; {packages}."


BLOCKS: dict[str, Callable[[Results], str]] = {
    "grid": grid,
    "real grid": real_grid,
    "extremes": extremes,
    "real extremes": real_extremes,
    "kinds": kinds,
    "peers": peers,
    "memory": memory,
    "end to end": end_to_end,
    "feed": feed,
    "exports": exports,
    "ray": ray,
    "planning": planning,
    "all": others,
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
