"""Bench rows of overlap on a GPU, at a setting for which the link and the device need nearly equally long.

Weights are resident and the cache lies on the host as layer inputs: what crosses the link and what the device
recomputes then take about as long on a PCIe 5 machine. Compute's ideal is the time of its kernels. The time of the same
steps as they are launched, without the link, stands beside it: where launching takes longer than the kernels, an ideal
of launched steps would call a slow launcher good overlap. Kernels are slower where the card is at its power's limit
than in a short burst: CUPTI times them in the long run too.
"""

import statistics
from itertools import groupby

import torch

from experiments.bench.harness import Table, seconds_of
from experiments.gpu.setting import Setting, gpu, make_bench
from experiments.gpu.watch import device_seconds, under_cupti
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.task import Task
from flexhybrid.jobs.compare.speed import PolicyRun
from flexhybrid.runtime.engine import RunControl

SETTING = Setting("opt-6.7b", "float16", 32, 512, 48, 16)
OVERLAP_BAR, BALANCE_BAR = 0.95, 0.7
LAUNCHING_BAR = 1.05  #: seconds of launched steps over seconds of their kernels in the same run
LINK_BYTES = 256 << 20  #: of a copy that measures the link
SAMPLED_ITERATIONS = 5  #: whose kernels are timed behind a sleep
ROUNDS = 2  #: of decodes, of which the faster one counts
LONGEST_SLEEP_S = 2.0
CYCLES_PER_S = 2e9  #: of a GPU's clock, roughly


def bench_overlap_cuda(table: Table, setting: Setting = SETTING) -> None:
    """Add the rows of the cache as layer inputs on the host."""
    device = gpu()
    policy = Policy(
        "resident, ACT", Placement(device=1.0), cache={"act@host": 1.0}, max_mini_batch_tokens=setting.mini_batch_tokens
    )
    with make_bench(shape_by_name(setting.model), device, setting) as bench:
        _add_rows(table, f"{setting.model}, {policy.name}", PolicyRun(bench, policy), link_bytes_per_s(device))


def run_overlap(table: Table, option: str, _seconds: float) -> None:
    """Add the rows of a decode of ``option`` tokens."""
    bench_overlap_cuda(table, SETTING._replace(max_tokens=int(option)))


def _add_rows(table: Table, name: str, run: PolicyRun, bytes_per_s: float) -> None:
    on_cuda = run.engine.device.type == "cuda"
    plan = list(stream(run.wave, first_iteration=1))
    link_s = sum(task.work.link_bytes for task in plan if task.resource == "h2d") / bytes_per_s
    _decode_seconds(run)  # kernels are compiled, and graphs captured
    wall_s = min(_decode_seconds(run) for _ in range(ROUNDS))
    with run.engine.without_copies():
        launched_s = min(_decode_seconds(run) for _ in range(ROUNDS))
        burst_s = kernel_seconds(run, [task for task in plan if task.resource == "compute"])
        cupti = under_cupti(lambda: _decode_seconds(run), on_cuda)
    kernels_s = cupti.get("kernels_s", burst_s)
    low, high = sorted((link_s, kernels_s))
    told = {"link_s": link_s, "kernels_s": kernels_s, "burst_s": burst_s, "launched_s": launched_s, "wall_s": wall_s}
    table.at_least(f"GPU, {name}: balance of link and kernels", low / high, BALANCE_BAR, "x", **told, cupti=cupti)
    table.at_least(f"GPU, {name}: overlap, by kernels", high / wall_s, OVERLAP_BAR, "x", balance=low / high)
    launched = max(link_s, launched_s) / wall_s
    table.at_least(f"GPU, {name}: overlap, by launched steps", launched, OVERLAP_BAR, "x")
    table.at_most(f"GPU, {name}: launching over kernels", launched_s / kernels_s, LAUNCHING_BAR, "x", cupti=cupti)


def _decode_seconds(run: PolicyRun) -> float:
    """Return the seconds of a whole decode, of which no trace is kept: as in a job, verbs are launched together."""
    return seconds_of(lambda: run.session.decode_result(control=RunControl()))


def link_bytes_per_s(device: torch.device) -> float:
    """Return the rate of large copies from page-locked memory (of a CPU: within its memory)."""
    on_gpu = device.type == "cuda"
    there = torch.empty(LINK_BYTES if on_gpu else 1 << 20, dtype=torch.uint8, device=device)
    here = torch.empty_like(there, device="cpu", pin_memory=on_gpu)

    def copy() -> None:
        there.copy_(here, non_blocking=True)

    return here.nbytes / device_seconds({"h2d": copy}, on_gpu)["h2d"]


def kernel_seconds(run: PolicyRun, tasks: list[Task]) -> float:
    """Return the seconds of these compute tasks of a decode, without the link and without the launcher: of a few
    iterations of them, evenly spread, each launched as a whole behind a sleep of the device.

    Raises RuntimeError where no sleep is long enough: a task waits for the device.
    """
    iterations = [list(group) for _, group in groupby(tasks, key=lambda task: task.iteration)]
    chosen = iterations[:: max(1, len(iterations) // SAMPLED_ITERATIONS)]
    with run.engine.without_copies(), run.engine.process_settings():
        timed = _behind_a_sleep if run.engine.device.type == "cuda" else _one_after_another
        return statistics.mean(timed(run, iteration) for iteration in chosen) * len(iterations)


def _behind_a_sleep(run: PolicyRun, tasks: list[Task]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep_s = 0.1
    while sleep_s <= LONGEST_SLEEP_S:
        torch.cuda._sleep(int(sleep_s * CYCLES_PER_S))
        begin.record()
        _one_after_another(run, tasks)
        end.record()
        asleep = not begin.query()  # all was launched before the first kernel could run
        torch.cuda.synchronize()
        if asleep:
            return 1e-3 * begin.elapsed_time(end)
        sleep_s *= 2
    raise RuntimeError(f"launching an iteration takes longer than {LONGEST_SLEEP_S:g} s, or waits for the device")


def _one_after_another(run: PolicyRun, tasks: list[Task]) -> float:
    return seconds_of(lambda: [run.session.executor.perform(task) for task in tasks])
