"""The stream of tasks, the dependencies derived from it, and the checker that proves a trace right.

``schedule`` runs a stream on all resources at once with durations of our choosing; it shares no code with what it
judges. ``test_core_dependencies`` derives the dependencies a second time.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import runnable_policies

from flexhybrid.core.admission import open_batch
from flexhybrid.core.context.packing import num_chunks
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.dependencies import HAZARDS, Dependencies
from flexhybrid.core.schedule.positions import Stops
from flexhybrid.core.task import RESOURCES, Access, Task, Work
from flexhybrid.core.trace import (
    LaneTimes,
    TraceEvent,
    busy_seconds,
    check_trace,
    idle_though_ready,
    iteration_ends,
    lane_table,
    save_chrome_trace,
)
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.runnable import check_runnable
from sim import catalogue

P = 4  # bytes an element
MEMORY_KINDS = ("act@device", "act@host", "kv@device", "kv@host")


def tiny_shape(num_layers: int, num_kv_heads: int = 2) -> ModelShape:
    return ModelShape("tiny", "opt", num_layers, 8, 2, num_kv_heads, 4, 16, 32, 64)


def make_wave(prompts=(20, 33, 5), max_tokens=(3, 5, 4), cache=None, bound=150) -> Wave:
    policy = Policy(
        weights=Placement(device=0.3, host=0.7),
        cache=cache or {"kv@host": 0.4, "act@host": 0.3, "kv@device": 0.1, "act@device": 0.2},
        max_mini_batch_tokens=bound,
    )
    return admit(
        Problem(shape=tiny_shape(2), dtype="float32"), policy, Workload(np.array(prompts), np.array(max_tokens))
    )


@st.composite
def waves(draw, max_layers: int = 3, max_requests: int = 5) -> Wave:
    num_requests = draw(st.integers(1, max_requests))
    lengths = st.lists(st.integers(1, 50), min_size=num_requests, max_size=num_requests)
    counts = st.lists(st.integers(1, 5), min_size=num_requests, max_size=num_requests)
    weights = draw(st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any))
    device_weights = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    policy = Policy(
        weights=Placement(device=device_weights, host=1 - device_weights),
        cache={kind: weight / sum(weights) for kind, weight in zip(MEMORY_KINDS, weights)},
        max_mini_batch_tokens=draw(st.sampled_from([1, 40, 120, 8192])),
        packing=draw(st.sampled_from(["balanced", "fifo"])),
    )
    shape = tiny_shape(draw(st.integers(1, max_layers)), draw(st.integers(1, 2)))
    return admit(
        Problem(shape=shape, dtype="float32"), policy, Workload(np.array(draw(lengths)), np.array(draw(counts)))
    )


@st.composite
def waves_with_stops(draw) -> tuple[Wave, dict[int, int]]:
    """Draw a wave, and for some requests the iteration in which they sample a stop token."""
    wave = draw(waves())
    stops = draw(st.dictionaries(st.integers(0, wave.workload.num_requests - 1), st.integers(0, 4)))
    return wave, stops


class Known:
    """A planner's knowledge of stops (request -> iteration): only of tokens sampled so far."""

    def __init__(self, stops: dict[int, int]):
        self.stops = stops
        self.steps: list[list[int]] = []  # that sample: who stops in them
        self.asked: list[tuple[int, int]] = []

    def until(self, iteration: int, num_steps: int) -> set[int]:
        assert num_steps <= len(self.steps)  # what stands in the stream: else the planner would wait for ever
        self.asked.append((iteration, num_steps))
        return {request for step in self.steps[:num_steps] for request in step}

    def tasks(self, wave: Wave) -> Iterator[Task]:
        for task in stream(wave, Stops(self.until, lambda requests: any(r in self.stops for r in requests))):
            if task.verb == "sample":
                requests = task.payload.step.requests.tolist()
                self.steps.append([r for r in requests if self.stops.get(r, -1) == task.iteration])
            yield task


def stream_with_stops(wave: Wave, stops: dict[int, int]) -> list[Task]:
    return list(Known(stops).tasks(wave))


def runs(wave: Wave, stops: dict[int, int]) -> list[int]:
    """Return the number of iterations of each request: its limit, or up to its stop. It is one more if the stop token
    came in the last fourth of an iteration's steps in the last layer, or in its last step."""
    limits = wave.workload.max_tokens.tolist()
    ends = [min(limit, stops.get(request, limit) + 1) for request, limit in enumerate(limits)]
    counts, groups = list(ends), [group.tolist() for group in wave.mini_batches]
    chunks = [num_chunks(wave.policy, wave.workload.prompt_tokens[group]) for group in groups]
    for iteration in range(max(limits)):
        steps = [
            (chunk, k)
            for k, group in enumerate(groups)
            for chunk in range(1 if iteration else chunks[k])
            if any(counts[request] > iteration for request in group)
        ]
        steps.sort()
        for at, (chunk, k) in enumerate(steps):
            if at >= len(steps) - max(1, len(steps) // 4) and (iteration or chunk == chunks[k] - 1):
                late = [request for request in groups[k] if ends[request] == iteration + 1 < limits[request]]
                for request in late:
                    counts[request] = ends[request] + 1
    return counts


# --- what a stream does -----------------------------------------------------------------------------------------------


@given(waves_with_stops())
def test_every_running_request_takes_part_exactly_once_an_iteration(wave_and_stops):
    wave, stops = wave_and_stops
    took_part, num_iterations = Counter(), runs(wave, stops)
    for task in stream_with_stops(wave, stops):
        if task.verb.startswith("attend") or task.verb in ("embed", "project", "finish", "head", "sample", "store_out"):
            for request in task.payload.step.requests.tolist():
                took_part[task.verb, task.iteration, task.layer, request] += 1
    last = wave.shape.num_layers - 1
    expected = Counter()
    for group in wave.mini_batches:
        chunks = num_chunks(wave.policy, wave.workload.prompt_tokens[group])
        for request in group.tolist():
            for iteration in range(num_iterations[request]):
                steps = 1 if iteration else chunks
                expected["embed", iteration, 0, request] += steps
                for verb in ("head", "sample", "store_out"):
                    expected[verb, iteration, last, request] += 1
                for layer in range(last + 1):
                    for verb in ("project", "finish"):
                        expected[verb, iteration, layer, request] += steps
                    expected["attend_prefill", iteration, layer, request] += iteration == 0
                    expected["attend_chunk", iteration, layer, request] += (steps - 1) * (iteration == 0)
                    expected["attend", iteration, layer, request] += iteration > 0
    assert took_part == +expected


def test_a_request_at_its_limit_leaves_at_once_and_another_joins():
    """There is no surplus iteration although no stop is known: four places are full until the queue is empty."""
    limits = np.sort(np.random.default_rng(0).integers(1, 7, 40))[
        ::-1
    ]  # the longest first, whose blocks hold the others
    workload = Workload(np.full(40, 5), limits)
    policy = Policy(cache={"kv@device": 1.0})
    wave = open_batch(Problem(shape=tiny_shape(1, 1), dtype="float32"), policy, workload, 4)
    took_part = defaultdict(list)
    for task in stream(wave, Stops(lambda iteration, num_steps: (), lambda requests: True)):
        if task.verb == "sample":
            for request in task.payload.step.queued.tolist():
                took_part[request].append(task.iteration)
    for request, limit in enumerate(limits.tolist()):
        assert took_part[request] == list(range(took_part[request][0], took_part[request][0] + limit))
    running = Counter(iteration for iterations in took_part.values() for iteration in iterations)
    last_joined = max(iterations[0] for iterations in took_part.values())
    assert {running[iteration] for iteration in range(last_joined)} == {4}


@given(runnable_policies(), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=5))
@settings(max_examples=150)
def test_run_in_order_every_verb_finds_its_own_layers_weights(policy, lengths):
    """This holds for any policy, in the streamed slots and in the one place of unpacked weights."""
    shape = ModelShape("small", "opt", 3, 64, 2, 2, 32, 64, 32, 64)
    prompts, max_tokens = map(np.array, zip(*lengths, strict=True))
    wave = admit(
        Problem(shape=shape, dtype="float32", hardware=catalogue.load("t4")), policy, Workload(prompts, max_tokens)
    )
    streamed = {slot: np.full(wave.placed[0].layout.total_bytes, -1) for slot in range(2)}  # whose a byte is
    unpacked = None
    for task in stream(wave):
        own = task.iteration * shape.num_layers + task.layer
        if task.verb == "load_weights":
            for access in task.writes:
                if access.space[0] == "weights":
                    streamed[access.space[1]][access.lo : access.hi] = own
        for access in task.reads:
            if access.space[0] == "weights":
                found = streamed[access.space[1]][access.lo : access.hi]
                assert (found == own).all(), f"{policy}: {task.label()} finds weights of another layer"
            elif access.space[0] == "plain_weights":
                assert unpacked == own, f"{policy}: {task.label()} finds unpacked weights of another layer"
        if task.verb == "dequantize_weights":
            unpacked = own


H2O = st.builds(lambda whole: Selection("heavy_hitter", budget=0.2, whole_layers=whole), st.integers(0, 3))


@given(
    st.one_of(runnable_policies(), st.builds(Policy, cache=st.just({"kv@device": 0.6, "kv@host": 0.4}), selection=H2O)),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=4),
)
@settings(max_examples=60)
def test_stores_declare_the_blocks_that_they_write(policy, lengths):
    """Some layers drop no tokens while others do; their pools differ in size."""
    prompts, max_tokens = map(np.array, zip(*lengths, strict=True))
    shape, hardware = ModelShape("small", "opt", 3, 64, 2, 2, 32, 64, 32, 128), catalogue.load("t4")
    problem = Problem(shape=shape, dtype="float32", hardware=hardware)
    for task in stream(admit(problem, policy, Workload(prompts, max_tokens))):
        if task.verb in ("scatter", "scatter_device"):
            declared = {access.space[0]: access for access in task.writes}
            for store in task.payload.step.stores:
                space = f"{store.entry}.{store.representation}" if "(" in store.entry else store.entry
                if access := declared.get(space):
                    assert ((access.lo <= store.blocks) & (store.blocks < access.hi)).all(), (policy, task.label())


@given(waves_with_stops(), st.sampled_from(("column", "row")))
def test_the_planner_waits_for_samples_only_while_lanes_have_work(wave_and_stops, schedule):
    """Each iteration is settled once, with all tokens of the iterations before the running one. While the planner waits
    for a token, the stream holds a later position of that iteration."""
    wave, stops = wave_and_stops
    assume(wave.shape.num_layers > 1)
    wave = replace(wave, policy=replace(wave.policy, schedule=schedule))
    known, sampled, positions_behind = Known(stops), [], []
    until = known.until

    def asks(iteration: int, num_steps: int) -> set[int]:
        assert num_steps >= sum(at <= iteration - 2 for at in sampled)
        assert num_steps == 0 or positions_behind[num_steps - 1] > 0
        return until(iteration, num_steps)

    known.until = asks
    num_iterations = 0
    for task in known.tasks(wave):
        num_iterations = task.iteration + 1
        if task.verb == "finish":
            positions_behind = [count + 1 for count in positions_behind]
        if task.verb == "sample":
            sampled.append(task.iteration)
            positions_behind.append(0)
    assert [iteration for iteration, _ in known.asked] == list(range(1, num_iterations + 1))


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(embedding=Placement(host=1)), "embedding"),
        (dict(hidden="disk"), "hidden states on the disk"),
        (dict(cache={"kv@disk": 1}, selection=Selection("heavy_hitter", budget=0.2)), "heavy hitters on the disk"),
        (
            dict(selection=Selection("speculative", None, 4.0, 0.3, 0.2, 1.0, "lru", "device"), attention="host"),
            "a speculative selection with attention on the host",
        ),
        (dict(bits=Bits(act=8)), "bits.act 8 needs rows of a multiple of 64 elements; model tiny has rows of 8"),
        (
            dict(bits=Bits(weights=4)),
            "bits.weights 4 needs rows of a multiple of 64 elements; model tiny has rows of 8",
        ),
    ],
)
def test_what_the_executor_does_not_run_it_refuses_by_name(fields, words):
    with pytest.raises(InputError, match=words):
        check_runnable(tiny_shape(2), Policy(**fields))


# --- clocks of our own ------------------------------------------------------------------------------------------------


def sequential_trace(tasks) -> list[TraceEvent]:
    """Return a trace in which task n runs in [n, n + 0.5]."""
    return [TraceEvent(task, number, number + 0.5) for number, task in enumerate(tasks)]


def derive(tasks, kinds=HAZARDS) -> list[tuple]:
    dependencies = Dependencies(kinds)
    return [dependencies.add(task) for task in tasks]


def numbers_of(tasks) -> dict[tuple[str, int], int]:
    """Return mark (resource, ordinal) -> number of the task in the stream."""
    numbers, issued = {}, Counter()
    for number, task in enumerate(tasks):
        numbers[task.resource, issued[task.resource]] = number
        issued[task.resource] += 1
    return numbers


def schedule(tasks, waits, durations, gaps=None) -> list[TraceEvent]:
    """Return a trace: resources are first in, first out; a task starts when its resource is free and its marks are
    done."""
    ends = defaultdict(list)  # resource -> end of each of its tasks
    trace = []
    for number, task in enumerate(tasks):
        start = ends[task.resource][-1] if ends[task.resource] else 0.0
        for resource, ordinal in waits[number]:
            start = max(start, ends[resource][ordinal])
        start += gaps[number] if gaps else 0.0
        ends[task.resource].append(start + durations[number])
        trace.append(TraceEvent(task, start, ends[task.resource][-1]))
    return trace


@given(waves_with_stops(), st.integers(0, 2**32))
@settings(max_examples=30)
def test_any_parallel_run_that_keeps_the_dependencies_is_right(wave_and_stops, seed):
    tasks, rng = stream_with_stops(*wave_and_stops), random.Random(seed)
    slow = {resource: rng.choice([0.1, 1.0, 10.0]) for resource in RESOURCES}  # so that each resource lags sometimes
    durations = [slow[task.resource] * rng.choice([0.0, 1.0, rng.random()]) for task in tasks]
    gaps = [rng.choice([0.0, rng.random()]) for _ in tasks]
    waits = derive(tasks)
    trace = schedule(tasks, waits, durations, gaps)
    assert check_trace(trace) == []
    assert check_trace(schedule(tasks, waits, durations)) == []  # no gaps: ends and starts coincide
    busy = busy_seconds(trace)
    assert all(seconds <= max(event.end_s for event in trace) + 1e-6 for seconds in busy.values())


@given(waves_with_stops(), st.integers(0, 2**32))
@settings(max_examples=20)
def test_idle_though_ready_is_the_gap_before_a_task(wave_and_stops, seed):
    tasks, rng = stream_with_stops(*wave_and_stops), random.Random(seed)
    durations, gaps = [rng.random() for _ in tasks], [rng.choice([0.0, rng.random()]) for _ in tasks]
    trace = schedule(tasks, derive(tasks), durations, gaps)
    for resource in ("compute", "h2d"):
        mine = [gap for task, gap in zip(tasks, gaps, strict=True) if task.resource == resource]
        found = idle_though_ready(trace, resource)
        assert [event for event, _ in found] == [event for event in trace if event.task.resource == resource]
        assert [idle for _, idle in found] == pytest.approx(mine, abs=1e-6)


def touch(resource: str, verb: str, reads=(), writes=()) -> Task:
    """Return a task on cells of one space "x"."""

    def cells(spans) -> tuple[Access, ...]:
        return tuple(Access(("x",), lo, hi) for lo, hi in spans)

    return Task(0, 0, 0, verb, resource, Work(), cells(reads), cells(writes))


#: Disk to device by way of one staging slot: written, copied on, and written again by another resource before anyone
#: has read what the first write left. In the stream of a policy no two resources write the same buffer one after the
#: other without a read between, so this is where write-after-write is alone responsible.
DOUBLE_WRITE = [
    touch("disk_read", "read_first", writes=[(0, 4)]),
    touch("host_compute", "overwrite", writes=[(2, 4)]),
    touch("h2d", "copy", reads=[(0, 4)]),
]


def runs_of(tasks, kinds, seeds):
    """Yield traces with one resource after the other slowed, keeping the dependencies of ``kinds``."""
    waits = derive(tasks, kinds)
    for seed in seeds:
        rng = random.Random(seed)
        slow = {resource: rng.choice([0.1, 1.0, 10.0]) for resource in RESOURCES}
        yield schedule(tasks, waits, [slow[task.resource] * (0.5 + rng.random()) for task in tasks])


@pytest.mark.parametrize("dropped", HAZARDS)
def test_without_one_kind_of_dependency_the_checker_fails(dropped):
    tasks = DOUBLE_WRITE if dropped == "write_after_write" else list(stream(make_wave()))
    kept = [kind for kind in HAZARDS if kind != dropped]
    assert all(check_trace(run) == [] for run in runs_of(tasks, HAZARDS, range(20)))
    assert any(check_trace(run) for run in runs_of(tasks, kept, range(20)))


#: (task that is waited for, task that waits) by verb: the waits that the executor's buffers depend on.
WEIGHT_WAITS = {("load_weights", "project"), ("finish", "load_weights")}
KV_WAITS = {
    ("project", "store_kv"), ("store_kv", "project"), ("store_kv", "scatter"),  # staging, and staging free again
    ("scatter", "load_kv"), ("load_kv", "scatter"),  # blocks stored in one iteration and loaded in the next
    ("load_kv", "assemble"), ("assemble", "load_kv"),  # the buffer, and the buffer free again
}  # fmt: skip
ACT_WAITS = {
    ("project", "store_act"), ("store_act", "project"), ("store_act", "scatter"), ("scatter", "store_act"),
    ("scatter", "load_act"), ("load_act", "kv_gen"), ("kv_gen", "load_act"), ("sample", "store_out"),
}  # fmt: skip


@pytest.mark.parametrize(
    "cache, needed",
    [
        ({"kv@host": 1.0}, WEIGHT_WAITS | KV_WAITS | {("scatter", "store_kv")}),
        ({"act@host": 1.0}, WEIGHT_WAITS | ACT_WAITS),
        (
            {"act@host": 0.5, "kv@host": 0.5},
            WEIGHT_WAITS | ACT_WAITS | {("load_kv", "assemble"), ("assemble", "load_kv"), ("store_kv", "scatter")},
        ),
        ({"act@device": 0.4, "kv@device": 0.2, "act@host": 0.4}, ACT_WAITS | {("store_out", "sample")}),
    ],
)
def test_every_single_wait_is_needed_and_the_checker_knows(cache, needed):
    """Remove one wait and make its awaited task very slow: if the follower overtakes it, the trace must be refused."""
    tasks = list(stream(make_wave(prompts=(40, 38), max_tokens=(4, 4), cache=cache, bound=70)))
    waits, number_of = derive(tasks), numbers_of(tasks)
    overtaken = set()
    for follower, marks in enumerate(waits):
        for mark in marks:
            awaited = number_of[mark]
            durations = [1.0] * len(tasks)
            durations[awaited] = 1000.0
            fewer = [*waits]
            fewer[follower] = tuple(other for other in marks if other != mark)
            trace = schedule(tasks, fewer, durations)
            if trace[follower].start_s < trace[awaited].end_s:
                assert check_trace(trace), f"{tasks[follower].label()} overtakes {tasks[awaited].label()} unseen"
                overtaken.add((tasks[awaited].verb, tasks[follower].verb))
            else:
                assert check_trace(trace) == []  # another wait implies this one
    assert overtaken >= needed


# --- the checker against spoiled traces -------------------------------------------------------------------------------

STREAM = list(stream(make_wave(prompts=(20, 9), max_tokens=(2, 3), bound=70)))


@pytest.mark.parametrize("times", [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((2, 3), (0, 1))])
@pytest.mark.parametrize("first, second", [("writes", "reads"), ("reads", "writes"), ("writes", "writes")])
def test_accesses_that_overlap_in_time_or_swap_are_caught(first, second, times):
    tasks = touch("disk_read", "a", **{first: [(0, 4)]}), touch("host_compute", "b", **{second: [(2, 6)]})
    violations = check_trace([TraceEvent(task, *at) for task, at in zip(tasks, times)])
    reader = tasks[1 if second == "reads" else 0]
    assert any(text.startswith(reader.label()) or first == second for text in violations)
    assert check_trace([TraceEvent(tasks[0], 0, 1), TraceEvent(tasks[1], 1, 2)]) == []


def test_tolerance_forgives_what_a_devices_clock_cannot_resolve():
    tasks = [touch("h2d", "load", writes=[(0, 1)]), touch("compute", "use", reads=[(0, 1)])]
    trace = [TraceEvent(tasks[0], 0.0, 1.0), TraceEvent(tasks[1], 0.9999, 2.0)]
    assert check_trace(trace)
    assert check_trace(trace, tolerance_s=0.001) == []


# --- the file for Perfetto --------------------------------------------------------------------------------------------


def test_chrome_trace_has_a_row_for_each_resource(tmp_path):
    trace = sequential_trace(STREAM)
    path = tmp_path / "new" / "trace.json"
    save_chrome_trace(path, {"predicted": trace, "measured": trace[:40]})
    events = json.loads(path.read_text())["traceEvents"]
    for pid, (name, part) in enumerate([("predicted", trace), ("measured", trace[:40])], start=1):
        of_part = [event for event in events if event["pid"] == pid]
        assert [e["args"]["name"] for e in of_part if e["name"] == "process_name"] == [name]
        rows = {e["tid"]: e["args"]["name"] for e in of_part if e["name"] == "thread_name"}
        assert sorted(rows.values()) == sorted({event.task.resource for event in part})
        spans = [event for event in of_part if event["ph"] == "X"]
        assert len(spans) == len(part)
        for span, (task, start, end) in zip(spans, part):
            assert (span["name"], rows[span["tid"]]) == (task.verb, task.resource)
            assert (span["ts"], span["dur"]) == pytest.approx((start * 1e6, (end - start) * 1e6))
            assert span["args"]["iteration"] == task.iteration
            assert span["args"]["link_bytes"] == task.work.link_bytes


def test_the_times_of_lanes_are_a_table_and_go_with_the_trace(tmp_path):
    lanes = {"compute": LaneTimes(3, 0.001, 0.25, 2.0, 1.5, 0.1, 0.7, 1234, 5), "h2d": LaneTimes(1)}
    head, *rows = lane_table(lanes)
    compute, link = (dict(zip(head, row, strict=True)) for row in rows)
    assert (compute["lane"], compute["busy, ms"], compute["held up, ms"]) == ("compute", "2000.0", "400.0")
    assert (compute["slept"], compute["lost its processor"]) == ("1,234", "5")
    assert link["queued for a processor, ms"] == link["slept"] == ""
    save_chrome_trace(tmp_path / "trace.json", {"measured": sequential_trace(STREAM)}, lanes)
    other = json.loads((tmp_path / "trace.json").read_text())["otherData"]["lanes"]
    assert {name: LaneTimes(**times) for name, times in other.items()} == lanes


def test_busy_seconds_and_iteration_ends():
    trace = sequential_trace(STREAM)
    counts = Counter(task.resource for task in STREAM)
    assert busy_seconds(trace) == {resource: 0.5 * count for resource, count in counts.items()}
    last_sample = {task.iteration: number + 0.5 for number, task in enumerate(STREAM) if task.verb == "sample"}
    assert iteration_ends(trace) == [last_sample[i] for i in range(3)]
