"""From a policy and a workload to the stream of tasks, in FlexGen's zig-zag (column) order.

``admit`` packs the requests into mini-batches and gives each its blocks; ``stream`` yields tasks. There is no edge
between iterations: the last layer of iteration i carries the first loads of iteration i + 1. A request leaves when it
has its tokens, or, after a stop token, one iteration late: what iteration i + 1 does is settled while iteration i runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexhybrid.core import work
from flexhybrid.core.blocks import BLOCK_TOKENS, BlockKinds, BlockManager, ceil_blocks
from flexhybrid.core.errors import InputError
from flexhybrid.core.layout import LayerLayout, layer_layout
from flexhybrid.core.packing import pack
from flexhybrid.core.policy import Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.task import Access, Task, Work
from flexhybrid.core.workload import Workload

PAGE_BYTES = 4096  #: slices of a streamed layer end on whole pages

#: Cache entries that this plan maker lays out.
PLANNED_KINDS = ("act@device", "act@host", "kv@device", "kv@host")


@dataclass(frozen=True)
class Segment:
    """One representation of one mini-batch's context at one iteration: per-request arrays over B."""

    kind: str
    first_block: np.ndarray  #: physical
    num_tokens: np.ndarray

    @cached_property
    def num_blocks(self) -> np.ndarray:
        return ceil_blocks(self.num_tokens)

    @cached_property
    def max_tokens(self) -> int:
        return int(self.num_tokens.max())

    @cached_property
    def max_blocks(self) -> int:
        return int(self.num_blocks.max())


@dataclass(frozen=True)
class Store:
    """Where the new tokens of one representation go: row of the padded new-token grid -> (block, offset)."""

    kind: str
    rows: np.ndarray
    blocks: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class MiniBatchStep:
    """What one mini-batch does in one iteration; the same for every layer.

    New tokens form a grid [B, width], right-padded; row b·width + t. The attention buffer of a decode step is
    [segment | segment | … | new], each segment as wide as its longest request.
    """

    iteration: int
    mini_batch: int
    requests: np.ndarray  #: [B] indices into the wave
    context: np.ndarray  #: [B] tokens cached before this iteration
    new_tokens: np.ndarray  #: [B]
    segments: tuple[Segment, ...]
    stores: tuple[Store, ...]

    @cached_property
    def prefill(self) -> bool:
        """Nothing is cached yet: the new tokens are a prompt and attend to themselves alone."""
        return not self.context.any()

    @cached_property
    def width(self) -> int:
        return int(self.new_tokens.max())

    @property
    def rows(self) -> int:
        return len(self.requests) * self.width

    @cached_property
    def attention_tokens(self) -> int:
        """T: columns of the attention buffer, the new token included."""
        return sum(segment.max_tokens for segment in self.segments) + 1

    def of(self, representation: str) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.kind.startswith(representation) and s.max_tokens)

    @cached_property
    def act_blocks(self) -> int:
        """Columns of the ACT buffer in blocks: a request's device blocks, then its host blocks, each padded."""
        return sum(segment.max_blocks for segment in self.of("act"))


@dataclass(frozen=True)
class Wave:
    """Requests admitted together: their lengths, mini-batches and blocks."""

    shape: ModelShape
    policy: Policy
    bytes_per_element: int
    workload: Workload
    kinds: BlockKinds
    mini_batches: tuple[np.ndarray, ...]
    first_block: dict[str, np.ndarray]  #: kind -> [requests], physical
    num_blocks: dict[str, np.ndarray]  #: kind -> [requests], reserved
    layout: LayerLayout

    @property
    def pool_blocks(self) -> dict[str, int]:
        return {kind: int(blocks.sum()) for kind, blocks in self.num_blocks.items()}

    @cached_property
    def streamed_from(self) -> int:
        """First byte of a layer that is streamed; those before it stay on the device."""
        return self.layout.resident_prefix(self.policy.weights.device)


def check_planned(policy: Policy) -> None:
    """Refuse what this plan maker does not lay out, by name."""
    for key in policy.cache_kinds:
        if key not in PLANNED_KINDS:
            raise InputError(f"policy {policy.name}: cache entry {key} cannot be run; can: {', '.join(PLANNED_KINDS)}")
    refusals = (
        (policy.schedule != "column", f"schedule {policy.schedule}"),
        (policy.weights.disk > 0, "weights on disk"),
        (policy.embedding.device < 1, "embedding and head off the device"),
        (policy.hidden != "device", f"hidden states on the {policy.hidden}"),
        ((policy.bits.weights, policy.bits.kv, policy.bits.act) != ("native",) * 3, "bits other than native"),
        (policy.selection.method != "none", f"selection {policy.selection.method}"),
        (policy.attention != "device", f"attention on the {policy.attention}"),
        (policy.weight_order != "kv_first", f"weight_order {policy.weight_order}"),
        (not policy.overlap, "overlap off"),
    )
    for refused, what in refusals:
        if refused:
            raise InputError(f"policy {policy.name}: {what} cannot be run by this version")


def admit(
    shape: ModelShape,
    policy: Policy,
    workload: Workload,
    bytes_per_element: int,
    manager: BlockManager | None = None,
    seconds_per_token: tuple[float, float] = (1.0, 1.0),
) -> Wave:
    """Pack requests and reserve their blocks, those of a mini-batch side by side.

    Without a manager, pools of exactly the needed size are assumed. Raises InputError when a policy cannot be run or
    a pool has no room.
    """
    check_planned(policy)
    kinds = BlockKinds(policy.cache)
    cached = workload.cached_tokens
    mini_batches = pack(cached, kinds, policy.max_mini_batch_tokens, policy.packing, seconds_per_token)
    counts = kinds.blocks(ceil_blocks(cached))  # [requests, kind]
    num_blocks = {kind: counts[:, i] for i, kind in enumerate(kinds.kinds)}
    if manager is None:
        manager = BlockManager({kind: int(blocks.sum()) for kind, blocks in num_blocks.items()})
    first_block = {kind: np.zeros(workload.num_requests, dtype=np.int64) for kind in kinds.kinds}
    for group in mini_batches:
        for request in group:
            extents = manager.admit(int(request), {kind: int(num_blocks[kind][request]) for kind in kinds.kinds})
            for kind, extent in extents.items():
                first_block[kind][request] = extent.first
    return Wave(
        shape, policy, bytes_per_element, workload, kinds, tuple(mini_batches), first_block, num_blocks,
        layer_layout(shape, bytes_per_element),
    )  # fmt: skip


def make_step(wave: Wave, iteration: int, mini_batch: int, requests: np.ndarray) -> MiniBatchStep:
    """The step of the given (still running) requests of a mini-batch. O(B) numpy work, once for all layers."""
    prompts = wave.workload.prompt_tokens[requests]
    if iteration == 0:
        context, new_tokens = np.zeros_like(prompts), prompts
    else:
        context, new_tokens = prompts + iteration - 1, np.ones_like(prompts)
    per_kind = wave.kinds.tokens(context)
    segments = tuple(
        Segment(kind, wave.first_block[kind][requests], per_kind[:, i]) for i, kind in enumerate(wave.kinds.kinds)
    )
    width = int(new_tokens.max())
    batch_row = np.repeat(np.arange(len(requests)), new_tokens)
    within = np.arange(len(batch_row)) - np.repeat(np.cumsum(new_tokens) - new_tokens, new_tokens)
    positions = context[batch_row] + within
    kind_index = wave.kinds.kind_of(positions)
    token_index = wave.kinds.tokens(positions)  # how many tokens of each kind come before
    stores = []
    for i, kind in enumerate(wave.kinds.kinds):
        chosen = kind_index == i
        if not chosen.any():
            continue
        index = token_index[chosen, i]
        first = wave.first_block[kind][requests][batch_row[chosen]]
        rows = batch_row[chosen] * width + within[chosen]
        stores.append(Store(kind, rows, first + index // BLOCK_TOKENS, index % BLOCK_TOKENS))
    return MiniBatchStep(iteration, mini_batch, requests, context, new_tokens, segments, tuple(stores))


def step_work(shape: ModelShape, p: int, step: MiniBatchStep) -> dict[str, Work]:
    """The work of each verb of a step, in one layer. A verb without work is absent."""
    batch = len(step.requests)
    works = {
        "embed": work.embed(shape, p, step.rows),
        "project": work.project(shape, p, step.rows),
        "finish": work.finish(shape, p, step.rows),
        "head": work.head(shape, p, batch),
        "sample": work.sample(shape, p, batch),
        "store_out": work.store_out(batch),
    }
    for segment in step.segments:
        representation, tier = segment.kind.split("@")
        if tier == "host" and segment.max_tokens:
            copies = int(np.count_nonzero(segment.num_blocks))
            works[f"load_{representation}"] = work.load_blocks(
                shape, p, representation, int(segment.num_blocks.sum()), copies
            )
    stored = {store.kind: len(store.rows) for store in step.stores}
    for representation in ("kv", "act"):
        if rows := stored.get(f"{representation}@host"):
            works[f"store_{representation}"] = work.store_rows(shape, p, representation, rows)
    for tier, verb in (("host", "scatter"), ("device", "scatter_device")):
        kv_rows, act_rows = stored.get(f"kv@{tier}", 0), stored.get(f"act@{tier}", 0)
        if kv_rows or act_rows:
            works[verb] = work.scatter_rows(shape, p, kv_rows, act_rows)
    if step.prefill:
        works["attend_prefill"] = work.attend_prefill(shape, p, batch, step.width)
        return works
    if step.act_blocks:
        works["kv_gen"] = work.kv_gen(shape, p, max(batch * step.act_blocks * BLOCK_TOKENS, work.MIN_KV_GEN_ROWS))
    works["assemble"] = work.assemble(shape, p, batch * step.attention_tokens)
    works["attend"] = work.attend_decode(shape, p, batch, step.attention_tokens)
    return works


@dataclass(frozen=True)
class WeightSlice:
    """Bytes [start, end) of a layer on their way to a device slot; the payload of load_weights."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True)
class StepPayload:
    """A mini-batch's step and the buffer slots it uses in this layer."""

    step: MiniBatchStep
    slot: int  #: of the KV, ACT, staging and strip buffers
    weight_slot: int


StopsUntil = Callable[[int], "set[int] | frozenset[int]"]


def no_stops(iteration: int) -> frozenset[int]:
    """Nobody stops early: the lengths alone decide (ignore_eos, and every prediction)."""
    return frozenset()


def stream(wave: Wave, stops_until: StopsUntil = no_stops, first_iteration: int = 0) -> Iterator[Task]:
    """The tasks of a wave in stream order, from the first prompt token to the last sampled one.

    ``first_iteration`` 1 starts at the first decode iteration, over a cache that is already filled.

    ``stops_until(i)``: requests that sampled a stop token in iterations up to i. It is asked with i - 1 when iteration
    i + 1 is laid out, at the start of iteration i's last layer (the stop lags one iteration), and may block until the
    answer is known.
    """
    return _Stream(wave, stops_until).tasks(first_iteration)


class _Stream:
    """The state of the stream: which slot is next. Emits tasks verb by verb."""

    def __init__(self, wave: Wave, stops_until: StopsUntil):
        self.wave, self.stops_until = wave, stops_until
        self.num_layers = wave.shape.num_layers
        self.layer_count = 0  # layers begun since the start, over all iterations: picks the weight slot
        self.step_count = 0  # (layer, mini-batch) pairs begun: picks the cache slots

    def tasks(self, first_iteration: int) -> Iterator[Task]:
        current = self._lay_out(first_iteration, frozenset())
        if current:
            yield from self._load_weights(current, 0, 0, 0, 1)
            yield from self._load_cache(current[0], 0, 0)
        while current:
            following: list = []
            for layer in range(self.num_layers):
                last_layer = layer == self.num_layers - 1
                if last_layer:
                    iteration = current[0][0].iteration
                    following = self._lay_out(iteration + 1, self.stops_until(iteration - 1))
                next_layer = (following, 0) if last_layer else (current, layer + 1)
                for k, (step, works) in enumerate(current):
                    if next_layer[0]:
                        yield from self._load_weights(*next_layer, (self.layer_count + 1) % 2, k, len(current))
                    ahead = (current[k + 1], layer) if k + 1 < len(current) else None
                    if ahead is None and next_layer[0]:
                        ahead = (next_layer[0][0], next_layer[1])
                    # In a model of one layer a mini-batch can follow itself: what it stores now it loads next.
                    own_store = ahead and (ahead[0][0].mini_batch, ahead[1]) == (step.mini_batch, layer)
                    if ahead and not own_store:
                        yield from self._load_cache(ahead[0], ahead[1], (self.step_count + 1) % 2)
                    yield from self._compute(step, works, layer)
                    if own_store:
                        yield from self._load_cache(ahead[0], ahead[1], (self.step_count + 1) % 2)
                    self.step_count += 1
                self.layer_count += 1
            current = following

    def _lay_out(self, iteration: int, stopped) -> list[tuple[MiniBatchStep, dict[str, Work]]]:
        """Steps and works of the mini-batches that still have a running request."""
        wave, steps = self.wave, []
        for k, group in enumerate(wave.mini_batches):
            running = group[wave.workload.max_tokens[group] > iteration]
            if stopped:
                running = running[[int(r) not in stopped for r in running]]
            if len(running):
                step = make_step(wave, iteration, k, running)
                steps.append((step, step_work(wave.shape, wave.bytes_per_element, step)))
        return steps

    def _load_weights(self, steps, layer: int, slot: int, k: int, num_slices: int) -> Iterator[Task]:
        """Slice k of a layer's streamed bytes: one slice a mini-batch keeps the link evenly busy."""
        first, total = self.wave.streamed_from, self.wave.layout.total_bytes
        size = -(-(total - first) // num_slices)
        size += -size % PAGE_BYTES
        start, end = min(total, first + k * size), min(total, first + (k + 1) * size)
        if start == end:
            return
        step = steps[min(k, len(steps) - 1)][0]
        yield Task(
            step.iteration, layer, step.mini_batch, "load_weights", "h2d", Work(link_bytes=end - start, num_copies=1),
            (), (Access(("weights", slot), start, end),), WeightSlice(slot, start, end),
        )  # fmt: skip

    def _load_cache(self, ahead, layer: int, slot: int) -> Iterator[Task]:
        """ACT before KV: recomputing comes before assembling."""
        step, works = ahead
        payload = StepPayload(step, slot, -1)
        for representation in ("act", "kv"):
            verb = f"load_{representation}"
            if verb in works:
                yield Task(
                    step.iteration, layer, step.mini_batch, verb, "h2d", works[verb],
                    (self._pool(f"{representation}@host", layer, step),),
                    (Access((f"{representation}_buffer",), slot, slot + 1),), payload,
                )  # fmt: skip

    def _pool(self, kind: str, layer: int, step: MiniBatchStep) -> Access:
        """The blocks of a mini-batch in one layer of a pool: its requests lie side by side."""
        group = self.wave.mini_batches[step.mini_batch]
        first, count = self.wave.first_block[kind][group], self.wave.num_blocks[kind][group]
        if not count.any():
            return Access((kind, layer), 0, 0)
        first, count = first[count > 0], count[count > 0]  # an empty extent stands nowhere
        return Access((kind, layer), int(first.min()), int((first + count).max()))

    def _compute(self, step: MiniBatchStep, works: dict[str, Work], layer: int) -> Iterator[Task]:
        """Everything of one mini-batch in one layer, from embedding (first layer) to sampling (last)."""
        wave, k = self.wave, step.mini_batch
        slot, weight_slot = self.step_count % 2, self.layer_count % 2
        payload = StepPayload(step, slot, weight_slot)
        layout, kinds = wave.layout, wave.kinds.kinds
        weights = ("weights", weight_slot)
        hidden = Access(("hidden",), k, k + 1)
        staging = Access(("staging",), slot, slot + 1)
        tokens = Access(("tokens",), k, k + 1)
        streamed = wave.streamed_from

        def task(verb, resource, reads, writes) -> Task:
            return Task(step.iteration, layer, k, verb, resource, works[verb], reads, writes, payload)

        def bytes_of(start: int, end: int) -> tuple[Access, ...]:
            """Streamed bytes of this layer within [start, end)."""
            start = max(start, streamed)
            return (Access(weights, start, end),) if start < end else ()

        if layer == 0:
            yield task("embed", "compute", (tokens,), (hidden,))
        if "kv_gen" in works:
            act_buffer = Access(("act_buffer",), slot, slot + 1)
            reads, writes = (act_buffer, *bytes_of(0, layout.kv_end)), (_GENERATED,)
            if "act@device" in kinds:  # gathered into the buffer, beside what the link brought
                reads, writes = (*reads, self._pool("act@device", layer, step)), (*writes, act_buffer)
            yield task("kv_gen", "compute", reads, writes)
        yield task("project", "compute", (hidden, *bytes_of(0, layout.qkv_end)), (_QKV, staging))
        if "assemble" in works:
            reads = (_QKV,)
            if "kv_gen" in works:
                reads += (_GENERATED,)
            if "load_kv" in works:
                reads += (Access(("kv_buffer",), slot, slot + 1),)
            if "kv@device" in kinds:
                reads += (self._pool("kv@device", layer, step),)
            yield task("assemble", "compute", reads, (_ATTENTION,))
            yield task("attend", "compute", (_QKV, _ATTENTION), (_ATTENDED,))
        else:
            yield task("attend_prefill", "compute", (_QKV,), (_ATTENDED,))
        reads = (_ATTENDED, hidden, *bytes_of(0, layout.vectors_end), *bytes_of(layout.qkv_end, layout.total_bytes))
        yield task("finish", "compute", reads, (hidden,))
        yield from self._store(step, works, layer, payload, staging)
        if layer == self.num_layers - 1:
            yield task("head", "compute", (hidden,), (_LOGITS,))
            yield task("sample", "compute", (_LOGITS,), (tokens,))
            log = Access(("token_log", step.iteration), k, k + 1)
            yield task("store_out", "d2h", (tokens,), (log,))

    def _store(self, step, works, layer: int, payload: StepPayload, staging: Access) -> Iterator[Task]:
        """New tokens: staging -> landing strip over the link, strip -> blocks by a host core; or on the device."""
        key = (step.iteration, layer, step.mini_batch)
        strips = []
        for representation in ("act", "kv"):
            verb = f"store_{representation}"
            if verb in works:
                strip = Access((f"{representation}_strip",), payload.slot, payload.slot + 1)
                strips.append(strip)
                yield Task(*key, verb, "d2h", works[verb], (staging,), (strip,), payload)
        for verb, resource, tier, reads in (
            ("scatter", "host_compute", "host", tuple(strips)),
            ("scatter_device", "compute", "device", (staging,)),
        ):
            if verb in works:
                pools = tuple(
                    self._pool(store.kind, layer, step) for store in step.stores if store.kind.endswith(f"@{tier}")
                )
                yield Task(*key, verb, resource, works[verb], reads, pools, payload)


#: Buffers of which there is one, used by the compute resource alone: its first-in-first-out order guards them. The
#: attention buffer is one of them; CAPTURE doubles it, but with one compute stream a second one would never be used.
_GENERATED = Access(("generated",), 0, 1)
_QKV = Access(("qkv",), 0, 1)
_ATTENTION = Access(("attention",), 0, 1)
_ATTENDED = Access(("attended",), 0, 1)
_LOGITS = Access(("logits",), 0, 1)
