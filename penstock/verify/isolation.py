"""Do packed sequences see each other? An experiment on the model and on the very inputs that its trainer passes.

The content of the first sequence of each row is changed, and the states of the last layer compared. Those of the
changed sequence must move, or the experiment has no power; those of the others must not move by more than two equal
runs differ. True boundaries come from canaries. Dropout is off; the model stays in training mode, as when it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.verify.canaries import WIDTH, band, owners
from penstock.verify.facts import IsolationCase
from penstock.verify.modules import decoder_layers, model_of
from penstock.verify.targets import Target

LENGTHS = (7, 9, 8)
Inputs = dict[str, Any]


def examined(name: str, model: nn.Module, inputs: Mapping[str, Any]) -> IsolationCase:
    """The experiment on inputs whose content is canaries."""
    ids: Tensor = inputs["input_ids"]
    owner = owners(ids)
    changed = ids.clone()
    first = owner == 0
    shift = (ids % WIDTH + 3) % WIDTH  # other ids of the same band
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
    """The output of the last layer."""
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


def cases_of(model: nn.Module) -> list[IsolationCase]:
    """A bare model: the ways in which packed sequences are usually passed, one by one."""
    vocabulary = model_of(model).get_input_embeddings().weight.shape[0]
    model.train()
    return [examined(name, model, make(int(vocabulary))) for name, make in WAYS.items()]


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


WAYS: Mapping[str, Callable[[int], Inputs]] = {
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


class Captured(BaseException):
    """The inputs of the model were caught."""


def caught_case(name: str, target: Target, model: nn.Module | None) -> IsolationCase:
    """The experiment on what a trainer passes to its model. None: whatever model it trains."""
    kept: Inputs = {}
    found: list[nn.Module] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: Inputs) -> None:
        if not module.training:
            return
        kept.update(kwargs, **({"input_ids": args[0]} if args else {}))
        found[:] = [module]
        raise Captured

    watched: set[int] = set()

    def meet(module: nn.Module, _: Any) -> None:
        if id(module) not in watched and hasattr(module, "get_output_embeddings"):
            watched.add(id(module))
            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))

    hooks: list[Any] = [register_module_forward_pre_hook(meet)]
    if model is not None:
        watched.add(id(model_of(model)))
        hooks.append(model_of(model).register_forward_pre_hook(keep, with_kwargs=True))
    try:
        target.run()
    except Captured:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return examined(name, found[0], kept)
