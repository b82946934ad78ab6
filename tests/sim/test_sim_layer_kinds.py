"""Test layers of several kinds: their bytes on the link, their cost, both clocks, and the search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from random_cases import UniformCase, compare, of_mixed_layers, random_case
from toy_machine import SHAPE, machine

from flexhybrid.core.admission import open_batch
from flexhybrid.core.memory import memory_plan
from flexhybrid.core.model.attention import PLAIN, AttentionKind
from flexhybrid.core.model.layers import LayerTensor, ModuleLayers
from flexhybrid.core.model.states import LayerState, StateTensor
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Experts, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.trace import check_trace
from flexhybrid.core.work import PREFILL_QUERIES
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.runtime.profiling.profile import profiled_layers
from sim.array_clock import predict
from sim.queue_clock import price_queue, walk_queue
from sim.template_run import loops_of
from sim.virtual_clock import run, summarize

HIDDEN = SHAPE.hidden


def module(*feed_forward: int) -> tuple[LayerTensor, ...]:
    early = LayerTensor("qkv", (3 * HIDDEN, HIDDEN), True)
    return (
        LayerTensor("norm", (HIDDEN,), True),
        early,
        LayerTensor("up", (*feed_forward, HIDDEN), False, experts=len(feed_forward) > 1),
    )


#: Two layers of a small feed-forward network, then four of eight experts each, of which a token takes two.
EXPERTS = replace(
    SHAPE,
    num_layers=6,
    modules=ModuleLayers("none", (module(512), module(8, 512)), (0, 0, 1, 1, 1, 1), SHAPE.vocab * HIDDEN, 0.25),
)


def case_of(shape, policy=None, batch=4, prompt=100, generated=5) -> UniformCase:
    policy = policy or Policy(weights=Placement(host=1), cache={"kv@host": 0.5, "act@host": 0.5})
    return UniformCase(shape, machine(), 4, policy, batch, prompt, generated)


@pytest.mark.parametrize("kind", ["column", "row", "serial"])
def test_both_clocks_agree_on_layers_of_several_kinds(kind):
    rng, gaps = np.random.default_rng(7), []
    while len(gaps) < 5:
        case = of_mixed_layers(random_case(rng, kind), rng)
        if case.policy.selection.method == "none":
            closed, virtual = compare(case)
            gaps.append(abs(closed / virtual - 1))
    assert np.median(gaps) <= 0.005 and max(gaps) <= 0.02


def sharing_experts(case: UniformCase, batch: int) -> UniformCase:
    """Return a case of ``of_mixed_layers`` whose layers' last kind of weights has experts for several mini-batches."""
    shape = case.shape
    modules = shape.modules or ModuleLayers("none", (module(8, 512),), (0,) * shape.num_layers, SHAPE.vocab, 0.25)
    routed = tuple(kind == len(modules.kinds) - 1 for kind in modules.kind_of)
    policy = replace(case.policy, experts=Experts(batch), hidden="device", schedule="column")
    return replace(case, shape=replace(shape, modules=modules, routed=routed), policy=policy)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_both_clocks_agree_on_experts_that_mini_batches_share(batch):
    rng, gaps = np.random.default_rng(11 + batch), []
    while len(gaps) < 12:
        case = of_mixed_layers(random_case(rng, ("column", "serial")[len(gaps) % 2]), rng)
        if case.policy.selection.method == "none" and case.shape.modules:
            case = sharing_experts(case, batch)
            if not any(case.shape.routed):
                continue
            closed, virtual = compare(case)
            gaps.append(abs(closed / virtual - 1))
            trace = run(stream(case.wave()), case.hardware)
            assert check_trace(trace, 1e-15) == []
    print(f"{batch} parts: median {np.median(gaps):.2e}, worst {max(gaps):.2%}")
    assert np.median(gaps) <= 0.002 and max(gaps) <= 0.01


def test_sharing_experts_moves_their_work_to_one_task_a_layer():
    """What ``route``, ``experts`` and ``finish`` do adds up to what ``finish`` does, but experts are read once."""
    case = case_of(EXPERTS, Policy(cache={"kv@host": 1.0}, max_mini_batch_tokens=230), batch=6)
    shared = sharing_experts(case, 1)
    works = {
        of: [task.work for task in stream(one.wave()) if task.iteration == 2 and task.layer == 5 and task.verb in of]
        for of, one in ((("finish",), case), (("route", "experts"), shared))
    }
    alone, together = works.values()
    assert len(alone) == 3 and len(together) == 4
    assert sum(work.flops for work in alone) == sum(work.flops for work in together)
    weights = 8 * 512 * HIDDEN * 4
    read = sum(work.memory_bytes for work in alone) - sum(work.memory_bytes for work in together)
    assert read == pytest.approx(weights * (3 * (1 - 0.75**2) - (1 - 0.75**6)))


STATE = (StateTensor("recurrent", 0, (200,), True),)
ALONE, BESIDE, NETWORK = LayerState(STATE, False), LayerState(STATE, True), LayerState((), False)


@pytest.mark.parametrize("states", ["auto", "device"])
@pytest.mark.parametrize("tier", ["kv@device", "kv@host"])
@pytest.mark.parametrize(
    "kinds", [(ALONE,), (ALONE, ALONE, ALONE, None), (BESIDE,), (ALONE, NETWORK, None, NETWORK)], ids=len
)
def test_both_clocks_agree_on_recurrent_layers(kinds, tier, states):
    """A layer without attention reads all of its weights in one task, so their slot is taken until its end."""
    shape = replace(SHAPE, num_layers=16, states=kinds * (16 // len(kinds)))
    for bound in (250, 100_000):
        policy = Policy(weights=Placement(host=1), cache={tier: 1.0}, states=states, max_mini_batch_tokens=bound)
        closed, virtual = compare(case_of(shape, policy, batch=6))
        assert closed == pytest.approx(virtual, rel=0.002)


@pytest.mark.parametrize("period, schedule", [(1, "column"), (4, "row"), (6, "column"), (6, "row"), (5, "column")])
def test_many_layers_in_turn_are_walked_in_part(period, schedule):
    """Full layers load eight times as much as those with a window, and wait for it, so a mean of both would be
    wrong."""
    attention = (*[AttentionKind(64)] * (period - 1), PLAIN)
    shape = replace(SHAPE, num_layers=47, attention=attention, max_positions=4096)
    case = case_of(shape, Policy(cache={"kv@host": 1.0}, schedule=schedule), 3, 512, 4)
    layers = tuple(map(list(dict.fromkeys(shape.layer_kinds)).index, shape.layer_kinds))
    loop = loops_of(case.policy, layers, 1)[schedule == "column"]
    assert (
        loop.num_rounds <= 12 + 3 * period
        and loop.kinds == (*layers[: loop.before_skip],) + layers[loop.before_skip + 47 - loop.num_rounds :]
    )
    closed, virtual = compare(case)
    assert abs(closed / virtual - 1) < 0.005


@pytest.mark.parametrize("device, disk", [(0.0, 0.0), (0.4, 0.3)])
def test_a_layer_carries_its_own_bytes_and_a_slot_holds_the_largest(device, disk):
    weights = Placement(device=device, host=1 - device - disk, disk=disk)
    case = case_of(EXPERTS, Policy(weights=weights, cache={"kv@host": 1.0}, max_mini_batch_tokens=210))
    wave, moved = case.wave(), Counter()
    tasks = list(stream(wave))
    for task in tasks:
        if task.verb in ("load_weights", "read_weights"):
            moved[task.verb, task.layer, task.iteration] += task.work.link_bytes
    for layer in range(6):
        placed = wave.placed_of(layer)
        assert moved["load_weights", layer, 2] == placed.streamed_bytes
        assert moved["read_weights", layer, 2] == placed.disk_bytes
    small, large = wave.placed
    assert small.layout.total_bytes < large.layout.total_bytes / 3
    plan = memory_plan(case.problem, case.policy, buffer_sizes(wave))
    assert plan["device"]["weight slots"] == 2 * large.streamed_bytes
    assert plan["device"].get("resident weights", 0) == 2 * small.streamed_from + 4 * large.streamed_from
    assert plan["disk"].get("weights", 0) == 2 * small.disk_bytes + 4 * large.disk_bytes
    closed = predict(case.problem, case.candidate).row()
    of_virtual = summarize(run(tasks, case.hardware)).link_bytes
    assert closed["traffic_bytes"]["h2d"]["weights"] == pytest.approx(of_virtual["h2d"]["load_weights"])
    assert closed["peak_bytes"]["device"] == pytest.approx(sum(plan["device"].values()), rel=1e-6)


def test_a_layer_of_experts_multiplies_with_a_share_and_reads_what_its_rows_touch():
    finish = {task.layer: task.work for task in stream(case_of(EXPERTS).wave()) if task.verb == "finish"}
    rows, dense, experts = 4, 512 * HIDDEN, 8 * 512 * HIDDEN
    assert finish[0].flops == 2 * dense * rows and finish[5].flops == 2 * experts * 0.25 * rows
    touched = experts * (1 - 0.75**rows)
    assert finish[5].memory_bytes - finish[0].memory_bytes == pytest.approx(4 * (touched - dense))


def test_a_prompt_in_a_window_attends_to_what_its_runs_of_queries_see():
    window, width = 64, 700
    shape = replace(SHAPE, attention=(AttentionKind(window), PLAIN))
    tasks = stream(case_of(shape, prompt=width).wave())
    flops = {task.layer: task.work.flops for task in tasks if task.verb == "attend_prefill"}
    pairs = 0
    for first in range(0, width, PREFILL_QUERIES):
        last = min(first + PREFILL_QUERIES, width)
        pairs += (last - first) * (last - max(0, first - window + 1))
    assert flops[0] == 4 * SHAPE.query_width * 4 * pairs < flops[1] == 2 * SHAPE.query_width * 4 * width * (width + 1)


def test_a_queue_walks_a_period_of_kinds_and_prices_the_others_by_it():
    shape = replace(EXPERTS.of_layers([0, *[5] * 19]), attention=(*[AttentionKind(56)] * 5, PLAIN))
    problem = Problem(shape=shape, dtype="float32", hardware=machine(link=0.5))
    rng = np.random.default_rng(2)
    workload = Workload(rng.integers(40, 60, 12), limits := rng.integers(2, 24, 12), limits)
    policy = Policy(weights=Placement(device=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=512)
    priced, walked = (of(problem, policy, workload, 5) for of in (price_queue, walk_queue))
    assert priced.total_s == pytest.approx(walked.total_s, rel=0.01)


def test_a_profile_times_every_kind_of_layer():
    shape = replace(EXPERTS, attention=(*[AttentionKind(64)] * 5, PLAIN), max_positions=4096)
    small = profiled_layers(shape)
    assert small.num_layers == 3 and {kind.weights for kind in small.layer_kinds} == {0, 1}
    assert {kind.window for kind in small.layer_kinds} == {64, None}
    assert [small.weights_kind(layer) for layer in range(3)] == [shape.weights_kind(layer) for layer in range(3)]
    assert profiled_layers(SHAPE).layer_kinds == replace(SHAPE, num_layers=2).layer_kinds


@pytest.mark.parametrize("attention, in_place", [("device", True), ("device", False), ("host", False)])
def test_what_requests_share_counts_as_far_as_a_window_sees_it(attention, in_place):
    shape = replace(SHAPE, attention=(AttentionKind(48), PLAIN), max_positions=4096)
    hardware = replace(machine(), attends_in_place=in_place)
    problem = Problem(shape=shape, dtype="float32", hardware=hardware)
    beginning = Prefixes(np.array([128]), np.array([-1]), np.zeros(8, np.int64))
    workload = replace(Workload.uniform(8, 160, 4), prefixes=beginning)
    policy = Policy(cache={"kv@host": 1.0}, attention=attention, max_mini_batch_tokens=4096)
    attended = Counter()
    for task in stream(open_batch(problem, policy, workload, 8)):
        if task.iteration == 2 and task.verb in ("attend", "attend_shared", "attend_host", "attend_host_shared"):
            attended[task.layer] += task.work.flops
    pairs = 8 * 162  # one query a request, over the prompt, the first token and its own
    assert attended[1] == pytest.approx(4 * shape.query_width * pairs, rel=0.1)
    if in_place or attention == "host":
        assert attended[0] == 4 * shape.query_width * 8 * 48
    else:  # side by side, masks hide what lies before the window
        assert attended[0] <= attended[1]


def test_chosen_layers_keep_their_kinds():
    state = LayerState((), attends=False)
    shape = replace(EXPERTS, attention=(AttentionKind(64), PLAIN), states=(None, state) * 3)
    chosen = [0, 3, 5, 2]
    assert shape.of_layers(chosen).layer_kinds == tuple(shape.layer_kinds[layer] for layer in chosen)
