"""Every kind of policy on the fake device: transformers' tokens, no access out of order, no wait of the host."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from fake_cuda.device import DEVICE, fake_cuda
from fake_cuda.watch import Mixed
from models import InMemory, save_opt
from policies import wider_policies

from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.dependencies import HAZARDS
from flexhybrid.core.trace import check_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime import engine as engine_module
from flexhybrid.runtime.buffers import run_view
from flexhybrid.runtime.clock import Clock
from flexhybrid.runtime.cuda import CudaCopies, CudaStream, Recorded
from flexhybrid.runtime.engine import Engine, RunControl
from flexhybrid.runtime.executor import HiddenStates
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.verbs import VERB_FUNCTIONS, attending
from sim import catalogue

PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 17, list(range(10, 26))]
MAX_TOKENS = 6

MIXED = {"act@host": 0.25, "act@device": 0.25, "kv@host": 0.25, "kv@device": 0.25}
POLICIES = {
    "kv": Policy(cache={"kv@host": 1.0}, max_mini_batch_tokens=100),
    "hybrid": Policy(cache={"act@host": 0.5, "kv@host": 0.5}, max_mini_batch_tokens=100),
    "mixed tiers": Policy(weights=Placement(device=0.4, host=0.6), cache=MIXED, max_mini_batch_tokens=160),
    **wider_policies(wide=100, narrow=60, chunk=16),
}


def run_under(source, policy, changed=None, max_tokens=MAX_TOKENS):
    """Run the prompts on the device. ``changed``: task -> what is run in its place."""
    problem = Problem(shape=source.shape, dtype="float32", device="cuda", hardware=catalogue.load("t4"))
    workload = Workload(np.array([len(p) for p in PROMPTS]), np.full(len(PROMPTS), max_tokens))
    wave = admit(problem, policy, workload)
    weights = Weights(source.shape, source, "float32", DEVICE, policy)
    engine = Engine(weights, policy, buffer_sizes(wave), num_threads=1)
    try:
        executor = engine.executor(wave, PROMPTS, greedy_plan(len(PROMPTS)))
        tasks = map(changed, stream(wave)) if changed else None
        return engine.run(executor, RunControl(keep_trace=True), tasks)
    finally:
        engine.close()
        weights.close()


def check_clean(result, watch) -> None:
    """No access out of order, no wait of the host, a clean trace; and that something was seen."""
    assert dict(watch.order.faults) == {}
    assert {key: count for key, count in watch.waits.items() if key[1] != "-"} == {}  # "-": outside of verbs
    assert check_trace(result.trace) == []
    device = watch.runs
    assert watch.order.checked > 1000 and device.run_late > 1000 and device.reused > 100 and device.poisoned > 100


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt")
    model = save_opt(folder)
    return Checkpoint(folder), InMemory(model).generate(PROMPTS, MAX_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_policy(checkpoint, name):
    source, expected = checkpoint
    with fake_cuda(seed=len(name)) as watch:
        result = run_under(source, POLICIES[name])
    assert result.tokens == expected
    check_clean(result, watch)


# ---- faults that must be found


def without_hazard(hazard, monkeypatch):
    kinds = [kind for kind in HAZARDS if kind != hazard]
    monkeypatch.setattr(engine_module, "Clock", lambda lanes, on_fail: Clock(lanes, kinds, on_fail))


def hidden_without_a_slot(monkeypatch):
    """Hidden states on their way to the host lie in memory that the next operation may get."""
    monkeypatch.setattr(HiddenStates, "keep", lambda self, task, rows: self.rows.__setitem__(self._key(task), rows))


def no_wait_between_streams(monkeypatch):
    monkeypatch.setattr(CudaStream, "wait", lambda self, recorded: None)


def host_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(Recorded, "synchronize", lambda self: None)


def events_go_back_too_early(monkeypatch):
    """An event is recorded again, on another stream, while others still wait for it."""
    made = Recorded.__init__

    def early(self, events, stream, timed):
        made(self, events, stream, timed)
        events.free[timed].append(self.event)

    monkeypatch.setattr(Recorded, "__init__", early)


def tokens_are_read_at_once(monkeypatch):
    """The planner reads sampled tokens without waiting for their copy."""
    monkeypatch.setattr(Clock, "wait", lambda self, resource, ordinal: None)


def run_before_the_weights_are_there(monkeypatch):
    """The lanes' streams begin while the default stream still fills what they read."""
    current = torch.cuda.current_stream

    class Silent:
        def synchronize(self): ...

    def once(device=None):
        return Silent() if device is not None else current()

    monkeypatch.setattr(engine_module.torch.cuda, "current_stream", once)


def host_memory_in_a_kernel(monkeypatch):
    """A verb computes with rows of the host's pool."""
    gather = attending.gather_blocks

    def mixed(pool, table, targets, column, width):
        gather(torch.zeros(pool.shape), table, targets, column, width)

    monkeypatch.setattr(attending, "gather_blocks", mixed)


def finish_looks_at_its_result(monkeypatch):
    finish = VERB_FUNCTIONS["finish"]

    def looking(state, task):
        finish(state, task)
        float(state.hidden.of(task).sum())

    monkeypatch.setitem(VERB_FUNCTIONS, "finish", looking)


def a_copy_of_strided_memory(monkeypatch):
    """torch copies a strided tensor of the host to a temporary, and waits for it."""

    def copy(self, target, pool, runs):
        source = pool.flatten(1)
        for run in runs:
            region = target[run.row : run.row + run.rows, run.column : run.column + run.blocks]
            for ours, theirs in zip(region.chunk(2, -1), run_view(source, run).chunk(2, -1), strict=True):
                ours.copy_(theirs, non_blocking=True)

    monkeypatch.setattr(CudaCopies, "copy_blocks_h2d", copy)


def undeclared(reads: str = "", writes: str = ""):
    """Tasks of verbs whose names begin so do not say what they read, or write."""

    def changed(task):
        if reads and task.verb.startswith(reads):
            task = task._replace(reads=())
        return task._replace(writes=()) if writes and task.verb.startswith(writes) else task

    return changed


PLANTED = {
    "read after write": ("hybrid", partial(without_hazard, "read_after_write"), None),
    "write after read": ("hybrid", partial(without_hazard, "write_after_read"), None),
    "write after write": ("mixed tiers", partial(without_hazard, "write_after_write"), None),
    "hidden rows without a slot": ("chunks, hidden on host", hidden_without_a_slot, None),
    "streams wait for nothing": ("kv", no_wait_between_streams, None),
    "the host waits for nothing": ("hybrid", host_waits_for_nothing, None),
    "events reused too early": ("kv", events_go_back_too_early, None),
    "tokens read too early": ("kv", tokens_are_read_at_once, None),
    "weights not there yet": ("kv", run_before_the_weights_are_there, None),
    "store_* reads staging": ("hybrid", None, undeclared(reads="store_")),
    "load_* writes its slot": ("kv", None, undeclared(writes="load_")),
    "scatter reads strips": ("kv", None, undeclared(reads="scatter")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(checkpoint, name):
    source, _ = checkpoint
    policy, plant, changed = PLANTED[name]
    with fake_cuda() as watch, pytest.MonkeyPatch.context() as monkeypatch:
        if plant:
            plant(monkeypatch)
        with contextlib.suppress(Exception):  # wrong values may end as an error; the order is what is asked for here
            run_under(source, POLICIES[policy], changed)
        assert sum(watch.order.faults.values()) > 0


def test_a_verb_that_mixes_memories_fails(checkpoint):
    with fake_cuda(), pytest.MonkeyPatch.context() as monkeypatch:
        host_memory_in_a_kernel(monkeypatch)
        with pytest.raises(Mixed, match="assemble has tensors of host and device"):
            run_under(checkpoint[0], POLICIES["mixed tiers"])


@pytest.mark.parametrize(
    "plant, wait",
    [(finish_looks_at_its_result, ("_local_scalar_dense", "finish")), (a_copy_of_strided_memory, ("copy_", "load_kv"))],
)
def test_a_verb_that_waits_for_the_device_is_found(checkpoint, plant, wait):
    source, expected = checkpoint
    with fake_cuda() as watch, pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        assert run_under(source, POLICIES["kv"]).tokens == expected
        assert watch.waits[wait] > 10


@pytest.mark.parametrize("name", ["read after write", "hidden rows without a slot"])
def test_faults_are_found_when_nothing_is_deferred(checkpoint, name):
    """As on a real GPU: every operation runs where it is called, and only the order is checked."""
    source, expected = checkpoint
    policy, plant, _ = PLANTED[name]
    with fake_cuda(deferred=False) as watch:
        assert run_under(source, POLICIES[policy]).tokens == expected
        assert dict(watch.order.faults) == {}
    with fake_cuda(deferred=False) as watch, pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        with contextlib.suppress(Exception):
            run_under(source, POLICIES[policy])
        assert sum(watch.order.faults.values()) > 0
