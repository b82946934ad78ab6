"""Test every selection with every cache, width and tier: it runs like a plain account, or is refused by name."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from models import save_opt
from oracles.heavy_hitters import plain_h2o
from oracles.speculative import PlainInfiniGen
from runs import run_wave

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Bits, Policy, Selection
from flexhybrid.core.trace import check_trace
from flexhybrid.runtime.storage.loader import Checkpoint
from sim import catalogue

MACHINE = catalogue.load("t4")  # it has a disk, and lines to split both(…) by
LENGTHS, MAX_TOKENS, BUDGET = (40, 21), 4, 0.5
TIERS = ("device", "host", "disk")
CACHES = (
    *({f"{representation}@{tier}": 1.0} for representation in ("kv", "act") for tier in TIERS),
    {"kv@host": 0.5, "act@host": 0.5}, {"kv@host": 0.5, "kv@device": 0.5}, {"both(kv@host,act@host)": 1.0},
    {"tok": 0.4, "kv@host": 0.6},
)  # fmt: skip
BITS = (Bits(), Bits(kv=4), Bits(act=4), Bits(kv=8, act=8), Bits(kv=2, act=1))


def speculative(pool=1.0, victim="counter", partial_keys="device") -> Selection:
    return Selection("speculative", None, 1.0, 0.5, 0.4, pool, victim, partial_keys)


SELECTIONS = {
    "none": Selection(), "H2O": Selection("heavy_hitter", budget=BUDGET), "InfiniGen": speculative(),
    **{f"InfiniGen, pool, {victim}": speculative(0.6, victim) for victim in ("fifo", "lru", "counter")},
    **{f"InfiniGen, partial keys on the {tier}": speculative(partial_keys=tier) for tier in ("host", "disk")},
}  # fmt: skip
ATTENTION = ("device", "host")
#: What the plain account of no selection takes: all layers look at all tokens.
EVERYTHING = replace(speculative(), whole_layers=3)

HOST_READS = {"kv@host", "kv@disk"}
#: What a refusal may say, and of which combinations it must say it: (words, applies to selection, cache, bits, where).
REFUSALS = (
    ("attention on the host reads kv@host and kv@disk", lambda s, c, b, a: a == "host" and {*c} - HOST_READS),
    ("attention on the host over", lambda s, c, b, a: a == "host" and b.kv != "native"),
    ("a speculative selection with attention on the host", lambda s, c, b, a: a == "host" and _guesses(s)),
    ("selection heavy_hitter over a cache other than kv", lambda s, c, b, a: _ranks(s) and not _only(c, "kv")),
    ("heavy hitters with attention on the host", lambda s, c, b, a: _ranks(s) and a == "host"),
    ("heavy hitters of", lambda s, c, b, a: _ranks(s) and b.kv != "native"),
    ("heavy hitters on the disk", lambda s, c, b, a: _ranks(s) and "kv@disk" in c),
    (
        "speculative selection over a cache other than kv@host and act@host",
        lambda s, c, b, a: _guesses(s) and not set(c) <= {"kv@host", "act@host"},
    ),
    ("a limited pool of a speculative selection over ACT",
     lambda s, c, b, a: _guesses(s) and s.pool < 1 and any("act" in kind for kind in c)),
    ("a limited pool of a speculative selection over [1248]-bit KV",
     lambda s, c, b, a: _guesses(s) and s.pool < 1 and b.kv != "native"),
    ("partial keys on the host", lambda s, c, b, a: s.partial_keys == "host"),
    ("partial keys on the disk", lambda s, c, b, a: s.partial_keys == "disk"),
)  # fmt: skip


def _guesses(selection) -> bool:
    return selection.method == "speculative"


def _ranks(selection) -> bool:
    return selection.method == "heavy_hitter"


def _only(cache, representation) -> bool:
    return all(kind.startswith(f"{representation}@") for kind in cache)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt")
    save_opt(folder, layers=3, heads=4, positions=96, scale=0.15)  # rows of 64 elements: one group
    generator = np.random.default_rng(3)
    return Checkpoint(folder), [generator.integers(3, 61, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def accounts(model):
    """Return the tokens of a plain account, cached, since combinations share them. Return None if rounding changes from
    iteration to iteration with a split or a recomputed prefix."""
    checkpoint, prompts = model
    known = {}

    def tokens(selection, cache, bits):
        if _ranks(selection):
            key = "H2O", tuple(cache.items())
            if key not in known:
                known[key] = [plain_h2o(checkpoint, prompt, MAX_TOKENS, BUDGET, cache) for prompt in prompts]
            return known[key]
        stored = tuple(width if any(part in kind for kind in cache) else "native"
                       for part, width in (("kv", bits.kv), ("act", bits.act)))  # fmt: skip
        if stored != ("native", "native") and any(kind.startswith(("both", "tok")) for kind in cache):
            return None
        key = selection, tuple(cache.items()) if _guesses(selection) or stored != ("native",) * 2 else None, stored
        if key not in known:
            policy = Policy(cache=dict(cache), bits=bits, selection=selection if _guesses(selection) else EVERYTHING)
            cached = [length + MAX_TOKENS - 1 for length in LENGTHS]
            plain = PlainInfiniGen(checkpoint, policy, max(cached) + 1, cached)
            known[key] = plain.answers(prompts, [MAX_TOKENS] * len(prompts))
        return known[key]

    return tokens


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", SELECTIONS)
def test_each_combination_runs_or_is_refused_by_name(model, accounts, tmp_path, name, attention):
    (checkpoint, prompts), selection, ran = model, SELECTIONS[name], 0
    for cache, bits in product(CACHES, BITS):
        what = f"{cache}, {bits}, attention on the {attention}"
        words = [text for text, applies in REFUSALS if applies(selection, cache, bits, attention)]
        try:
            policy = Policy(cache=dict(cache), bits=bits, selection=selection, attention=attention)
            result = run_wave(checkpoint, policy, prompts, MAX_TOKENS, hardware=MACHINE, disk_dir=tmp_path)
        except InputError as error:
            assert any(re.search(text, str(error)) for text in words), f"{what}: {error}"
            continue
        assert not words, f"{what} ran, but {words}"
        assert check_trace(result.trace) == [], what
        expected = accounts(selection, cache, bits)
        assert expected is None or result.tokens == expected, what
        ran += 1
    refused = "partial keys" in name or attention == "host" and name != "none"
    assert (ran == 0) == refused
