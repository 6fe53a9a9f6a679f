"""Records module calls through torch's global hooks, so that no trainer has to hand over its model.

A called module that is not part of a known one is a root. For each root it counts forward passes of decoder layers
(recomputation in a backward pass separately) and their backward passes, and records the dtype of linear layers'
outputs, the size of the LM head's output, and the number of embedded tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from penstock.verify.observation.training_steps import StepRecorder


class ModuleRecorder:
    """Records what a process's modules do during the observed steps."""

    def __init__(self, steps: StepRecorder, on_begin: Callable[[], None]) -> None:
        """`on_begin` is called when the first pass with gradients begins; earlier passes are not training."""
        self._steps, self._on_begin = steps, on_begin
        self._begun = False
        self._known: set[int] = set()
        self._layers: set[int] = set()
        self._layer_of: dict[int, int] = {}  # of the direct children of layers
        self._entered = 0  # the layer whose first child has not run yet
        self._first_children: set[int] = set()  # their forwards in a backward pass are recomputation
        self._heads: set[int] = set()
        self._embeddings: set[int] = set()
        self._skipped: set[int] = set()  # linear layers that don't reflect the precision: heads and adapters
        self._hooks: list[Any] = []
        self.roots: list[nn.Module] = []
        self.dtypes: Counter[str] = Counter()
        self.forwards = self.recomputed = self.backwards = 0
        self.head_rows = self.tokens = 0

    def __enter__(self) -> ModuleRecorder:
        self._hooks = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def trained(self) -> nn.Module | None:
        """The trained root: the one with the most trainable weights."""
        weights = [sum(p.numel() for p in root.parameters() if p.requires_grad) for root in self.roots]
        most = max(weights, default=0)
        return self.roots[weights.index(most)] if most else None

    def add_root(self, root: nn.Module) -> None:
        """Registers a module as a root and finds its layers, heads and embeddings."""
        self.roots.append(root)
        for name, module in root.named_modules():
            self._known.add(id(module))
            if "lora_" in name:
                self._skipped.add(id(module))
            if hasattr(module, "get_output_embeddings"):
                head = module.get_output_embeddings()
                if head is not None:
                    self._heads.add(id(head))
                    self._embeddings.add(id(module.get_input_embeddings()))
        layers = decoder_layers(root)
        self._layers |= {id(layer) for layer in layers}
        self._layer_of |= {id(child): id(layer) for layer in layers for child in layer.children()}

    def _before(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self._known:
            self.add_root(module)
        if not self._begun and module.training and torch.is_grad_enabled():
            self._begun = True
            self._on_begin()
        if not self._steps.done:
            self._count_forward(id(module))

    def _count_forward(self, module: int) -> None:
        """Counts a layer when it is called, and its recomputation when its first child runs in a backward pass.

        Checkpointing wraps a layer's call or only its `forward`; only in the first case do the layer's hooks run again.
        """
        if self._steps.in_backward:
            self.recomputed += module in self._first_children
        elif module in self._layers and torch.is_grad_enabled():
            self.forwards += 1
            self._entered = module
        elif self._entered and self._layer_of.get(module) == self._entered:
            self._first_children.add(module)
            self._entered = 0

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._steps.done or not self._begun:
            return
        if id(module) in self._layers:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._count_backward)  # type: ignore[no-untyped-call]
        elif id(module) in self._heads:
            self.head_rows = max(self.head_rows, output.numel() // output.shape[-1])
        elif id(module) in self._embeddings and arguments:
            self.tokens = max(self.tokens, arguments[0].numel())
        elif isinstance(module, nn.Linear) and id(module) not in self._skipped and isinstance(output, torch.Tensor):
            self.dtypes[str(output.dtype).removeprefix("torch.")] += 1

    def _count_backward(self, _: torch.Tensor) -> None:
        self.backwards += 1


def decoder_layers(root: nn.Module) -> nn.ModuleList:
    """The layers of a model: its module list with the most parameters, or an empty list."""
    lists = [module for module in root.modules() if isinstance(module, nn.ModuleList) and len(module)]
    sizes = [sum(p.numel() for p in entry.parameters()) for entry in lists]
    return lists[sizes.index(max(sizes))] if lists else nn.ModuleList()


def model_of(root: nn.Module) -> Any:
    """The causal language model inside any wrappers, or the root itself."""
    for module in root.modules():
        if (
            hasattr(module, "get_output_embeddings")
            and hasattr(module, "config")
            and not hasattr(module, "peft_config")
        ):
            return module
    return root
