"""Test the Triton kernels of the quantiser: their compiled form, and on a GPU."""

import re
import sys
from itertools import product

import pytest
import torch

from flexhybrid.runtime.kernels import quantize as plain
from flexhybrid.runtime.kernels.quantize import packed_bytes

triton = pytest.importorskip("triton")

from compiled import POINTERS, compile_for, registers_and_stack  # noqa: E402

from flexhybrid.runtime.kernels import quantize_triton  # noqa: E402

BITS = (8, 4, 2, 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compiled(kernel, dtype: torch.dtype, bits: int, wide: bool, architecture: int):
    """Return the kernel as _launch compiles it, for a GPU that need not exist."""
    constants = {"BITS": bits, "GROUP": 64, "UNIT": 32, "WIDE": wide, "UNITS": quantize_triton.UNITS}
    if "LIMIT" in kernel.arg_names:
        constants["LIMIT"] = plain.LIMIT
    types = {
        "values": pointer_to(dtype), "codes": "*u8", "parameters": "*fp16", "values_stride": "i64",
        "packed_stride": "i64", "part": "i32",
    }  # fmt: skip
    return compile_for(kernel, types, constants, quantize_triton.OPTIONS, architecture)


def pointer_to(dtype: torch.dtype) -> str:
    return POINTERS[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("architecture, wide", [(80, False), (90, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_variant_compiles_to_exact_and_wide_instructions(dtype, architecture, wide, tmp_path, monkeypatch):
    """Each number of bits is tried with two dtypes, and each dtype and number of bits on each architecture."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = (quantize_triton._quantize_kernel, quantize_triton._dequantize_kernel)
    half = (DTYPES.index(dtype) + wide) % 2
    for kernel, bits in product(kernels, BITS[half::2]):
        if (BITS.index(bits) + DTYPES.index(dtype)) % 3 == 0:
            continue
        code = compiled(kernel, dtype, bits, wide, architecture).asm
        ptx = code["ptx"]
        registers, stack = registers_and_stack(code["cubin"], tmp_path / "kernel.cubin")
        assert stack == 0 and registers <= 128  # 512 threads a multiprocessor at least
        # What the bits hang on: subnormals stay, nothing is contracted, divisions and conversions round to nearest.
        assert ".ftz" not in ptx and "fma" not in ptx and "div.full" not in ptx and "div.approx" not in ptx
        if kernel is quantize_triton._quantize_kernel:
            assert "div.rn.f32" in ptx and "cvt.rn.f16.f32" in ptx
        elif dtype != torch.float32:
            assert re.search(rf"cvt\.rn\.{pointer_to(dtype)[1:].replace('fp', 'f')}", ptx)
        # The wide side of each kernel moves 16 bytes at a time, the codes 8 (8 elements a thread).
        access = "ld" if kernel is quantize_triton._quantize_kernel else "st"
        assert (f"{access}.global.v4.b32" in ptx) == wide
        assert ("st.global.v2.b32" if access == "ld" else "ld.global.v2.b32") in ptx or not wide


def test_without_triton_plain_torch_works_after_one_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "flexhybrid.runtime.kernels.quantize_triton", None)
    monkeypatch.delattr("flexhybrid.runtime.kernels.quantize_triton")
    monkeypatch.setattr(plain, "KERNELS", {"cpu": "quantize_triton"})
    plain._proven_kernels.cache_clear()
    rows = torch.randn(4, 128)
    wanted = torch.empty(4, packed_bytes(128, 8), dtype=torch.uint8)
    plain._quantize(rows, 8, wanted)
    try:
        with pytest.warns(UserWarning, match="plain torch, slower than Triton's kernels: import of") as warned:
            assert torch.equal(plain.quantize(rows, 8), wanted)
            assert torch.equal(plain.quantize(rows, 8), wanted)
        assert len(warned) == 1
    finally:
        plain._proven_kernels.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_bits_of_plain_torch(dtype, bits):
    device = torch.device("cuda", torch.cuda.current_device())
    assert (
        plain._proven_kernels("quantize_triton", device, dtype, bits, 64) is quantize_triton
    )  # else it has warned, and why
    generator = torch.Generator().manual_seed(bits)
    magnitudes = 2.0 ** torch.randint(-20, 17, (7, 16, 1), generator=generator)
    whole = (torch.randn(7, 16, 4096 + 64, generator=generator) * magnitudes).to(dtype)
    there = whole.cuda()
    some = slice(None, None, 2), slice(3, None), slice(64, None)
    for part in ((..., slice(4096)), (...,), some, (..., slice(1, 65)), (0, 0)):
        packed, rows = plain.quantize(whole[part], bits), there[part]
        pool = torch.zeros(*packed.shape[:-1], packed.shape[-1] + 6, dtype=torch.uint8, device=device)
        ours, apart, of_torch = plain.quantize(rows, bits), pool[..., 2:-4], torch.empty_like(packed, device=device)
        assert plain.quantize(rows, bits, apart) is apart
        plain._quantize(rows, bits, of_torch)
        restored = plain.dequantize(packed, bits, dtype)
        for one in (ours, apart, of_torch):
            assert torch.equal(one.cpu(), packed)
            assert torch.equal(plain.dequantize(one, bits, dtype).cpu(), restored)


@pytest.mark.cuda
def test_rows_beyond_the_reach_of_32_bits():
    """The last row begins at element 2**31."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    rows = torch.zeros(2**15 + 1, 2**16, dtype=torch.bfloat16, device="cuda")
    rows[-1] = torch.randn(2**16, device="cuda").bfloat16()
    packed = plain.quantize(rows, 8)
    assert torch.equal(packed[-1], plain.quantize(rows[-1], 8)) and not packed[:-1].any()
    del rows
    restored = plain.dequantize(packed, 8, torch.bfloat16)
    assert torch.equal(restored[-1], plain.dequantize(packed[-1], 8, torch.bfloat16)) and not restored[:-1].any()
