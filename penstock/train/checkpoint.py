"""Checkpoints: folders that appear whole or not at all, and the last few of which stay.

    OUTPUT/checkpoints/step-00000120/   model.safetensors, optimizer.bin, random_states_RANK.pkl   (accelerate's)
                                        run.json: step, state of the feed, configuration

Accelerate writes and reads the state; with adapters, only what is trained is written. A checkpoint is written under a
temporary name, synced and renamed: it is complete when its name is there. Files are read back by safetensors and by
torch's loader for plain tensors: nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from torch import Tensor, nn

from penstock.store.files import fault, sync_folder
from penstock.train.config import Resume, TrainConfig
from penstock.train.errors import TrainError
from penstock.train.reading import flat, plain

if TYPE_CHECKING:
    from accelerate import Accelerator

VERSION = 1
# A run may go on with other values of these: they decide when and where things happen, not what is computed.
FREE = (
    "output", "feed.ahead", "feed.micro_batch", "checkpoint.", "log.", "eval.every", "eval.sources", "data.prepare"
)  # fmt: skip


class Saved(NamedTuple):
    """A checkpoint."""

    path: Path
    step: int  # steps done
    feed: Mapping[str, Any]
    config: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig) -> None:
        self._accelerator, self._config = accelerator, config
        self.folder = config.output / "checkpoints"
        accelerator.register_save_state_pre_hook(_only_trained)
        accelerator.register_load_state_pre_hook(_load_trained)

    def last(self) -> Saved | None:
        """The newest checkpoint, if this run may go on from it."""
        names = sorted(path for path in self.folder.glob("step-*") if path.is_dir()) if self.folder.is_dir() else []
        if not names:
            return None
        saved = _read(names[-1])
        match self._config.checkpoint.resume:
            case Resume.NEVER:
                raise TrainError(
                    f"{self.folder} holds checkpoints, and checkpoint.resume is 'never'. "
                    "Choose another output, or remove them."
                )
            case Resume.AUTO:
                _refuse_changes(saved, self._config)
            case Resume.ANYWAY:
                pass
        return saved

    def restore(self, saved: Saved) -> None:
        """Put model, optimiser and random numbers back."""
        self._accelerator.load_state(str(saved.path))

    def save(self, step: int, feed: Mapping[str, Any]) -> None:
        """Write a checkpoint after so many steps; all ranks call it."""
        target = self.folder / f"step-{step:08}"
        temporary = self.folder / f".writing-{step:08}"
        if target.is_dir():
            return
        if self._accelerator.is_main_process:
            self._clean()
            temporary.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(str(temporary))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            state = {"version": VERSION, "step": step, "feed": feed, "config": plain(self._config)}
            (temporary / "run.json").write_bytes(orjson.dumps(state, option=orjson.OPT_INDENT_2))
            sync_tree(temporary)
            fault("checkpoint.sync")
            temporary.rename(target)
            fault("checkpoint.rename")
            sync_folder(self.folder)
            self._forget_old()
        self._accelerator.wait_for_everyone()

    def _clean(self) -> None:
        """Remove what killed runs left half-written."""
        for left in self.folder.glob(".*"):
            shutil.rmtree(left)

    def _forget_old(self) -> None:
        for old in sorted(self.folder.glob("step-*"))[: -self._config.checkpoint.keep]:
            removed = old.with_name(f".removing-{old.name}")  # so that a half-removed one is never taken for whole
            old.rename(removed)
            shutil.rmtree(removed)


def _read(path: Path) -> Saved:
    try:
        state = orjson.loads((path / "run.json").read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise TrainError(
            f"{path}: no readable run.json ({error}). Remove this checkpoint to go on from an earlier one."
        ) from error
    if state.get("version") != VERSION:
        raise TrainError(f"{path}: written by another version ({state.get('version')}); this one reads {VERSION}.")
    return Saved(path, state["step"], state["feed"], state["config"])


def _refuse_changes(saved: Saved, config: TrainConfig) -> None:
    before, now = flat(saved.config), flat(plain(config))
    changed = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(FREE)
    ]
    if changed:
        raise TrainError(
            f"{saved.path} was written with other settings: {'; '.join(changed)}. Choose another output for a new run, "
            "or set checkpoint.resume=anyway to go on with the new settings."
        )


def _names(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: the trained weights, by names that do not depend on wrappers."""
    return {name.removeprefix("module."): weight for name, weight in model.named_parameters() if weight.requires_grad}


def _only_trained(models: list[nn.Module], weights: list[dict[str, Tensor]], output: str) -> None:
    """Have accelerate write the trained weights alone; frozen ones are those of the base model."""
    del output
    for number in range(len(weights)):
        weights[number] = {name: weight.detach() for name, weight in _names(models[number]).items()}


def _load_trained(models: list[nn.Module], folder: str) -> None:
    """Read them back; a sharded model is left to accelerate."""
    from safetensors.torch import load_file

    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        return
    (model,) = models
    models.clear()
    found, wanted = load_file(path), _names(model)
    if found.keys() != wanted.keys():
        differing = sorted(found.keys() ^ wanted.keys())
        raise TrainError(f"{path}: the checkpoint is of another model; it differs in {', '.join(differing[:5])}.")
    for name, weight in wanted.items():
        weight.data.copy_(found[name])


def sync_tree(folder: Path) -> None:
    """Have all files of a folder on disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    with contextlib.suppress(OSError):
        sync_folder(folder)
