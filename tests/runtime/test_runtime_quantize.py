"""Test the quantiser against a naive numpy reference, and its error against the bound in its module."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles.quantized import group_of_heads, round_trip

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import GROUP_ELEMENTS, Bits
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.kernels import quantize as module
from flexhybrid.runtime.kernels.quantize import dequantize, limit, packed_bytes, quantize, row_unit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BITS = (8, 4, 2, 1)


@pytest.fixture(autouse=True, scope="module")
def plain_torch():
    """Switch off numba's kernels, which test_rows_numba compares with plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "has_numba", lambda: False)
        yield


@pytest.mark.parametrize("elements", [0, 1, 63, 65, 96, 2000])
def test_rows_that_groups_do_not_fill_are_refused(elements):
    for call in (lambda: packed_bytes(elements, 8), lambda: quantize(torch.zeros(2, elements), 1)):
        with pytest.raises(InputError, match=rf"row of {elements} elements .*multiple of {GROUP_ELEMENTS};"):
            call()


def test_wrong_arguments_are_refused_by_name():
    rows = torch.zeros(3, 128)
    packed = quantize(rows, 4)
    with pytest.raises(InputError, match="16 bits"):
        packed_bytes(64, 16)
    with pytest.raises(InputError, match=r"71 bytes .* of 4 bits: 64 elements take 36"):
        dequantize(packed[:, :71], 4, torch.float32)
    with pytest.raises(InputError, match=r"out is torch.uint8 \[3, 72\]; it must be torch.uint8 \[3, 136\]"):
        quantize(rows, 8, packed)
    with pytest.raises(InputError, match="out is torch.float32"):
        dequantize(packed, 4, torch.bfloat16, torch.zeros(3, 128))
    with pytest.raises(InputError, match="packed is torch.int8"):
        dequantize(packed.view(torch.int8), 4, torch.float32)


# ---- a reference that shares nothing with the module: one row, one group, one element at a time ----------------------


def decode_by_hand(row: bytes, bits: int, group: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes [G, group], scale [G] and minimum [G] of a packed row, by the module's docstring; float64."""
    groups = round(len(row) / (group * bits / 8 + 4))
    code_bytes = groups * group * bits // 8
    codes = [row[i] // 2 ** (bits * part) % 2**bits for part in range(8 // bits) for i in range(code_bytes)]
    pairs = np.frombuffer(row[code_bytes:], dtype="<f2").astype(np.float64)
    return np.array(codes, dtype=np.float64).reshape(groups, group), pairs[0::2], pairs[1::2]


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round float64 to float32 and then to dtype, to nearest even; return float64."""
    values = values.astype(np.float32)
    if dtype == torch.bfloat16:
        upper = values.view(np.uint32).astype(np.uint64)
        upper = (upper + 0x7FFF + (upper >> 16 & 1)) >> 16 << 16
        values = upper.astype(np.uint32).view(np.float32)
    elif dtype == torch.float16:
        values = values.astype(np.float16)
    return values.astype(np.float64)


def check_rows(rows: torch.Tensor, bits: int, dtype: torch.dtype, group: int = 64) -> None:
    """Check that codes, parameters and values of finite rows [N, n] are as the module's docstring says."""
    levels = 2**bits - 1
    packed = quantize(rows, bits, group=group)
    restored = dequantize(packed, bits, dtype, group=group)
    assert restored.dtype == dtype and restored.shape == rows.shape
    assert torch.isfinite(restored).all()
    for x, row, y in zip(rows.double().numpy(), packed.numpy(), restored.double().numpy()):
        codes, scale, minimum = decode_by_hand(row.tobytes(), bits, group)
        x, y = x.reshape(codes.shape), y.reshape(codes.shape)
        # The bytes mean what the docstring says: bit for bit, since code · scale + minimum is exact in float64.
        s, m = scale[:, None], minimum[:, None]
        np.testing.assert_array_equal(y, rounded(codes * s + m, dtype))
        x = np.clip(x, -limit(bits), limit(bits))
        lowest, highest = x.min(1), x.max(1)
        below = np.array([largest_half_not_above(v) for v in lowest])
        np.testing.assert_array_equal(minimum, below)
        # Scale: the nearest float16 (one float32 rounding away at most from a tie between two).
        exact = (highest - minimum) / levels
        spacing = np.maximum(2.0**-24, 2.0 ** (np.floor(np.log2(np.maximum(exact, 2.0**-30))) - 10))
        assert (abs(scale - exact) <= spacing / 2 * (1 + 2.0**-10)).all()
        bound = ((highest - lowest) + abs(lowest) * 2.0**-10 + 2.0**-24) / levels * (1 + 2.0**-10) + 2.0**-25
        assert (scale <= bound).all()
        # Codes are nearest, and no code had to be cut off by more than the subnormal scale's own rounding.
        cut = levels * 2.0**-25
        assert (abs(codes * s + m - x) <= np.maximum(s * (0.5 + 2.0**-14), cut)).all()
        u = ROUNDOFF[dtype] + 2.0**-24
        tiny = 2.0**-25 if dtype == torch.float16 else 0.0
        assert (abs(y - x) <= np.maximum(s * (0.5 + 2.0**-14), cut) + u * abs(y) * (1 + 2.0**-7) + tiny).all()


def largest_half_not_above(value: float) -> float:
    half = np.float16(value)
    if float(half) > value:
        half = np.nextafter(half, np.float16(-np.inf))
    return float(half)


def to(dtype: torch.dtype, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    values=hnp.arrays(np.float32, (2, 128), elements=st.floats(width=32, allow_nan=False), fill=st.just(np.float32(1))),
    bits=st.sampled_from(BITS),
    into=st.sampled_from(DTYPES),
)
def test_any_finite_or_infinite_values(values, bits, into):
    check_rows(torch.from_numpy(values), bits, into)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), spread=st.floats(-30, 20), offset=st.floats(-30, 17),
    sign=st.sampled_from((-1, 0, 1)), dtype=st.sampled_from(DTYPES), into=st.sampled_from(DTYPES),
    bits=st.sampled_from(BITS), groups=st.integers(1, 5), group=st.sampled_from((64, 64, 48, 40, 32, 17, 8, 6, 1)),
)  # fmt: skip
def test_error_bound_over_magnitudes(seed, spread, offset, sign, dtype, into, bits, groups, group):
    """Groups have any spread and any distance from zero, including float16's subnormals."""
    noise = np.random.default_rng(seed).standard_normal((3, row_unit(bits, group) * groups))
    rows = to(dtype, noise * 2.0**spread + sign * 2.0**offset)
    check_rows(rows, bits, into, group)


@settings(max_examples=100, deadline=None)
@given(
    head_dim=st.sampled_from((8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 192)), heads=st.integers(1, 4),
    bits=st.sampled_from(BITS), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_no_group_spans_two_heads(head_dim, heads, bits, seed):
    """Heads differ much in size; each is unpacked as if alone, and the bytes are those counted."""
    shape = ModelShape("heads", "opt", 1, heads * head_dim, heads, heads, head_dim, 64, 100, 64)
    generator, group = np.random.default_rng(seed), shape.kv_group
    values = generator.standard_normal((3, 2 * heads, head_dim)) * 10.0 ** generator.integers(-2, 3, (1, 2 * heads, 1))
    rows = torch.from_numpy(values.astype(np.float32)).flatten(1)
    packed = quantize(rows, bits, group=group)
    restored = dequantize(packed, bits, torch.float32, group=group).view(3, 2 * heads, head_dim).numpy()
    assert group == group_of_heads(head_dim)
    for head in range(2 * heads):
        alone = round_trip(values[:, head].astype(np.float32), bits, group)
        np.testing.assert_array_equal(restored[:, head], alone)
    stored, elements = Bits(kv=bits).element_bytes(4, group).kv, 2 * heads * head_dim
    assert packed.shape[1] == shape.kv_token_bytes(stored) == elements * bits / 8 + elements / group * 4


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(-12, 17), shift=st.floats(-1, 1), bits=st.sampled_from(BITS))
@example(seed=0, spread=0.0, shift=0.0, bits=8)
def test_quantising_again_gives_the_same_bytes(seed, spread, shift, bits):
    """The module promises it for float32 elements of both signs and a scale of 2**-16 or more."""
    noise = np.random.default_rng(seed).standard_normal((4, 192)) + shift
    packed = quantize(to(torch.float32, noise * 2.0**spread), bits)
    restored = dequantize(packed, bits, torch.float32)
    again = quantize(restored, bits)
    for row, row_again in zip(packed.numpy(), again.numpy()):
        first, second = decode_by_hand(row.tobytes(), bits), decode_by_hand(row_again.tobytes(), bits)
        for codes, scale, minimum, *theirs in zip(*first, *second):
            if scale >= 2.0**-16 and minimum <= 0 <= minimum + scale * codes.max():
                assert (theirs[0] == codes).all() and theirs[1:] == [scale, minimum]


def restored_group(bits, columns: int | slice, value: float) -> torch.Tensor:
    """Unpack columns 64 to 127 with ``columns`` of them set to ``value``; neighbours must not change."""
    rows = torch.randn(2, 192)
    clean = dequantize(quantize(rows, bits), bits, torch.float32)
    rows[1, columns] = value
    restored = dequantize(quantize(rows, bits), bits, torch.float32)
    group = restored[1, 64:128].clone()
    restored[1, 64:128] = clean[1, 64:128]
    assert torch.equal(restored, clean)
    return group


@pytest.mark.parametrize("bits", BITS)
def test_a_nan_spoils_its_own_group_alone(bits):
    assert restored_group(bits, 70, torch.nan).isnan().all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("work", [64, 300, 2000, 2**20])
def test_strided_pools_and_pieces_of_any_size(bits, work, monkeypatch):
    """Rows lie in a block pool, and source and target views have gaps; nothing outside them is changed."""
    monkeypatch.setitem(module.WORK_ELEMENTS, "cpu", work)
    generator = torch.Generator().manual_seed(bits)
    whole = torch.randn(5, 4, 3, 2, 192, generator=generator).bfloat16()
    rows = whole.transpose(1, 3)[::2, 1:, :, 1:, :128]  # [3, 1, 3, 3, 128], no axis adjacent to the next
    size = packed_bytes(128, bits)
    plain = quantize(rows.contiguous(), bits)
    for one, its_packed in zip(rows.reshape(-1, 128), plain.reshape(-1, size)):
        assert torch.equal(quantize(one, bits), its_packed)
    pool = torch.full((3, 2, 3, 4, size + 8), 77, dtype=torch.uint8)
    slots = pool[:, 1:, :, :3, 4 : 4 + size]
    assert quantize(rows, bits, slots) is slots
    assert torch.equal(slots, plain)
    restored = dequantize(plain, bits, torch.float32)
    for dtype in DTYPES:
        target = torch.full((3, 1, 4, 3, 200), -5.0, dtype=dtype)
        view = target[:, :, 1:, :, 8:136]
        assert dequantize(slots, bits, dtype, view) is view
        assert torch.equal(view, restored.to(dtype))
        view.fill_(-5.0)
        assert (target == -5.0).all()
    slots.fill_(77)
    assert (pool == 77).all()


def test_no_rows_is_no_work():
    packed = quantize(torch.zeros(0, 3, 64), 4)
    assert packed.shape == (0, 3, 36) and dequantize(packed, 4, torch.bfloat16).shape == (0, 3, 64)
