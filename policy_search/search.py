"""The exact optimum of the closed form: every candidate of a dense grid is priced, the best that fits is taken.

"Exact" means the global optimum over the grid: all ACT shares that a request's blocks can realise, all multiples of
1/256, every batch up to 64 and steps of a sixteenth beyond. There is no descent that could stop at a local optimum.
What the closed form itself leaves out, ``sim.closed_form`` says; ``confirm`` walks the winner on the virtual clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.blocks import ceil_blocks
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.layout import layer_layout
from flexhybrid.core.memory import gib
from flexhybrid.core.plan import admit
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.stream import stream
from flexhybrid.core.workload import Workload
from sim.closed_form import Candidates, mean_lengths, predict
from sim.virtual_clock import RunSummary, run, summarize

SHARE_STEPS = 256
WEIGHT_STEPS = 256  #: resident shares of the weights are multiples of one of so many
MINI_BATCH_BOUNDS = (2048, 4096, 8192)  #: the last is CAPTURE's
OBJECTIVES = ("tokens_per_s", "decode_tokens_per_s")


@dataclass(frozen=True)
class SearchResult:
    """The best policy and what was predicted of it."""

    policy: Policy
    batch: int
    prediction: dict  #: the closed form's row (``Prediction.row``): seconds, tokens/s, bytes, busy shares, binding
    act_share: float  #: of tokens
    kv_act_bytes_ratio: float  #: KV bytes / ACT bytes of a request's context; inf without ACT
    num_candidates: int
    search_s: float
    virtual: RunSummary | None = None  #: of the winner, when asked to confirm

    @property
    def binding(self) -> str:
        """The resource that is busiest in the decode."""
        return self.prediction["binding"]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the policy needs in each tier."""
        return {"device": int(self.prediction["device_bytes"]), "host": int(self.prediction["host_bytes"])}


def share_grid(prompt_tokens: int, max_tokens: int) -> np.ndarray:
    """ACT shares worth trying, sorted: multiples of 1/256, and every count of ACT blocks a request's context can have
    at its start or its end."""
    shares = {step / SHARE_STEPS for step in range(SHARE_STEPS + 1)}
    for tokens in (prompt_tokens, prompt_tokens + max_tokens - 1):
        blocks = int(ceil_blocks(tokens))
        if blocks <= 2 * SHARE_STEPS:
            shares |= {count / blocks for count in range(blocks + 1)}
    return np.array(sorted(shares))


def batch_grid(max_batch: int) -> np.ndarray:
    """Every batch up to 64, then steps of a sixteenth, and ``max_batch`` itself."""
    batches, batch = [], 1
    while batch <= max_batch:
        batches.append(batch)
        batch += 1 if batch < 64 else batch // 16
    return np.array(sorted({*batches, max_batch}))


def search(
    shape: ModelShape,
    hardware: Hardware,
    bytes_per_element: int,
    workload: Workload,
    *,
    batch: int | None = None,
    max_batch: int = 512,
    max_mini_batch_tokens: int | None = None,
    weights_device: float | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
    objective: str = "tokens_per_s",
    confirm: bool = False,
) -> SearchResult:
    """The best ACT share, and the best batch unless it is given, for requests of the workload's mean lengths.

    ``max_mini_batch_tokens``: the bound of a mini-batch; None tries MINI_BATCH_BOUNDS (smaller buffers leave a small
    device room for more requests or weights). ``weights_device``: share of each layer kept on the device; None keeps as
    much as fits beside each candidate. All weights and keys and values on the device is a candidate too. Memories in
    bytes; None takes the hardware's, and no limit where that has none. ``objective``: "tokens_per_s" of the whole run
    or "decode_tokens_per_s".

    Raises InputError when nothing fits, naming each tier that lacks memory, how much, and what would do.
    """
    started = time.perf_counter()
    if objective not in OBJECTIVES:
        raise InputError(f"unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
    if weights_device is not None and not 0 <= weights_device <= 1:
        raise InputError(f"weights_device is {weights_device!r}; a share is a number from 0 to 1")
    if (batch is not None and batch < 1) or max_batch < 1:
        raise InputError("a batch has at least one request")
    budgets = {
        "device": hardware.device_memory if device_memory is None else device_memory,
        "host": hardware.host_memory if host_memory is None else host_memory,
    }
    prompt_tokens, max_tokens = mean_lengths(workload)
    batches = np.array([batch]) if batch is not None else batch_grid(max_batch)
    bounds = np.array([max_mini_batch_tokens] if max_mini_batch_tokens else MINI_BATCH_BOUNDS)
    candidates = _grid(prompt_tokens, max_tokens, batches, bounds)
    if weights_device is None:
        candidates = _fill_device(shape, hardware, bytes_per_element, candidates, budgets["device"])
    else:
        candidates = replace(candidates, weights_device=np.full(candidates.batch.shape, float(weights_device)))
    if weights_device in (None, 1.0):
        candidates = _with_resident(candidates, batches, bounds[-1])
    prediction = predict(shape, hardware, bytes_per_element, candidates)
    fits = np.ones(candidates.batch.shape, dtype=bool)
    for tier, budget in budgets.items():
        if budget is not None:
            fits &= getattr(prediction, f"{tier}_bytes") <= budget
    if not fits.any():
        raise InputError(_what_lacks(prediction, candidates, budgets))
    score = np.where(fits, getattr(prediction, objective), -1.0)
    if max_tokens == 1:  # no decode to judge by
        score = np.where(fits, prediction.tokens_per_s, -1.0)
    best = int(np.argmax(score))
    policy, won_batch = _policy(candidates, best)
    act = float(candidates.act_host[best])
    act_bytes = act * shape.act_token_bytes(bytes_per_element)
    kv_bytes = (1 - act) * shape.kv_token_bytes(bytes_per_element)
    result = SearchResult(
        policy=policy,
        batch=won_batch,
        prediction=prediction.row(best),
        act_share=act,
        kv_act_bytes_ratio=kv_bytes / act_bytes if act_bytes else float("inf"),
        num_candidates=int(candidates.batch.size),
        search_s=time.perf_counter() - started,
    )
    if not confirm:
        return result
    wave = admit(shape, policy, Workload.uniform(won_batch, prompt_tokens, max_tokens), bytes_per_element)
    return replace(result, virtual=summarize(run(stream(wave), hardware)))


def _grid(prompt_tokens: int, max_tokens: int, batches: np.ndarray, bounds: np.ndarray) -> Candidates:
    """All batches x all mini-batch bounds x all ACT shares, flat; the rest of each request as KV on the host."""
    shares = share_grid(prompt_tokens, max_tokens)
    batch, bound, share = (a.reshape(-1) for a in np.meshgrid(batches, bounds, shares, indexing="ij"))
    return Candidates(
        batch.astype(np.float64), prompt_tokens, max_tokens, bound.astype(np.float64), act_host=share,
        kv_device=0.0, weights_device=0.0,
    )  # fmt: skip


def _fill_device(
    shape: ModelShape, hardware: Hardware, p: int, candidates: Candidates, budget: int | None
) -> Candidates:
    """The largest resident share of the weights that fits beside each candidate, in steps of 1/256.

    A resident byte of a layer costs one byte in each of L layers and saves two slots, so the need is linear in it. A
    share is rounded to whole matrix rows: a row is held back.
    """
    layout, layers = layer_layout(shape, p), shape.num_layers
    if budget is None:
        return replace(candidates, weights_device=np.ones(candidates.batch.shape))
    streamed = predict(shape, hardware, p, candidates).device_bytes
    left = budget - streamed
    whole = left >= (layers - 2) * layout.total_bytes  # with one or two layers the slots are as large as the weights
    if layers <= 2:
        return replace(candidates, weights_device=np.where(whole, 1.0, 0.0))
    # A layer that is cut between resident and streamed needs a little workspace more: what half a layer shows beyond
    # the bytes it keeps.
    half = predict(shape, hardware, p, replace(candidates, weights_device=np.full(candidates.batch.shape, 0.5)))
    beside = half.device_bytes - streamed - (layers - 2) * layout.resident_prefix(0.5)
    row = max(spot.row_bytes for spot in layout.spots if spot.cols)
    kept = (left - beside) / (layers - 2) - row
    share = np.clip(np.floor(kept / layout.total_bytes * WEIGHT_STEPS) / WEIGHT_STEPS, 0.0, 1.0)
    return replace(candidates, weights_device=np.where(whole, 1.0, share))


def _with_resident(candidates: Candidates, batches: np.ndarray, bound: int) -> Candidates:
    """The candidates, and each batch with everything on the device."""
    extra = np.zeros(len(batches))
    size = candidates.batch.size
    return replace(
        candidates,
        batch=np.concatenate([candidates.batch, batches.astype(np.float64)]),
        max_mini_batch_tokens=np.concatenate([candidates.max_mini_batch_tokens, extra + bound]),
        act_host=np.concatenate([candidates.act_host, extra]),
        kv_device=np.concatenate([np.zeros(size), extra + 1.0]),
        weights_device=np.concatenate([candidates.weights_device, extra + 1.0]),
    )


def _policy(candidates: Candidates, index: int) -> tuple[Policy, int]:
    """(policy, batch) of one candidate."""
    act, device = float(candidates.act_host[index]), float(candidates.weights_device[index])
    kv_device = float(np.broadcast_to(candidates.kv_device, candidates.batch.shape)[index])
    cache = {"act@host": act, "kv@host": 1.0 - act} if kv_device == 0 else {"kv@device": 1.0}
    batch = int(candidates.batch[index])
    policy = Policy(
        "searched", Placement(device=device, host=1.0 - device), cache=cache,
        max_mini_batch_tokens=int(candidates.max_mini_batch_tokens[index]), max_batch=batch,
    )  # fmt: skip
    return policy, batch


def _what_lacks(prediction, candidates: Candidates, budgets: dict[str, int | None]) -> str:
    """Which tier lacks how much, and the smallest change that fits."""
    lack = {
        tier: np.maximum(0.0, getattr(prediction, f"{tier}_bytes") - budget)
        for tier, budget in budgets.items()
        if budget is not None
    }
    best = int(np.argmin(sum(lack.values())))
    parts, changes = [], []
    for tier, missing in lack.items():
        if missing[best] > 0:
            needed = budgets[tier] + missing[best]
            parts.append(
                f"{tier} memory: the least that would do is {gib(needed)}, the budget is {gib(budgets[tier])} "
                f"({gib(missing[best])} short)"
            )
            changes.append(f"{tier} memory to {int(-(-needed // 2**20))}MiB")
    batch = int(candidates.batch[best])
    requests = "1 request" if batch == 1 else f"{batch} requests"
    return f"no policy fits {requests}: {'; '.join(parts)}. Raise {' and '.join(changes)}"
