"""Speed of a resident run: OPT-6.7B in 18 GiB, whose weights and cache lie on the GPU, some requests at a time.

Two ways to go through the requests: wave after wave, and as a job does, in a batch whose places are taken again. Then
one decode of a wave: what CUDA graphs save of it, and how long the GPU's kernels take of it by CUPTI.
"""

import torch

from experiments.bench.harness import Table
from experiments.gpu.bench import bench_graphs
from experiments.gpu.cases import RESIDENT
from experiments.gpu.mix import UNTIMED, Run, bound_memory
from experiments.gpu.setting import gpu
from experiments.gpu.watch import under_cupti
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.waves import batch_size, open_batch, split_waves
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import PacedDevice, best_policy, named_hardware
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.session import Session, random_prompts
from sim.simulate import simulate

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
    groups = split_waves(problem, policy, requests)
    count = len(groups[0])
    batch = open_batch(problem, policy, requests, *batch_size(problem, policy, requests, count))

    def session_of(requests: int, tokens: int = case.answer, first: int = 0) -> Session:
        wave = admit(problem, policy, Workload.uniform(requests, case.prompt, tokens))
        return Session(engine, wave, prompts[first : first + requests])

    sizes = buffer_sizes(admit(problem, policy, Workload.uniform(count, case.prompt, case.answer)))
    engine = Engine(run.weights(policy), policy, sizes.merge(buffer_sizes(batch)))
    try:
        session_of(count, 4).generate(UNTIMED)

        def in_waves() -> list[list[int]]:
            results = [session_of(len(group), first=int(group[0])).generate(UNTIMED) for group in groups]
            return [answer for result in results for answer in result.tokens]

        def refilled() -> list[list[int]]:
            return engine.run(engine.executor(batch, prompts, greedy_plan(len(prompts))), UNTIMED).tokens

        for name, way in (("waves", in_waves), ("refilled", refilled)):
            tokens: list[list[int]] = []
            wall_s = run.seconds(lambda way=way, tokens=tokens: tokens.extend(way()))
            speed = sum(map(len, tokens)) / wall_s
            told = {"wall_s": wall_s, "at a time": count, "waves": len(groups)}
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


def run_resident(table: Table) -> None:
    """Add the rows on this GPU."""
    device = gpu()
    run = Run(table, "resident", RESIDENT, device, named_hardware(None, PacedDevice(device)))
    bound_memory(run)
    try:
        measure_resident(run)
    finally:
        run.close()
