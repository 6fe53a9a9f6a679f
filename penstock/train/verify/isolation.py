"""Tests by experiment whether packed sequences attend to each other, on the exact inputs a trainer passes to its model.

The first sequence of each row is changed and the last layer's hidden states are compared. The changed sequence's states
must move, or the experiment has no power; the others' must not move by more than two identical runs differ. True
boundaries come from canaries. Dropout is off; the model stays in training mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.train.verify.observations import IsolationCase
from penstock.train.verify.observer import decoder_layers, model_of
from penstock.train.verify.probe_inputs import WIDTH, band, sequence_numbers
from penstock.train.verify.target import Target

LENGTHS = (7, 9, 8)
Inputs = dict[str, Any]


def run_experiment(name: str, model: nn.Module, inputs: Mapping[str, Any]) -> IsolationCase:
    """Runs the experiment on inputs whose content is canaries."""
    ids: Tensor = inputs["input_ids"]
    owner = sequence_numbers(ids)
    changed = ids.clone()
    first = owner == 0
    shift = (ids % WIDTH + 3) % WIDTH  # different ids from the same band
    changed[first] = ((ids // WIDTH) * WIDTH + shift)[first]
    _without_dropout(model)
    try:
        before, again = _states(model, {**inputs}), _states(model, {**inputs})
        after = _states(model, {**inputs, "input_ids": changed})
    except Exception as error:
        return _case(name, owner, 0.0, 0.0, 0.0, f"{type(error).__name__}: {error}")
    moved, noise = (before - after).abs().amax(dim=-1), (before - again).abs().amax(dim=-1)
    others = owner > 0
    rest = float(moved[others].max()) if bool(others.any()) else 0.0
    return _case(name, owner, float(moved[first].max()), rest, float(noise.max()), None)


def _case(name: str, owner: Tensor, own: float, others: float, noise: float, error: str | None) -> IsolationCase:
    return {
        "name": name,
        "packed": bool((owner > 0).any()),
        "own": own,
        "others": others,
        "noise": noise,
        "sequences": int((owner.amax(dim=1) + 1).sum()),
        "error": error,
    }


def _states(model: nn.Module, inputs: Inputs) -> Tensor:
    """The hidden states after the last layer."""
    found: list[Tensor] = []
    last = decoder_layers(model)[-1]
    hook = last.register_forward_hook(
        lambda _m, _a, out: found.append((out[0] if isinstance(out, tuple) else out).detach())
    )
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        hook.remove()
    return found[-1].float()


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def model_cases(model: nn.Module) -> list[IsolationCase]:
    """Experiments on a bare model, one for each usual way to pass packed sequences."""
    vocabulary = model_of(model).get_input_embeddings().weight.shape[0]
    model.train()
    return [run_experiment(name, model, make(int(vocabulary))) for name, make in INPUT_STYLES.items()]


def _ids(vocabulary: int) -> Inputs:
    content = [token for number, length in enumerate(LENGTHS) for token in band(number, length, vocabulary)]
    return {"input_ids": torch.tensor([content])}


def _positions(vocabulary: int) -> Inputs:
    restarting = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {**_ids(vocabulary), "position_ids": restarting}


def _lengths(vocabulary: int) -> Inputs:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    longest = max(LENGTHS)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {**_ids(vocabulary), **lengths}


INPUT_STYLES: Mapping[str, Callable[[int], Inputs]] = {
    "position_ids": lambda v: {**_positions(v), "use_cache": False},
    "position_ids, default use_cache": _positions,
    "position_ids, attention_mask of ones": lambda v: {
        **_positions(v),
        "attention_mask": torch.ones_like(_ids(v)["input_ids"]),
        "use_cache": False,
    },
    "cu_seq_lens": lambda v: {**_lengths(v), "use_cache": False},
    "cu_seq_lens, position_ids": lambda v: {**_lengths(v), **_positions(v), "use_cache": False},
}


class InputsCaptured(BaseException):
    """Raised to leave the training loop once the model's inputs are captured."""


def trainer_case(name: str, target: Target, model: nn.Module | None) -> IsolationCase:
    """Runs the experiment on the inputs a trainer passes to `model`, or to whatever model it trains if None."""
    kept: Inputs = {}
    found: list[nn.Module] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> None:
        if not module.training:
            return
        kept.update(kwargs, **({"input_ids": args[0]} if args else {}))
        found[:] = [module]
        raise InputsCaptured

    watched: set[int] = set()

    def attach(module: nn.Module, _: Any) -> None:
        if id(module) not in watched and hasattr(module, "get_output_embeddings"):
            watched.add(id(module))
            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))

    hooks: list[Any] = [register_module_forward_pre_hook(attach)]
    if model is not None:
        watched.add(id(model_of(model)))
        hooks.append(model_of(model).register_forward_pre_hook(keep, with_kwargs=True))
    try:
        target.run()
    except InputsCaptured:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return run_experiment(name, found[0], kept)
