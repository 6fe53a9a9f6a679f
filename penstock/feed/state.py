"""A loader's state: the position of a run and the dataset, view and plan it belongs to, as plain JSON values.

Rank, world size, micro-batches, prefetching and padding are not part of the state: the rows of a step don't depend on
them, so a run can resume at the same step with different values. Resuming inside a step requires the same values.
Digests decide; the settings beside them are for the error that names what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any, Final

from penstock.build.recipe_diff import recipe_differences
from penstock.errors import FeedError, StoreError
from penstock.feed.settings import Collate, LoaderSettings
from penstock.store.dataset import StoredDataset
from penstock.store.manifest import read_manifest
from penstock.view.mixture import BaseMixture
from penstock.view.view import BaseView, Served

_VERSION: Final = 1
_MISMATCHES: Final = {
    "dataset": "another dataset",
    "view": "another view of the dataset (loss policy, max_length, hold-out, mixture, …)",
    "plan": "another plan (collate, batch_size, capacity, align, seed, shuffle or tail)",
}
_START_NEW: Final = "Open the loader with the settings of the run that saved it, or start a new run."


def state_of(served: Served, settings: LoaderSettings, step: int, micro: int, micros: int) -> dict[str, Any]:
    """The state in which this batch is the next one."""
    return {
        "version": _VERSION,
        **_identity(served, settings),
        "step": step,
        "micro": micro,
        "world_size": settings.world_size,
        "micros": micros,
        "settings": _settings(served, settings),
    }


def _settings(served: Served, settings: LoaderSettings) -> dict[str, str]:
    """What the digests of view and plan depend on, as it is written in Python, to name what differs."""
    found: dict[str, Any] = {"collate": settings.collate, **asdict(settings.plan)}
    if isinstance(served, BaseView):
        found |= asdict(served.settings)
    if isinstance(served, BaseMixture):
        found["seed of the mixture"] = served.seed
        for name, share in served.shares.items():
            found[f"{name}: amount"] = share.amount
            found |= {f"{name}: {option}": value for option, value in asdict(share.view.settings).items()}
    return {name: repr(value.value if isinstance(value, StrEnum) else value) for name, value in found.items()}


def _mismatch(name: str, state: Mapping[str, Any], served: Served, settings: LoaderSettings) -> str:
    """Why a state does not fit: the settings that differ. Older states have no settings, only digests."""
    if name == "dataset":
        return f"another dataset{_other_recipe(state[name], served)}"
    own, saved = _settings(served, settings), state.get("settings")
    if not isinstance(saved, Mapping) or not (differing := [o for o in own if own[o] != saved.get(o)]):
        return _MISMATCHES[name]
    then, now = (", ".join(f"{option}={values.get(option)}" for option in differing) for values in (saved, own))
    return f"another {name}: it was saved with {then}, and this loader has {now}"


def _other_recipe(key: object, served: Served) -> str:
    """How another dataset was prepared, if it is in the same cache."""
    if not isinstance(served, BaseView) or not isinstance(served.dataset, StoredDataset):
        return ""
    dataset = served.dataset
    try:
        other = read_manifest(dataset.cache.find_dataset(str(key)))
    except (StoreError, ValueError):
        return f" ({key})"
    differing = recipe_differences(other.recipe, dataset.recipe, lambda _: None) or ["other rows"]
    return f" ({str(key)[:11]}). From it to this loader's: {'; '.join(differing)}"


def _identity(served: Served, settings: LoaderSettings) -> dict[str, Any]:
    parts = served.shares if isinstance(served, BaseMixture) else {}
    keys: dict[str, str] | str = {name: share.view.dataset.key for name, share in parts.items()}
    if isinstance(served, BaseView):
        keys = served.dataset.key
    plan = settings.plan.digest
    if settings.collate is Collate.TREE:  # its steps count rows of trees, with otherwise equal settings
        plan += "-tree"
    return {"dataset": keys, "view": served.digest, "plan": plan}


def checked_state(state: Mapping[str, Any], served: Served, settings: LoaderSettings, micros: int) -> tuple[int, int]:
    """The step and micro-batch to resume at. Raises if the state belongs to another run."""
    if not isinstance(state, Mapping):
        raise FeedError(f"not a loader state: {state!r:.80} is no mapping. Use what `state_dict()` returned.")
    missing = {"version", *_MISMATCHES, "step", "micro", "world_size", "micros"} - set(state)
    if missing:
        raise FeedError(f"not a loader state: {', '.join(sorted(missing))} missing. Use `state_dict()`.")
    if state["version"] != _VERSION:
        raise FeedError(f"the state has version {state['version']!r}, and this Penstock reads version {_VERSION}.")
    for name, value in _identity(served, settings).items():
        if state[name] != value:
            raise FeedError(f"the state belongs to {_mismatch(name, state, served, settings)}. {_START_NEW}")
    step, micro, of = state["step"], state["micro"], state["micros"]
    if any(type(number) is not int for number in (step, micro, of)) or step < 0 or not 0 <= micro < max(of, 1):
        raise FeedError(f"the state is damaged: step={step!r}, micro={micro!r} of {of!r}. Use another one.")
    if micro and (state["world_size"], state["micros"]) != (settings.world_size, micros):
        raise FeedError(
            f"the state is inside step {step}, after {micro} of {state['micros']} micro-batches on "
            f"{state['world_size']} ranks; with {micros} on {settings.world_size} ranks it can't resume there. "
            "Save states between steps, or resume with the same ranks and micro_batch."
        )
    return step, micro
