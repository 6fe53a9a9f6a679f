"""Reads a `TrainConfig` from a YAML file or a mapping, with `section.key=value` overrides.

An unknown key is an error that suggests the nearest one; an invalid value is an error that names its key. A source may
be written as just its path, and numbers in Python notation (`1e-5`). Paths are relative to the current folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

from penstock.addresses import check_source, local_path
from penstock.errors import UsageError
from penstock.options import read_options
from penstock.other_names import train_values
from penstock.train.config import TrainConfig

ConfigSource = TrainConfig | Mapping[str, Any] | str | os.PathLike[str]


def read_config(source: ConfigSource, overrides: Iterable[str] = ()) -> TrainConfig:
    """Reads a file, a mapping or a configuration, and applies overrides such as `optim.lr=1e-5`."""
    if isinstance(source, TrainConfig):
        values = plain(source)
    elif isinstance(source, Mapping):
        values = _copied(source)
    else:
        values = _read_yaml(source)
    for override in overrides:
        _override(values, override)
    return _validated(_normalised(train_values(values)))


def plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as JSON-compatible values, which `read_config` reads back."""
    value = _plain(asdict(config))
    assert isinstance(value, dict)
    return value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested sections to `section.key`; lists are kept."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain(entry) for entry in value]
        case Enum():
            return value.value
        case os.PathLike():
            return os.fspath(value)
        case _:
            return value


def _copied(value: Any) -> Any:
    """Copies mappings and lists, so that overrides don't modify the caller's."""
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    return [_copied(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    from penstock.config_files import load_yaml, read_text

    try:
        values = load_yaml(read_text(path))
    except ValueError as error:
        raise UsageError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected sections such as model:, data: and optim:, found {type(values).__name__}.")
    return values


def _override(values: dict[str, Any], override: str) -> None:
    """Applies an override such as `optim.lr=1e-5` or `data.sources.0.weight=0.3`."""
    from penstock.config_files import load_yaml

    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UsageError(f"{override!r}: expected section.key=value, for example optim.lr=1e-5.")
    try:
        value = load_yaml(text)
    except ValueError as error:
        raise UsageError(f"{override!r}: the value is not valid YAML: {error}") from error
    *parents, last = name.split(".")
    place: Any = values
    for part in parents:
        if isinstance(place, list):
            place = _entry(place, part, override)
        else:
            if not isinstance(place.get(part), (dict, list)):
                place[part] = {}
            place = place[part]
    if isinstance(place, list):
        _entry(place, last, override)
        place[int(last)] = value
    else:
        place[last] = value


def _entry(place: list[Any], part: str, override: str) -> Any:
    if not part.isdigit() or int(part) >= len(place):
        raise UsageError(f"{override!r}: {part!r} is not the index of an entry; there are {len(place)}, from 0.")
    if isinstance(place[int(part)], str):  # a source written as just its path
        place[int(part)] = {"path": place[int(part)]}
    return place[int(part)]


def _normalised(values: dict[str, Any]) -> dict[str, Any]:
    """Expands short forms: empty sections, sources written as a path, and single paths."""
    values = {key: value for key, value in values.items() if value is not None}
    for section in ("data", "eval"):
        part = values.get(section)
        if isinstance(part, dict) and isinstance(part.get("sources"), (str, dict, list)):
            sources = part["sources"]
            part["sources"] = [_source(entry) for entry in (sources if isinstance(sources, list) else [sources])]
    lora = values.get("lora")
    if isinstance(lora, dict) and isinstance(lora.get("targets"), str):
        lora["targets"] = [lora["targets"]]
    return values


def _source(entry: Any) -> Any:
    if isinstance(entry, (str, os.PathLike)):
        return {"path": [os.fspath(entry)]}
    if isinstance(entry, dict) and isinstance(entry.get("path"), (str, os.PathLike)):
        entry["path"] = [os.fspath(entry["path"])]
    if isinstance(entry, dict) and isinstance(entry.get("path"), list):
        entry["path"] = [os.fspath(part) if isinstance(part, os.PathLike) else part for part in entry["path"]]
    return entry


def _validated(values: dict[str, Any]) -> TrainConfig:
    config = read_options(TrainConfig, values, "the configuration")
    _refuse_addresses(config)
    return config


def _refuse_addresses(config: TrainConfig) -> None:
    """Raises an error for URLs where only a path or a hub name will do."""
    model, sources = config.model, (*config.data.sources, *config.eval.sources)
    paths: list[tuple[str, Any]] = [("output", config.output), ("model.path", model.path), ("model.init", model.init)]
    paths += [("model.tokenizer", model.tokenizer)]
    for given in (path for source in sources for path in source.path):
        check_source(given, "sources.path")
    for prepare in (config.data.prepare, *(source.prepare for source in sources)):
        names = ("tokenizer", "template", "quarantine_file")
        paths += [(f"prepare.{name}", prepare.get(name)) for name in names]
    for name, path in paths:
        if isinstance(path, str | os.PathLike):
            local_path(path, name)
