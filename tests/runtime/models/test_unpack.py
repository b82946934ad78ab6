"""Test that compiled kernels unpack each format as plain torch does, and plain torch as each tool packs."""

from pathlib import Path

import numpy as np
import packing_tools
import pytest
import torch
from packing_tools import FORMATS

from flexhybrid.core.model.packing import Header, PackedRun, Packing, default_packing
from flexhybrid.core.model.stored import packed_format
from flexhybrid.runtime.kernels import unpack as kernels
from flexhybrid.runtime.kernels.unpack import TYPES, _operands, plain_unpack, trial, typed, unpack
from flexhybrid.runtime.storage.packed import find_packed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {dtype: name for name, dtype in TYPES.items()}
FOLDER = Path("folder")


def packed_tensor(how, matrix):
    """Return a packed tensor as it is found in a file, and its values."""
    settings, pack = FORMATS[how]
    parts, values = pack(matrix)
    stored = {("experts.up" if how == "mxfp4" else "up") + ending: part for ending, part in parts.items()}
    headers = {name: Header(NAMES[part.dtype], tuple(part.shape), "file") for name, part in stored.items()}
    packed = packed_format({"quantization_config": settings}, FOLDER / "config.json")
    assert packed
    reads = {name: (lambda part=part: part) for name, part in stored.items()}
    (tensor,) = find_packed(FOLDER, headers, reads, packed)[0].values()
    return tensor, values


@pytest.mark.parametrize("size", [(48, 96), (40, 64), (24, 1056)], ids=str)
@pytest.mark.parametrize("how", FORMATS)
def test_unpacked_values_are_those_that_each_tool_packs(how, size):
    """40 rows and 1,056 columns end in partial blocks, 24 rows in a partial tile, 1,056 columns in a second tile."""
    torch.manual_seed(0)
    matrix = torch.randn(2, size[1], size[0]) if how == "mxfp4" else torch.randn(size)
    tensor, values = packed_tensor(how, matrix)
    assert torch.equal(tensor.read(), values)


@pytest.mark.parametrize("how", ["fp8 blocks", "fp8 rows", "int8 rows", "int4 groups", "int4 zeros"])
def test_odd_rows(how):
    torch.manual_seed(0)
    tensor, values = packed_tensor(how, torch.randn(37, 80))
    assert torch.equal(tensor.read(), values)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_compiled_kernels_give_the_bits_of_plain_torch(dtype):
    for packing, operands, expected in trial(torch.device("cpu"), dtype):
        whole = torch.full((2, 30, 160), 7.0, dtype=dtype)
        kernels._unpack_compiled(packing, operands, whole[:, :24], map)
        assert torch.equal(whole[:, :24].contiguous().view(torch.uint8), expected.view(torch.uint8)), packing.format
        assert (whole[:, 24:] == 7).all()


def e4m3(byte):
    """Return the value of an 8-bit float by its definition (OCP 8-bit Floating Point 1.0)."""
    sign, exponent, mantissa = (-1.0 if byte & 128 else 1.0), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0**-126, 2.0**-149, 2.0**119, 3.0e38, 1 / 3])
def test_every_byte_of_fp8_with_extreme_scales(scale):
    m = default_packing(Packing("block", 3, 256, 8, (2, 100)), "F32", False, False)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(3, 1)
    scales = torch.full(m.grid, scale, dtype=torch.float32)
    parts = typed(PackedRun(m), [codes.view(-1), scales.view(-1).view(torch.uint8)])
    with np.errstate(over="ignore"):
        expected = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64).float() * scale
    for dtype in DTYPES[:2]:
        out = torch.empty(1, 3, 256, dtype=dtype)
        unpack(m, parts, out)
        for row in out[0]:
            assert torch.equal(row.isnan(), expected.isnan())
            assert torch.equal(row.nan_to_num(), expected.to(dtype).nan_to_num())


def test_every_byte_and_scale_of_mxfp4():
    """Each scale but 255 with all 256 bytes: 2**(scale - 127) times 4-bit floats; float32's range is not left."""
    m = default_packing(Packing("mxfp4", 255, 512, 4, (1, 32)), "F32", False, False)
    blocks = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.int32).to(torch.uint8)[:, None].repeat(1, 16)
    parts = typed(PackedRun(m), [blocks.view(-1), scales.view(-1)])
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    row = np.array([[values[byte & 15], values[byte >> 4]] for byte in range(256)]).ravel()
    expected = torch.from_numpy(row * 2.0 ** (np.arange(255) - 127.0)[:, None])
    for dtype in DTYPES[:2]:
        out = torch.empty(1, 255, 512, dtype=dtype)
        unpack(m, parts, out)
        assert torch.equal(out[0].view(torch.uint8), expected.float().to(dtype).view(torch.uint8))
        plain = torch.empty_like(out)
        plain_unpack(m, _operands(m, parts), plain)
        assert torch.equal(out.view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["grouped", "gptq", "awq"])
def test_every_code_and_zero_point(form, bits):
    """Codes and zero points of all values, by integer arithmetic."""
    if form == "awq" and bits == 8:
        return
    rows, cols, group, top = 24, 2**bits * 2, 2**bits // 2, 2**bits
    codes = (torch.arange(cols)[None, :] + torch.arange(rows)[:, None] * 5) % top
    zeros = (torch.arange(rows)[:, None] * 11 + torch.arange(cols // group)[None, :] * 3) % top
    scales = (torch.arange(rows)[:, None] + torch.arange(cols // group)[None, :] / 8 - 3).half()
    m = Packing(form, rows, cols, bits, (1, group), zero_offset=int(form == "gptq"))
    m = default_packing(m, "F16", True, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7] if form == "awq" else None
    if form == "grouped":
        parts = [packing_tools.words(codes, bits), scales, packing_tools.words(zeros.t(), bits).t()]
    elif form == "gptq":
        parts = [packing_tools.words(codes, bits).t(), packing_tools.words(zeros.t(), bits), scales.t()]
    else:
        parts = [packing_tools.words(codes.t(), bits, order), packing_tools.words(zeros.t(), bits, order), scales.t()]
    run = PackedRun(m)
    views = typed(run, [part.contiguous().view(-1).view(torch.uint8) for part in parts])
    expected = (codes - (zeros + m.zero_offset).repeat_interleave(group, 1)) * scales.double().repeat_interleave(
        group, 1
    )
    for dtype in DTYPES:
        out = torch.empty(1, rows, cols, dtype=dtype)
        unpack(m, views, out)
        assert torch.equal(out[0].double(), expected.to(dtype).double())
