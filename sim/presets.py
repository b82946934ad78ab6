"""Presets: one short function for each known system, which returns its policy.

``policy_search.systems`` has the names of all systems, and the systems whose papers optimize the placement (FlexGen,
CAPTURE).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY
from flexhybrid.core.context.selection import WHOLE_LAYERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import WHOLE_BATCH, Bits, Experts, Overlap, Placement, Policy, Selection
from flexhybrid.core.units import parse_bytes

_RESIDENT = Placement(device=1.0)
_NEWEST_ALONE = 1e-6  #: a share so small that its entry holds only the newest block, which is never dropped
#: CAPTURE's mini-batches hold 8,192 cached tokens, four requests of 2,048. Ours also count the new tokens.
CAPTURE_MINI_BATCH_TOKENS = 8192 + 16


def _share(value, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError(f"{where} is {value!r}; a share is a number from 0 to 1")
    return float(value)


def kv_only(max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """Keep all context as keys and values on the host, in CAPTURE's zig-zag schedule."""
    return Policy("kv_only", cache={"kv@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def act_only(max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """Keep all context as layer inputs on the host (CAPTURE-Act-Cache)."""
    return Policy("act_only", cache={"act@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def hybrid(share: float, max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """Keep a share of each request's tokens as ACT and the rest as KV, all on the host (CAPTURE-Hybrid-Cache). Raise
    InputError for a share outside 0..1."""
    share = _share(share, "hybrid: the ACT share")
    cache = {"act@host": share, "kv@host": 1.0 - share}
    return Policy(f"hybrid({share:g})", cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def static_share(shape: ModelShape) -> float:
    """Return the ACT share at which ACT and KV take equal bytes, 1 / (1 + ACT bytes / KV bytes of a token). It is 2/3
    for multi-head attention (CAPTURE section V, the static hybrid)."""
    return 1.0 / (1.0 + shape.act_token_bytes(1) / shape.kv_token_bytes(1))


def hybrid_static(shape: ModelShape, max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS) -> Policy:
    """Keep equal bytes of ACT and KV on the host, on any machine."""
    return replace(hybrid(static_share(shape), max_mini_batch_tokens), name="hybrid_static")


def resident(max_mini_batch_tokens: int = 8192) -> Policy:
    """Keep weights, keys and values on the device, so that the link is idle. ``policy_search.systems`` offloads the
    weights that do not fit."""
    return Policy("resident", _RESIDENT, cache={"kv@device": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def ideal() -> Policy:
    """Run the whole batch at once on a GPU that is large enough for everything (InfiniGen's Ideal)."""
    return Policy("ideal", _RESIDENT, cache={"kv@device": 1.0}, max_mini_batch_tokens=WHOLE_BATCH, packing="fifo")


def deepspeed(bits: int | None = None, cache: str = "device") -> Policy:
    """Run one batch, layer after layer, with streamed weights, as DeepSpeed ZeRO-Inference does. ``bits``: bits of a
    weight (default: native). ``cache``: tier that keeps keys and values and attends to them."""
    return Policy(
        "deepspeed", cache={f"kv@{cache}": 1.0}, schedule="row", max_mini_batch_tokens=WHOLE_BATCH,
        packing="fifo", weight_order="natural", attention=cache, bits=Bits(weights=bits or "native"),
    )  # fmt: skip


def accelerate(cache: str = "host") -> Policy:
    """Run one batch without overlap, with resident weights and an offloaded static cache, as Hugging Face Accelerate
    does (KVPR section 4.1). Each layer copies its whole reserved cache. With ``cache`` "device" nothing is copied;
    FlexGen's baseline has this cache, and offloaded weights."""
    return Policy(
        "accelerate", _RESIDENT, cache={f"kv@{cache}": 1.0}, schedule="row", max_mini_batch_tokens=WHOLE_BATCH,
        packing="fifo", static_cache=True, overlap="none",
    )  # fmt: skip


def token_recompute(ratio: float, max_mini_batch_tokens: int = 8192) -> Policy:
    """Recompute a leading share of the tokens through all layers; keep the rest as keys and values on the host. At
    share 1, only each request's newest block is kept."""
    ratio = _share(ratio, "token_recompute: the ratio")
    recomputed = min(ratio, 1.0 - _NEWEST_ALONE)
    shares = {"tok": recomputed, "kv@host": 1.0 - recomputed}
    cache = {entry: share for entry, share in shares.items() if share > 0}
    return Policy(f"token_recompute({ratio:g})", cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def kvpr_row(split: str = "paper", act: str = "host") -> Policy:
    """Run KVPR for latency: one batch, with resident weights. ``act``: tier of the layer inputs; the paper's text says
    the device, and its memory figures say the host. ``split``: see ``Policy.split``. ``policy_search.systems`` drops
    the layer inputs if recomputing is never faster."""
    return Policy(
        f"kvpr_row({split})", _RESIDENT, cache={f"both(kv@host,act@{act})": 1.0}, schedule="row",
        max_mini_batch_tokens=WHOLE_BATCH, packing="fifo", split=split,
    )  # fmt: skip


def kvpr_column(split: str = "paper", hiding: bool = True, max_mini_batch_tokens: int = 8192) -> Policy:
    """Run KVPR for throughput: several mini-batches, with streamed weights. ``hiding``: load W_K and W_V first, then
    the layer inputs, so that recomputation starts before the other weights arrive (KVPR section 3.3). ``split``: see
    ``Policy.split``."""
    return Policy(
        f"kvpr_column({split})", cache={"both(kv@host,act@host)": 1.0},
        max_mini_batch_tokens=max_mini_batch_tokens, packing="fifo", split=split,
        weight_order="kv_act_first" if hiding else "natural",
    )  # fmt: skip


def offloaded(max_mini_batch_tokens: int = WHOLE_BATCH, overlap: Overlap = "none") -> Policy:
    """Keep only the cache off the device, as InfiniGen runs FlexGen. By default, tasks run one after another."""
    return Policy(
        "offloaded", _RESIDENT, cache={"kv@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens, packing="fifo",
        weight_order="natural", overlap=overlap,
    )  # fmt: skip


def int4(max_mini_batch_tokens: int = WHOLE_BATCH, overlap: Overlap = "none") -> Policy:
    """Keep keys and values in 4 bits, by groups, as FlexGen does. Weights keep their native bits."""
    return replace(offloaded(max_mini_batch_tokens, overlap), name="int4", bits=Bits(kv=4))


def quantized(kv: int = 4, max_mini_batch_tokens: int = WHOLE_BATCH, overlap: Overlap = "none") -> Policy:
    """Return ``int4`` with ``kv`` bits instead: 8, 4, 2 or 1, as in InfiniGen's Figs. 11 and 19."""
    return replace(int4(max_mini_batch_tokens, overlap), name=f"quantized({kv})", bits=Bits(kv=kv))


def h2o(
    budget: float = 0.2,
    whole_layers: int = WHOLE_LAYERS,
    max_mini_batch_tokens: int = WHOLE_BATCH,
    cache: str = "host",
    **places: str,
) -> Policy:
    """Keep only heavy hitters and the latest tokens in the tier ``cache``, as H2O does: together the share ``budget``
    of the prompt. The first ``whole_layers`` keep all tokens, as layers 0 and 1 do in the authors' code. ``places``:
    tiers of ``Policy.attention`` and ``Policy.hidden``."""
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
    """Predict each layer's important tokens one layer ahead and load only these, as InfiniGen does.

    ``expected``: measured share of loaded tokens, if known. ``pool``: share of the cache that is kept; a number above 1
    or a text such as "20GiB" is the bytes of all requests of a wave. ``fields``: ``whole_layers`` and ``columns`` of
    ``Selection`` if they differ from the paper's.
    """
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
    """Let host and device attend to their parts of the cache at the same time, as NEO does (arXiv 2411.01142).

    NEO divides the cache by request; here each request has the share ``host`` of its tokens on the host. Raise
    InputError for a share outside 0..1.
    """
    share = _share(host, "neo: the host's share")
    cache = {ATTENDED_ENTRY: share, "kv@device": 1.0 - share}
    return Policy("neo", _RESIDENT, cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def xquant(bits: int = 4, max_mini_batch_tokens: int = 8192) -> Policy:
    """Keep only layer inputs, in ``bits`` bits on the device, and recompute all keys and values from them, as XQuant
    does (arXiv 2508.10395). It also stores differences between layers and, for grouped queries, projections of the
    inputs; this policy does neither."""
    cache, stored = {"act@device": 1.0}, Bits(act=bits)
    return Policy("xquant", _RESIDENT, cache=cache, bits=stored, max_mini_batch_tokens=max_mini_batch_tokens)


def headinfer(max_mini_batch_tokens: int = 8192) -> Policy:
    """Keep weights on the device and the cache on the host, and attend on the device, as HeadInfer does (arXiv
    2502.12574). HeadInfer loads the cache by head; here it is loaded by layer, which needs larger buffers."""
    return Policy("headinfer", _RESIDENT, cache={"kv@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def apt_serve(hidden: float = 0.5, max_mini_batch_tokens: int = 8192) -> Policy:
    """Keep a share of the context as layer inputs and the rest as keys and values, all on the device, as Apt-Serve does
    (arXiv 2504.07494).

    Apt-Serve chooses by request; here each request has the share ``hidden`` as layer inputs. Raise InputError for a
    share outside 0..1.
    """
    share = _share(hidden, "apt_serve: the share of layer inputs")
    cache = {"act@device": share, "kv@device": 1.0 - share}
    return Policy("apt_serve", _RESIDENT, cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def moe_gen(host: float = 0.0, max_mini_batch_tokens: int = 8192) -> Policy:
    """Attend in mini-batches, and compute each layer's experts once for all of them, as MoE-Gen does (arXiv
    2503.09716). Weights, keys and values are on the host, which attends to the share ``host`` of the tokens. Raise
    InputError for a share outside 0..1."""
    share = _share(host, "moe_gen: the host's share")
    return Policy(
        "moe_gen",
        cache={"kv@host": 1.0},
        attention={"host": share, "device": 1.0 - share},
        packing="fifo",
        max_mini_batch_tokens=max_mini_batch_tokens,
        experts=Experts(batch=1),
    )


def fastdecode(max_mini_batch_tokens: int = 8192) -> Policy:
    """Keep the cache on the host and attend there, as FastDecode does. ``Implementation.sharers`` is the number of GPUs
    that share the host."""
    return Policy(
        "fastdecode", _RESIDENT, cache={"kv@host": 1.0}, attention="host", packing="fifo",
        max_mini_batch_tokens=max_mini_batch_tokens,
    )  # fmt: skip
