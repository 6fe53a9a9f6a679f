"""The documentation as a whole: it builds, its links lead somewhere, and what it quotes from the code is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.api_reference import document as api
from tools.cli_reference import document as command_line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")])
# Which test runs the examples of a page; those of tests/test_docs.py are found by name there.
RUN_BY = {"README.md": "tests/test_docs.py", "start.md": "tests/test_release.py"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The text of a page without its code blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            assert re.fullmatch(r"https?://[\w.-]+\.\w{2,}(/[^\s]*)?", target), target
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name) if name else page
        assert place.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(place), f"{page.name} links to {target}; {place.name} has {sorted(anchors(place))}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_guides_name_exist(name: str) -> None:
    named = re.findall(r"`((?:penstock|tests|docs|benchmarks|tools)/[\w/.-]*)`", text_of(ROOT / name))
    assert named
    for path in named:
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_every_page_is_in_the_navigation() -> None:
    entries = re.findall(r"^```\{toctree\}\n(.*?)^```", text_of(DOCS / "index.md"), re.DOTALL | re.MULTILINE)
    listed = {re.sub(r".*<(.*)>", r"\1", line) for entry in entries for line in entry.splitlines() if line[:1] != ":"}
    assert listed == {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} - {"index"}


def test_every_example_is_run_by_a_test() -> None:
    """Blocks marked `bash` and `python` are run; anything else is marked `text`."""
    for page in PAGES:
        if not re.search(r"^```(bash|python)\n", text_of(page), re.MULTILINE):
            continue
        test = ROOT / RUN_BY.get(page.name, "tests/test_docs.py")
        named = page.name in RUN_BY or re.search(rf'"{page.stem}(\.md)?"', text_of(test))
        assert named, f"no test runs the examples of {page.name}; mark blocks that can't run as text"


def test_generated_pages_are_up_to_date() -> None:
    assert text_of(DOCS / "cli.md") == command_line(), "run `make generate`"
    assert text_of(DOCS / "api.md") == api(), "run `make generate`"


def strings() -> Iterator[str]:
    """Every string of the package; f-strings with … for their values."""
    for path in (ROOT / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    known = "\n".join(strings())
    titles = re.findall(r"^### (.*)$", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
    assert len(titles) > 20
    for title in titles:
        pieces = [piece.strip() for piece in title.split("…") if len(piece.strip()) > 2]
        assert max(map(len, pieces)) >= 12, title
        for piece in pieces:
            assert piece in known, f"{title}: {piece!r} is nowhere in the code"


def test_tests_named_by_guarantees_exist() -> None:
    page = text_of(DOCS / "guarantees.md")
    sections = re.split(r"^## ", page.partition("## Exactness, row by row")[0], flags=re.MULTILINE)[1:]
    assert len(sections) >= 10
    for section in sections:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", section)
        assert named and "**Not covered**" in section, section
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        tmp_path / "trees",
        DOCS,
        tmp_path / "site",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        for address in re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="(http[^"]*)"', page.read_text()):
            raise AssertionError(f"{page.name} loads {address}: the site must work offline")
