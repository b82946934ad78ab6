"""The kernel that unpacks a checkpoint's matrices on CUDA. ``kernels.unpack`` defines the formats and terms.

A program unpacks ROWS rows and COLS columns of a matrix; each element finds its own code. Codes are read as bytes, also
those in 32-bit words, because all formats put the lowest bits first. Elements that share a byte are neighbours, so that
their loads hit the same cache line. Bits equal plain torch's: the difference of a code and a zero point is exact, and a
product is rounded once. It was not measured on a GPU.
"""

# Triton's stubs declare dtypes as values, and jitted functions as never returning.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flexhybrid.core.model.packing import Packing
from flexhybrid.runtime.kernels.unpack import Operands, trial

ROWS, COLS = tl.constexpr(8), tl.constexpr(128)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
#: Where the code of an element is, and what it means.
FP8, SIGNED, BYTES, MXFP4, NIBBLES, COLUMN_WORDS, AWQ_WORDS = range(7)
OF_DTYPE = {"F8_E4M3": FP8, "I8": SIGNED}
OF_FORMAT = {"mxfp4": MXFP4, "gptq": COLUMN_WORDS, "awq": AWQ_WORDS}


def unpack(m: Packing, operands: Operands, out: torch.Tensor) -> None:
    """Unpack matrices to ``out`` [matrices, rows, columns], whose rows follow each other."""
    codes, scales = operands.codes.view(len(out), -1).view(torch.uint8), operands.scales
    form = OF_FORMAT.get(m.format, NIBBLES if m.bits == 4 else OF_DTYPE.get(m.parts[0].dtype, BYTES))
    grid = (triton.cdiv(m.cols, COLS.value), triton.cdiv(m.rows, ROWS.value), len(out))
    with torch.cuda.device_of(out):
        _unpack_kernel[grid](
            (
                codes,
                scales,
                scales if operands.zeros is None else operands.zeros,
                codes if operands.index is None else operands.index,
            ),
            out,
            (m.rows, m.cols, codes.shape[1] // m.rows, codes.shape[1], out.stride(0)),
            (m.block[0], m.block[1], *scales.stride()),
            operands.zero,
            FORM=form,
            BITS=m.bits,
            GIVEN=(operands.zeros is not None) + 2 * (operands.index is not None),
            **OPTIONS,
        )


def prove(device: torch.device) -> None:
    """Raise ArithmeticError if a trial of a format gives other bits than plain torch's."""
    for packing, operands, expected in trial(device):
        out = torch.zeros_like(expected)
        unpack(packing, operands, out)
        if not torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):
            raise ArithmeticError(f"in a trial of {packing.format} its results differ from plain torch's")


@triton.jit
def _unpack_kernel(operands, out, sizes, blocks, zero, FORM: tl.constexpr, BITS: tl.constexpr, GIVEN: tl.constexpr):
    """``GIVEN``: 1 if there are zero points, plus 2 if there are indices of blocks."""
    codes, scales, zeros, index = operands
    rows, cols, row_bytes, matrix_bytes, step = sizes
    block_rows, block_cols, scale_matrix, scale_row, scale_col = blocks
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < rows) & (col < cols)
    code = _code(codes + matrix * matrix_bytes, row, col, rows, row_bytes, inside, FORM=FORM, BITS=BITS)
    if GIVEN >= 2:
        block = tl.load(index + matrix * cols + col, mask=col < cols, other=0)
    else:
        block = col // block_cols
    at = matrix * scale_matrix + (row // block_rows) * scale_row + block * scale_col
    scale = tl.load(scales + at, mask=inside, other=0.0)
    if GIVEN % 2 == 1:
        code -= tl.load(zeros + at, mask=inside, other=0.0)
    else:
        code -= zero
    place = matrix * step + row.to(tl.int64) * cols + col
    tl.store(out + place, (code * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _code(codes, row, col, rows, row_bytes, inside, FORM: tl.constexpr, BITS: tl.constexpr):  # noqa: PLR0913
    """Return the codes of elements as float32."""
    if FORM == 5:  # words along the columns
        per: tl.constexpr = 32 // BITS
        bit = col % per * BITS
        byte, shift = (col // per * rows + row).to(tl.int64) * 4 + bit // 8, bit % 8
    elif FORM == 6:  # AWQ's words, of 8 rows
        bit = (row % 8 // 2 + row % 2 * 4) * 4
        byte, shift = (col * (rows // 8) + row // 8).to(tl.int64) * 4 + bit // 8, bit % 8
    else:
        byte, shift = row.to(tl.int64) * row_bytes + col * BITS // 8, col * BITS % 8
    code = (tl.load(codes + byte, mask=inside, other=0).to(tl.int32) >> shift) & ((1 << BITS) - 1)
    if FORM == 0:  # FP8: the bits are those of a float32 2**120 times smaller; 127 is NaN
        magnitude = code & 127
        bits = tl.where(magnitude == 127, 0x7FC00000, magnitude << 20) | ((code & 128) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    if FORM == 1:
        return ((code ^ 128) - 128).to(tl.float32)
    if FORM == 3:  # E2M1: 0, 0.5, then (1 + mantissa / 2) · 2**(exponent - 1)
        magnitude = code & 7
        bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude << 22) + 0x3F000000) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True)
    return code.to(tl.float32)
