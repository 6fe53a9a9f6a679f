"""Options of a training run: YAML keys, overrides and documentation are derived from here.

One frozen dataclass per section; the sections `view` and `loader` are the records of `penstock.load`. `read_config`
builds them from YAML and `section.key=value`; `validation` rejects unsupported combinations before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from annotated_types import Ge

from penstock.addresses import check_source, local_path
from penstock.errors import UsageError
from penstock.load.options import LoaderOptions, Positive, ViewOptions
from penstock.options import option, read_options
from penstock.other_names import train_values


class Precision(StrEnum):
    """Data types of computation, weights and optimiser."""

    AUTO = "auto"  # bf16-mixed if the device supports it, else fp32
    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"  # compute in bf16, weights and optimiser in fp32
    BF16 = "bf16"  # compute, weights and optimiser in bf16


class Schedule(StrEnum):
    """The learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Mean(StrEnum):
    """What the loss averages over the global batch."""

    TOKEN = "token"  # each trained token counts with its weight
    EXAMPLE = "example"  # each example counts equally


class ReferenceMode(StrEnum):
    """Where DPO's reference log-probabilities come from."""

    CACHED = "cached"  # computed once and stored with the dataset
    LIVE = "live"  # computed at every step, by a frozen copy or by the model with its adapters disabled


class Resume(StrEnum):
    """What to do if the output contains checkpoints."""

    AUTO = "auto"  # resume from the last one; error if the settings changed
    ANYWAY = "anyway"  # resume even if the settings changed
    NEVER = "never"  # error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model."""

    path: str | None = option("Model: a folder or a hub name")
    init: Path | None = option(
        "A config.json (or its folder) to initialise a model with random weights, instead of path"
    )
    revision: str | None = option("Revision of a model from the hub")
    tokenizer: str | None = option("Tokenizer: a folder or a hub name; default: the model's own")
    attention: str = option("Attention implementation of transformers: auto, eager, sdpa, flash_attention_2, …", "auto")
    precision: Precision = option("Precision: auto, fp32, bf16-mixed, bf16", Precision.AUTO)
    gradient_checkpointing: bool = option("Recompute activations in the backward pass to save memory", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """A source of a mixture: what to read, and how much of it per epoch."""

    path: tuple[str, ...] = option("Files, globs, folders, hub datasets, or the folder of a prepared dataset", ())
    name: str | None = option("Name in the mixture; default: the file's")
    weight: float | None = option("Passes per epoch; 0.3 is a fresh 30% each epoch [default: 1]")
    examples: int | None = option("Examples per epoch, instead of a weight")
    prepare: Mapping[str, Any] = option("Options of `penstock prepare` for this source (format, split, roles, …)", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training data."""

    sources: tuple[SourceConfig, ...] = option("One source, or several to mix", ())
    prepare: Mapping[str, Any] = option(
        "Options of `penstock prepare` for all sources (template, cache, workers, …)", {}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning rate."""

    lr: Annotated[float, Ge(0)] = option("Peak learning rate", 1e-5)
    schedule: Schedule = option("After warm-up: constant, linear, cosine", Schedule.COSINE)
    warmup: float = option("Warm-up: a fraction of the run if below 1, else a number of steps", 0.03)
    final: float = option("Final learning rate, as a fraction of the peak", 0.0)
    weight_decay: Annotated[float, Ge(0)] = option("Weight decay, applied to matrices only", 0.0)
    betas: tuple[float, float] = option("AdamW's betas", (0.9, 0.999))
    eps: float = option("AdamW's epsilon", 1e-8)
    clip: float | None = option("Maximum gradient norm; null: no clipping", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft)."""

    rank: Annotated[int, Ge(0)] = option("Rank of the adapters; 0: train all weights", 0)
    alpha: float | None = option("LoRA alpha [default: twice the rank]")
    dropout: float = option("Dropout before the adapters", 0.0)
    targets: tuple[str, ...] = option("Names of the modules to adapt, or all-linear", ("all-linear",))
    merge: bool = option("Merge the adapters into the final model, instead of saving only the adapters", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LigerConfig:
    """Liger's kernels."""

    enabled: bool = option("Use Liger's kernels; each of those below can be turned off", False)
    rms_norm: bool = option("RMSNorm", True)
    rope: bool = option("Rotary embeddings", True)
    mlp: bool = option("SwiGLU or GeGLU", True)
    fused_loss: bool = option("Fuse the loss with the LM head, so that logits are not materialised", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The loss of supervised fine-tuning."""

    mean: Mean = option(
        "Mean over the trained tokens of the global batch (token), or over its examples (example)", Mean.TOKEN
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """Direct preference optimisation."""

    beta: float = option("Strength of the pull towards the reference", 0.1)
    label_smoothing: float = option("Assumed fraction of wrong preferences", 0.0)
    reference: ReferenceMode = option(
        "Reference log-probabilities: cached (computed once, kept), live", ReferenceMode.CACHED
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoConfig:
    """Answers that are labelled as good or bad (KTO)."""

    beta: float = option("How strongly to hold to the reference", 0.1)
    desirable_weight: float = option("What a good answer counts in the loss", 1.0)
    undesirable_weight: float = option("What a bad answer counts in the loss", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation during training."""

    every: Positive | None = option("Steps between evaluations; the end of the run is always evaluated")
    sources: tuple[SourceConfig, ...] = option("Sources to evaluate on, instead of view.holdout", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    every: Positive | None = option("Steps between checkpoints; signals and the end of the run save too")
    keep: Positive = option("Number of checkpoints to keep", 2)
    resume: Resume = option("Where the output holds checkpoints: auto (resume), anyway, never (refuse)", Resume.AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging beyond metrics.jsonl and loss.svg, which are always written."""

    tensorboard: bool = option("Write TensorBoard events too", False)
    trackers: tuple[str, ...] = option("Trackers of accelerate: wandb, mlflow, tensorboard, …", ())
    project: str = option("Project (or experiment) of the trackers", "penstock")
    run_name: str | None = option("Name of the run there; default: that of the output folder")


BATCH_SIZE: Final = 32  # unless set; a loader outside training has no default
# Options of views and loaders that the run sets itself, and why.
FIXED: Final[Mapping[str, str]] = {
    "view.holdout_side": "the run trains on one side of the hold-out and evaluates on the other",
    "loader.seed": "the whole run has one `seed`",
    "loader.shuffle": "training reshuffles every epoch, and evaluation keeps the order",
    "loader.rank": "accelerate numbers the processes",
    "loader.world_size": "accelerate counts the processes",
    "loader.padding_side": "models are trained with padding on the right",
    "loader.loss_weights": "the loss needs them",
    "loader.framework": "the model needs torch",
    "loader.device": "batches go where the model is",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run."""

    output: Path = option("Folder for checkpoints, metrics and the final model", Path("run"))
    seed: Annotated[int, Ge(0)] = option("Seed of data order, random weights and dropout", 0)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    view: ViewOptions = field(default_factory=ViewOptions)
    loader: LoaderOptions = field(default_factory=lambda: LoaderOptions(batch_size=BATCH_SIZE))
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    kto: KtoConfig = field(default_factory=KtoConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    liger: LigerConfig = field(default_factory=LigerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


# ---- config reader ---------------------------------------------------------------------------------------------------
# Reads a `TrainConfig` from a YAML file or a mapping, with `section.key=value` overrides.
#
# An unknown key is an error that suggests the nearest one; an invalid value is an error that names its key. A source
# may be written as just its path, and numbers in Python notation (`1e-5`). Paths are relative to the current folder.


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
    values, defaults = asdict(config), asdict(TrainConfig())
    for section, name in (key.split(".") for key in FIXED):
        if values[section][name] == defaults[section][name]:  # else it is refused when read
            del values[section][name]
    value = _plain(values)
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
    if isinstance(values.get("loader"), dict):
        values["loader"] = {"batch_size": BATCH_SIZE, **values["loader"]}
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
    for key, why in FIXED.items():
        section, name = key.split(".")
        if isinstance(values.get(section), dict) and name in values[section]:
            raise UsageError(f"{key} can't be set: {why}. Leave it out.")
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
