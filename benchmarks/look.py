"""How long pictures of a large dataset take: the report, the viewer's first page, the first hits of a search.

    python -m benchmarks.look DATASET

Each is a process of its own, as a user would start it; memory is the peak of that process. DATASET is a folder that
`penstock prepare` made, of a million rows or 500 MB for example (`python -m benchmarks.grow` makes the rows).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

import penstock as ps

PENSTOCK = [sys.executable, "-m", "penstock.cli"]


def peak(pid: int) -> float:
    """The most memory that a process had so far, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def cpu(pid: int) -> float:
    """CPU seconds of a process so far: on a busy machine, what the clock would say on an idle one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(dataset: Path) -> None:
    """The command as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder) / "report.html", time.perf_counter()
        process = subprocess.Popen([*PENSTOCK, "report", dataset, "-o", out, "--max-length", "2048"])
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit("the report failed")
        seconds, size = time.perf_counter() - begin, out.stat().st_size
    spent = used.ru_utime + used.ru_stime
    print(
        f"report: {seconds:.1f} s ({spent:.1f} s CPU), peak {used.ru_maxrss / 1024:.0f} MB, {size / 1e3:.0f} kB of HTML"
    )


def viewer(dataset: Path, needles: list[str]) -> None:
    """From the command to its first page, then pages and searches."""
    begin = time.perf_counter()
    process = subprocess.Popen([*PENSTOCK, "view", dataset, "--no-browser"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        assert address.hostname is not None
        started = time.perf_counter()
        first = get(address.hostname, address.port, "/")
        spent = cpu(process.pid)
        print(f"viewer: first page {first:.2f} s")
        print(f"viewer: from the command to the page {started - begin + first:.2f} s ({spent:.2f} s CPU)")
        for path in (
            "/",
            "/row/500000",
            "/?role=assistant&min=300&sort=longest",
            "/?warning=duplicate",
            "/batch?capacity=16384",
        ):
            print(f"viewer: {path} {get(address.hostname, address.port, path):.2f} s")
        for needle in needles:
            search(address.hostname, address.port, needle)
        stop(address.hostname, address.port)
        print(f"viewer: peak {peak(process.pid):.0f} MB")
    finally:
        process.terminate()
        process.wait(30)


def get(host: str, port: int | None, path: str) -> float:
    """Seconds until a page is there."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(host, port, timeout=120)
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    if answer.status not in (200, 404):
        raise SystemExit(f"{path}: {answer.status}")
    connection.close()
    return time.perf_counter() - begin


def search(host: str, port: int | None, needle: str) -> None:
    """Seconds to the first hit, and to the last row or the hundredth hit."""
    begin, first, hits, scanned = time.perf_counter(), None, 0, 0
    connection = http.client.HTTPConnection(host, port, timeout=120)
    connection.request("GET", f"/search?q={quote(needle)}")
    for line in connection.getresponse():
        said = json.loads(line)
        if "hit" in said:
            first = first or time.perf_counter() - begin
            hits += 1
        scanned = said.get("progress", said.get("done", {"scanned": scanned}))["scanned"]
    connection.close()
    seen = "none" if first is None else f"first after {first:.2f} s"
    print(f"search {needle!r}: {hits} hits, {seen}; {scanned:,} rows in {time.perf_counter() - begin:.2f} s")


def stop(host: str, port: int | None) -> None:
    """A search that is given up: the next page must not wait for it."""
    connection = http.client.HTTPConnection(host, port, timeout=120)
    connection.request("GET", "/search?q=no%20such%20text%20anywhere")
    connection.getresponse().readline()
    connection.close()
    print(f"search stopped; the page after it {get(host, port, '/'):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--search", nargs="*", default=["Natalia", "pirate", "no such text anywhere"])
    arguments = parser.parse_args()
    dataset = ps.open(arguments.dataset)
    print(
        f"{len(dataset):,} rows, {dataset.tokens:,} tokens, {sum(dataset.manifest.shards.bytes) / 1e6:.0f} MB of shards"
    )
    viewer(arguments.dataset, arguments.search)
    report(arguments.dataset)


if __name__ == "__main__":
    main()
