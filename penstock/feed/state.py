"""A loader's state: the position of a run and the dataset, view and plan it belongs to, as plain JSON values.

Rank, world size, micro-batches, prefetching and padding are not part of the state: the rows of a step don't depend on
them, so a run can resume at the same step with different values. Resuming inside a step requires the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.errors import FeedError
from penstock.feed.settings import Collate, LoaderSettings
from penstock.view.mixture import BaseMixture
from penstock.view.view import BaseView, Served

_VERSION: Final = 1
_MISMATCHES: Final = {
    "dataset": "another dataset",
    "view": "another view of the dataset (loss policy, max_length, hold-out, mixture, …)",
    "plan": "another plan (collate, batch_size, capacity, align, seed, shuffle or tail)",
}


def state_of(served: Served, settings: LoaderSettings, step: int, micro: int, micros: int) -> dict[str, Any]:
    """The state in which this batch is the next one."""
    return {
        "version": _VERSION,
        **_identity(served, settings),
        "step": step,
        "micro": micro,
        "world_size": settings.world_size,
        "micros": micros,
    }


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
            raise FeedError(
                f"the state belongs to {_MISMATCHES[name]}: its {name} is {state[name]}, this loader's is {value}. "
                "Open the loader with the settings of the run that saved it, or start a new run."
            )
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
