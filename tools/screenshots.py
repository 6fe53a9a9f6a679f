"""Takes the screenshots of the README and docs/look.md, from the bundled data: `python -m tools.screenshots`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import penstock as ps
from penstock.look.options import LookOptions
from penstock.look.report import report, write_report
from penstock.look.viewer.session import Session
from tests.support.browser import browser
from tests.support.viewer import TOKEN, serving

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"


def main() -> None:
    os.chdir(ROOT)  # so that pages name the data as a reader would
    with tempfile.TemporaryDirectory() as folder, browser() as tabs:
        ds = ps.prepare("examples/data/chats.jsonl", tokenizer="examples/tokenizer", cache=folder)
        page = Path(folder) / "report.html"
        write_report(report(ds.view(max_length=128)), page)
        tab = tabs.open(page.as_uri(), {"width": 1000, "height": 1240})
        tab.page.screenshot(path=IMAGES / "report.png")
        for viewer in serving(Session(ds, LookOptions(max_length=128))):
            tab = tabs.open(f"{viewer}/row/3?token={TOKEN}", {"width": 1000, "height": 760})
            tab.page.locator(".run.trained i").nth(3).hover()
            tab.page.screenshot(path=IMAGES / "row.png")
            tab = tabs.open(f"{viewer}/batch?capacity=512&batch_size=6", {"width": 1000, "height": 700})
            tab.page.screenshot(path=IMAGES / "batch.png")


if __name__ == "__main__":
    main()
