"""Presets: each known system is a short function that returns a Policy.

Systems whose papers find the placement by optimization (FlexGen, CAPTURE) are in ``policy_search.systems``, which also
has all names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY
from flexhybrid.core.context.selection import WHOLE_LAYERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import WHOLE_BATCH, Bits, Overlap, Placement, Policy, Selection
from flexhybrid.core.units import parse_bytes

_RESIDENT = Placement(device=1.0)
_NEWEST_ALONE = 1e-6  #: a share that rounds to no block: its entry has only the newest block, which is never dropped
#: CAPTURE's buffers hold 8,192 cached tokens, four requests of 2,048; ours also count the new tokens.
CAPTURE_MINI_BATCH_TOKENS = 8192 + 16


def _share(value, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError(f"{where} is {value!r}; a share is a number from 0 to 1")
    return float(value)


def kv_only(max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """All context as keys and values on the host, in CAPTURE's zig-zag schedule."""
    return Policy("kv_only", cache={"kv@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def act_only(max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """All context as layer inputs on the host (CAPTURE-Act-Cache)."""
    return Policy("act_only", cache={"act@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def hybrid(share: float, max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """A share of each request's tokens as ACT, the rest as KV, all on the host (CAPTURE-Hybrid-Cache).

    Raise InputError for a share outside 0..1.
    """
    share = _share(share, "hybrid: the ACT share")
    cache = {"act@host": share, "kv@host": 1.0 - share}
    return Policy(f"hybrid({share:g})", cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def static_share(shape: ModelShape) -> float:
    """Return the ACT share at which ACT and KV take equal bytes: 1 / (1 + ACT/KV byte ratio); 2/3 for multi-head
    attention (CAPTURE section V: the static hybrid)."""
    return 1.0 / (1.0 + shape.act_token_bytes(1) / shape.kv_token_bytes(1))


def hybrid_static(shape: ModelShape, max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """Equal host bytes in ACT and KV on any machine."""
    return replace(hybrid(static_share(shape), max_mini_batch_tokens), name="hybrid_static")


def resident(max_mini_batch_tokens: int = 8192) -> Policy:
    """Weights, keys and values on the device: the link is idle. (By name in ``policy_search.systems``, with the weights
    that fit.)"""
    return Policy("resident", _RESIDENT, cache={"kv@device": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def ideal() -> Policy:
    """Everything on a GPU that is large enough, the whole batch at once (InfiniGen's Ideal)."""
    return Policy("ideal", _RESIDENT, cache={"kv@device": 1.0}, max_mini_batch_tokens=WHOLE_BATCH, packing="fifo")


def deepspeed(bits: int | None = None, cache: str = "device") -> Policy:
    """DeepSpeed ZeRO-Inference: one batch, layer after layer, weights streamed, keys and values on the device.
    ``bits``: of the weights (default: native). ``cache`` "host": keys and values there, attended to by the host."""
    return Policy(
        "deepspeed", cache={f"kv@{cache}": 1.0}, schedule="row", max_mini_batch_tokens=WHOLE_BATCH,
        packing="fifo", weight_order="natural", attention=cache, bits=Bits(weights=bits or "native"),
    )  # fmt: skip


def accelerate(cache: str = "host") -> Policy:
    """Hugging Face's static cache: offloaded, weights resident, each layer's whole reserved cache copied, no overlap
    (KVPR section 4.1). ``cache`` "device": not copied, next to offloaded weights (FlexGen's baseline)."""
    return Policy(
        "accelerate", _RESIDENT, cache={f"kv@{cache}": 1.0}, schedule="row", max_mini_batch_tokens=WHOLE_BATCH,
        packing="fifo", static_cache=True, overlap="none",
    )  # fmt: skip


def token_recompute(ratio: float, max_mini_batch_tokens: int = 8192) -> Policy:
    """A leading share of the tokens is recomputed through all layers, the rest kept as keys and values on the host. At
    share 1, all but each request's newest block."""
    ratio = _share(ratio, "token_recompute: the ratio")
    recomputed = min(ratio, 1.0 - _NEWEST_ALONE)
    shares = {"tok": recomputed, "kv@host": 1.0 - recomputed}
    cache = {entry: share for entry, share in shares.items() if share > 0}
    return Policy(f"token_recompute({ratio:g})", cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def kvpr_row(split: str = "paper", act: str = "host") -> Policy:
    """KVPR for latency: weights resident, one batch. ``act``: tier of the layer inputs (the paper's text: device;
    its memory figures: host). ``split``: ``Policy.split``. By name, layer inputs are dropped where recomputing never
    pays."""
    return Policy(
        f"kvpr_row({split})", _RESIDENT, cache={f"both(kv@host,act@{act})": 1.0}, schedule="row",
        max_mini_batch_tokens=WHOLE_BATCH, packing="fifo", split=split,
    )  # fmt: skip


def kvpr_column(split: str = "paper", hiding: bool = True, max_mini_batch_tokens: int = 8192) -> Policy:
    """KVPR for throughput: weights streamed, several mini-batches. ``hiding``: W_K and W_V cross first, then the layer
    inputs, so that recomputation starts before the rest arrives (KVPR section 3.3). ``split`` as in ``kvpr_row``."""
    return Policy(
        f"kvpr_column({split})", cache={"both(kv@host,act@host)": 1.0},
        max_mini_batch_tokens=max_mini_batch_tokens, packing="fifo", split=split,
        weight_order="kv_act_first" if hiding else "natural",
    )  # fmt: skip


def offloaded(max_mini_batch_tokens: int = WHOLE_BATCH, overlap: Overlap = "none") -> Policy:
    """FlexGen with only the cache off the device, as InfiniGen runs it: one task after another."""
    return Policy(
        "offloaded", _RESIDENT, cache={"kv@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens, packing="fifo",
        weight_order="natural", overlap=overlap,
    )  # fmt: skip


def int4(max_mini_batch_tokens: int = WHOLE_BATCH, overlap: Overlap = "none") -> Policy:
    """FlexGen's group-wise 4-bit cache for keys and values; weights keep their native bits."""
    return replace(offloaded(max_mini_batch_tokens, overlap), name="int4", bits=Bits(kv=4))


def quantized(kv: int = 4, max_mini_batch_tokens: int = WHOLE_BATCH, overlap: Overlap = "none") -> Policy:
    """``int4`` with ``kv`` bits: 8, 4, 2 or 1 (the bits of InfiniGen's Figs. 11 and 19)."""
    return replace(int4(max_mini_batch_tokens, overlap), name=f"quantized({kv})", bits=Bits(kv=kv))


def h2o(
    budget: float = 0.2,
    whole_layers: int = WHOLE_LAYERS,
    max_mini_batch_tokens: int = WHOLE_BATCH,
    cache: str = "host",
    **places: str,
) -> Policy:
    """H2O: heavy hitters and a recent window, a fixed share of the prompt, in the tier ``cache``. The first
    ``whole_layers`` keep all tokens, as layers 0 and 1 in the authors' code. ``places``: attention, hidden."""
    name = f"h2o({_share(budget, 'h2o: the budget'):g})"
    selection = Selection("heavy_hitter", budget=budget, whole_layers=whole_layers)
    policy = replace(offloaded(max_mini_batch_tokens, "full"), name=name, selection=selection)
    return replace(policy, cache={f"kv@{cache}": 1.0}, **places)


def infinigen(
    alpha: float = 4.0,
    partial_ratio: float = 0.3,
    cap: float = 0.2,
    pool: float | str = 1.0,
    victim: str = "counter",
    expected: float | None = None,
    max_mini_batch_tokens: int = WHOLE_BATCH,
    **fields: Any,
) -> Policy:
    """InfiniGen: each layer's important tokens are predicted one layer ahead and only those fetched; partial keys on
    the device. ``expected``: measured share of fetched tokens, if known. ``pool``: kept share of the cache, or, above 1
    or with a unit ("20GiB"), bytes of all requests of a wave. ``fields``: ``whole_layers`` and ``columns``, if not the
    paper's."""
    share = None if isinstance(pool, str) or pool > 1 else pool
    selection = Selection(
        "speculative",
        alpha=alpha,
        partial_ratio=partial_ratio,
        max_fraction=cap,
        pool=share,
        pool_bytes=parse_bytes(pool) if share is None else None,
        victim=victim,
        partial_keys="device",
        expected_fraction=expected,
        **{"whole_layers": WHOLE_LAYERS, **fields},
    )
    return replace(offloaded(max_mini_batch_tokens, "full"), name="infinigen", selection=selection)


def neo(host: float = 0.5, max_mini_batch_tokens: int = 8192) -> Policy:
    """NEO (arXiv 2411.01142): the host attends to the part of the cache that it holds while the device attends to its
    own. NEO divides the cache by request; here each request has a share ``host`` of its tokens on the host.

    Raise InputError for a share outside 0..1.
    """
    share = _share(host, "neo: the host's share")
    cache = {ATTENDED_ENTRY: share, "kv@device": 1.0 - share}
    return Policy("neo", _RESIDENT, cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def fastdecode(max_mini_batch_tokens: int = 8192) -> Policy:
    """FastDecode: attention on the host, next to the cache. ``implementation`` has how many GPUs share the host."""
    return Policy(
        "fastdecode", _RESIDENT, cache={"kv@host": 1.0}, attention="host", packing="fifo",
        max_mini_batch_tokens=max_mini_batch_tokens,
    )  # fmt: skip
