"""Memory plans: the bytes of each part in each tier, from ``BufferSizes``. The executor allocates what is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

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
from flexhybrid.core.task import Count
from flexhybrid.core.units import gib
from flexhybrid.core.wave import stored_layers
from flexhybrid.core.work import MIN_KV_GEN_ROWS, PREFILL_QUERIES

NUM_SLOTS = 2  #: double buffers

#: Elements that the quantizer processes at a time (at least one row), by device. Fewer would suit a CPU's caches, but
#: each pass ends in a barrier: 2**18 took up to twice as long on a busy machine. The number for CUDA is not measured.
PACKING_ELEMENTS = {"cpu": 2**20, "cuda": 2**23}
PACKING_BYTES = 6  #: workspace bytes of the quantizer for each of these elements

#: Most threads of attention on the host, by device. If the CPU is the device, its other cores compute.
HOST_THREADS = {"cpu": 1, "cuda": 16}
#: 16-bit keys, and values, that a thread converts to float32 at a time: 4 MB, which a core's cache holds.
WIDENED_ELEMENTS = 1 << 19

#: Most partial results of CUDA's attention in place. A context that several programs share has one for each, a weighted
#: value and two sums in float32, until they are added (``partial_elements``).
PARTIAL_ROWS = 4096

#: Most CUDA graphs of decode steps. A graph has a layer's verbs or one of them; a step's graph counts one per layer.
MOST_GRAPHS = 256
#: Bytes that the driver keeps for each graph. An H200's driver kept 123 KiB for one verb's graph; this allows for four
#: verbs, which were not measured.
GRAPH_BYTES = 1 << 19
GRAPH_POOL_BYTES = 22 << 20  #: bytes of allocator segments that the graphs' memory pool may leave half empty

#: Rows of decode steps, over all mini-batches, that graphs keep at fixed addresses if a prefix is recomputed. A layer
#: of OPT-1.3B computes about this many rows during its launches, 0.1 ms (estimated); more rows hide launches anyway.
GRAPH_ROWS = 512

#: Device bytes besides all named parts: masks, places of stored rows, and workspaces of libraries (cuBLAS: up to 64 MiB
#: for each stream with products, 32 MiB on Hopper, and the same for cublasLt).
SLACK_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}

#: For a CUDA device, if a plan counts them (``Problem.counts_allocator``): bytes of the CUDA context with the
#: libraries' kernels, as others report, and the share that the allocator holds in addition to tensors.
CONTEXT_BYTES, ALLOCATOR_SHARE = 1 << 29, 1 / 28


def cuda_reserve(budget: int) -> int:
    """Return the bytes that a plan of ``budget`` bytes on a CUDA device counts in addition to its tensors."""
    return CONTEXT_BYTES + int((budget - CONTEXT_BYTES) * ALLOCATOR_SHARE / (1 + ALLOCATOR_SHARE))


def partial_elements(head_dim: int) -> int:
    """Return the float32 elements of one of ``PARTIAL_ROWS``: values and two sums, rounded up to 16 bytes."""
    return -(-(head_dim + 2) // 4) * 4


MemoryPlan = dict[str, dict[str, int]]  #: tier -> part -> bytes


def memory_plan(problem: Problem, policy: Policy, sizes: BufferSizes) -> MemoryPlan:
    """Return the bytes of each part in each tier, such as {"device": {"weight slots": …}, "host": {…}, "disk": {…}}."""
    tiers = memory_parts(problem, policy, sizes, _placed_bytes(problem, policy))
    return {tier: {part: int(size) for part, size in parts.items() if size} for tier, parts in tiers.items()}


def kept_shares(problem: Problem, policy: Policy) -> dict[str, float]:
    """Return each tier's share of the layers' bytes. It differs from the policy's share, because tensors or rows are
    placed as a whole."""
    placed = _placed_bytes(problem, policy)
    sizes = {"device": placed.resident, "host": placed.on_host, "disk": placed.on_disk}
    return {tier: float(size) / sum(sizes.values()) for tier, size in sizes.items()}


def _placed_bytes(problem: Problem, policy: Policy) -> LayerBytes:
    placed = stored_layers(problem, policy)
    resident, on_disk = np.array([(kind.streamed_from, kind.disk_bytes) for kind in placed]).T
    return layer_bytes(problem, policy, resident, on_disk)


class LayerBytes(NamedTuple):
    """Bytes of a model's layers in each tier: numbers, or arrays [candidates]."""

    resident: Count  #: device bytes of all layers
    on_host: Count  #: host bytes of all layers
    on_disk: Count  #: disk bytes of all layers
    slot: Count  #: streamed bytes of the layer that streams the most
    staging: Count  #: disk bytes of the layer with the most on the disk
    cut: Count  #: whether a layer is partly resident
    first_resident: Count  #: device bytes of a layer of the first kind


def layer_bytes(problem: Problem, policy: Policy, resident, on_disk) -> LayerBytes:
    """Return the bytes of the layers' weights. ``resident``, ``on_disk``: bytes of a layer of each kind on the device
    and on the disk, [kinds, ...]."""
    stored, shape = problem.stored(policy.bits), problem.shape
    layouts = kind_layouts(shape, stored.weights, stored.compute)
    total, count = (
        np.array(values).reshape((-1,) + (1,) * (np.ndim(resident) - 1))
        for values in ([layout.total_bytes for layout in layouts], shape.weights_counts)
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
    """Return ``memory_plan`` before rounding. The values of ``sizes`` and ``weights`` may be arrays."""
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
    # Reserved for all bits, so that a search's terms add up. Triton's kernels do not need it, but only a run knows
    # whether they work.
    packing = PACKING_BYTES * min(PACKING_ELEMENTS[device], shape.ffn * shape.hidden)
    on_host = policy.host_attends
    out_row = 4 * (shape.query_width + shape.num_heads) if policy.splits_attention else shape.query_width * p
    widened = np.minimum(WIDENED_ELEMENTS, (sizes.longest + BLOCK_TOKENS) * shape.kv_width // 2)
    running = problem
    if problem.counts_allocator and problem.attention is None:  # the run may attend in place or not: plan for both
        running = replace(problem, attention=AttentionPaths("", "", "", in_place=True))
    partial = device == "cuda" and attends_in_place(running, policy)
    # Scores with a softcap are stored twice, for this many queries of each request at a time.
    scored = np.minimum(sizes.step_rows, PREFILL_QUERIES * sizes.batch) * shape.softcaps
    pools, staged = _pool_parts(problem, policy, sizes, row)
    at_experts = 0  # rows of decode steps that are multiplied with experts together
    if policy.experts.batch:
        at_experts = sizes.hidden_rows if "tok" in policy.cache_entries else sizes.places
    rows = larger(sizes.step_rows, at_experts)
    workspace = workspace_bytes(shape, p, rows, sizes.batch, weights.cut)
    states = _state_parts(shape, policy, sizes, p, workspace)
    chosen = _selection_parts(problem, policy, sizes, weights.first_resident, row)
    on_device = {
        "resident weights": weights.resident,
        "weight slots": NUM_SLOTS * weights.slot,
        "plain weights": shape.layer_bytes(p) if shape.unpacks(policy.bits.weights) else 0,
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
        "rows at experts": at_experts * routed_bytes(shape, p),
        "lent keys and values": len(shape.lending) * sizes.hidden_rows * native_kv,  # of new tokens
        "layers' arguments": (shape.modules.call_elements if shape.modules else 0) * sizes.hidden_rows * p,
        "token ids": 8 * sizes.cached_tokens,
        "positions": 16 * sizes.hidden_rows
        + rotation * (sizes.longest + sizes.hidden_rows + act * sizes.cached_tokens),
        "packing": packing,
        "attended rows": NUM_SLOTS * sizes.decode_batch * out_row if on_host else 0,
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
        "query strips": NUM_SLOTS * sizes.decode_batch * ((shape.query_width + shape.kv_width) * p + out_row) * on_host,
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
    """Return the rows that CUDA graphs keep at fixed addresses: (for the largest mini-batch, for all). If a prefix is
    recomputed, each mini-batch has a part of GRAPH_ROWS in proportion to its requests. Steps with more rows have no
    graph."""
    most = GRAPH_ROWS if "tok" in policy.cache_entries else 0
    return larger(sizes.decode_batch, most), larger(sizes.places, most)


def _graph_bytes(problem: Problem, policy: Policy, p: int, sizes: BufferSizes):
    """Return the device bytes of CUDA graphs. These are the driver's bytes, the kernels' workspaces, and data at fixed
    addresses: hidden states, keys, values, queries, attention outputs, rotations, places and tables."""
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
    """Return the bytes of recurrent states by tier: all requests' states in all layers, the buffers of a mini-batch's
    states in a layer, and the temporaries of a layer that exceed ``workspace``."""
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
    """Return (bytes of the pools by tier, bytes of new rows on the way to pools: "device" and "host", for all others).
    ``row``: representation -> bytes of a token."""
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
    """Return the bytes that a selection needs on device and host in addition to the cache; 0 without a selection."""
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
    counted = speculative and limits_cache(selection) and selection.victim != "fifo"
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
    """Return the number of token indices that a speculative selection stores. Heads choose separately for native keys
    and values, otherwise together."""
    heads = shape.num_kv_heads if policy.bits.kv == "native" else 1
    return rows.get("kv", 0) * heads + rows.get("act", 0)


def partial_query_bytes(problem: Problem, policy: Policy, columns: int, column_sets, resident):
    """Return the bytes of a layer with which a selection predicts queries; numbers or arrays. These are the chosen
    columns, their rows of query weights and biases, and a rotary model's skewing matrices. With ``whole_queries``, all
    query weights are needed, unless they are ``resident`` in the compute dtype."""
    shape, p = problem.shape, problem.bytes_per_element
    chosen = 8 * column_sets * shape.num_kv_heads * columns
    row = (shape.hidden + 1) * p
    if not whole_queries(shape, policy.selection):
        return chosen + column_sets * shape.num_heads * columns * row
    query_end = stored_layers(problem, policy)[0].layout.qkv_end
    all_resident = (resident >= query_end) & (not shape.unpacks(policy.bits.weights))
    skew = shape.num_kv_heads * shape.head_dim**2 * p if shape.rotary else 0
    return chosen + skew + (1 - all_resident) * shape.query_width * row


def workspace_bytes(shape: ModelShape, p: int, step_rows, batch, cut):
    """Return the bytes of a step's temporaries, for ``step_rows`` padded new tokens and ``batch`` requests; numbers or
    arrays.

    A prefill has queries, keys, values, attention outputs, feed-forward rows and three rows of hidden size. ``cut`` (0
    or 1): a product is computed in two parts, resident and streamed rows of its matrix. For modules, the bytes are
    measured. Sampling has float32 logits, their softmax and its float64 sum.
    """
    sampling = batch * shape.vocab * (p + 24)
    for work in shape.modules.work if shape.modules else ():
        if work.element == p:
            return np.maximum(work.request + work.token * step_rows, sampling)
    widths = shape.query_width * 2 + shape.kv_width + shape.ffn * (2 if shape.gated_mlp else 1) + 3 * shape.passed_width
    widths = widths + cut * max(shape.ffn, shape.query_width + shape.kv_width)
    return np.maximum(step_rows * widths * p, sampling)


def routed_bytes(shape: ModelShape, p: int) -> float:
    """Return the bytes of a row that waits for experts. These are its residual, the experts' input, also next to other
    rows, their output and a shared expert's; two float32 scores of each expert, and the chosen ones with weights."""
    experts = shape.modules.num_experts if shape.modules else 0
    taken = experts * shape.modules.experts_share if shape.modules else 0
    return 5 * shape.passed_width * p + 8 * experts + 2 * (8 + p) * taken


def total_bytes(plan: MemoryPlan) -> dict[str, int]:
    """Return tier -> bytes of all its parts."""
    return {tier: sum(parts.values()) for tier, parts in plan.items()}


def check_budget(plan: MemoryPlan, budgets: Budgets, what: str) -> None:
    """Raise InputError if a tier exceeds its budget. ``what``: the subject of the message."""
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
    """Return whether every tier is within its budget."""
    return bool(budgets.hold(total_bytes(plan)))
