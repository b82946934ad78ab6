"""The work of each verb in a step, from the numbers of tokens and blocks that the step reads, computes and stores.

``StepCounts`` has these counts: numbers for one ``MiniBatchStep``, or arrays with one element per policy. All clocks
take their work from ``step_work``.
"""

from dataclasses import dataclass

import numpy as np

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import StoredCopy
from flexhybrid.core.context.selection import counts_uses, most_selected, partial_share, selected_tokens, whole_queries
from flexhybrid.core.model.shape import LayerKind, ModelShape
from flexhybrid.core.policy import ElementBytes, Policy
from flexhybrid.core.problem import larger
from flexhybrid.core.schedule.steps import Common, MiniBatchStep
from flexhybrid.core.task import Work

Count = float | np.ndarray  #: a number, or an array over candidates


@dataclass(frozen=True)
class StepCounts:
    """Counts over the requests of a step; numbers, or arrays of one shape. An absent key counts 0."""

    prefill: bool  #: nothing is cached before the step
    batch: Count  #: number of requests
    width: Count  #: new tokens of the longest request
    context: Count  #: columns of cached keys and values in the attention buffer
    blocks: dict[StoredCopy, Count]  #: stored copy -> blocks that the step reads
    copies: dict[StoredCopy, Count]  #: stored copy -> contiguous runs of these blocks
    stored: dict[StoredCopy, Count]  #: stored copy -> new rows
    recomputed: Count = 0  #: tokens of the longest request's recomputed prefix
    selected: Count | None = None  #: tokens of a request that a speculative selection loads; None: all
    in_place: Count | None = None  #: tokens that attention reads in place; None: they are assembled in a buffer
    common: Count = 0  #: shared tokens, each counted once
    common_reads: Count = 0  #: shared tokens to which each request attends, summed over requests
    on_host: Count = 0  #: tokens to which the host attends next to the device; not in the counts above
    chunk: bool = False  #: a prompt step after cached tokens, in which the device attends
    window: int | None = None  #: attention window of the layer; ``context``, ``blocks``, ``in_place`` count inside it


#: With fewer queries per key head, requests attend in place to shared tokens one by one, not together.
LEAST_QUERIES = 8


def commons_together(step: MiniBatchStep, wave) -> tuple[Common, ...]:
    """Return the shared blocks of a step to which requests attend together."""
    least = LEAST_QUERIES / wave.shape.queries_per_key if step.in_place else 0
    return tuple(common for common in step.commons if common.rows.shape[1] >= least)


def counts_of(step: MiniBatchStep, wave) -> StepCounts:
    """Return the counts of a wave's step, in layers with the step's window."""
    policy, blocks, copies = wave.policy, {}, {}
    for segment in step.segments:
        if segment.max_tokens:
            blocks[segment.part] = int(segment.moved_blocks.sum())
            copies[segment.part] = int(np.count_nonzero(segment.num_blocks))
    for segment in step.shared_segments:
        blocks[segment.part] = blocks.get(segment.part, 0) + int(segment.num_blocks.sum())
        copies[segment.part] = copies.get(segment.part, 0) + segment.batch
    stored: dict[StoredCopy, Count] = {store.part: len(store.rows) for store in step.stores}
    context = step.attention_tokens - step.computed_width
    selected = None
    if policy.selection.method == "speculative" and not step.prefill:
        selected = int(selected_tokens(policy.selection, context, wave.problem.shape.name))
    window = step.window
    if window is not None and (step.context + step.new_tokens).max() <= window:
        window = None  # the window holds every context
    together = () if window is not None and step.in_place else commons_together(step, wave)
    common_reads = sum(common.rows.size * common.tokens for common in together)
    in_place = None
    if step.in_place:
        own = sum(int(segment.num_tokens.sum()) for segment in step.segments) + len(step.requests)
        own += 0 if step.recomputed is None else int(step.recomputed.sum())
        in_place = own + sum(common.rows.size * common.tokens for common in step.commons) - common_reads
        if window is not None and step.commons:  # each request attends alone to the shared tokens in its window
            in_place = int(np.minimum(step.context + 1, window).sum())
    own_on_host = sum(int(segment.num_tokens.sum()) for segment in step.on_host)
    shared_on_host = sum(common.rows.size * segment.max_tokens for common in step.commons for segment in common.on_host)
    return StepCounts(
        prefill=step.prefill,
        batch=len(step.requests),
        width=step.width,
        context=context,
        blocks=blocks,
        copies=copies,
        stored=stored,
        recomputed=step.recomputed_width,
        selected=selected,
        in_place=in_place,
        common=sum(len(common.rows) * common.tokens for common in together),
        common_reads=common_reads,
        on_host=own_on_host + shared_on_host,
        chunk=not (step.prefill or step.decodes),
        window=window,
    )


def step_work(shape: ModelShape, policy: Policy, stored: ElementBytes, c: StepCounts, whole: bool) -> dict[str, Work]:
    """Return verb -> work of a step in a layer; verbs without work are absent. ``shape``: with one kind of weights
    (``ModelShape.of_weights``). ``whole``: the layer attends to all tokens, under a speculative selection."""
    p = stored.compute
    rows = c.batch * c.width + (0 if c.prefill else c.batch * c.recomputed)
    works = {
        "embed": work.embed(shape, p, rows),
        "project": work.project(shape, p, rows),
        "finish": work.finish(shape, p, rows),
        "head": work.head(shape, p, c.batch),
        "sample": work.sample(shape, p, c.batch),
        "store_out": work.store_out(c.batch),
    }
    if shape.unpacks(policy.bits.weights):
        works["dequantize_weights"] = work.unpack_layer(shape, p, policy.bits.weights, stored.weights)
    if policy.hidden != "device":
        works["load_hidden"] = works["store_hidden"] = work.move_hidden(shape, p, rows)
    works |= _store_works(shape, policy, stored, c)
    if c.prefill:
        works["attend_prefill"] = work.attend_prefill(shape, p, c.batch, c.width, c.window)
        if policy.selection.method == "heavy_hitter":
            works["rank"] = work.rank(shape, c.batch, c.width, c.width / 2)
        if counts_uses(policy.selection):
            works["rank"] = work.fill_pool(shape, c.batch, c.width, sum(c.stored.values()) / c.batch)
        if policy.selection.method == "speculative":
            share, whole_q = partial_share(shape, policy.selection), whole_queries(shape, policy.selection)
            works["speculate"] = work.choose_columns(shape, p, c.batch * c.width, share, whole_q)
        return works
    if policy.attention == "host" and not c.chunk:
        loads = _load_works(shape, stored, c) if policy.attends_from_disk else {}
        return works | _host_works(shape, p, c) | {verb: loads[verb] for verb in ("read_kv",) if verb in loads}
    attended = c.context + c.recomputed + c.width
    if c.selected is None or whole:
        works |= _load_works(shape, stored, c)
    else:
        attended = c.selected + 1
        works |= _gather_works(shape, stored, c)
    if c.selected is not None:
        ratio = partial_share(shape, policy.selection)
        whole_q = whole_queries(shape, policy.selection)
        works["speculate"] = work.speculate(shape, p, c.batch, c.context, ratio, whole_q)
        works["store_index"] = work.store_index(shape, c.batch, most_selected(policy.selection, c.context))
        if policy.selection.partial_keys == "host":
            works["load_keys"] = work.load_partial_keys(shape, p, c.batch, c.context, ratio)
    if any(part.representation == "act" for part in c.blocks):
        everything = c.selected is None or whole
        generated = recomputed_rows(c) if everything else c.batch * _selected_of(c)["act"]
        works["kv_gen"] = work.kv_gen(shape, p, larger(generated, work.MIN_KV_GEN_ROWS))
    works |= _attend_works(shape, p, c, attended)
    if _any(c.on_host):
        works |= _split_works(shape, p, c)
    if _any(c.recomputed):
        works["attend_recomputed"] = work.attend_prefill(shape, p, c.batch, larger(c.recomputed, 1), c.window)
    if policy.selection.method == "heavy_hitter":
        works["rank"] = work.rank(shape, c.batch, 1, attended)
    return works


#: Verbs of a layer without attention.
STATE_VERBS = (
    *("embed", "dequantize_weights", "load_hidden", "route", "experts", "finish", "store_hidden"),
    *("head", "sample", "store_out"),
)


#: Verbs that store new keys and values, or ACT.
STORING = ("quantize", "store_kv", "store_act", "scatter", "scatter_device", "write_kv", "write_act")


def work_of_kind(
    shape: ModelShape, policy: Policy, stored: ElementBytes, c: StepCounts, whole: bool, kind: LayerKind
) -> dict[str, Work]:
    """Return ``step_work`` of a kind of layers. A layer that borrows keys and values stores none, and loads or
    recomputes its source's. A prompt loads no state. A layer without attention does all its work in ``finish``. If
    several mini-batches share their experts in decode steps, ``route`` does what ``finish`` does before experts."""
    works = step_work(shape, policy, stored, c, whole)
    if kind.borrows:
        works = {verb: work for verb, work in works.items() if verb not in STORING}
    state, p, rows, last = kind.state, stored.compute, works["finish"].tokens, "finish"
    if kind.routed and policy.experts.batch and not (c.prefill or c.chunk):
        last, parts = "route", {"route": work.route, "experts": work.experts, "finish": work.add_experts}
        works = works | {verb: work_of(shape, p, rows) for verb, work_of in parts.items()}
    if state is None:
        return works
    finish = work.keep_state(works[last], state.num_bytes(p), c.batch)
    if not state.attends:
        finish = work.together(works["project"], finish)
        works = {verb: works[verb] for verb in STATE_VERBS if verb in works}
    works = works | {last: finish}
    if state.tensors and policy.state_tier == "host":
        moved = work.move_state(state.num_bytes(p), c.batch, len(state.tensors))
        works = works | ({} if c.prefill else {"load_state": moved}) | {"store_state": moved}
    return works


def _host_works(shape: ModelShape, p: int, c: StepCounts) -> dict[str, Work]:
    """Return the work of a decode step's attention on the host, with its copies. In layers with a window, each request
    reads the shared tokens in its window by itself."""
    seen, shared = c.context + 1, (c.common, c.common_reads)
    if c.window is not None:
        seen, shared = _at_most(seen + c.common_reads / c.batch, c.window), (0, 0)
    works = {
        "store_query": work.store_query(shape, p, c.batch),
        "attend_host": work.attend_decode(shape, p, c.batch, seen),
        "load_attended": work.load_attended(shape, p, c.batch),
    }
    if _any(c.common):
        works["attend_host_shared"] = work.attend_shared(shape, p, 1, *shared)
    return works


def _split_works(shape: ModelShape, p: int, c: StepCounts) -> dict[str, Work]:
    """Return the work of attention on the host to ``on_host`` tokens, while the device attends to the others."""
    return {
        "store_query": work.store_query(shape, p, c.batch),
        "attend_host": work.attend_decode(shape, p, 1, c.on_host),
        "load_attended": work.load_weighed(shape, c.batch),
        "merge_attended": work.merge_weighed(shape, c.batch),
    }


def recomputed_rows(c: StepCounts) -> Count:
    """Return the ACT rows from which a step that attends to all tokens recomputes keys and values."""
    return BLOCK_TOKENS * sum(count for part, count in c.blocks.items() if part.representation == "act")


def _attend_works(shape: ModelShape, p: int, c: StepCounts, attended: Count) -> dict[str, Work]:
    """Return the work of attention to ``attended`` columns of each request, and to shared tokens."""
    shared = work.attend_shared(shape, p, c.width, c.common, c.common_reads)
    if c.in_place is not None:
        works = {"attend": work.attend_decode(shape, p, 1, c.in_place)}
    else:
        works = {"assemble": work.assemble(shape, p, c.batch * attended + c.common)}
        own = work.attend(shape, p, c.batch, c.width, attended)
        if c.chunk:
            both = {name: getattr(own, name) + getattr(shared, name) for name in ("memory_bytes", "flops", "tokens")}
            return works | {"attend_chunk": own._replace(**both)}
        works["attend"] = own
    return works | ({"attend_shared": shared} if _any(c.common) else {})


def _selected_of(c: StepCounts) -> dict[str, Count]:
    """Return representation -> tokens of a request that a selection is expected to load, in proportion to the
    context's."""
    if c.selected is None:
        raise ValueError("this step selects no tokens")
    blocks = {r: sum(n for part, n in c.blocks.items() if part.representation == r) for r in ("act", "kv")}
    act = np.floor(c.selected * blocks["act"] / np.maximum(blocks["act"] + blocks["kv"], 1) + 0.5)
    act = act if np.ndim(act) else int(act)
    selected = {"act": act, "kv": c.selected - act}
    return {r: selected[r] for r in blocks if any(part.representation == r for part in c.blocks)}


def _gather_works(shape: ModelShape, stored: ElementBytes, c: StepCounts) -> dict[str, Work]:
    """Return the work of gathering the selected rows on the host and loading them."""
    rows = {representation: c.batch * tokens for representation, tokens in _selected_of(c).items()}
    works = {"gather": work.scatter_rows(shape, stored.kv, stored.act, rows.get("kv", 0), rows.get("act", 0))}
    widths = {"kv": (shape.kv_width, stored.kv), "act": (shape.act_width, stored.act)}
    for representation, num_rows in rows.items():
        width, element_bytes = widths[representation]
        works[f"load_{representation}"] = work.store_rows(shape, element_bytes, representation, num_rows)
        if element_bytes != stored.compute:
            works[f"dequantize_{representation}"] = work.convert(num_rows * width, stored.compute, element_bytes)
    return works


def _at_most(value, most):
    """Return the smaller value; a number stays a plain number."""
    return np.minimum(value, most) if isinstance(value, np.ndarray) else min(value, most)


def _any(count) -> bool:
    """Return whether a number, or any element of an array, is not 0; faster than np.any."""
    return bool(count.any()) if isinstance(count, np.ndarray) else bool(count)


def _load_works(shape: ModelShape, stored: ElementBytes, c: StepCounts) -> dict[str, Work]:
    """Return the work of loading and dequantizing the blocks that a step reads."""
    works = {}
    for representation, element_bytes in (("act", stored.act), ("kv", stored.kv)):
        every = [part for part in c.blocks if part.representation == representation]
        moved = [part for part in every if part.tier != "device"]
        on_disk = [part for part in every if part.tier == "disk"]
        if moved:
            blocks, copies = (sum(counts[part] for part in moved) for counts in (c.blocks, c.copies))
            works[f"load_{representation}"] = work.load_blocks(shape, element_bytes, representation, blocks, copies)
        if on_disk:
            blocks = sum(c.blocks[part] for part in on_disk)
            works[f"read_{representation}"] = work.load_blocks(shape, element_bytes, representation, blocks, 1)
        if every and element_bytes != stored.compute:
            width = shape.kv_width if representation == "kv" else shape.act_width
            elements = sum(c.blocks[part] for part in every) * BLOCK_TOKENS * width
            works[f"dequantize_{representation}"] = work.convert(elements, stored.compute, element_bytes)
    return works


def _store_works(shape: ModelShape, policy: Policy, stored: ElementBytes, c: StepCounts) -> dict[str, Work]:
    """Return the work of storing new rows. Rows are quantized and go to device blocks, or to a buffer of the host and
    from there to host blocks or the disk. In a decode step with attention on the host, they come with the query, and
    attention writes them to host blocks."""
    works = {}

    def rows(representation: str, *tiers: str):
        return sum(n for part, n in c.stored.items() if part.representation == representation and part.tier in tiers)

    if policy.attention == "host" and not (c.prefill or c.chunk):
        written = rows("kv", "disk")
        return {"write_kv": work.store_rows(shape, stored.kv, "kv", written)} if _any(written) else {}
    quantized = 0
    widths = (("kv", stored.kv, shape.kv_width), ("act", stored.act, shape.act_width))
    for representation, element_bytes, width in widths:
        if _any(sent := rows(representation, "host", "disk")):
            works[f"store_{representation}"] = work.store_rows(shape, element_bytes, representation, sent)
        if _any(written := rows(representation, "disk")):
            works[f"write_{representation}"] = work.store_rows(shape, element_bytes, representation, written)
        if element_bytes != stored.compute:
            quantized = quantized + rows(representation, "device", "host", "disk") * width
    if _any(quantized):
        works["quantize"] = work.convert(quantized, stored.compute, min(stored.kv, stored.act))
    for tier, verb in (("host", "scatter"), ("device", "scatter_device")):
        kv_rows, act_rows = rows("kv", tier), rows("act", tier)
        if _any(kv_rows) or _any(act_rows):
            works[verb] = work.scatter_rows(shape, stored.kv, stored.act, kv_rows, act_rows)
    return works
