"""Triton's kernels on a machine without a GPU: its interpreter, with what it needs to run Liger's kernels.

`TRITON_INTERPRET=1` must be set before triton is imported. As of triton 3.9 the interpreter lacks four things, which
`repair` adds; it proves wiring and numbers, not speed. Costs about 2 seconds for a step of 28 tokens and 2 layers.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def repair() -> None:
    """Let the interpreter run Liger's kernels. Call it after triton and before any of them runs."""
    import torch
    from triton.runtime import interpreter

    _wrap_floats(interpreter)
    _compute_bf16_in_fp32(interpreter)
    kernel = interpreter.InterpretedFunction
    kernel.run = torch._dynamo.disable(kernel.run)  # type: ignore[no-untyped-call]
    _replace_libdevice()


def _wrap_floats(interpreter: Any) -> None:
    """Python floats reach kernels bare, where they are taken for something that has a type."""
    import triton.language as tl

    plain = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return plain(argument)

    interpreter._implicit_cvt = converted


def _compute_bf16_in_fp32(interpreter: Any) -> None:
    """bf16 is kept as integers there, and computed with as if it were: silently wrong, mostly NaN."""
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    binary, unary = builder.binary_op, builder.unary_op

    def widened(self: Any, handle: Any) -> Any:
        return self.create_fp_ext(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def narrowed(self: Any, result: Any) -> Any:
        if result.data.dtype == np.bool_:  # a comparison
            return result
        return self.create_fp_trunc(result, tl.bfloat16)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if tl.bfloat16 not in (left.dtype.scalar, right.dtype.scalar):
            return binary(self, left, right, operation)
        return narrowed(self, binary(self, widened(self, left), widened(self, right), operation))

    def unary_op(self: Any, argument: Any, operation: Any) -> Any:
        if argument.dtype.scalar != tl.bfloat16:
            return unary(self, argument, operation)
        return narrowed(self, unary(self, widened(self, argument), operation))

    builder.binary_op, builder.unary_op = binary_op, unary_op


def _replace_libdevice() -> None:
    """Functions of the GPU's library are stubs in the interpreter: put the language's own in their place."""
    import liger_kernel.ops
    import triton.language as tl

    def tanh(x: Any) -> Any:
        return 2 * tl.sigmoid(2 * x) - 1

    def rsqrt(x: Any) -> Any:
        return tl.math.rsqrt(x)

    assert liger_kernel.ops
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_kernel.ops"):
            for function in (tanh, rsqrt):
                found = getattr(module, function.__name__, None)
                if found is not None and not isinstance(found, type(module)):
                    setattr(module, function.__name__, function)
