"""Assembles model, adapters, optimiser, reference and objectives from the configuration.

The order matters: a live reference is copied and the weights are hashed before anything changes them, adapters are
added before the optimiser is created, and packing is tested on the model exactly as it will be trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.arrays import Int64
from penstock.feed.settings import Collate
from penstock.store.dataset import StoredDataset
from penstock.train.config import ReferenceMode, TrainConfig
from penstock.train.data import Data, Served, views_of
from penstock.train.errors import UnsupportedError
from penstock.train.model import add_adapters, check_fits, dtypes_of, embeddings, load_model, weights_digest
from penstock.train.objectives.groups import Groups
from penstock.train.objectives.kto import Kto
from penstock.train.objectives.objective import Dpo, FusedDpo, Objective, Policy, Sft
from penstock.train.objectives.reference import (
    AdapterReference,
    CachedReferences,
    FrozenReference,
    LiveReferences,
    OnScored,
    ReferenceStore,
)
from penstock.train.schedule import make_optimizer
from penstock.train.validation import Method, check_isolation

if TYPE_CHECKING:
    from accelerate import Accelerator


Items = Callable[[], Int64]  # numbers of items, which take a moment to find


class Assembly(NamedTuple):
    """A model prepared for (distributed) training, with its optimiser and objective."""

    policy: Policy
    optimizer: Any
    objectives: Callable[
        [Served, Items], Objective
    ]  # the objective over a view or mixture, of which `Items` are visited


def assemble(
    method: Method, config: TrainConfig, data: Data, accelerator: Accelerator, on_scored: OnScored = lambda _: None
) -> Assembly:
    """Loads, checks and prepares the model. Random weights and adapters depend on torch's seed."""
    device = accelerator.device
    plain = load_model(config, device, fuse_loss=method is Method.SFT)
    check_fits(plain, _vocabulary(data.train), max(_longest(data.train), _longest(data.held_out)))
    name = weights_digest(plain) if method is Method.DPO and config.dpo.reference is ReferenceMode.CACHED else ""
    frozen = None
    live = method is Method.KTO or (method is Method.DPO and config.dpo.reference is ReferenceMode.LIVE)
    if live and not config.lora.rank:
        frozen = FrozenReference.copied(plain, device)
    adapted = add_adapters(plain, config.lora) if config.lora.rank else plain
    model, optimizer = accelerator.prepare(adapted, make_optimizer(adapted, config.optim))
    policy = Policy(model, plain, device, dtypes_of(config.model.precision, device).autocast)
    if config.feed.collate is Collate.PACKED:
        _check_packing(policy)
    if method is Method.SFT:
        fused = config.liger.enabled and config.liger.fused_loss
        return Assembly(policy, optimizer, lambda served, _: Sft(policy, config.loss.mean, fused, Groups(served)))
    reference = frozen or (AdapterReference(policy, adapted) if config.lora.rank else FrozenReference(model, plain))
    if method is Method.KTO:
        limit = config.data.max_length
        return Assembly(
            policy, optimizer, lambda served, _: Kto(policy, reference, config.kto, accelerator, limit, Groups(served))
        )
    return Assembly(policy, optimizer, _dpo(config, policy, reference, name, accelerator, on_scored))


def _dpo(
    config: TrainConfig,
    policy: Policy,
    reference: AdapterReference | FrozenReference,
    name: str,
    accelerator: Accelerator,
    on_scored: OnScored,
) -> Callable[[Served, Items], Objective]:
    """Returns a factory of DPO objectives; cached references are loaded or computed when it is called."""
    chosen, live = config.dpo, LiveReferences(policy, reference)
    if config.liger.enabled and config.liger.fused_loss:
        return lambda *_: FusedDpo(policy, reference, chosen.beta)
    if chosen.reference is ReferenceMode.LIVE:
        return lambda served, _: Dpo(policy, live, chosen.beta, chosen.label_smoothing, Groups(served))
    identity = f"{name} {config.model.precision} {policy.autocast} {policy.plain.config._attn_implementation}"
    rows = config.feed.micro_batch or -(-config.feed.batch_size // accelerator.num_processes)
    store = ReferenceStore(accelerator, live, identity, rows, config.output, on_scored)

    def objective(served: Served, items: Items) -> Objective:
        references = CachedReferences(store.values(served, items()), policy.device)
        return Dpo(policy, references, chosen.beta, chosen.label_smoothing, Groups(served))

    return objective


def _check_packing(policy: Policy) -> None:
    attention = str(policy.plain.config._attn_implementation)
    if attention.startswith("flex") and policy.device.type == "cpu":
        raise UnsupportedError(f"feed.collate=packed: attention {attention!r} does not run on the CPU. Use sdpa.")

    def forward(tensors: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = policy(tensors).logits.float()
            return logits

    policy.model.eval()
    check_isolation(forward, embeddings(policy.plain), attention)
    policy.model.train()


def _vocabulary(served: Served) -> int:
    dataset = views_of(served)[0].dataset
    return dataset.vocabulary.size if isinstance(dataset, StoredDataset) else 0


def _longest(served: Served | None) -> int:
    return 0 if served is None else int(served.lengths.max(initial=0))
