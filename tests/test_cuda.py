"""What only a GPU can prove; `make gpu` runs these. Every test is skipped where there is none."""

import numpy as np
import pytest
import torch
from models import save_opt

from flexhybrid import LLM, InputError, Policy, SamplingParams
from flexhybrid.core.memory import buffer_sizes, memory_plan, total_bytes
from flexhybrid.core.plan import admit
from flexhybrid.core.policy import Placement
from flexhybrid.core.trace import check_trace
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.exactness import Reference, compare_tokens
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.loader import Checkpoint
from flexhybrid.runtime.sampling import greedy_plan
from flexhybrid.runtime.weights import Weights
from sim.presets import hybrid

pytestmark = pytest.mark.cuda

MIXED = Policy(
    "mixed", Placement(device=0.3, host=0.7),
    cache={"act@host": 0.25, "act@device": 0.25, "kv@host": 0.25, "kv@device": 0.25}, max_mini_batch_tokens=200,
)  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt")
    save_opt(folder, layers=3, heads=4, head_dim=32, ffn=256, vocab=101, positions=160)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 101, n).tolist() for n in (5, 64, 17, 100, 33, 1)]
    reference = Reference(folder)
    return folder, prompts, reference, reference.generate(prompts, 24, ignore_eos=True)


@pytest.fixture(autouse=True)
def full_float32():
    """TF32 would round float32 products to ten bits."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("policy", [hybrid(s, b) for s in (0, 0.25, 0.5, 1) for b in (200, 2000)] + [MIXED])
def test_float32_tokens_equal_transformers(case, policy):
    folder, prompts, reference, expected = case
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    answers = LLM(folder, policy, device="cuda", dtype="float32").generate(prompts, params)
    outcome = compare_tokens(reference, prompts, expected, [a.outputs[0].token_ids for a in answers])
    assert outcome.exact, outcome.first_wrong


@pytest.mark.parametrize("policy", [hybrid(0.5, 200), MIXED], ids=["hybrid", "mixed"])
def test_traces_of_streams_are_clean(case, policy):
    folder, prompts, _, expected = case
    checkpoint = Checkpoint(folder)
    workload = Workload(np.array([len(p) for p in prompts]), np.full(len(prompts), 24))
    wave = admit(checkpoint.shape, policy, workload, 4)
    weights = Weights(checkpoint.shape, checkpoint, "float32", torch.device("cuda"), policy)
    engine = Engine(weights, policy, buffer_sizes(wave))
    for _ in range(5):
        result = engine.run(wave, prompts, greedy_plan(len(prompts)), keep_trace=True)
        assert check_trace(result.trace, tolerance_s=5e-5) == []


def test_bfloat16_policies_agree(case):
    folder, prompts, reference, _ = case
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    runs = []
    for share in (0, 0.5, 1):
        llm = LLM(folder, hybrid(share, 400), device="cuda", dtype="bfloat16")
        runs.append([a.outputs[0].token_ids for a in llm.generate(prompts, params)])
    for ours in runs[1:]:
        for prompt, a, b in zip(prompts, ours, runs[0], strict=True):
            place = next((t for t, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if place is not None:
                assert reference.top_two_gap(prompt + b[:place]) < 0.05


def test_the_allocator_stays_within_the_plan(case):
    folder, prompts, _, _ = case
    checkpoint, policy = Checkpoint(folder), hybrid(0.5, 400)
    workload = Workload(np.array([len(p) for p in prompts]), np.full(len(prompts), 24))
    sizes = buffer_sizes(admit(checkpoint.shape, policy, workload, 4))
    planned = total_bytes(memory_plan(checkpoint.shape, policy, 4, sizes, "cuda"))["device"]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    llm = LLM(folder, policy, device="cuda", dtype="float32")
    llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    assert torch.cuda.max_memory_allocated() - before <= planned


def test_host_pools_are_page_locked_at_their_exact_size():
    from flexhybrid.runtime.host_memory import HostMemory

    memory = HostMemory(pinned=True)
    tensor = memory.bytes(5 * 2**20 + 17)
    assert tensor.is_pinned()
    assert memory.allocated_bytes < 5 * 2**20 + 17 + 4096


def test_pacing_a_gpu_is_refused(case):
    with pytest.raises(InputError, match="link of its own|own link"):
        LLM(case[0], "kv_only", device="cuda", link_gb_per_s=1.0)
