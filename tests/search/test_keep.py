"""Test searches with kept fields: they are kept, and the rest is as good as brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from toy_machine import SHAPE, machine

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Workload
from policy_search.keep import with_kept
from policy_search.search import FULL, LOSSLESS, SearchSettings, search
from policy_search.search_problem import PLAIN
from sim.array_clock import predict
from sim.candidates import Candidates

LOOSE = SearchSettings(max_batch=4, space=LOSSLESS, margin=0.0, mini_batch_tokens=(256, 1024))
PROBLEM = Problem(shape=SHAPE, hardware=machine(0.3), budgets=Budgets(disk=float(2**30)))


def found(*kept: str, settings: SearchSettings = LOOSE):
    return search(PROBLEM, Workload.uniform(1, 60, 6), with_kept(settings, kept))


#: What is kept -> whether a policy has it.
HOLDS = {
    "attention=host": lambda policy: policy.attention == "host",
    "attention=device": lambda policy: policy.attention == "device",
    "schedule=row": lambda policy: policy.schedule == "row",
    "hidden=host": lambda policy: policy.hidden == "host",
    "packing=fifo": lambda policy: policy.packing == "fifo",
    "weight_order=natural": lambda policy: policy.weight_order == "natural",
    "split=paper": lambda policy: policy.split == "paper",
    "overlap=step": lambda policy: policy.overlap == "step",
    "static_cache=true": lambda policy: policy.static_cache,
    "states=host": lambda policy: policy.states == "host",
    "embedding=device": lambda policy: policy.embedding == Placement(device=1.0),
    "weights.device=0.25": lambda policy: policy.weights.device == 0.25,
    "weights=host": lambda policy: policy.weights == Placement(host=1.0),
    'weights={"device": 0.5, "host": 0.5}': lambda policy: policy.weights == Placement(0.5, 0.5),
    "weights=device:0.5,host:0.5": lambda policy: policy.weights == Placement(0.5, 0.5),
    "weights.disk=0.25": lambda policy: policy.weights.disk == 0.25,
    "cache=kv@host,act@host": lambda policy: set(policy.cache) <= {"kv@host", "act@host"},
    "cache.kv@device=0": lambda policy: "kv@device" not in policy.cache_entries,
    "cache=kv@host:0.5,act@host:0.5": lambda policy: dict(policy.cache) == {"kv@host": 0.5, "act@host": 0.5},
    "cache=both(kv@host,act@host)": lambda policy: policy.cache_entries == ("both(kv@host,act@host)",),
    "max_mini_batch_tokens=300": lambda policy: policy.max_mini_batch_tokens == 300,
    "max_batch=3": lambda policy: policy.max_batch == 3,
    "bits.kv=native": lambda policy: policy.bits.kv == "native",
}


@pytest.mark.parametrize(
    "kept",
    [
        ("attention=host", "max_batch=3"),
        ("attention=device", "schedule=row", "weight_order=natural", "bits.kv=native"),
        ("hidden=host", "packing=fifo", "split=paper", "max_mini_batch_tokens=300"),
        ("overlap=step", "embedding=device", "weights.device=0.25"),
        ("static_cache=true", "weights.disk=0.25"),
        ("states=host", "weights=host", "cache.kv@device=0"),
        ('weights={"device": 0.5, "host": 0.5}', "cache=kv@host,act@host"),
        ("weights=device:0.5,host:0.5", "cache=kv@host:0.5,act@host:0.5"),
        ("cache=both(kv@host,act@host)",),
    ],
)
def test_kept_fields_are_kept(kept):
    policy = found(*kept).policy
    assert [text for text in kept if not HOLDS[text](policy)] == [], policy


def test_a_kept_field_is_kept_even_if_another_is_faster():
    """The kept policy is slower than the free choice, so keeping has an effect."""
    free, kept = found(), found("weights=host", "cache=act@host:1")
    assert kept.prediction["tokens_per_s"] < free.prediction["tokens_per_s"]


def test_the_rest_is_as_good_as_brute_force():
    """Cache and weights are kept; every batch, cut, schedule and place of hidden states is tried."""
    kept = ("cache=kv@host:0.5,act@host:0.5", "weights.device=0.5", "weights.disk=0", "attention=device")
    best = found(*kept)
    rates = []
    for schedule, hidden, tokens in product(("column", "row"), ("device", "host"), (256, 1024)):
        cache, weights = {"kv@host": 0.5, "act@host": 0.5}, Placement(0.5, 0.5)
        policy = Policy(cache=cache, weights=weights, schedule=schedule, hidden=hidden, max_mini_batch_tokens=tokens)
        rates += list(predict(PROBLEM, Candidates(policy, np.arange(1.0, 5.0), 60, 6)).tokens_per_s)
    assert best.prediction["tokens_per_s"] >= 0.999 * max(rates)


@pytest.mark.parametrize(
    "kept, words",
    [
        ("attention", "write FIELD=VALUE"),
        ("atention=host", "did you mean attention"),
        ("attention=cloud", "unknown value of --keep attention 'cloud'"),
        ('attention={"host": 0.5, "device": 0.5}', "write --keep cache="),
        ("bits.kv=4", "add --lossy"),
        ("bits.kv=3", "unknown value"),
        ("name=x", "names what it finds"),
        ("selection.method=none", "--selection"),
        ("version=1", "file format"),
        ("packing=best", "packing is 'best'"),
        ("weights.device=2", "a share is a number from 0 to 1"),
        ("weights.device=x", "a share is a number from 0 to 1"),
        ("weights.host=0.5", "say weights.device or weights.disk as well"),
        ("weights=device:0.5", "add up to 0.5"),
        ("weights=cloud", "write shares"),
        ("cache=kv@cloud", "unknown cache entry"),
        ("cache.act@host=0.3", "say where all of the tokens are"),
        ("max_batch=0", "max_batch is 0"),
        ("max_mini_batch_tokens=many", "max_mini_batch_tokens is 'many'"),
        ("embedding.cloud=1", "unknown tier"),
    ],
)
def test_fields_that_cannot_be_kept_are_refused_in_one_line(kept, words):
    with pytest.raises(InputError, match=words) as error:
        found(kept)
    assert "\n" not in str(error.value)


def test_the_host_does_not_attend_to_packed_entries():
    settings = SearchSettings(space=FULL)
    with_kept(settings, ["cache=attended(kv@host),kv@host"])
    with pytest.raises(InputError, match="native bits only"):
        with_kept(settings, ["bits.kv=4", "cache=attended(kv@host),kv@host"])


def test_a_field_is_kept_once():
    with pytest.raises(InputError, match="twice"):
        found("attention=host", "attention=device")


def test_a_seed_that_is_not_allowed_does_not_win():
    """A seed with weights elsewhere would be faster here."""
    seed = Policy("seed", Placement(device=1.0), cache={"kv@device": 1.0})
    settings = replace(LOOSE, space=PLAIN, seeds=(seed,))
    assert found("weights=host", settings=settings).policy.weights == Placement(host=1.0)
