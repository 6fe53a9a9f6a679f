"""Liger's kernels: counts their completed calls, finds the modules they patch, and turns them off.

A patched module proves nothing: it may never be called, and RoPE leaves no trace in modules. What counts is completed
forward and backward calls of Liger's autograd functions; patched modules are reported alongside.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

# Kernels by the names of their autograd functions; the first match counts.
PATTERNS = (
    ("fused_dpo_loss", re.compile("LinearDPO")),
    ("fused_linear_cross_entropy", re.compile("FusedLinear.*CrossEntropy")),
    ("cross_entropy", re.compile("CrossEntropy")),
    ("rms_norm", re.compile("RMSNorm")),
    ("rope", re.compile("Rope|ROPE")),
    ("mlp", re.compile("SiLUMul|GELUMul|FusedMoE")),
)
KERNELS = tuple(kernel for kernel, _ in PATTERNS)
# The flags of Liger's own patching functions.
FLAGS = {
    "rms_norm": ("rms_norm",),
    "rope": ("rope",),
    "mlp": ("swiglu", "geglu"),
    "cross_entropy": ("cross_entropy",),
    "fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
}
_NORM, _MLP = re.compile("RMSNorm"), re.compile("MLP$|Experts$")


def kernel_of(function: str) -> str | None:
    """The kernel that an autograd function belongs to, by its name."""
    return next((kernel for kernel, pattern in PATTERNS if pattern.search(function)), None)


def import_errors() -> tuple[str | None, str | None]:
    """Why Liger's layer kernels and its fused DPO loss can't be imported; None if they can."""
    errors: list[str | None] = []
    for module in ("liger_kernel.ops", "liger_kernel.chunked_loss.dpo_loss"):
        try:
            __import__(module)
        except Exception as error:  # a failed import says nothing about engagement
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append(None)
    return errors[0], errors[1]


class KernelCalls:
    """Counts completed calls of Liger's autograd functions, whoever calls them."""

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.names: dict[str, set[str]] = {}
        self._undo: list[Callable[[], None]] = []
        self._seen: set[type] = set()

    def __enter__(self) -> KernelCalls:
        self._scan()
        registry = sys.modules.get("liger_kernel.backends.registry")
        if registry is not None:  # implementations are imported on first dispatch
            self._replace(registry.OpImpl, "call", self._scanning(registry.OpImpl.call))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def clear(self) -> None:
        """Resets the counts."""
        self.forward.clear()
        self.backward.clear()

    def _scan(self) -> None:
        for function in list(_subclasses(torch.autograd.Function)):
            kernel = kernel_of(function.__name__) if function.__module__.startswith("liger_kernel") else None
            if kernel is None or function in self._seen:
                continue
            self._seen.add(function)
            self._count(function, "forward", self.forward, kernel)
            self._count(function, "backward", self.backward, kernel)

    def _scanning(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def scanned(*args: Any, **kwargs: Any) -> Any:
            self._scan()
            return call(*args, **kwargs)

        return scanned

    def _count(self, function: type, method: str, counter: Counter[str], kernel: str) -> None:
        """Wraps a method on the class itself, not on a base that other functions share."""
        found = inspect.getattr_static(function, method)
        plain = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found

        @wraps(plain)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            counter[kernel] += 1
            self.names.setdefault(kernel, set()).add(function.__name__)
            return result

        self._replace(function, method, type(found)(counted) if plain is not found else counted)

    def _replace(self, owner: type, name: str, value: Any) -> None:
        own = owner.__dict__.get(name)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def patched_modules(root: nn.Module) -> dict[str, tuple[int, int]]:
    """For each kernel, how many modules Liger has patched, and how many it could patch."""
    counts = {kernel: [0, 0] for kernel in KERNELS}
    modeling: set[str] = set()
    for module in root.modules():
        name, of_liger = type(module).__name__, is_liger(getattr(module, "forward", None)) or is_liger(type(module))
        if _NORM.search(name):
            _add(counts["rms_norm"], of_liger)
        elif _MLP.search(name) and not isinstance(module, nn.ModuleList):
            _add(counts["mlp"], of_liger)
        if is_causal_model(module):
            _add(counts["fused_linear_cross_entropy"], of_liger)
            modeling.add(type(module).__module__)
    for name in modeling:
        rotate = getattr(sys.modules.get(name), "apply_rotary_pos_emb", None)
        if rotate is not None:
            _add(counts["rope"], is_liger(rotate))
    _add(counts["cross_entropy"], is_liger(nn.functional.cross_entropy))
    return {kernel: (n, total) for kernel, (n, total) in counts.items()}


def is_causal_model(module: Any) -> bool:
    """Whether a module is a transformers language model, not a wrapper around one."""
    return (
        hasattr(module, "get_output_embeddings")
        and type(module).__module__.startswith("transformers")
        and module.get_output_embeddings() is not None
    )


def is_liger(function: object) -> bool:
    """Whether a function, method or class comes from Liger, looking through wrappers such as accelerate's."""
    for _ in range(8):
        if str(getattr(function, "__module__", "")).startswith("liger_kernel"):
            return True
        names = ("__func__", "__wrapped__", "model_forward")
        inner = next((found for name in names if (found := getattr(function, name, None)) is not None), None)
        if inner is None:
            return False
        function = inner
    return False


def _add(count: list[int], of_liger: bool) -> None:
    count[0] += of_liger
    count[1] += 1


def supported_kernels(model_type: str | None) -> list[str] | None:
    """The kernels that Liger has for an architecture; None if it has none."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return None
    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters
    return [kernel for kernel, flags in FLAGS.items() if any(flag in parameters for flag in flags)]


@contextmanager
def kernels_disabled(kernels: Iterable[str]) -> Iterator[None]:
    """Makes Liger's patching functions skip these kernels, whoever calls them and with whatever arguments."""
    off = [flag for kernel in kernels for flag in FLAGS.get(kernel, ())]
    if not off:
        yield
        return
    import liger_kernel.transformers
    from liger_kernel.transformers import monkey_patch

    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    kept = dict(table)
    wrapped: dict[Any, Any] = {}
    for kind, function in kept.items():
        table[kind] = wrapped.setdefault(function, _with_flags_off(function, off))
    for function, replaced in wrapped.items():
        for module in (monkey_patch, liger_kernel.transformers):
            setattr(module, function.__name__, replaced)
    try:
        yield
    finally:
        table.update(kept)
        for function in wrapped:
            for module in (monkey_patch, liger_kernel.transformers):
                setattr(module, function.__name__, function)


def _with_flags_off(function: Callable[..., None], off: list[str]) -> Callable[..., None]:
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def applied(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        inner = bound.pop("kwargs", {})
        function(**{**bound, **inner, **{flag: False for flag in off if flag in parameters}})

    return applied
