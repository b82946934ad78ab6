"""Test in random settings, by prediction, that systems are not slower than the baselines named in their papers."""

from dataclasses import replace

import promises
import pytest

from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits
from flexhybrid.core.problem import Problem
from policy_search import systems
from policy_search.systems import Setting, system
from sim import catalogue, presets


def test_kvpr_is_never_slower_than_loading_all_keys_and_values():
    asked = [promise for promise in promises.promises() if promise.judged or promise.decode]
    found = promises.kept(asked, 8, seed=10)
    for promise in asked:
        assert len(found[promise.name].excess) == 8
        if promise.judged:
            assert not found[promise.name].num_worse, (promise.name, found[promise.name].worst)
            assert min(found[promise.name].excess) < -0.05  # it is not all the same policy
    # The settings are hard enough for a rule to lose.
    assert found["decode by eq. 10 alone"].worst > 0.01
    assert found["decode by the pipeline rule alone"].worst < 0.005


@pytest.mark.parametrize("name", ["kvpr_column", "kvpr_column(split=pipeline)", "kvpr_row"])
@pytest.mark.parametrize("clock", ["closed", "virtual"])
def test_no_act_is_kept_if_nothing_is_recomputed(name, clock):
    """With grouped queries, ACT of a token is at least as large as its KV. A smaller ACT is kept."""
    hardware = replace(catalogue.load("rtx4090"), host_memory=None, device_memory=None)
    for model, entry in (("llama-3-8b", "kv@host"), ("opt-6.7b", "both(kv@host,act@host)")):
        setting = Setting(Problem(shape=shape_by_name(model), hardware=hardware), 32, 1000, 4)
        policy = system(name, setting).policy
        assert dict(policy.cache) == {entry: 1.0}
        run = systems.run_system(name, setting, clock)
        assert ("act" in run.traffic_bytes["h2d"]) == ("act" in entry)
        assert bool(run.recomputed_tokens) == ("act" in entry)


def test_four_bit_keys_and_values_cost_less_than_act():
    hardware = replace(catalogue.load("rtx4090"), host_memory=None, device_memory=None)
    setting = Setting(Problem(shape=shape_by_name("opt-6.7b"), hardware=hardware), 32, 1000, 4)
    packed = replace(presets.kvpr_column(), bits=Bits(kv=4))
    assert dict(systems._kvpr(setting, packed, None).cache) == {"kv@host": 1.0}
