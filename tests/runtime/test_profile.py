"""What the profile of a machine runs."""

import inspect
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forced_machine import DTYPES, FASTER_DTYPE
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid import resolve as machine
from flexhybrid.core.hardware import LAUNCHER, Hardware, Line, load_hardware
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.task import Task, Work
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.profiling import cpu_use
from flexhybrid.runtime.profiling import profile as profiling
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.profiling.profile import ProfileRun, Stretch, kernel_times, mean_left
from policy_search.fit import fit_hardware
from sim import catalogue
from sim.simulate import simulate

H200_RECORD = Path(__file__).parents[2] / "experiments/results/nvidia-h200/profiles/hardware-cuda.json"


def test_a_profile_takes_as_many_requests_as_the_budgets_hold(monkeypatch):
    """Smaller runs, of the same verbs; one short request where nothing fits. Each notes the dtype that is faster."""
    shape = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 100, 96)
    planned, engine = [], profiling.Engine

    def watched(weights, policy, sizes, *rest, **more):
        problem = Problem(shape=shape, dtype="float32", device="cpu")
        planned.append(total_bytes(memory_plan(problem, policy, sizes)))
        return engine(weights, policy, sizes, *rest, **more)

    monkeypatch.setattr(profiling, "Engine", watched)
    monkeypatch.setattr(profiling, "LINK_SECONDS", 0.0)  # how long anything takes is not what this is about
    monkeypatch.setattr(profiling, "DECODE_SECONDS", 0.0)
    monkeypatch.setattr(profiling, "launch_seconds", lambda *_: 1e-5)
    runs = (ProfileRun(8, 48, 4, {"kv@host": 0.5, "act@host": 0.5}),)

    faster_dtypes = itertools.cycle(DTYPES)

    def measured(budgets) -> tuple[set[str], int]:
        planned.clear()
        faster_dtype = next(faster_dtypes)
        monkeypatch.setenv(FASTER_DTYPE, faster_dtype)
        profiled = profiling.profile(shape, "float32", torch.device("cpu"), runs=runs, budgets=budgets)
        assert profiled.faster_dtype == faster_dtype
        return set(profiled.samples), max(plan["host"] for plan in planned)

    verbs, whole = measured(Budgets())
    assert measured(Budgets(host=whole)) == (verbs, whole)
    fewer, half = measured(Budgets(host=whole // 2))
    assert fewer == verbs and half <= whole // 2
    fewest, least = measured(Budgets(host=1))
    assert fewest == verbs and least < half


def test_kernels_alone_have_lines_of_their_own_where_the_device_holds_all(monkeypatch):
    """And only a policy that moves nothing is priced by them."""
    monkeypatch.setenv(FASTER_DTYPE, "float32")
    monkeypatch.setattr(profiling, "LINK_SECONDS", 0.0)  # how long anything takes is not what this is about
    monkeypatch.setattr(profiling, "DECODE_SECONDS", 0.0)
    monkeypatch.setattr(profiling, "launch_seconds", lambda *_: 1e-5)
    shape = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 100, 96)
    runs = (ProfileRun(2, 32, 2, {"kv@host": 0.5, "act@host": 0.5}), profiling.ALONE[0])

    def measured(budgets) -> Hardware:
        samples = profiling.profile(shape, "float32", torch.device("cpu"), runs=runs, budgets=budgets).samples
        return fit_hardware(samples, name="here", device="cpu")

    machine = measured(Budgets())
    alone, resident = machine.lines["project_alone"], Policy(cache={"kv@device": 1.0}, weights=Placement(device=1.0))
    assert machine.at_work(resident).line("project", "compute") == alone != machine.lines["project"]
    for elsewhere in ({"weights": Placement(device=0.9, host=0.1)}, {"cache": {"kv@host": 1.0}}, {"hidden": "host"}):
        assert machine.at_work(replace(resident, **elsewhere)) == machine
    assert not [key for key in measured(Budgets(device=1)).lines if key.endswith("_alone")]


def test_what_a_host_steals_is_spread_evenly_over_a_profile():
    """Kernels of the CPU alone: a link is paced, and a GPU has a clock of its own."""

    def stretch(seconds: float, left: float) -> Stretch:
        kernels = ("finish", "compute"), ("attend_host", "host_compute"), ("load_kv", "h2d")
        work = Work(flops=7, memory_bytes=5, link_bytes=3)
        trace = [TraceEvent(Task(0, 0, 0, *kernel, work, (), ()), 1.0, 1.0 + seconds) for kernel in kernels]
        return Stretch(trace, 10 * seconds, left, alone=False)

    robbed, spared = stretch(2.0, 0.5), stretch(1.0, 1.0)
    mean_share = mean_left([robbed, spared])
    assert mean_share == (20 * 0.5 + 10) / 30
    found = kernel_times([robbed, spared], mean_share, "cpu")
    assert found == {("finish", 7, 5): [1.5, 1.5], ("attend_host", 7, 5): [1.5, 1.5], ("load_kv", 7, 3): [2.0, 1.0]}
    found = kernel_times([robbed, spared], mean_share, "cuda")
    assert found["finish", 7, 5] == [2.0, 1.0] and found["attend_host", 7, 5] == [1.5, 1.5]


def test_what_is_left_of_the_time_is_less_what_was_stolen(monkeypatch):
    """Seconds stolen from whichever core; at most three quarters; nothing where /proc does not tell."""
    monkeypatch.setattr(cpu_use.os, "cpu_count", lambda: 2)
    before = CpuUse(everyone_s=100.0, stolen_s=10.0, own_s=5.0, at_s=1000.0)
    after = replace(before, everyone_s=112.0, stolen_s=13.0, own_s=14.0, at_s=1010.0)
    assert after.left_since(before) == 0.7 and after.others_since(before) == 3 / 20
    counted_as_own = replace(after, own_s=17.0)
    assert counted_as_own.others_since(before) == 3 / 20
    assert replace(after, stolen_s=29.0).left_since(before) == 0.25
    unknown = replace(after, everyone_s=None, stolen_s=None)
    assert unknown.left_since(before) == before.left_since(unknown) == 1.0 and unknown.others_since(before) is None


def test_a_busy_stranger_is_seen_in_what_the_kernel_counts(num_cores, tmp_path, monkeypatch):
    """Half a core of another process for a second; idle time and waiting for disks are nobody's."""
    at, own, stat = [50.0], [7.0], tmp_path / "stat"
    monkeypatch.setattr(cpu_use, "open", lambda path, encoding: stat.open(encoding=encoding), raising=False)
    monkeypatch.setattr(cpu_use, "time", SimpleNamespace(perf_counter=lambda: at[0], process_time=lambda: own[0]))
    monkeypatch.setattr(cpu_use.os, "sysconf", {"SC_CLK_TCK": 100}.get)
    stat.write_text("cpu  100 20 30 400 50 6 7 80 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    before = CpuUse.now()
    assert (before.everyone_s, before.stolen_s) == pytest.approx((2.43, 0.8))
    at[0], own[0] = 51.0, 7.25
    stat.write_text("cpu  150 20 55 600 90 6 7 80 0 0\n")
    assert CpuUse.now().others_since(before) == pytest.approx(0.5 / num_cores)
    stat.write_text("nothing of the kind\n")
    assert CpuUse.now().others_since(before) is None


def test_the_dtype_does_not_hang_on_whether_a_profile_is_kept(cpu_dtype):
    """Answers would: before the first profile, it is what that would find."""
    shape, cpu = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 100, 96, dtype="bfloat16"), torch.device("cpu")
    kept = Hardware("local", "cpu", {"compute": Line(1e-5)})
    for hardware in (None, kept, replace(kept, faster_dtype=cpu_dtype)):
        assert machine.pick_dtype("auto", shape, cpu, hardware) == cpu_dtype


@pytest.mark.parametrize("faster", [torch.float32, torch.bfloat16])
def test_the_faster_dtype_is_the_one_whose_products_took_less(faster, monkeypatch):
    """By a clock that the products themselves move on."""
    now = [0.0]

    def product(a, b):
        assert (a.shape, b.shape) == ((512, 64), (32, 64)) and a.dtype == b.dtype
        now[0] += 1.0 if a.dtype == faster else 2.0

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timed = inspect.unwrap(profiling._faster_product)
    assert f"torch.{timed(64, 32)}" == str(faster)


@given(st.lists(st.floats(0.9, 1.1), min_size=8, max_size=40), st.floats(4, 60), st.floats(0.15, 0.85), st.booleans())
def test_the_undisturbed_cluster_of_a_size_counts_on_a_gpu(noise, ratio, share, on_gpu):
    """A CPU's times all count but outliers: what a task waits for there, it waits for in a job."""
    num_slow = round(share * len(noise))
    times = [(ratio if i < num_slow else 1.0) * of for i, of in enumerate(noise)]
    found = profiling._typical(times, "cuda" if on_gpu else "cpu")
    fast = np.array(times[num_slow:]).mean()
    if on_gpu:
        assert found == pytest.approx(fast)
    elif ratio < 0.9 / 1.1 * profiling.OUTLIER:  # no sample is an outlier
        assert found == pytest.approx(np.mean(times))


@given(st.lists(st.floats(0.6, 1.7), min_size=1, max_size=40), st.integers(0, 3))
def test_noise_of_one_cluster_does_not_bias_a_size(noise, num_late):
    """Nor do some late samples, fewer than an eighth: the mean counts, without those above OUTLIER medians."""
    times = noise + [5.0] * min(num_late, max(0, math.ceil(len(noise) / 8) - 1))
    assert profiling._typical(times, "cuda") == profiling._typical(times, "cpu") == pytest.approx(np.mean(times))


#: Assumed, not measured: seconds of compiling Triton's kernels and loading libraries, and of making what a run has
#: beside page-locked memory. Measured on an H200 (bench.json): launches without CUDA graphs over those with them, and
#: the seconds of page-locking a GiB. A capture launches once more.
COMPILING_S, EACH_RUN_S, UNGRAPHED, PAGE_LOCKING_S = 20.0, 0.5, 2 * 3.3, 0.07


def estimated_seconds(shape: ModelShape, hardware: Hardware, dtype: str) -> float:
    """Seconds of a GPU's profile by a record, from the plan of its runs; page-locked memory, weights too, by run."""
    small = profiling.profiled_layers(shape, profiling.GPU_LAYERS)
    first = replace(hardware, lines={**hardware.lines, LAUNCHER: Line(UNGRAPHED * hardware.launch_s)})
    seconds = COMPILING_S + 2 * 2 * len(profiling.LINK_SIZES) * 2 * profiling.LINK_SECONDS
    for run in itertools.chain(*profiling.passes_of("cuda")):
        answer = profiling.SHARED_ANSWER if run.shared else profiling.ANSWER
        problems = (Problem(shape=small, dtype=dtype, hardware=machine) for machine in (first, hardware))
        warm_up, again = (simulate(of, run.policy, run.requests, run.context, answer) for of in problems)
        assert again.num_waves == 1
        decodes = min(profiling.DECODES - 1, int(profiling.DECODE_SECONDS / again.total_s)) * again.decode_s
        measured_s = warm_up.total_s if run.shared else again.total_s + decodes
        seconds += EACH_RUN_S + warm_up.total_s + measured_s + PAGE_LOCKING_S * again.peak_bytes["host"] / 2**30
    launched = replace(profiling.LAUNCHED_SHAPE, num_heads=2, num_kv_heads=2)
    for policy in profiling.LAUNCHED:
        num_tasks = sum(1 for _ in stream(admit(Problem(shape=launched), policy, Workload.uniform(4, 32, 8))))
        seconds += (UNGRAPHED + 2) * num_tasks * hardware.launch_s
    return seconds


@pytest.mark.parametrize("model", ["opt-6.7b", "opt-30b"])
def test_a_gpu_is_profiled_within_a_minute(model):
    """By plan, not by a clock. KV-Gen has three sizes at the width of OPT-6.7B, the largest 10^12 FLOP."""
    h200, h100 = load_hardware(H200_RECORD), catalogue.load("h100")
    h100 = replace(h100, lines={**h100.lines, LAUNCHER: h200.lines[LAUNCHER]})
    for hardware in (h200, h100):
        assert 0 < estimated_seconds(shape_by_name(model), hardware, "float16") <= 60
    problem, sizes = Problem(shape=shape_by_name("opt-6.7b"), hardware=h200), []
    (runs,) = profiling.passes_of("cuda")
    placed = [(run.policy.bits.weights, run.policy.weights) for run in runs]
    assert len(list(itertools.groupby(placed))) == len(set(placed)) == 3  # weights are made once a placement
    for run in runs[:4]:
        wave = admit(problem, run.policy, Workload.uniform(run.requests, run.context, profiling.ANSWER))
        sizes += [max((task.work.flops for task in stream(wave) if task.verb == "kv_gen"), default=0)]
    assert sizes == [pytest.approx(of, rel=0.25) for of in (1e10, 1e11, 1e12)] + [0]
