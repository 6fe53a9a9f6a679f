"""Observes a training run with hooks, wrappers and the profiler, and reports plain facts to be judged elsewhere."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from penstock.verify.facts import KernelFacts, RunFacts
from penstock.verify.observation.kernels import KERNELS, KernelCalls, import_errors, patched_modules, supported_kernels
from penstock.verify.observation.modules import ModuleRecorder, model_of
from penstock.verify.observation.packages import imported_packages
from penstock.verify.observation.profiling import Profile
from penstock.verify.observation.training_steps import StepRecorder, StopTraining


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
