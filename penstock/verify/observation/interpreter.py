"""Patches Triton's interpreter so that Liger's kernels run without a GPU.

`TRITON_INTERPRET=1` must be set before triton is imported. As of triton 3.9 the interpreter has four gaps, which
`repair` fills. The interpreter tests wiring and numbers, not speed: a step of 28 tokens and 2 layers takes about 2 s.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def repair() -> None:
    """Patches the interpreter. Call it after importing triton and before any kernel runs."""
    import torch
    from triton.runtime import interpreter

    _wrap_floats(interpreter)
    _compute_bf16_in_fp32(interpreter)
    kernel = interpreter.InterpretedFunction
    kernel.run = torch._dynamo.disable(kernel.run)  # type: ignore[no-untyped-call]
    _replace_libdevice()


def _wrap_floats(interpreter: Any) -> None:
    """Wraps Python floats in tensors: kernels receive them bare but expect a typed value."""
    import triton.language as tl

    plain = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return plain(argument)

    interpreter._implicit_cvt = converted


def _compute_bf16_in_fp32(interpreter: Any) -> None:
    """Computes bf16 in fp32: the interpreter stores it as integers and does integer arithmetic, mostly yielding NaN."""
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
    """Replaces libdevice functions, which are stubs in the interpreter, with Triton's own."""
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
