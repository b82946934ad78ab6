"""Triton's interpreter, which runs kernels by numpy without a GPU: mended where compiled kernels give other numbers,
and made faster. To be imported before triton is: a process that interprets cannot compile."""

import os
import sys

if "triton" in sys.modules:
    raise ImportError("triton is imported already: it compiles")
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

interpreters_cast, interpreters_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _widened(handle: TensorHandle) -> TensorHandle:
    """Return bfloat16, which the interpreter keeps as bits, in float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _cast(self, src, dst_type):
    """Cast to bfloat16 by rounding, as compiled kernels do; the interpreter truncates and loses subnormals."""
    kinds = src.dtype.scalar, dst_type.scalar
    if kinds == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.array(src.data)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
    return _widened(src) if kinds == (tl.bfloat16, tl.float32) else interpreters_cast(self, src, dst_type)


def _dot(self, a, b, *others):
    """Multiply bfloat16 values; the interpreter would multiply their bits."""
    return interpreters_dot(self, _widened(a), _widened(b), *others)


InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = _cast, _dot


def hasten(function) -> None:
    """Put stand-ins for tl's functions in place once, not at every call, and make no sums of whole numbers a second
    time in 64 bits: a third of the interpreter's time. ``function``: one of the module whose kernels run."""
    for patched in (function, tl.cdiv):  # the first has triton.language in its globals, the other its core
        interpreter._patch_lang(patched.fn)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
