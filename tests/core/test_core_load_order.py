"""Test KVPR: the order of a layer's weights and context on the link, and limits of the split point."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import UniformCase, compare
from toy_machine import SHAPE, machine

from flexhybrid.core.context.split import SplitLines, split_point
from flexhybrid.core.model.attention import PLAIN
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.dependencies import Dependencies
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from sim.presets import kvpr_column

BOTH = "both(kv@host,act@host)"
FIRST = replace(kvpr_column("pipeline", max_mini_batch_tokens=1 << 20), name="W_K and W_V first")
NATURAL = replace(FIRST, name="natural", weight_order="natural")
#: Every second layer sees 32 tokens, as in models that alternate.
ALTERNATE = replace(SHAPE, num_layers=6, attention=tuple(replace(PLAIN, window=(None, 32)[i % 2]) for i in range(6)))


def wave_of(policy: Policy, shape=SHAPE, batch: int = 2, hardware=None, mini_batches=None) -> Wave:
    problem = Problem(shape=shape, dtype="float32", hardware=hardware or machine(link=0.05))
    return admit(problem, policy, Workload.uniform(batch, 200, 4), mini_batches=mini_batches)


def loads(wave: Wave, iteration: int, layer: int) -> list:
    """Return the loads of a layer in an iteration, in order: verbs, and for weights their bytes [start, end)."""
    found = []
    for task in stream(wave):
        if task.resource == "h2d" and (task.iteration, task.layer) == (iteration, layer):
            piece = task.payload
            found.append((piece.start, piece.end) if task.verb == "load_weights" else task.verb)
    return found


@pytest.mark.parametrize("schedule", ["column", "row"])
def test_a_layer_loads_w_k_and_w_v_then_act_then_the_rest(schedule):
    """KVPR, Fig. 5b, for a layer in one piece. Without hiding, ACT comes after the whole layer."""
    wave = wave_of(replace(FIRST, schedule=schedule))
    layout = wave.placed[0].layout
    needed, total = layout.kv_end, layout.total_bytes
    assert loads(wave, 2, 1) == [(0, needed), "load_act", (needed, total), "load_kv"]
    for order in ("natural", "kv_first"):
        policy = replace(FIRST, weight_order=order, schedule=schedule)
        assert loads(wave_of(policy), 2, 1) == [(0, total), "load_act", "load_kv"]


def test_act_is_loaded_before_the_last_slice_of_weights():
    three = [np.array([k]) for k in range(3)]
    wave = wave_of(FIRST, batch=3, mini_batches=three)
    everything = [
        (task.layer, task.mini_batch, task.verb)
        for task in stream(wave)
        if task.resource == "h2d" and task.iteration == 2
    ]
    behind = everything.index((2, 0, "load_act"))
    assert everything[behind + 1 : behind + 3] == [(2, 2, "load_weights"), (2, 0, "load_kv")]


@pytest.mark.parametrize(
    "policy",
    [
        replace(FIRST, bits=Bits(weights=4)),  # nothing is read before all of it is unpacked
        replace(FIRST, weights=Placement(host=0.5, disk=0.5)),
        replace(FIRST, weights=Placement(device=0.5, host=0.5)),  # W_K and W_V are there
    ],
)
def test_a_layer_is_not_cut_if_recomputing_would_wait_anyway(policy):
    found = loads(wave_of(policy), 2, 1)
    assert [type(load) for load in found if load != "load_kv"] == [str, tuple]  # ACT, then all of the weights


def waits_of(wave: Wave, verb: str) -> set[tuple]:
    """Return the loads that the first task of a verb waits for in iteration 2, layer 1: bytes of weights, or verbs."""
    dependencies, on_link = Dependencies(), []
    for task in stream(wave):
        awaited = dependencies.add(task)
        if task.resource == "h2d":
            piece = task.payload
            on_link.append((piece.start, piece.end) if task.verb == "load_weights" else task.verb)
        if (task.iteration, task.layer, task.verb) == (2, 1, verb):
            return {on_link[ordinal] for resource, ordinal in awaited if resource == "h2d"}
    raise AssertionError(f"no {verb}")


def test_recomputing_waits_for_act_and_not_for_the_rest_of_the_layer():
    """The link loads W_K and W_V before ACT, one load after the other."""
    wave = wave_of(FIRST)
    assert waits_of(wave, "kv_gen") == {"load_act"}
    needed, total = wave.placed[0].layout.kv_end, wave.placed[0].layout.total_bytes
    assert waits_of(wave, "project") == {(needed, total)}


# --- what it gains ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["column", "row"])
def test_the_order_gains_if_layers_alternate(schedule):
    """A layer with a long context waits for its weight slot until the layer two before it has ended. It then recomputes
    once W_K, W_V and ACT are there. Both clocks agree on the gain."""
    seconds = {}
    for policy in (NATURAL, FIRST):
        policy = replace(policy, schedule=schedule)
        case = UniformCase(ALTERNATE, machine(link=0.05, gflops=5.0), 4, policy, 8, 500, 12)
        closed, virtual = compare(case)
        assert closed == pytest.approx(virtual, rel=0.005)
        seconds[policy.name] = virtual
    assert seconds["W_K and W_V first"] < 0.95 * seconds["natural"]


# --- the split point --------------------------------------------------------------------------------------------------

seconds = st.floats(1e-9, 1e-4)
fixed = st.just(0.0) | st.floats(1e-6, 1e-1)


def layer_s(lines: SplitLines, batch: int, context: int, tokens: int, num_mini_batches: int) -> float:
    """Return the seconds of a layer of a mini-batch whose link and GPU run in parallel."""
    link = lines.weights_s / num_mini_batches
    link += batch * (tokens * lines.load_act_s + (context - tokens) * lines.load_kv_s)
    gpu = lines.forward_s + batch * (lines.forward_request_s + context * lines.attend_s)
    gpu += batch * (tokens * lines.gen_s + (context - tokens) * lines.unpack_s)
    if tokens:
        link, gpu = link + lines.act_fixed_s, gpu + lines.gen_fixed_s
    return max(link, gpu)


@settings(max_examples=200)
@given(
    st.builds(
        SplitLines,
        rule=st.just("pipeline"),
        gen_s=seconds,
        load_act_s=st.just(0.0) | seconds,
        load_kv_s=seconds,
        weights_s=fixed,
        forward_s=seconds,
        forward_request_s=seconds,
        attend_s=st.floats(0, 1e-5),
        gen_fixed_s=fixed,
        act_fixed_s=fixed,
        unpack_s=st.just(0.0) | seconds,
    ),
    st.integers(1, 40),
    st.integers(1, 700),
    st.integers(1, 9),
)
def test_recomputing_is_never_worse_than_loading_all(lines, batch, context, num_mini_batches):
    """This holds by the rule's own costs, fixed costs included. The choice is also near the best of all block
    counts."""
    chosen = int(split_point(lines, batch, context, num_mini_batches))
    taken, none = (layer_s(lines, batch, context, tokens, num_mini_batches) for tokens in (chosen, 0))
    assert taken <= none * (1 + 1e-12)
    best = min(layer_s(lines, batch, context, tokens, num_mini_batches) for tokens in range(0, context + 1, 16))
    a_block = 16 * batch * max(lines.gen_s, lines.load_kv_s, lines.unpack_s)
    if lines.load_act_s < lines.load_kv_s:
        assert taken <= best + a_block


def test_eq_11_bounds_the_split_by_the_prompt():
    """A prompt of 100 tokens has seven blocks, the last not full: six are recomputed for any length of the answer."""
    wave = wave_of(replace(FIRST, split="paper_prompt"), hardware=machine(link=1e-3))
    lines = wave.split[BOTH]
    assert [int(split_point(lines, 2, context, prompt=100)) for context in (90, 100, 400)] == [80, 96, 96]
    unbounded = replace(lines, rule="paper")
    assert int(split_point(unbounded, 2, 400, prompt=100)) > 350
