"""Observes a training run with hooks, wrappers and the profiler, and reports plain facts to be judged elsewhere."""

from __future__ import annotations

import math
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from penstock.train.verify.certificate import imported_packages
from penstock.train.verify.kernels import KERNELS, KernelCalls, import_errors, patched_modules, supported_kernels
from penstock.train.verify.observations import KernelFacts, RunFacts, StepFacts

# ---- profiling -------------------------------------------------------------------------------------------------------
#
# A second source of evidence: torch's profiler, which sees operators and autograd functions without our wrappers.


_ATTENTION = re.compile(r"scaled_dot_product|flash|flex_attention|xformers|mem_eff|^aten::_softmax$", re.IGNORECASE)
_NOT_FORWARD = re.compile(r"backward|evaluate_function", re.IGNORECASE)


@contextmanager
def _silence() -> Iterator[None]:
    """Redirects standard error, which the profiler's library writes to on start and stop; no setting turns that off."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


class Profile:
    """The operators of the observed steps, with call counts and shapes."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._events: list[Any] = []

    def start(self) -> None:
        """Starts profiling."""
        self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        with _silence():
            self._profiler.__enter__()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None:
            with _silence():
                self._profiler.__exit__(None, None, None)
            self._events = list(self._profiler.events() or ())

    def counts(self) -> Counter[str]:
        """Calls by name."""
        return Counter(str(event.name) for event in self._events)

    def attention(self) -> dict[str, int]:
        """Counts of the operators that identify the attention implementation."""
        return {name: count for name, count in sorted(self.counts().items()) if self._is_attention(name)}

    @staticmethod
    def _is_attention(name: str) -> bool:
        return bool(_ATTENTION.search(name)) and not _NOT_FORWARD.search(name)

    def rows_as_wide_as(self, vocabulary: int, hidden: int) -> int:
        """Rows of the largest operand whose last dimension is the vocabulary, excluding the LM head's weight."""
        most = 0
        for event in self._events:
            for shape in event.input_shapes or ():
                if len(shape) < 2 or shape[-1] != vocabulary or not all(isinstance(n, int) for n in shape):
                    continue
                if shape[-2] == hidden:  # the weight, possibly batched
                    continue
                rows = 1
                for size in shape[:-1]:
                    rows *= size
                most = max(most, rows)
        return most


# ---- training steps --------------------------------------------------------------------------------------------------
#
# Records the steps of a training loop from outside: all backward calls and optimiser steps in the process.
#
# The loss is the scalar that `backward` is called on, whoever calls it. After enough steps, `StopTraining` is raised to
# leave the loop; it derives from BaseException so that no trainer catches it.


class StopTraining(BaseException):
    """Raised to leave a training loop after enough steps."""


class StepRecorder:
    """Records losses and gradient norms, and ends the loop."""

    def __init__(self, steps: int, micros: int, on_done: Callable[[], None] | None) -> None:
        """Records `steps` optimiser steps or `micros` backward calls, whichever comes first.

        Then `on_done` is called once, after an optimiser step; if it is None, the loop is ended.
        """
        self.losses: list[float | None] = []
        self.gradients: list[float | None] = []
        self.in_backward = False
        self._steps, self._micros, self._on_done = steps, micros, on_done
        self._notified = False
        self._hooks: list[Any] = []

    @property
    def done(self) -> bool:
        """Whether enough steps were recorded."""
        return len(self.gradients) >= self._steps or len(self.losses) >= self._micros

    def __enter__(self) -> StepRecorder:
        plain: Any = torch.Tensor.backward
        self._plain = plain
        watch = self

        def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if watch.done:
                plain(self, *args, **kwargs)
                return
            loss = float(self.detach()) if self.numel() == 1 else float(self.detach().sum())
            watch.losses.append(_finite(loss))
            watch.in_backward = True
            try:
                plain(self, *args, **kwargs)
            finally:
                watch.in_backward = False
            if watch._on_done is None and len(watch.losses) >= watch._micros:
                raise StopTraining

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        torch.Tensor.backward = self._plain  # type: ignore[method-assign]
        if self._notified:  # called from inside a hook; from now on the hooks do nothing
            return
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Any, *_: object) -> None:
        if self.done:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = math.sqrt(sum(float(g.detach().float().pow(2).sum()) for g in gradients)) if gradients else 0.0
        self.gradients.append(_finite(total))

    def _after_step(self, *_: object) -> None:
        if not self.done or self._notified:
            return
        if self._on_done is None:
            raise StopTraining
        self._notified = True
        self._on_done()

    def facts(self) -> StepFacts:
        """The recorded losses and gradient norms."""
        return {"losses": self.losses, "gradients": self.gradients}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- modules ---------------------------------------------------------------------------------------------------------
#
# Records module calls through torch's global hooks, so that no trainer has to hand over its model.
#
# A called module that is not part of a known one is a root. For each root it counts forward passes of decoder layers
# (recomputation in a backward pass separately) and their backward passes, and records the dtype of linear layers'
# outputs, the size of the LM head's output, and the number of embedded tokens.


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


# ---- observer --------------------------------------------------------------------------------------------------------


class Observer:
    """A context manager that records a training loop; call `facts` after leaving it."""

    def __init__(
        self, steps: int, micros: int, *, on_done: Callable[[], None] | None = None, imports: bool = True
    ) -> None:
        """`on_done` is called after enough steps; if None, the loop is ended. `imports`: whether to import Liger."""
        self.steps = StepRecorder(steps, micros, on_done)
        self.modules = ModuleRecorder(self.steps, self._begin)
        self.calls = KernelCalls()
        self.profile = Profile()
        self.liger_error: str | None = None
        self.liger_dpo_error: str | None = None
        self._imports = imports
        self.error: str | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Observer:
        if self._imports:
            self.liger_error, self.liger_dpo_error = import_errors()
        for recorder in (self.steps, self.modules, self.calls, self.profile):
            self._stack.enter_context(recorder)
        return self

    def _begin(self) -> None:
        """Starts counting: checks and reference models that ran before training don't count."""
        self.calls.clear()
        self.profile.start()

    def close(self) -> None:
        """Removes all hooks and wrappers."""
        self._stack.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Swallows errors of the run: what was seen before them counts."""
        self._stack.close()
        if isinstance(error, Exception):
            self.error = describe_error(error)
        return error is None or isinstance(error, (StopTraining, Exception))

    def kernels(self, root: torch.nn.Module | None) -> dict[str, KernelFacts]:
        """Calls and patched modules per kernel."""
        found = patched_modules(root) if root is not None else {}
        profiled = self.profile.counts()
        return {
            kernel: {
                "forward": self.calls.forward[kernel],
                "backward": self.calls.backward[kernel],
                "profiled": sum(profiled[name] for name in names if name in profiled),
                "names": sorted(names),
                "patched": found.get(kernel, (0, 0))[0],
                "modules": found.get(kernel, (0, 0))[1],
            }
            for kernel in KERNELS
            for names in (self.calls.names.get(kernel, set()),)
        }

    def facts(self, promised: dict[str, Any], conditions: list[str], extra: tuple[str, ...] = ()) -> RunFacts:
        """The observations as plain values."""
        root = self.modules.trained
        model = model_of(root) if root is not None else None
        config = getattr(model, "config", None)
        model_type = getattr(config, "model_type", None)
        weights = list(root.named_parameters()) if root is not None else []
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[union-attr]
        shape = getattr(getattr(head, "weight", None), "shape", None)
        interpreted = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "1"
        return {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "interpreted": interpreted,
            "conditions": conditions,
            "model_type": model_type,
            "promised": promised,
            "liger_error": self.liger_error,
            "liger_dpo_error": self.liger_dpo_error,
            "liger_support": supported_kernels(model_type) if self.liger_error is None and self._imports else None,
            "kernels": self.kernels(root),
            "steps": self.steps.facts(),
            "attention": getattr(config, "_attn_implementation", None),
            "operations": self.profile.attention(),
            "vocabulary": shape[0] if shape is not None else None,
            "tokens": self.modules.tokens,
            "logit_rows": self._logit_rows(shape),
            "head_rows": self.modules.head_rows,
            "linear_dtypes": dict(self.modules.dtypes),
            "layer_forwards": self.modules.forwards,
            "layer_recomputed": self.modules.recomputed,
            "layer_backwards": self.modules.backwards,
            "parameters": sum(p.numel() for _, p in weights),
            "trainable": sum(p.numel() for _, p in weights if p.requires_grad),
            "adapters": sum("lora_" in name and p.requires_grad for name, p in weights),
            "graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
            "batches": None,
            "error": self.error,
            "packages": [asdict(package) for package in imported_packages(extra)],
        }

    def _logit_rows(self, head: tuple[int, ...] | None) -> int:
        return 0 if head is None else self.profile.rows_as_wide_as(head[0], head[1])


def describe_error(error: BaseException) -> str:
    """Formats an error in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
