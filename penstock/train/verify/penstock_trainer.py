"""`penstock train` as a target: the user's configuration, limited to a few steps, layers and tokens.

Output goes to a temporary folder. Data that is already prepared is used as is; otherwise the first rows of each source
are prepared in a temporary cache, and the certificate says so.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.load.options import Collate, Overlong
from penstock.train.config import LigerConfig, SourceConfig, TrainConfig, read_config
from penstock.train.validation import Method
from penstock.train.verify.observations import BatchFacts
from penstock.train.verify.penstock_data import is_hit
from penstock.train.verify.probe_inputs import Canaries, patch_penstock, shrink_folder
from penstock.train.verify.target import ProbeLimits, TargetSpec

FIRST_ROWS = 64  # taken from each source if the data is not prepared yet
# The configuration key that turns each kernel off.
SWITCHES = {
    "rms_norm": "rms_norm",
    "rope": "rope",
    "mlp": "mlp",
    "fused_linear_cross_entropy": "fused_loss",
    "fused_dpo_loss": "fused_loss",
}


class PenstockTrainer:
    """A run of `penstock train`."""

    def __init__(
        self, spec: TargetSpec, limits: ProbeLimits, canaries: Canaries | None, off: tuple[str, ...] = ()
    ) -> None:
        assert spec.config is not None
        self._limits, self._canaries = limits, canaries
        self.model = None
        self.conditions: list[str] = []
        config = read_config(spec.config, spec.overrides)
        self._method = method_of(config, spec.method)
        self.promised = promised_by(config, self._method)
        self._config = self._shrink(config, off)

    def _shrink(self, config: TrainConfig, off: tuple[str, ...]) -> TrainConfig:
        limits = self._limits
        world = int(os.environ.get("WORLD_SIZE", "1"))
        rows = min(config.loader.batch_size, limits.rows * world)
        loader = replace(config.loader, batch_size=rows, micro_batch=None, steps=limits.steps, epochs=None)
        data, view = config.data, config.view
        if limits.tokens is not None:
            tokens = min(limits.tokens, view.max_length or limits.tokens)
            longest = tokens if self._canaries is None else max(tokens // 4, 8)  # several sequences per row
            view = replace(view, max_length=longest, overlong=Overlong.TRUNCATE_LEFT)
            loader = replace(loader, capacity=tokens if loader.collate is Collate.PACKED else None)
            self.conditions.append(f"batches cut to {rows} rows of at most {tokens} tokens")
        if not is_hit(config):
            self.conditions.append(
                f"the data is not prepared yet: only the first {FIRST_ROWS} rows of each source are used"
            )
            data = replace(data, sources=_first_rows(data.sources, limits.folder / "cache"))
        return replace(
            config,
            output=limits.folder / "run",
            model=self._shrink_model(config),
            data=data,
            view=replace(view, holdout=None),
            loader=loader,
            liger=disable_kernels(config.liger, off),
            eval=replace(config.eval, every=None, sources=()),
            checkpoint=replace(config.checkpoint, every=None),
            log=replace(config.log, tensorboard=False),
        )

    def _shrink_model(self, config: TrainConfig) -> Any:
        """The user's model cut to its first layers."""
        from penstock.train.data import tokenizer_of

        model, layers = config.model, self._limits.layers
        if layers is None:
            return model
        name = model.path if model.init is None else str(model.init)
        assert name is not None
        source = _folder(name, model.revision)
        cut = self._limits.folder / "model"
        description = shrink_folder(source, cut, layers)
        self.conditions += [description] if description else []
        place: dict[str, Any] = {"path": str(cut)} if model.init is None else {"init": cut}
        return replace(model, tokenizer=tokenizer_of(model), revision=None, **place)

    def run(self) -> None:
        """Trains as configured."""
        from penstock.train.run import train

        with ExitStack() as stack:
            if self._canaries is not None:
                stack.enter_context(patch_penstock(self._canaries))
            train(self._method, self._config)

    def batches(self) -> BatchFacts | None:
        """None: a separate job examines Penstock's data as a whole."""
        return None


def with_first_rows(config: TrainConfig, cache: Path) -> TrainConfig:
    """Limits a configuration to the first rows of each source, prepared in a separate cache."""
    return replace(config, data=replace(config.data, sources=_first_rows(config.data.sources, cache)))


def _first_rows(sources: tuple[SourceConfig, ...], cache: Path) -> tuple[SourceConfig, ...]:
    few = {"split": f"train[:{FIRST_ROWS}]"}
    own = {"cache": str(cache), "workers": "1"}
    return tuple(
        replace(source, prepare={**few, **source.prepare, **own}, weight=None, examples=None) for source in sources
    )


def _folder(name: str, revision: str | None) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path.parent
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision))


def method_of(config: TrainConfig, method: str | None) -> Method:
    """The training method: `method` if set, else inferred from the configuration's dpo or kto section."""
    if method is not None:
        return Method(method)
    if config.kto != type(config.kto)():
        return Method.KTO
    return Method.DPO if config.dpo != type(config.dpo)() or config.loader.collate == "pairs" else Method.SFT


def disable_kernels(liger: LigerConfig, off: tuple[str, ...]) -> LigerConfig:
    """Turns kernels off in a configuration; if none are left, Liger is disabled."""
    changed = replace(liger, **{SWITCHES[kernel]: False for kernel in off if kernel in SWITCHES})
    left = any(getattr(changed, name) for name in set(SWITCHES.values()))
    return changed if left else replace(liger, enabled=False)


def promised_by(config: TrainConfig, method: Method) -> dict[str, Any]:
    """What a configuration asks for, in the form the judge expects."""
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
        "packing": config.loader.collate == "packed",
        "lora": config.lora.rank > 0,
        "attention": None if config.model.attention == "auto" else config.model.attention,
        "penstock": True,
    }
