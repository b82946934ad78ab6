"""Test the runs and fits of a machine's profile."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid import resolve as machine
from flexhybrid.core.hardware import CONTENTION, LAUNCHER, Hardware, Line, load_hardware
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.task import Task, Work
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.profiling import cpu_use
from flexhybrid.runtime.profiling import profile as profiling
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.profiling.profile import ProfileRun, Stretch, kernel_times
from policy_search.fit import fit_contention, fit_hardware
from policy_search.search_problem import FULL, measured_space
from sim import catalogue
from sim.simulate import simulate

SMALL = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 100, 96)
WORK = Work(flops=7, memory_bytes=5, link_bytes=3)
H200_RECORD = Path(__file__).parents[2] / "experiments/results/nvidia-h200/profiles/hardware-cuda.json"


def test_a_profile_takes_as_many_requests_as_the_budgets_hold(monkeypatch, short_profile):
    """Smaller budgets give smaller runs of the same verbs, down to one short request. Each run records the faster
    dtype."""
    planned, engine = [], profiling.Engine

    def watched(weights, policy, sizes, *rest, **more):
        problem = Problem(shape=SMALL, dtype="float32", device="cpu")
        planned.append(total_bytes(memory_plan(problem, policy, sizes)))
        return engine(weights, policy, sizes, *rest, **more)

    monkeypatch.setattr(profiling, "Engine", watched)
    monkeypatch.setattr(profiling, "launch_seconds", lambda *_: 1e-5)
    runs = (ProfileRun(8, 48, 4, {"kv@host": 0.5, "act@host": 0.5}),)

    faster_dtypes = itertools.cycle(DTYPES)

    def measured(budgets) -> tuple[set[str], int]:
        planned.clear()
        faster_dtype = next(faster_dtypes)
        monkeypatch.setenv(FASTER_DTYPE, faster_dtype)
        profiled = profiling.profile(SMALL, "float32", torch.device("cpu"), runs=runs, budgets=budgets)
        assert profiled.faster_dtype == faster_dtype
        return set(profiled.samples), max(plan["host"] for plan in planned)

    verbs, whole = measured(Budgets())
    assert measured(Budgets(host=whole)) == (verbs, whole)
    fewer, half = measured(Budgets(host=whole // 2))
    assert fewer == verbs and half <= whole // 2
    fewest, least = measured(Budgets(host=1))
    assert fewest == verbs and least < half


def test_kernels_alone_have_own_lines_if_the_device_holds_all(monkeypatch, short_profile):
    """Only policies that move nothing are priced by them."""
    monkeypatch.setattr(profiling, "launch_seconds", lambda *_: 1e-5)
    runs = (ProfileRun(2, 32, 2, {"kv@host": 0.5, "act@host": 0.5}), profiling.ALONE[0])

    def measured(budgets) -> Hardware:
        samples = profiling.profile(SMALL, "float32", torch.device("cpu"), runs=runs, budgets=budgets).samples
        return fit_hardware(samples, name="here", device="cpu")

    machine = measured(Budgets())
    alone, resident = machine.lines["project_alone"], Policy(cache={"kv@device": 1.0}, weights=Placement(device=1.0))
    assert machine.at_work(resident).line("project", "compute") == alone != machine.lines["project"]
    for elsewhere in ({"weights": Placement(device=0.9, host=0.1)}, {"cache": {"kv@host": 1.0}}, {"hidden": "host"}):
        assert machine.at_work(replace(resident, **elsewhere)) == machine
    assert not [key for key in measured(Budgets(device=1)).lines if key.endswith("_alone")]


def event(start: float, seconds: float, verb="finish", resource="compute", work=WORK, iteration=1) -> TraceEvent:
    return TraceEvent(Task(iteration, 0, 0, verb, resource, work, (), ()), float(start), float(start + seconds))


def test_stolen_time_is_left_out_of_long_kernels_of_the_cpu():
    """A paced link and a GPU's clock are not affected, and most short tasks lose no time."""
    kernels = ("finish", "compute"), ("attend_host", "host_compute"), ("load_kv", "h2d")

    def stretch(seconds: float, left: float) -> Stretch:
        return Stretch([event(1.0, seconds, *kernel) for kernel in kernels], 10 * seconds, left, alone=False)

    robbed = [stretch(2.0, 0.5), stretch(1e-3, 0.5)]
    found = {key: of[0] + of[1] for key, of in kernel_times(robbed, "cpu").items()}
    assert found == {("finish", 7, 5): pytest.approx([1.0, 1e-3]), ("attend_host", 7, 5): pytest.approx([1.0, 1e-3]),
                     ("load_kv", 7, 3): pytest.approx([2.0, 1e-3])}  # fmt: skip
    on_gpu = {key: of[0] for key, of in kernel_times(robbed, "cuda").items()}
    assert on_gpu["finish", 7, 5] == pytest.approx([2.0, 1e-3])
    assert on_gpu["attend_host", 7, 5] == pytest.approx([1.0, 1e-3])


def test_tasks_after_a_pause_and_copies_at_another_pace_do_not_count():
    """The cost of a pause is reported instead. If all tasks follow a pause, they count."""
    row, at = [], 0.0
    for number in range(12):
        at += 5e-3 if number % 2 else 0.0  # in pairs, the first after a pause
        row.append(event(at, 1.5e-3 if number % 2 else 1e-3))
        at += 1.5e-3 if number % 2 else 1e-3
    copies = [event(0.0, 9.0, "load_kv", "h2d")]
    found = profiling.samples_of([kernel_times([Stretch(row + copies, at, 1.0, False, hastened=True)], "cpu")], "cpu")
    assert found.samples == {"finish": [(7, 5, pytest.approx(1e-3))]}
    assert found.after_pause == {"finish": pytest.approx(1.5)}
    lonely = [event(0.1 * number, 2e-3) for number in range(5)]
    found = profiling.samples_of([kernel_times([Stretch(lonely, 1.0, 1.0, False)], "cpu")], "cpu")
    assert found.samples == {"finish": [(7, 5, pytest.approx(2e-3))]} and not found.after_pause


TERMS = st.tuples(st.floats(1e-5, 2e-3), st.floats(1e-12, 1e-10), st.floats(1e-11, 1e-10))


@settings(max_examples=25)
@given(
    TERMS, st.floats(0.0, 0.25), st.floats(1.3, 3.0), st.floats(0.5, 1.0), st.floats(1.0, 2.0), st.integers(0, 2**32)
)
def test_the_fit_recovers_a_planted_law_under_interruptions(terms, share, slower, left, company, seed):
    """Interruptions are slow clusters, outliers, pauses, stolen time, and another process in one of three passes."""
    truth, random = Line(*terms), np.random.default_rng(seed)
    works = [Work(flops=f, memory_bytes=b) for f in (1e6, 1e7, 1e8, 1e9) for b in (1e5, 1e7)]
    passes = []
    for disturbed in random.permutation([1.0, 1.0, company]):
        trace, at = [], 0.0
        for _ in range(40):
            for work in works:
                seconds = truth.at(work.flops, work.memory_bytes) * random.uniform(1.0, 1.02) * disturbed
                seconds /= left if seconds >= profiling.LONG_S * left else 1.0  # every long task is robbed
                chance = random.random()
                seconds *= slower if chance < share else 30.0 if chance > 0.97 else 1.0
                paused = random.random() < 0.3
                at += 1e-3 * paused
                trace.append(event(at, seconds * (1 + 0.6 * paused), work=work))
                at = trace[-1].end_s
        passes.append(kernel_times([Stretch(trace, at, left, alone=False)], "cpu"))
    line = fit_hardware(profiling.samples_of(passes, "cpu").samples, name="here", device="cpu").lines["finish"]
    for work in works:
        expected = truth.at(work.flops, work.memory_bytes)
        assert line.at(work.flops, work.memory_bytes) == pytest.approx(expected, rel=0.03)


def test_line_and_contention_give_the_mean_seconds():
    """In 20 % of the cases a task waits 0.4 ms, and 20 % take 50 % longer; tasks alone have other contention."""
    work, trace, at = [Work(flops=1e6 * 4**n, memory_bytes=5) for n in range(6)], [], 0.0
    for number in range(200):
        for of in work:
            interrupted = number % 5 == 0
            seconds = (1e-9 * of.flops) * (1.5 if interrupted else 1.0) + (4e-4 if number % 5 == 1 else 0.0)
            trace.append(event(at, seconds, work=of))
            at += seconds
    found = profiling.samples_of([kernel_times([Stretch(trace, at, 1.0, False)], "cpu")], "cpu")
    contention = {name: fit_contention(sizes) for name, sizes in found.contention.items()}
    assert contention == {"compute": {"wait_s": pytest.approx(8e-5, rel=0.05), "factor": pytest.approx(1.1, rel=0.02)}}
    notes = {CONTENTION: {**contention, "compute_alone": {"wait_s": 0.0, "factor": 1.25}}}
    samples = {**found.samples, "finish_alone": found.samples["finish"]}
    here = fit_hardware(samples, name="here", device="cpu", notes=notes)
    for of in work:
        seconds = np.mean([end - start for task, start, end in trace if task.work == of])
        assert here.line("finish", "compute").at(of.flops, 5) == pytest.approx(seconds, rel=0.03)
        alone = here.undisturbed.line("finish", "compute").at(of.flops, 5)
        assert alone == pytest.approx(1.25e-9 * of.flops, rel=0.03)
    for before, after in ((here, here.contended), (here.undisturbed, here.contended.undisturbed)):
        assert after.lines["finish"] == after.line("finish", "compute") == before.line("finish", "compute")
    twice = here.scaled({"compute": 2.0}).line("finish", "compute").at(work[0].flops, 5)
    assert twice == pytest.approx(2 * here.line("finish", "compute").at(work[0].flops, 5))


def test_runs_are_repeated_until_their_long_tasks_agree(monkeypatch):
    """The second run's long task takes 1.3 times as long in pass two; short tasks and the other run may differ."""
    taken, runs = [], tuple(ProfileRun(2, context, 2, {"kv@host": 1.0}) for context in (16, 32))
    monkeypatch.setenv(FASTER_DTYPE, "float32")
    monkeypatch.setattr(profiling, "CPU_SECONDS", 45.0)
    monkeypatch.setattr(profiling, "_link_samples", lambda *_: [])
    monkeypatch.setattr(profiling, "launch_seconds", lambda *_: 1e-5)

    def measured(_shape, _weights_of, run, *_rest) -> list[Stretch]:
        taken.append(runs.index(run))
        slow = 1.3 if run is runs[1] and taken.count(1) == 2 else 1.0
        tasks, trace = [("attend", 1e-5 * len(taken)), ("assemble", 1e-5), ("scatter", 1e-5), ("finish", slow)], []
        for verb, seconds in tasks:
            for _ in range(4):
                start = trace[-1].end_s if trace else 0.0
                work = Work(flops=run.context, memory_bytes=run.context)
                trace.append(event(start, seconds, verb, RESOURCE_OF[verb], work))
        return [Stretch(trace, 1.0, 1.0, alone=False)]

    monkeypatch.setattr(profiling, "_run", measured)
    found = profiling.profile(SMALL, "float32", torch.device("cpu"), runs=runs)
    assert taken == [0, 1, 0, 1, 1] and [s for *_, s in found.samples["finish"]] == pytest.approx([1.0, 1.0])
    taken.clear()
    monkeypatch.setattr(profiling, "CPU_SECONDS", 0.0)
    assert profiling.profile(SMALL, "float32", torch.device("cpu"), runs=runs).disagreements and len(taken) == 4


def test_a_profile_has_only_the_runs_of_its_parts():
    """Each part adds runs; a search does not use fields that the machine's profile left out."""
    assert profiling.runs_of("cpu") == list(profiling.RUNS) and profiling.runs_of("cuda") == list(profiling.GPU_RUNS)
    assert profiling.runs_of("cpu", frozenset()) == list(profiling.MIXES)
    for part, without in (("four bits", 3), ("host attention", 4), ("token recomputation", 2), ("shared prefixes", 7)):
        left = profiling.runs_of("cpu", profiling.PARTS - {part})
        assert len(profiling.RUNS) - len(left) == without
    assert not any(run.policy.stays_on_device for run in profiling.runs_of("cpu", profiling.PARTS - {"resident"}))
    here = Hardware("local", "cpu", dict.fromkeys(("compute", "h2d", "attend_host"), Line(1e-5)))
    space = measured_space(FULL, here)
    assert space.lossless and space.attention == FULL.attention
    packed = replace(here, lines={"compute": Line(1e-5), "dequantize_kv": Line(1e-5)})
    without_split = tuple(entry for entry in FULL.entries if not entry.startswith("attended"))
    assert measured_space(FULL, packed) == replace(FULL, attention=("device",), entries=without_split)
    assert "attended(kv@host)" in measured_space(FULL, replace(here, device="cuda")).entries


@pytest.mark.parametrize("asked, pace", [(0.1, 0.25), (0.3, 0.3)])
def test_a_link_that_delays_the_device_is_paced_faster(asked, pace):
    """A decode computes for 2 s and loads 0.4 GB; loads of prompts do not count."""
    load = Work(link_bytes=400_000_000)
    trace = [event(0.0, 9.0, iteration=0), event(9.0, 2.0), event(9.0, 4.0, "load_kv", "h2d", load)]
    engine = SimpleNamespace(copies=CpuCopies(asked))
    assert profiling._hasten(engine, trace, asked) == (pace > asked)
    assert engine.copies.h2d.bytes_per_s == pytest.approx(pace * 1e9)


def test_the_remaining_time_excludes_stolen_time(monkeypatch):
    """Stolen seconds of any core count, up to 3/4 of the time; without /proc none count."""
    monkeypatch.setattr(cpu_use.os, "cpu_count", lambda: 2)
    before = CpuUse(everyone_s=100.0, stolen_s=10.0, own_s=5.0, at_s=1000.0)
    after = replace(before, everyone_s=112.0, stolen_s=13.0, own_s=14.0, at_s=1010.0)
    assert after.left_since(before) == 0.7 and after.others_since(before) == 3 / 20
    counted_as_own = replace(after, own_s=17.0)
    assert counted_as_own.others_since(before) == 3 / 20
    assert replace(after, stolen_s=29.0).left_since(before) == 0.25
    unknown = replace(after, everyone_s=None, stolen_s=None)
    assert unknown.left_since(before) == before.left_since(unknown) == 1.0 and unknown.others_since(before) is None


def test_cpu_use_of_other_processes_is_read_from_the_kernel(num_cores, tmp_path, monkeypatch):
    """Another process uses half a core for a second; idle time and disk waits belong to no process."""
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


def test_the_dtype_does_not_depend_on_a_kept_profile(cpu_dtype):
    """Otherwise answers would change with the first profile."""
    shape, cpu = replace(SMALL, dtype="bfloat16"), torch.device("cpu")
    kept = Hardware("local", "cpu", {"compute": Line(1e-5)})
    for hardware in (None, kept, replace(kept, faster_dtype=cpu_dtype)):
        assert machine.pick_dtype("auto", shape, cpu, hardware) == cpu_dtype


@pytest.mark.parametrize("faster", [torch.float32, torch.bfloat16])
def test_the_faster_dtype_has_the_faster_products(faster, monkeypatch):
    """Only the products advance the clock."""
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
    """On a CPU all times but outliers count, since its tasks wait the same way in a job."""
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
    """The mean counts, without times above OUTLIER medians; fewer than 1/8 of the samples may be late."""
    times = noise + [5.0] * min(num_late, max(0, math.ceil(len(noise) / 8) - 1))
    assert profiling._typical(times, "cuda") == profiling._typical(times, "cpu") == pytest.approx(np.mean(times))


#: Assumed, not measured: seconds of compiling Triton's kernels and loading libraries, and of making what a run has
#: beside page-locked memory. Measured on an H200 (bench.json): launches without CUDA graphs over those with them, and
#: the seconds of page-locking a GiB. A capture launches once more.
COMPILING_S, EACH_RUN_S, UNGRAPHED, PAGE_LOCKING_S = 20.0, 0.5, 2 * 3.3, 0.07


def estimated_seconds(shape: ModelShape, hardware: Hardware, dtype: str) -> float:
    """Return the seconds of a GPU's profile by a record, from the plan of its runs, with page-locking."""
    small = profiling.profiled_layers(shape, profiling.GPU_LAYERS)
    first = replace(hardware, lines={**hardware.lines, LAUNCHER: Line(UNGRAPHED * hardware.launch_s)})
    seconds = COMPILING_S + 2 * 2 * len(profiling.LINK_SIZES) * 2 * profiling.LINK_SECONDS
    for run in profiling.runs_of("cuda"):
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
    """The plan is priced, nothing runs; it may take 62 s beside the slow host of the catalogue's H100. KV-Gen has three
    sizes at the width of OPT-6.7B, the largest 10^12 FLOP."""
    h200, h100 = load_hardware(H200_RECORD), catalogue.load("h100")
    h100 = replace(h100, lines={**h100.lines, LAUNCHER: h200.lines[LAUNCHER]})
    for hardware in (h200, h100):
        assert 0 < estimated_seconds(shape_by_name(model), hardware, "float16") <= 62
    problem, sizes = Problem(shape=shape_by_name("opt-6.7b"), hardware=h200), []
    runs = profiling.runs_of("cuda")
    placed = [(run.policy.bits.weights, run.policy.weights) for run in runs]
    assert len(list(itertools.groupby(placed))) == len(set(placed)) == 3  # weights are made once a placement
    for run in runs[:4]:
        wave = admit(problem, run.policy, Workload.uniform(run.requests, run.context, profiling.ANSWER))
        sizes += [max((task.work.flops for task in stream(wave) if task.verb == "kv_gen"), default=0)]
    assert sizes == [pytest.approx(of, rel=0.25) for of in (1e10, 1e11, 1e12)] + [0]
