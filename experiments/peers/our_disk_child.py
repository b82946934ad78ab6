"""The process in which we run one batch for ``accelerate_disk``: all layers' weights on the disk, keys and values in
memory; started by file name.

``memory_bound`` says what the request and the answer are, and how memory is bounded.
"""

import time

import numpy as np
import torch

from experiments.peers.children import serve
from experiments.peers.memory_bound import Bound, bounded, proc_bytes, start_threads
from flexhybrid.core.memory import check_budget, memory_plan
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.trace import TraceWindow, busy_seconds, check_trace, iteration_ends
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import DiskPlace, Weights

#: Decode iterations over which the computation alone is timed; the others take as long.
IDEAL_ITERATIONS = 3


def run_ours(request: dict) -> dict:
    """Run one wave with all layers' weights on the disk, keys and values in memory."""
    start_threads(request["threads"])
    bound = Bound()
    policy, prompts = Policy.from_dict(request["policy"]), request["prompts"]
    checkpoint = Checkpoint(request["checkpoint"])
    shape = checkpoint.shape
    problem = Problem(shape=shape, dtype=request["dtype"], device="cpu")
    workload = Workload.uniform(len(prompts), len(prompts[0]), request["gen_tokens"])
    wave = admit(problem, policy, workload)
    sizes = buffer_sizes(wave)
    plan = memory_plan(problem, policy, sizes)
    in_memory = {part: size for tier in ("device", "host") for part, size in plan[tier].items()}
    check_budget({"host": in_memory}, Budgets(host=request["memory_bytes"]), f"batch {len(prompts)}")
    place = DiskPlace(request["folder"])
    weights = Weights(shape, checkpoint, request["dtype"], torch.device("cpu"), policy, place)
    del checkpoint  # unmaps its files
    bound.peak_bytes = 0
    bound.limit(request["memory_bytes"])
    disk = weights.disk
    if disk is None or not disk.direct:
        return {"error": f"reads of {disk.describe() if disk else 'no disk'}: no fair comparison"}
    engine = Engine(weights, policy, sizes)
    session = Session(engine, wave, prompts)
    read_before = proc_bytes("io", "read_bytes")
    result = session.generate()
    read_bytes, peak = proc_bytes("io", "read_bytes") - read_before, bound.peak_bytes

    answer = {
        "iteration_end_s": [float(end) for end in iteration_ends(result.trace)],
        "read_bytes": read_bytes,
        "peak_bytes": peak,
        "planned_bytes": sum(in_memory.values()),
        "violations": len(check_trace(result.trace)),
        "busy_s": busy_seconds(result.trace),
        "tokens": np.array(result.tokens).tolist(),
    }
    decode = request["gen_tokens"] - 1
    began = time.perf_counter()  # all layers are read one after another while nothing else runs
    for layer in range(shape.num_layers):
        disk.read([(weights.disk_starts[layer], engine.slots.staging[layer % 2])])
    answer["ideal_disk_s"] = decode * (time.perf_counter() - began)
    disk.enabled = session.engine.copies.enabled = False
    window = TraceWindow(session.decode(IDEAL_ITERATIONS + 1))
    answer["ideal_compute_s"] = window.seconds * decode / window.num_iterations
    engine.close()
    weights.close()
    return answer


if __name__ == "__main__":
    serve({"ours": bounded(run_ours)})
