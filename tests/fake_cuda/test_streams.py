"""Test every kind of policy on the fake device: transformers' tokens, ordered accesses, and no wait of the host."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_cuda.accesses import Mixed
from fake_cuda.device import DEVICE, fake_cuda
from models import save_llama, save_opt
from policies import wider_policies
from runs import admitted, engine_of
from tiny_models import greedy, save_tiny

from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Experts, Placement, Policy, Selection
from flexhybrid.core.schedule.dependencies import HAZARDS
from flexhybrid.core.trace import check_trace
from flexhybrid.runtime import engine as engine_module
from flexhybrid.runtime.clock import Clock
from flexhybrid.runtime.cuda import CudaClock, CudaCopies, CudaStream, Recorded
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.executor import HiddenStates
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.verbs import VERB_FUNCTIONS, attending
from sim import catalogue

#: Whose engine lays contexts side by side; the kernels that attend in place are Triton's.
SIDE_BY_SIDE = replace(catalogue.load("t4"), attends_in_place=False)
EVERYWHERE = Policy(
    weights=Placement(device=0.3, host=0.3, disk=0.4),
    max_mini_batch_tokens=100,
    cache={"act@host": 0.2, "act@device": 0.2, "kv@disk": 0.2, "kv@device": 0.2, "kv@host": 0.2},
)
LOSSY = {
    "packed": replace(EVERYWHERE, bits=Bits(8, 4, 8)),
    "heavy hitters": Policy(
        weights=Placement(device=0.5, host=0.5), cache={"kv@host": 0.5, "kv@device": 0.5}, max_mini_batch_tokens=100,
        selection=Selection("heavy_hitter", 0.5),
    ),
    "speculative, few": Policy(
        weights=Placement(device=0.3, host=0.7), cache={"kv@host": 1.0}, max_mini_batch_tokens=100,
        selection=Selection("speculative", None, 0.5, 0.3, 0.5, 0.6, "lru", "device"),
    ),
}  # fmt: skip

MODULES = ("gemma2", "gpt_oss", "qwen3_moe", "gemma3n_text")  #: models that run through transformers' layers

PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 17, list(range(10, 26))]
MAX_TOKENS = 3
FEW = PROMPTS, 2  #: the requests in which a planted fault is found

MIXED = {"act@host": 0.25, "act@device": 0.25, "kv@host": 0.25, "kv@device": 0.25}
POLICIES = {
    "kv": Policy(cache={"kv@host": 1.0}, max_mini_batch_tokens=100),
    "hybrid": Policy(cache={"act@host": 0.5, "kv@host": 0.5}, max_mini_batch_tokens=100),
    "mixed tiers": Policy(weights=Placement(device=0.4, host=0.6), cache=MIXED, max_mini_batch_tokens=160),
    **wider_policies(wide=100, narrow=60, chunk=16),
}
del POLICIES["host attention, disk"]  # which needs numba, and a fake device has none


def run_under(
    source,
    policy,
    changed=None,
    device=DEVICE,
    plan=None,
    keep_trace=True,
    requests=(PROMPTS, MAX_TOKENS),
    hears=None,
    **others,
):
    """Run prompts to their lengths. ``changed``: task -> its replacement; ``hears``: of ``RunControl``; ``others``: of
    the problem."""
    prompts, max_tokens = requests
    machine = {"hardware": SIDE_BY_SIDE, "device": device.type, "cuda_graphs": False} | others
    wave = admitted(source.shape, policy, prompts, max_tokens, **machine)
    with engine_of(source, wave, device) as engine:
        executor = engine.executor(wave, prompts, plan or greedy_plan(len(prompts)))
        tasks = map(changed, stream(wave)) if changed else None
        return engine.run(executor, RunControl(keep_trace=keep_trace, **(hears or {})), tasks)


def check_found(run, plant=None, **more) -> None:
    """Assert that the order of accesses shows a fault, planted by ``plant`` or in ``run`` itself."""
    with fake_cuda(**more) as watch, pytest.MonkeyPatch.context() as monkeypatch:
        if plant:
            plant(monkeypatch)
        with contextlib.suppress(Exception):  # wrong values may end as an error; the order is what is asked for here
            run()
        assert sum(watch.order.faults.values()) > 0


def tokens_or_error(run) -> Any:
    """Return what ``run`` returns or raises: a planted fault gives other tokens, or an error."""
    try:
        return run()
    except Exception as error:
        return error


def check_clean(result, watch) -> None:
    """Assert ordered accesses, no wait of the host in a verb, and a clean trace; something must have been watched."""
    assert dict(watch.order.faults) == {}
    assert {verb for _, verb in watch.waits} <= {"-"}  # outside of verbs
    assert check_trace(result.trace) == []
    device = watch.runs
    assert watch.order.checked > 1000 and device.run_late > 500 and device.reused > 100 and device.poisoned > 100


@pytest.fixture(scope="module")
def checkpoint(tiny_opt):
    return Checkpoint(tiny_opt[0]), greedy(tiny_opt[1], PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_policy(checkpoint, name):
    source, expected = checkpoint
    with fake_cuda(seed=len(name)) as watch:
        result = run_under(source, POLICIES[name])
    assert result.tokens == expected
    check_clean(result, watch)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3", *MODULES])
def test_every_architecture(tmp_path, kind):
    """Layers of our own, and transformers' with softcaps, sinks, windows, experts and lent keys, on all tiers."""
    window = {"sliding_window": 9} if kind == "mistral" else {}
    model = save_tiny(tmp_path, kind) if kind in MODULES else save_llama(tmp_path, kind=kind, **window)
    with fake_cuda() as watch:
        result = run_under(Checkpoint(tmp_path), EVERYWHERE)
    assert result.tokens == greedy(model, PROMPTS, MAX_TOKENS)
    check_clean(result, watch)


@pytest.mark.parametrize(
    "kind, batch, attention",
    [("qwen3_moe", 1, "device"), ("qwen3_moe", 2, "host"), ("gpt_oss", 2, "device"), ("qwen3_next", 1, "host")],
)
def test_experts_that_mini_batches_share(tmp_path, kind, batch, attention):
    model = save_tiny(tmp_path, kind)
    cache = EVERYWHERE.cache if attention == "device" else {"kv@host": 1.0}
    policy = replace(EVERYWHERE, cache=cache, attention=attention, experts=Experts(batch), max_mini_batch_tokens=60)
    with fake_cuda() as watch:
        result = run_under(Checkpoint(tmp_path), policy)
    assert result.tokens == greedy(model, PROMPTS, MAX_TOKENS)
    assert {"route", "experts"} <= {event.task.verb for event in result.trace}
    check_clean(result, watch)


@pytest.mark.parametrize("name, kind", [("packed", "qwen2"), ("heavy hitters", "opt"), ("speculative, few", "qwen2")])
def test_lossy_policies_give_the_tokens_of_a_cpu(tmp_path, kind, name):
    """Fewer bits and selections have no reference but our own CPU run."""
    save_opt(tmp_path, layers=3, heads=4, ffn=64) if kind == "opt" else save_llama(
        tmp_path, kind=kind, layers=3, kv_heads=4, ffn=64
    )
    source = Checkpoint(tmp_path)
    expected = run_under(source, LOSSY[name], device=torch.device("cpu")).tokens
    with fake_cuda() as watch:
        result = run_under(source, LOSSY[name])
    assert result.tokens == expected
    check_clean(result, watch)


def test_a_trace_of_streams_may_end_before_its_wave(checkpoint):
    source, expected = checkpoint
    with fake_cuda() as watch:
        result = run_under(source, POLICIES["hybrid"], keep_trace=100)
        again = run_under(source, POLICIES["hybrid"], keep_trace=False)
        made, _ = torch.cuda.Event.made, run_under(source, POLICIES["hybrid"], keep_trace=False)
        assert torch.cuda.Event.made - made < CudaClock.TRIES + 100  # of some 300 that are recorded
    assert result.tokens == again.tokens == expected
    assert len(result.trace) == 100 and check_trace(result.trace) == [] == again.trace
    assert dict(watch.order.faults) == {}


# ---- faults that must be found


def without_hazard(hazard, monkeypatch):
    kinds = [kind for kind in HAZARDS if kind != hazard]
    monkeypatch.setattr(engine_module, "Clock", lambda lanes, on_fail: Clock(lanes, kinds, on_fail))


def hidden_without_a_slot(monkeypatch):
    """Hidden states on their way to the host are in memory that the next operation may get."""
    monkeypatch.setattr(HiddenStates, "keep", lambda self, task, rows: self.rows.__setitem__(self._key(task), rows))


def no_wait_between_streams(monkeypatch):
    monkeypatch.setattr(CudaStream, "wait", lambda self, recorded: None)


def host_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(Recorded, "synchronize", lambda self: None)


def events_go_back_too_early(monkeypatch):
    """An event is recorded again on another stream while others still wait for it."""
    made = Recorded.__init__

    def early(self, events, stream, timed):
        made(self, events, stream, timed)
        events.free[timed].append(self.event)

    monkeypatch.setattr(Recorded, "__init__", early)


def tokens_are_read_at_once(monkeypatch):
    """The planner reads sampled tokens without waiting for their copy."""
    monkeypatch.setattr(Clock, "wait", lambda self, resource, ordinal: None)


def run_before_the_weights_are_there(monkeypatch):
    """The lanes' streams begin while the default stream still fills the weights."""
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
            sizes, strides = (run.rows, run.blocks, source.shape[1]), (run.stride * source.stride(0), *source.stride())
            of_run = source[run.first :].as_strided(sizes, strides)
            for ours, theirs in zip(region.chunk(2, -1), of_run.chunk(2, -1), strict=True):
                ours.copy_(theirs, non_blocking=True)

    monkeypatch.setattr(CudaCopies, "copy_blocks_h2d", copy)


def undeclared(reads: str = "", writes: str = ""):
    """Tasks of verbs with this prefix do not declare their reads or writes."""

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
    policy, plant, changed = PLANTED[name]
    check_found(lambda: run_under(checkpoint[0], POLICIES[policy], changed, requests=FEW), plant)


def test_a_verb_that_mixes_memories_fails(checkpoint):
    with fake_cuda(), pytest.MonkeyPatch.context() as monkeypatch:
        host_memory_in_a_kernel(monkeypatch)
        with pytest.raises(Mixed, match="assemble has tensors of host and device"):
            run_under(checkpoint[0], POLICIES["mixed tiers"], requests=FEW)


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
    """As on a real GPU, each operation runs when it is called, and only the order is checked."""
    source, expected = checkpoint
    policy, plant, _ = PLANTED[name]
    with fake_cuda(deferred=False) as watch:
        assert run_under(source, POLICIES[policy]).tokens == expected
        assert dict(watch.order.faults) == {}
    check_found(lambda: run_under(source, POLICIES[policy], requests=FEW), plant, deferred=False)
