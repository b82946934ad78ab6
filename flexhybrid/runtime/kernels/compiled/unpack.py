"""The kernel that unpacks a checkpoint's matrices in a CPU's memory. ``kernels.unpack`` defines formats and calls it.

A part of a row is decoded to float32, scaled and stored, while it is in the first-level cache. Rows take turns at the
same columns, because words may hold codes of several rows. Results are equal to plain torch's bit for bit.
"""

from __future__ import annotations

import numba
import numpy as np

from flexhybrid.runtime.kernels.compiled.rows import NUMBA, PART

TILE_ROWS, TILE_COLS = 16, 1024
#: Where the codes of a matrix are: a byte each (FP8, signed or unsigned), two in a byte, in words along the columns, or
#: in AWQ's words.
FP8, SIGNED, BYTES, NIBBLES, COLUMN_WORDS, AWQ_WORDS = range(6)
MXFP4_GROUP = 32  #: a constant, so that LLVM vectorizes the loop over a group


@numba.njit(**NUMBA)
def unpack(order, operands, sizes, outs, first, end):
    """Unpack rows [first, end) of all matrices.

    ``operands``: codes, uint8, of all matrices; values of a byte's codes, one or two float32 as uint64, for FP8 and
    NIBBLES; scales and zero points, float32 [matrices, blocks, blocks]; block of each column, int32 [matrices,
    columns], or empty. ``sizes``: rows, columns, rows and columns of a block, bits, bytes of a row of codes, and
    elements from one matrix to the next in the output. ``outs``: float32, and bfloat16 as uint16; one of them is empty.
    """
    codes, table, scales, zeros, index = operands
    out32, out16 = outs
    rows, cols, block_rows, block_cols, bits, row_bytes, step = sizes
    line = np.empty(TILE_COLS, np.float32)
    row = first
    while row < end:
        matrix, top = row // rows, row % rows
        height = min(TILE_ROWS, rows - top, end - row)
        for left in range(0, cols, TILE_COLS):
            width = min(TILE_COLS, cols - left)
            for i in range(height):
                start = (row + i) * row_bytes + (left // 2 if order == NIBBLES else left)
                if order == COLUMN_WORDS:
                    base = (matrix * (-(-cols * bits // 32)) + left * bits // 32) * rows + top + i
                    _decode_columns(line, codes.view(np.uint32)[base:], bits, rows, width)
                elif order == AWQ_WORDS:
                    base = (matrix * cols + left) * (rows // 8) + (top + i) // 8
                    _decode_awq(line, codes.view(np.uint32)[base:], (top + i) % 8, rows // 8, width)
                elif order == NIBBLES:
                    source, pairs = codes[start : start + (width + 1) // 2], line.view(np.uint64)
                    for j in range(len(source)):
                        pairs[j] = table[source[j]]
                elif order == FP8:
                    source, words = codes[start : start + width], line.view(np.uint32)
                    for j in range(width):
                        words[j] = np.uint32(table[source[j]])
                elif order == SIGNED:
                    source = codes[start : start + width]
                    for j in range(width):
                        line[j] = np.float32(np.int8(source[j]))
                else:
                    source = codes[start : start + width]
                    for j in range(width):
                        line[j] = np.float32(source[j])
                _scale(line, scales, zeros, index, (matrix, (top + i) // block_rows, block_cols, left, width))
                start = matrix * step + (top + i) * cols + left
                if len(out32):
                    out32[start : start + width] = line[:width]
                else:
                    _round(line.view(np.uint32), out16[start : start + width])
        row += height


@numba.njit(**PART)
def _scale(line, scales, zeros, index, place):
    """Subtract zero points from a row's codes and multiply by scales."""
    matrix, block, block_cols, left, width = place
    if not index.size and block_cols == MXFP4_GROUP and width % MXFP4_GROUP == 0:
        for of in range(width // MXFP4_GROUP):
            first = of * MXFP4_GROUP
            scale = scales[matrix, block, left // MXFP4_GROUP + of]
            origin = zeros[matrix, block, left // MXFP4_GROUP + of]
            for j in range(first, first + MXFP4_GROUP):
                line[j] = (line[j] - origin) * scale
        return
    if not index.size:
        for of in range(left // block_cols, (left + width - 1) // block_cols + 1):
            scale = scales[matrix, block, of]
            origin = zeros[matrix, block, of]
            group = line[max(of * block_cols - left, 0) : min((of + 1) * block_cols - left, width)]
            for j in range(len(group)):
                group[j] = (group[j] - origin) * scale
        return
    for j in range(width):
        of = index[matrix, left + j]
        origin = zeros[matrix, block, of]
        line[j] = (line[j] - origin) * scales[matrix, block, of]


@numba.njit(**PART)
def _decode_columns(line, words, bits, rows, width):
    """Decode a row of words whose codes are columns; a word's successor is ``rows`` words behind."""
    if bits == 4:
        for word in range(-(-width // 8)):
            for k in range(8):
                line[8 * word + k] = np.float32((words[word * rows] >> np.uint32(4 * k)) & np.uint32(15))
    else:
        for word in range(-(-width // 4)):
            for k in range(4):
                line[4 * word + k] = np.float32((words[word * rows] >> np.uint32(8 * k)) & np.uint32(255))


@numba.njit(**PART)
def _decode_awq(line, words, place, step, width):
    """Decode a row of words whose codes are 8 rows of a column; the next column is ``step`` words behind."""
    shift = np.uint32(place // 2 * 4 + place % 2 * 16)
    for j in range(width):
        line[j] = np.float32((words[j * step] >> shift) & np.uint32(15))


@numba.njit(**PART)
def _round(source, target):
    """Round float32, as uint32, to the nearest bfloat16, as uint16; ties to even."""
    for j in range(len(target)):
        bits = source[j]
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        target[j] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)
