"""Packed weights as data: the parts in which a checkpoint stores a matrix, and their bytes in a layer.

A matrix [rows, cols] is stored as parts: codes, and scales that blocks of elements share; some formats also have zero
points. In memory, on the disk and on the link, parts keep the checkpoint's bytes. ``runtime.kernels.unpack`` has the
arithmetic of each format.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from flexhybrid.core.errors import InputError

ALIGN_BYTES = 64  #: parts and tensors begin at a multiple: a cache line; matrix kernels are slower on odd addresses

FLOATS = ("F32", "BF16", "F16")
#: dtypes in safetensors -> bytes of an element
DTYPES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}

#: Elements of a row that share a scale in MXFP4.
MXFP4_GROUP = 32


class StoredPart(NamedTuple):
    """A stored tensor of a packed matrix."""

    suffix: str  #: its name in the checkpoint begins with the module's name
    dtype: str  #: name in safetensors
    size: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * DTYPES[self.dtype]


class Packing(NamedTuple):
    """How a matrix [rows, cols] is stored."""

    format: str  #: key of ``FORMATS``
    rows: int
    cols: int
    bits: int  #: bits of a code
    block: tuple[int, int]  #: rows and columns that share a scale; the last blocks may be partial
    parts: tuple[StoredPart, ...] = ()
    zero_offset: int = 0  #: added to stored zero points

    @property
    def grid(self) -> tuple[int, int]:
        """Return the blocks along rows and columns."""
        return -(-self.rows // self.block[0]), -(-self.cols // self.block[1])


class PackedRun(NamedTuple):
    """Matrices of the same packing that are stored together: each part of all of them, then the next part."""

    packing: Packing
    count: int = 1
    first: int = 0  #: first row of the first matrix in the unpacked tensor
    step: int = 0  #: rows from the beginning of a matrix to that of the next

    @property
    def part_bytes(self) -> list[int]:
        """Return the bytes of each part of all matrices, rounded up to ``ALIGN_BYTES``."""
        sizes = [self.count * part.num_bytes for part in self.packing.parts]
        return [size + -size % ALIGN_BYTES for size in sizes]

    @property
    def elements(self) -> int:
        return self.count * self.packing.rows * self.packing.cols


Sizes = Callable[[Packing], tuple[int, ...]]
_INT32 = ("I32",)


def _words(elements: int, bits: int) -> int:
    """Return the 32-bit words that hold so many codes."""
    return -(-elements * bits // 32)


class Format(NamedTuple):
    """A format of packed matrices. The first part has the codes."""

    title: str
    parts: dict[str, tuple[tuple[str, ...], Sizes]]  #: suffix -> (allowed dtypes, size)
    optional: tuple[str, ...] = ()


_BY_ROWS: Sizes = lambda m: (m.rows, m.cols)  # noqa: E731 (a table of formulas)
_GRID: Sizes = lambda m: m.grid  # noqa: E731
#: Sources: compressed-tensors 0.20 (compressors), GPTQModel 7.7 (nn_modules.qlinear), AutoAWQ (gemm), transformers 5.23
#: (integrations.mxfp4, finegrained_fp8).
FORMATS = {
    "mxfp4": Format(
        "MXFP4",
        {
            "_blocks": (("U8",), lambda m: (m.rows, m.cols // MXFP4_GROUP, MXFP4_GROUP // 2)),
            "_scales": (("U8",), lambda m: (m.rows, m.cols // MXFP4_GROUP)),
        },
    ),
    "block": Format("FP8 in blocks", {".weight": (("F8_E4M3",), _BY_ROWS), ".weight_scale_inv": (FLOATS, _GRID)}),
    "scaled": Format("FP8 or int8", {".weight": (("F8_E4M3", "I8"), _BY_ROWS), ".weight_scale": (FLOATS, _GRID)}),
    "grouped": Format(
        "pack-quantized",
        {
            ".weight_packed": (_INT32, lambda m: (m.rows, _words(m.cols, m.bits))),
            ".weight_scale": (FLOATS, _GRID),
            ".weight_zero_point": (_INT32, lambda m: (_words(m.rows, m.bits), m.grid[1])),
            ".weight_g_idx": (_INT32, lambda m: (m.cols,)),
        },
        (".weight_zero_point", ".weight_g_idx"),
    ),
    "gptq": Format(
        "GPTQ",
        {
            ".qweight": (_INT32, lambda m: (_words(m.cols, m.bits), m.rows)),
            ".qzeros": (_INT32, lambda m: (m.grid[1], _words(m.rows, m.bits))),
            ".scales": (FLOATS, lambda m: (m.grid[1], m.rows)),
            ".g_idx": (_INT32, lambda m: (m.cols,)),
        },
        (".g_idx",),
    ),
    "awq": Format(
        "AWQ",
        {
            ".qweight": (_INT32, lambda m: (m.cols, _words(m.rows, m.bits))),
            ".qzeros": (_INT32, lambda m: (m.grid[1], _words(m.rows, m.bits))),
            ".scales": (FLOATS, lambda m: (m.grid[1], m.rows)),
        },
    ),
}


class Header(NamedTuple):
    """What a file says of a tensor."""

    dtype: str
    size: tuple[int, ...]
    file: str


def default_packing(matrix: Packing, scales: str, zeros: bool, order: bool) -> Packing:
    """Return a packing with the parts that its format has. ``scales``: their dtype, if several are allowed; ``zeros``,
    ``order``: whether there are zero points, and each column's group, if these are optional."""
    form, parts = FORMATS[matrix.format], []
    for suffix, (dtypes, size) in form.parts.items():
        if suffix not in form.optional or (zeros if "zero" in suffix else order):
            parts.append(StoredPart(suffix, scales if scales in dtypes else dtypes[0], size(matrix)))
    return matrix._replace(parts=tuple(parts))


def stored_packing(matrix: Packing, stem: str, headers: Mapping[str, Header]) -> Packing:
    """Return a packing with the parts that a module's tensors have. Raise InputError if a part is missing, or has
    another dtype or size than the matrix needs."""
    form, parts = FORMATS[matrix.format], []
    main = headers[stem + next(iter(form.parts))]
    for suffix, (dtypes, size) in form.parts.items():
        found, wanted = headers.get(stem + suffix), size(matrix)
        if found is None and suffix in form.optional:
            continue
        what = f"a matrix [{matrix.rows}, {matrix.cols}] in {form.title}"
        if found is None:
            raise InputError(f"{main.file}: tensor {stem}{suffix} is missing; {what} needs it")
        if found.dtype not in dtypes:
            raise InputError(
                f"{found.file}: tensor {stem}{suffix} holds {found.dtype}; {what} needs {' or '.join(dtypes)}"
            )
        alike = prod(found.size) == prod(wanted) if prod(wanted) in (1, matrix.rows) else False
        if found.size != wanted and not alike:  # one scale, or one a row, comes in several shapes
            raise InputError(
                f"{found.file}: tensor {stem}{suffix} has shape {list(found.size)}; {what} with scales for "
                f"{matrix.block[0]} x {matrix.block[1]} elements needs {list(wanted)}"
            )
        parts.append(StoredPart(suffix, found.dtype, found.size))
    return matrix._replace(parts=tuple(parts))
