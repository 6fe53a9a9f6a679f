"""Penstock's own trainer as a target: the user's configuration, held to few steps, layers and tokens.

Output goes to a temporary folder. Data that is prepared already is used as it is; otherwise the first rows of each
source are prepared in a temporary cache, and the certificate says so.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.train.config import LigerConfig, SourceConfig, TrainConfig
from penstock.train.promises import Method
from penstock.train.reading import read_config
from penstock.verify.canaries import Canaries, in_penstock
from penstock.verify.cutting import cut_folder
from penstock.verify.facts import BatchFacts
from penstock.verify.own_data import is_hit
from penstock.verify.targets import Limits, Spec

FIRST_ROWS = 64  # of a source that is not prepared yet
# How the configuration turns a kernel off.
SWITCHES = {
    "rms_norm": "rms_norm",
    "rope": "rope",
    "mlp": "mlp",
    "fused_linear_cross_entropy": "fused_loss",
    "fused_dpo_loss": "fused_loss",
}


class OwnTrainer:
    """A run of `penstock train`."""

    def __init__(self, spec: Spec, limits: Limits, canaries: Canaries | None, off: tuple[str, ...] = ()) -> None:
        assert spec.config is not None
        self._limits, self._canaries = limits, canaries
        self.model = None
        self.conditions: list[str] = []
        config = read_config(spec.config, spec.overrides)
        self._method = method_of(config, spec.method)
        self.promised = promises(config, self._method)
        self._config = self._small(config, off)

    def _small(self, config: TrainConfig, off: tuple[str, ...]) -> TrainConfig:
        limits = self._limits
        world = int(os.environ.get("WORLD_SIZE", "1"))
        rows = min(config.feed.batch_size, limits.rows * world)
        feed = replace(config.feed, batch_size=rows, micro_batch=None, steps=limits.steps, epochs=None)
        data = config.data
        if limits.tokens is not None:
            tokens = min(limits.tokens, data.max_length or limits.tokens)
            longest = tokens if self._canaries is None else max(tokens // 4, 8)  # several sequences to a row
            data = replace(data, max_length=longest, overlong=type(data.overlong)("truncate_left"))
            feed = replace(feed, capacity=tokens if feed.collate == "packed" else None)
            self.conditions.append(f"batches cut to {rows} rows of at most {tokens} tokens")
        if not is_hit(config):
            self.conditions.append(f"the data is not prepared yet: the first {FIRST_ROWS} rows of each source")
            data = replace(data, sources=_first_rows(data.sources, limits.folder / "cache"))
        return replace(
            config,
            output=limits.folder / "run",
            model=self._small_model(config),
            data=data,
            feed=feed,
            liger=switched_off(config.liger, off),
            eval=replace(config.eval, every=None, holdout=None, sources=()),
            checkpoint=replace(config.checkpoint, every=None),
            log=replace(config.log, tensorboard=False),
        )

    def _small_model(self, config: TrainConfig) -> Any:
        """The user's model with its first layers only."""
        from penstock.train.data import tokenizer_of

        model, layers = config.model, self._limits.layers
        if layers is None:
            return model
        given = model.path if model.init is None else str(model.init)
        assert given is not None
        source = _folder(given, model.revision)
        cut = self._limits.folder / "model"
        said = cut_folder(source, cut, layers)
        self.conditions += [said] if said else []
        place: dict[str, Any] = {"path": str(cut)} if model.init is None else {"init": cut}
        return replace(model, tokenizer=tokenizer_of(model), revision=None, **place)

    def run(self) -> None:
        """Train by the configuration."""
        from penstock.train.run import train

        with ExitStack() as stack:
            if self._canaries is not None:
                stack.enter_context(in_penstock(self._canaries))
            train(self._method, self._config)

    def batches(self) -> BatchFacts | None:
        """Penstock's data is looked at as a whole, by a probe of its own."""
        return None


def with_first_rows(config: TrainConfig, cache: Path) -> TrainConfig:
    """A configuration that takes only the first rows of each source, prepared in a cache of its own."""
    return replace(config, data=replace(config.data, sources=_first_rows(config.data.sources, cache)))


def _first_rows(sources: tuple[SourceConfig, ...], cache: Path) -> tuple[SourceConfig, ...]:
    few = {"split": f"train[:{FIRST_ROWS}]"}
    own = {"cache": str(cache), "workers": "1"}
    return tuple(
        replace(source, prepare={**few, **source.prepare, **own}, weight=None, examples=None) for source in sources
    )


def _folder(given: str, revision: str | None) -> Path:
    path = Path(given).expanduser()
    if path.is_file():
        return path.parent
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(given, revision=revision))


def method_of(config: TrainConfig, given: str | None) -> Method:
    """What is trained for: as given, else told by the configuration's dpo or kto section."""
    if given is not None:
        return Method(given)
    if config.kto != type(config.kto)():
        return Method.KTO
    return Method.DPO if config.dpo != type(config.dpo)() or config.feed.collate == "pairs" else Method.SFT


def switched_off(liger: LigerConfig, off: tuple[str, ...]) -> LigerConfig:
    """The kernels of a configuration without some; with none left, Liger is off."""
    changed = replace(liger, **{SWITCHES[kernel]: False for kernel in off if kernel in SWITCHES})
    left = any(getattr(changed, name) for name in set(SWITCHES.values()))
    return changed if left else replace(liger, enabled=False)


def promises(config: TrainConfig, method: Method) -> dict[str, Any]:
    """What a configuration promises."""
    liger = config.liger
    asked = {kernel: liger.enabled and getattr(liger, switch) for kernel, switch in SWITCHES.items()}
    asked["fused_dpo_loss"] &= method is Method.DPO
    asked["fused_linear_cross_entropy"] &= method is Method.SFT
    return {
        "trainer": f"penstock train {method}",
        "liger": liger.enabled,
        "kernels": asked,
        "dpo": method is Method.DPO,
        "bf16": config.model.precision in ("bf16", "bf16-mixed"),
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "packing": config.feed.collate == "packed",
        "lora": config.lora.rank > 0,
        "attention": None if config.model.attention == "auto" else config.model.attention,
        "penstock": True,
    }
