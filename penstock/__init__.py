"""Penstock turns conversations into training batches: token-exact, fast, once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api import Dataset, Mixture, View, adopt, estimate, mix, prepare
    from penstock.api import open_ as open
    from penstock.errors import PenstockError
    from penstock.load.loader import Loader
    from penstock.load.view import Count
    from penstock.train.run import train

__version__ = "0.1.0"
__all__ = [
    "Count",
    "Dataset",
    "Loader",
    "Mixture",
    "PenstockError",
    "View",
    "adopt",
    "estimate",
    "mix",
    "open",
    "prepare",
    "train",
]

# Names are looked up when they are first used, so that `import penstock` and worker processes start at once.
_HOMES = {
    "Count": "load.view",
    "Dataset": "api",
    "Loader": "load.loader",
    "Mixture": "api",
    "PenstockError": "errors",
    "View": "api",
    "adopt": "api",
    "estimate": "api",
    "mix": "api",
    "open": "api",
    "prepare": "api",
    "train": "train.run",
}

# `ps.prepare` and `ps.train` are functions, and packages have these names too. Imported before, they don't hide them.
for _name in ("prepare", "train"):
    import_module(f"penstock.{_name}")
    del globals()[_name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(f"penstock.{home}"), "open_" if name == "open" else name)
