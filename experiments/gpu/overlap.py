"""Overlap on a GPU, at a setting for which the link and the device need nearly equally long.

Weights are resident and the cache lies on the host as layer inputs: what crosses the link and what the device
recomputes then take about as long on a PCIe 5 machine. Compute's ideal is the time of its kernels, by CUPTI in the same
decode without the link: in a short burst they are faster than at the limit of the card's power. The time of the same
steps as they are launched stands beside it: where launching takes longer than the kernels, an ideal of launched steps
would call a slow launcher good overlap.
"""

from contextlib import closing
from dataclasses import replace

import torch

from experiments.bench.harness import Table
from experiments.gpu.cases import OVERLAP
from experiments.gpu.mix import UNTIMED, Run, bound_memory
from experiments.gpu.watch import device_seconds, gpu, under_cupti
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.session import Session

OVERLAP_BAR, BALANCE_BAR = 0.95, 0.7
LAUNCHING_BAR = 1.05  #: seconds of launched steps over seconds of their kernels
LINK_BYTES = 256 << 20  #: of a copy that measures the link
ROUNDS = 2  #: of decodes, of which the faster one counts


def run_overlap(table: Table, option: str, _seconds: float) -> None:
    """Add the rows of a decode of ``option`` tokens, in two mini-batches."""
    case = replace(OVERLAP, answer=int(option))
    run, bound = Run(table, "overlap", case, gpu(), None), case.most // 2 * (case.prompt + case.answer + 33)
    policy = Policy("ACT", Placement(device=1.0), cache={"act@host": 1.0}, max_mini_batch_tokens=bound)
    bound_memory(run)
    wave = admit(run.problem, policy, Workload.uniform(case.most, case.prompt, case.answer))
    try:
        with closing(Engine(run.weights(policy), policy, buffer_sizes(wave))) as engine:
            session = Session(engine, wave)
            session.generate(UNTIMED)
            add_rows(run, session)
    finally:
        run.close()


def add_rows(run: Run, session: Session) -> None:
    """Add the balance of link and kernels, overlap by kernels and by launched steps, and launching over kernels."""

    def decode() -> None:
        session.decode_result(control=UNTIMED)

    loads = (task.work.link_bytes for task in stream(session.wave, first_iteration=1) if task.resource == "h2d")
    link_s = sum(loads) / link_bytes_per_s(run.device)
    decode()  # kernels are compiled, and graphs captured
    wall_s = min(run.seconds(decode) for _ in range(ROUNDS))
    with session.engine.without_copies():
        launched_s = min(run.seconds(decode) for _ in range(ROUNDS))
        cupti = under_cupti(decode, run.on_cuda)
    kernels_s = cupti.get("kernels_s", launched_s)  # without CUPTI no more is known
    low, high = sorted((link_s, kernels_s))
    told = {"link_s": link_s, "kernels_s": kernels_s, "launched_s": launched_s, "wall_s": wall_s, "cupti": cupti}
    table = run.table
    table.at_least("overlap: balance of link and kernels", low / high, BALANCE_BAR, "x", **told)
    table.at_least("overlap: by kernels", high / wall_s, OVERLAP_BAR, "x", **told)
    table.at_least("overlap: by launched steps", max(link_s, launched_s) / wall_s, OVERLAP_BAR, "x", **told)
    table.at_most("overlap: launching over kernels", launched_s / kernels_s, LAUNCHING_BAR, "x", **told)


def link_bytes_per_s(device: torch.device) -> float:
    """Return the rate of large copies from page-locked memory (on a CPU: within its memory)."""
    on_gpu = device.type == "cuda"
    there = torch.empty(LINK_BYTES if on_gpu else 1 << 20, dtype=torch.uint8, device=device)
    here = torch.empty_like(there, device="cpu", pin_memory=on_gpu)
    return here.nbytes / device_seconds({"h2d": lambda: there.copy_(here, non_blocking=True)}, on_gpu)["h2d"]
