"""Hypothesis strategies for random models and policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from flexhybrid.cascade.thresholds.curve import Answers
from flexhybrid.core.policy import Bits, Placement, Policy, Selection

TIERS = ("device", "host", "disk")
#: Caches that the host attends to.
ATTENDED = ({"kv@host": 1.0}, {"kv@host": 0.6, "kv@disk": 0.4}, {"kv@disk": 1.0})


@st.composite
def lossless_policies(draw) -> Policy:
    """Draw any lossless policy that the executor runs."""
    rest = dict(
        schedule=draw(st.sampled_from(("column", "row"))),
        max_mini_batch_tokens=draw(st.sampled_from((16, 50, 120, 400, 8192))),
        packing=draw(st.sampled_from(("balanced", "fifo", "balance"))),
        hidden=draw(st.sampled_from(("device", "host"))),
        weight_order=draw(st.sampled_from(("kv_first", "kv_act_first", "natural"))),
        overlap=draw(st.sampled_from(("full", "full", "full", "none", "step"))),
    )
    device, disk = draw(st.sampled_from(((0.0, 0.0), (0.3, 0.4), (0.0, 1.0), (0.7, 0.0), (1.0, 0.0), (0.5, 0.5))))
    weights = Placement(device=device, host=1 - device - disk, disk=disk)
    if draw(st.integers(0, 4)) == 0:
        return Policy("host attention", weights, cache=draw(st.sampled_from(ATTENDED)), attention="host", **rest)
    entries = [f"{r}@{tier}" for r in ("kv", "act") for tier in TIERS]
    both = [f"both(kv@{a},act@{b})" for a in TIERS for b in TIERS]
    some = [*entries, *entries, *both, "attended(kv@host)", "attended(kv@host)"]
    chosen = draw(st.lists(st.sampled_from(some), min_size=1, max_size=4, unique=True))
    chosen += ["tok"] if draw(st.booleans()) else []
    parts = draw(st.lists(st.integers(1, 9), min_size=len(chosen), max_size=len(chosen)))
    cache = {entry: part / sum(parts) for entry, part in zip(chosen, parts, strict=True)}
    static = not any(entry.startswith(("both", "tok")) for entry in chosen) and draw(st.booleans())
    split = draw(st.sampled_from(("pipeline", "paper", "paper_prompt")))
    return Policy("case", weights, cache=cache, static_cache=static, split=split, **rest)


@st.composite
def sharing_policies(draw, few_bits: bool = False) -> Policy:
    """Draw policies under which prompts share the blocks of a common prefix; ``few_bits``: some with packed KV."""
    entries = [f"{r}@{tier}" for r in ("kv", "act") for tier in TIERS]
    entries += [] if few_bits else ["attended(kv@host)"]
    chosen = draw(st.lists(st.sampled_from(entries), min_size=1, max_size=3, unique=True))
    parts = draw(st.lists(st.integers(1, 9), min_size=len(chosen), max_size=len(chosen)))
    cache = {entry: part / sum(parts) for entry, part in zip(chosen, parts, strict=True)}
    device, disk = draw(st.sampled_from(((0.0, 0.0), (0.3, 0.4), (1.0, 0.0))))
    attention = draw(st.sampled_from(("device", "device", "host")))
    return Policy(
        "shared",
        Placement(device=device, host=1 - device - disk, disk=disk),
        cache=draw(st.sampled_from(ATTENDED)) if attention == "host" else cache,
        bits=draw(st.sampled_from((Bits(), Bits(8, 4, 8)))) if few_bits and attention == "device" else Bits(),
        attention=attention,
        schedule=draw(st.sampled_from(("column", "row"))),
        max_mini_batch_tokens=draw(st.sampled_from((16, 50, 120, 400, 8192))),
        packing=draw(st.sampled_from(("balanced", "fifo"))),
        overlap=draw(st.sampled_from(("full", "full", "full", "none", "step"))),
    )


@st.composite
def speculative_policies(draw) -> Policy:
    """Draw InfiniGen's selection over each cache that the executor supports for it."""
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
    """Draw any policy that the executor runs, including fewer bits and InfiniGen's selection."""
    if draw(st.integers(0, 4)) == 0:
        policy = draw(speculative_policies())
        bits = [draw(st.sampled_from(("native", 8, 4, 2, 1))) for _ in range(3)]
        if policy.selection.pool < 1:
            bits[1] = "native"
        return replace(policy, bits=Bits(*bits))
    policy = draw(lossless_policies())
    bits = [draw(st.sampled_from(("native", 8, 4, 2, 1))) for _ in range(3)]
    if policy.host_attends:
        bits[1] = "native"
    return replace(policy, bits=Bits(*bits))


@st.composite
def opt_shapes(draw) -> dict:
    """Draw arguments of ``models.save_opt``."""
    shape = dict(
        layers=draw(st.integers(1, 4)),
        heads=draw(st.sampled_from((1, 2, 3, 5, 7))),
        head_dim=draw(st.sampled_from((8, 16, 24))),
        ffn=draw(st.sampled_from((24, 40, 96))),
        vocab=draw(st.integers(11, 90)),
        positions=draw(st.integers(24, 80)),
        post_norm=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    if draw(st.booleans()):
        shape["embed_dim"] = draw(st.sampled_from((12, 20)))
    return shape


@st.composite
def llama_shapes(draw) -> dict:
    """Draw arguments of ``models.save_llama``: attention heads, biases, head widths, rotations and windows."""
    groups, queries_a_group = draw(st.sampled_from(((1, 1), (3, 1), (1, 4), (2, 2), (2, 3), (4, 1))))
    heads, head_dim = groups * queries_a_group, draw(st.sampled_from((6, 8, 16, 24)))
    ropes = (
        {},
        dict(rope_type="linear", factor=2.0),
        dict(rope_type="dynamic", factor=2.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=32),
    )  # fmt: skip
    kind, layers = draw(st.sampled_from(("llama", "qwen2", "qwen3", "mistral", "phi3"))), draw(st.integers(1, 3))
    window = draw(st.sampled_from((None, None, 2, 9, 17, 40)))  # of 1 transformers sees all
    windows: dict = {"sliding_window": window} if kind in ("mistral", "phi3") else {}
    if window and kind.startswith("qwen"):
        types = draw(
            st.lists(st.sampled_from(("full_attention", "sliding_attention")), min_size=layers, max_size=layers)
        )
        windows = dict(sliding_window=window, use_sliding_window=True, max_window_layers=0, layer_types=types)
    return dict(
        kind=kind,
        layers=layers,
        heads=heads,
        kv_heads=groups,
        head_dim=head_dim,
        hidden=heads * draw(st.sampled_from((head_dim, 10, 16))),
        ffn=draw(st.sampled_from((24, 40, 96))),
        vocab=draw(st.integers(11, 90)),
        positions=draw(st.integers(24, 64)),  # YaRN's context ends at 4 times 16, whatever the model has
        tied=draw(st.booleans()),
        rope={} if kind == "phi3" else draw(st.sampled_from(ropes)),
        theta=draw(st.sampled_from((100.0, 10_000.0, 1e6))),
        seed=draw(st.integers(0, 1000)),
        **windows,
    )


def model_shapes(positions: int) -> st.SearchStrategy[dict]:
    """Draw arguments of ``models.save_drawn`` for models of both families with this many positions."""
    of_llama = llama_shapes().map(lambda shape: shape | {"rope": {}})
    return st.one_of(opt_shapes(), of_llama).map(lambda shape: shape | {"positions": positions})


def calibrated_answers(num_models: int, num_requests: int, seed: int) -> Answers:
    """Draw models of growing accuracy and cost, each right as often as its confidence says."""
    generator = np.random.default_rng(seed)
    skill = np.sort(generator.uniform(0.3, 0.95, num_models))
    confidence = generator.beta(8 * skill[:, None], 8 * (1 - skill[:, None]), (num_models, num_requests))
    correct = generator.random((num_models, num_requests)) < confidence
    return Answers(correct, confidence, np.sort(generator.uniform(0.05, 1.0, num_models)))
