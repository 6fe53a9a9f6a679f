"""Report and viewer in a real browser: they work, execute nothing from rows, make no requests, and are accessible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.look.report import report, write_report

pytest.importorskip("playwright", reason="playwright is not installed; `make test` installs it")
from playwright.sync_api import expect

from tests.support.browser import DESKTOP, PHONE, Browser, Tab, browser, chromium
from tests.support.viewer import TOKEN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium() is None, reason="there is no Chromium: `apt-get install chromium`, which `make test` does as root"
    ),
]


@pytest.fixture(scope="module")
def tabs() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def viewer(tabs: Browser, viewer: str) -> str:
    """The viewer's address, after a visit with the token."""
    tab = tabs.open(f"{viewer}/?token={TOKEN}")
    assert tab.page.url == f"{viewer}/"  # the address bar and the history keep no token
    fine(tab, viewer)
    return viewer


def test_only_a_browser_with_the_token_sees_rows(dataset: ps.Dataset, tmp_path: Path) -> None:
    opener, opened = tmp_path / "browser", tmp_path / "opened.html"
    opener.write_text(
        f'#!/bin/sh\necho "$*" > {tmp_path}/line\ncp -p "${{1#file://}}" {opened}.part\nmv {opened}.part {opened}\n'
    )
    opener.chmod(0o755)
    environment = {**os.environ, "DISPLAY": ":0", "BROWSER": f"{opener} %s"}
    command = [sys.executable, "-m", "penstock.cli", "view", str(dataset.path)]
    with (
        browser() as stranger,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running,
    ):
        assert running.stdout is not None
        printed = running.stdout.readline().strip()
        address, _, query = printed.partition("?")
        try:
            refused = stranger.open(f"{address}row/1").page
            assert refused.inner_text("body").startswith("Refused: open the address that `penstock view` printed")
            while not opened.exists():
                time.sleep(0.05)
            assert opened.stat().st_mode & 0o777 == 0o600 and query not in (tmp_path / "line").read_text()
            entered = stranger.open(opened.as_uri()).page
            entered.wait_for_url(address)
            assert "rows" in entered.inner_text("#count")
            assert entered.evaluate("document.cookie") == ""  # no script can read it
            assert stranger.open(f"{address}row/2").page.inner_text("h1") == "Row 2"
        finally:
            running.send_signal(signal.SIGINT)


def fine(tab: Tab, viewer: str | None) -> None:
    """No console message, foreign request, injected script, accessibility violation or horizontal scrolling."""
    assert tab.said == []
    assert tab.hosts() <= ({viewer.removeprefix("http://")} if viewer else set())
    assert tab.page.evaluate("window.hacked") is None
    assert tab.faults() == []
    width = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width <= 0
    tab.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report(tabs: Browser, dataset: ps.Dataset, tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "report.html"
    write_report(report(dataset.view(max_length=512)), path)
    for size in (DESKTOP, PHONE):
        tab = tabs.open(path.as_uri(), size, scheme)
        tab.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        token = tab.page.locator(".tokens i").first
        token.hover()
        assert tab.page.locator("#tip").inner_text().startswith(f"id {token.get_attribute('data-t')}")
        fine(tab, None)


def test_a_token_shows_its_id_to_the_mouse_and_to_the_keyboard(tabs: Browser, viewer: str) -> None:
    tab = tabs.open(f"{viewer}/row/1")
    token = tab.page.locator(".run.trained i").nth(2)
    token.hover()
    said = tab.page.locator("#tip").inner_text()
    assert f"id {token.get_attribute('data-t')}" in said and "trained" in said and "bytes" in said
    tab.page.locator(".tokens").focus()
    for _ in range(3):
        tab.page.keyboard.press("ArrowRight")
    current = tab.page.locator(".tokens i.current")
    assert "token 2" in tab.page.locator("#tip").inner_text()
    assert f"id {current.get_attribute('data-t')}" in tab.page.locator("#tip").inner_text()
    fine(tab, viewer)


def test_masks_follow_the_policy(tabs: Browser, viewer: str, dataset: ps.Dataset) -> None:
    row = 10
    tab = tabs.open(f"{viewer}/row/{row}")
    for policy in ("last_assistant_message", "all_tokens", "all_user_and_system_messages"):
        tab.page.locator(f"input[value={policy}]").check()
        view = dataset.view(train_on=policy)
        expected = int(view[view.index.rows.tolist().index(row)].loss_mask.sum())  # type: ignore[union-attr]
        assert tab.page.locator(".run.trained i").count() == expected
        assert tab.page.locator("[data-trained-total]").inner_text() == f"{expected:,}"
        assert tab.page.url.endswith(f"train_on={policy}")
    again = tabs.open(tab.page.url)  # URLs can be bookmarked
    assert again.page.locator(".run.trained i").count() == expected
    fine(again, viewer)
    fine(tab, viewer)


def test_hostile_rows_neither_execute_nor_reorder_text(tabs: Browser, viewer: str) -> None:
    for size in (DESKTOP, PHONE):
        tab = tabs.open(f"{viewer}/row/0", size)
        text = tab.page.locator("main").inner_text()
        assert "<script>window.hacked = 1</script>" in text and "\\u202egnihtyna" in text and "\u202e" not in text
        assert tab.page.locator("main script, main img, main a[href^=javascript]").count() == 0
        places = tab.page.evaluate(
            "[...document.querySelectorAll('.run.trained i')].map(i => i.getClientRects()[0])"
            ".map(r => [Math.round(r.top), Math.round(r.left)])"
        )
        tops = sorted({top for top, _ in places})
        for line in tops:
            lefts = [left for top, left in places if top == line]
            assert lefts == sorted(lefts)  # tokens are in order
        fine(tab, viewer)


def test_filters_search_and_keys(tabs: Browser, viewer: str) -> None:
    tab = tabs.open(f"{viewer}/")
    page = tab.page
    page.locator("details.more > summary").click()
    page.locator("select[name=role]").select_option("tool")
    page.locator("input[name=min]").fill("60")
    page.get_by_role("button", name="Apply").click()
    assert "that pass" in page.locator("#count").inner_text() and "role=tool" in page.url
    page.wait_for_load_state("load")  # the keys work once the script has run
    page.locator("summary").first.focus()
    page.keyboard.press("/")
    page.keyboard.type("USER")
    page.keyboard.press("Enter")
    expect(page.locator("#search-status")).to_contain_text("Done")
    assert page.locator("#hits mark").first.inner_text() == "user"
    page.locator("h1").click()
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.closest('#hits') !== null")
    page.keyboard.press("Enter")
    page.wait_for_url("**/row/**")
    page.keyboard.press("u")
    page.wait_for_url("**/?q=**")
    page.keyboard.press("g")
    page.keyboard.type("12")
    page.keyboard.press("Enter")
    page.wait_for_url("**/row/12")
    page.keyboard.press("j")
    page.wait_for_url("**/row/13")
    fine(tab, viewer)


def test_a_search_can_be_stopped_and_continued(tabs: Browser, viewer: str) -> None:
    tab = tabs.open(f"{viewer}/?q=user")
    page = tab.page
    expect(page.locator("#search-status")).to_contain_text("So far: 100 hits")
    page.locator("#search-more").click()
    expect(page.locator("#hits li")).to_have_count(200)
    expect(page.locator("#search-stop")).to_be_hidden()
    fine(tab, viewer)


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_every_page_loads_without_problems(tabs: Browser, viewer: str, size: dict[str, int], scheme: str) -> None:
    for path in ("/", "/row/0", "/batch?capacity=256&batch_size=4&step=2", "/report", "/diff", "/nothing"):
        tab = tabs.open(f"{viewer}{path}", size, scheme)
        if path == "/nothing":  # the browser itself notes a 404
            assert "Not possible" in tab.page.inner_text("h1")
            tab.said.clear()
        fine(tab, viewer)
    tab = tabs.open(f"{viewer}/batch?capacity=256&batch_size=4", size, scheme)
    assert tab.page.locator(".bin").count() == 4
    tab.page.locator(".bins summary").first.click()
    tab.page.locator(".placed a").first.click()
    tab.page.wait_for_url("**/row/**")
    fine(tab, viewer)
