"""What the profile of a machine runs."""

import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from forced_machine import DTYPES, FASTER_DTYPE

from flexhybrid import resolve as machine
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.task import Task, Work
from flexhybrid.core.trace import TraceEvent
from flexhybrid.runtime.profiling import cpu_use
from flexhybrid.runtime.profiling import profile as profiling
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.profiling.profile import ProfileRun, Stretch, kernel_times, mean_left
from policy_search.fit import fit_hardware


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
