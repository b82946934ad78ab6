"""Test decode attention by Triton: compiled kernels, whole runs with plain torch instead, and on a GPU."""

import functools
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import save_llama, save_opt
from oracles.contexts import POLICIES
from tiny_models import greedy
from toy_machine import machine

from flexhybrid.arguments import LLMArguments
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import partial_elements
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Policy
from flexhybrid.llm import LLM
from flexhybrid.resolve import pick_device, resolve_problem
from flexhybrid.runtime.kernels.attention import Extent, ScoreRule
from flexhybrid.runtime.profiling import attention_paths
from flexhybrid.runtime.profiling.attention_paths import USUAL
from flexhybrid.runtime.verbs import attending_in_place
from flexhybrid.sampling_params import SamplingParams

triton = pytest.importorskip("triton")

from compiled import POINTERS, compile_for, load_widths, registers_and_stack  # noqa: E402
from oracles import attend_table  # noqa: E402

from flexhybrid.runtime.kernels import attend_triton  # noqa: E402

#: dtype, queries a key head, elements of a head, and what else varies. The first ON_BOTH are compiled for both
#: architectures, the others in turn.
VARIANTS = {
    "OPT": ("bfloat16", 1, 128, {}),
    "Llama 3, parts": ("bfloat16", 8, 128, {"WHOLE": False}),
    "Gemma 2": ("bfloat16", 2, 256, {"SOFTCAP": True}),
    "gpt-oss": ("bfloat16", 8, 64, {"SINKS": True}),
    "shared by many": ("float16", 200, 128, {"SUMS": True, "WHOLE": False}),
    "float32": ("float32", 4, 128, {}),
    "heads of 80, four queries": ("bfloat16", 4, 80, {}),
    "heads of 256, one query": ("bfloat16", 1, 256, {}),
}


ON_BOTH = 1


def compiled(dtype: str, queries: int, d: int, asked: dict, architecture: int):
    """Return the kernel of attention as ``launch`` compiles it."""
    own, width = POINTERS[dtype], triton.next_power_of_2(d)
    sizes, options = attend_triton.tile_sizes(queries, width, {"float32": 4}.get(dtype, 2))
    flags = (
        dict.fromkeys(("SOFTCAP", "SINKS", "SUMS"), False)
        | {"WHOLE": True, "ALIGNED": attend_triton.ALIGNED_BYTES.value}
        | asked
    )
    constants = {"GROUPS": 8, "QUERIES": queries, "D": d, "WIDTH": width, "ROW": partial_elements(d), **sizes, **flags}
    types = {
        "queries": own,
        "memories": (own,) * attend_triton.MEMORIES.value,
        "starts": "*i64",
        "places": "*i64",
        "kinds": "*i64",
        "sinks": own,
        "target": own if flags["WHOLE"] and not flags["SUMS"] else "*fp32",
        "sums": "*fp32",
        "query_stride": "i64",
        "scaling": "fp32",
        "softcap": "fp32",
    }
    return compile_for(attend_triton._attend_kernel, types, constants, options, architecture).asm


@pytest.mark.parametrize("architecture", [80, 90])
def test_every_variant_compiles_without_spilling(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for index, (name, (dtype, queries, d, asked)) in enumerate(VARIANTS.items()):
        if index >= ON_BOTH and index % 2 == (architecture == 90):
            continue
        code = compiled(dtype, queries, d, asked, architecture)
        registers, stack = registers_and_stack(code["cubin"], tmp_path / "kernel.cubin")
        assert stack == 0 and registers <= 255, (name, registers, stack)
        assert narrow(code["ptx"]) == {}, name
        assert ("mma" in code["ptx"]) == (queries > 1 and dtype != "float32"), name


def narrow(ptx: str, widest: int = 16) -> dict[str, set[int]]:
    """Return the bytes per load of keys or values if not ``widest``; raise AssertionError if loads are missing."""
    lines, first = inspect.getsourcelines(attend_triton._attend_kernel.fn)
    loads = {
        number: line.strip()[0] for number, line in enumerate(lines, first) if line.strip()[:5] in ("k = t", "v = t")
    }
    widths = load_widths(ptx)
    assert sorted(loads.values()) == ["k", "v"] and loads.keys() <= widths.keys()
    source = inspect.getsource(attend_triton).splitlines()
    assert all("tl.load(" in source[number - 1] for number in widths)
    return {loads[number]: widths[number] for number in loads if widths[number] != {widest}}


@pytest.mark.parametrize(
    "dtype, d, counts", [("bfloat16", 72, (1, 4)), ("float16", 20, (1, 4)), ("bfloat16", 18, (1,))]
)
def test_no_key_or_value_is_loaded_less_than_16_bytes_at_a_time(dtype, d, counts, tmp_path, monkeypatch):
    """Key heads have one or several queries, and other sizes. Heads of 40 and 36 bytes load 8 and 4 bytes at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.backends.nvidia.compiler.CUDABackend, "make_cubin", lambda *given: b"")  # slow, unread
    widest = {20: 8, 18: 4}.get(d, 16)
    for queries in counts:
        code = compiled(dtype, queries, d, {"ALIGNED": widest}, 90 if queries == 1 else 80)
        assert narrow(code["ptx"], widest) == {}, queries


def test_the_width_of_loads_follows_from_head_size_and_address(monkeypatch):
    asked, rows = [], torch.zeros(4097, dtype=torch.bfloat16)
    monkeypatch.setattr(
        attend_triton, "_attend_kernel", {(1, 1): lambda *given, **named: asked.append(named["ALIGNED"])}
    )
    for d, first in ((64, 0), (20, 0), (18, 0), (64, 4), (64, 1)):
        extent = Extent(np.array([[0]]), np.array([3]), d, 16 * d, 16 * d)
        table = attend_triton.table_of([extent], ["pool"], (1, d), torch.from_numpy)
        table.attend(rows[:d].view(1, 1, d), [rows[first:]], ScoreRule(1.0))
    assert asked == [16, 8, 4, 8, 2]


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_that_adds_parts_compiles_without_spilling(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for d, sinks, sums in ((128, False, False), (256, True, False), (80, False, True)):
        types = {"partial": "*fp32", "sinks": "*bf16", "sums": "*fp32", "parts": "i32"}
        types["target"] = "*fp32" if sums else "*bf16"
        constants = {
            "HEADS": 32,
            "D": d,
            "WIDTH": triton.next_power_of_2(d),
            "ROW": partial_elements(d),
            "SINKS": sinks,
            "SUMS": sums,
        }
        code = compile_for(attend_triton._add_kernel, types, constants, attend_triton.ADDING, architecture).asm
        registers, stack = registers_and_stack(code["cubin"], tmp_path / "kernel.cubin")
        assert stack == 0 and registers <= 128


@pytest.mark.parametrize(
    "batch, heads, groups, blocks, parts",
    [
        (1, 32, 32, 4, 1),  # too short to be cut
        (1, 32, 32, 640, 128),
        (1, 64, 8, 6400, 64),  # as many as PARTIAL_ROWS holds
        (16, 32, 8, 640, 8),
        (2000, 32, 32, 640, 1),
        (1, 1, 1, 10**6, 128),
    ],
)
def test_few_contexts_are_read_in_parts(batch, heads, groups, blocks, parts):
    table = attend_triton.BlockTable(*[torch.empty(0)] * 3, groups, blocks, ())
    assert attend_triton.num_parts(batch, heads, table) == parts
    assert parts == 1 or parts * batch * heads <= attend_triton.PARTIAL_ROWS


# ---- where it is chosen


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU; the test provides the proof of the kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    attention_paths.proved_on_gpu.cache_clear()
    yield functools.partial(monkeypatch.setattr, attend_triton, "prove")
    attention_paths.proved_on_gpu.cache_clear()


def test_a_gpu_attends_in_place_if_the_kernels_are_proved(gpu):
    asked, paths = [], inspect.unwrap(attention_paths.fastest_paths)
    gpu(lambda *arguments: asked.append(arguments))
    assert [paths("cuda", "bfloat16", 4, 64).in_place for _ in range(2)] == [True, True]
    assert asked == [(torch.device("cuda", 0), torch.bfloat16, 4, 64)]


def fails(*arguments):
    raise RuntimeError("on trial contexts its results differ by 0.5\nmore")


def test_a_gpu_assembles_contexts_if_the_proof_fails(gpu):
    gpu(fails)
    paths = inspect.unwrap(attention_paths.fastest_paths)
    with pytest.warns(UserWarning, match="slower than Triton's kernels: [^\n]* differ by 0.5$") as warned:
        assert [paths("cuda", "bfloat16", 4).in_place for _ in range(2)] == [False, False]
    assert len(warned) == 1


def test_a_job_that_began_with_triton_is_refused_without_it(monkeypatch):
    monkeypatch.setattr("flexhybrid.resolve.proved_on_gpu", lambda *arguments: False)
    monkeypatch.setattr("flexhybrid.resolve.named_hardware", lambda *arguments: None)
    arguments = LLMArguments("none", dtype="float32", attention=USUAL._replace(in_place=True))
    arguments = replace(arguments, budgets=dict.fromkeys(TIERS, "8GiB"))
    with pytest.raises(InputError, match="pip install triton"):
        resolve_problem(arguments, shape_by_name("opt-125m"), replace(pick_device("cpu"), device=torch.device("cuda")))


# ---- whole runs: all but the kernels themselves

PROMPTS = [np.random.default_rng(0).integers(3, 60, length).tolist() for length in (1, 15, 16, 40)]
MAX_TOKENS = 9  # the longest prompt's last begins a block
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture
def by_table(monkeypatch):
    """Make a CPU attend as a GPU does, with plain torch for the kernels; return the calls."""
    served = []
    monkeypatch.setattr(attending_in_place, "by_numba", lambda state: False)
    monkeypatch.setattr(attend_triton, "launch", lambda *given: (served.append(given), attend_table.launch(*given)))
    return served


def answers(folder, policy, scratch, prompts=PROMPTS, **more) -> list[list[int]]:
    with LLM(folder, policy, device="cpu", dtype="float32", hardware=machine(), disk_dir=scratch, **more) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    return [output.outputs[0].token_ids for output in outputs if output]


@pytest.mark.parametrize("name", POLICIES)
def test_tables_give_the_tokens_of_assembled_contexts(tiny, name, by_table, monkeypatch, tmp_path):
    """Every representation and tier is used, for requests of different lengths in one mini-batch."""
    ours = answers(tiny, POLICIES[name], tmp_path)
    assert by_table
    monkeypatch.setenv("FLEXHYBRID_ATTENTION", "fused")
    assert ours == answers(tiny, POLICIES[name], tmp_path)


@pytest.mark.parametrize("queries", [1, 99])
def test_shared_beginnings_are_attended_to_together_or_alone(by_table, monkeypatch, tmp_path, queries):
    """Requests attend together from ``queries`` a key head on; with a window they never do."""
    monkeypatch.setattr("flexhybrid.core.schedule.step_work.LEAST_QUERIES", queries)
    model = save_llama(tmp_path, kind="mistral", sliding_window=None, layers=2, heads=4, kv_heads=2, positions=160)
    common = list(range(3, 53))
    prompts = [[*common, *range(5, 5 + tail)] for tail in (3, 9, 20)]
    policy = Policy(cache={"kv@host": 0.4, "kv@device": 0.3, "act@host": 0.3}, max_mini_batch_tokens=600)
    ours = answers(tmp_path, policy, tmp_path, prompts, enable_prefix_caching=True)
    assert ours == greedy(model, prompts, MAX_TOKENS)
    together = [given for given in by_table if given[4][1] is not None]
    assert bool(together) == (queries == 1)


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", POINTERS)
def test_a_gpu_gives_what_plain_torch_does(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    for queries, d in ((1, 64), (1, 80), (4, 128), (8, 64), (3, 256), (70, 128)):
        attend_triton.prove(device, getattr(torch, dtype), queries, d)


@pytest.mark.cuda
def test_a_gpu_runs_by_the_kernels_and_gives_transformers_tokens(tmp_path, monkeypatch):
    calls, launch = [], attend_triton.launch
    monkeypatch.setattr(attend_triton, "launch", lambda *given: (calls.append(given), launch(*given)))
    model = save_opt(tmp_path, layers=3, heads=4, head_dim=32, ffn=256)
    options = {"device": "cuda", "dtype": "float32", "hardware": machine()}
    with LLM(tmp_path, POLICIES["every tier"], cuda_graphs=False, **options) as llm:  # whose launches are not seen here
        assert llm.problem.attends_in_place
        calls.clear()  # those that prove the kernels
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    expected = greedy(model, PROMPTS, MAX_TOKENS)
    assert [output.outputs[0].token_ids for output in outputs if output] == expected
    assert len(calls) == 3 * (MAX_TOKENS - 1)
