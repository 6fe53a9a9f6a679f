"""Checkpoints: folders that appear complete or not at all; the last few are kept.

    OUTPUT/checkpoints/step-00000120/   model.safetensors, optimizer.bin, random_states_RANK.pkl   (accelerate's)
                                        run.json: step, state of the feed, configuration, digests of the files

Accelerate writes and reads the state; with adapters, only trained weights are written. A checkpoint is written under a
temporary name, synced and renamed. Before a run resumes from one, its files are checked against their digests; a
damaged checkpoint is renamed to `damaged-step-…` and the previous one is used. Files are read with safetensors and
torch's weights-only loader, so nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from torch import Tensor, nn

from penstock.digests import bytes_digest, canonical, file_digest
from penstock.errors import TrainError
from penstock.load.view import Served
from penstock.other_names import train_values
from penstock.prepare.tokenizer.auto import PLAIN_CLASSES, compare
from penstock.prepare.tokenizer.reference import backend
from penstock.store.dataset import Dataset
from penstock.store.files import fault, sync_folder
from penstock.train.config import Resume, TrainConfig, flat, plain
from penstock.train.data import tokenizer_of

if TYPE_CHECKING:
    from accelerate import Accelerator


log = logging.getLogger("penstock")
VERSION = 2
SEED_STRIDE = 1_000_003  # between the seeds of one rank at successive steps; more than there are ranks
LEAST_FREE = 1 << 16  # bytes; a disk with fewer is full
_NAME = re.compile(r"step-\d{8,}")
# Keys that may change when a run resumes: they affect when and where things happen, not what is computed.
FREE = (
    "output", "data.prepare", "loader.prefetch", "loader.micro_batch", "loader.pin_memory", "eval.", "checkpoint.",
    "log.",
)  # fmt: skip


class Checkpoint(NamedTuple):
    """A checkpoint on disk."""

    path: Path
    step: int  # steps completed
    feed: Mapping[str, Any]
    config: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig) -> None:
        self._accelerator, self._config = accelerator, config
        self.folder = config.output / "checkpoints"
        accelerator.register_save_state_pre_hook(_only_trained)
        accelerator.register_load_state_pre_hook(_load_trained)

    def last(self) -> Checkpoint | None:
        """The newest valid checkpoint, or an error if this run may not resume from it. Call it on all ranks."""
        saved = self._newest
        if saved is None:
            return None
        match self._config.checkpoint.resume:
            case Resume.NEVER:
                raise TrainError(
                    f"{self.folder} contains checkpoints, but checkpoint.resume is 'never'. "
                    "Choose another output, or remove them."
                )
            case Resume.AUTO:
                _refuse_changes(saved, self._config)
            case Resume.ANYWAY:
                pass
        return saved

    @cached_property
    def _newest(self) -> Checkpoint | None:
        """Found by the first rank, because checking reads all files, and broadcast to the others."""
        found: list[Any] = [None]
        if self._accelerator.is_main_process:
            try:
                found = [newest_valid(self.folder)]
            except TrainError as error:
                found = [error]
        if self._accelerator.num_processes > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(found)
        if isinstance(found[0], TrainError):
            raise found[0]
        saved: Checkpoint | None = found[0]
        return saved

    def restore(self, saved: Checkpoint) -> None:
        """Restores the model, the optimiser and the random number generators."""
        self._accelerator.load_state(str(saved.path))
        seed_new_rank(saved, self._accelerator.process_index, self._config.seed)

    def save(self, step: int, feed: Mapping[str, Any]) -> None:
        """Writes the checkpoint of a completed step; call it on all ranks."""
        target = self.folder / f"step-{step:08}"
        temporary = self.folder / f".writing-{step:08}"
        with written_whole(target, temporary):
            if self._accelerator.is_main_process:
                self._clean()
                temporary.mkdir(parents=True)
            self._accelerator.wait_for_everyone()
            self._accelerator.save_state(str(temporary))
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                state = {"version": VERSION, "step": step, "feed": feed, "config": plain(self._config)}
                _write_state(temporary, state)
                sync_tree(temporary)
                fault("checkpoint.sync")
                _put(temporary, target)
                fault("checkpoint.rename")
                sync_folder(self.folder)
                self._forget_old()
        self._accelerator.wait_for_everyone()

    def _clean(self) -> None:
        """Removes half-written and half-removed folders of killed runs."""
        for left in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
            _remove(left)

    def _forget_old(self) -> None:
        for old in steps(self.folder)[: -self._config.checkpoint.keep]:
            removed = old.with_name(f".removing-{old.name}")  # a half-removed folder must not look complete
            old.rename(removed)
            shutil.rmtree(removed)


def seed_new_rank(saved: Checkpoint, rank: int, seed: int) -> None:
    """Seed a rank that the saved run did not have. Its random numbers follow from seed, rank and step."""
    from accelerate.utils import set_seed

    if not (saved.path / f"random_states_{rank}.pkl").exists():
        words = "%s was saved with fewer ranks: rank %d has no saved random state and is seeded for step %d"
        log.warning(words, saved.path, rank, saved.step)
        set_seed((seed + rank + SEED_STRIDE * saved.step) % 2**32)


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, sorted by step; other files are ignored."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def newest_valid(folder: Path) -> Checkpoint | None:
    """The newest intact checkpoint, or None if there are none; newer damaged ones are set aside."""
    damaged: list[str] = []
    for path in reversed(steps(folder)):
        try:
            saved = _checked(path)
        except TrainError as error:
            damaged.append(str(error))
            continue
        for reason in damaged:
            log.warning("%s; resuming from %s instead", reason, path.name)
        for later in steps(folder):
            if later > path:
                _put(later, later.with_name(f"damaged-{later.name}"))
        return saved
    if damaged:
        raise TrainError(
            f"no usable checkpoint in {folder}: {'; '.join(damaged)}. "
            "Choose another output, or remove them to start over."
        )
    return None


def _checked(path: Path) -> Checkpoint:
    """Reads a checkpoint and checks that all files exist and match their digests."""
    try:
        state = orjson.loads((path / "run.json").read_bytes())
        if state["version"] != VERSION:
            raise TrainError(f"{path} has format version {state['version']}; this version reads {VERSION}")
        if state.pop("digest") != _state_digest(state):
            raise TrainError(f"{path}: run.json is damaged")
        for name, known in state["files"].items():
            if not (path / name).is_file():
                raise TrainError(f"{path}: {name} is missing")
            if file_digest(path / name) != known:
                raise TrainError(f"{path}: {name} is damaged")
    except FileNotFoundError as error:
        raise TrainError(f"{path}: run.json is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(f"{path} can't be read: {error}") from error
    return Checkpoint(path, state["step"], state["feed"], state["config"])


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes run.json with the digests of all other files and of itself."""
    files = {str(path.relative_to(folder)): file_digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    state = {**state, "files": files}
    whole = {**state, "digest": _state_digest(state)}
    (folder / "run.json").write_bytes(orjson.dumps(whole, option=orjson.OPT_INDENT_2))


def _state_digest(state: Mapping[str, Any]) -> str:
    return bytes_digest(canonical(orjson.loads(orjson.dumps(state))))


def _put(source: Path, target: Path) -> None:
    """Renames a folder, replacing an existing one."""
    replaced = target.with_name(f".removing-{target.name}")
    if target.exists():
        target.rename(replaced)
    source.rename(target)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def written_whole(target: Path, temporary: Path) -> Iterator[None]:
    """Removes a folder that can't be written whole, and turns the error into one that states the remedy."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch raises a RuntimeError of its archive writer, and doesn't say that the disk is full.
        if isinstance(error, RuntimeError) and not re.search("PytorchStreamWriter|inline_container", str(error)):
            raise
        why = "the disk is full" if _is_full(error, temporary.parent) else str(error)
        shutil.rmtree(temporary, ignore_errors=True)
        raise TrainError(
            f"{target} can't be written: {why}. Once this is fixed, run the same command again: it resumes from the "
            "previous checkpoint."
        ) from error


def _is_full(error: Exception, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if "No space left" in str(error):
        return True
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < LEAST_FREE
    return False


def _refuse_changes(saved: Checkpoint, config: TrainConfig) -> None:
    before = flat(plain(TrainConfig())) | flat(train_values(saved.config, log.debug))
    now = flat(plain(config))
    changed = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(FREE)
    ]
    if changed:
        raise TrainError(
            f"{saved.path} was written with different settings: {'; '.join(changed)}. Choose another output for a new "
            "run, or set checkpoint.resume=anyway to resume with the new settings."
        )


def _names(model: nn.Module) -> dict[str, Tensor]:
    """The trained weights, by names that don't depend on wrappers."""
    return {name.removeprefix("module."): weight for name, weight in model.named_parameters() if weight.requires_grad}


def _only_trained(models: list[nn.Module], weights: list[dict[str, Tensor]], output: str) -> None:
    """Makes accelerate write only the trained weights; the frozen ones come from the base model."""
    del output
    for number in range(len(weights)):
        weights[number] = {name: weight.detach() for name, weight in _names(models[number]).items()}


def _load_trained(models: list[nn.Module], folder: str) -> None:
    """Loads the trained weights; a sharded model is left to accelerate."""
    from safetensors.torch import load_file

    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        return
    (model,) = models
    models.clear()
    found, expected = load_file(path), _names(model)
    if found.keys() != expected.keys():
        differing = sorted(found.keys() ^ expected.keys())
        raise TrainError(f"{path}: checkpoint of a different model; it differs in {', '.join(differing[:5])}.")
    for name, weight in expected.items():
        weight.data.copy_(found[name])


def sync_tree(folder: Path) -> None:
    """Syncs all files of a folder to disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    with contextlib.suppress(OSError):
        sync_folder(folder)


# ---- final model -----------------------------------------------------------------------------------------------------
#
# Saves the final model in Hugging Face format, with its tokenizer and the template it was trained with.
#
#     OUTPUT/model/   config.json, model.safetensors (or only the adapters), tokenizer.json, chat_template.jinja, …
#
# Written under a temporary name and renamed; `tokenizer.json` is byte for byte the one that encoded the training data.


def save_model(accelerator: Accelerator, model: Any, config: TrainConfig, served: Served) -> Path:
    """Writes the final model; call it on all ranks."""
    target, temporary = config.output / "model", config.output / ".writing-model"
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        plain = accelerator.unwrap_model(model)
        if config.lora.rank and config.lora.merge:
            plain, weights = plain.merge_and_unload(), None
        with written_whole(target, temporary):
            plain.save_pretrained(temporary, state_dict=weights)
            _save_tokenizer(temporary, config, served)
            sync_tree(temporary)
        if target.exists():
            replaced = config.output / ".replaced-model"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
            temporary.rename(target)
            shutil.rmtree(replaced)
        else:
            temporary.rename(target)
    accelerator.wait_for_everyone()
    return target


def _save_tokenizer(folder: Path, config: TrainConfig, served: Served) -> None:
    dataset = served.views[0].dataset
    tokenizer = _tokenizer(config, dataset)
    template = dataset.recipe["templates"].get("default")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(dataset.tokenizer_json)
    if compare(folder, dataset.tokenizer_json).difference:  # its class would modify the tokenizer
        file = folder / "tokenizer_config.json"
        known = json.loads(file.read_text())
        file.write_text(json.dumps({**known, "tokenizer_class": PLAIN_CLASSES[0]}, indent=2, ensure_ascii=False))


def _tokenizer(config: TrainConfig, dataset: Dataset) -> Any:
    """The tokenizer as transformers loads it, or a generic one if there is only a tokenizer.json."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    name = Path(tokenizer_of(config.model)).expanduser()
    revision = config.model.revision if config.model.tokenizer is None else None
    try:
        return AutoTokenizer.from_pretrained(
            str(name.parent if name.is_file() else tokenizer_of(config.model)),
            revision=revision,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError):
        special = dataset.recipe["special_tokens"]
        return PreTrainedTokenizerFast(tokenizer_object=backend(dataset.tokenizer_json), **special)  # type: ignore[no-untyped-call]
