"""Does a mix of KV and ACT pay on this GPU? The searched policy against the best of one representation alone.

Each policy is searched by this machine's record within equal budgets, which torch's allocator enforces, and predicted
before it runs. All run the same random prompts over the same random weights; no trace is kept. The settings:
``cases``.
"""

import gc
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from experiments.bench.harness import Table, seconds_of
from experiments.gpu.cases import CASES, Case
from experiments.gpu.runner import WITHOUT_GRAPHS
from experiments.gpu.watch import gpu, under_cupti
from experiments.peers.accelerate_disk import same_tokens
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import CONTEXT_BYTES
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import PacedDevice, named_hardware
from flexhybrid.runtime.engine import Engine, RunControl
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights, release_cached
from policy_search.search import LOSSLESS, SearchSettings, search

KV, ACT = ("kv@device", "kv@host"), ("act@device", "act@host")
#: Kind of a policy -> the cache entries that its search may use.
ENTRIES = {"mix": (*KV, *ACT), "mix with tok": (*KV, *ACT, "tok"), "act": ACT, "kv": KV, "waves": (*KV, *ACT)}
UNTIMED = RunControl()  #: keeps no trace
PREDICTION_BAR = 15.0  #: percent
TRACED_ITERATIONS = 2  #: under CUPTI
WARM_SHARE = 8  #: 1/8 of the requests warm a policy up


@dataclass
class Run:
    """A case on a device with a machine's record, and the results of its policies so far."""

    table: Table
    name: str
    case: Case
    device: torch.device
    hardware: Hardware | None
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)  #: by kind
    speeds: dict[str, tuple[float, float]] = field(default_factory=dict)  #: whole run and decode, tokens/s
    _weights: dict[Any, Weights] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def problem(self) -> Problem:
        case, shape = self.case, self.case.shape
        budgets = Budgets(case.device_bytes, parse_bytes(case.host))
        paths = fastest_paths(self.device.type, self.case.dtype, shape.queries_per_key, shape.head_dim)
        return Problem(
            shape=shape,
            dtype=self.case.dtype,
            hardware=self.hardware,
            budgets=budgets,
            device=self.device.type,
            attention=paths,
            cuda_graphs=case.cuda_graphs and WITHOUT_GRAPHS not in os.environ,
        )

    def policy(self, kind: str) -> tuple[Policy, int]:
        """Search a kind's best policy; return it and its requests at a time, and add its prediction as a row. Raise
        InputError where nothing fits, and without a record."""
        case, problem = self.case, self.problem
        if self.hardware is None:
            raise InputError("no record of this machine: run the part profile")
        space = replace(LOSSLESS, entries=ENTRIES[kind], both=(), attention=("device",))
        batch = case.most if case.together and kind != "waves" else None
        settings = SearchSettings(batch=batch, max_batch=case.most, space=space)
        found = search(problem, Workload.uniform(case.most, case.prompt, case.answer), settings)
        whole, decode = found.prediction["tokens_per_s"], found.prediction["decode_tokens_per_s"]
        told = {"batch": found.batch, "policy": found.policy.to_dict(), "record": self.hardware.source}
        self.table.tell(f"{self.name}, {kind}: predicted", whole, "tokens/s", **told)
        self.table.tell(f"{self.name}, {kind}: decode, predicted", decode, "tokens/s")
        return found.policy, found.batch

    def weights(self, policy: Policy) -> Weights:
        """Return the weights at a policy's placement; free those at another one first."""
        if policy.weights not in self._weights:
            self.close()
            shape = self.case.shape
            source = RandomWeights(shape, device=self.device.type)
            self._weights[policy.weights] = Weights(shape, source, self.case.dtype, self.device, policy)
        return self._weights[policy.weights]

    def measure(self, kind: str) -> None:
        """Add the rows of a kind of policy: the whole run, its decode, and the errors of the predictions."""
        policy, batch = self.policy(kind)
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        case, problem = self.case, self.problem
        generator = np.random.default_rng(0)  # a smaller batch has the first prompts of a larger one
        prompts = [generator.integers(3, case.shape.vocab, case.prompt).tolist() for _ in range(batch)]
        full = admit(problem, policy, Workload.uniform(batch, case.prompt, case.answer))
        with closing(Engine(self.weights(policy), policy, buffer_sizes(full))) as engine:
            warm = max(1, batch // WARM_SHARE)
            few = admit(problem, policy, Workload.uniform(warm, case.prompt, min(3, case.answer)))
            Session(engine, few, prompts[:warm]).generate(UNTIMED)
            session, results = Session(engine, full, prompts), []
            whole_s = self.seconds(lambda: results.append(session.generate(UNTIMED)))
            count = min(case.decoded, case.answer - 1)
            decode_s = self.seconds(lambda: results.append(session.decode_result(count, UNTIMED)))
            self.tokens[kind] = results[0].tokens
            self.speeds[kind] = batch * case.answer / whole_s, batch * count / decode_s
            told = {"batch": batch, "wall_s": whole_s, "mini_batches": len(full.mini_batches)}
            decoded = {"wall_s": decode_s, "iterations": count, "launch_s": results[1].launch_s}
            self.tell_measured(
                f"{self.name}, {kind}", self.speeds[kind], (told, decoded | {"graphs": results[1].graphs})
            )
            cupti = under_cupti(lambda: session.decode_result(min(count, TRACED_ITERATIONS), UNTIMED), self.on_cuda)
            self.table.tell(f"{self.name}, {kind}: decode under CUPTI", cupti.get("wall_s", 0.0), "s", cupti=cupti)

    def tell_measured(self, what: str, speeds: tuple[float, float], beside: tuple[dict, dict]) -> None:
        """Add the rows of a run, its decode and the memory torch holds, before CUPTI, which may end the process."""
        if self.on_cuda:
            held = torch.cuda.max_memory_reserved() + CONTEXT_BYTES
            self.table.at_most(f"{what}: memory over the budget", held / self.case.device_bytes, 1.0, "x")
        for part, speed, told in zip(("", "decode, "), speeds, beside, strict=True):
            self.table.tell(f"{what}: {part}measured", speed, "tokens/s", **told)
            predicted = self.table.rows[f"{what}: {part}predicted"]["value"]
            error = 100 * abs(predicted / speed - 1)
            self.table.at_most(f"{what}: {part}error of the prediction", error, PREDICTION_BAR, "%")

    def seconds(self, action: Callable[[], object]) -> float:
        """Time an action until the device is done with it."""
        return seconds_of(lambda: (action(), torch.cuda.synchronize() if self.on_cuda else None))

    def compare(self) -> None:
        """Add the rows that compare kinds: their speeds, and their tokens up to each request's first difference."""
        for (faster, slower), bar in self.case.bars.items():
            if {faster, slower} <= self.speeds.keys():
                whole, decode = (a / b for a, b in zip(self.speeds[faster], self.speeds[slower], strict=True))
                self.table.at_least(f"{self.name}, decode: {faster} over {slower}", decode, bar, "x")
                self.table.tell(f"{self.name}, whole run: {faster} over {slower}", whole, "x")
        first, *others = self.tokens or [""]
        for kind in others:
            same = same_tokens(self.tokens[first], self.tokens[kind])
            row = f"{self.name}: tokens of {kind} that are those of {first}"
            note = "float16 rounds recomputed keys and values otherwise: random weights leave many ties"
            self.table.at_least(row, same["equal"] / same["of"], 1.0, "of 1", **same, note=note)

    def close(self) -> None:
        """Free the weights and the allocator's memory."""
        for weights in self._weights.values():
            weights.close()
        self._weights.clear()
        gc.collect()
        release_cached(self.device)


def run_case(run: Run) -> None:
    """Measure each kind of policy of a case; a failure becomes a row, and the other kinds go on."""
    bound_memory(run)
    try:
        for kind in run.case.kinds:
            try:
                run.measure(kind)
            except (InputError, RuntimeError) as error:
                run.table.failed(f"{run.name}, {kind}", f"{type(error).__name__}: {error}".splitlines()[0])
            gc.collect()  # an engine's buffers go before the next one's come, which count in the same budget
            release_cached(run.device)
    finally:
        run.compare()  # also where a time limit ends the part
        run.close()


def bound_memory(run: Run) -> None:
    """Limit torch's allocator to what a plan within the run's budget may use."""
    if run.on_cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (run.case.device_bytes - CONTEXT_BYTES) / total))


def run_mix(table: Table, option: str, _seconds: float) -> None:
    """Add the rows of a setting."""
    device = gpu()
    run_case(Run(table, option, CASES[option], device, named_hardware(None, PacedDevice(device))))
