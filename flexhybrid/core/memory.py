"""One accounting of memory: how many rows each buffer needs, and what that makes in bytes per tier and part.

The executor allocates from ``BufferSizes``; the budget check and the search add up the same sizes, so that what is
checked before work starts is what is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from flexhybrid.core.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.errors import InputError
from flexhybrid.core.layout import layer_layout
from flexhybrid.core.plan import Wave
from flexhybrid.core.policy import Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.work import MIN_KV_GEN_ROWS

NUM_SLOTS = 2  #: double buffers

#: Device bytes set aside beyond all named parts: index tensors, masks, the libraries' own workspaces.
SLACK_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class BufferSizes:
    """Rows and blocks that a wave needs; maxima over its mini-batches at their final lengths."""

    pool_blocks: dict[str, int]  #: kind -> blocks
    staged_rows: dict[str, int]  #: kind -> new tokens of one mini-batch in one step
    act_buffer_blocks: int = 0  #: of one slot
    kv_buffer_blocks: int = 0  #: of one slot
    attention_tokens: int = 0  #: B·T
    hidden_rows: int = 0  #: of all mini-batches together
    step_rows: int = 0  #: padded new tokens of the largest mini-batch
    batch: int = 0  #: requests of the largest mini-batch

    def merge(self, other: BufferSizes) -> BufferSizes:
        """Enough for either."""

        def larger(a, b):
            if isinstance(a, dict):
                return {key: max(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}
            return max(a, b)

        return BufferSizes(**{f.name: larger(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


def buffer_sizes(wave: Wave) -> BufferSizes:
    """Sizes for a wave, from the lengths its requests can reach."""
    prompts, cached = wave.workload.prompt_tokens, wave.workload.cached_tokens
    kinds = wave.kinds.kinds
    prompt_split = wave.kinds.tokens(prompts)  # [requests, kind]
    final_blocks = wave.kinds.blocks(ceil_blocks(cached))
    sizes = BufferSizes(pool_blocks=wave.pool_blocks, staged_rows={})
    hidden_rows = 0
    for group in wave.mini_batches:
        batch, blocks = len(group), final_blocks[group].max(axis=0)
        widest = dict(zip(kinds, map(int, blocks), strict=True))
        act_columns = widest.get("act@device", 0) + widest.get("act@host", 0)
        step_rows = batch * int(prompts[group].max())
        hidden_rows += step_rows
        one = BufferSizes(
            pool_blocks={},
            staged_rows={
                kind: max(batch, int(rows)) for kind, rows in zip(kinds, prompt_split[group].sum(axis=0), strict=True)
            },
            act_buffer_blocks=batch * act_columns,
            kv_buffer_blocks=batch * widest.get("kv@host", 0),
            attention_tokens=batch * (int(blocks.sum()) * BLOCK_TOKENS + 1),
            step_rows=step_rows,
            batch=batch,
        )
        sizes = sizes.merge(one)
    return sizes.merge(BufferSizes({}, {}, hidden_rows=hidden_rows))


def memory_plan(
    shape: ModelShape, policy: Policy, bytes_per_element: int, sizes: BufferSizes, device: str = "cuda"
) -> dict[str, dict[str, int]]:
    """Bytes per tier and part: {"device": {"weight slots": …}, "host": {…}}."""
    p, layers = bytes_per_element, shape.num_layers
    kv_row, act_row = shape.kv_token_bytes(p), shape.act_token_bytes(p)
    row = {"kv": kv_row, "act": act_row}
    layout = layer_layout(shape, p)
    resident = layout.resident_prefix(policy.weights.device)
    streamed = layout.total_bytes - resident
    tiers: dict[str, dict[str, int]] = {"device": {}, "host": {}}
    for kind, blocks in sizes.pool_blocks.items():
        representation, tier = kind.split("@")
        tiers[tier][f"{representation} pool"] = layers * blocks * BLOCK_TOKENS * row[representation]
    staged = {kind: rows * row[kind.split("@")[0]] for kind, rows in sizes.staged_rows.items()}
    generated_rows = max(sizes.act_buffer_blocks * BLOCK_TOKENS, MIN_KV_GEN_ROWS) if sizes.act_buffer_blocks else 0
    tiers["device"] |= {
        "resident weights": layers * resident,
        "weight slots": NUM_SLOTS * streamed if streamed else 0,
        "embedding and head": shape.embedding_bytes(p),
        "ACT buffers": NUM_SLOTS * sizes.act_buffer_blocks * BLOCK_TOKENS * act_row,
        "KV buffers": NUM_SLOTS * sizes.kv_buffer_blocks * BLOCK_TOKENS * kv_row,
        "recomputed keys and values": generated_rows * kv_row,
        "attention buffer": sizes.attention_tokens * kv_row,
        "staging": NUM_SLOTS * sum(staged.values()),
        "hidden states": sizes.hidden_rows * shape.hidden * p,
        "workspace": int(workspace_bytes(shape, p, sizes.step_rows, sizes.batch, 0 < resident < layout.total_bytes)),
        "slack": SLACK_BYTES[device],
    }
    tiers["host"] |= {
        "weights": layers * streamed,
        "landing strips": NUM_SLOTS * sum(size for kind, size in staged.items() if kind.endswith("@host")),
    }
    return {tier: {part: size for part, size in parts.items() if size} for tier, parts in tiers.items()}


def workspace_bytes(shape: ModelShape, p: int, step_rows, batch, cut):
    """Temporaries of one step of ``step_rows`` padded new tokens and ``batch`` requests; arguments may be arrays.

    Prefill lives on the queries, keys and values, the attended rows, the feed-forward rows and three hidden-sized rows;
    where a matrix is ``cut`` between resident and streamed rows (0 or 1) one product is there twice. Sampling lives on
    the logits in float32, their softmax and its sum in float64.
    """
    widths = shape.query_width * 2 + shape.kv_width + shape.ffn * (2 if shape.gated_mlp else 1) + 3 * shape.hidden
    widths = widths + cut * max(shape.ffn, shape.query_width + shape.kv_width)
    return np.maximum(step_rows * widths * p, batch * shape.vocab * (p + 24))


def total_bytes(plan: dict[str, dict[str, int]]) -> dict[str, int]:
    return {tier: sum(parts.values()) for tier, parts in plan.items()}


def gib(num_bytes: float) -> str:
    """Bytes for people: GiB, MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size / 2:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def check_budget(plan: dict[str, dict[str, int]], budgets: dict[str, int | None], what: str = "this run") -> None:
    """Raise InputError when a tier is over its budget: the tier, the part that no longer fits, bytes asked and left."""
    for tier, parts in plan.items():
        budget = budgets.get(tier)
        if budget is None or sum(parts.values()) <= budget:
            continue
        left = budget
        for part, size in sorted(parts.items(), key=lambda item: item[1]):
            if size > left:
                raise InputError(
                    f"{tier} memory: {what} needs at least {gib(sum(parts.values()))}, the budget is {gib(budget)}; "
                    f"{part} asks {gib(size)} where {gib(left)} is left"
                )
            left -= size


def fits(plan: dict[str, dict[str, int]], budgets: dict[str, int | None]) -> bool:
    return all(budgets.get(tier) is None or size <= budgets[tier] for tier, size in total_bytes(plan).items())


def parse_bytes(text: str | int | None) -> int | None:
    """ "8GiB", "512MiB", "12GB", plain bytes; None stays None. Raises InputError for anything else, or for <= 0."""
    if text is None or (isinstance(text, int) and not isinstance(text, bool) and text > 0):
        return text
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    units |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    stripped = str(text).strip().lower()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = stripped[len(number) :]
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        raise InputError(f"memory size {text!r} is not understood: write 8GiB, 512MiB or a number of bytes") from None
    if not np.isfinite(value) or value < 1:
        raise InputError(f"memory size {text!r} must be positive and finite")
    return int(value)
