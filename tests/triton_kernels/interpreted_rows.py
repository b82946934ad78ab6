"""The Triton kernels of norms, rotations and activations against plain torch, in Triton's interpreter: numpy, no GPU.

Run by test_interpreted in a process of its own: TRITON_INTERPRET must be set before triton is first imported, and a
process that interprets cannot compile.
"""

import contextlib

import pytest
import torch
from interpreted import hasten
from models import save_llama
from tiny_models import greedy
from toy_machine import machine

from flexhybrid import LLM, Policy, SamplingParams
from flexhybrid.runtime.kernels import norms, rotary, rows_triton

hasten(rows_triton._rounded)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())


def drawn(*size: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [8, 64, 256])
def test_norms_of_whole_numbers_have_the_bits_of_plain_torch(dtype, n):
    """Sums of their squares do not depend on the order, and are divided by a power of two: all else must round
    alike."""
    generator = torch.Generator().manual_seed(n)
    rows, added = (torch.randint(-9, 10, (4, n + 3), generator=generator).to(dtype)[:, :n] for _ in range(2))
    weight = drawn(n, dtype=dtype)
    assert torch.equal(rows_triton.norm(rows, None, weight, 1e-5), norms.rms_norm(rows, weight, 1e-5))
    summed = rows + added
    assert torch.equal(rows_triton.norm(rows, added, weight, 1e-5), norms.rms_norm(summed, weight, 1e-5))
    assert torch.equal(rows, summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_plain_torchs_but_for_the_order_of_the_sum(dtype):
    rows, added, weight = drawn(5, 200, dtype=dtype), drawn(5, 200, dtype=dtype, seed=1), drawn(200, dtype=dtype)
    summed = rows + added
    wanted = norms.rms_norm(summed, weight, 1e-5)
    torch.testing.assert_close(rows_triton.norm(rows, added, weight, 1e-5), wanted, rtol=norms.CLOSE[dtype], atol=0)
    assert torch.equal(rows, summed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [200, 256])
def test_layer_norms_are_those_of_float64_rounded_to_the_dtype(dtype, n):
    """Sums are rounded once, together with what is added later; memory between rows stays."""
    held, added = 3 * drawn(5, n + 3, dtype=dtype) + 2, drawn(5, n, dtype=dtype, seed=1)
    rows, before = held[:, :n], held.clone()
    weight, bias, later = drawn(3, n, dtype=dtype, seed=2)
    ours = rows_triton.norm(rows, added, weight, 1e-5, (bias, later))
    summed = (before[:, :n] + added).double()
    apart = summed - summed.mean(1, keepdim=True)
    wanted = apart / (apart.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    torch.testing.assert_close(ours, wanted.to(dtype), rtol=norms.CLOSE[dtype], atol=norms.SMALL)
    exact = before[:, :n].double() + added.double() + later.double()
    assert torch.equal(rows, exact.float().to(dtype) if dtype != torch.float32 else before[:, :n] + added + later)
    assert torch.equal(held[:, n:], before[:, n:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotations_have_the_bits_of_plain_torch(dtype):
    """Keys alone, and keys with queries; numbers and sizes of heads are no powers of two. Memory between rows stays."""
    for groups, heads, d in ((1, 1, 8), (3, 6, 12), (2, 5, 80)):
        kvq = drawn(5, (2 * groups + heads) * d + 4, dtype=dtype, seed=d)[:, :-4]
        cos, sin = drawn(5, d, dtype=dtype, seed=1), drawn(5, d, dtype=dtype, seed=2)
        for spans in (((0, groups),), ((0, groups), (2 * groups * d, heads))):
            ours, wanted = kvq.clone(), kvq.clone()
            rows_triton.rotate_(ours, spans, (cos, sin))
            for first, count in spans:
                rotary.rotate_(wanted[:, first : first + count * d].unflatten(1, (count, d)), cos, sin)
            assert torch.equal(ours, wanted) and not torch.equal(ours, kvq)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_are_plain_torchs_but_for_the_exponential(dtype):
    gate, up = drawn(3, 700, dtype=dtype) * 4, drawn(3, 700, dtype=dtype, seed=1)
    ours = gate.clone()
    assert rows_triton.gate_(ours, up) is ours
    torch.testing.assert_close(ours, norms.gate_(gate.clone(), up), rtol=norms.CLOSE[dtype], atol=0)


def test_the_proof_is_passed_and_finds_other_results(monkeypatch):
    for dtype in DTYPES:
        norms.prove(rows_triton, torch.device("cpu"), dtype)
    rotate = rows_triton.rotate_
    monkeypatch.setattr(rows_triton, "rotate_", lambda rows, spans, rotation: rotate(rows, spans[:1], rotation))
    with pytest.raises(ArithmeticError, match="differ"):
        norms.prove(rows_triton, torch.device("cpu"), torch.float32)


def test_a_run_by_the_kernels_gives_transformers_tokens(tmp_path, monkeypatch):
    """Norms are of rows and of heads."""
    model = save_llama(tmp_path, kind="qwen3", layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32)
    asked = []
    for module in (norms, rotary):
        monkeypatch.setattr(module, "kernels_for", lambda rows: (asked.append(rows), rows_triton)[1])
    prompts = [[5, 9, 11], list(range(3, 30))]
    with LLM(
        tmp_path, Policy(cache={"kv@host": 0.5, "act@host": 0.5}), device="cpu", dtype="float32", hardware=machine()
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [answer.outputs[0].token_ids for answer in answers] == greedy(model, prompts, 4)
    assert len(asked) > 4 * 2 * 4
