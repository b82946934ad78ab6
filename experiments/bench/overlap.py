"""Bench rows of the executor's overlap, for each kind of policy where its two largest ideals are near each other.

The ideal of a resource is the least time that it needs for the window's work: a link's or a disk's bytes at the paced
rate; for compute, and for attention on the host, the window's tasks back to back on one thread while nothing else runs.
Overlap is the largest ideal over the wall time (design section 11). The window leaves out the first decode iteration,
which has nothing to overlap with, and the last, whose loads end early because no iteration follows. The rate is chosen
so that the link (or the disk) needs as long as compute: at other rates every executor scores high.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from tqdm import tqdm

from experiments.bench.harness import Round, Table, bench, least_disturbed
from flexhybrid.core.hardware import CONTENTION, Hardware, task_seconds
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.task import Task
from flexhybrid.core.trace import LaneTimes, TraceEvent, TraceWindow
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.speed import LAST
from flexhybrid.jobs.compare.trials import TRIAL_ITERATIONS
from flexhybrid.jobs.profile.disk import measure_disk, with_disk
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype, measure_hardware
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.profiling.profile import MIXES, OTHERS, profile
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import DiskPlace, Weights
from policy_search.fit import fit_hardware
from sim import virtual_clock
from sim.correction import corrected, times_of, with_waiting
from sim.presets import hybrid, kv_only, kvpr_column

BATCH, CONTEXT, MAX_TOKENS, MINI_BATCH = 16, 512, 6, 4
WORKLOAD = Workload.uniform(BATCH, CONTEXT, MAX_TOKENS)
ROUNDS = 3
BAR, JUDGED_BALANCE = 0.92, 0.7  #: design section 11: judged where the second ideal is this share of the first
SLOWEST, FASTEST = 0.02, 20.0  #: GB/s, bounds of the virtual clock's balanced rate
CARRIED = 0.05  #: share of a step that a line carries which counts where two profiles are compared
FAST_LINK = 4.0  #: GB/s of the link where the disk is paced
#: Copies that the device waits for before and after attention on the host.
ERRAND = ("store_query", "load_attended")

#: The head of TIMING_SHAPE is a seventh of its compute, during which two weight slots cannot load ahead: with attention
#: on the host its tasks allow an overlap of at most 0.91. The head of this shape is 3 %, like OPT-6.7B's.
SMALL_HEAD = replace(TIMING_SHAPE, num_layers=8, vocab=3000)


@dataclass(frozen=True)
class OverlapCase:
    """A kind of policy, the resource whose rate is chosen, the threads that compute, and the model."""

    name: str
    policy: Policy
    paced: str = "h2d"
    num_threads: int | None = None  #: None: all
    shape: ModelShape = TIMING_SHAPE
    workload: Workload = WORKLOAD


def cases() -> list[OverlapCase]:
    """Return the kinds of policy that the speed rows do not measure."""
    bound = MINI_BATCH * (34 * 16 + 1)
    half, disk = Placement(device=0.5, host=0.5), Placement(device=0.5, disk=0.5)
    mix = {"act@device": 0.25, "act@host": 0.25, "kv@host": 0.5}
    on_host = replace(kv_only(bound), name="host attention", attention="host")
    return [
        OverlapCase(
            "a column mix over device and host", replace(hybrid(0.5, bound), weights=half, name="mix", cache=mix)
        ),
        OverlapCase("KVPR, column", kvpr_column("pipeline", max_mini_batch_tokens=bound)),
        OverlapCase("weights from a paced disk", replace(kv_only(bound), weights=disk), "disk_read"),
        OverlapCase("4-bit cache", replace(kv_only(bound), name="4-bit KV", bits=Bits(kv=4))),
        OverlapCase("4-bit mix", replace(hybrid(0.5, bound), name="4-bit KV and ACT", bits=Bits(kv=4, act=4))),
        # Device and host compute on a core each: with all cores for either one, nothing would overlap.
        OverlapCase("attention on the host", on_host, num_threads=1, shape=SMALL_HEAD),
    ]


def in_window(task: Task) -> bool:
    return 1 < task.iteration < MAX_TOKENS - 1


class OverlapRun:
    """A case's session, its cache filled by one generation; decoding is then repeated over it."""

    def __init__(self, case: OverlapCase, weights: Weights, hardware: Hardware):
        threads = case.num_threads or torch.get_num_threads()
        make_engine = partial(Engine, num_threads=threads)
        self.weights = weights
        self.session = Session.of(weights, case.policy, case.workload, hardware=hardware, make_engine=make_engine)
        self.computing = {"compute": threads}
        if case.policy.host_attends:
            self.computing["host_compute"] = 1
        self.session.generate()

    def planned_bytes(self, resource: str) -> int:
        tasks = stream(self.session.wave, first_iteration=1)
        return sum(task.work.link_bytes for task in tasks if task.resource == resource and in_window(task))

    def set_rates(self, rates: dict[str, float]) -> None:
        if isinstance(self.session.engine.copies, CpuCopies):
            self.session.engine.copies.set_rate(rates["h2d"])
        if self.weights.disk:
            self.weights.disk.set_rate(rates["disk_read"])

    def computing_s(self) -> dict[str, float]:
        """Return {computing resource: seconds of the window's tasks, one after another, while the link is idle}.

        Attention on the host runs at the same time: two cores share one memory, unlike a device and its host, and that
        cost is not a fault of the schedule.
        """
        with self.session.engine.without_copies(), ExitStack() as stack:
            running = {}
            for resource, count in self.computing.items():
                pool = ThreadPoolExecutor(1, initializer=partial(torch.set_num_threads, count))
                running[resource] = stack.enter_context(pool).submit(self._back_to_back, resource)
            return {resource: future.result() for resource, future in running.items()}

    def _back_to_back(self, resource: str) -> float:
        seconds = 0.0
        for task in stream(self.session.wave, first_iteration=1):
            if task.resource == resource or (resource == "compute" and task.verb in ERRAND):
                start = time.perf_counter()
                self.session.executor.perform(task)
                if in_window(task) and task.resource == resource:
                    seconds += time.perf_counter() - start
        return seconds


def wave_of(case: OverlapCase, bytes_per_element: int, hardware: Hardware):
    return admit(
        Problem(shape=case.shape, dtype={4: "float32", 2: "float16"}[bytes_per_element], hardware=hardware),
        case.policy,
        WORKLOAD,
    )


def rates_of(case: OverlapCase, rate: float) -> dict[str, float]:
    """Return GB/s by paced resource."""
    return {"h2d": rate} if case.paced == "h2d" else {"h2d": FAST_LINK, case.paced: rate}


def at_rates(hardware: Hardware, rates: dict[str, float]) -> Hardware:
    hardware = hardware.with_link_rate(rates["h2d"])
    return hardware.with_disk_rate(rates["disk_read"]) if "disk_read" in rates else hardware


def predicted(wave, hardware: Hardware) -> TraceWindow:
    return TraceWindow(virtual_clock.run(stream(wave, first_iteration=1), hardware), LAST)


def balanced_rate(case: OverlapCase, bytes_per_element: int, hardware: Hardware) -> float:
    """Return the GB/s at which the paced resource is as busy as the busiest computing one, on the virtual clock."""
    low, high = SLOWEST, FASTEST
    for _ in range(8):
        rate = (low * high) ** 0.5
        window = predicted(wave_of(case, bytes_per_element, hardware), at_rates(hardware, rates_of(case, rate)))
        moving = window.busy_s(case.paced) > max(window.busy_s("compute"), window.busy_s("host_compute"))
        low, high = (rate, high) if moving else (low, rate)
    return (low * high) ** 0.5


def profiled(dtype: str, case: OverlapCase) -> Hardware:
    """Return this machine's profile; for attention on the host, with one core for the device and one for the host."""
    device, rate = torch.device("cpu"), 0.5
    if case.policy.attention != "host":
        return measure_hardware(case.shape, dtype, PacedDevice(device, rate), Path("results/bench-hardware.json"))[0]
    runs = [MIXES[0], *(run for run in OTHERS if run.other.get("attention") == "host")]
    samples = profile(case.shape, dtype, device, rate, runs=runs).samples
    return fit_hardware(samples, name="a core each", device="cpu", dtype=dtype)


def line_times(hardware: Hardware, share: float) -> tuple[dict[str, float], float]:
    """Return the seconds of each line's tasks, and of the whole decode window, at a share of ACT."""
    policy = hybrid(share, MINI_BATCH * (34 * 16 + 1))
    wave = admit(Problem(shape=TIMING_SHAPE, dtype=hardware.dtype, hardware=hardware), policy, WORKLOAD)
    seconds: dict[str, float] = {}
    for task in filter(in_window, stream(wave, first_iteration=1)):
        line = hardware.own_line(task.verb, task.resource, task.work.line)
        seconds[task.verb] = seconds.get(task.verb, 0.0) + task_seconds(line, task.resource, task.work)
    return seconds, predicted(wave, hardware).seconds


@bench("profile")
def bench_profile(table: Table) -> None:
    """Compare two profiles of this machine on the lines that carry CARRIED of a decode step, without contention."""
    dtype = fastest_dtype(TIMING_SHAPE, torch.device("cpu"))
    paced, path, profiles = PacedDevice(torch.device("cpu"), 0.5), Path("results/bench-hardware.json"), []
    for number in (1, 2):
        began = time.perf_counter()
        profiles.append(measure_hardware(TIMING_SHAPE, dtype, paced, path, parts=frozenset())[0])
        table.at_most(f"profile {number} of the mixes of KV and ACT", time.perf_counter() - began, 60, "s")
        contention = profiles[-1].notes[CONTENTION]["compute"]
        table.tell(f"contention of compute, profile {number}", contention["factor"], "x", wait_s=contention["wait_s"])
    ratios: dict[str, float] = {}
    for share in (0.5, 1.0):
        (first, step_s), (second, _) = (line_times(hardware, share) for hardware in profiles)
        for verb, seconds in first.items():
            if seconds > CARRIED * step_s:
                ratios[f"{verb}, {share:.0%} ACT"] = max(seconds / second[verb], second[verb] / seconds)
    table.at_most("two profiles, largest ratio of a line", max(ratios.values()), 1.05, "x", ratios=ratios)


def after_trial(run: OverlapRun, case: OverlapCase, hardware: Hardware) -> Hardware:
    """Return the machine as a trial of the policy corrects it."""
    trace = run.session.decode(TRIAL_ITERATIONS)
    record = corrected(hardware, [(case.policy, times_of(trace, hardware.at_work(case.policy)))])
    return with_waiting(record, [(case.policy, trace)], LAST)


def with_its_disk(case: OverlapCase, hardware: Hardware, folder: Path) -> Hardware:
    """Add the lines of the folder's disk where the case has weights on the disk."""
    return with_disk(hardware, measure_disk(DiskPlace(folder))[0]) if case.policy.weights.disk else hardware


@bench("executor")
def bench_overlap(table: Table) -> None:
    """Add the overlap of every case, and the virtual clock's errors."""
    dtype = fastest_dtype(TIMING_SHAPE, torch.device("cpu"))
    errors, corrected_errors, idle, shares = [], [], {}, []
    hardware: dict[int | None, Hardware] = {}
    for case in tqdm(cases(), unit="policy", leave=False):
        with torch_threads(case.num_threads), TemporaryDirectory() as folder:
            if case.num_threads not in hardware:
                hardware[case.num_threads] = profiled(dtype, case)
            lines, place = with_its_disk(case, hardware[case.num_threads], Path(folder)), DiskPlace(folder)
            source, device = RandomWeights(case.shape), torch.device("cpu")
            with closing(Weights(case.shape, source, dtype, device, case.policy, place)) as weights:
                error, after, rounds = measure(table, case, weights, lines)
        errors.append(error)
        corrected_errors.append(after)
        traces = [done.result.trace for done in rounds]
        idle[case.name] = 100 * statistics.median(TraceWindow(trace, LAST).idle_share() for trace in traces)
        shares += [done.others for done in rounds]
    table.errors(f"virtual clock vs measured, {len(errors)} kinds of policy", errors, 12, 25)
    table.errors(f"virtual clock after trials vs measured, {len(errors)} kinds of policy", corrected_errors, 8, 15)
    name = f"launch: compute idle though all was there, of the decode's time, worst of {len(idle)} kinds"
    table.at_most(name, max(idle.values()), 2, "%", by_kind=idle)
    table.disturbed("overlap rounds", shares)


class Decode(NamedTuple):
    """One round: its trace, the window's wall seconds, the ideal seconds of each resource, and the lanes' times."""

    trace: list[TraceEvent]
    wall_s: float
    ideal_s: dict[str, float]
    lanes: dict[str, LaneTimes]


def measured_decode(run: OverlapRun, rates: dict[str, float]) -> Decode:
    """Decode once at these rates, in GB/s."""
    result = run.session.decode_result()
    window = TraceWindow(result.trace, LAST)
    moving_s = {name: window.moved_bytes(name) / (rate * 1e9) for name, rate in rates.items()}
    return Decode(result.trace, window.seconds, moving_s | run.computing_s(), result.lanes)


def usual_decode(decodes: Sequence[Decode]) -> Decode:
    """Return the decode whose wall time is the median of an odd number."""
    return sorted(decodes, key=lambda decode: decode.wall_s)[len(decodes) // 2]


def clock_errors(run: OverlapRun, case: OverlapCase, hardware: Hardware, wall_s: float) -> list[float]:
    """Return the virtual clock's signed errors on this machine, before and after a trial of TRIAL_ITERATIONS."""
    records = hardware, after_trial(run, case, hardware)
    return [wall_s / predicted(run.session.wave, record).seconds - 1 for record in records]


def measure(
    table: Table, case: OverlapCase, weights: Weights, hardware: Hardware
) -> tuple[float, float, list[Round[Decode]]]:
    """Add the row of one case; return the signed errors of the virtual clock, before and after a trial of
    TRIAL_ITERATIONS, and the rounds."""
    first_guess = balanced_rate(case, weights.bytes_per_element, hardware)
    run = OverlapRun(case, weights, at_rates(hardware, rates_of(case, first_guess)))
    # The guess decides KVPR's split. The pace follows from the compute time here and now, measured undisturbed: a
    # longer time would slow the link down and make the balance easier.
    (alone,) = least_disturbed(run.computing_s, 1)
    rates = rates_of(case, run.planned_bytes(case.paced) / max(alone.result.values()) / 1e9)
    run.set_rates(rates)

    rounds = least_disturbed(partial(measured_decode, run, rates), ROUNDS)
    decodes = [done.result for done in rounds]
    ideals = {name: statistics.median(decode.ideal_s[name] for decode in decodes) for name in decodes[0].ideal_s}
    binding, second = sorted(ideals, key=lambda name: -ideals[name])[:2]
    samples = [max(decode.ideal_s.values()) / decode.wall_s for decode in decodes]
    overlap, usual = statistics.median(samples), usual_decode(decodes)
    wall_s = usual.wall_s
    error, after = clock_errors(run, case, at_rates(hardware, rates), wall_s)
    balance = ideals[second] / ideals[binding]
    if balance >= JUDGED_BALANCE:
        conditions = {"balance": balance, "binding": binding, "second": second, "rates": rates}
        conditions |= {"virtual_clock_error": error, "samples": samples}
        conditions["lanes"] = {name: asdict(times) for name, times in usual.lanes.items()}
        table.at_least(f"overlap, {case.name}", overlap, BAR, "x", **conditions)
    else:
        tqdm.write(f"     overlap, {case.name}: {overlap:.3f}, not judged: {second} is {balance:.2f} of {binding}")
    parts = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in ideals.items())
    tqdm.write(
        f"     {case.name}: {case.paced} at {rates[case.paced]:.3g} GB/s; ideals {parts} ms of {1e3 * wall_s:.0f}; "
        f"tokens/s on the virtual clock {error:+.0%}, after a trial {after:+.0%}"
    )
    return error, after, rounds
