"""Test the compiled kernels for rows against plain torch and numpy, bit for bit, on one and several threads."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.kernels import quantize as plain
from flexhybrid.runtime.kernels.compiled import spread
from flexhybrid.runtime.kernels.quantize import LIMIT, limit, packed_bytes, row_unit
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.verbs.moving import put_heads, put_tokens, take_rows

kernels = pytest.importorskip("flexhybrid.runtime.kernels.rows_numba", reason="numba is not installed")
FAR_BYTES = importlib.import_module("flexhybrid.runtime.kernels.compiled.rows").FAR_BYTES
converts = pytest.mark.skipif(not compiled.converts_float16(), reason="this processor does not convert float16")
EDGES = (0.0, -0.0, 1e-45, -1e-40, 2.0**-24, -(2.0**-25), 1 / 3, LIMIT, -LIMIT, -1e5, 3e38, np.inf, -np.inf, np.nan)
DTYPES = tuple(kernels.KINDS)


@pytest.fixture(scope="module", autouse=True)
def shared_from_the_first_byte():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "BYTES_A_THREAD", 1)
        yield


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(3) as workers:
        yield workers


@contextmanager
def without_numba():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "has_numba", lambda: False)
        yield


def view_inside(shape: tuple[int, ...], dtype: torch.dtype, gaps: tuple[int, ...], fill: float) -> tuple:
    """Return a filled tensor, and a view of it with gaps between neighbours on each axis but the last."""
    whole = torch.full([n + gap for n, gap in zip(shape, gaps, strict=True)], fill).to(dtype)
    return whole, whole[tuple(slice(gap // 2, gap // 2 + n) for n, gap in zip(shape, gaps, strict=True))]


@converts
@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    leading=st.lists(st.integers(1, 4), max_size=3),
    groups=st.integers(1, 5),
    group=st.sampled_from((64, 64, 64, 48, 40, 17, 8, 6, 1)),
    bits=st.sampled_from((8, 4, 2, 1)),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 3),
    spread_by=st.floats(-12, 12),
)
def test_packing_gives_the_bytes_of_plain_torch(pool, seed, leading, groups, group, bits, dtype, threads, spread_by):
    """Rows have any strides and magnitudes, and edge values; nothing outside of the rows is changed."""
    generator = np.random.default_rng(seed)
    shape = (*leading, row_unit(bits, group) * groups)
    values = generator.standard_normal(shape) * 2.0 ** generator.uniform(-abs(spread_by), spread_by + 13)
    places = generator.random(shape) < 0.02
    values[places] = generator.choice(EDGES, int(places.sum()))
    gaps = (*generator.integers(0, 3, len(leading)).tolist(), 2 * int(generator.integers(0, 3)))
    _, rows = view_inside(shape, dtype, gaps, 7.0)
    rows.copy_(torch.from_numpy(values.astype(np.float32)))
    size = packed_bytes(shape[-1], bits, group)
    wanted, (whole, packed) = (
        torch.empty(*leading, size, dtype=torch.uint8),
        view_inside((*leading, size), torch.uint8, (*gaps[:-1], 4), 77),
    )
    plain._quantize(rows, bits, wanted, group)
    with torch_threads(threads):
        kernels.quantize(rows, bits, packed, group, limit(bits), pool.map)
    restored = torch.empty(shape)
    plain._dequantize(wanted, bits, restored, group)
    known = ~restored.isnan()
    codes = shape[-1] * bits // 8
    if known.all():
        assert torch.equal(packed, wanted)
    else:  # processors differ in the codes of a NaN's group, and bytes hold codes of several groups
        ours, theirs = (of[..., codes:].contiguous().view(torch.float16) for of in (packed, wanted))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for into in DTYPES:
        target, view = view_inside(shape, into, gaps, -5.0)
        with torch_threads(threads):
            kernels.dequantize(packed, bits, view, group, pool.map)
        torch.testing.assert_close(view, restored.to(into), rtol=0, atol=0, equal_nan=True)
        view.fill_(-5.0)
        assert (target == -5.0).all()
    packed.fill_(77)
    assert (whole == 77).all()


@converts
@pytest.mark.parametrize("into", DTYPES, ids=str)
@pytest.mark.parametrize("bits", (8, 4))
def test_any_parameters_unpack_as_in_plain_torch(bits, into):
    """Parameters include infinities and every kind of NaN, which packing never writes."""
    generator = np.random.default_rng(bits)
    packed = torch.from_numpy(generator.integers(0, 256, (4000, packed_bytes(128, bits)), dtype=np.uint8))
    parameters = packed[:, -8:].view(torch.int16)
    odd = generator.random(parameters.shape) < 0.2
    kinds = np.array([0x7C00, -0x400, 0x7C01, 0x7FFF, -1, 0x7E00], np.int16)
    parameters[odd] = torch.from_numpy(generator.choice(kinds, int(odd.sum())))
    wanted, found = torch.empty(4000, 128), torch.empty(4000, 128, dtype=into)
    plain._dequantize(packed, bits, wanted, 64)
    kernels.dequantize(packed, bits, found, 64)
    assert wanted.isnan().any() and wanted.isinf().any()
    torch.testing.assert_close(found, wanted.to(into), rtol=0, atol=0, equal_nan=True)


@converts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_prove_themselves_and_serve(dtype, recwarn, monkeypatch):
    served = []
    monkeypatch.setattr(kernels, "pack", lambda *args, kernel=kernels.pack: (served.append(1), kernel(*args)))
    monkeypatch.setattr(kernels, "unpack", lambda *args, kernel=kernels.unpack: (served.append(2), kernel(*args)))
    plain._proven_kernels.cache_clear()
    rows = torch.randn(3, 128).to(dtype)
    for bits in (8, 4):
        plain.dequantize(plain.quantize(rows, bits), bits, dtype)
    assert served == 2 * [1, 2, 1, 2, 1, 2] and not recwarn.list  # twice each in the proof
    plain.quantize(torch.randn(128, 3).t(), 8)  # rows with gaps inside
    with without_numba():
        plain.quantize(rows, 8)
    assert len(served) == 12


@converts
def test_kernels_that_differ_are_not_used(monkeypatch):
    def other_bytes(rows, bits, out, group, limit):
        plain._quantize(rows, bits, out, group)
        out[0, 0] ^= 1

    monkeypatch.setattr(kernels, "quantize", other_bytes)
    plain._proven_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="slower than Numba's kernels: on trial rows its results differ"):
            packed = plain.quantize(torch.ones(2, 64), 8)
    finally:
        plain._proven_kernels.cache_clear()
    plain._quantize(torch.ones(2, 64), 8, wanted := torch.empty_like(packed))
    assert torch.equal(packed, wanted)


# ---- rows put into blocks, and taken from them


@st.composite
def stores(draw):
    """Draw tokens of each of some runs in their own blocks, groups, head size, dtype, threads and seed."""
    runs = draw(st.lists(st.integers(1, BLOCK_TOKENS), min_size=1, max_size=6))
    sizes = draw(st.integers(1, 3)), draw(st.sampled_from((1, 6, 64, 130)))
    return (
        runs,
        *sizes,
        draw(st.sampled_from((*DTYPES, torch.uint8))),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 999)),
    )


def both_ways(put, memory: torch.Tensor, threads: int) -> None:
    """Call ``put(memory)`` with and without numba, and compare."""
    with without_numba():
        put(wanted := memory.clone())
    with torch_threads(threads):
        put(memory)
    assert torch.equal(memory.view(torch.uint8), wanted.view(torch.uint8))


@settings(max_examples=60)
@given(case=stores(), head_major=st.booleans())
def test_rows_are_put_where_numpy_puts_them(pool, case, head_major):
    """Rows come from wider strips and go to a layer of a pool; blocks are int32, as in plans."""
    runs, groups, d, dtype, threads, seed = case
    generator = np.random.default_rng(seed)
    count, width = sum(runs), 2 * groups * d
    blocks = np.repeat(generator.permutation(len(runs) + 3)[: len(runs)], runs).astype(np.int32)
    first = [generator.integers(0, BLOCK_TOKENS + 1 - run) for run in runs]
    offsets = np.concatenate([at + np.arange(run) for at, run in zip(first, runs, strict=True)])
    rows = torch.from_numpy(generator.integers(0, 99, (count, width + 5))).to(dtype)[:, :width]
    block = (2, groups, BLOCK_TOKENS, d) if head_major else (BLOCK_TOKENS, width)
    layers = torch.zeros(2, len(runs) + 3, *block, dtype=dtype)
    both_ways(lambda memory: put_tokens(memory[1], rows, blocks, offsets, pool.map), layers, threads)
    if head_major:
        places = [generator.permutation(layers[0, :, 0, 0, :, 0].numel())[:count] for _ in range(groups)]
        blocks, offsets = np.divmod(np.stack(places, axis=1), BLOCK_TOKENS)
        cells = blocks, np.arange(groups)[None], offsets
        both_ways(lambda memory: put_heads(memory[1], rows, cells, pool.map), layers, threads)


@settings(max_examples=40)
@given(
    count=st.integers(0, 70),
    width=st.sampled_from((1, 6, 64, 300)),
    dtype=st.sampled_from((*DTYPES, torch.uint8)),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_rows_are_taken_from_where_numpy_takes_them(pool, count, width, dtype, threads, seed):
    generator = np.random.default_rng(seed)
    source = torch.from_numpy(generator.integers(0, 99, (50, width))).to(dtype)
    taken = generator.integers(0, 50, count).astype(np.int32)
    both_ways(
        lambda memory: take_rows(source, taken, memory, pool.map), torch.zeros(count, width, dtype=dtype), threads
    )


@pytest.mark.parametrize("offset", (0, 64, 4))
def test_more_rows_than_caches_hold_are_taken_from_where_numpy_takes_them(pool, offset):
    """Whole cache lines are written past the caches; other rows lie across two lines."""
    count = FAR_BYTES // 64 + 3
    source = torch.arange(500 * 64).to(torch.uint8).view(500, 64)
    taken = np.random.default_rng(0).integers(0, 500, count)
    memory = torch.zeros(offset + count * 64, dtype=torch.uint8)
    both_ways(lambda of: take_rows(source, taken, of[offset:].view(-1, 64), pool.map), memory, 1)


@pytest.mark.parametrize("d", (4, 16, 32))
@pytest.mark.parametrize("block, offset", [(-1, 0), (3, 0), (2, 16)])
def test_a_row_outside_of_its_memory_is_refused(block, offset, d):
    """Each layer of a pool is a memory of its own."""
    layers = torch.zeros(3, 3, 2, 1, BLOCK_TOKENS, d)
    with pytest.raises(IndexError, match="1 of 2 rows are outside the memory"):
        put_tokens(layers[1], torch.ones(2, 2 * d), np.array([0, block]), np.array([0, offset]))
    assert layers[1, 0, :, :, 0].all() and layers[1].sum() == 2 * d
    with pytest.raises(IndexError, match="1 of 1 rows"):
        take_rows(layers[1].view(-1, d), np.array([3 * 16 * 2]), torch.zeros(1, d))
    assert not layers[0].any() and not layers[2].any()


@given(count=st.integers(0, 40), threads=st.integers(1, 5), num_bytes=st.integers(0, 2**40), limit=st.integers(1, 9))
def test_threads_share_all_rows_and_as_few_take_part_as_the_bytes_are_worth(count, threads, num_bytes, limit):
    ranges = []
    with pytest.MonkeyPatch.context() as patch, torch_threads(threads):
        patch.setattr(compiled, "BYTES_A_THREAD", limit)
        spread(lambda first, end: ranges.append((first, end)), count, num_bytes, lambda *args: map(*args))
    assert [row for first, end in sorted(ranges) for row in range(first, end)] == list(range(count))
    sizes = [end - first for first, end in ranges]
    assert len(ranges) <= max(1, min(threads, num_bytes // limit)) and max(sizes) - min(sizes) <= 1


# ---- what is refused


@converts
@pytest.mark.parametrize("kernel", ["quantize", "dequantize"])
def test_packing_refuses_addresses_outside_its_memory(kernel):
    rows, packed = torch.zeros(3, 128), torch.zeros(3, packed_bytes(128, 4), dtype=torch.uint8)

    def run(rows, packed):
        if kernel == "quantize":
            kernels.quantize(rows, 4, packed, 64, LIMIT)
        else:
            kernels.dequantize(packed, 4, rows, 64)

    run(rows, packed)
    wide = torch.zeros(3, 256)[:, ::2]
    for wrong in (rows.double(), rows.int(), wide, rows.to("meta")):
        with pytest.raises(ValueError, match=f"{kernel}: (rows|packed): "):
            run(wrong, packed)
    for wrong in (packed[:2], packed[:, :-1], packed.char(), packed.float(), packed.repeat(1, 2)[:, ::2], packed[0]):
        with pytest.raises(ValueError, match=f"{kernel}: packed: "):
            run(rows, wrong)
    with pytest.raises(ValueError, match="cannot be quantised"):
        run(torch.zeros(3, 100), packed)


@pytest.mark.parametrize("which", ["target", "source"])
def test_copies_refuse_addresses_outside_their_memory(which):
    def run(pieces=None, **changed):
        ends = {name: kernels.Rows(torch.zeros(5, 4), 16, np.arange(3)) for name in ("target", "source")}
        ends[which] = ends[which]._replace(**changed)
        kernels.copy_rows(3, ends["target"], ends["source"], pieces or kernels.Pieces(16))

    run()
    for places in (np.arange(2), np.arange(4), np.zeros(0, np.int64), np.arange(3.0)):
        with pytest.raises(ValueError, match=f"copy_places: {which}: "):
            run(places=places)
    for memory in (torch.zeros(5, 4, dtype=torch.float16), torch.zeros(5, 4, device="meta"), torch.zeros(100, 0)):
        with pytest.raises(ValueError, match="copy_places: (target|source): "):
            run(memory=memory)
    for places in (np.array([0, -1, 2]), np.array([0, 5, 1])):
        with pytest.raises(IndexError, match="1 of 3 rows"):
            run(places=places)
    for pieces in (kernels.Pieces(0), kernels.Pieces(-4), kernels.Pieces(16, 0), kernels.Pieces(8, 2, -8, 8)):
        with pytest.raises(ValueError, match="copy_places: pieces: "):
            run(pieces)
