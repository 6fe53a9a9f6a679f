"""Renders the HTML templates of the report, the viewer and notebooks: jinja2 with autoescape and custom filters."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from penstock.look.charts import curve, histogram
from penstock.look.tokens import run_html
from penstock.printable import printable
from penstock.view.settings import LossPolicy

PAGES: Final = Path(__file__).parent / "pages"


def render(template: str, **values: Any) -> str:
    """Render a page; anything that is not Markup is escaped."""
    return environment().get_template(template).render(**values)


def stylesheet() -> Markup:
    """The stylesheet of all pages, for inlining."""
    return _file("look.css")


def script() -> Markup:
    """The script of all pages, for inlining."""
    return _file("look.js")


def source_hash(text: str) -> str:
    """The source expression of an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def environment() -> Environment:
    """The templates, with their filters; an undefined name is an error."""
    made = Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(number=number, short=short, percent=percent, plural=plural)
    made.globals.update(
        histogram=histogram, curve=curve, run_html=run_html, POLICIES=[policy.value for policy in LossPolicy]
    )
    return made


def _printable(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _file(name: str) -> Markup:
    return Markup((PAGES / name).read_text(encoding="utf-8"))  # noqa: S704  our own file


def number(value: float) -> str:
    """`1,234`."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def short(value: float) -> str:
    """`1.2 M`: about three digits, for headlines that show the exact number nearby."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.3g} {unit}"
    return f"{value:,}"


def percent(part: float, whole: float = 1.0) -> str:
    """A percentage with enough digits to differ from 0 and from 100."""
    if not whole:
        return "0%"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "<0.1%"
    if 99.9 < share < 100:
        return ">99.9%"
    return f"{share:.1f}%".replace(".0%", "%")


def plural(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def link(path: str, parameters: Mapping[str, object]) -> str:
    """A path with a query string, without empty parameters."""
    from urllib.parse import urlencode

    given = {name: value for name, value in parameters.items() if value not in (None, "", ())}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path
