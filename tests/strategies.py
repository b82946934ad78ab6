"""Random policies for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from flexhybrid.core.policy import Bits, Placement, Policy, Selection

TIERS = ("device", "host", "disk")


@st.composite
def lossless_policies(draw) -> Policy:
    """Every lossless policy that the executor runs."""
    rest = dict(
        schedule=draw(st.sampled_from(("column", "row"))),
        max_mini_batch_tokens=draw(st.sampled_from((16, 50, 120, 400, 8192))),
        packing=draw(st.sampled_from(("balanced", "fifo"))),
        hidden=draw(st.sampled_from(("device", "host"))),
        weight_order=draw(st.sampled_from(("kv_first", "natural"))),
        overlap=draw(st.sampled_from(("full", "full", "full", "none", "step"))),
    )
    device, disk = draw(st.sampled_from(((0.0, 0.0), (0.3, 0.4), (0.0, 1.0), (0.7, 0.0), (1.0, 0.0), (0.5, 0.5))))
    weights = Placement(device=device, host=1 - device - disk, disk=disk)
    if draw(st.integers(0, 4)) == 0:
        return Policy("host attention", weights, attention="host", **rest)
    entries = [f"{r}@{tier}" for r in ("kv", "act") for tier in TIERS]
    both = [f"both(kv@{a},act@{b})" for a in TIERS for b in TIERS]
    chosen = draw(st.lists(st.sampled_from([*entries, *entries, *both]), min_size=1, max_size=4, unique=True))
    chosen += ["tok"] if draw(st.booleans()) else []
    parts = draw(st.lists(st.integers(1, 9), min_size=len(chosen), max_size=len(chosen)))
    cache = {entry: part / sum(parts) for entry, part in zip(chosen, parts, strict=True)}
    static = not any(entry.startswith(("both", "tok")) for entry in chosen) and draw(st.booleans())
    split = draw(st.sampled_from(("pipeline", "paper")))
    return Policy("case", weights, cache=cache, static_cache=static, split=split, **rest)


@st.composite
def speculative_policies(draw) -> Policy:
    """InfiniGen's selection over what the executor runs it over."""
    share = st.sampled_from((0.05, 0.3, 1.0))
    selection = Selection(
        "speculative", alpha=draw(st.sampled_from((0.0, 1.0, 1e9))), partial_ratio=draw(share),
        max_fraction=draw(share), pool=draw(st.sampled_from((0.4, 1.0))),
        victim=draw(st.sampled_from(("fifo", "lru", "counter"))), partial_keys="device",
    )  # fmt: skip
    policy = draw(lossless_policies().filter(lambda policy: policy.attention == "device"))
    kv = 1.0 if selection.pool < 1 else draw(st.sampled_from((1.0, 0.6, 0.0)))
    return replace(policy, cache={"kv@host": kv, "act@host": 1 - kv}, selection=selection)


@st.composite
def runnable_policies(draw) -> Policy:
    """Every policy that the executor runs: fewer bits too, and InfiniGen's selection."""
    if draw(st.integers(0, 4)) == 0:
        policy = draw(speculative_policies())
        bits = [draw(st.sampled_from(("native", 8, 4))) for _ in range(3)]
        if policy.selection.pool < 1:
            bits[1] = "native"
        return replace(policy, bits=Bits(*bits))
    policy = draw(lossless_policies())
    bits = [draw(st.sampled_from(("native", 8, 4))) for _ in range(3)]
    if policy.attention == "host":
        bits[1] = "native"
    return replace(policy, bits=Bits(*bits))
