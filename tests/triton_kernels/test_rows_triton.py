"""Test norms, rotations and activations by Triton: compiled, and chosen at run time."""

import pytest
import torch

from flexhybrid.runtime.kernels import norms

triton = pytest.importorskip("triton")

from compiled import POINTERS, compile_for, registers_and_stack  # noqa: E402

from flexhybrid.runtime.kernels import rows_triton  # noqa: E402


@pytest.mark.parametrize("architecture, dtype", [(80, "bfloat16"), (90, "float32"), (90, "bfloat16")])
def test_the_kernels_compile_without_spilling_and_contract_nothing(architecture, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    own = POINTERS[dtype]
    rows = dict.fromkeys(("rows", "added", "weight", "bias", "later", "normed", "cos", "sin", "gate", "up"), own)
    types = rows | dict.fromkeys(("rows_stride", "added_stride", "cos_stride", "sin_stride", "count"), "i64")
    heads = {"FIRST": 0, "COUNT": 8, "OTHER": 2048, "ALL": 40, "D": 128, "HEADS": 64, "WIDTH": 64}
    cases = (
        (rows_triton._norm_kernel, {"N": 8192, "WIDTH": 8192, "ADDS": True, "BIASES": False}, {"num_warps": 16}),
        (rows_triton._norm_kernel, {"N": 7168, "WIDTH": 8192, "ADDS": True, "BIASES": True}, {"num_warps": 16}),
        (rows_triton._norm_kernel, {"N": 80, "WIDTH": 128, "ADDS": False, "BIASES": False}, {"num_warps": 1}),
        (rows_triton._rotate_kernel, heads, {}),
        (rows_triton._gate_kernel, {"ELEMENTS": rows_triton.ELEMENTS}, {}),
    )
    for kernel, constants, more in cases:
        used = {name: kind for name, kind in (types | {"eps": "fp32"}).items() if name in kernel.arg_names}
        code = compile_for(kernel, used, constants, rows_triton.OPTIONS | more, architecture).asm
        registers, stack = registers_and_stack(code["cubin"], tmp_path / "kernel.cubin")
        assert stack == 0 and registers <= 128, (kernel, registers, stack)
        assert "fma.rn.f32" not in code["ptx"] and "div.full" not in code["ptx"]


def test_kernels_that_fail_are_not_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    norms._proven_kernels.cache_clear()
    monkeypatch.setattr(rows_triton, "norm", lambda *arguments: 1 / 0)
    try:
        with pytest.warns(UserWarning, match="plain torch, slower than Triton's kernels: division by zero$") as warned:
            assert norms._proven_kernels(torch.device("cpu"), torch.float32) is None
            assert norms._proven_kernels(torch.device("cpu"), torch.float32) is None
        assert len(warned) == 1
    finally:
        norms._proven_kernels.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", POINTERS)
def test_a_gpu_gives_what_plain_torch_does(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    norms.prove(rows_triton, device, getattr(torch, dtype))
    rows = torch.randn(64, 8192, device=device).to(getattr(torch, dtype))
    wanted = norms.rms_norm(rows.cpu(), rows[0].cpu(), 1e-5)
    assert norms.kernels_for(rows) is rows_triton
    torch.testing.assert_close(norms.rms_norm(rows, rows[0], 1e-5).cpu(), wanted, rtol=norms.CLOSE[rows.dtype], atol=0)
