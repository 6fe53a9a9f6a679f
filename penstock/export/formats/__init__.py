"""One module per format, each with a `FORMAT`; its name is the `--to`."""

from __future__ import annotations

import pkgutil


def format_names() -> list[str]:
    """All formats, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
