"""Penstock turns conversations into training batches: token-exact, fast, once."""

from penstock.api import Dataset, prepare
from penstock.api import open_ as open
from penstock.errors import PenstockError
from penstock.view.mixture import Count, Mixture, mix
from penstock.view.view import View

__version__ = "0.1.0"
__all__ = ["Count", "Dataset", "Mixture", "PenstockError", "View", "mix", "open", "prepare"]
