"""Presets: every known system is one short function that returns a Policy."""

from __future__ import annotations

import re
from collections.abc import Callable

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import ModelShape

_STREAMED = Placement(host=1.0)
_RESIDENT = Placement(device=1.0)


def kv_only(max_mini_batch_tokens: int = 8192, weights: Placement = _STREAMED) -> Policy:
    """All context as keys and values on the host (FlexGen's cache, in CAPTURE's zig-zag schedule)."""
    return Policy("kv_only", weights, cache={"kv@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def act_only(max_mini_batch_tokens: int = 8192, weights: Placement = _STREAMED) -> Policy:
    """All context as layer inputs on the host (CAPTURE-Act-Cache)."""
    return Policy("act_only", weights, cache={"act@host": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


def hybrid(share: float, max_mini_batch_tokens: int = 8192, weights: Placement = _STREAMED) -> Policy:
    """A share of each request's tokens as ACT, the rest as KV, all on the host (CAPTURE-Hybrid-Cache).

    Raises InputError for a share outside 0..1.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise InputError(f"hybrid: the ACT share is {share!r}; a share is a number from 0 to 1")
    cache = {"act@host": share, "kv@host": 1.0 - share}
    return Policy(f"hybrid({share:g})", weights, cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def static_share(shape: ModelShape) -> float:
    """ACT share of tokens at which ACT and KV take the same bytes: 1 / (1 + ACT/KV byte ratio); 2/3 for multi-head
    attention (CAPTURE section V: the static hybrid)."""
    return 1.0 / (1.0 + shape.act_token_bytes(1) / shape.kv_token_bytes(1))


def hybrid_static(shape: ModelShape, max_mini_batch_tokens: int = 8192, weights: Placement = _STREAMED) -> Policy:
    """Equal host bytes in ACT and KV, whatever the machine."""
    share = static_share(shape)
    cache = {"act@host": share, "kv@host": 1.0 - share}
    return Policy("hybrid_static", weights, cache=cache, max_mini_batch_tokens=max_mini_batch_tokens)


def resident(max_mini_batch_tokens: int = 8192, weights: Placement = _RESIDENT) -> Policy:
    """Weights and keys and values on the device: nothing crosses the link."""
    return Policy("resident", weights, cache={"kv@device": 1.0}, max_mini_batch_tokens=max_mini_batch_tokens)


PRESETS: dict[str, Callable[..., Policy]] = {
    "kv_only": kv_only,
    "act_only": act_only,
    "hybrid_static": hybrid_static,
    "resident": resident,
}

_HYBRID = re.compile(r"hybrid\(\s*([^()\s]+)\s*\)")


def preset(name: str, shape: ModelShape, **options) -> Policy:
    """A preset by name: kv_only, act_only, hybrid_static, resident, or hybrid(0.4) with the ACT share.

    ``options``: max_mini_batch_tokens, weights. Raises InputError that lists the known names.
    """
    if match := _HYBRID.fullmatch(name.strip()):
        try:
            share = float(match[1])
        except ValueError:
            raise InputError(f"preset {name!r}: {match[1]!r} is not a number from 0 to 1") from None
        return hybrid(share, **options)
    function = PRESETS.get(name.strip())
    if function is None:
        raise InputError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}, hybrid(SHARE)")
    return function(shape, **options) if function is hybrid_static else function(**options)
