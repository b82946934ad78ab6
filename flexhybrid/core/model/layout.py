"""Layouts: the position of each tensor in the contiguous bytes of a decoder layer.

A layer is contiguous in each tier, so that streaming it is a few long copies, and a slice is a range of bytes. Vectors
come first, because they are small and every verb needs them. Matrices follow in the order of the verbs: W_K and W_V
first, because KV-Gen begins the layer's work. The resident share is a prefix. If matrices are packed, vectors stay in
the compute dtype; every row of a matrix is a whole number of bytes. A matrix that the checkpoint packs is a list of
runs of its parts (``packing.PackedRun``), and is placed as a whole.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from flexhybrid.core.model.layers import LayerTensor
from flexhybrid.core.model.packing import ALIGN_BYTES, PackedRun
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import GROUP_ELEMENTS, Placement

SHARE_ERROR = 1e-6  #: largest rounding error of a policy's share of a layer's bytes


@dataclass(frozen=True)
class TensorSpot:
    """A tensor in bytes [start, end) of a layer: a matrix [rows, cols], or a vector [rows] with cols = 0."""

    name: str
    rows: int
    cols: int
    start: int
    end: int
    runs: tuple[PackedRun, ...] = ()  #: packed matrices, as the checkpoint stores them

    @property
    def row_bytes(self) -> int:
        return (self.end - self.start) // self.rows


@dataclass(frozen=True)
class LayerLayout:
    """The tensors of a layer, and the ends of the byte ranges that verbs read."""

    spots: tuple[TensorSpot, ...]
    total_bytes: int
    kv_end: int  #: kv_gen reads bytes [0, kv_end)
    qkv_end: int  #: project reads bytes [0, qkv_end); finish reads [qkv_end, total_bytes) and the vectors
    vectors_end: int  #: vectors are in bytes [0, vectors_end)
    cuts: tuple[int, ...] = ()  #: possible ends of the resident prefix, sorted; empty: the end of any matrix row

    def resident_prefix(self, share: float) -> int:
        """Return the resident bytes for a share of the layer, rounded to the nearest matrix row, or down to one of
        ``cuts``."""
        wanted = share * self.total_bytes
        if share >= 1.0:
            return self.total_bytes
        if self.cuts:
            return max(cut for cut in self.cuts if cut <= wanted + SHARE_ERROR * self.total_bytes)
        if wanted < self.vectors_end / 2:
            return 0
        best = self.vectors_end
        for spot in self.spots:
            if spot.cols and spot.start <= wanted:
                rows = min(spot.rows, round((wanted - spot.start) / spot.row_bytes))
                best = spot.start + rows * spot.row_bytes
        return best


def matrix_row_bytes(cols: int, bytes_per_element: float) -> int:
    """Return the bytes of a matrix row. A packed row, with a fraction of bytes per element, is rounded up to whole
    groups of elements."""
    if bytes_per_element == int(bytes_per_element):
        return cols * int(bytes_per_element)
    return round(-(-cols // GROUP_ELEMENTS) * GROUP_ELEMENTS * bytes_per_element)


@cache
def layer_layout(
    shape: ModelShape, matrix_bytes: float, vector_bytes: int | None = None, layer: int = 0
) -> LayerLayout:
    """Return the layout of a layer. ``matrix_bytes``: bytes of a stored element of a matrix; ``vector_bytes``: of norms
    and biases (default: the same); ``layer``: matters only for modules of several kinds."""
    vector_width = int(matrix_bytes) if vector_bytes is None else vector_bytes
    if shape.modules:
        return _module_layout(shape.modules.kinds[shape.weights_kind(layer)], matrix_bytes, vector_width)
    h, q, g = shape.hidden, shape.query_width, shape.kv_width
    if shape.family == "opt":
        vectors = [("norm1.weight", h), ("norm1.bias", h), ("kvq.bias", g + q), ("o.bias", h)]
        vectors += [("norm2.weight", h), ("norm2.bias", h), ("up.bias", shape.ffn), ("down.bias", h)]
    else:
        vectors = [("norm1.weight", h), *([("kvq.bias", g + q)] if shape.qkv_bias else []), ("norm2.weight", h)]
        vectors += [("k_norm.weight", shape.head_dim), ("q_norm.weight", shape.head_dim)] if shape.qk_norm else []
    matrices, stored = [(name, *size) for name, size in shape.own_matrices.items()], dict(shape.stored)
    spots, position, kv_end, qkv_end = [], 0, 0, 0
    for name, rows, cols in [(name, rows, 0) for name, rows in vectors] + matrices:
        row, runs = matrix_row_bytes(cols, matrix_bytes) if cols else vector_width, stored.get(name, ())
        size = _runs_bytes(runs) if runs else rows * row
        spots.append(TensorSpot(name, rows, cols, position, position + size, runs))
        if name == "kvq.weight":
            qkv_end = position + size
            kv_end = qkv_end if runs else position + g * row
        position += size + -size % ALIGN_BYTES
    vectors_end = next(spot.start for spot in spots if spot.cols)
    cuts = tuple(sorted({0, *(spot.start for spot in spots if spot.cols), position})) if stored else ()
    return LayerLayout(tuple(spots), position, kv_end, qkv_end, vectors_end, cuts)


def _runs_bytes(runs: tuple[PackedRun, ...]) -> int:
    return sum(sum(run.part_bytes) for run in runs)


@cache
def _module_layout(kind: tuple[LayerTensor, ...], matrix_bytes: float, vector_bytes: int) -> LayerLayout:
    """Return the layout of a layer of modules: vectors, matrices used before attention (KV-Gen's first), then the
    others."""
    spots, position, ends = [], 0, []
    kind = tuple(tensor for tensor in kind if not tensor.outside)
    for part in (
        [tensor for tensor in kind if not tensor.cols],
        [tensor for tensor in kind if tensor.cols and tensor.kv_gen],
        [tensor for tensor in kind if tensor.cols and tensor.early and not tensor.kv_gen],
        [tensor for tensor in kind if tensor.cols and not tensor.early],
    ):
        for tensor in part:
            row = matrix_row_bytes(tensor.cols, matrix_bytes) if tensor.cols else vector_bytes
            size = _runs_bytes(tensor.stored) if tensor.stored else tensor.rows * row
            spots.append(TensorSpot(tensor.name, tensor.rows, tensor.cols, position, position + size, tensor.stored))
            position += size + -size % ALIGN_BYTES
        ends.append(position)
    vectors_end, kv_end, qkv_end, total = ends
    cuts = tuple(sorted({0, *(spot.start for spot in spots if spot.cols), *ends}))
    return LayerLayout(tuple(spots), total, kv_end, qkv_end, vectors_end, cuts)


class PlacedLayer(NamedTuple):
    """The placement of a layer's bytes: first the device's, then the host's, then the disk's."""

    layout: LayerLayout
    streamed_from: int  #: first byte that does not stay on the device
    disk_from: int  #: first byte on the disk

    @property
    def streamed_bytes(self) -> int:
        return self.layout.total_bytes - self.streamed_from

    @property
    def streamed_parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the streamed bytes [start, end) on the host, and those on the disk."""
        return (self.streamed_from, self.disk_from), (self.disk_from, self.layout.total_bytes)

    @property
    def disk_bytes(self) -> int:
        return self.layout.total_bytes - self.disk_from

    @property
    def has_early_part(self) -> bool:
        """Return whether all streamed bytes are on the host and include a part of W_K and W_V."""
        return self.streamed_from < self.layout.kv_end < self.layout.total_bytes == self.disk_from


def kind_layouts(shape: ModelShape, matrix_bytes: float, vector_bytes: int | None = None) -> tuple[LayerLayout, ...]:
    """Return the layout of each kind of weights (``ModelShape.weights_counts``)."""
    kinds = range(len(shape.weights_counts))
    return tuple(layer_layout(shape.of_weights(kind), matrix_bytes, vector_bytes) for kind in kinds)


def placed_layers(
    shape: ModelShape, weights: Placement, matrix_bytes: float, vector_bytes: int
) -> tuple[PlacedLayer, ...]:
    """Return each kind of ``kind_layouts`` with the shares of ``weights`` in each tier."""
    placed = []
    for layout in kind_layouts(shape, matrix_bytes, vector_bytes):
        resident = layout.resident_prefix(weights.device)
        disk_from = max(resident, layout.resident_prefix(1.0 - weights.disk)) if weights.disk else layout.total_bytes
        placed.append(PlacedLayer(layout, resident, disk_from))
    return tuple(placed)
