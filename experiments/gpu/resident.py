"""Speed of a resident run: OPT-6.7B in 18 GiB, whose weights and cache lie on the GPU, some requests at a time.

Two ways to go through the requests: wave after wave, and as a job does, in a batch whose places are taken again. Then
one decode of a wave: what CUDA graphs save of it, and how long the GPU's kernels take of it by CUPTI.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

from experiments.bench.harness import Table
from experiments.gpu.cases import RESIDENT
from experiments.gpu.mix import UNTIMED, Run, bound_memory
from experiments.gpu.watch import gpu, under_cupti
from flexhybrid.core.admission import batch_size, first_wave, open_batch
from flexhybrid.core.memory import GRAPH_BYTES
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import PacedDevice, best_policy, named_hardware
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.session import Session, random_prompts
from sim.simulate import simulate

#: What graphs make of the time to launch at least: a layer's 13 launches and their views become four calls, or one; and
#: what one makes of a decode's time.
GRAPHS_BAR, JOINT_BAR, GRAPH_TURNS = 2.0, 1.1, 3
SPEED_BAR, PREDICTION_BAR, IDLE_BAR = 1050.0, 10.0, 5.0  #: tokens/s on an H200, percent, percent


def measure_resident(run: Run) -> None:
    """Add all rows of the policy that "auto" settles on."""
    case, problem, table = run.case, run.problem, run.table
    requests = Workload.uniform(case.most, case.prompt, case.answer)
    prompts = random_prompts(requests, case.shape.vocab)
    policy = best_policy(problem, requests)
    predicted = simulate(problem, policy, case.most, case.prompt, case.answer).tokens_per_s if run.hardware else None
    if predicted:
        table.tell("resident: predicted", predicted, "tokens/s", policy=policy.to_dict())
    count = first_wave(problem, policy, requests)
    waves = [range(first, min(first + count, case.most)) for first in range(0, case.most, count)]
    batch = open_batch(problem, policy, requests, batch_size(problem, policy, requests, count))

    def session_of(requests: int, tokens: int = case.answer, first: int = 0) -> Session:
        wave = admit(problem, policy, Workload.uniform(requests, case.prompt, tokens))
        return Session(engine, wave, prompts[first : first + requests])

    sizes = buffer_sizes(admit(problem, policy, Workload.uniform(count, case.prompt, case.answer)))
    engine = Engine(run.weights(policy), policy, sizes.merge(buffer_sizes(batch)))
    try:
        session_of(count, 4).generate(UNTIMED)

        def in_waves() -> list[list[int]]:
            results = [session_of(len(wave), first=wave[0]).generate(UNTIMED) for wave in waves]
            return [answer for result in results for answer in result.tokens]

        def refilled() -> list[list[int]]:
            return engine.run(engine.executor(batch, prompts, greedy_plan(len(prompts))), UNTIMED).tokens

        for name, way in (("waves", in_waves), ("refilled", refilled)):
            tokens: list[list[int]] = []
            wall_s = run.seconds(lambda way=way, tokens=tokens: tokens.extend(way()))
            speed = sum(map(len, tokens)) / wall_s
            told = {"wall_s": wall_s, "at a time": count, "waves": len(waves)}
            table.at_least(f"resident, {name}: measured", speed, SPEED_BAR, "tokens/s", **told)
            if predicted:
                error = 100 * abs(predicted / speed - 1)
                table.at_most(f"resident, {name}: error of the prediction", error, PREDICTION_BAR, "%")
        session = session_of(count)
        bench_graphs(table, "resident", session, lambda: torch.cuda.mem_get_info()[0])
        add_idle_row(run, session)
    finally:
        engine.close()


def add_idle_row(run: Run, session: Session) -> None:
    """Add the share of an untraced decode in which no kernel ran: its time by the clock, its kernels' by CUPTI."""
    session.generate(UNTIMED)
    wall_s = min(run.seconds(lambda: session.decode_result(control=UNTIMED)) for _ in range(2))
    cupti = under_cupti(lambda: session.decode_result(control=UNTIMED), run.on_cuda)
    steps = (run.case.answer - 1) * run.case.shape.num_layers
    told = {"wall_s": wall_s, "cupti": cupti, "wall_us_a_layer": 1e6 * wall_s / steps}
    if (kernels_s := cupti.get("kernels_s")) is None:
        run.table.failed("resident: idle GPU in a decode", cupti.get("error", "no CUPTI on a CPU"), **told)
        return
    told["kernels_us_a_layer"] = 1e6 * kernels_s / steps
    idle = 100 * (1 - kernels_s / wall_s)
    run.table.at_most("resident: idle GPU in a decode", idle, IDLE_BAR, "%", **told)


def bench_graphs(table: Table, name: str, session: Session, free_bytes: Callable[[], int]) -> None:
    """Add what CUDA graphs save of a decode's launches and of its time, and what the driver keeps for them, where the
    policy has them; all ways compute over the same memory, in turn. ``free_bytes``: of the device."""
    graphs = session.executor.graphs
    if graphs is None:
        return
    graphs.enabled = False
    session.generate(UNTIMED)
    graphs.forget()
    held, free = torch.cuda.memory_reserved(), free_bytes()
    graphs.enabled = True
    _untraced_decode(session)  # forms are seen, and captured
    kept = (free - free_bytes()) - (torch.cuda.memory_reserved() - held)
    row = f"CUDA graphs, {name}: bytes that the driver keeps of a graph, over those that the plan counts"
    table.at_most(row, kept / (GRAPH_BYTES * graphs.num_held()), 1.0, "x", bytes=kept)
    ways = {"joint": (True, True, True), "a layer": (True, True, False), "a verb": (True, False, False)}
    ways["none"] = False, True, True
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(1 + GRAPH_TURNS):  # the first one captures
        for way, (graphs.enabled, graphs.joins, graphs.joins_steps) in ways.items():
            sample = _untraced_decode(session)
            samples[way] += [sample] if turn else []
    graphs.enabled = graphs.joins = graphs.joins_steps = True
    medians = {way: [median(figures) for figures in zip(*of, strict=True)] for way, of in samples.items()}
    (joint_s, launching_s), (layers_s, _), (apart_s, _), (without_s, launching_without_s) = medians.values()
    told = {"seconds and those of launching": medians, "graphs": graphs.summary()}
    row = f"CUDA graphs, {name}: a decode's time to launch without them, over with them"
    table.at_least(row, launching_without_s / launching_s, GRAPHS_BAR, "x", **told)
    row = f"CUDA graphs, {name}: a decode's time without them, over with them"
    table.at_least(row, without_s / joint_s, 1.0, "x")
    row = f"CUDA graphs, {name}: a decode's time with a graph a verb, over one for verbs with nothing between them"
    table.at_least(row, apart_s / layers_s, JOINT_BAR, "x")
    row = f"CUDA graphs, {name}: a decode's time with a graph a layer, over one a step where steps may have one"
    table.at_least(row, layers_s / joint_s, 1.0, "x")


def _untraced_decode(session: Session) -> tuple[float, float]:
    """Return the seconds of a decode without a trace, and the seconds of launching in it."""
    start = time.perf_counter()
    launching_s = session.decode_result(control=UNTIMED).launch_s
    return time.perf_counter() - start, launching_s


def run_resident(table: Table) -> None:
    """Add the rows on this GPU."""
    device = gpu()
    run = Run(table, "resident", RESIDENT, device, named_hardware(None, PacedDevice(device)))
    bound_memory(run)
    try:
        measure_resident(run)
    finally:
        run.close()
