"""Capture decode steps as CUDA graphs, and launch each graph in one call. Steps of equal form share a graph.

A **form** has everything that a graph captures: addresses and Python values. Data that change from step to step are at
fixed device addresses: hidden states, keys, values, queries, rotations, places of new rows, and attention's table of
blocks. Weights and pools have one address per layer. Streamed weights have one per slot, so layers with the same slot
share a graph.

Positions, cells of the token table, offsets in blocks and numbers of filled tokens grow by one per step. An addition on
the device **counts them up** (``FixedStep``). The host uploads the data of a step

- if a request joins, leaves, takes a block or first reads from one;
- in every step, if a window hides tokens, requests change their logits, or the cache has both(…).

Adjacent verbs of a position share a graph (``JointLaunch``). If weights and cache are on the device, a graph covers a
layer. It covers a whole step (``embed`` to ``sample``), if also no other task comes between the step's tasks. Then no
request may have a grammar, change its logits or ask for log probabilities. Uploading and counting precede this graph.
Its form also includes the wave's token table and sampled tokens. The form changes if a request leaves, or if a table
outgrows its memory or is read in more parts.

A recomputed prefix grows by whole blocks, and each width is a form. Graphs have memory for ``memory.GRAPH_ROWS`` rows.
Larger steps are launched kernel by kernel.

A form runs without a graph at first, because libraries then load kernels and allocate memory. Its graph is captured the
second time, on the compute lane's stream, while other lanes continue. Graphs run one after another, so all of them use
one memory pool for temporary tensors. They belong to the engine, whose later waves reuse graphs of equal forms.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.memory import MOST_GRAPHS, NUM_SLOTS, graph_rows
from flexhybrid.core.problem import launches_steps
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Task
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.buffers import Buffers
from flexhybrid.runtime.executor import NOTHING, Executor, HiddenStates, put
from flexhybrid.runtime.kernels.sampling import StepSampling, uniforms
from flexhybrid.runtime.process_settings import NO_GARBAGE
from flexhybrid.runtime.step_tensors import Rotation, StepTensors, together_to_device
from flexhybrid.runtime.verbs.attending_in_place import StepExtents, memory_names, step_extents

if TYPE_CHECKING:
    from flexhybrid.runtime.kernels.attend_triton import BlockTable

#: Captured verbs. They launch few kernels, and the number and shapes of these grow only with a recomputed prefix. Other
#: verbs process whole contexts, which takes longer than launching their kernels.
VERBS = ("dequantize_weights", "project", "quantize", "attend", "attend_recomputed", "finish", "scatter_device")
LATER = {verb: VERBS[place + 1 :] for place, verb in enumerate(VERBS)}  #: verb -> the captured verbs after it
ENDS = ("embed", "head", "sample")  #: first and last verbs of a step; captured only with the whole step
STEP_WORKS = {*VERBS, *ENDS, "store_out"}
KEPT_STEPS = 4  #: a graph may be dropped after this number of steps without use
MOST_FORMS = 1 << 14  #: limit of stored forms; above it, those without a graph are forgotten

Verb = Callable[[Any, Task], None]


@lru_cache
def pool_keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph that owns the memory pool of all graphs of a device; the first call captures it.

    It is kept until the process ends, because torch 2.11 does not reuse a pool after all of its graphs are deleted
    (CachingHostAllocator.h, use_count).
    """
    with _captured(torch.cuda.graph_pool_handle()) as keeper:
        torch.zeros(1, device=device, dtype=torch.uint8)
    return keeper


@contextlib.contextmanager
def _captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the block's launches in a graph that allocates from ``pool``. Other lanes may launch meanwhile."""
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        yield graph
        graph.capture_end()
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            graph.capture_end()
        with contextlib.suppress(Exception):  # otherwise torch 2.11 may refuse this pool to other captures
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


class FixedStep:
    """The latest decode step of a mini-batch, with tensors at fixed addresses.

    The addresses change only if the table of blocks outgrows its memory. The first ``moving`` cells of ``memory``
    (int64) change from step to step. The next ``moving`` cells hold their increments.
    """

    step: MiniBatchStep
    blocks: list[bytes]  #: ``_blocks`` of the step
    tensors: StepTensors
    extents: StepExtents
    steady: bool  #: only counted tensors change while requests take no block
    draws: torch.Tensor | None  #: [steps since the upload, B] uniform random numbers; None: no request draws
    form: tuple  #: the step's part of every verb's form
    table: tuple  #: additional part of the form for attention in place
    choice: tuple  #: additional part of the form for ``sample``

    def __init__(self, state: Executor, group: int, spaces: Sequence[str], room: int, rows: int):
        """Allocate the memory of a step.

        ``group``: requests of the mini-batch. ``spaces``: names of the staging buffers. ``room``: blocks that the table
        has memory for. ``rows``: maximum of computed rows.
        """
        self.state, self.room, self.age = weakref.ref(state), room, 0  #: ``age``: steps since the upload
        moving = {"positions": rows, "cells": rows, "sampled": group} | {(space, "offsets"): group for space in spaces}
        still = {(space, part): group for space in spaces for part in ("rows", "blocks")}
        self.moving = sum(moving.values()) + room
        sizes = {**moving, "kinds": room, "by": self.moving, **still, "starts": group + 1, "places": room}
        ends = np.cumsum([0, *sizes.values()]).tolist()
        self.at: dict[Hashable, slice] = dict(zip(sizes, map(slice, ends, ends[1:]), strict=False))
        self.memory = torch.zeros(ends[-1], dtype=torch.int64, device=state.device)
        self.rotation = [table.new_zeros(rows, table.shape[1]) for table in state.steps.rotary or ()]
        self._sampling: dict[str, torch.Tensor] = {}  #: memory for the tensors of a ``StepSampling``, by name

    def upload(self, arrays: dict[Hashable, np.ndarray], by: dict[Hashable, Any]) -> dict[Hashable, torch.Tensor]:
        """Copy arrays to fixed addresses, decreased by their increments (``by``); return their tensors by name.

        ``count_up`` adds the increments again.
        """
        host = np.zeros(len(self.memory), dtype=np.int64)
        for name, array in arrays.items():
            moves, at = by.get(name, 0), self.at[name].start
            host[at : at + len(array)] = array - moves
            if name in by:
                host[at + self.moving :][: len(array)] = moves
        source = torch.from_numpy(host)
        self.memory.copy_(source.pin_memory() if self.memory.is_cuda else source, non_blocking=True)
        self.age = 0
        return {name: self.memory[self.at[name]][: len(array)] for name, array in arrays.items()}

    def fix_sampling(self, sampling: StepSampling | None, group: int) -> StepSampling | None:
        """Copy the tensors of a step's sampling to fixed addresses; return the sampling with these tensors."""
        found = vars(replace(sampling, changes=None)) if sampling else {}
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                memory = self._sampling.setdefault(name, value.new_zeros(*value.shape[:-1], group))
                found[name] = memory[..., : value.shape[-1]].copy_(value)
        parts = ((of.data_ptr(), of.shape) if isinstance(of, torch.Tensor) else str(of) for of in found.values())
        self.choice = tuple(parts)
        return replace(sampling, **found | {"changes": sampling.changes}) if sampling else None

    def count_up(self, state: Executor) -> None:
        """Add the increments to the step's tensors, and update its rotations and random numbers."""
        self.memory[: self.moving].add_(self.memory[self.moving : 2 * self.moving])
        positions = self.memory[: len(self.step.requests) * self.step.computed_width]
        for table, rows in zip(state.steps.rotary or (), self.rotation, strict=True):
            torch.index_select(table, 0, positions, out=rows[: len(positions)])
        if self.draws is not None and (sampling := self.tensors.sampling) and sampling.values_5B is not None:
            sampling.values_5B[0].copy_(self.draws[self.age])
        self.age += 1

    def takes(self, state: Executor, step: MiniBatchStep) -> bool:
        """Take ``step`` if counting up gives its tensors; return whether it was taken."""
        last, blocks = self.step, _blocks(step)
        follows = self.state() is state and step.iteration == last.iteration + 1 and blocks == self.blocks
        if not (follows and self.steady and np.array_equal(step.context, last.context + 1)):
            return False
        if (
            _hiding_window(step) or (step.context % BLOCK_TOKENS < 2).any()
        ):  # a request takes a block, or first reads from one
            return False
        if tables := self.tensors.block_tables:
            ids = [[id(s) for s in (*of.of("act"), *of.of("kv"))] for of in (last, step)]
            tables = {new: tables[old] for old, new in zip(*ids, strict=True) if old in tables}
            self.tensors = replace(self.tensors, block_tables=tables)
        self.step = step
        return True


def _blocks(step: MiniBatchStep) -> list[bytes]:
    """Return the requests of a step and the blocks that they read and write, as bytes to compare."""
    read = [(of.held, of.start_block, of.reserved) for of in (*step.segments, *step.shared_segments)]
    arrays = step.queued, step.requests, *chain.from_iterable(read), *(store.blocks for store in step.stores)
    return [array.tobytes() for array in arrays]


def _hiding_window(step: MiniBatchStep) -> int | None:
    """Return the window of a step's layers if it hides tokens, else None."""
    return step.window if step.window and (step.context + step.new_tokens).max() > step.window else None


class Recording(NamedTuple):
    """A graph, and the tensor that its verbs leave for later verbs."""

    graph: torch.cuda.CUDAGraph
    act: torch.Tensor


class FixedHiddenStates(HiddenStates):
    """Hidden states whose decode steps have one fixed address per mini-batch, in memory of ``graphs``."""

    def __init__(self, wave: Wave, buffers: Buffers, graphs: Graphs):
        super().__init__(wave, buffers)
        sizes, memory = [*map(len, wave.mini_batches)], graphs.hidden
        #: maximum of rows at fixed addresses, for each mini-batch
        self.most = [min(graphs.rows, len(memory) * size // sum(sizes)) for size in sizes]
        self.fixed = [] if self.on_host else memory[: sum(self.most)].split(self.most)

    def holds(self, step: MiniBatchStep) -> bool:
        """Return whether a step's results have fixed addresses: it decodes, and its rows fit.

        A step with a recomputed prefix needs one more row per request, for the attention output of the new token.
        """
        rows = step.computed_width + (step.recomputed_width > 0)
        return step.decodes and len(step.requests) * rows <= self.most[step.mini_batch]

    def keep(self, task: Task, hidden_Rh: torch.Tensor) -> None:
        if self.on_host or not self.holds(task.payload.step):
            super().keep(task, hidden_Rh)
        else:
            put(self.take_back(task, len(hidden_Rh)), hidden_Rh)

    def take_back(self, task: Task, num_rows: int) -> torch.Tensor:
        """Make the rows that a graph wrote the hidden states of a task's step, and return them."""
        if self.on_host:
            return self.slot(task, num_rows)
        rows = self.rows[self._key(task)] = self.fixed[task.mini_batch][:num_rows]
        return rows


class Graphs:
    """The graphs of an engine, and their memory at fixed addresses. Only the compute lane uses them.

    ``state``: any executor of the engine, for the sizes. Every executor that uses the graphs calls ``enter``.
    """

    def __init__(self, state: Executor):
        shape, sizes = state.shape, state.buffers.sizes
        make = partial(torch.zeros, dtype=state.weights.dtype, device=state.device)
        self.rows, of_all = graph_rows(state.policy, sizes)
        self._kvq = make(NUM_SLOTS, self.rows, shape.kv_width + shape.query_width)
        self._attended = make(self.rows, shape.query_width)
        self.hidden = make(of_all, shape.passed_width)  #: [rows, h]
        self._held: dict[tuple[int, int | None], FixedStep] = {}  #: (mini-batch, window) -> its latest step
        self._packs_act = state.buffers.packed("act")
        self._staged = {space: rows.shape[1] for space, rows in state.buffers.staging.items()}
        self._recordings: dict[tuple, Recording | None] = {}  #: form -> its graph, None if the form ran only once
        self.used: dict[tuple, int] = {}  #: form of a graph -> the latest step that used the graph
        self._places: dict[tuple, int] = {}
        self._place_of: dict[tuple[int, int, bool], int] = {}
        self._sizes: list[int] = []  #: number of requests in each mini-batch of the latest wave
        self._num_kinds = 1  #: number of steps (mini-batch and window) in one of its iterations
        self.plain: dict[str, Verb] = {}  #: verb -> the function that is captured
        self.steps = self.launches = self.refused = 0
        self.uploads = 0  #: number of steps that the host uploaded; the others were counted up
        self.enabled = True  #: False: launch kernels one by one, in the same memory
        self.joins = True  #: adjacent verbs of a position share a graph; False: one graph per verb
        self.joins_steps = True  #: whole steps have a graph; False also after the capture of a step has failed
        self.failed = ""  #: why no more graphs are captured; "" while they are

    def enter(self, state: Executor) -> None:
        """Prepare for another wave of the engine. Graphs of equal forms are reused.

        If the sizes of mini-batches change, drop the memory of earlier steps: a memory plan counts one wave only.
        """
        sizes = [len(group) for group in state.wave.mini_batches]
        if sizes != self._sizes:
            self._held.clear()
        self._sizes, self._num_kinds = sizes, len(sizes) * max(1, len(state.wave.windows))
        self.plain = {verb: state.verbs[verb] for verb in (*VERBS, *ENDS)}

    def forget(self) -> None:
        self._recordings, self.used = {}, {}

    # ---- tensors at fixed addresses

    def fix_step(self, state: Executor, step: MiniBatchStep) -> StepTensors:
        """Return a decode step's tensors at fixed addresses, counted up if possible."""
        self.steps += 1
        key = step.mini_batch, step.window
        held = self._held.get(key)
        if held is None or not held.takes(state, step):
            held = self._held[key] = self._upload(state, step, held)
            self.uploads += 1
        held.count_up(state)
        return held.tensors

    def _upload(self, state: Executor, step: MiniBatchStep, held: FixedStep | None) -> FixedStep:
        """Compute the tensors of a step, in the memory of ``held`` if it has room."""
        from flexhybrid.runtime.kernels.attend_triton import num_parts

        extents = step_extents(state, step, _hiding_window(step), torch.from_numpy)
        batch, width = len(step.requests), step.computed_width
        table, group = cast("BlockTable", extents.layout), len(state.wave.mini_batches[step.mini_batch])
        rows = {name: getattr(table, name).numpy() for name in ("starts", "places", "kinds")}
        if held is None or held.room < len(rows["kinds"]):
            most = cast("FixedHiddenStates", state.hidden).most[step.mini_batch]
            held = FixedStep(state, group, [*self._staged], 2 * len(rows["kinds"]), most)
        held.state, held.step, held.blocks = weakref.ref(state), step, _blocks(step)
        # The next token goes into the one partly filled block. Memory 0 holds the new tokens and never grows.
        grows = (rows["kinds"] >> 3 & BLOCK_TOKENS - 1 > 0) & (rows["kinds"] & 7 > 0)
        by = {name: 1 for name, at in held.at.items() if at.stop <= held.moving} | {"kinds": grows << 3}
        by["positions"] = by["cells"] = np.arange(width * batch) % width == width - 1  # only new tokens move

        def place(arrays: dict[Hashable, np.ndarray]) -> dict[Hashable, torch.Tensor]:
            own = {name: array for name, array in arrays.items() if name in held.at}
            for name, array in own.items():
                if isinstance(name, tuple):  # places in a buffer: repeat the last one, which is copied again
                    missing = min(batch, self._staged[name[0]]) - len(array)
                    own[name] = np.r_[array, np.repeat(array[-1:], max(0, missing))]
            others = {name: array for name, array in arrays.items() if name not in held.at}
            return held.upload(own | rows, by) | together_to_device(others, state.device)

        rotation = cast("Rotation", tuple(of[: width * batch] for of in held.rotation)) or None
        tensors = state.steps.make(step, place, rotation)
        held.tensors = tensors = replace(tensors, sampling=held.fix_sampling(tensors.sampling, group))
        held.extents = extents._replace(layout=table._replace(**{name: held.memory[held.at[name]] for name in rows}))
        plan, after = state.steps.plan.select(step.queued), np.arange(BLOCK_TOKENS)[:, None]
        held.steady, held.draws = not (plan.changing or state.wave.split), None
        if tensors.sampling is not None and tensors.sampling.values_5B is not None:
            at = (step.context + step.new_tokens + after).reshape(-1)
            of = (np.tile(which, BLOCK_TOKENS) for which in (plan.seeds, plan.request_ids))
            held.draws = state.to_device(uniforms(*of, positions=at).reshape(BLOCK_TOKENS, batch))
        whole = tuple((space, 0 if of.rows is None else len(of.rows)) for space, of in tensors.stores.items())
        hidden = cast("FixedHiddenStates", state.hidden).fixed[step.mini_batch :][
            :1
        ]  # none if the host keeps hidden states
        places = tuple(of.data_ptr() for of in (held.memory, *held.rotation, *hidden))
        held.form = batch, width, group, held.room, whole, places
        names, parts = memory_names(state, extents.segments), num_parts(batch, state.shape.num_heads, table)
        held.table = _hiding_window(step), parts, table.parts, tuple(names[part] for part in table.parts)
        return held

    def fixed(self, state: Executor, task: Task) -> FixedStep:
        """Return the fixed tensors of a task's step. Raise RuntimeError if they are of another step."""
        state.tensors(task)
        step = task.payload.step
        held = self._held[step.mini_batch, step.window]
        if held.step is not step:
            raise RuntimeError(f"{task.label()} has tensors of another step")
        return held

    @staticmethod
    def holds(state: Executor, step: MiniBatchStep) -> bool:
        return cast("FixedHiddenStates", state.hidden).holds(step)

    def kvq(self, state: Executor, task: Task) -> torch.Tensor | None:
        """Return memory for the keys, values and queries of a step; None if the step has no fixed addresses."""
        step = task.payload.step
        rows = len(step.requests) * step.computed_width
        return self._kvq[task.payload.slot, :rows] if self.holds(state, step) else None

    def attended(self, state: Executor, step: MiniBatchStep, whole: bool = False) -> torch.Tensor | None:
        """Return memory for the attention output of a step's new tokens, or (``whole``) of all its computed rows.

        Return None if the step has no fixed addresses.
        """
        if not self.holds(state, step):
            return None
        batch, rows = len(step.requests), len(step.requests) * step.computed_width
        return self._attended[:rows] if whole or not step.recomputed_width else self._attended[rows : rows + batch]

    # ---- forms

    def _form(self, state: Executor, task: Task, verbs: tuple[str, ...]) -> tuple | None:
        """Return the form of these verbs of a task; None if they are not captured."""
        position = task.payload
        step, works = position.step, position.works
        if not self.holds(state, step) or verbs[0] in ENDS or "attend" in verbs and "attend_shared" in works:
            return None
        if step.recomputed_width and self._packs_act and verbs[-1] == "project":
            return None  # each graph would keep a prefix's rows until they are quantized
        held = self.fixed(state, task)
        table = held.table if "attend" in verbs else ()
        # ACT to quantize is at the address where the graph of its projection left it.
        act = state.act.data_ptr() if self._packs_act and "quantize" in verbs and "project" not in verbs else 0
        place = self._place(state, task, "dequantize_weights" in verbs)
        return verbs, place, position.slot, held.form, table, act

    def _place(self, state: Executor, task: Task, unpacks: bool) -> int:
        """Return a number that identifies the addresses and the kind of a task's layer.

        ``unpacks``: the addresses include the quantized weights.
        """
        key = task.layer, task.payload.weight_slot, unpacks
        if (number := self._place_of.get(key)) is None:
            weights = [state.layer_weights.of(task), *([state.layer_weights.stored(task)] if unpacks else ())]
            parts = tuple(p.data_ptr() for of in weights for tensor in of.values() for p in tensor)
            pools = tuple(pool[task.layer].data_ptr() for pool in state.buffers.pools.values())
            place = parts, pools, state.shape.layer_kinds[task.layer], state.shape.attention_of(task.layer)
            number = self._place_of[key] = self._places.setdefault(place, len(self._places))
        return number

    # ---- capture and launch

    def run(self, state: Executor, tasks: Sequence[Task]) -> None:
        """Run adjacent tasks of a position, with their graph if there is one."""
        task, verbs = tasks[0], tuple([task.verb for task in tasks])
        form = self._form(state, task, verbs) if self.enabled and not self.failed else None
        if form is not None and verbs[0] == "finish":
            self._take_attended(state, task)
        recording = None if form is None else self._recording(state, tasks, form)
        if recording is None:
            self._launch(state, tasks)
            return
        recording.graph.replay()
        self.launches += 1
        self._set_results(state, task, verbs, recording)

    def run_step(self, state: Executor, tasks: Sequence[Task]) -> bool:
        """Run all tasks of a step with one graph; return False, without running them, if there is none."""
        verbs = tuple([task.verb for task in tasks])
        held = dict.fromkeys(self.fixed(state, task) for task in tasks if task.verb in ("embed", "attend"))
        outside = state.tokens.ids.data_ptr(), state.sampled.on_device[tasks[0].mini_batch].data_ptr()
        form = verbs, tuple((of.form, of.table, of.choice) for of in held), outside  # a step's slots do not matter
        recording = self._recording(state, tasks, form)
        state.logits = NOTHING  # logits of a capture are in the graphs' memory
        if recording is None:
            self.joins_steps, self.failed = not self.failed, ""
            return False
        recording.graph.replay()
        self.launches += 1
        self._set_results(state, tasks[-1], ("finish",), recording)
        return True

    def _launch(self, state: Executor, tasks: Sequence[Task]) -> None:
        """Run tasks kernel by kernel."""
        for task in tasks:
            self.plain[task.verb](state, task)

    def _take_attended(self, state: Executor, task: Task) -> None:
        """Copy attention's output to where graphs read it. After attention to a shared prefix it is elsewhere."""
        fixed = self.attended(state, task.payload.step, whole=True)
        if fixed is not None and state.attended.data_ptr() != fixed.data_ptr():
            state.attended = fixed.copy_(state.attended)

    def _recording(self, state: Executor, tasks: Sequence[Task], form: tuple) -> Recording | None:
        """Return a form's graph, which is captured on the form's second use; None if there is none."""
        if form not in self._recordings:
            if len(self._recordings) > MOST_FORMS:
                self._recordings = {of: recording for of, recording in self._recordings.items() if recording}
            self._recordings[form] = None
            return None
        recording = self._recordings[form]
        if recording is None:
            if not self._has_room(form):
                self.refused += 1
                return None
            recording = self._recordings[form] = self._capture(state, tasks)
            if recording is None:
                return None
        self.used[form] = self.steps
        return recording

    def num_held(self, *others: tuple) -> int:
        """Return the number of graphs, including ``others`` (forms). A graph of a whole step counts once per layer."""
        return sum(max(1, form[0].count("finish")) for form in (*self.used, *others))

    def _has_room(self, form: tuple) -> bool:
        """Return whether a form's graph may be captured, after deleting unused graphs if necessary."""
        if self.num_held(form) > MOST_GRAPHS:
            oldest = self.steps - KEPT_STEPS * self._num_kinds
            for old in [old for old, step in self.used.items() if step < oldest]:
                del self.used[old], self._recordings[old]
        return self.num_held(form) <= MOST_GRAPHS

    def _capture(self, state: Executor, tasks: Sequence[Task]) -> Recording | None:
        """Capture tasks. If that fails, warn, restore the state and return None."""
        before = dict(state.kvq), state.act, state.attended, dict(state.hidden.rows)
        try:
            with NO_GARBAGE.held(), _captured(pool_keeper(state.device).pool()) as graph:
                self._launch(state, tasks)
        except Exception as error:  # a library call that cannot be captured may raise any error
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.failed = f"{' and '.join(dict.fromkeys(task.verb for task in tasks))} could not be captured: {reason}"
            warnings.warn(f"no more such CUDA graphs are made: {self.failed}", stacklevel=2)
            state.kvq, state.act, state.attended, state.hidden.rows = before
            return None
        keeps_act = self._packs_act and tasks[-1].verb == "project"
        return Recording(graph, state.act if keeps_act else NOTHING)

    def _set_results(self, state: Executor, task: Task, verbs: tuple[str, ...], recording: Recording) -> None:
        """Set the state that later verbs expect after the verbs that a graph replaced."""
        step, slot = task.payload.step, task.payload.slot
        rows = len(step.requests) * step.computed_width
        for verb in verbs:
            if verb == "project":
                state.kvq[slot], state.act = self._kvq[slot, :rows], recording.act
            elif verb in ("attend", "attend_recomputed"):
                state.attended = cast("torch.Tensor", self.attended(state, step, verb == "attend_recomputed"))
            elif verb == "finish":
                state.act = state.attended = NOTHING
                state.kvq.clear()
                cast("FixedHiddenStates", state.hidden).take_back(task, rows)

    def summary(self) -> str:
        """Return one line for users: the number of graphs and of their launches, and why there are no more."""
        more = f"; {self.refused} times there was no room for another" if self.refused else ""
        more += f"; {self.failed}" if self.failed else ""
        return f"{len(self.used)} CUDA graphs, launched {self.launches} times{more}"


def attach(state: Executor, graphs: Graphs | None = None) -> Graphs:
    """Make an executor run its verbs with its engine's graphs (default: new ones); return the graphs."""
    state.graphs = graphs = graphs or Graphs(state)
    graphs.enter(state)
    state.hidden = FixedHiddenStates(state.wave, state.buffers, graphs)
    state.verbs |= dict.fromkeys((*VERBS, *ENDS), _graphed)
    return graphs


def _graphed(state: Executor, task: Task) -> None:
    state.graphs.run(state, (task,))


class JointLaunch:
    """Launches the tasks of a position, or of a whole step, with one graph. It is an ``issuing.JointCall``."""

    patient: Sequence[str] = ("sample",)  # waits until the previous tokens are on the host

    def __init__(self, state: Executor):
        self.state, whole = state, launches_steps(state.wave.problem, state.policy)
        self._step: tuple | None = None  #: iteration and mini-batch of the latest step that may have one graph
        self.most = whole * (len(VERBS) * state.shape.num_layers + len(ENDS))

    def next_key(self, task: Task) -> tuple[int, int, int, str] | None:
        """Return the key of the next task that may share a graph with this one; None if there is none.

        A verb whose function was replaced (``executor.verbs``) shares no graph.
        """
        position, verbs = task.payload, self.state.verbs
        graphs = self.state.graphs
        joins = graphs.joins and verbs[task.verb] is _graphed and graphs.holds(self.state, position.step)
        if not joins or "attend_shared" in position.works:
            return None
        for verb in LATER.get(task.verb, ()):
            if verb in position.works:
                return (*task.key[:3], verb) if verbs[verb] is _graphed else None
        if task.verb == "embed":
            plan = self.state.steps.plan.select(position.step.queued)
            noted = np.maximum(plan.num_logprobs, plan.num_prompt_logprobs).max() >= 0
            by_host = noted or plan.changing or any(grammar is not None for grammar in plan.grammars)
            self._step = task.key[:3:2] if self.most and graphs.joins_steps and not by_host else None
        if self._step != task.key[:3:2] or task.verb == "sample" or not position.works.keys() <= STEP_WORKS:
            return None
        layer, first = task.layer, next(verb for verb in VERBS if verb in position.works)
        if task.verb in LATER:
            layer, first = (layer, "head") if layer == self.state.shape.num_layers - 1 else (layer + 1, first)
        return task.iteration, layer, task.mini_batch, "sample" if task.verb == "head" else first

    def perform(self, tasks: Sequence[Task]) -> None:
        """Launch tasks of a step: with its graph, if they are a whole step that has one; else position by position."""
        graphs = self.state.graphs
        whole = graphs.enabled and not graphs.failed and (tasks[0].verb, tasks[-1].verb) == ("embed", "sample")
        if whole and graphs.run_step(self.state, tasks):
            return
        for _, part in groupby(tasks, lambda task: (task.layer, task.verb in ENDS)):
            graphs.run(self.state, tuple(part))
