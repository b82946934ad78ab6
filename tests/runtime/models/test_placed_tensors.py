"""Test layers that are modules, placed tensor by tensor: the printed, priced and planned share is what is loaded."""

from dataclasses import replace

import pytest
from runs import run_wave
from tiny_models import save_tiny
from toy_machine import MIB, SHAPE, machine

from flexhybrid.core.memory import kept_shares
from flexhybrid.core.model.layers import LayerTensor, ModuleLayers
from flexhybrid.core.model.layout import kind_layouts
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.run.forecast import describe as describe_run
from flexhybrid.jobs.simulate import describe
from flexhybrid.runtime.storage.loader import Checkpoint
from policy_search.search import SearchSettings, search
from policy_search.search_problem import LOSSLESS, PLAIN
from sim.simulate import simulate

pytest.importorskip("greenlet")
H = SHAPE.hidden
LAYER = (
    LayerTensor("norm", (H,), True),
    LayerTensor("k", (H // 2, H), True, kv_gen=True),
    LayerTensor("q", (2 * H, H), True),
    LayerTensor("o", (H, 2 * H), False),
    LayerTensor("router", (8, H), False),
    LayerTensor("gate_up", (8, 512, H), False, experts=True),
    LayerTensor("down", (8, H, 256), False, experts=True),
)
EXPERTS = replace(SHAPE, num_layers=6, modules=ModuleLayers("none", (LAYER,), (0,) * 6, SHAPE.vocab * H, 0.25))
PROMPTS = [[5, 9, 33, 2, 17], [4, 8]]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma2", "glm4_moe"])
def test_the_reported_share_is_what_is_loaded(tmp_path, model_type):
    save_tiny(tmp_path, model_type)
    checkpoint = Checkpoint(tmp_path)
    problem = Problem(shape=checkpoint.shape, dtype="float32", hardware=machine(), budgets=Budgets(disk=1 << 30))
    total = sum(
        tensor.elements * 4
        for kind in checkpoint.shape.modules.kind_of
        for tensor in checkpoint.shape.modules.kinds[kind]
    )
    for asked, disk in ((0.0, 0.0), (0.3, 0.0), (0.5, 0.25), (0.9, 0.0), (1.0, 0.0)):
        policy = Policy(weights=Placement(asked, 1 - asked - disk, disk), cache={"kv@host": 1.0})
        kept = kept_shares(problem, policy)
        result = run_wave(checkpoint, policy, PROMPTS, 3, disk_dir=tmp_path)
        moved = {
            verb: sum(t.work.link_bytes for t, _, _ in result.trace if t.verb == verb and t.iteration == 2)
            for verb in ("load_weights", "read_weights")
        }
        assert moved["load_weights"] == pytest.approx((1 - kept["device"]) * total, rel=2e-3)
        assert moved["read_weights"] == pytest.approx(kept["disk"] * total, rel=2e-3)
        assert kept["device"] <= asked + 1e-6 and sum(kept.values()) == pytest.approx(1.0)
        run = simulate(problem, policy, 2, 5, 4)
        assert run.traffic_bytes["h2d"].get("weights", 0.0) == pytest.approx(4 * (1 - kept["device"]) * total, rel=2e-3)
        said = f"device {kept['device']:.1%}, " if 0 < kept["device"] < 1 else "weights "
        assert said in describe(run) and f"{kept['host']:.0%} host" in describe_run(policy, problem) + "0% host"
        assert ("asked" in describe(run)) == (abs(kept["device"] - asked) > 1e-3)


@pytest.mark.parametrize("device, space", [(24, PLAIN), (38, LOSSLESS)])
def test_a_free_search_is_not_beaten_by_one_with_a_given_share(device, space):
    problem = Problem(shape=EXPERTS, dtype="float16", hardware=machine(0.1), budgets=Budgets(device * MIB, 400 * MIB))
    settings = SearchSettings(max_batch=16, space=space, margin=0.0, mini_batch_tokens=(256, 2048))
    workload = Workload.uniform(16, 100, 12)
    best = search(problem, workload, settings)
    (layout,) = kind_layouts(EXPERTS, 2)
    for share in (0.25, *(cut / layout.total_bytes for cut in layout.cuts[2::2])):
        try:
            kept = search(problem, workload, replace(settings, weights_device=share))
        except Exception as error:
            assert "no policy fits" in str(error)
            continue
        assert best.prediction["tokens_per_s"] >= 0.998 * kept.prediction["tokens_per_s"], share
