"""One accounting of memory: what the rows and blocks of ``BufferSizes`` make in bytes per tier and part. What is
checked before work starts is what is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import Pool, stored_copies
from flexhybrid.core.context.selection import (
    layers_by_window,
    limits_cache,
    num_choosing,
    num_keeping,
    num_limited,
    partial_columns,
    whole_queries,
)
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.layout import kind_layouts
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem, attends_in_place, launches_steps, without_graphs
from flexhybrid.core.schedule.buffer_sizes import BufferSizes, larger
from flexhybrid.core.units import gib
from flexhybrid.core.wave import stored_layers
from flexhybrid.core.work import MIN_KV_GEN_ROWS, PREFILL_QUERIES

NUM_SLOTS = 2  #: double buffers

#: Elements that the quantiser has in work at a time (or one row, where longer), and bytes of workspace for each. Fewer
#: would fit a CPU's caches better, but each pass ends in a barrier: on a busy machine 2**18 took up to twice as long.
#: The device's figure is not measured.
PACKING_ELEMENTS, PACKING_BYTES = {"cpu": 2**20, "cuda": 2**23}, 6

#: With attention on the host: the most threads that share its requests (on a CPU that is the device, the other cores
#: are at work on that), and elements of 16-bit keys that each has in float32 at a time, with as many of values: 4 MB,
#: which a shared cache holds.
HOST_THREADS, WIDENED_ELEMENTS = {"cpu": 1, "cuda": 16}, 1 << 19

#: Attention in place on a CUDA device: where several programs share a context, so many rows at most, each of a query's
#: weighted values and two sums in float32, are held until they are added up (``partial_elements``).
PARTIAL_ROWS = 4096

#: CUDA graphs of decode steps: those that are held at a time, each of a layer's verbs or of one of them, and bytes that
#: the driver keeps of each. An H200's driver kept 123 KiB of a verb's graph, so of four at most this; graphs of several
#: verbs were never measured; that of a step counts as one for each layer. Segments of the allocator that their memory
#: pool may leave half empty.
MOST_GRAPHS, GRAPH_BYTES, GRAPH_POOL_BYTES = 256, 1 << 19, 22 << 20

#: Rows of decode steps that graphs hold at fixed addresses where a prefix is recomputed: of all mini-batches together.
#: By an estimate a layer of OPT-1.3B computes so many in the time of its launches, 0.1 ms. More rows hide these, and
#: contexts make more of their memory.
GRAPH_ROWS = 512

#: Device bytes set aside beyond all named parts: masks, places of stored rows, the libraries' own workspaces (cuBLAS
#: takes up to 64 MiB for each stream that multiplies: 32 MiB on Hopper, and as many for cublasLt).
SLACK_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}

#: Of a CUDA device, where a plan counts them (``Problem.counts_allocator``): the context with the kernels that
#: libraries load, from what others report; and what the allocator holds beyond tensors, as a share of all else.
CONTEXT_BYTES, ALLOCATOR_SHARE = 1 << 29, 1 / 28


def cuda_reserve(budget: int) -> int:
    """Return what a plan of this many bytes of a CUDA device counts beside its tensors."""
    return CONTEXT_BYTES + int((budget - CONTEXT_BYTES) * ALLOCATOR_SHARE / (1 + ALLOCATOR_SHARE))


def partial_elements(head_dim: int) -> int:
    """Return the elements of one of ``PARTIAL_ROWS``: two sums behind the values, up to a multiple of 16 bytes."""
    return -(-(head_dim + 2) // 4) * 4


MemoryPlan = dict[str, dict[str, int]]  #: tier -> part -> bytes


def memory_plan(problem: Problem, policy: Policy, sizes: BufferSizes) -> MemoryPlan:
    """Bytes per tier and part: {"device": {"weight slots": …}, "host": {…}, "disk": {…}}."""
    tiers = memory_parts(problem, policy, sizes, _placed_bytes(problem, policy))
    return {tier: {part: int(size) for part, size in parts.items() if size} for tier, parts in tiers.items()}


def kept_shares(problem: Problem, policy: Policy) -> dict[str, float]:
    """Return the share of the layers' bytes that each tier holds. A policy asks for shares; where layers are modules,
    whole tensors are placed."""
    placed = _placed_bytes(problem, policy)
    sizes = {"device": placed.resident, "host": placed.on_host, "disk": placed.on_disk}
    return {tier: float(size) / sum(sizes.values()) for tier, size in sizes.items()}


def _placed_bytes(problem: Problem, policy: Policy) -> LayerBytes:
    placed = stored_layers(problem, policy)
    resident, on_disk = np.array([(kind.streamed_from, kind.disk_bytes) for kind in placed]).T
    return layer_bytes(problem, policy, resident, on_disk)


class LayerBytes(NamedTuple):
    """Bytes of a model's layers, by where they lie: numbers, or arrays over candidates."""

    resident: Any  #: of all layers, on the device
    on_host: Any  #: of all layers
    on_disk: Any  #: of all layers
    slot: Any  #: of the layer that streams the most of them
    staging: Any  #: of the layer that has the most of them on the disk
    cut: Any  #: whether some layer is partly resident
    first_resident: Any  #: of a layer of the first kind, on the device


def layer_bytes(problem: Problem, policy: Policy, resident, on_disk) -> LayerBytes:
    """Return the bytes of the layers' weights; ``resident`` and ``on_disk`` [kinds, ...] of each kind of
    ``ModelShape.weights_counts``."""
    stored, shape = problem.stored(policy.bits), problem.shape
    layouts = kind_layouts(shape, stored.weights, stored.compute)
    total, count = (
        np.array(of).reshape((-1,) + (1,) * (np.ndim(resident) - 1))
        for of in ([layout.total_bytes for layout in layouts], shape.weights_counts)
    )
    return LayerBytes(
        resident=(count * resident).sum(axis=0),
        on_host=(count * (total - resident - on_disk)).sum(axis=0),
        on_disk=(count * on_disk).sum(axis=0),
        slot=(total - resident).max(axis=0),
        staging=on_disk.max(axis=0),
        cut=((resident > 0) & (resident < total)).any(axis=0),
        first_resident=resident[0],
    )


def memory_parts(problem: Problem, policy: Policy, sizes: BufferSizes, weights: LayerBytes) -> dict[str, dict]:
    """``memory_plan`` before rounding; ``sizes`` and the bytes of the layers' ``weights`` may be arrays."""
    shape, p, device = problem.shape, problem.bytes_per_element, problem.device
    layers, stored = shape.num_layers, problem.stored(policy.bits)
    row = {"kv": shape.kv_token_bytes(stored.kv), "act": shape.act_token_bytes(stored.act)}
    native_kv, native_act = shape.kv_token_bytes(p), shape.act_token_bytes(p)
    recomputed = sizes.act_blocks * BLOCK_TOKENS
    generated = larger(recomputed, MIN_KV_GEN_ROWS) * (recomputed > 0)
    hidden = shape.passed_width * p
    plain_kv = sizes.plain_kv_blocks * BLOCK_TOKENS * native_kv
    turned = shape.rotary or shape.modules
    rotation = 2 * shape.head_dim * p if turned else 0  # a cosine and a sine for each element of a head
    act = any("act@" in entry for entry in sizes.staged_rows)
    # Set aside whatever the bits, so that a program over bits can add up; a small model's pieces are small. Triton's
    # kernels need none of it, but whether they run on a GPU is known there alone.
    packing = PACKING_BYTES * min(PACKING_ELEMENTS[device], shape.ffn * shape.hidden)
    on_host = policy.attention == "host"
    widened = np.minimum(WIDENED_ELEMENTS, (sizes.longest + BLOCK_TOKENS) * shape.kv_width // 2)
    running = problem
    if problem.counts_allocator and problem.attention is None:  # a run there may attend in place: room for either
        running = replace(problem, attention=AttentionPaths("", "", "", in_place=True))
    partial = device == "cuda" and attends_in_place(running, policy)
    # Scores that are capped are made whole, and again as weights: of so many queries of each request at a time.
    scored = np.minimum(sizes.step_rows, PREFILL_QUERIES * sizes.batch) * shape.softcaps
    pools, staged = _pool_parts(problem, policy, sizes, row)
    workspace = workspace_bytes(shape, p, sizes.step_rows, sizes.batch, weights.cut)
    states = _state_parts(shape, policy, sizes, p, workspace)
    chosen = _selection_parts(problem, policy, sizes, weights.first_resident, row)
    on_device = {
        "resident weights": weights.resident,
        "weight slots": NUM_SLOTS * weights.slot,
        "plain weights": shape.layer_bytes(p) if policy.bits.weights != "native" else 0,
        "embedding and head": shape.embedding_bytes(p),
        "ACT buffers": NUM_SLOTS * sizes.act_buffer_blocks * BLOCK_TOKENS * row["act"],
        "KV buffers": NUM_SLOTS * sizes.kv_buffer_blocks * BLOCK_TOKENS * row["kv"],
        "plain ACT": recomputed * native_act if policy.bits.act != "native" else 0,
        "plain KV": plain_kv if policy.bits.kv != "native" else 0,
        "recomputed keys and values": generated * native_kv,
        "attention buffer": sizes.attention_tokens * native_kv,
        "attention scores": 2 * p * shape.num_heads * scored * sizes.longest,
        "attention sums": 4 * PARTIAL_ROWS * partial_elements(shape.head_dim) if partial else 0,
        "staging": NUM_SLOTS * (staged["device"] + staged["host"]),
        "hidden states": (sizes.hidden_rows if policy.hidden == "device" else NUM_SLOTS * sizes.step_rows) * hidden,
        "lent keys and values": len(shape.lending) * sizes.hidden_rows * native_kv,  # of the tokens that are computed
        "layers' arguments": (shape.modules.call_elements if shape.modules else 0) * sizes.hidden_rows * p,
        "token ids": 8 * sizes.cached_tokens,
        "positions": 16 * sizes.hidden_rows
        + rotation * (sizes.longest + sizes.hidden_rows + act * sizes.cached_tokens),
        "packing": packing,
        "attended rows": NUM_SLOTS * sizes.decode_batch * shape.query_width * p if on_host else 0,
        "workspace": workspace
        + (generated * (shape.hidden + shape.query_width + 2 * shape.kv_width) * p if shape.modules else 0),
        "CUDA graphs": _graph_bytes(running, policy, p, sizes) if without_graphs(running, policy) is None else 0,
        "libraries": SLACK_BYTES[device],
    }
    in_host = {
        "weights": weights.on_host,
        "copies from the device": NUM_SLOTS * staged["host"],
        "weight staging": NUM_SLOTS * weights.staging,
        "ACT staging": NUM_SLOTS * sizes.act_staging_blocks * BLOCK_TOKENS * row["act"],
        "KV staging": NUM_SLOTS * sizes.kv_staging_blocks * BLOCK_TOKENS * row["kv"],
        "hidden states": sizes.hidden_rows * hidden if policy.hidden == "host" and layers > 1 else 0,
        "token log": 8 * sizes.log_cells,
        "log probabilities": sizes.noted_bytes,
        "query strips": NUM_SLOTS * sizes.decode_batch * (2 * shape.query_width + shape.kv_width) * p if on_host else 0,
        "workspace": HOST_THREADS[device] * 8 * widened if on_host and p < 4 else 0,
    }
    device_parts = pools["device"] | on_device | chosen["device"] | states["device"]
    if problem.counts_allocator:
        held = ALLOCATOR_SHARE * sum(device_parts.values(), start=0.0)
        device_parts |= {"CUDA context": CONTEXT_BYTES, "allocator": held}
    return {
        "device": device_parts,
        "host": pools["host"] | in_host | chosen["host"] | states["host"],
        "disk": pools["disk"] | {"weights": weights.on_disk},
    }


def graph_rows(policy: Policy, sizes: BufferSizes):
    """Return the rows that CUDA graphs hold at fixed addresses: of the largest mini-batch, and of all together. Where a
    prefix is recomputed, each mini-batch has its requests' share; its steps of more rows have no graphs."""
    most = GRAPH_ROWS if "tok" in policy.cache_entries else 0
    return larger(sizes.decode_batch, most), larger(sizes.places, most)


def _graph_bytes(problem: Problem, policy: Policy, p: int, sizes: BufferSizes):
    """Device bytes of CUDA graphs: what the driver keeps, what their kernels have in work, and what they read and write
    at fixed addresses (hidden states, keys, values and queries, what attention gives, rotations, places, tables)."""
    shape, sampling = problem.shape, launches_steps(problem, policy) * sizes.decode_batch
    rows, of_all = graph_rows(policy, sizes)
    in_work = workspace_bytes(shape, p, rows, sampling, 1)
    row = NUM_SLOTS * (shape.kv_width + shape.query_width) + shape.query_width
    rotation = 2 * shape.head_dim if shape.rotary else 0
    of_places = shape.passed_width + len(shape.windows or (None,)) * rotation
    copies = 2 * len(sizes.staged_rows)  # of new rows, at most
    index = 8 * (6 * (sizes.cached_tokens // BLOCK_TOKENS) + (26 + 10 * copies) * sizes.places + 4 * of_all)
    fixed = p * (row * rows + of_places * of_all) + index * len(shape.windows or (None,))
    return MOST_GRAPHS * GRAPH_BYTES + GRAPH_POOL_BYTES + in_work + fixed


def _state_parts(shape: ModelShape, policy: Policy, sizes: BufferSizes, p: int, workspace) -> dict[str, dict]:
    """States of recurrent layers: of each request in all layers; on their way between host and device, those of a
    mini-batch in one layer; and what a layer has in work beyond the ``workspace`` that there is in any case."""
    states = [state for state in map(shape.state_of, shape.recurrent) if state]
    each = [state.num_bytes(p) for state in states]
    pool, of_batch = {"state pool": sizes.places * sum(each)}, sizes.batch * max(each, default=0)
    most = 0
    for state in dict.fromkeys(states):
        most = np.maximum(most, state.work_bytes(p, sizes.batch, sizes.step_rows))
    in_work = {"state workspace": np.maximum(most - workspace, 0)}
    if policy.state_tier == "device":
        return {"device": pool | in_work, "host": {}}
    return {"device": {"state buffers": NUM_SLOTS * of_batch} | in_work, "host": pool}


def _pool_parts(
    problem: Problem, policy: Policy, sizes: BufferSizes, row: dict[str, float]
) -> tuple[dict[str, dict], dict[str, float]]:
    """The pools of each tier, and the bytes of new rows on their way to pools of the device and to others."""
    tiers: dict[str, dict] = {"device": {}, "host": {}, "disk": {}}
    staged: dict[str, float] = {"device": 0, "host": 0}
    of_windows = layers_by_window(problem.shape, policy.selection)
    whole = num_keeping(policy.selection, problem.shape.num_layers) if sizes.whole_blocks else 0
    for entry in sizes.staged_rows:
        in_all = whole * sizes.whole_blocks.get(entry, 0)
        for window, layers in of_windows.items():
            in_all = in_all + (layers - whole) * sizes.pool_blocks[Pool(entry, window).name]
        for part in stored_copies(entry):
            size = in_all * BLOCK_TOKENS * row[part.representation]
            name = f"{part.representation} pool"
            tiers[part.tier][name] = tiers[part.tier].get(name, 0) + size
            strip = "device" if part.tier == "device" else "host"
            staged[strip] = staged[strip] + sizes.staged_rows.get(entry, 0) * row[part.representation]
    return tiers, staged


def _selection_parts(
    problem: Problem, policy: Policy, sizes: BufferSizes, resident, row: dict[str, float]
) -> dict[str, dict]:
    """What a selection keeps on device and host beside the cache; zeros without one."""
    shape, p = problem.shape, problem.bytes_per_element
    selection, layers, groups = policy.selection, shape.num_layers, shape.num_kv_heads
    speculative, ranked = selection.method == "speculative", selection.method == "heavy_hitter"
    choosing, dropping = num_choosing(selection, layers), num_limited(selection, layers)
    columns = partial_columns(shape, selection) if speculative else 0
    partial_row = groups * columns * p  # of a token
    partial_keys = choosing * sizes.partial_rows * partial_row
    partial_buffer = sizes.context_tokens * partial_row if choosing else 0
    query_weights = 0
    if speculative:
        query_weights = choosing * partial_query_bytes(problem, policy, columns, sizes.column_sets, resident)
    limited = speculative and limits_cache(selection)
    counted = limited and selection.victim != "fifo"
    indices = 4 * index_cells(shape, policy, sizes.index_rows) if choosing else 0
    gathered = sum(rows * row[representation] for representation, rows in sizes.selected_rows.items())
    return {
        "device": {
            "partial query weights": query_weights,
            "partial keys": partial_keys if selection.partial_keys == "device" else 0,
            "partial key buffers": NUM_SLOTS * partial_buffer if selection.partial_keys == "host" else 0,
            "indices": indices,
            "scores": 8 * dropping * groups * sizes.kept_tokens if ranked else 0,  # and ages
            "uses": 8 * layers * groups * sizes.partial_rows if counted else 0,  # and ages
        },
        "host": {
            "places": NUM_SLOTS * 8 * sizes.decode_batch * groups if dropping else 0,
            "gathered rows": NUM_SLOTS * gathered if choosing else 0,
            "indices": indices,
            "partial keys": partial_keys if selection.partial_keys == "host" else 0,
        },
    }


def index_cells(shape: ModelShape, policy: Policy, rows: dict):
    """Chosen tokens that are written down: of native keys and values, each head has its own choice."""
    heads = shape.num_kv_heads if policy.bits.kv == "native" else 1
    return rows.get("kv", 0) * heads + rows.get("act", 0)


def partial_query_bytes(problem: Problem, policy: Policy, columns: int, column_sets, resident):
    """Bytes of a layer with which a selection guesses queries: which columns each set chose, and their rows of the
    query weights and biases; of a rotary model the skewing matrices. Where whole queries are guessed
    (``selection.whole_queries``), all query weights unless they are ``resident`` in the compute dtype. Numbers or
    arrays.
    """
    shape, p = problem.shape, problem.bytes_per_element
    chosen = 8 * column_sets * shape.num_kv_heads * columns
    row = (shape.hidden + 1) * p
    if not whole_queries(shape, policy.selection):
        return chosen + column_sets * shape.num_heads * columns * row
    query_end = stored_layers(problem, policy)[0].layout.qkv_end
    all_resident = (resident >= query_end) & (policy.bits.weights == "native")
    skew = shape.num_kv_heads * shape.head_dim**2 * p if shape.rotary else 0
    return chosen + skew + (1 - all_resident) * shape.query_width * row


def workspace_bytes(shape: ModelShape, p: int, step_rows, batch, cut):
    """Temporaries of one step of ``step_rows`` padded new tokens and ``batch`` requests; arguments may be arrays.

    Prefill lives on the queries, keys and values, the attended rows, the feed-forward rows and three hidden-sized rows;
    where a matrix is ``cut`` between resident and streamed rows (0 or 1) one product is there twice. What layers that
    are modules have in work is measured. Sampling lives on the logits in float32, their softmax and its sum in float64.
    """
    sampling = batch * shape.vocab * (p + 24)
    for work in shape.modules.work if shape.modules else ():
        if work.element == p:
            return np.maximum(work.request + work.token * step_rows, sampling)
    widths = shape.query_width * 2 + shape.kv_width + shape.ffn * (2 if shape.gated_mlp else 1) + 3 * shape.passed_width
    widths = widths + cut * max(shape.ffn, shape.query_width + shape.kv_width)
    return np.maximum(step_rows * widths * p, sampling)


def total_bytes(plan: MemoryPlan) -> dict[str, int]:
    return {tier: sum(parts.values()) for tier, parts in plan.items()}


def check_budget(plan: MemoryPlan, budgets: Budgets, what: str = "this run") -> None:
    """Raise InputError when a tier is over its budget: the tier, the part that no longer fits, bytes asked and left."""
    for tier, parts in plan.items():
        budget = budgets.of(tier)
        if budget is None or sum(parts.values()) <= budget:
            continue
        left = budget
        for part, size in sorted(parts.items(), key=lambda item: item[1]):
            if size > left:
                raise InputError(
                    f"{tier} memory: {what} needs at least {gib(sum(parts.values()))}, the budget is {gib(budget)}; "
                    f"the part for {part} is {gib(size)} where {gib(left)} is left"
                )
            left -= size


def fits(plan: MemoryPlan, budgets: Budgets) -> bool:
    """Whether no tier is over its budget."""
    limits = ((budgets.of(tier), size) for tier, size in total_bytes(plan).items())
    return all(limit is None or size <= limit for limit, size in limits)
