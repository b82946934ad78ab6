"""Test CUDA graphs on the fake device: a replay runs the recorded kernels, addresses and Python values."""

from __future__ import annotations

import gc
import re
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_cuda.device import DEVICE, Device, Illegal, fake_cuda
from fake_cuda.test_attention_in_place import IN_PLACE
from fake_cuda.test_streams import EVERYWHERE, POLICIES, check_clean, run_under, tokens_or_error
from models import save_llama, save_opt
from oracles import attend_table, rows_as_operations
from runs import admitted, engine_of
from tiny_models import greedy

from flexhybrid import LLM
from flexhybrid.core import memory
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy, Selection
from flexhybrid.core.problem import Problem, without_graphs
from flexhybrid.core.trace import LineKey, LineTimes
from flexhybrid.runtime import engine as engine_module
from flexhybrid.runtime import issuing
from flexhybrid.runtime.cuda import CudaStream
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.executor import HiddenStates, step_key
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.models import opt
from flexhybrid.runtime.profiling import profile as profiling
from flexhybrid.runtime.step_tensors import computed_positions
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.verbs import VERB_FUNCTIONS, attending_in_place, computing, graphed
from flexhybrid.runtime.verbs.graphed import Graphs
from sim import catalogue

attend_triton = pytest.importorskip("flexhybrid.runtime.kernels.attend_triton", reason="triton is not installed")

#: Contexts grow over the ends of blocks, the longest one behind a capture; one request leaves before the others.
PROMPTS = [[5, 9, 11], [*range(3, 48)], [7] * 17, [*range(10, 19)]]
MAX_TOKENS = (3, 10, 10, 10)
ON_DEVICE = Policy(weights=Placement(device=1.0), cache={"kv@device": 1.0}, max_mini_batch_tokens=160)
CASES = {
    "streamed": ("llama", POLICIES["hybrid"]),
    "on the device": ("llama", ON_DEVICE),
    "cache on the host": ("llama", replace(ON_DEVICE, cache={"kv@host": 1.0}, max_mini_batch_tokens=400)),
    "everywhere": ("mistral", EVERYWHERE),
    "few bits": ("qwen2", replace(POLICIES["hybrid"], bits=Bits(8, 4, 8))),
    "recomputing": ("qwen3", replace(POLICIES["hybrid"], cache={"tok": 0.5, "kv@host": 0.5})),
}
SIZES = {"mistral": {"sliding_window": 9}, "qwen2": {"kv_heads": 4, "ffn": 64}}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Replace the kernels by operations; that of attention reads the table when it runs."""
    monkeypatch.setattr(attend_triton, "launch", attend_table.launch_by_address)
    rows_as_operations.install(monkeypatch)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Return a case's weights, its policy and the right tokens."""
    sources, cases = {}, {}

    def of(name: str):
        kind, policy = CASES[name]
        if kind not in sources:
            folder = tmp_path_factory.mktemp(kind)
            model = save_llama(folder, kind=kind, layers=3, **SIZES.get(kind, {}))
            expected = greedy(model, PROMPTS, max(MAX_TOKENS))
            sources[kind] = Checkpoint(folder), [t[:n] for t, n in zip(expected, MAX_TOKENS, strict=True)]
        if name not in cases:
            source, expected = sources[kind]
            if policy.bits != Bits():  # there is no reference but our own run
                expected = run_under(source, policy, device=torch.device("cpu"), requests=(PROMPTS, MAX_TOKENS)).tokens
            cases[name] = source, policy, expected
        return cases[name]

    return of


def run(source, policy, cuda_graphs=True, requests=(PROMPTS, MAX_TOKENS), **others):
    """Run the prompts, with attention in place."""
    machine = {"attention": IN_PLACE, "cuda_graphs": cuda_graphs}
    return run_under(source, policy, requests=requests, **machine, **others)


FEW = PROMPTS[:2], (3, 7)  #: requests that are enough to capture graphs and to launch them


def of_few(expected: list[list[int]]) -> list[list[int]]:
    return [answer[:most] for answer, most in zip(expected, FEW[1], strict=False)]


class Waves:
    """An engine for several waves of the same prompts."""

    MAX_TOKENS = (3, 6, 6, 6)

    def __init__(self, source, policy):
        self.shape, self.policy, self.opened = source.shape, policy, ExitStack()
        made = engine_of(source, self.wave(range(len(PROMPTS))), DEVICE)
        self.engine = self.opened.enter_context(made)

    @classmethod
    def shortened(cls, answers: list[list[int]]) -> list[list[int]]:
        return [answer[:most] for answer, most in zip(answers, cls.MAX_TOKENS, strict=True)]

    def wave(self, order):
        prompts, answers = ([of[i] for i in order] for of in (PROMPTS, self.MAX_TOKENS))
        machine = {"attention": IN_PLACE, "device": "cuda", "hardware": catalogue.load("t4")}
        return admitted(self.shape, self.policy, prompts, answers, **machine)

    def run(self, order):
        """Return the tokens of these requests, and how many graphs were captured and launched for them."""
        made, before = torch.cuda.CUDAGraph.made, len(torch.cuda.CUDAGraph.made)
        launched = sum(graph.replays for graph in made)
        executor = self.engine.executor(self.wave(order), [PROMPTS[i] for i in order], greedy_plan(len(order)))
        tokens = self.engine.run(executor, RunControl()).tokens
        return tokens, len(made) - before, sum(graph.replays for graph in made) - launched

    def close(self):
        self.opened.close()


def drop_step_tensors(waves: Waves) -> None:
    """Move the step tensors that graphs read to other addresses."""
    waves.kept = dict(waves.engine.graphs._held)  # so that the new memory is no old one
    waves.engine.graphs._held.clear()


def test_waves_of_an_engine_capture_once(case):
    """Requests may come in another order. If tensors that graphs read move, graphs are captured again."""
    source, policy, expected = case("on the device")
    expected = Waves.shortened(expected)
    with fake_cuda(), closing(Waves(source, policy)) as waves:
        first, _, again = (waves.run(range(4)) for _ in range(3))  # the second one may see a form again
        turned = waves.run(range(3, -1, -1))
        drop_step_tensors(waves)
        moved = waves.run(range(4))
    assert first[0] == again[0] == turned[0][::-1] == moved[0] == expected
    assert again[1] == 0 < first[1] and again[2] > first[2] and moved[1] > 0


def test_a_graph_of_memory_that_has_moved_is_found(case, monkeypatch):
    """A form without the addresses of step tensors gets a graph with other addresses, and the tokens are wrong."""
    source, policy, expected = case("on the device")
    form, expected = Graphs._form, Waves.shortened(expected)

    def without_addresses(*given):
        verbs, place, slot, of_step, table, act = form(*given)
        return verbs, place, slot, of_step[:-1], table, act

    monkeypatch.setattr(Graphs, "_form", lambda *given: form(*given) and without_addresses(*given))
    with fake_cuda(), closing(Waves(source, policy)) as waves:
        assert waves.run(range(4))[0] == expected
        drop_step_tensors(waves)
        found = tokens_or_error(lambda: waves.run(range(4))[0])
    assert found != expected


@pytest.mark.parametrize("stale", [False, True])
def test_a_step_graph_of_another_waves_tokens_is_found(case, monkeypatch, stale):
    """Each wave has a token table, at an address of its own while the one before lives."""
    source, policy, expected = case("on the device")
    kept, attach, recording, launched = [], graphed.attach, Graphs._recording, []

    def of_whole_steps(graphs, state, tasks, form):
        is_step = form[0][0] == "embed"
        found = recording(graphs, state, tasks, (*form[:-1], ()) if stale and is_step else form)
        launched.extend([len(kept)] if is_step and found else ())
        return found

    monkeypatch.setattr(engine_module, "attach", lambda *given: (kept.append(given), attach(*given))[1])
    monkeypatch.setattr(Graphs, "_recording", of_whole_steps)
    with fake_cuda(), closing(Waves(source, replace(policy, max_mini_batch_tokens=400))) as waves:
        found = tokens_or_error(lambda: [waves.run(range(4))[0] for _ in range(2)])
    assert (found != [Waves.shortened(expected)] * 2) == stale and {1, 2} <= {*launched}


WHOLE = ("project", "attend", "finish", "scatter_device")
#: By case the verbs that have a graph together; each has its own where a trace is kept.
JOINT = {
    "streamed": {("project",), ("attend", "finish")},
    "on the device": {WHOLE},
    "cache on the host": {("project",), ("attend", "finish")},
    "few bits": {("dequantize_weights",), ("project", "quantize"), ("attend", "finish")},
    "recomputing": {("project",), ("attend", "attend_recomputed", "finish")},
}


@pytest.mark.parametrize(
    ("name", "keep_trace"), [*((name, False) for name in CASES), ("on the device", True), ("few bits", True)]
)
def test_replays_give_the_tokens_of_kernels_that_are_launched_one_by_one(case, monkeypatch, name, keep_trace):
    """A graph holds the verbs of a position with nothing between them, or one verb if a trace is kept. For recomputed
    prefixes graphs have room for one block per request; steps with two blocks have no graph."""
    source, policy, expected = case(name)
    run_graphs, launched, blocks = Graphs.run, [], {False: set(), True: set()}

    def noted(graphs, state, tasks):
        before = graphs.launches
        run_graphs(graphs, state, tasks)
        if graphs.launches > before:
            launched.append(tuple(task.verb for task in tasks))
        blocks[graphs.launches > before].add(tasks[0].payload.step.recomputed_width // BLOCK_TOKENS)

    monkeypatch.setattr(Graphs, "run", noted)
    monkeypatch.setattr(memory, "GRAPH_ROWS", 100)
    monkeypatch.setattr(issuing.StreamLane, "lookahead", 8)  # the planner waits now and then, and parts none of them
    with fake_cuda(seed=len(name)) as watch:
        result = run(source, policy, keep_trace=keep_trace)
        graphs = torch.cuda.CUDAGraph.made
    assert result.tokens == expected
    check_clean(result, watch)
    assert len(graphs) >= 10 and len(launched) > len(graphs), (len(graphs), len(launched))
    assert name != "recomputing" or blocks == {False: {0, 1, 2}, True: {1}}
    if joint := JOINT.get(name):
        assert {*launched} == ({(verb,) for verbs in joint for verb in verbs} if keep_trace else joint)


@pytest.mark.parametrize("name", ["streamed", "on the device"])
def test_tasks_of_the_first_iterations_are_timed_one_by_one(case, name):
    """The times of lines are those of the trace. Without a trace the same tasks are timed, and later ones are launched
    together."""
    source, policy, expected = case(name)
    heard: list[dict[LineKey, LineTimes]] = []
    hears = {"timed_iterations": 4, "on_busy": lambda _busy, line_times: heard.append(line_times())}
    of_trace: dict[LineKey, LineTimes] = {}
    with fake_cuda():
        for event in run(source, policy, hears=hears).trace:
            task = event.task
            if task.iteration < 4 and task.resource in ("compute", "h2d", "d2h"):
                key = task.verb, task.resource, task.work.line
                of_trace.setdefault(key, LineTimes()).add(task, event.end_s - event.start_s)
        timed = {key: times for key, times in heard[-1].items() if key[1] != "host_compute"}
        untraced = run(source, policy, keep_trace=False, hears=hears)
    assert untraced.tokens == expected
    assert timed.keys() == of_trace.keys()
    for key, times in timed.items():
        assert times.seconds == pytest.approx(of_trace[key].seconds, rel=0.01), key
        assert replace(times, seconds=0) == replace(of_trace[key], seconds=0) == replace(heard[-1][key], seconds=0)


def test_a_verb_that_was_replaced_is_launched_by_itself(case):
    """A replaced verb sees every task."""
    source, policy, expected = case("on the device")
    seen, make = [], engine_module.Engine.executor

    def watched(engine, *given):
        executor = make(engine, *given)
        attend = executor.verbs["attend"]
        executor.verbs["attend"] = lambda state, task: (seen.append(task.key), attend(state, task))
        return executor

    with fake_cuda(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine_module.Engine, "executor", watched)
        assert run(source, policy, requests=FEW, keep_trace=False).tokens == of_few(expected)
    assert len(seen) == len({*seen}) == (max(FEW[1]) - 1) * source.shape.num_layers * len({m for _, _, m, _ in seen})


def test_no_garbage_is_collected_in_a_capture(case, monkeypatch):
    """Garbage may hold page-locked memory, which the driver cannot unlock during a capture."""
    source, policy, expected = case("on the device")
    finish, noted = VERB_FUNCTIONS["finish"], set()

    def looking(state, task):
        finish(state, task)
        noted.add((torch.cuda.current_stream().captured is not None, gc.isenabled()))

    monkeypatch.setitem(VERB_FUNCTIONS, "finish", looking)
    with fake_cuda():
        assert run(source, policy, requests=FEW).tokens == of_few(expected)
    assert noted == {(True, False), (False, True)} and gc.isenabled()


def launches_of_layers(monkeypatch) -> list[list[str]]:
    """Return the names of the launches in each captured graph."""
    captured, run_on, begin = [], Device.run, torch.cuda.CUDAGraph.capture_begin

    def begun(graph, *given, **named):
        begin(graph, *given, **named)
        captured.append([])

    def noted(device, stream, operation, args, kwargs):
        if stream.captured:
            captured[-1].append(operation.name)
        return run_on(device, stream, operation, args, kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begun)
    monkeypatch.setattr(Device, "run", noted)
    return captured


#: Of a layer whose context is read whole; where it is read in parts, a second kernel of attention adds them up.
PROJECT, FINISH = ("layer_norm", "addmm"), ("attend", "linear", "norm", "_addmm_activation", "addmm_")
LLAMA = (
    "scale",
    "mm",
    "rotate",
    "attend",
    "linear",
    "add_and_scale",
    "linear",
    "linear",
    "gate",
    "addmm_",
    "index_put_",
)
LAUNCHES = {
    "OPT, KV": (save_opt, ON_DEVICE, {(*PROJECT, *FINISH, "index_put_")}),
    "Llama": (save_llama, ON_DEVICE, {LLAMA}),
    "OPT, KV and ACT": (  # which rows a store takes is looked up; ACT go by way of staging
        save_opt,
        replace(ON_DEVICE, cache={"kv@device": 0.5, "act@device": 0.5}),
        {
            (*PROJECT, "index_select", *FINISH, "index_put_", "index", "index_put_"),
            (*PROJECT, "copy_", *FINISH, "index_put_"),
            (*PROJECT, *FINISH, "index_put_"),
        },
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_decode_layer_launches_only_these_kernels(tmp_path, name):
    """Its results are written where the next layer reads them; keys and values go to their blocks from the
    projection."""
    save, policy, launches = LAUNCHES[name]
    expected = greedy(save(tmp_path, layers=3), PROMPTS, max(MAX_TOKENS))
    with fake_cuda() as watch, pytest.MonkeyPatch.context() as within:
        captured = launches_of_layers(within)
        result = run(Checkpoint(tmp_path), policy, keep_trace=False)
    assert result.tokens == [t[:n] for t, n in zip(expected, MAX_TOKENS, strict=True)]
    assert dict(watch.order.faults) == {}
    assert {*map(tuple, captured)} - {()} == launches


def test_residuals_that_products_add_are_no_less_exact_than_plain_torchs(tmp_path):
    """In bfloat16 against float64: a product that adds to the residual is not rounded before the sum."""
    save_opt(tmp_path, layers=1, heads=4, head_dim=32, ffn=512)
    source = Checkpoint(tmp_path)
    w64 = {name: (t.double(),) for name, _, t in source.layer_tensors(0)}
    w16 = {name: (part.bfloat16(),) for name, (part,) in w64.items()}
    w64 = {name: (part.double(),) for name, (part,) in w16.items()}
    hidden, attended = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = opt.finish(source.shape, w64, hidden.double(), attended.double())
    plain = opt.finish(source.shape, w16, hidden, attended)
    with fake_cuda(deferred=False):
        there = {name: (part.cuda(),) for name, (part,) in w16.items()}
        rows = hidden.cuda()
        fused = opt.finish(source.shape, there, rows, attended.cuda())
        assert fused.data_ptr() == rows.data_ptr()
        fused = fused.cpu()
    error, of_plain = ((ours.double() - exact).square().mean().sqrt() for ours in (fused, plain))
    assert 0 < error <= of_plain


# ---- faults that must be found


def positions_as_python_values(monkeypatch):
    """Rotations are concatenated from rows that the host picks."""
    project = computing._project

    def baked(state, task, w):
        at = computed_positions(task.payload.step).reshape(-1).tolist()
        rotation = tuple(torch.cat([table[position : position + 1] for position in at]) for table in state.steps.rotary)
        tensors = replace(state.tensors(task), rotation_R=rotation)
        state.step_tensors[*step_key(task), task.payload.step.window] = task.payload.step, tensors
        project(state, task, w)

    monkeypatch.setattr(computing, "_project", baked)


def lengths_as_python_values(monkeypatch):
    """Attention covers the longest context at the time of the capture."""

    def launch(query, memories, table, *others):
        attend_table.launch(query, memories, table._replace(starts=table.starts[: len(query) + 1]), *others)

    monkeypatch.setattr(attend_triton, "launch", launch)


def step_tensors_elsewhere(monkeypatch, **names):
    """Tensors of a step stay at the addresses of that step."""
    fix = Graphs.fix_step

    def elsewhere(self, state, step):
        made = state.steps.make(step)
        return replace(fix(self, state, step), **{name: getattr(made, name) for name in names})

    monkeypatch.setattr(Graphs, "fix_step", elsewhere)


def the_table_elsewhere(monkeypatch):
    make = Graphs._upload

    def elsewhere(self, state, step, held):
        made = make(self, state, step, held)
        made.extents = attending_in_place.step_extents(state, step, None, state.to_device)
        return made

    monkeypatch.setattr(Graphs, "_upload", elsewhere)


def hidden_states_elsewhere(monkeypatch):
    monkeypatch.setattr(graphed.FixedHiddenStates, "keep", HiddenStates.keep)


def one_form_for(part: int, monkeypatch):
    """Forms that differ only in this part share a graph."""
    form = Graphs._form

    def without(self, *given):
        made = form(self, *given)
        return made and (*made[:part], *made[part + 1 :])

    monkeypatch.setattr(Graphs, "_form", without)


def one_graph_for_all_widths(monkeypatch):
    form = Graphs._form

    def without(self, *given):
        made = form(self, *given)
        return made and (*made[:3], (made[3][0], *made[3][2:]), *made[4:])

    monkeypatch.setattr(Graphs, "_form", without)


def rows_too_many(monkeypatch):
    monkeypatch.setattr(memory, "GRAPH_ROWS", 100)
    monkeypatch.setattr(graphed.FixedHiddenStates, "holds", lambda hidden, step: step.decodes)


def weights_unpacked_from_one_slot(monkeypatch):
    place = Graphs._place
    monkeypatch.setattr(Graphs, "_place", lambda graphs, state, task, unpacks: place(graphs, state, task, False))


def projections_without_graphs(monkeypatch):
    """Packed rows of their input are at any address."""
    recording = Graphs._recording

    def of_others(graphs, state, tasks, form):
        return None if tasks[0].verb == "project" else recording(graphs, state, tasks, form)

    monkeypatch.setattr(Graphs, "_recording", of_others)
    monkeypatch.setattr(graphed.JointLaunch, "next_key", lambda joint, task: None)


def packed_input_elsewhere(monkeypatch):
    projections_without_graphs(monkeypatch)
    one_form_for(5, monkeypatch)


def memory_of_others(monkeypatch):
    """Graphs use memory that the stream gives to others between launches."""
    graph_type = torch.cuda.CUDAGraph
    begin = graph_type.capture_begin

    def begun(graph, *args, **kwargs):
        begin(graph, *args, **kwargs)
        graph.memory = graph.stream.own

    monkeypatch.setattr(graph_type, "capture_begin", begun)


PLANTED = {
    "positions as Python values": ("on the device", positions_as_python_values),
    "lengths as Python values": ("on the device", lengths_as_python_values),
    "rotations elsewhere": ("on the device", partial(step_tensors_elsewhere, rotation_R=True)),
    "places elsewhere": ("on the device", partial(step_tensors_elsewhere, stores=True)),
    "the table elsewhere": ("on the device", the_table_elsewhere),
    "hidden states elsewhere": ("on the device", hidden_states_elsewhere),
    "one graph for all layers": ("on the device", partial(one_form_for, 1)),
    "one graph for both slots": ("cache on the host", partial(one_form_for, 2)),
    "one graph for all sizes": ("on the device", partial(one_form_for, 3)),
    "one graph for all widths": ("recomputing", one_graph_for_all_widths),
    "rows too many": ("recomputing", rows_too_many),
    "weights unpacked from one slot": ("few bits", weights_unpacked_from_one_slot),
    "packed input elsewhere": ("few bits", packed_input_elsewhere),
    "memory of others": ("recomputing", memory_of_others),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(case, name):
    """It gives other tokens, or an error."""
    of_case, plant = PLANTED[name]
    source, policy, expected = case(of_case)
    with fake_cuda(), pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        found = tokens_or_error(lambda: run(source, policy, keep_trace=False).tokens)
        assert any(graph.replays for graph in torch.cuda.CUDAGraph.made)
    assert found != expected


def test_packed_rows_may_have_other_addresses_each_time(case, monkeypatch):
    source, policy, expected = case("few bits")
    projections_without_graphs(monkeypatch)
    with fake_cuda():
        assert run(source, policy, keep_trace=False).tokens == expected


# ---- what cannot be captured


def wait_for_another_stream(tensor):
    other, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record(other)
    event.wait()


def capture_twice(tensor):
    torch.cuda.CUDAGraph().capture_begin(capture_error_mode="thread_local")


REFUSED = {
    "waiting for a value": lambda tensor: tensor.sum().item(),
    "waiting for the stream": lambda tensor: torch.cuda.current_stream().synchronize(),
    "waiting for another stream": wait_for_another_stream,
    "copying from pageable memory": lambda tensor: tensor.copy_(torch.zeros(tensor.shape), non_blocking=True),
    "allocating page-locked memory": lambda tensor: torch.zeros(4).pin_memory(),
    "recording an event for others": lambda tensor: torch.cuda.Event().record(),
    "a second capture": capture_twice,
}


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED)
def test_the_fake_refuses_what_cuda_refuses(work):
    with fake_cuda():
        tensor, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
        with pytest.raises(Illegal, match="default stream"):
            graph.capture_begin(capture_error_mode="thread_local")
        torch.cuda.set_stream(torch.cuda.Stream())
        if work is not capture_twice:  # all else is legal outside
            work(tensor)
        with pytest.raises(Illegal, match="other threads"):
            graph.capture_begin()
        graph.capture_begin(capture_error_mode="thread_local")
        with pytest.raises(Illegal):
            work(tensor)
        graph.capture_end()


def test_a_pool_goes_with_its_last_graph():
    with fake_cuda():
        torch.cuda.set_stream(torch.cuda.Stream())
        first = torch.cuda.CUDAGraph()
        first.capture_begin(capture_error_mode="thread_local")
        first.capture_end()
        pool, second = first.pool(), torch.cuda.CUDAGraph()
        second.capture_begin(pool=pool, capture_error_mode="thread_local")
        second.capture_end()
        first = second = None
        with pytest.raises(Illegal, match="have all gone"):
            torch.cuda.CUDAGraph().capture_begin(pool=pool, capture_error_mode="thread_local")


def test_a_replay_is_what_was_recorded():
    """Nothing runs during a capture; a replay uses the recorded addresses and Python values."""
    with fake_cuda():
        source, target = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        torch.cuda.current_stream().synchronize()
        torch.cuda.set_stream(torch.cuda.Stream())
        graph, factor = torch.cuda.CUDAGraph(), 2
        with pytest.raises(Illegal):
            graph.replay()
        graph.capture_begin(capture_error_mode="thread_local")
        target.copy_(source * factor + 1)
        graph.capture_end()
        assert target.tolist() == [0] * 4
        graph.replay()
        assert target.tolist() == [3] * 4
        source.fill_(5)
        factor = source = 0
        graph.replay()
        assert target.tolist() == [11] * 4


def test_verbs_that_cannot_be_captured_are_launched_kernel_by_kernel(case, monkeypatch):
    """The run continues with the right tokens, and reports the reason."""
    source, policy, expected = case("on the device")
    finish, executors = VERB_FUNCTIONS["finish"], []

    def looking(state, task):
        finish(state, task)
        executors.append(state)
        float(state.hidden.of(task).sum())

    ended: list[tuple] = []  # torch's allocator, which 2.11 leaves recording
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: ended.append(of))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setitem(VERB_FUNCTIONS, "finish", looking)
    with fake_cuda(), pytest.warns(UserWarning, match="finish could not be captured: waiting for the stream"):
        assert run(source, policy, requests=FEW).tokens == of_few(expected)
    assert "finish could not be captured" in executors[-1].graphs.summary() and len(ended) == 1


@pytest.mark.parametrize("fails", ["capture_begin", "the work", "capture_end"])
def test_a_capture_that_fails_ends_what_torch_records(monkeypatch, fails):
    """Otherwise the allocator would record for ever, whichever call raises."""
    ended, pool = [], object()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: ended.append(of))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def fail(*_, **__):
        raise RuntimeError(fails)

    with fake_cuda():
        torch.cuda.set_stream(torch.cuda.Stream())
        monkeypatch.setattr(torch.cuda.CUDAGraph, fails, fail, raising=False)
        with pytest.raises(RuntimeError, match=fails), graphed._captured(pool):
            if fails == "the work":
                fail()
    assert ended == [(0, pool)]


def test_no_more_graphs_are_captured_than_planned(case, monkeypatch):
    """Unused graphs are replaced; without room, kernels are launched one by one."""
    source, policy, expected = case("on the device")
    made, attach = [], graphed.attach
    monkeypatch.setattr(engine_module, "attach", lambda *given: (made.append(attach(*given)), made[-1])[1])
    monkeypatch.setattr(graphed, "MOST_GRAPHS", 5)
    monkeypatch.setattr(graphed, "KEPT_STEPS", 2)
    with fake_cuda():
        assert run(source, policy).tokens == expected
        count = len(torch.cuda.CUDAGraph.made)
    (graphs,) = made
    assert len(graphs.used) <= 5 < count and graphs.refused
    assert f"{graphs.refused} times there was no room" in graphs.summary()


def test_the_reason_for_no_graphs_is_given():
    shape = shape_by_name("opt-125m")
    machine = {"shape": shape, "device": "cuda", "attention": IN_PLACE}
    assert without_graphs(Problem(**machine), ON_DEVICE) is None
    for changed, policy, reason in (
        ({"device": "cpu"}, ON_DEVICE, "no GPU"),
        ({"cuda_graphs": False}, ON_DEVICE, "switched off"),
        ({}, Policy(attention="host"), "the host attends"),
        ({}, replace(ON_DEVICE, selection=Selection("heavy_hitter", 0.5)), "selection"),
        ({"attention": IN_PLACE._replace(in_place=False)}, ON_DEVICE, "copied and padded"),
    ):
        assert reason in str(without_graphs(Problem(**machine | changed), policy))


def test_graphs_can_be_switched_off_and_are_reported(case):
    """A run reports its number of graphs, or the reason for none. vLLM's name of the switch is accepted."""
    source, policy, _ = case("on the device")
    with fake_cuda():
        told = run(source, policy, requests=FEW, keep_trace=False).graphs
        assert re.fullmatch(r"[1-9]\d* CUDA graphs, launched [1-9]\d* times", told)
        switched_off = run(source, policy, cuda_graphs=False, requests=([[5, 9, 11]], 2)).graphs
        assert switched_off == "no CUDA graphs: they are switched off"
    for given, wanted in (({}, True), ({"enforce_eager": True}, False), ({"cuda_graphs": False}, False)):
        with LLM(source.path, device="cpu", **given) as llm:
            assert llm.problem.cuda_graphs is wanted and llm.graphs == ""
    with pytest.raises(InputError, match="cuda_graphs is 2"):
        LLM(source.path, device="cpu", cuda_graphs=2)


def test_a_gpu_is_profiled_in_one_pass(monkeypatch):
    """The profile has the link, a run with transfers and a run all on the device. Each verb has a sample; nothing is
    compared."""
    for name, value in {"LINK_SECONDS": 0.0, "DECODE_SECONDS": 0.0, "LINK_SIZES": (1 << 16,), "GPU_LAYERS": 2}.items():
        monkeypatch.setattr(profiling, name, value)
    monkeypatch.setattr(profiling, "RandomWeights", lambda shape, device: RandomWeights(shape))
    monkeypatch.setattr(profiling, "fastest_paths", lambda *of: IN_PLACE)
    monkeypatch.setattr(profiling, "launch_seconds", lambda *of: 1e-5)
    alone = profiling.ALONE[0]._replace(requests=2, context=20)
    monkeypatch.setattr(profiling, "ALONE", (alone,))
    runs, done = (profiling.MIXES[0]._replace(requests=2, context=20), alone), []
    shape = replace(profiling.LAUNCHED_SHAPE, num_layers=2)
    with fake_cuda():
        found = profiling.profile(shape, "float32", DEVICE, on_progress=lambda: done.append(0), runs=runs)
    assert len(done) == 2 and not found.disagreements and found.attends_in_place
    verbs = {"kv_gen", "project", "attend", "finish", "load_act", "load_kv", "load_weights", "h2d", "d2h_both"}
    assert verbs | {"project_alone", "attend_alone", "finish_alone", "launcher"} <= found.samples.keys()


def test_what_launching_takes_is_measured_as_a_job_launches(monkeypatch):
    """In the decodes that count no task is timed, and verbs with nothing between them are launched together."""
    monkeypatch.setattr(profiling, "LAUNCHED_SHAPE", replace(profiling.LAUNCHED_SHAPE, num_layers=2))
    monkeypatch.setattr(profiling, "RandomWeights", lambda shape, device: RandomWeights(shape))
    monkeypatch.setattr("flexhybrid.runtime.session.fastest_paths", lambda *of: IN_PLACE)
    record, perform, were_timed, together = CudaStream.record, graphed.JointLaunch.perform, [], []

    def recorded(stream, timed=True):
        were_timed.append(timed)
        return record(stream, timed)

    def performed(joint, tasks):
        together.append(len(tasks))
        perform(joint, tasks)

    monkeypatch.setattr(CudaStream, "record", recorded)
    monkeypatch.setattr(graphed.JointLaunch, "perform", performed)
    with fake_cuda():
        seconds = profiling.launch_seconds(shape_by_name("opt-125m"), "float32", DEVICE)
    assert seconds > 0 and were_timed and not any(were_timed) and max(together) == 4
