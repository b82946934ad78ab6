"""Memory by replay: what each buffer must hold, read off the tasks of a run one by one.

``core.memory`` adds up what a policy needs before a run; here the same bytes are found a second way, from what each
task reads and writes and from the step that it carries. Slots of a double buffer are both there from the start, so the
largest thing that any slot ever holds counts twice. What no task moves is taken from ``memory_plan`` by name: the
resident weights, the embedding and the head, the query weights of a speculative selection, workspace and libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.context.cache_entries import TIERS, StoredCopy
from flexhybrid.core.context.selection import first_choosing
from flexhybrid.core.memory import NUM_SLOTS, memory_plan
from flexhybrid.core.plan import WeightSlice
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.task import Task
from flexhybrid.core.wave import Wave

#: Parts that no task moves.
BY_DEFINITION = (
    "resident weights", "embedding and head", "partial query weights", "positions", "packing", "workspace", "libraries",
    "token log", "attention sums",
)  # fmt: skip

#: Verbs that hold nothing which a task before them in the same position does not hold already.
_HOLDS_NOTHING = frozenset((
    "load_hidden", "quantize", "store_kv", "store_act", "write_kv", "write_act", "scatter", "scatter_device", "attend",
    "attend_prefill", "attend_shared", "attend_chunk", "attend_recomputed", "attend_host", "attend_host_shared",
    "route", "experts", "finish", "head", "sample", "store_out",
))  # fmt: skip

#: What lies in double buffers.
_SLOTTED = frozenset((
    "weight slots", "weight staging", "ACT buffers", "KV buffers", "ACT staging", "KV staging", "staging",
    "copies from the device", "gathered rows", "places", "partial key buffers", "query strips", "attended rows",
))  # fmt: skip


def peak_parts(tasks: Iterable[Task], wave: Wave) -> dict[str, dict[str, int]]:
    """Return tier -> part -> bytes that a run of ``stream(wave)`` needs; the names are those of
    ``core.memory.memory_plan``. Raise ValueError for an unknown verb."""
    replay = _Replay(wave)
    for task in tasks:
        replay.see(task)
    parts: dict[str, dict[str, float]] = {"device": {}, "host": {}, "disk": {}}
    for (tier, part, _), size in replay.largest.items():
        times = NUM_SLOTS if part in _SLOTTED else 1
        parts[tier][part] = parts[tier].get(part, 0.0) + times * size
    named = memory_plan(wave.problem, wave.policy, buffer_sizes(wave))
    for tier, of in named.items():
        parts[tier] |= {part: of[part] for part in BY_DEFINITION if part in of}
    return {tier: {part: round(size) for part, size in of.items() if size} for tier, of in parts.items()}


class _Replay:
    """The largest bytes seen of each extent: (tier, part, key) -> bytes."""

    def __init__(self, wave: Wave):
        self.wave = wave
        self.largest: dict[tuple[str, str, object], float] = {}
        p, stored = wave.problem.bytes_per_element, wave.stored
        self.row = {"kv": wave.shape.kv_token_bytes(stored.kv), "act": wave.shape.act_token_bytes(stored.act)}
        self.native_kv, self.native_act = wave.shape.kv_token_bytes(p), wave.shape.act_token_bytes(p)
        self.hidden = wave.shape.hidden * p

    def see(self, task: Task) -> None:
        if isinstance(task.payload, WeightSlice):
            self._weights(task)
            return
        if task.verb not in _HOLDS_NOTHING:
            self._holder(task.verb)(task)

    def _holder(self, verb: str) -> Callable[[Task], None]:
        """Return the method that notes what a task of this verb holds."""
        holders = {
            "embed": self._embed,
            "store_hidden": self._store_hidden,
            "project": self._project,
            "load_kv": self._load_kv,
            "load_act": self._load_act,
            "read_kv": self._read_kv,
            "read_act": self._read_act,
            "kv_gen": self._kv_gen,
            "dequantize_weights": self._dequantize_weights,
            "dequantize_act": self._dequantize_act,
            "dequantize_kv": self._dequantize_kv,
            "assemble": self._assemble,
            "rank": self._rank,
            "speculate": self._speculate,
            "load_keys": self._load_keys,
            "store_index": self._store_index,
            "gather": self._gather,
            "store_query": self._store_query,
            "load_attended": self._load_attended,
        }
        if verb not in holders:
            raise ValueError(f"the replay does not know what {verb} holds")
        return holders[verb]

    def _hold(self, tier: str, part: str, key: object, num_bytes: float) -> None:
        """Note the bytes of one extent; ``key`` distinguishes it from the others of its part."""
        size = self.largest.get((tier, part, key), 0.0)
        self.largest[tier, part, key] = max(size, float(num_bytes))

    def _weights(self, task: Task) -> None:
        piece, (_, streamed_from, disk_from) = task.payload, self.wave.placed_of(task.layer)
        self._hold("device", "weight slots", 0, max(piece.end, piece.disk_end) - streamed_from)
        if piece.end > piece.start:
            self._hold("host", "weights", task.layer, piece.end - streamed_from)
        if piece.disk_end > piece.disk_start:
            self._hold("disk", "weights", task.layer, piece.disk_end - disk_from)
            self._hold("host", "weight staging", 0, piece.disk_end - disk_from)

    # ---- a mini-batch's step

    def _embed(self, task: Task) -> None:
        step = task.payload.step
        rows = len(step.requests) * (step.width + (0 if step.prefill else step.recomputed_width))
        if self.wave.policy.hidden == "device":
            self._hold("device", "hidden states", (task.mini_batch, step.chunk), rows * self.hidden)
        else:
            self._hold("device", "hidden states", "slot", NUM_SLOTS * rows * self.hidden)
        for request, tokens in zip(step.requests.tolist(), (step.context + step.new_tokens).tolist()):
            self._hold("device", "token ids", request, 8 * tokens)

    def _store_hidden(self, task: Task) -> None:
        self._hold("host", "hidden states", (task.mini_batch, task.payload.step.chunk), task.work.link_bytes)

    def _project(self, task: Task) -> None:
        """New rows are staged, each representation in its own place, and then go to their blocks."""
        step, selection = task.payload.step, self.wave.policy.selection
        if selection.pool is not None and selection.pool < 1 and not step.prefill:
            self._hold("host", "places", 0, 8 * len(step.requests) * self.wave.shape.num_kv_heads)
        on_host = self.wave.policy.attention == "host" and not step.prefill
        for store in task.payload.step.stores:
            part = StoredCopy(store.entry, store.representation, store.tier)
            if not on_host:  # else the query brings them along
                rows = len(store.rows) * self.row[store.representation]
                self._hold("device", "staging", part, rows)
                if store.tier != "device":
                    self._hold("host", "copies from the device", part, rows)
            blocks = (int(store.blocks.max()) + 1) * BLOCK_TOKENS * self.row[store.representation]
            self._hold(store.tier, f"{store.representation} pool", (part, task.layer), blocks)

    def _columns(self, task: Task, representation: str, tiers: tuple[str, ...]) -> int:
        """Return the blocks that a step's segments of these tiers take in the buffer: KV padded to the longest
        request."""
        step, policy, blocks = task.payload.step, self.wave.policy, 0
        for segment in step.of(representation):
            if segment.tier in tiers:
                held = segment.reserved if policy.static_cache else ceil_blocks(segment.num_tokens)
                # one a request, or one a beginning that requests share
                blocks += int(held.sum() if representation == "act" else len(held) * held.max())
        return blocks

    def _load_kv(self, task: Task) -> None:
        if any(access.space[0] == "gathered" for access in task.reads):
            self._hold("device", "KV buffers", 0, task.work.link_bytes)
            return
        self._load(task, "kv", ("host", "disk"))

    def _load_act(self, task: Task) -> None:
        self._load(task, "act", ("host", "disk"))

    def _load(self, task: Task, representation: str, tiers: tuple[str, ...]) -> None:
        columns = self._columns(task, representation, tiers) * BLOCK_TOKENS * self.row[representation]
        self._hold("device", f"{representation.upper()} buffers", 0, columns)

    def _read_kv(self, task: Task) -> None:
        self._read(task, "kv")

    def _read_act(self, task: Task) -> None:
        self._read(task, "act")

    def _read(self, task: Task, representation: str) -> None:
        columns = self._columns(task, representation, ("disk",)) * BLOCK_TOKENS * self.row[representation]
        self._hold("host", f"{representation.upper()} staging", 0, columns)

    def _kv_gen(self, task: Task) -> None:
        self._hold("device", "recomputed keys and values", 0, task.work.tokens * self.native_kv)
        if any(access.space[0] == "act_buffer" for access in task.writes):  # device blocks are gathered there
            self._load(task, "act", TIERS)

    def _dequantize_weights(self, task: Task) -> None:
        self._hold("device", "plain weights", 0, self.wave.shape.layer_bytes(self.wave.problem.bytes_per_element))

    def _dequantize_act(self, task: Task) -> None:
        self._hold("device", "plain ACT", 0, self._columns(task, "act", TIERS) * BLOCK_TOKENS * self.native_act)

    def _dequantize_kv(self, task: Task) -> None:
        if any(access.space[0] == "gathered" for access in task.reads):
            return  # no more than a layer that looks at all tokens
        self._hold("device", "plain KV", 0, self._columns(task, "kv", TIERS) * BLOCK_TOKENS * self.native_kv)

    def _assemble(self, task: Task) -> None:
        step = task.payload.step
        if task.layer < first_choosing(self.wave.policy.selection):
            shared = sum(common.tokens * len(common.rows) for common in step.commons)
            tokens = len(step.requests) * step.attention_tokens + shared
            self._hold("device", "attention buffer", 0, tokens * self.native_kv)

    # ---- selections, and attention on the host

    def _rank(self, task: Task) -> None:
        """Note scores and ages of cached tokens by key/value head, on the host; ``_speculate`` notes its own."""
        if self.wave.policy.selection.method == "speculative":
            return
        step, layer = task.payload.step, task.layer
        for request, context in zip(step.requests.tolist(), (step.context + step.new_tokens).tolist()):
            kept = self._kept(request, context)
            self._hold("device", "scores", (layer, request), 8 * self.wave.shape.num_kv_heads * kept)
        if not step.prefill:
            self._hold("host", "places", 0, 8 * len(step.requests) * self.wave.shape.num_kv_heads)

    def _kept(self, request: int, context: int) -> int:
        budget = float(self.wave.policy.selection.budget) * int(self.wave.workload.prompt_tokens[request])
        return min(context, max(BLOCK_TOKENS, int(ceil_blocks(np.ceil(round(budget, 9)))) * BLOCK_TOKENS))

    def _speculate(self, task: Task) -> None:
        """Note partial keys of all stored tokens, in all layers that select; padded within a mini-batch."""
        step, tier = task.payload.step, self.wave.policy.selection.partial_keys
        shape, share = self.wave.shape, self.wave.policy.selection.partial_ratio
        columns = max(1, math.ceil(round(share * shape.head_dim, 9)))
        tokens = zip(step.requests.tolist(), (step.context + step.new_tokens).tolist())
        rows = len(self.wave.mini_batches[task.mini_batch]) * max(
            self._places(request, cached) for request, cached in tokens
        )
        size = rows * columns * shape.num_kv_heads * self.wave.problem.bytes_per_element
        limited = self.wave.policy.selection.pool < 1
        for layer in range(first_choosing(self.wave.policy.selection), shape.num_layers):
            self._hold(tier, "partial keys", (layer, task.mini_batch), size)
        if limited and self.wave.policy.selection.victim != "fifo":  # a count and an age, in every layer
            uses = shape.num_layers * 8 * rows * shape.num_kv_heads
            self._hold("device", "uses", task.mini_batch, uses)

    def _places(self, request: int, tokens: int) -> int:
        """Return how many of a request's first ``tokens`` tokens fit the pool."""
        pool = float(self.wave.policy.selection.pool)
        if pool == 1:
            return tokens
        most = round(pool * int(self.wave.workload.cached_tokens[request]), 9)
        return min(tokens, max(1, math.ceil(most / BLOCK_TOKENS)) * BLOCK_TOKENS)

    def _load_keys(self, task: Task) -> None:
        self._hold("device", "partial key buffers", 0, task.work.link_bytes)

    def _store_index(self, task: Task) -> None:
        """Note room for the most tokens that may be selected, not the expected number."""
        for representation, rows in self._most_selected(task).items():
            each_head = representation == "kv" and self.wave.policy.bits.kv == "native"
            size = 4 * rows * (self.wave.shape.num_kv_heads if each_head else 1)
            for tier in ("device", "host"):
                self._hold(tier, "indices", (representation, task.mini_batch), size)

    def _gather(self, task: Task) -> None:
        for representation, rows in self._most_selected(task).items():
            self._hold("host", "gathered rows", representation, rows * self.row[representation])

    def _most_selected(self, task: Task) -> dict[str, int]:
        step, cap = task.payload.step, self.wave.policy.selection.max_fraction
        return {
            segment.representation: len(step.requests)
            * max(1, math.ceil(round(cap * int(segment.num_tokens.max()), 9)))
            for segment in step.segments
            if segment.max_tokens
        }

    def _store_query(self, task: Task) -> None:
        self._hold("host", "query strips", "query", task.work.link_bytes)

    def _load_attended(self, task: Task) -> None:
        self._hold("host", "query strips", "out", task.work.link_bytes)
        self._hold("device", "attended rows", "slot", task.work.link_bytes)
