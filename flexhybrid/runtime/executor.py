"""The executor: the state that a wave's verbs share while the lanes of the real clock run them.

Shapes in names: B requests of a mini-batch, R computed tokens (padded), N new tokens of a request, T attention columns,
G key/value heads, H query heads, d head size, h hidden. Data of compute verbs need no lock, because these verbs run
only on the compute lane. The plan's dependencies protect all other data.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.problem import attends_in_place
from flexhybrid.core.schedule.buffer_sizes import log_shape, mini_batch_sizes
from flexhybrid.core.schedule.steps import MiniBatchStep, Store
from flexhybrid.core.task import Task, Work
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.buffers import Buffers, Context
from flexhybrid.runtime.cuda import CudaCopies
from flexhybrid.runtime.kernels.attention import PATHS, ScoreRule, Weighed
from flexhybrid.runtime.kernels.compiled import Share
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.logprob_log import LogprobLog
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.step_tensors import Prompts, SamplingPlans, StepMaker, StepTensors, TokenTable, to_device
from flexhybrid.runtime.storage.host_memory import HostMemory
from flexhybrid.runtime.storage.parts import Parts
from flexhybrid.runtime.storage.weights import Stored, Weights, WeightSlots
from flexhybrid.runtime.token_masks import TokenMasks

NOTHING = torch.empty(0, dtype=torch.float32)  #: replaces a tensor that is not made yet, or whose memory was freed

SelectionT = TypeVar("SelectionT", bound=SelectionHooks, covariant=True)


class EngineParts(Protocol):
    """The parts of an engine that its waves share."""

    weights: Weights
    slots: WeightSlots
    buffers: Buffers
    copies: CpuCopies | CudaCopies
    host_share: Share  #: divides a host verb's work among threads
    compute_share: Share  #: divides a compute verb's work among threads, if the device is a CPU
    num_threads: int  #: number of computing threads


class LayerWeights:
    """The tensors of every layer: as stored (resident, and in weight slots), and in the compute dtype."""

    def __init__(self, weights: Weights, slots: WeightSlots):
        layers, in_slots = range(weights.shape.num_layers), slots.device or [None]
        self.by_slot = [[weights.views(layer, slot) for slot in in_slots] for layer in layers]
        self.has_slots = bool(slots.device)
        by_layer = layers if weights.modules else range(1)
        #: by layer, or one for all; empty for layers that are not unpacked
        self.plain = [weights.plain_views(slots.plain, n) if weights.unpacks(n) else {} for n in by_layer]
        self._weights, self._pairs = weights, {}  #: (layer, slot) -> ``pairs``

    def stored(self, task: Task) -> dict[str, Parts]:
        return self.by_slot[task.layer][task.payload.weight_slot if self.has_slots else 0]

    def pairs(self, task: Task) -> list[tuple[Stored, torch.Tensor]]:
        """Return ``Weights.plain_pairs`` of a task's layer."""
        key = task.layer, task.payload.weight_slot
        if key not in self._pairs:
            self._pairs[key] = self._weights.plain_pairs(task.layer, self.stored(task), self.of(task))
        return self._pairs[key]

    def of(self, task: Task) -> dict[str, Parts]:
        """Return the tensors of a task's layer in the compute dtype."""
        return self.plain[task.layer % len(self.plain)] or self.stored(task)


class HiddenStates:
    """Hidden states [R, h] between two layers, by mini-batch and chunk; by slot, if the host keeps them."""

    def __init__(self, wave: Wave, buffers: Buffers):
        self.on_host, self.buffers = wave.policy.hidden == "host", buffers
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        sizes = [(sizes.step_rows, chunks) for sizes, chunks in mini_batch_sizes(wave)] if self.on_host else []
        self._chunk_rows = [rows for rows, _ in sizes]
        self._first_rows = np.cumsum([0] + [rows * chunks for rows, chunks in sizes])

    def of(self, task: Task) -> torch.Tensor:
        return self.rows[self._key(task)]

    def keep(self, task: Task, hidden_Rh: torch.Tensor) -> None:
        """Keep hidden states that the compute lane made.

        If they go to the host, they are copied to a slot: a link may still read them when the compute stream's
        allocator would reuse their memory.
        """
        if self.on_host:
            put(self.slot(task, len(hidden_Rh)), hidden_Rh)
        else:
            self.rows[self._key(task)] = hidden_Rh

    def slot(self, task: Task, num_rows: int) -> torch.Tensor:
        """Make the rows of the task's slot its hidden states, and return them."""
        rows = self.rows[self._key(task)] = self.buffers.hidden_slots[task.payload.slot, :num_rows]
        return rows

    def host_rows(self, task: Task) -> torch.Tensor:
        """Return the hidden states [R, h] in host memory."""
        step = task.payload.step
        first = self._first_rows[task.mini_batch] + step.chunk * self._chunk_rows[task.mini_batch]
        return self.buffers.host_hidden[first : first + len(step.requests) * step.computed_width]

    def _key(self, task: Task) -> tuple[int, int]:
        return (task.payload.slot, 0) if self.on_host else step_key(task)


class SampledTokens:
    """Sampled token ids: on the device [B] per mini-batch, on the host [iterations, requests by mini-batch]."""

    def __init__(self, wave: Wave, batch: int, host_memory: HostMemory, device: torch.device):
        self.on_device = [torch.zeros(batch, dtype=torch.int64, device=device) for _ in wave.mini_batches]
        self._on_host = host_memory.zeros(log_shape(wave, batch), torch.int64)
        if wave.queue is None:
            self._start = np.cumsum([0] + [len(group) for group in wave.mini_batches])
        else:
            self._start = 2 * batch * np.arange(len(wave.mini_batches))
        self._joining = batch

    def on_host(self, step: MiniBatchStep) -> torch.Tensor:
        """Return the token ids on the host, [B] in the order of ``step.requests``."""
        start = self._start[step.mini_batch]
        if step.iteration and step.chunk:
            start += self._joining
        return self._on_host[step.iteration % len(self._on_host), start : start + len(step.requests)]


class Executor(Generic[SelectionT]):
    """One wave, ready to run. ``selection``: hooks of the policy's selection.

    Functions in ``verbs`` may be replaced or wrapped before the run.
    """

    def __init__(self, parts: EngineParts, wave: Wave, prompts: Prompts, plan: SamplingPlans, selection: SelectionT):
        if wave.placed != parts.weights.placed:
            raise ValueError("the wave's policy does not place the weights as they were loaded")
        self.verbs: dict[str, Callable[..., None]] = {}  #: verb -> function of (executor, task)
        self.weights, self.slots, self.buffers = parts.weights, parts.slots, parts.buffers
        self.copies, self.host_share, self.compute_share = parts.copies, parts.host_share, parts.compute_share
        self.wave, self.shape, self.policy, self.device = wave, wave.shape, wave.policy, parts.weights.device
        self.modules = parts.weights.modules  #: transformers' layers; None: the layers are functions of ``model``
        self.model: Any = None if self.modules else architecture(wave.shape)
        heads = wave.shape.queries_per_key, wave.shape.head_dim
        paths = wave.problem.attention or fastest_paths(self.device.type, parts.weights.dtype_name, *heads)
        self.attention = {"prompt": PATHS[paths.prompt], "chunk": PATHS[paths.chunk], "decode": PATHS[paths.decode]}
        self.compute_threads = parts.num_threads
        #: (mini-batch, window) -> latest decode step, and its ``StepExtents``
        self.extents: dict[tuple, tuple[MiniBatchStep, Any]] = {}
        #: whether numba's kernels attend on the host; False: plain torch does
        self.host_kernels = paths.on_host and not self.shape.softcaps
        on_host = self.policy.host_attends and self.host_kernels
        if on_host or self.device.type == "cpu" and attends_in_place(wave.problem, wave.policy):
            from flexhybrid.runtime.kernels.in_place import compile_for

            compile_for(parts.weights.dtype)
        self.selection = selection
        self.graphs: Any = None  #: the engine's ``verbs.graphed.Graphs``; None: verbs launch kernels one by one
        self.layer_weights = LayerWeights(parts.weights, parts.slots)
        self.steps = StepMaker(wave, prompts, plan, parts.weights.dtype, self.device)
        #: request -> its tokens so far, which become a part of its prompt if it is preempted
        self.answers: Mapping[int, list[int]] = {}
        self.tokens = self.steps.tokens
        #: (mini-batch, chunk, window) -> latest step, and its tensors
        self.step_tensors: dict[tuple[int, int, int | None], tuple[MiniBatchStep, StepTensors]] = {}
        self.begun: dict[int, int] = {}  #: mini-batch -> iteration of its latest step
        self.logprobs = LogprobLog(wave, plan, self.tokens, parts.copies)
        self.masks = TokenMasks(wave.shape.vocab, self.device)
        self.sampled = SampledTokens(wave, parts.buffers.sizes.batch, parts.copies.host_memory, self.device)
        self.hidden = HiddenStates(wave, parts.buffers)
        #: place of each request's states; places are numbered by mini-batch
        self.state_places = np.argsort(np.concatenate(wave.mini_batches))
        self.kvq: dict[int, torch.Tensor] = {}  #: slot -> [R, keys | values | queries]
        self.act = NOTHING  #: [R, h], the input of the projections
        self.context = Context(NOTHING, NOTHING, None)  #: the input of attention
        self.attended = NOTHING  #: [R, H·d]
        self.weighed: Weighed = NOTHING, NOTHING  #: attention of a decode step, before shared prefixes are added
        self.logits = NOTHING  #: [B, vocab]
        #: task key -> work, for tasks whose work is known only when they run; None: do not record
        self.resolved: dict[tuple, Work] | None = None

    def perform(self, task: Task) -> None:
        """Run one task; on CUDA, enqueue its work."""
        if torch.is_inference_mode_enabled():  # entered once for all tasks of a lane
            self.verbs[task.verb](self, task)
            return
        with torch.inference_mode():
            self.verbs[task.verb](self, task)

    def tokens_of(self, step: MiniBatchStep) -> np.ndarray:
        """Return the sampled token ids [B] of a step after its store_out, in the order of ``step.requests``."""
        return self.sampled.on_host(step).numpy()

    def begin_step(self, task: Task) -> StepTensors:
        """Make the tensors of the task's step."""
        if (
            self.begun.get(task.mini_batch) != task.iteration
        ):  # the first step of an iteration: all prompts before it are computed
            self.begun[task.mini_batch] = task.iteration
            _free_chunks(self.hidden.rows, task.mini_batch)
            _free_chunks(self.step_tensors, task.mini_batch)
        if task.payload.step.joins:
            self.steps.enter(task.payload.step, self.answers)
        self.selection.begin_step(task.payload.step)
        return self._make_tensors(task)

    def score_rule(self, task: Task) -> ScoreRule:
        """Return the rule for scores in the task's layer."""
        kind = self.shape.attention_of(task.layer)
        sinks = None
        if kind.sinks:
            own = self.modules.sinks(task.payload.slot) if self.modules else None
            sinks = self.layer_weights.of(task)["sinks.weight"][0] if own is None else own
        return ScoreRule(kind.scaling or self.shape.head_dim**-0.5, kind.softcap, sinks)

    def finish_attention(self, task: Task) -> None:
        """Add attention sinks to ``weighed``, and make it the attention output."""
        self.score_rule(task).with_sinks(self.weighed)
        self.attended = self.weighed[0].flatten(1).to(self.kvq[task.payload.slot].dtype)

    def window_of(self, task: Task) -> int | None:
        """Return the window of the task's layer if it hides tokens of the step, else None."""
        step, window = task.payload.step, self.shape.attention_of(task.layer).window
        return window if window and (step.context + step.new_tokens).max() > window else None

    def tensors(self, task: Task) -> StepTensors:
        """Return the tensors of the task's step. Make them if they are not those of the latest step."""
        key = *step_key(task), task.payload.step.window
        step, tensors = self.step_tensors.get(key, (None, None))
        if step is task.payload.step and tensors is not None:
            return tensors
        if self.shape.windows and task.verb != "embed":  # only the segments differ
            return self._make_tensors(task)
        return self.begin_step(task)

    def _make_tensors(self, task: Task) -> StepTensors:
        step, graphs = task.payload.step, self.graphs
        tensors = graphs.fix_step(self, step) if graphs and graphs.holds(self, step) else self.steps.make(step)
        self.step_tensors[*step_key(task), step.window] = step, tensors
        return tensors

    def resolve(self, task: Task, work: Work) -> None:
        """Record the actual work of a task whose plan has only an expectation."""
        if self.resolved is not None:
            self.resolved[task.key] = work

    def cells(self, store: Store, places: torch.Tensor):
        """Return (blocks, heads, offsets), [rows, G] each, of a store's new tokens; numpy arrays for the host's tier.

        ``places`` [B, G]: the tokens' places among the places of their requests.
        """
        heads = np.arange(self.shape.num_kv_heads)[None]
        if store.tier == "device":
            rows = self.to_device(store.rows)
            places, held = places[rows], self.to_device(store.held)
            return held[rows[:, None], places // BLOCK_TOKENS], self.to_device(heads), places % BLOCK_TOKENS
        on_host = places.numpy()[store.rows]
        return store.block_at(store.rows[:, None], on_host), heads, on_host % BLOCK_TOKENS

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)


#: The first argument of verbs: the executor of a wave, with any selection.
State = Executor[SelectionHooks]


def _free_chunks(values: dict[Any, Any], mini_batch: int) -> None:
    """Delete the values of all but the first chunk of a mini-batch. Keys begin with (mini-batch, chunk)."""
    for key in [key for key in values if key[0] == mini_batch and key[1]]:
        del values[key]


def put(target: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows to their place, unless they are there already."""
    if target.data_ptr() != rows.data_ptr():
        target.copy_(rows)


def step_key(task: Task) -> tuple[int, int]:
    """Return the mini-batch that a task works on, and the chunk of its prompt."""
    return task.mini_batch, task.payload.step.chunk


#: Takes a step, its logits [B, vocab], and the chosen token ids [B].
OnLogits = Callable[[MiniBatchStep, torch.Tensor, torch.Tensor], None]


def force_tokens(executor: Executor, texts: Sequence[Sequence[int]], on_logits: OnLogits | None = None) -> None:
    """Make the executor decode given texts instead of sampled tokens (teacher forcing).

    ``texts``: one for each request in the wave's order, prompt included. After the end of a text, sampled tokens are
    used. ``on_logits`` is called on the compute lane.
    """
    sample, lengths = executor.verbs["sample"], np.diff(executor.tokens.start)
    padded = [[*text, *[-1] * (length - len(text))] for text, length in zip(texts, lengths.tolist())]
    given = TokenTable(padded, lengths, executor.device)

    def forced(executor: Executor, task: Task) -> None:
        sample(executor, task)
        cells = executor.tensors(task).sampled_cells_B
        tokens = given.ids[cells]
        executor.tokens.ids[cells] = torch.where(tokens < 0, executor.tokens.ids[cells], tokens)
        if on_logits:
            on_logits(task.payload.step, executor.logits, executor.tokens.ids[cells])

    executor.verbs["sample"] = forced
