"""Where each tensor of a decoder layer lies in the layer's flat run of bytes.

A layer is one run of bytes per tier, so that streaming it is a few long copies and a slice of it is a byte range.
Vectors come first (they are tiny and every verb needs them), then the matrices in the order in which the layer's verbs
need them: W_K and W_V before all, because KV-Gen opens the layer's work. The device-resident share is a prefix.
Vectors keep the compute width when the matrices are quantised; every matrix row is a whole number of bytes.
"""

from dataclasses import dataclass
from functools import cache

from flexhybrid.core.model.layers import LayerTensor
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import GROUP_ELEMENTS

ALIGN_BYTES = 64  #: a cache line; matrix kernels are slower on odd addresses


@dataclass(frozen=True)
class TensorSpot:
    """One tensor of a layer: [rows, cols] for a matrix, [rows] (cols = 0) for a vector; byte range [start, end)."""

    name: str
    rows: int
    cols: int
    start: int
    end: int

    @property
    def row_bytes(self) -> int:
        return (self.end - self.start) // self.rows


@dataclass(frozen=True)
class LayerLayout:
    """All spots of a layer, and the ends of the byte ranges that the verbs read."""

    spots: tuple[TensorSpot, ...]
    total_bytes: int
    kv_end: int  #: kv_gen reads [0, kv_end)
    qkv_end: int  #: project reads [0, qkv_end); finish reads [qkv_end, total_bytes) and the vectors
    vectors_end: int
    cuts: tuple[int, ...] = ()  #: where the resident prefix may end, in order; empty: at any matrix row

    def resident_prefix(self, share: float) -> int:
        """Bytes kept on the device for a share of the layer, rounded to the nearest matrix row or ``cuts``."""
        wanted = share * self.total_bytes
        if share >= 1.0:
            return self.total_bytes
        if self.cuts:
            return min(self.cuts, key=lambda cut: abs(cut - wanted))
        if wanted < self.vectors_end / 2:
            return 0
        best = self.vectors_end
        for spot in self.spots:
            if spot.cols and spot.start <= wanted:
                rows = min(spot.rows, round((wanted - spot.start) / spot.row_bytes))
                best = spot.start + rows * spot.row_bytes
        return best


def matrix_row_bytes(cols: int, bytes_per_element: float) -> int:
    """Bytes of a matrix row; a quantised one (0.5625 or 1.0625 bytes an element) holds whole groups of elements."""
    if bytes_per_element == int(bytes_per_element):
        return cols * int(bytes_per_element)
    return round(-(-cols // GROUP_ELEMENTS) * GROUP_ELEMENTS * bytes_per_element)


@cache
def layer_layout(
    shape: ModelShape, matrix_bytes: float, vector_bytes: int | None = None, layer: int = 0
) -> LayerLayout:
    """The flat layout of one layer of this shape.

    ``matrix_bytes`` an element of the matrices as stored, ``vector_bytes`` of norms and biases; None: the same.
    Layouts of different layers differ in their spots alone.
    """
    vector_width = int(matrix_bytes) if vector_bytes is None else vector_bytes
    if shape.modules:
        layouts = _module_layouts(shape.modules.kinds, matrix_bytes, vector_width)
        return layouts[shape.modules.kind_of[layer]]
    h, q, g = shape.hidden, shape.query_width, shape.kv_width
    if shape.family == "opt":
        vectors = [("norm1.weight", h), ("norm1.bias", h), ("kvq.bias", g + q), ("o.bias", h)]
        vectors += [("norm2.weight", h), ("norm2.bias", h), ("up.bias", shape.ffn), ("down.bias", h)]
        matrices = [("kvq.weight", g + q, h), ("o.weight", h, q), ("up.weight", shape.ffn, h)]
        matrices += [("down.weight", h, shape.ffn)]
    else:
        vectors = [("norm1.weight", h), *([("kvq.bias", g + q)] if shape.qkv_bias else []), ("norm2.weight", h)]
        vectors += [("k_norm.weight", shape.head_dim), ("q_norm.weight", shape.head_dim)] if shape.qk_norm else []
        matrices = [("kvq.weight", g + q, h), ("o.weight", h, q), ("gate.weight", shape.ffn, h)]
        matrices += [("up.weight", shape.ffn, h), ("down.weight", h, shape.ffn)]
    spots, position, kv_end, qkv_end = [], 0, 0, 0
    for name, rows, cols in [(name, rows, 0) for name, rows in vectors] + matrices:
        row = matrix_row_bytes(cols, matrix_bytes) if cols else vector_width
        size = rows * row
        spots.append(TensorSpot(name, rows, cols, position, position + size))
        if name == "kvq.weight":
            kv_end, qkv_end = position + g * row, position + size
        position += size + -size % ALIGN_BYTES
    vectors_end = next(spot.start for spot in spots if spot.cols)
    return LayerLayout(tuple(spots), position, kv_end, qkv_end, vectors_end)


@cache
def _module_layouts(
    kinds: tuple[tuple[LayerTensor, ...], ...], matrix_bytes: float, vector_bytes: int
) -> tuple[LayerLayout, ...]:
    """The layouts of kinds of layers that are modules: vectors, early and late matrices, each in the room that the kind
    with most of them takes, so that all layers are read and cut alike."""

    def size(tensor: LayerTensor) -> int:
        row = matrix_row_bytes(tensor.cols, matrix_bytes) if tensor.cols else vector_bytes
        return tensor.rows * row

    def parts(kind: tuple[LayerTensor, ...]) -> tuple[list[LayerTensor], ...]:
        vectors = [t for t in kind if not t.cols]
        return vectors, *([t for t in kind if t.cols and t.early is early] for early in (True, False))

    def room(part: list[LayerTensor]) -> int:
        return sum(size(t) + -size(t) % ALIGN_BYTES for t in part)

    ends = [0]
    for part in zip(*map(parts, kinds), strict=True):
        ends.append(ends[-1] + max(map(room, part)))
    spots: list[list[TensorSpot]] = []
    for kind in kinds:
        spots.append([])
        for part, position in zip(parts(kind), ends, strict=False):
            for tensor in part:
                spots[-1].append(TensorSpot(tensor.name, tensor.rows, tensor.cols, position, position + size(tensor)))
                position += size(tensor) + -size(tensor) % ALIGN_BYTES
    starts = set.intersection(*({spot.start for spot in of_kind if spot.cols} for of_kind in spots))
    cuts = tuple(sorted({0, *starts, *ends}))
    return tuple(LayerLayout(tuple(of_kind), ends[-1], ends[2], ends[2], ends[1], cuts) for of_kind in spots)
