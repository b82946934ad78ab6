"""What only a GPU can prove; `make gpu` runs these. Every test is skipped where there is none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_cuda.watch import watching
from models import save_opt
from policies import wider_policies

from flexhybrid import LLM, InputError, Policy, SamplingParams
from flexhybrid.core.memory import CONTEXT_BYTES, SLACK_BYTES, memory_plan, total_bytes
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Bits, Placement
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.trace import check_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.runtime.engine import Engine, RunControl
from flexhybrid.runtime.kernels.logit_changes import LogitChanges
from flexhybrid.runtime.kernels.sampling import SamplingPlan, greedy_plan
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.storage.weights import DiskPlace, Weights
from sim import catalogue
from sim.presets import hybrid

pytestmark = pytest.mark.cuda

#: What cuBLAS and attention kernels keep for themselves, of the slack: a workspace a handle and stream.
LIBRARIES = 128 << 20

MIXED = Policy(
    "mixed", Placement(device=0.3, host=0.7),
    cache={"act@host": 0.25, "act@device": 0.25, "kv@host": 0.25, "kv@device": 0.25}, max_mini_batch_tokens=200,
)  # fmt: skip

WIDER = wider_policies(wide=300, narrow=200, chunk=32)

PACKED = Policy(
    "packed", Placement(device=0.3, host=0.3, disk=0.4), bits=Bits(8, 8, 8), max_mini_batch_tokens=300,
    cache={"act@disk": 0.2, "act@device": 0.2, "kv@disk": 0.2, "kv@device": 0.2, "kv@host": 0.2},
)  # fmt: skip


def make_llm(folder, policy, scratch, device="cuda", dtype="float32") -> LLM:
    return LLM(folder, policy, device=device, dtype=dtype, hardware=catalogue.load("t4"), disk_dir=scratch)


def check_near_ties(reference, prompts, ours, wanted, gap=0.05) -> None:
    """Where two answers part, the reference's best two logits must have been nearly equal."""
    for prompt, a, b in zip(prompts, ours, wanted, strict=True):
        place = next((t for t, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if place is not None:
            assert reference.top_two_gap(prompt + b[:place]) < gap


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


#: Its layers' verbs have nothing between them: joint graphs launch them.
RESIDENT = Policy("resident", Placement(device=1.0), cache={"kv@device": 1.0}, max_mini_batch_tokens=2000)
HYBRIDS = [hybrid(share, bound) for share in (0, 0.25, 0.5, 1) for bound in (200, 2000)]


@pytest.mark.parametrize("policy", [*HYBRIDS, MIXED, RESIDENT])
def test_float32_tokens_equal_transformers(case, policy):
    folder, prompts, reference, expected = case
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    answers = LLM(folder, policy, device="cuda", dtype="float32").generate(prompts, params)
    outcome = compare_tokens(reference, prompts, expected, [a.outputs[0].token_ids for a in answers])
    assert outcome.exact, outcome.first_wrong


@pytest.mark.parametrize("name", WIDER)
def test_every_lossless_policy_gives_transformers_tokens(case, tmp_path, name):
    folder, prompts, reference, expected = case
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with make_llm(folder, WIDER[name], tmp_path) as llm:
        for _ in range(3):  # what races, races sometimes
            answers = llm.generate(prompts, params)
            outcome = compare_tokens(reference, prompts, expected, [a.outputs[0].token_ids for a in answers])
            assert outcome.exact, outcome.first_wrong


def engine_of(case, policy, scratch):
    folder, prompts, _, _ = case
    checkpoint, place = Checkpoint(folder), DiskPlace(scratch)
    workload = Workload(np.array([len(p) for p in prompts]), np.full(len(prompts), 24))
    wave = admit(Problem(shape=checkpoint.shape, dtype="float32", hardware=catalogue.load("t4")), policy, workload)
    weights = Weights(checkpoint.shape, checkpoint, "float32", torch.device("cuda"), policy, place)
    return wave, Engine(weights, policy, buffer_sizes(wave), disk=place)


ALL = {"hybrid": hybrid(0.5, 200), "mixed": MIXED, **WIDER, "packed": PACKED}


@pytest.mark.parametrize("name", ALL)
def test_traces_of_streams_are_clean(case, tmp_path, name):
    prompts = case[1]
    wave, engine = engine_of(case, ALL[name], tmp_path)
    for _ in range(3):
        result = engine.run(engine.executor(wave, prompts, greedy_plan(len(prompts))), RunControl(keep_trace=True))
        assert check_trace(result.trace, tolerance_s=5e-5) == []


@pytest.mark.parametrize("name", ALL)
def test_every_access_is_in_the_order_of_events(case, tmp_path, name):
    """The check of the fake device, on this one: nothing is deferred, every operation runs where it is called."""
    prompts = case[1]
    with watching() as watch:
        wave, engine = engine_of(case, ALL[name], tmp_path)
        engine.run(engine.executor(wave, prompts, greedy_plan(len(prompts))))
    assert watch.order.checked > 1000 and dict(watch.order.faults) == {}


def sampled_every_way(num_requests: int) -> SamplingPlan:
    """Everything that a request may ask of sampling, at once."""
    ones = np.ones(num_requests)
    changes = LogitChanges(
        1, frequency=0.1, presence=0.2, repetition=1.1, bias_ids=np.array([5]), bias_values=np.array([2.0]),
        held_ids=np.array([2, 7]), held_until=1000, allowed_ids=np.arange(1, 50), bad_words=((3, 4), (5, 6, 7)),
    )  # fmt: skip
    return replace(
        greedy_plan(num_requests), temperature=ones, top_k=np.full(num_requests, 20), top_p=0.9 * ones,
        min_p=0.05 * ones, changes=(changes,) * num_requests, num_logprobs=np.full(num_requests, 5),
        num_prompt_logprobs=np.full(num_requests, 2),
    )  # fmt: skip


@pytest.mark.parametrize("plan_of", [greedy_plan, sampled_every_way])
@pytest.mark.parametrize("name", ALL)
def test_no_verb_makes_the_host_wait_for_the_device(case, tmp_path, name, plan_of):
    """From the first decode step on; the lanes' own waits for events are not what this finds."""
    prompts = case[1]
    wave, engine = engine_of(case, ALL[name], tmp_path)
    plan = plan_of(len(prompts))
    executor = engine.executor(wave, prompts, plan)
    engine.run(executor)  # libraries wait when they are loaded
    embed = executor.verbs["embed"]

    def strict(ex, task):
        torch.cuda.set_sync_debug_mode("error" if 0 < task.iteration < 23 else "default")
        embed(ex, task)

    executor.verbs["embed"] = strict
    try:
        engine.run(executor)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_on_the_host_in_16_bits(case, tmp_path, dtype):
    folder, prompts, reference, _ = case
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    ours, wanted = (
        [a.outputs[0].token_ids for a in make_llm(folder, policy, tmp_path, dtype=dtype).generate(prompts, params)]
        for policy in (WIDER["host attention"], hybrid(0, 400))
    )
    check_near_ties(reference, prompts, ours, wanted)


def test_packed_rows_are_what_a_cpu_makes_of_them(case, tmp_path):
    folder, prompts, reference, _ = case
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    ours, wanted = (
        [a.outputs[0].token_ids for a in make_llm(folder, PACKED, tmp_path, device).generate(prompts, params)]
        for device in ("cuda", "cpu")
    )
    check_near_ties(reference, prompts, ours, wanted, gap=0.1)


def test_bfloat16_policies_agree(case):
    folder, prompts, reference, _ = case
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    runs = []
    for share in (0, 0.5, 1):
        llm = LLM(folder, hybrid(share, 400), device="cuda", dtype="bfloat16")
        runs.append([a.outputs[0].token_ids for a in llm.generate(prompts, params)])
    for ours in runs[1:]:
        check_near_ties(reference, prompts, ours, runs[0])


@pytest.mark.parametrize("kind, batch, prompt", [("opt", 24, 200), ("llama", 24, 200), ("opt", 2, 900)])
@pytest.mark.parametrize("name", ALL)
def test_the_allocator_stays_within_the_plan(tmp_path, name, kind, batch, prompt):
    """Tensors large enough that the slack for libraries could not hide one that the plan forgot."""
    sizes = dict(num_layers=2, hidden=2048, num_heads=16, head_dim=128, ffn=8192, vocab=4096, max_positions=2048)
    more = {} if kind == "opt" else dict(gated_mlp=True, rotary=True, bias=False, tied_head=False)
    shape = ModelShape(kind, kind, num_kv_heads=16 if kind == "opt" else 4, **sizes, **more)
    policy = replace(ALL[name], max_mini_batch_tokens=max(4 * ALL[name].max_mini_batch_tokens, 1024))
    if name.startswith("chunks"):
        policy = replace(policy, max_mini_batch_tokens=128)
    device, place = torch.device("cuda"), DiskPlace(tmp_path)
    problem = Problem(shape=shape, dtype="bfloat16", hardware=catalogue.load("t4"))
    wave = admit(problem, policy, Workload.uniform(batch, prompt, 6))
    plan = memory_plan(problem, policy, buffer_sizes(wave))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, held_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    weights = Weights(shape, RandomWeights(shape), "bfloat16", device, policy, place)
    engine = Engine(weights, policy, buffer_sizes(wave), disk=place)
    prompts = np.random.default_rng(0).integers(3, 4096, (batch, prompt)).tolist()
    engine.run(engine.executor(wave, prompts, greedy_plan(batch)))
    held = (weights.host_memory, engine.buffers.host_memory, engine.copies.host_memory)
    tensors = 3 * shape.num_layers + 40  # each pinned to whole pages
    peak, planned = torch.cuda.max_memory_allocated() - before, total_bytes(plan)
    reserved = torch.cuda.max_memory_reserved() - held_before
    counted = memory_plan(replace(problem, budgets=Budgets(device=1 << 50)), policy, buffer_sizes(wave))
    engine.close()
    weights.close()
    assert peak <= planned["device"] - (SLACK_BYTES["cuda"] - LIBRARIES)
    assert reserved + CONTEXT_BYTES <= total_bytes(counted)["device"]
    assert sum(one.allocated_bytes for one in held) <= planned["host"] + 4096 * tensors


def test_host_pools_are_page_locked_at_their_exact_size():
    from flexhybrid.runtime.storage.host_memory import HostMemory

    memory = HostMemory(pinned=True)
    tensor = memory.bytes(5 * 2**20 + 17)
    assert tensor.is_pinned()
    assert memory.allocated_bytes < 5 * 2**20 + 17 + 4096


def test_pacing_a_gpu_is_refused(case):
    with pytest.raises(InputError, match="link of its own|own link"):
        LLM(case[0], "kv_only", device="cuda", link_gb_per_s=1.0)
