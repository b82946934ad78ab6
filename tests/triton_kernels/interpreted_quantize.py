"""The Triton kernels' arithmetic against plain torch, bit for bit, in Triton's interpreter: numpy, no GPU.

Run by test_interpreted in a process of its own: TRITON_INTERPRET must be set before triton is first imported, and a
process that interprets cannot compile.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from interpreted import hasten

from flexhybrid.runtime.kernels import quantize as plain
from flexhybrid.runtime.kernels import quantize_triton
from flexhybrid.runtime.kernels.quantize import LIMIT, limit, packed_bytes, row_unit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (8, 4, 2, 1)
EDGES = (
    *(0.0, -0.0, 1e-45, -1e-40, 2.0**-24, 2.0**-25, -(2.0**-25), 1 / 3),
    *(LIMIT, -LIMIT, 65472.0, -1e5, 3e38, np.inf, -np.inf),
)

PROOF = 4  #: calls of kernels: two variants, each both ways

hasten(quantize_triton._elements)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and of branches not taken


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(rows: torch.Tensor, bits: int, into: torch.dtype, group: int = 64) -> None:
    """Check rows [R, n] without NaN; kernels and plain torch both write between guards, which must stay."""
    size = packed_bytes(rows.shape[1], bits, group)
    slots = [torch.full((len(rows), size + 4), 77, dtype=torch.uint8) for _ in range(2)]
    plain._quantize(rows, bits, slots[0][:, 2:-2], group)
    quantize_triton.quantize(rows, bits, slots[1][:, 2:-2], group, limit(bits))
    assert torch.equal(*slots)
    values = [torch.full((len(rows), rows.shape[1] + 16), -5.0, dtype=into) for _ in range(2)]
    plain._dequantize(slots[0][:, 2:-2], bits, values[0][:, 8:-8], group)
    quantize_triton.dequantize(slots[0][:, 2:-2], bits, values[1][:, 8:-8], group)
    assert same_bits(*values)


@settings(max_examples=10, deadline=None)
@given(
    values=hnp.arrays(
        np.float32, st.tuples(st.integers(1, 2), st.sampled_from((64, 128, 192))),
        elements=st.sampled_from(EDGES) | st.floats(width=32, allow_nan=False), fill=st.sampled_from(EDGES),
    ),
    dtype=st.sampled_from(DTYPES), into=st.sampled_from(DTYPES), bits=st.sampled_from(BITS),
)  # fmt: skip
def test_any_finite_or_infinite_values(values, dtype, into, bits):
    check(torch.from_numpy(values).to(dtype), bits, into)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), spread=st.floats(-150, 20), offset=st.floats(-150, 17),
    sign=st.sampled_from((-1, 0, 1)), dtype=st.sampled_from(DTYPES), into=st.sampled_from(DTYPES),
    bits=st.sampled_from(BITS), groups=st.integers(1, 40), group=st.sampled_from((64, 64, 48, 40, 32, 12, 6)),
)  # fmt: skip
@example(seed=0, spread=0.0, offset=0.0, sign=0, dtype=torch.bfloat16, into=torch.bfloat16, bits=4, groups=33, group=64)
@example(seed=0, spread=0.0, offset=0.0, sign=1, dtype=torch.bfloat16, into=torch.bfloat16, bits=1, groups=40, group=40)
def test_magnitudes_and_row_sizes(seed, spread, offset, sign, dtype, into, bits, groups, group):
    unit = row_unit(bits, group)
    noise = np.random.default_rng(seed).standard_normal((1, -(-group * groups // unit) * unit))
    rows = torch.from_numpy((noise * 2.0**spread + sign * 2.0**offset).astype(np.float32))
    check(rows.to(dtype), bits, into, group)


@pytest.mark.parametrize("bits, dtype", [*zip(BITS, DTYPES), *zip(BITS[::-1], DTYPES)])
def test_all_codes_and_parameters(bits, dtype):
    """Bytes that packing never writes unpack alike too: negative, subnormal, infinite and NaN scales."""
    generator = torch.Generator().manual_seed(bits)
    packed = torch.randint(0, 256, (16, packed_bytes(64 * 3, bits)), dtype=torch.uint8, generator=generator)
    wanted, ours = torch.empty(2, 16, 192, dtype=dtype)
    plain._dequantize(packed, bits, wanted)
    quantize_triton.dequantize(packed, bits, ours, 64)
    assert wanted.isnan().any() and torch.equal(ours.isnan(), wanted.isnan())
    assert same_bits(ours[~ours.isnan()], wanted[~wanted.isnan()])


@pytest.mark.parametrize("place, bits", [(0, 8), (31, 1), (70, 2), (191, 4), (191, 1)])
def test_a_nan_spoils_its_own_group_alone(bits, place):
    rows = torch.randn(2, 192, generator=torch.Generator().manual_seed(place))
    clean, packed = torch.empty(2, 2, packed_bytes(192, bits), dtype=torch.uint8)
    plain._quantize(rows, bits, clean)
    expected, restored = torch.empty(2, 2, 192)
    plain._dequantize(clean, bits, expected)
    rows[1, place] = torch.nan
    quantize_triton.quantize(rows, bits, packed, 64, limit(bits))
    quantize_triton.dequantize(packed, bits, restored, 64)
    group = slice(place // 64 * 64, place // 64 * 64 + 64)
    assert restored[1, group].isnan().all()
    restored[1, group] = expected[1, group]
    assert torch.equal(restored, expected)


@pytest.fixture
def chosen(monkeypatch):
    """Return quantize and dequantize as on a GPU, with the proof at first use, and the calls that the kernels
    served."""
    served = []
    for name in ("quantize", "dequantize"):
        kernel = getattr(quantize_triton, name)
        monkeypatch.setattr(quantize_triton, name, lambda *args, kernel=kernel: (served.append(kernel), kernel(*args)))
    monkeypatch.setattr(plain, "KERNELS", {"cpu": "quantize_triton"})
    trial_rows = plain._trial_rows
    monkeypatch.setattr(
        plain, "_trial_rows", lambda *setting: trial_rows(*setting)[[0, 20, -1]]
    )  # the interpreter is slow
    plain._proven_kernels.cache_clear()
    yield served
    plain._proven_kernels.cache_clear()


@pytest.mark.parametrize("bits", [8, 4])
def test_strided_pools(bits, chosen, recwarn):
    """Axes merge or do not, and rows have gaps between them; nothing outside is changed."""
    generator = torch.Generator().manual_seed(bits)
    whole = torch.randn(3, 2, 3, 2, 192, generator=generator).bfloat16()
    for rows in (
        whole.transpose(1, 3)[::2, :, 1:, 1:, :128],  # [2, 2, 2, 1, 128], no axis adjacent to the next
        whole[:1, :1, :, :, :128],  # [1, 1, 3, 2, 128], all axes one
        whole[1, 1, 0, 1],
        whole[0, 0, 0, :1].expand(3, 192),
    ):
        size = packed_bytes(rows.shape[-1], bits)
        wanted = torch.empty(*rows.shape[:-1], size, dtype=torch.uint8)
        plain._quantize(rows, bits, wanted)
        pool = torch.full((*rows.shape[:-1], size + 8), 77, dtype=torch.uint8)
        slots = pool[..., 4:-4]
        assert plain.quantize(rows, bits, slots) is slots and torch.equal(slots, wanted)
        restored = torch.empty(rows.shape)
        plain._dequantize(wanted, bits, restored)
        target = torch.full((*rows.shape[:-1], rows.shape[-1] + 16), -5.0)
        view = target[..., 8:-8]
        assert plain.dequantize(slots, bits, torch.float32, view) is view and torch.equal(view, restored)
        view.fill_(-5.0)
        slots.fill_(77)
        assert (target == -5.0).all() and (pool == 77).all()
    assert len(chosen) == 2 * PROOF + 4 * 2  # one of each dtype, then all four views
    assert not [w for w in recwarn if "plain torch" in str(w.message)]


def test_one_launch_for_all_rows_that_are_evenly_spaced(monkeypatch):
    launches = []
    monkeypatch.setattr(quantize_triton, "_launch", lambda *args, **constants: launches.append(args))
    pool = torch.zeros(6, 16, 512)
    packed = torch.zeros(6, 16, packed_bytes(512, 8), dtype=torch.uint8)
    quantize_triton.quantize(pool, 8, packed, 64, LIMIT)
    quantize_triton.quantize(torch.zeros(96, 1024)[:, :512], 8, packed.flatten(0, 1), 64, LIMIT)
    assert len(launches) == 2


def test_values_with_gaps_inside_a_row_and_no_values_go_to_plain_torch(chosen):
    rows = torch.randn(128, 3).t()
    assert torch.equal(plain.quantize(rows, 8), plain.quantize(rows.contiguous(), 8))
    assert plain.dequantize(plain.quantize(torch.zeros(0, 3, 64), 4), 4, torch.float32).shape == (0, 3, 64)
    assert len(chosen) == PROOF + 1  # the rows without gaps


def other_bytes(rows, bits, out, group, limit):
    plain._quantize(rows, bits, out)
    out[0, 0] ^= 1


def raises(*args):
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore lines")


@pytest.mark.parametrize(
    "name, wrong, told",
    [
        ("quantize", raises, "Failed to find C compiler"),
        ("dequantize", raises, "Failed to find C compiler"),
        ("quantize", other_bytes, "on trial rows its results differ"),
        ("dequantize", lambda packed, bits, out, group: out.zero_(), "on trial rows its results differ"),
    ],
)
def test_kernels_that_fail_or_differ_are_not_used(chosen, monkeypatch, name, wrong, told):
    monkeypatch.setattr(quantize_triton, name, wrong)
    rows = torch.randn(4, 128)
    wanted = torch.empty(4, packed_bytes(128, 4), dtype=torch.uint8)
    plain._quantize(rows, 4, wanted)
    with pytest.warns(UserWarning, match=f"plain torch, slower than Triton's kernels: [^\n]*{told}[^\n]*$") as warned:
        assert torch.equal(plain.quantize(rows, 4), wanted)
        plain.dequantize(wanted, 4, torch.float32)
        plain.quantize(rows, 4)
    assert len([w for w in warned if w.category is UserWarning]) == 1  # the interpreter's numpy warns too
