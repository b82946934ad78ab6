"""Bench rows of copies: how large they are on OPT-6.7B after 128 generated tokens, counted from the executor's verbs.

Nothing is computed and no memory is taken: buffers are torch's meta tensors, the verbs that move data run as they are
through the CUDA link's own copies, and every copy that torch is asked for is counted.

A mini-batch stores its new tokens of one kind in one copy, and where requests differ in length some of them are at an
ACT block while others are at a KV block: how many changes with every iteration. So copies are counted over a
whole turn of the dealing, two blocks. A token stored in 4 bits has 0.28 of its bytes: with as many requests in a
mini-batch its stores cannot reach the bar, nor its loads where lengths differ.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.memory import buffer_sizes
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime import buffers
from flexhybrid.runtime.cuda import CudaCopies
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.verbs import VERBS
from sim.catalogue import load
from sim.presets import act_only, hybrid, kv_only, kvpr_column

BATCH, PROMPTS, GENERATED = 32, (256, 512), 128
TURN = 2 * BLOCK_TOKENS  #: iterations in which a half-and-half cache has filled a block of either kind
LOADS, STORES = ("load_kv", "load_act"), ("store_kv", "store_act")
BARS = {"loads": 2**20, "stores": 2**16}  #: bytes


class CountCopies(TorchDispatchMode):
    """Collects the bytes of every copy."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return function(*args, **(kwargs or {}))


class MetaMemory:
    """Stands for host memory where nothing is to be allocated."""

    def zeros(self, size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")


def policies() -> dict[str, list[Policy]]:
    """What the papers keep on the host, by how it is stored. Packed rows are smaller, and so are their copies."""
    half = hybrid(0.5)
    packed = replace(half, name="hybrid(0.5), 4 bits", bits=Bits(kv=4, act=4))
    return {"native bits": [kv_only(), act_only(), half, kvpr_column("pipeline")], "4 bits": [packed]}


def copies_of(wave: Wave) -> dict[str, list[int]]:
    """Bytes of each copy call of a turn's loads and stores, every layer alike: those of one."""
    with patch.object(buffers, "HostMemory", lambda pinned: MetaMemory()):
        held = buffers.Buffers(wave.shape, wave.policy, buffer_sizes(wave), torch.float16, torch.device("meta"))
    executor = SimpleNamespace(buffers=held, copies=CudaCopies(), selection=SelectionHooks())
    found = {"loads": [], "stores": []}
    for task in stream(wave, first_iteration=GENERATED):
        if task.layer != 1:
            continue
        for what, verbs in (("loads", LOADS), ("stores", STORES)):
            if task.verb in verbs:
                with CountCopies() as counted:
                    VERBS[task.verb](executor, task)
                found[what] += counted.sizes
    return found


def bench_copies(table) -> None:
    """Mean bytes of a copy for requests of one length and of mixed lengths: the smallest mean over the policies."""
    shape, hardware = replace(shape_by_name("opt-6.7b"), num_layers=2), load("a100-40g")
    problem = Problem(shape=shape, dtype="float16", hardware=hardware)
    mixed = np.random.default_rng(0).integers(PROMPTS[0], PROMPTS[1] + 1, BATCH)
    for where, prompts in (("prompts of 512", np.full(BATCH, PROMPTS[1])), ("prompts of 256 to 512", mixed)):
        workload = Workload(prompts, np.full(BATCH, GENERATED + TURN))
        for bits, alike in policies().items():
            found = {p.name: copies_of(admit(problem, p, workload)) for p in alike}
            for what, bar in BARS.items():
                means = {name: statistics.mean(sizes[what]) for name, sizes in found.items()}
                name = f"copies: mean bytes of {what}, {where}, {bits}"
                table.add(name, min(means.values()), bar, "bytes", by_policy=means)
