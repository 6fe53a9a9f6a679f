"""Hugging Face Hub datasets (or a local folder with a config), through the optional package `datasets`.

`datasets` downloads and converts the requested splits in its own cache; Penstock reads the resulting Arrow files.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import SourceError
from penstock.sources.folders import FoundFile


class HubDataset(NamedTuple):
    """A Hub dataset: name, config and revision."""

    name: str
    config: str | None = None
    revision: str | None = None

    def split_names(self) -> list[str]:
        """The names of the dataset's splits."""
        datasets = _datasets(self.name)
        try:
            return list(datasets.get_dataset_split_names(self.name, self.config, revision=self.revision))
        except Exception as error:  # `datasets` raises whatever its readers raise
            raise self._failure(error) from error

    def load(self, split: str) -> list[FoundFile]:
        """The files of one split, downloaded and converted if necessary."""
        datasets = _datasets(self.name)
        try:
            dataset = datasets.load_dataset(self.name, self.config, revision=self.revision, split=split)
        except Exception as error:
            raise self._failure(error) from error
        if dataset._indices is not None or not dataset.cache_files:
            raise SourceError(
                f"{self.name}: 'datasets' keeps this dataset in memory or behind an indices mapping. "
                "Save it first, dataset.flatten_indices().save_to_disk('folder'), and pass the folder."
            )
        paths = [Path(entry["filename"]) for entry in dataset.cache_files]
        return [FoundFile(path, f"{self.name}/{path.name}", split) for path in paths]

    def _failure(self, error: Exception) -> SourceError:
        config = f" with config {self.config!r}" if self.config else ""
        return SourceError(
            f"{self.name}: not a local file or folder, and it could not be loaded as a Hugging Face dataset{config}: "
            f"{type(error).__name__}: {error}. Check the name, the config, the revision and the network."
        )


def _datasets(name: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise SourceError(
            f"{name}: not a local file or folder, and loading a Hugging Face dataset needs the package 'datasets'. "
            "Install it: pip install 'penstock[hub]'."
        ) from error
