"""Test policies: exact in JSON; unknown, contradictory and out-of-range fields are refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import example, given
from strategies import runnable_policies

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Placement, Policy, Selection

HALVES = Placement(device=0.5, host=0.25, disk=0.25)
#: Fields that no policy has which the executor runs.
ODD = Policy(
    "hybrid ½", HALVES, embedding=HALVES, cache={"kv@host": 1 / 3, "both(kv@disk,act@device)": 2 / 3}, hidden="disk",
    max_batch=10**6, selection=Selection("speculative", None, math.inf, 0.1, 1 / 3, 0.7, "lru", "disk", 9),
)  # fmt: skip


@example(ODD)
@example(Policy())
@example(Policy(max_batch=3, selection=Selection("heavy_hitter", budget=0.1, whole_layers=2)))
@given(runnable_policies())
def test_json_gives_the_very_same_policy_back(policy):
    text = policy.to_json()
    again = Policy.from_json(text)
    assert again == policy and '": Infinity' not in text
    changed = {name: value for name, value in policy.to_dict().items() if value != Policy().to_dict()[name]}
    assert Policy.from_dict(changed) == policy, "absent fields have their defaults"
    assert again.to_json() == text
    assert sum(policy.share(kind) for kind in ("kv", "act", "both", "tok")) == pytest.approx(1)
    assert set(policy.cache_entries) == {key for key, share in policy.cache.items() if share}


def test_shares_of_attention_divide_the_cache_on_the_host():
    divided = Policy(attention={"host": 0.25, "device": 0.75}, cache={"kv@host": 0.8, "act@host": 0.2})
    assert divided.attention == "device" and divided.host_attends
    assert dict(divided.cache) == pytest.approx({"act@host": 0.2, "attended(kv@host)": 0.2, "kv@host": 0.6})
    assert Policy(attention={"host": 1.0}) == Policy(attention="host")
    assert Policy(attention={"host": 0, "device": 1}) == Policy()


SPECULATIVE = dict(
    method="speculative", alpha=4, partial_ratio=0.3, max_fraction=0.2, pool=0.8, victim="lru", partial_keys="host"
)

REFUSED = [
    # unknown fields, at each level
    (dict(wieghts={}), "wieghts"),
    (dict(weights=dict(gpu=1)), "weights.gpu"),
    (dict(embedding=dict(gpu=1)), "embedding.gpu"),
    (dict(bits=dict(hidden=4)), "bits.hidden"),
    (dict(selection=dict(top_k=4)), "selection.top_k"),
    (dict(experts=dict(chunk=4)), "experts.chunk"),
    (dict(version=2), "version"),
    # values out of range
    (dict(weights=dict(device=0.5)), "weights"),
    (dict(weights=dict(device=1.5, host=-0.5)), "weights"),
    (dict(weights=dict(device="all")), "weights"),
    (dict(weights=dict(device=True)), "weights"),
    (dict(weights=[1, 0, 0]), "weights"),
    (dict(cache={}), "cache"),
    (dict(cache=["kv@host"]), "cache"),
    (dict(cache={"kv@host": 0.4, "act@host": 0.4}), "cache"),
    (dict(cache={"kv@gpu": 1}), "kv@gpu"),
    (dict(cache={"both(act@host,kv@host)": 1}), "both"),
    (dict(cache={"kv@host": float("nan")}), "kv@host"),
    (dict(bits=dict(kv=16)), "bits.kv"),
    (dict(hidden="gpu"), "hidden"),
    (dict(experts=dict(batch=-1)), "experts.batch"),
    (dict(experts=dict(batch=1), schedule="row"), "experts.batch"),
    (dict(schedule="zigzag"), "schedule"),
    (dict(packing="best"), "packing"),
    (dict(attention="cpu"), "attention"),
    (dict(weight_order="random"), "weight_order"),
    (dict(overlap="yes"), "overlap"),
    (dict(overlap=1), "overlap"),
    (dict(version=True), "version"),
    (dict(bits=dict(kv=8.0)), "bits.kv"),
    (dict(name=5), "name"),
    (dict(hidden=["host"]), "hidden"),
    (dict(max_mini_batch_tokens=0), "max_mini_batch_tokens"),
    (dict(max_mini_batch_tokens=1.5), "max_mini_batch_tokens"),
    (dict(max_mini_batch_tokens=None), "max_mini_batch_tokens"),
    (dict(max_batch=0), "max_batch"),
    (dict(max_batch=True), "max_batch"),
    # contradictions
    (dict(attention="host", cache={"kv@device": 1}), "kv@device"),
    (dict(attention="host", cache={"kv@host": 0.5, "act@host": 0.5}), "act@host"),
    (dict(attention={"host": 0.5, "device": 0.6}), "attention"),
    (dict(attention={"host": 0.5, "disk": 0.5}), "disk"),
    (dict(attention={"host": 0.5, "device": 0.5}, cache={"kv@device": 1}), "kv@device"),
    (dict(attention="host", cache={"attended(kv@host)": 1}), "attended"),
    (dict(selection=dict(method="topk")), "selection.method"),
    (dict(selection=dict(method="none", budget=0.2)), "selection.budget"),
    (dict(selection=dict(method="heavy_hitter")), "selection.budget"),
    (dict(selection=dict(method="heavy_hitter", budget=0.2, alpha=4)), "selection.alpha"),
    (dict(selection=dict(method="heavy_hitter", budget=2)), "selection"),
    (dict(selection=dict(method="heavy_hitter", budget=0.2, whole_layers=-1)), "selection.whole_layers"),
    (dict(selection=dict(method="heavy_hitter", budget=0.2, whole_layers=True)), "selection.whole_layers"),
    (dict(selection=dict(method="heavy_hitter", budget=0.2, whole_layers=False)), "selection.whole_layers"),
    (dict(selection=dict(SPECULATIVE, victim="random")), "selection.victim"),
    (dict(selection=dict(SPECULATIVE, partial_keys="gpu")), "selection.partial_keys"),
    (dict(selection=dict(SPECULATIVE, alpha=-1)), "selection.alpha"),
    (dict(selection=dict(SPECULATIVE, alpha=float("nan"))), "selection.alpha"),
    (dict(selection=dict(SPECULATIVE, alpha="infinite")), "selection.alpha"),
    (dict(selection=dict(SPECULATIVE, pool_bytes=1)), "selection.pool_bytes"),
    (dict(selection=dict(SPECULATIVE, pool=None, pool_bytes=0)), "selection.pool_bytes"),
    (dict(selection=dict(SPECULATIVE, pool=None, pool_bytes=1e9)), "selection.pool_bytes"),
    (dict(selection=dict(SPECULATIVE, pool=None)), "selection.pool"),
    (dict(selection=dict(SPECULATIVE, whole_layers=0)), "selection.whole_layers"),
    (dict(selection=dict(SPECULATIVE, whole_layers=1.5)), "selection.whole_layers"),
    (dict(selection=dict(method="none", whole_layers=2)), "selection.whole_layers"),
    (dict(selection=dict(SPECULATIVE, expected_fraction=1.5)), "selection"),
    (dict(selection=dict(method="none", expected_fraction=0.1)), "selection.expected_fraction"),
    (dict(selection=dict(SPECULATIVE, pool="half")), "selection"),
    *[
        (dict(selection={k: v for k, v in SPECULATIVE.items() if k != missing}), f"selection.{missing}")
        for missing in SPECULATIVE
        if missing != "method"
    ],
]


@pytest.mark.parametrize("fields, name", REFUSED)
def test_refused_by_name(fields, name):
    with pytest.raises(InputError) as error:
        Policy.from_json(json.dumps(fields))
    assert name in str(error.value)


@pytest.mark.parametrize(
    "text, name",
    [('{"schedule": "row", "schedule": "column"}', "schedule"), ('{"cache": {"kv@host": 1, "kv@host": 1}}', "kv@host")],
)
def test_a_field_given_twice_is_refused(text, name):
    with pytest.raises(InputError, match=f"{name}.* is given more than once"):
        Policy.from_json(text)


def test_json_that_is_no_policy_is_refused(tmp_path):
    for text in ("", "{", "[]", "3", "null"):
        with pytest.raises(InputError, match="policy"):
            Policy.from_json(text)
    with pytest.raises(InputError, match="none.json"):
        Policy.load(tmp_path / "none.json")
    for text in ("{}", '{"name": "mine", "version": 1}'):
        (tmp_path / "empty.json").write_text(text)
        with pytest.raises(InputError, match="empty.json: the policy is empty"):
            Policy.load(tmp_path / "empty.json")
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(InputError, match="latin.json"):
        Policy.load(tmp_path / "latin.json")


def test_a_policy_without_a_name_has_its_files(tmp_path):
    (tmp_path / "mine.json").write_text('{"cache": {"kv@host": 1.0}}')
    assert Policy.load(tmp_path / "mine.json") == Policy("mine", cache={"kv@host": 1.0})


def test_a_policy_is_a_frozen_key_whatever_the_order_of_its_entries():
    one = Policy(cache={"kv@host": 0.25, "act@device": 0.75})
    other = Policy(cache={"act@device": 0.75, "kv@host": 0.25})
    assert {one: "found"}[other] == "found" and one.cache == {"kv@host": 0.25, "act@device": 0.75}
    assert list(one.to_dict()["cache"]) == ["act@device", "kv@host"]
    assert hash(Policy(selection=Selection("heavy_hitter", budget=0.2))) != hash(Policy())
    with pytest.raises(FrozenInstanceError):
        one.schedule = "row"


def test_files_with_a_logical_overlap_are_still_read():
    for old, new in ((True, "full"), (False, "none"), ("step", "step")):
        assert Policy.from_dict({"overlap": old}).overlap == new
    with pytest.raises(InputError, match="full, step, none"):
        Policy(overlap=True)
