"""One module per export format. The module's name is the value of `--to`; its `FORMAT` implements `ExportFormat`."""

from __future__ import annotations

import pkgutil


def format_names() -> list[str]:
    """The names of all formats, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
