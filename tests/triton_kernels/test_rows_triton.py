"""Norms, rotations and activations by Triton: compiled, chosen, and counted."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import save_llama
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import AttentionPaths, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.kernels import norms, rotary
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.verbs import attending_in_place

triton = pytest.importorskip("triton")

from compiled import POINTERS, compile_for, registers_and_stack  # noqa: E402
from oracles import attend_table  # noqa: E402

from flexhybrid.runtime.kernels import attend_triton, rows_triton  # noqa: E402


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


# ---- launches of a layer

#: Operations that launch nothing.
SILENT = {"empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided", "detach", "alias"}


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would be given."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in (*SILENT, "_unsafe_view", "_reshape_alias", "lift_fresh"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def counted(name: str, launches: Launches, function, kernels: int = 1):
    """A kernel's stand-in: plain torch, which counts as what the kernel would be."""

    def run(*arguments):
        if _get_current_dispatch_mode() is launches:
            launches.counts[name] += kernels
        with _disable_current_modes():
            return function(*arguments)

    return run


def launches_of_a_layer(source, attention: AttentionPaths, monkeypatch, fused: bool) -> Counter[str]:
    """Of one decode step of a mini-batch in one layer, all of it on the device, in bfloat16."""
    policy = Policy(weights=Placement(device=1), cache={"kv@device": 1.0}, max_mini_batch_tokens=1000)
    problem = Problem(shape=source.shape, dtype="bfloat16", device="cpu", attention=attention)
    wave = admit(problem, policy, Workload(np.array([40, 23]), np.array([5, 5])))
    weights, launches = Weights(source.shape, source, "bfloat16", torch.device("cpu"), policy), Launches()
    engine = Engine(weights, policy, buffer_sizes(wave), num_threads=1)
    plain = {"norm": plain_norm, "rotate_": plain_rotation, "gate_": norms.gate_}
    kernels = SimpleNamespace(**{name: counted(name, launches, function) for name, function in plain.items()})
    with engine.process_settings(), monkeypatch.context() as patched:
        patched.setattr(attending_in_place, "by_numba", lambda state: not fused)
        patched.setattr(attend_triton, "launch", counted("attend", launches, attend_table.launch))
        executor = engine.executor(wave, [[5] * 40, [7] * 23], greedy_plan(2))
        for task in stream(wave):
            in_layer = (task.layer, task.iteration) == (1, 2) and task.resource == "compute"
            if not in_layer:
                executor.perform(task)
                continue
            with monkeypatch.context() as within:
                for module in (norms, rotary) if fused else ():
                    within.setattr(module, "kernels_for", lambda rows: None if torch_runs_plain() else kernels)
                with launches:
                    executor.perform(task)
    engine.close()
    weights.close()
    return launches.counts


def torch_runs_plain() -> bool:
    """Return whether a kernel's stand-in runs: its own calls are plain."""
    return _get_current_dispatch_mode() is None


def plain_norm(rows, added, weight, eps, biases=None):
    if biases:
        return norms.add_and_layer_norm_(rows, added, (weight, biases[0]), eps, biases[1])
    return norms.rms_norm(rows if added is None else rows.add_(added), weight, eps)


def plain_rotation(rows, spans, rotation):
    d = rotation[0].shape[1]
    for first, count in spans:
        rotary.rotate_(rows[:, first : first + count * d].unflatten(1, (count, d)), *rotation)


def test_a_llama_layer_needs_sixteen_launches_at_most(tmp_path, monkeypatch):
    """A layer of a decode step, all on the device; side by side and unfused it needs more than forty."""
    save_llama(tmp_path, layers=3)
    source, usual = Checkpoint(tmp_path), AttentionPaths("fused", "products", "fused")
    fused = launches_of_a_layer(source, usual._replace(in_place=True), monkeypatch, fused=True)
    plain = launches_of_a_layer(source, usual, monkeypatch, fused=False)
    assert fused["attend"] == 1 and fused["rotate_"] == 1 and fused["norm"] == 2 and fused["gate_"] == 1, fused
    assert sum(fused.values()) <= 16, fused
    assert sum(plain.values()) >= 40, plain


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", POINTERS)
def test_a_gpu_gives_what_plain_torch_does(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    norms.prove(rows_triton, device, getattr(torch, dtype))
    rows = torch.randn(64, 8192, device=device).to(getattr(torch, dtype))
    wanted = norms.rms_norm(rows.cpu(), rows[0].cpu(), 1e-5)
    assert norms.kernels_for(rows) is rows_triton
    torch.testing.assert_close(norms.rms_norm(rows, rows[0], 1e-5).cpu(), wanted, rtol=norms.CLOSE[rows.dtype], atol=0)
