"""Packed matrices of a checkpoint's files: which tensors are their parts, and how they fill a model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.errors import InputError, shown
from flexhybrid.core.model.packing import (
    ALIGN_BYTES,
    FORMATS,
    MXFP4_GROUP,
    Header,
    PackedRun,
    Packing,
    stored_packing,
)
from flexhybrid.core.model.stored import PackedFormat
from flexhybrid.runtime.kernels.unpack import typed, unpack

Read = Callable[[], torch.Tensor]
#: Endings of tensors that describe activations, the cache or a matrix's shape; they are not needed.
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".weight_shape")


class PackedTensor(NamedTuple):
    """A tensor of packed matrices: one, or a stack of several."""

    packing: Packing
    shape: list[int]  #: of the unpacked tensor
    file: str
    parts: tuple[Read, ...]  #: by part of ``packing``

    @property
    def count(self) -> int:
        """Return the number of matrices."""
        return prod(self.shape[:-2])

    def bytes_of(self, part: int) -> torch.Tensor:
        """Return the bytes of a part of all matrices, uint8 [bytes]."""
        return self.parts[part]().contiguous().view(-1).view(torch.uint8)

    def read(self) -> torch.Tensor:
        """Return the unpacked tensor in float32."""
        run = PackedRun(self.packing, self.count)
        parts = [self.bytes_of(part) for part in range(len(self.parts))]
        out = torch.empty(self.count, self.packing.rows, self.packing.cols, dtype=torch.float32)
        unpack(run.packing, typed(run, parts), out)
        out = out.transpose(1, 2) if self.packing.format == "mxfp4" else out
        return out.reshape(self.shape)


def find_packed(
    path: Path, stored: Mapping[str, Header], read: Mapping[str, Read], packed: PackedFormat
) -> tuple[dict[str, PackedTensor], set[str]]:
    """Return ({tensor's name as if it were plain: packed tensor}, names of all parts).

    Raise InputError if a part is missing or has a wrong dtype or size, or if no tensor is packed.
    """
    found, used = {}, set()
    for name, header in stored.items():
        for form in dict.fromkeys(
            (packed.form, *(("grouped", "scaled") if packed.method == "compressed-tensors" else ()))
        ):
            main, (dtypes, _) = next(iter(FORMATS[form].parts.items()))
            if not name.endswith(main) or (main == ".weight" and header.dtype not in dtypes):
                continue
            stem, stacked = name.removesuffix(main), len(header.size) - _DIMS.get(form, 2)
            if stacked < 0:
                raise InputError(f"{path / header.file}: tensor {name} has shape {list(header.size)}; it is no matrix")
            names = (stem + suffix for suffix in FORMATS[form].parts)
            headers = {of: stored[of]._replace(size=stored[of].size[stacked:]) for of in names if of in stored}
            headers = {of: one._replace(file=str(path / one.file)) for of, one in headers.items()}
            packing = stored_packing(_matrix(stem, form, headers, read, packed), stem, headers)
            stack = list(header.size[:stacked])
            shape = [packing.cols, packing.rows] if form == "mxfp4" else [packing.rows, packing.cols]
            parts = tuple(read[stem + part.suffix] for part in packing.parts)
            used |= {stem + part.suffix for part in packing.parts}
            plain = stem if form == "mxfp4" else f"{stem}.weight"
            found[plain] = PackedTensor(packing, [*stack, *shape], str(path / header.file), parts)
            break
    if not found:
        raise InputError(f"{path}: {packed.said_by} says {packed.name}, but no tensor of the files is packed so")
    return found, used


_DIMS = {"mxfp4": 3}  #: dimensions of a matrix's codes, if not 2


def _matrix(
    stem: str, form: str, headers: Mapping[str, Header], read: Mapping[str, Read], packed: PackedFormat
) -> Packing:
    """Return the rows, columns, bits and blocks of a module's packed matrix, by the sizes of its parts."""
    size_of = {name.removeprefix(stem): header.size for name, header in headers.items()}
    main, *others = size_of.values()
    where = f"{next(iter(headers.values())).file}: tensor {stem}"
    bits, group, block = packed.code_bits, packed.block[1], None
    if form == "mxfp4":
        rows, cols, block = main[-3], main[-2] * MXFP4_GROUP, (1, MXFP4_GROUP)
    elif form in ("block", "scaled"):
        (rows, cols), scales = main[-2:], others[0] if others else ()
        bits = 8
        if prod(scales) == 1:
            block = rows, cols
        elif prod(scales) == rows and len(scales) < 3:
            block = 1, cols
        else:
            block = packed.block[0] or rows, packed.block[1] or cols
    elif form == "grouped":
        name = f"{stem}.weight_shape"
        if name not in read:
            raise InputError(f"{where}.weight_shape is missing; a pack-quantized matrix needs it")
        rows, cols = read[name]().tolist()
        bits = next((bits for bits in (4, 8) if main[-1] == -(-cols * bits // 32)), bits)
        group = _group(cols, size_of.get(".weight_scale", (1, 1))[-1], group, where, ".weight_g_idx" in size_of)
    elif form == "gptq":
        rows = main[1]
        cols = size_of[".g_idx"][0] if ".g_idx" in size_of else main[0] * 32 // bits
        bits = next((bits for bits in (4, 8) if main[0] == -(-cols * bits // 32)), bits)
        group = _group(cols, size_of.get(".scales", (1,))[0], group, where, ".g_idx" in size_of)
    else:
        cols, rows = main[0], main[1] * 32 // bits
        group = _group(cols, size_of.get(".scales", (1,))[0], group, where, False)
    return Packing(form, rows, cols, bits, block or (1, group), zero_offset=packed.zero_offset)


def _group(cols: int, groups: int, usual: int, where: str, ordered: bool) -> int:
    """Return the columns that share a scale. Raise InputError if groups do not fit the columns."""
    if usual and -(-cols // usual) == groups and (ordered or cols % usual == 0):
        return usual
    if groups < 1 or cols % groups or (usual and groups > 1 and cols // groups != usual):
        raise InputError(
            f"{where}.weight has {cols} columns; they are not {groups} groups of {usual or 'equal length'}"
        )
    return cols // groups


def check_values(name: str, tensor: PackedTensor) -> None:
    """Raise InputError if a scale is not finite (255 in MXFP4), or a column's group does not exist."""
    packing = tensor.packing
    for part, read in zip(packing.parts[1:], tensor.parts[1:], strict=True):
        where = f"{tensor.file}: tensor {name} is packed with {part.suffix}"
        if part.suffix.endswith("g_idx"):
            values, groups = read(), packing.grid[1]
            if wrong := values[(values < 0) | (values >= groups)].tolist():
                raise InputError(f"{where} {shown(wrong[0])}, but there are {groups} groups")
        elif part.dtype == "U8" and bool((read() == 255).any()):
            raise InputError(f"{where} 255, which is not a number")
        elif part.dtype not in ("U8", "I32") and not bool((scales := read()).isfinite().all()):
            raise InputError(f"{where} {scales[~scales.isfinite()].flatten()[0].item()}")


class Filling(NamedTuple):
    """How packed tensors fill a tensor of the model."""

    runs: tuple[PackedRun, ...]
    matrices: tuple[tuple[tuple[str, int], ...], ...]  #: by run, (packed tensor, index of its matrix) of each

    def pieces(self, tensors: Mapping[str, PackedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (packed tensor, bytes) in the order of a layer's bytes, with the gaps between parts."""
        for run, matrices in zip(self.runs, self.matrices, strict=True):
            for index, part in enumerate(run.packing.parts):
                last, whole = "", torch.empty(0, dtype=torch.uint8)
                for name, matrix in matrices:
                    if name != last:
                        last, whole = name, tensors[name].bytes_of(index)
                    yield name, whole[matrix * part.num_bytes : (matrix + 1) * part.num_bytes]
                if gap := -run.count * part.num_bytes % ALIGN_BYTES:
                    yield matrices[-1][0], torch.zeros(gap, dtype=torch.uint8)


def stacked_filling(names: Sequence[str], tensors: Mapping[str, PackedTensor]) -> Filling | None:
    """Return how tensors fill one whose rows they are, one below the other; None if one of them is plain."""
    runs, first = [], 0
    for name in names:
        if name not in tensors:
            return None
        runs.append(PackedRun(tensors[name].packing, 1, first))
        first += tensors[name].packing.rows
    return Filling(tuple(runs), tuple(((name, 0),) for name in names))


def filling(
    size: Sequence[int], rows: np.ndarray, sources: Sequence[tuple[str, PackedTensor | None]]
) -> Filling | None:
    """Return how packed tensors fill a tensor of this ``size`` [..., rows, columns]; None if they do not fill it matrix
    by matrix.

    ``rows``: for each row of the tensor, its number among the rows of all ``sources`` (a plain source counts none).
    """
    starts = np.cumsum([0] + [prod(t.shape[:-2]) * t.packing.rows if t else 0 for _, t in sources])
    of = np.searchsorted(starts, rows, side="right") - 1
    found, at = [], 0  # (first row, source, matrix)
    while at < len(rows):
        name, tensor = sources[of[at]]
        if tensor is None:
            return None
        matrix, first = divmod(int(rows[at] - starts[of[at]]), tensor.packing.rows)
        end = at + tensor.packing.rows
        if first or end > len(rows) or not np.array_equal(rows[at:end] - rows[at], np.arange(end - at)):
            return None
        found.append((at, name, matrix, tensor.packing))
        at = end
    height = found[0][3].rows if len(size) < 3 and len(found) == 1 else len(rows) // prod(size[:-2])
    each = sum(1 for first, *_ in found if first < height)
    runs, matrices = [], []
    for turn in range(each):
        alike = found[turn::each]
        first, packing = alike[0][0], alike[0][3]
        if any((at, of) != (first + height * n, packing) for n, (at, _, _, of) in enumerate(alike)):
            return None
        runs.append(PackedRun(packing, len(alike), first, height))
        matrices.append(tuple((name, matrix) for _, name, matrix, _ in alike))
    return Filling(tuple(runs), tuple(matrices))
