"""The arithmetic of the Triton kernel that unpacks weights against plain torch, bit for bit, in Triton's interpreter.

Run by test_interpreted, as interpreted_quantize.
"""

import pytest
import torch
from interpreted import hasten

from flexhybrid.runtime.kernels import unpack_triton
from flexhybrid.runtime.kernels.unpack import plain_unpack, trial

CPU = torch.device("cpu")
hasten(unpack_triton._code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_codes(dtype):
    """Outputs are parts of larger tensors, whose other elements stay."""
    for packing, operands, expected in trial(CPU, dtype):
        whole = torch.full((2, 30, 160), 7.0, dtype=dtype)
        unpack_triton.unpack(packing, operands, whole[:, :24])
        assert torch.equal(whole[:, :24].contiguous().view(torch.uint8), expected.view(torch.uint8)), packing.format
        assert (whole[:, 24:] == 7).all()


def test_every_byte_of_fp8_and_every_scale_of_mxfp4():
    for packing, operands, expected in trial(CPU, torch.float32):
        if packing.format not in ("block", "mxfp4"):
            continue
        codes = operands.codes.view(torch.uint8)
        codes.copy_(torch.arange(codes.numel(), dtype=torch.int64).view(codes.shape) % 256)
        scales = torch.arange(255, dtype=torch.int32)
        scales = torch.where(scales == 0, 1 << 22, scales << 23).view(torch.float32)
        operands.scales.copy_(scales.repeat(4)[: operands.scales.numel()].view(operands.scales.shape))
        plain_unpack(packing, operands, expected)
        out = torch.empty_like(expected)
        unpack_triton.unpack(packing, operands, out)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_a_wrong_kernel_is_noticed(monkeypatch):
    unpack_triton.prove(CPU)
    monkeypatch.setattr(unpack_triton, "OF_FORMAT", {})
    with pytest.raises(ArithmeticError, match="mxfp4"):
        unpack_triton.prove(CPU)
