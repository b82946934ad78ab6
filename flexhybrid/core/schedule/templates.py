"""The tasks of a position as templates (verb, reads, writes). A position is a mini-batch in a layer.

The templates come in parts, such as the loads or the stores; ``core.plan`` decides the order of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexhybrid.core.context.selection import first_choosing
from flexhybrid.core.schedule import accesses
from flexhybrid.core.schedule.accesses import AccessMap, cell, host_hidden
from flexhybrid.core.schedule.positions import Position
from flexhybrid.core.task import Access
from flexhybrid.core.wave import Wave

Accesses = tuple[Access, ...]
Template = tuple[str, Accesses, Accesses]  #: a task's verb, reads and writes


def _generate(at: AccessMap, position: Position, kv_end: int) -> Iterator[Template]:
    """Yield the recomputation of keys and values from ACT. ``kv_end``: it waits for the layer's bytes [0, kv_end)."""
    works, buffer = position.works, cell("act_buffer", position.slot)
    if "kv_gen" not in works:
        return
    pools = at.pools(position, "act", "device")
    reads, writes = (buffer, *at.matrices(position, 0, kv_end)), (accesses.GENERATED,)
    if "dequantize_act" in works:
        yield "dequantize_act", (buffer, *pools), (accesses.PLAIN_ACT,)
        reads = (*reads, accesses.PLAIN_ACT)
    elif pools:  # device blocks are copied to the buffer, next to loaded rows
        reads, writes = (*reads, *pools), (*writes, buffer)
    yield "kv_gen", reads, writes


def _attend_on_host(at: AccessMap, position: Position, borrows: bool) -> Iterator[Template]:
    """Yield attention on the host to the whole context, or to the step's ``on_host`` segments. ``borrows``: the layer
    attends to another layer's keys and values, and stores none."""
    slot = position.slot
    query, out = cell("query_strip", slot), cell("out_strip", slot)
    yield "store_query", (at.qkv(position),), (query,)
    if "merge_attended" in position.works:
        yield "attend_host", (query, *at.attended_pools(position)), (out,)
        return
    own = tuple(
        cell("kv_strip", slot) if store.tier == "disk" else at.pool(position, store.entry, "kv")
        for store in (() if borrows else position.step.stores)
    )
    pools = at.pools(position, "kv", "host")
    if "read_kv" in position.works:
        pools = *pools, cell("kv_staging", slot)
    yield "attend_host", (query, *pools), (out, *own)
    if "attend_host_shared" in position.works:
        yield "attend_host_shared", (query, out, *pools), (out,)


class Templates:
    """Makes the templates of a wave's positions; each public method yields one part."""

    def __init__(self, wave: Wave):
        self.wave, self.at = wave, AccessMap(wave)
        self.num_layers = wave.shape.num_layers
        self.first_choosing = first_choosing(wave.policy.selection)
        # For each kind of layers, the last bytes for which recomputation and projection wait: W_K and W_V come first.
        natural, layouts = wave.policy.weight_order == "natural", [placed.layout for placed in wave.placed]
        self.needed = [(lay.total_bytes,) * 2 if natural else (lay.kv_end, lay.qkv_end) for lay in layouts]

    def load_cache(self, ahead: Position) -> Iterator[Template]:
        """Yield the loads of the cache and of hidden states. ACT comes before KV, because recomputation comes first;
        disk blocks pass through staging."""
        step, slot, works = ahead.step, ahead.slot, ahead.works
        if "load_hidden" in works and ahead.layer:
            yield "load_hidden", (host_hidden(step),), (self.at.hidden(ahead),)
        if "load_state" in works:
            yield "load_state", (self.at.state(ahead),), (cell("state_buffer", slot),)
        if "load_keys" in works and self._guesses(ahead.layer):
            keys = cell("partial_keys", step.mini_batch, ahead.layer + 1)
            yield "load_keys", (keys,), (cell("partial_buffer", slot),)
        if "gather" in works:
            gathered = cell("gathered", slot)
            index = cell("host_index", step.mini_batch)
            pools = (*self.at.pools(ahead, "act", "host"), *self.at.pools(ahead, "kv", "host"))
            yield "gather", (index, *pools), (gathered,)
            for representation in ("act", "kv"):
                if f"load_{representation}" in works:
                    buffer = cell(f"{representation}_buffer", slot)
                    yield f"load_{representation}", (gathered,), (buffer,)
            return
        for representation in ("act", "kv"):
            if not {f"load_{representation}", f"read_{representation}"} & works.keys():
                continue
            reads = self.at.pools(ahead, representation, "host")
            if f"read_{representation}" in works:
                staged = cell(f"{representation}_staging", slot)
                pools = self.at.pools(ahead, representation, "disk")
                yield f"read_{representation}", pools, (staged,)
                reads = (*reads, staged)
            if f"load_{representation}" in works:  # absent for attention on the host
                buffer = cell(f"{representation}_buffer", slot)
                yield f"load_{representation}", reads, (buffer,)

    def open(self, position: Position) -> Iterator[Template]:
        """Yield the computation up to the queries: embedding, recomputation, projection, speculation."""
        step, layer, works = position.step, position.layer, position.works
        kind, slot, k = self.wave.shape.weights_kind(layer), position.slot, step.mini_batch
        kv_end, qkv_end = self.needed[kind]
        hidden, qkv = self.at.hidden(position), self.at.qkv(position)
        if layer == 0:
            yield "embed", (cell("tokens", k),), (hidden,)
        if "dequantize_weights" in works and position.leads:
            weights = self.at.weights(position, 0, self.wave.placed[kind].layout.total_bytes)
            yield "dequantize_weights", weights, accesses.PLAIN
        if "merge_attended" not in works:
            yield from _generate(self.at, position, kv_end)
        if "project" not in works:  # a layer without attention does all its work in finish
            return
        staging, matrices = cell("staging", slot), self.at.matrices(position, 0, qkv_end)
        writes = (qkv,) if self.wave.shape.borrows(layer) else (qkv, staging)
        if layer >= self.first_choosing and not step.prefill:  # the new tokens' partial keys
            writes += (cell("partial_keys", k, layer),)
        states = self.at.computed_states(position)
        yield "project", (hidden, *matrices, *states), (*writes, *states)
        if "quantize" in works:
            yield "quantize", (qkv,), (staging,)
        ranks = (self.at.ranks(position),) if "rank" in works else ()
        if ranks and step.prefill:  # rank chooses the rows that are kept, and copies them to the staging buffer
            yield "rank", (qkv,), (*ranks, staging)
        if "speculate" in works and step.prefill and layer >= self.first_choosing:
            yield "speculate", (qkv, *ranks, *matrices), (cell("partial_keys", k, layer),)
        elif "speculate" in works and not step.prefill and self._guesses(layer):
            yield from self._speculate(position, qkv)
        if "attend_host" in works:
            yield from _attend_on_host(self.at, position, self.wave.shape.borrows(layer))

    def _guesses(self, layer: int) -> bool:
        """Return whether this layer's input predicts the next layer's selection."""
        return self.first_choosing <= layer + 1 < self.num_layers

    def _speculate(self, position: Position, qkv: Access) -> Iterator[Template]:
        """Yield the selection of tokens for the next layer. Their indices go to the host, which gathers the rows."""
        k, slot = position.step.mini_batch, position.slot
        keys = cell("partial_keys", k, position.layer + 1)
        source = cell("partial_buffer", slot) if "load_keys" in position.works else keys
        index = cell("index", k)
        yield "speculate", (qkv, source), (index,)
        yield "store_index", (index,), (cell("host_index", k),)

    def load_attended(self, position: Position) -> Iterator[Template]:
        """Yield the load of the host's attention output."""
        part = "merge_attended" in position.works
        target = cell("loaded_part", position.slot) if part else self.at.attended(position)
        yield "load_attended", (cell("out_strip", position.slot),), (target,)

    def close(self, position: Position) -> Iterator[Template]:
        """Yield the rest of the computation: attention and feed-forward."""
        step, works = position.step, position.works
        layout = self.wave.placed_of(position.layer).layout
        hidden, qkv, states = self.at.hidden(position), self.at.qkv(position), self.at.computed_states(position)
        verb, made = ("route", self.at.routed(position)) if "route" in works else ("finish", hidden)
        if "project" not in works:
            yield verb, (hidden, *self.at.matrices(position, 0, layout.total_bytes), *states), (made, *states)
            return
        if step.prefill:
            yield "attend_prefill", (qkv,), (self.at.attended(position),)
        elif "merge_attended" in works:  # not in open: the next position, opened before, would overwrite the result
            yield from _generate(self.at, position, self.needed[self.wave.shape.weights_kind(position.layer)][0])
            yield from self._attend(position, qkv)
        elif "attend_host" not in works:
            yield from self._attend(position, qkv)
        if "rank" in works and not step.prefill:
            yield "rank", (self.at.attended(position), qkv), (self.at.ranks(position),)
        reads = (self.at.attended(position), hidden, *self.at.matrices(position, 0, layout.vectors_end))
        reads += self.at.matrices(position, layout.qkv_end, layout.total_bytes)
        yield verb, (*reads, *states), (made, *states)

    def experts(self, part: Sequence[Position]) -> Iterator[Template]:
        """Yield the experts of a layer for several of its positions."""
        rows = tuple(map(self.at.routed, part))
        weights = self.at.matrices(part[0], 0, self.wave.placed_of(part[0].layer).layout.total_bytes)
        yield "experts", (*rows, *weights), rows

    def after_experts(self, position: Position) -> Iterator[Template]:
        """Yield the rest of a layer after its experts."""
        weights = self.at.matrices(position, 0, self.wave.placed_of(position.layer).layout.total_bytes)
        hidden = self.at.hidden(position)
        yield "finish", (self.at.routed(position), hidden, *weights), (hidden,)

    def _attend(self, position: Position, qkv: Access) -> Iterator[Template]:
        """Yield attention on the device to cached and new tokens."""
        works, slot = position.works, position.slot
        buffer = cell("kv_buffer", slot)
        pools = self.at.pools(position, "kv", "device")
        reads = (qkv,)
        if "kv_gen" in works:
            reads += (accesses.GENERATED,)
        if "dequantize_kv" in works:
            yield "dequantize_kv", (buffer, *pools), (accesses.PLAIN_KV,)
            reads += (accesses.PLAIN_KV,)
        else:
            reads += ((buffer,) if "load_kv" in works else ()) + pools
        if "assemble" in works:
            yield "assemble", reads, (accesses.ATTENTION,)
            reads = (qkv, accesses.ATTENTION)
        attended = self.at.attended(position)
        yield "attend_chunk" if "attend_chunk" in works else "attend", reads, (attended,)
        if "attend_shared" in works:
            yield "attend_shared", (*reads, attended), (attended,)
        if "merge_attended" in works:
            yield "merge_attended", (cell("loaded_part", slot), attended), (attended,)
        if "attend_recomputed" in works:
            yield "attend_recomputed", (qkv, accesses.ATTENTION), (attended,)

    def store(self, position: Position) -> Iterator[Template]:
        """Yield the stores of new tokens, and of hidden states if the host keeps them. New tokens go from staging to
        device blocks, or to a strip of the host and from there to host blocks or the disk."""
        works, slot, step = position.works, position.slot, position.step
        staging, ranks = cell("staging", slot), (self.at.ranks(position),) if "rank" in works else ()
        sent = [r for r in ("act", "kv") if f"store_{r}" in works]
        strips = {r: cell(f"{r}_strip", slot) for r in ("act", "kv") if r in sent or f"write_{r}" in works}
        for representation in sent:
            yield f"store_{representation}", (staging, *ranks), (strips[representation],)

        pools: dict[str, list[tuple[str, Access]]] = {"device": [], "host": [], "disk": []}
        for store in step.stores:
            for shared, written in ((False, store.own), (True, store.shared)):
                if written:
                    pool = self.at.pool(position, store.entry, store.representation, shared)
                    pools[store.tier].append((store.representation, pool))
        if "scatter" in works:
            on_host = {representation for representation, _ in pools["host"]}
            to_host = tuple(strip for representation, strip in strips.items() if representation in on_host)
            yield "scatter", to_host, tuple(pool for _, pool in pools["host"])
        if "scatter_device" in works:
            yield "scatter_device", (staging, *ranks), tuple(pool for _, pool in pools["device"])
        for representation, strip in strips.items():
            if f"write_{representation}" in works:
                written = tuple(pool for r, pool in pools["disk"] if r == representation)
                yield f"write_{representation}", (strip,), written
        if "store_state" in works:
            yield "store_state", (cell("state_buffer", slot),), (self.at.state(position),)
        if "store_hidden" in works and position.layer < self.num_layers - 1:
            yield "store_hidden", (self.at.hidden(position),), (host_hidden(step),)

    def sample(self, position: Position) -> Iterator[Template]:
        """Yield the sampling of the next token after the last layer."""
        k, hidden = position.step.mini_batch, self.at.hidden(position)
        tokens = cell("tokens", k)
        yield "head", (hidden,), (accesses.LOGITS,)
        yield "sample", (accesses.LOGITS,), (tokens,)
        yield "store_out", (tokens,), (cell("token_log", k),)
