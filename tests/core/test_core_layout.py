"""Test the flat bytes of a layer: disjoint, aligned spots in the order in which verbs need them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.model.layout import ALIGN_BYTES, layer_layout
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Bits


@st.composite
def shapes(draw):
    """Draw small shapes of both families with odd widths, which need alignment."""
    groups, queries_a_group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    llama = draw(st.booleans())
    return ModelShape(
        "tiny", "llama" if llama else "opt", 1, draw(st.integers(1, 70)), groups * queries_a_group, groups,
        draw(st.integers(1, 9)), draw(st.integers(1, 90)), 11, 16, gated_mlp=llama, rotary=llama, bias=not llama,
    )  # fmt: skip


ELEMENT_BYTES = st.sampled_from([2, 4])


@given(shapes(), ELEMENT_BYTES)
def test_spots_are_apart_aligned_and_ordered(shape, p):
    layout = layer_layout(shape, p)
    position = 0
    for spot in layout.spots:
        assert spot.start % ALIGN_BYTES == 0
        assert position <= spot.start < position + ALIGN_BYTES  # nothing overlaps, no gap wider than alignment needs
        assert spot.end - spot.start == spot.rows * max(spot.cols, 1) * p
        position = spot.end
    assert position <= layout.total_bytes < position + ALIGN_BYTES
    elements = sum(spot.rows * max(spot.cols, 1) for spot in layout.spots)
    assert elements * p == shape.layer_bytes(p)


@given(shapes(), ELEMENT_BYTES, st.sampled_from([8, 4, 2, 1]))
def test_quantised_matrices_hold_whole_groups_and_vectors_keep_their_width(shape, p, bits):
    layout = layer_layout(shape, Bits(weights=bits).element_bytes(p, shape.kv_group).weights, p)
    group_bytes = 64 * bits // 8 + 4  # codes, scale and zero point
    for spot in layout.spots:
        assert spot.start % ALIGN_BYTES == 0
        if spot.cols:
            assert spot.row_bytes == -(-spot.cols // 64) * group_bytes
            assert spot.end - spot.start == spot.rows * spot.row_bytes
        else:
            assert spot.end - spot.start == spot.rows * p
    first = layout.spots[[spot.name for spot in layout.spots].index("kvq.weight")]
    assert layout.kv_end == first.start + shape.kv_width * first.row_bytes
    for share in (0.2, 0.5, 0.9):
        cut = layout.resident_prefix(share)
        assert any(
            (cut - spot.start) % spot.row_bytes == 0 and spot.start <= cut <= spot.end for spot in layout.spots
        ) or cut in (0, layout.total_bytes)


@given(shapes(), ELEMENT_BYTES)
def test_key_and_value_weights_come_before_every_other_matrix(shape, p):
    layout = layer_layout(shape, p)
    is_matrix = [spot.cols > 0 for spot in layout.spots]
    assert is_matrix == sorted(is_matrix)  # vectors first
    first_matrix = layout.spots[is_matrix.index(True)]
    assert (first_matrix.name, first_matrix.start) == ("kvq.weight", layout.vectors_end)
    assert layout.kv_end - first_matrix.start == shape.kv_width * shape.hidden * p
    assert layout.qkv_end == first_matrix.end
    assert layout.qkv_end - layout.kv_end == shape.query_width * shape.hidden * p


@given(shapes(), ELEMENT_BYTES, st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_resident_prefix_grows_with_the_share_and_ends_on_a_row(shape, p, shares):
    layout = layer_layout(shape, p)
    assert layout.resident_prefix(0.0) == 0
    assert layout.resident_prefix(1.0) == layout.total_bytes
    prefixes = [layout.resident_prefix(share) for share in sorted(shares)]
    assert prefixes == sorted(prefixes)
    row_ends = {0, layout.vectors_end, layout.total_bytes}
    for spot in layout.spots:
        if spot.cols:
            row_ends |= {spot.start + row * spot.cols * p for row in range(spot.rows + 1)}
    assert set(prefixes) <= row_ends


@given(shapes(), ELEMENT_BYTES, st.floats(0, 1))
def test_the_resident_prefix_is_near_the_requested_share(shape, p, share):
    layout = layer_layout(shape, p)
    widest_row = max(spot.row_bytes for spot in layout.spots if spot.cols)
    off = abs(layout.resident_prefix(share) - share * layout.total_bytes)
    assert off <= max(widest_row, layout.vectors_end) / 2 + ALIGN_BYTES
