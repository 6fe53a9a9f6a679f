"""A headless Chromium (Debian's, driven by Playwright) for tests and screenshots, with its console recorded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect, sync_playwright

expect.set_options(timeout=30_000)  # a loaded machine

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
DESKTOP = {"width": 1200, "height": 900}
PHONE = {"width": 390, "height": 844}


def chromium() -> str | None:
    """The path of the installed Chromium."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Tab:
    """A page, with its console messages and network requests."""

    page: Page
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def hosts(self) -> set[str]:
        """Requests other than local files and data URLs."""
        return {urlsplit(url).netloc for url in self.requests if not url.startswith(("file:", "data:"))}

    def faults(self) -> list[str]:
        """Serious accessibility violations found by axe-core."""
        self.page.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        found: dict[str, Any] = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{fault['id']}: {node['html'][:160]}"
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]


class Browser:
    """Opens tabs."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def open(self, url: str, size: dict[str, int] = DESKTOP, scheme: str = "light") -> Tab:
        """Open this page in a new tab."""
        page = self._context.new_page()
        tab = Tab(page)
        page.on("console", lambda message: tab.said.append(message.text))
        page.on("pageerror", lambda error: tab.said.append(str(error)))
        page.on("request", lambda request: tab.requests.append(request.url))
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        page.goto(url, wait_until="load")
        return tab


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a fresh profile."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium(), args=FLAGS, headless=True
        )
        yield Browser(context)
        context.close()
