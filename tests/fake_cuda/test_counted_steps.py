"""Test decode step tensors that the device counts up, against the host's, in random queues with every event."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from fake_cuda.device import DEVICE, fake_cuda
from fake_cuda.test_attention_in_place import IN_PLACE
from fake_cuda.test_streams import tokens_or_error
from models import save_llama
from oracles import attend_table, rows_as_operations
from runs import engine_of, stopping

from flexhybrid.core.admission import Places, open_batch
from flexhybrid.core.context.prefixes import PromptTree
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.scheduler import Scheduler
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.issuing import Issuer, StreamLane
from flexhybrid.runtime.kernels.logit_changes import LogitChanges
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.verbs import VERB_FUNCTIONS, attending_in_place
from flexhybrid.runtime.verbs.graphed import FixedStep, Graphs
from sim import catalogue

attend_triton = pytest.importorskip("flexhybrid.runtime.kernels.attend_triton", reason="triton is not installed")

COUNT, PLACES = 6, 3  #: requests, and those that run together
MIXED = {"kv@device": 0.5, "act@device": 0.25, "kv@host": 0.25}
#: Kind of model, cache, answers' share of their limits that the pools are made for, whether prompts begin alike.
CASES = {
    "resident": ("qwen3", {"kv@device": 1.0}, 1.0, False),
    "stepping back": ("qwen3", {"kv@device": 1.0}, 0.01, False),
    "mixed": ("qwen3", MIXED, 1.0, False),
    "sharing": ("qwen3", {"kv@device": 0.5, "kv@host": 0.5}, 1.0, True),
    "windows": ("mistral", {"kv@device": 1.0}, 1.0, False),
    "token ids kept": ("qwen3", {"tok": 0.8, "kv@device": 0.1, "act@device": 0.1}, 1.0, False),
    "two layers": ("qwen2", {"kv@device": 1.0}, 1.0, False),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(attend_triton, "launch", attend_table.launch_by_address)
    rows_as_operations.install(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    made = {}

    def of(kind: str) -> Checkpoint:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            others = {"mistral": {"sliding_window": 40}, "qwen2": {"layers": 2}}.get(kind, {})
            save_llama(folder, kind=kind, **{"layers": 1} | others)
            made[kind] = Checkpoint(folder)
        return made[kind]

    return of


def some_requests(name: str):
    """Draw prompts, answer limits, the number of tokens after which each answer ends, and sampling options."""
    generator = np.random.default_rng(len(name))
    common = generator.integers(3, 61, 37).tolist() if CASES[name][3] else []
    prompts = [common + generator.integers(3, 61, generator.integers(1, 30)).tolist() for _ in range(COUNT)]
    limits = generator.integers(1, 21, COUNT)
    stops = [int(generator.integers(1, 2 * limit + 1)) for limit in limits]
    plan = replace(greedy_plan(COUNT), temperature=np.where(generator.random(COUNT) < 0.4, 0.8, 0.0))
    return (
        prompts,
        limits,
        stops,
        replace(plan, top_k=generator.integers(0, 9, COUNT), seeds=np.arange(COUNT, dtype=np.uint64)),
    )


@pytest.fixture(scope="module")
def plain(source):
    """Return a case's right tokens by a CPU; log probabilities are those of kernels launched one by one."""

    def of(name: str, by_host: bool = False):
        if not by_host:
            return answers(name, source, False, device=torch.device("cpu"))[0]
        with fake_cuda():
            return answers(name, source, False, by_host)[0]

    return cache(of)


def answers(name: str, source, cuda_graphs: bool, by_host: bool = False, device: torch.device = DEVICE):
    """Return the answers of a case's requests, and the engine's graphs. ``by_host``: some are ``needing_the_host``."""
    kind, cache, share, alike = CASES[name]
    prompts, limits, stops, plan = some_requests(name)
    plan, noted = replace(plan, **needing_the_host()) if by_host else plan, []
    checkpoint = source(kind)
    policy = Policy(weights=Placement(device=1.0), cache=cache, max_mini_batch_tokens=160)
    machine = {"hardware": catalogue.load("t4"), "device": device.type, "cuda_graphs": cuda_graphs}
    machine |= {"attention": IN_PLACE} if device == DEVICE else {}
    problem = Problem(shape=checkpoint.shape, dtype="float32", **machine)
    workload = Workload(np.array([*map(len, prompts)]), limits)
    tree = PromptTree(prompts.__getitem__) if alike else None
    wave = open_batch(problem, policy, workload, Places(PLACES, share), tree)
    with engine_of(checkpoint, wave, device) as engine:
        executor = engine.executor(wave, prompts, plan)

        def note(request: int, of) -> None:
            noted.append((request, of.answer.tolist()))

        control = RunControl(stop_text=stopping(stops), on_noted=note)
        return (engine.run(executor, control).tokens, noted), engine.graphs


def values(tensor):
    return None if tensor is None else tensor.tolist()


def check_step(held: FixedStep, state, step) -> None:
    """Compare the tensors at fixed addresses with those the host computes for this step."""
    wanted, found = state.steps.make(step), held.tensors
    for name in ("cells_R", "positions_R", "sampled_cells_B", "act_positions"):
        assert values(getattr(found, name)) == values(getattr(wanted, name)), name
    for name in ("rotation_R", "act_rotation", "common_rows"):
        assert [*map(values, getattr(found, name) or ())] == [*map(values, getattr(wanted, name) or ())], name
    for tables in ("block_tables", "buffer_tables"):
        mine, theirs = getattr(found, tables), getattr(wanted, tables)
        assert {of: values(table) for of, table in mine.items()} == {of: values(table) for of, table in theirs.items()}
    assert found.stores.keys() == wanted.stores.keys()
    for space, place in wanted.stores.items():
        for own, other in zip(found.stores[space], place, strict=True):
            count = 0 if other is None else len(other)
            assert own is other is None or values(own) == values(other) + values(own)[count - 1 : count] * (
                len(own) - count
            )
    assert (found.sampling is None) == (wanted.sampling is None)
    if found.sampling:
        assert values(found.sampling.values_5B) == values(wanted.sampling.values_5B)
    window = step.window if step.window and step.context.max() + 1 > step.window else None
    table, theirs = (held.extents.layout, attending_in_place.step_extents(state, step, window, state.to_device).layout)
    for name in ("starts", "places", "kinds"):
        whole = values(getattr(theirs, name))
        assert values(getattr(table, name))[: len(whole)] == whole, name
    assert table[3:] == theirs[3:]
    held_by = [attending_in_place._memory_name(state, held.extents.segments[part]) for part in theirs.parts]
    assert [*held.table[-1]] == held_by  # what a graph of attention reads


def is_quiet(step, last) -> bool:
    """Return True if a step has the same requests and blocks as the one before, and no window hides a token."""
    if last is None or last.iteration + 1 != step.iteration or last.queued.tolist() != step.queued.tolist():
        return False
    if step.window and step.context.max() + 1 > step.window or (step.context % 16 < 2).any():
        return False
    tables = [
        [of.block_table.tolist() for of in (*one.segments, *one.shared_segments) if of.max_tokens]
        for one in (step, last)
    ]
    return tables[0] == tables[1]


@pytest.mark.parametrize("name", [*CASES][:-1])
def test_counted_steps_equal_those_of_the_host(source, plain, monkeypatch, name):
    """The host uploads nothing in a step in which no request joins, leaves, or takes or begins to read a block."""
    fix, latest, quiet, others = Graphs.fix_step, {}, [], []
    preempt, back = Scheduler._preempt, []

    def checked(graphs, state, step):
        before, last = graphs.uploads, latest.get((step.mini_batch, step.window))
        made = fix(graphs, state, step)
        check_step(graphs._held[step.mini_batch, step.window], state, step)
        latest[step.mini_batch, step.window] = step
        (quiet if is_quiet(step, last) else others).append(graphs.uploads - before)
        return made

    expected = plain(name)
    with fake_cuda(seed=len(name)), monkeypatch.context() as patch:
        patch.setattr(Graphs, "fix_step", checked)
        patch.setattr(Scheduler, "_preempt", lambda *given: back.append(given) or preempt(*given))
        tokens, graphs = answers(name, source, cuda_graphs=True)
    assert tokens == expected and graphs.launches and bool(back) == (CASES[name][2] < 1)
    assert {*others} == {1} and {*quiet} == {0} and len(quiet) > 5, (len(quiet), len(others))


def filled_tokens_stay(held, arrays, by):
    return upload(held, arrays, by | {"kinds": 0})


def offsets_stay(held, arrays, by):
    return upload(held, arrays, by | {name: 0 for name in by if name[-1] == "offsets"})


def positions_stay(held, arrays, by):
    return upload(held, arrays, by | {"positions": 0})


upload = FixedStep.upload


def the_first_draw_again(held, state):
    held.age = 0
    count_up(held, state)


count_up = FixedStep.count_up


def over_the_ends_of_blocks(held, state, step):
    last, held.step = held.step, step
    return held.state() is state and step.queued.tolist() == last.queued.tolist()


PLANTED = {
    "filled tokens stay": ("resident", "upload", filled_tokens_stay),
    "offsets stay": ("mixed", "upload", offsets_stay),
    "positions stay": ("resident", "upload", positions_stay),
    "the first draw again": ("resident", "count_up", the_first_draw_again),
    "over the ends of blocks": ("resident", "takes", over_the_ends_of_blocks),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_of_counting_is_found(source, plain, monkeypatch, name):
    of, method, planted = PLANTED[name]
    expected = plain(of)
    with fake_cuda(), monkeypatch.context() as patch:
        patch.setattr(FixedStep, method, planted)
        found = tokens_or_error(lambda: answers(of, source, cuda_graphs=True)[0])
    assert found != expected


# ---- one graph for a whole step


class Odd:
    """A grammar that allows only odd tokens."""

    def begin(self):
        return self

    def fill(self, words):
        words[:] = 0xAAAAAAAA - (1 << 32)

    def advance(self, token):
        assert token % 2


def needing_the_host() -> dict:
    """Return options of three requests for which the host works in every step."""
    none = (None,) * (COUNT - 1)
    return {
        "grammars": (Odd(), *none),
        "changes": (none[0], LogitChanges(prompt_tokens=3, repetition=1.5), *none[1:]),
        "num_logprobs": np.array([-1, -1, 2, *[-1] * (COUNT - 3)]),
    }


@pytest.mark.parametrize("by_host", [False, True])
def test_a_quiet_step_is_one_launch(source, plain, monkeypatch, by_host):
    """No work is held back while the planner waits for tokens. A step whose tokens need the host is launched by
    layers."""
    fix, wait, steps, latest = Graphs.fix_step, Issuer.enqueue_until, [], [None]

    def noted(graphs, state, step):
        steps.append((graphs, graphs.launches, is_quiet(step, latest[0]), by_host and step.queued.min() < 3))
        latest[0] = step
        return fix(graphs, state, step)

    def waited(issuer, lane, ordinal):
        assert lane.name != "d2h" or not any(other._held for other in issuer.lanes)
        wait(issuer, lane, ordinal)

    monkeypatch.setattr(StreamLane, "lookahead", 8)
    expected = plain("two layers", by_host)
    with fake_cuda(seed=3) as watch, monkeypatch.context() as patch:
        patch.setattr(Graphs, "fix_step", noted)
        patch.setattr(Issuer, "enqueue_until", waited)
        tokens, graphs = answers("two layers", source, True, by_host)
    assert tokens == expected and dict(watch.order.faults) == {}
    ends = [launched for _, launched, *_ in steps[1:]] + [graphs.launches]
    launches = [(end - of[1], of[3]) for of, end in zip(steps, ends, strict=True) if of[2]]
    assert {count for count, needs_host in launches if not needs_host} == {1} and len(launches) > 5
    assert {count for count, needs_host in launches if needs_host} == ({2} if by_host else set())


def draws_elsewhere(patch):
    def left(held, sampling, group):
        held.choice = ()
        return sampling

    patch.setattr(FixedStep, "fix_sampling", left)


def launches_wait_for_nothing(patch):
    """Launches do not even wait for the earlier tokens to reach the host."""
    enqueue = StreamLane.enqueue
    patch.setattr(StreamLane, "enqueue", lambda lane, of, waits: enqueue(lane, of, waits if len(of) == 1 else ()))


def the_step_begins_in_its_graph(patch):
    embed = VERB_FUNCTIONS["embed"]
    patch.setitem(VERB_FUNCTIONS, "embed", lambda state, task: state.begin_step(task) and embed(state, task))


@pytest.mark.parametrize("plant", [draws_elsewhere, launches_wait_for_nothing, the_step_begins_in_its_graph])
def test_a_planted_fault_of_whole_steps_is_found(source, plain, plant):
    expected = plain("two layers")
    with fake_cuda(seed=3) as watch, pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            found, graphs = answers("two layers", source, True)
        except Exception as error:
            found = error
    assert found != expected or watch.order.faults or not graphs.joins_steps
