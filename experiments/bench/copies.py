"""Bench rows of copies: their sizes on OPT-6.7B after 128 generated tokens, counted from the executor's verbs.

Nothing is computed and no memory is allocated: buffers are torch's meta tensors, the verbs that move data use the CUDA
link's copies, and every copy call of torch and of CUDA is counted.

A mini-batch stores its new tokens of one cache entry in one copy. Where requests differ in length, some are at an ACT
block while others are at a KV block, and their numbers change with every iteration, so copies are counted over the two
blocks in which the assignment repeats. A token in 4 bits has 0.28 of its bytes: with equal mini-batches its stores
cannot reach the bar, nor can its loads where lengths differ.
"""

import statistics
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.bench.harness import Table
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime import buffers, cuda
from flexhybrid.runtime.cuda import CudaCopies
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.verbs import VERB_FUNCTIONS
from sim.catalogue import load
from sim.presets import act_only, hybrid, kv_only, kvpr_column

BATCH, PROMPTS, GENERATED = 32, (256, 512), 128
TURN = 2 * BLOCK_TOKENS  #: iterations in which a half-and-half cache fills a block of both entries
LOADS, STORES = ("load_kv", "load_act"), ("store_kv", "store_act")
BARS = {"loads": 2**20, "stores": 2**16}  #: bytes


class CountCopies(TorchDispatchMode):
    """Collects the bytes of every copy."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def rows(self, *sizes: int) -> int:
        """Stand in for ``cuda.memcpy_2d``: a call copies a run of blocks."""
        _, _, _, _, width, height, _, _ = sizes
        self.sizes.append(width * height)
        return 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return function(*args, **(kwargs or {}))


def policies() -> dict[str, list[Policy]]:
    """Return the papers' host caches by their bits; quantized rows have smaller copies."""
    half = hybrid(0.5)
    packed = replace(half, name="hybrid(0.5), 4 bits", bits=Bits(kv=4, act=4))
    return {"native bits": [kv_only(), act_only(), half, kvpr_column("pipeline")], "4 bits": [packed]}


def copies_of(wave: Wave) -> dict[str, list[int]]:
    """Return the bytes of each copy call of TURN iterations in one layer: {"loads": […], "stores": […]}."""
    meta = SimpleNamespace(zeros=lambda size, dtype: torch.empty(size, dtype=dtype, device="meta"))
    with patch.object(buffers, "HostMemory", lambda pinned: meta):
        held = buffers.Buffers(wave.shape, wave.policy, buffer_sizes(wave), torch.float16, torch.device("meta"))
    executor = SimpleNamespace(buffers=held, copies=CudaCopies(), selection=SelectionHooks())
    sizes: dict[str, list[int]] = {"loads": [], "stores": []}
    for task in stream(wave, first_iteration=GENERATED):
        if task.layer != 1:
            continue
        for direction, verbs in (("loads", LOADS), ("stores", STORES)):
            if task.verb in verbs:
                counted = CountCopies()
                calls = patch.object(cuda, "memcpy_2d", lambda counted=counted: counted.rows)
                with calls, patch.object(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0)), counted:
                    VERB_FUNCTIONS[task.verb](executor, task)
                sizes[direction] += counted.sizes
    return sizes


def bench_copies(table: Table) -> None:
    """The mean bytes of a copy, for requests of equal and of mixed lengths: the smallest mean over the policies."""
    shape, hardware = replace(shape_by_name("opt-6.7b"), num_layers=2), load("a100-40g")
    problem = Problem(shape=shape, dtype="float16", hardware=hardware)
    mixed = np.random.default_rng(0).integers(PROMPTS[0], PROMPTS[1] + 1, BATCH)
    for where, prompts in (("prompts of 512", np.full(BATCH, PROMPTS[1])), ("prompts of 256 to 512", mixed)):
        workload = Workload(prompts, np.full(BATCH, GENERATED + TURN))
        for bits, group in policies().items():
            by_policy = {policy.name: copies_of(admit(problem, policy, workload)) for policy in group}
            for direction, bar in BARS.items():
                means = {name: statistics.mean(sizes[direction]) for name, sizes in by_policy.items()}
                name = f"copies: mean bytes of {direction}, {where}, {bits}"
                table.at_least(name, min(means.values()), bar, "bytes", by_policy=means)
