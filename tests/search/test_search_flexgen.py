"""Test FlexGen's placement program against a grid by its formulas, the published search and our memory plan."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.policy import Placement
from flexhybrid.core.problem import NO_BUDGETS, Budgets, Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.papers.flexgen import (
    Block,
    BlockSetting,
    FlexGenOptions,
    FlexGenResult,
    PlacementSearch,
    Rates,
    flexgen_policy,
    make_block,
    run_seconds,
    solve,
    tokens_per_s,
)
from sim import catalogue
from sim.array_clock import predict
from sim.candidates import Candidates, candidates_of

GIB = 2**30
TOY = ModelShape("toy", "opt", 6, 512, 8, 8, 64, 2048, 1000, 2048)
MACHINE = Hardware(
    "toy", "cuda",
    {
        "compute": Line(1e-5, 2e-13, 1e-11), "attend": Line(1e-5, 2e-13, 2e-11), "h2d": Line(1e-5, 0, 2e-10),
        "d2h": Line(1e-5, 0, 3e-10), "host_compute": Line(2e-5, 1e-12, 5e-11), "disk_read": Line(1e-4, 0, 1e-9),
        "disk_write": Line(1e-4, 0, 2e-9),
    },
    device_memory=GIB, host_memory=2 * GIB, disk_memory=8 * GIB,
)  # fmt: skip
TOY_PROBLEM = Problem(shape=TOY, hardware=MACHINE)


def flexgen(shape: ModelShape, hardware: Hardware, workload: Workload, budgets=NO_BUDGETS, **options) -> FlexGenResult:
    problem = Problem(shape=shape, hardware=hardware, budgets=budgets)
    return flexgen_policy(problem, workload, FlexGenOptions(**options))


def grid(steps: int = 12) -> np.ndarray:
    """Return placements (wd, wh, wk, cd, ch, ck, hd, hh) in steps of 1/steps: [8, placements]."""
    thirds = [(a, b, steps - a - b) for a in range(steps + 1) for b in range(steps + 1 - a)]
    halves = [(a, steps - a) for a in range(steps + 1)]
    rows = [(*w, *c, *h) for w in thirds for c in thirds for h in halves]
    return np.array(rows, dtype=float).T / steps


def published(block: Block, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return seconds, and most bytes of each tier, of each placement by the published cost model: OPT, 2 bytes an
    element. With attention on the device, resident KV is charged like all KV, and the rest crosses the link."""
    wg, wc, wn, cg, cc, cn, hg, hc = x
    r, g, b, setting = block.rates, block.gpu_batch, block.batch, block.setting
    s, n, shape, host = setting.prompt_tokens, setting.gen_tokens, setting.problem.shape, setting.host_attention
    L, h, f, H = shape.num_layers, shape.hidden, shape.ffn, shape.num_heads
    w = 8 * h * h + 4 * h * f
    ctog = r.load_weights * w * (wc + wn) + r.load_hidden * 2 * s * h * b * hc
    gtoc = r.store_kv * 4 * (s + 1) * h * b * (cc + cn) + r.store_hidden * 2 * s * h * b * hc
    prefill = np.maximum(ctog + r.read_weights * w * wn, gtoc + r.write_kv * 4 * b * (s + 1) * h * cn)
    prefill = np.maximum(prefill, r.prefill_s)
    ctog = r.load_weights * w * (wc + wn) + r.load_hidden * 2 * h * b * hc
    comp = r.decode_s + (cg * r.attend_s + (cc + cn) * r.attend_host_s if host else r.attend_s)
    if not host:
        ctog = ctog + r.load_kv * 4 * b * (s + n / 2) * h * (cc + cn)
    dtoc = r.read_kv * 4 * b * (s + n / 2) * h * cn + r.read_weights * w * wn / 0.95
    longest = np.maximum(np.maximum(r.store_hidden * 2 * h * b * hc, r.write_kv * 4 * b * h * cn), dtoc)
    step = ctog + np.maximum(longest, comp)
    seen = cg if host else 1
    qkv, scores, values, out, up, down = 8 * h, 2 * h + 2 * H * s, 2 * h, 4 * h, 2 * f, 2 * h
    parts = g * s * (qkv + scores + values + out + up + down)
    scores, values = 2 * h + 2 * (s + n) * h + 2 * H * (s + n), 2 * (s + n) * h + 2 * h
    step_parts = g * (qkv + seen * (scores + values) + out + up + down)
    kv = 4 * (s + n) * h * b * L
    used = {
        "device": np.maximum(
            w * L * wg + 2 * s * h * b * hg + kv * cg + 2 * w * (1 - wg) + 2 * s * h * g * (1 - hg) + parts,
            w * L * wg + 2 * h * b * hg + kv * cg + 2 * w * (1 - wg) + 2 * h * g * (1 - hg) + 4 * g * (s + n) * h * seen
            + step_parts,
        ),
        "host": np.maximum(
            w * L * wc + 2 * s * h * b * hc + 4 * s * h * b * L * cc + w * (1 - wg) + 2 * s * h * g * (1 - hg),
            w * L * wc + 2 * h * b * hc + kv * cc + w * wn + 8 * (s + n) * h * g * cn
            + (2 * H * (s + n) * g + 2 * h * g if host else 0),
        ),
        "disk": w * L * wn + kv * cn,
    }  # fmt: skip
    return L * (prefill + (n - 1) * step), used


def blocks():
    for host_attention in (False, True):
        for gpu_batch, batch in ((1, 1), (4, 30), (16, 64)):
            setting = BlockSetting(TOY_PROBLEM, 200, 40, host_attention=host_attention, disk=True)
            yield make_block(setting, gpu_batch, batch)


@pytest.mark.parametrize("budgets_mib", [(40, 60, 4000), (150, 100, 4000), (90, 2000, 0), (4000, 60, 500)])
def test_no_placement_of_a_grid_is_faster(budgets_mib):
    budgets = {tier: size * 2**20 for tier, size in zip(("device", "host", "disk"), budgets_mib, strict=True)}
    placements = grid()
    solved = 0
    for block in blocks():
        seconds, used = published(block, placements)
        fits = np.all([used[tier] <= budget for tier, budget in budgets.items()], axis=0)
        shares = solve(block, budgets)
        if shares is None:
            assert not fits.any()
            continue
        solved += 1
        own, own_used = published(block, shares[:, None])
        assert own[0] == pytest.approx(run_seconds(block, shares), rel=1e-12)
        assert all(own_used[tier] <= budget * (1 + 1e-6) for tier, budget in budgets.items())
        if fits.any():
            assert own[0] <= seconds[fits].min() * (1 + 1e-4)
    assert solved >= 2


#: Rates in bytes/s and flops/s, and what the published search (0.1.8) answered with them, prompt 512, 32 tokens:
#: model, tiers' bytes, rates, GPU batch, GPU batches, tokens/s, and the device's share of the weights.
T4 = {
    "ctog": 12.89 * GIB, "gtoc_cache": 0.97 * GIB, "gtoc_hidden": 4.82 * GIB, "dtoc": 0.473 * GIB, "ctod": 0.746 * GIB,
    "mm_p": 21.24e12, "mm_g": 4.3e12, "bmm_p": 9.97e12, "bmm_g": 0.079e12, "cpu": 0.0123e12,
}  # fmt: skip
PUBLISHED = (
    ("opt-30b", (17179869184, 223338299392, 1500000000000), T4, 16, 11, 7.138358369215668, 0.16154984),
    ("opt-175b", (17179869184, 223338299392, 1500000000000), T4, 1, 401, 0.16841910516824188, 0.01840524),
    ("opt-30b", (25769803776, 947040288768, 0), T4, 64, 14, 8.321734654443539, 0.17089618),
)


def published_block(model: str, rates: dict, gpu_batch: int, batch: int) -> Block:
    """Return a block with the flat rates of the published model; its host is slower with small GPU batches."""
    shape, s, n = shape_by_name(model), 512, 32
    h, f, b = shape.hidden, shape.ffn, batch
    host = rates["cpu"] * max(0.1, 1 - 0.0328 * max(0.0, math.log2(64 / gpu_batch)))
    attended = 4 * b * (s + n / 2) * h
    return Block(
        BlockSetting(Problem(shape=shape), s, n, host_attention=True),
        gpu_batch,
        batch,
        Rates(
            load_weights=1 / rates["ctog"],
            load_kv=0.0,
            load_hidden=1 / rates["ctog"],
            store_kv=1 / rates["gtoc_cache"],
            store_hidden=1 / rates["gtoc_hidden"],
            read_weights=1 / rates["dtoc"],
            read_kv=1 / rates["dtoc"],
            write_kv=1 / rates["ctod"],
            prefill_s=b * (8 * s * h * h + 4 * s * h * f) / rates["mm_p"] + 4 * b * s * s * h / rates["bmm_p"],
            decode_s=b * (8 * h * h + 4 * h * f) / rates["mm_g"],
            attend_s=attended / rates["bmm_g"],
            attend_host_s=attended / host,
        ),
    )


@pytest.mark.parametrize("model, memories, rates, gpu_batch, number, expected, weights_device", PUBLISHED)
def test_the_published_search_finds_the_same(model, memories, rates, gpu_batch, number, expected, weights_device):
    budgets = {tier: 0.8 * size for tier, size in zip(("device", "host", "disk"), memories, strict=True)}
    search = PlacementSearch(lambda g, b: published_block(model, rates, g, b), budgets, cache_on_host=False)
    block, shares = max(search.of_any(None), key=lambda one: tokens_per_s(*one))
    assert (block.gpu_batch, block.num_gpu_batches) == (gpu_batch, number)
    assert tokens_per_s(block, shares) == pytest.approx(expected, rel=1e-6)
    assert shares[0] == pytest.approx(weights_device, abs=1e-5)
    assert len(search.solved) < 250  # it takes 566 to 2,345


def peak(result, machine: Hardware, shape: ModelShape, workload: Workload) -> dict[str, float]:
    asked = candidates_of(result.policy, workload)
    return predict(
        Problem(shape=shape, hardware=machine), replace(asked, batch=result.policy.max_batch), walk=False
    ).row()["peak_bytes"]


@pytest.mark.parametrize("model", ["opt-6.7b", "opt-30b"])
@pytest.mark.parametrize("host_attention", [False, True])
def test_the_papers_batch_on_their_machine(model, host_attention):
    shape, machine, workload = shape_by_name(model), catalogue.load("rtx4090"), Workload.uniform(128, 1920, 128)
    result = flexgen(shape, machine, workload, batch=128, host_attention=host_attention)
    policy = result.policy
    assert policy.max_batch == 128 and result.gpu_batch * (result.num_gpu_batches - 1) < 128
    assert result.gpu_batch * result.num_gpu_batches >= 128
    assert policy.max_mini_batch_tokens == result.gpu_batch * 2049
    assert (policy.schedule, policy.packing, policy.overlap) == ("column", "fifo", "step")
    assert policy.weight_order == "natural" and policy.bits.native
    assert policy.attention == ("host" if host_attention else "device")
    assert set(policy.cache) <= {"kv@device", "kv@host"} and min(policy.cache.values()) >= 1e-3
    bytes_of = peak(result, machine, shape, workload)
    assert bytes_of["device"] <= machine.device_memory and bytes_of["host"] <= machine.host_memory
    assert bytes_of["disk"] == 0
    if host_attention:
        without = flexgen(shape, machine, workload, batch=128)
        assert result.predicted_tokens_per_s > without.predicted_tokens_per_s  # its model: nothing hides the link


def test_the_plan_cuts_the_gpu_batches_that_were_chosen():
    workload = Workload.uniform(30, 100, 20)
    result = flexgen(TOY, MACHINE, workload, batch=30, gpu_batches=(7,))
    assert (result.gpu_batch, result.num_gpu_batches) == (6, 5)  # the even cut that no GPU batch exceeds
    wave = admit(Problem(shape=TOY), result.policy, workload)
    assert [len(group) for group in wave.mini_batches] == [6] * 5


def test_requests_are_padded_to_the_longest():
    mixed = Workload(np.array([50, 200, 10]), np.array([3, 8, 20]))
    found, longest = (flexgen(TOY, MACHINE, workload, batch=3) for workload in (mixed, Workload.uniform(3, 200, 20)))
    assert found == longest


def test_everything_stays_on_the_device_if_it_fits():
    """If compute takes longest, placements tie, and nothing has a reason to leave the device."""
    policy = flexgen(TOY, MACHINE, Workload.uniform(4, 100, 8), batch=4).policy
    assert policy.weights.device == 1 and policy.cache == {"kv@device": 1.0} and policy.hidden == "device"


TIGHT = replace(MACHINE, device_memory=500 * 2**20)
MANY = Workload.uniform(256, 200, 40)  # 720 MiB of keys and values


def test_host_attention_is_a_choice():
    """It is not chosen on a slow host, nor on one that cannot hold the whole cache."""

    def found(machine, host_attention=True):
        return flexgen(TOY, machine, MANY, batch=256, host_attention=host_attention, gpu_batches=(16, 32,)
        ).policy  # fmt: skip

    assert found(TIGHT).attention == "host"
    slow = replace(TIGHT, lines=TIGHT.lines | {"attend_host": Line(0, 1e-8, 1e-8)})
    assert found(slow).attention == "device" and found(slow) == found(slow, False)
    small = found(replace(TIGHT, host_memory=300 * 2**20))
    assert small.attention == "device" and small.cache["kv@disk"] > 0.1


def test_a_small_host_spills_to_the_disk():
    small = replace(TIGHT, host_memory=300 * 2**20)
    result = flexgen(TOY, small, MANY, batch=256, gpu_batches=(8, 16, 32, 64))
    assert result.policy.cache["kv@disk"] > 0.1
    bytes_of = peak(result, small, TOY, MANY)
    assert all(bytes_of[tier] <= getattr(small, f"{tier}_memory") for tier in bytes_of)
    roomy = flexgen(TOY, small, MANY, batch=256, gpu_batches=(8, 16, 32, 64), budgets=Budgets(host=4 * GIB))
    assert roomy.policy.weights.disk == 0 and "kv@disk" not in roomy.policy.cache
    assert roomy.predicted_tokens_per_s > result.predicted_tokens_per_s


def test_a_looser_account_is_made_to_fit_ours():
    """With all memory allowed, FlexGen fills the device and forgets the embedding and our buffers."""
    shape, workload = shape_by_name("opt-6.7b"), Workload.uniform(16, 1920, 128)
    machine = replace(catalogue.load("rtx4090"), device_memory=18 * GIB, device_reserve=0)
    result = flexgen(shape, machine, workload, batch=16, memory_share=1.0, gpu_batches=(2,))
    block = make_block(BlockSetting(Problem(shape=shape, hardware=machine), 1920, 128), 2, 16)
    shares = solve(block, {"device": 18 * GIB, "host": machine.host_memory, "disk": 0})
    assert result.lp_tokens_per_s == pytest.approx(tokens_per_s(block, shares))
    cache = {"kv@device": float(shares[3]), "kv@host": float(shares[4])}
    wanted = replace(result.policy, weights=Placement(*map(float, shares[:3])), cache=cache)
    asked = Candidates(wanted, 16, 1920, 128)
    assert predict(Problem(shape=shape, hardware=machine), asked, walk=False).peak_bytes["device"][0] > 18 * GIB
    assert 0.97 * 18 * GIB < peak(result, machine, shape, workload)["device"] <= 18 * GIB
    # keys and values leave it: they cross the link in the decode alone, weights in the prefill too
    assert result.policy.weights.device == pytest.approx(shares[0])
    assert 0 < result.policy.cache["kv@device"] < shares[3]
    assert result.predicted_tokens_per_s < result.lp_tokens_per_s
    # FlexGen's temporaries of 16 prompts are larger than ours: it has no answer any more, and nothing stays there
    crowded = replace(shape, vocab=1_500_000)
    policy = flexgen(crowded, machine, workload, batch=16, memory_share=1.0, gpu_batches=(16,)).policy
    assert policy.weights.device == 0 and policy.cache == {"kv@host": 1.0} and policy.hidden == "host"


def test_compressed_weights_and_cache():
    shape, machine, workload = shape_by_name("opt-30b"), catalogue.load("rtx4090"), Workload.uniform(128, 1920, 128)
    plain = flexgen(shape, machine, workload, batch=128)
    small = flexgen(shape, machine, workload, batch=128, compress=True)
    assert (small.policy.bits.weights, small.policy.bits.kv) == (4, 4)
    assert small.policy.weights.device > 2 * plain.policy.weights.device
    assert small.predicted_tokens_per_s > 2 * plain.predicted_tokens_per_s
    machine = catalogue.load("rtx4090", "server-1t")  # a host whose attention is faster than the link
    on_host = flexgen(shape, machine, workload, batch=128, compress=True, host_attention=True).policy
    assert (on_host.attention, on_host.bits.weights, on_host.bits.kv) == ("host", 4, "native")


def test_bad_input_is_one_line():
    workload = Workload.uniform(8, 200, 40)
    with pytest.raises(InputError, match="batch is 0"):
        flexgen(TOY, MACHINE, workload, batch=0)
    with pytest.raises(InputError, match="memory_share"):
        flexgen(TOY, MACHINE, workload, memory_share=1.5)
    with pytest.raises(InputError, match="gpu_batches"):
        flexgen(TOY, MACHINE, workload, gpu_batches=(0, 4))
    with pytest.raises(InputError, match="device memory"):
        flexgen(TOY, MACHINE, workload, budgets=Budgets(device=2**20))
    with pytest.raises(InputError, match="device memory.*6 need"):
        flexgen(TOY, MACHINE, Workload.uniform(6, 1500, 40), batch=6, gpu_batches=(6,), budgets=Budgets(device=2**28))
    with pytest.raises(InputError, match="host and disk memory"):
        flexgen(TOY, MACHINE, Workload.uniform(500, 1500, 40), batch=500, budgets=Budgets(host=2**28, disk=2**28))
    with pytest.raises(InputError, match="host memory"):
        flexgen(TOY, MACHINE, Workload.uniform(500, 1500, 40), batch=500, budgets=Budgets(disk=0))
    with pytest.raises(InputError, match="no line"):
        flexgen(TOY, replace(MACHINE, lines={"compute": Line()}), workload)
    with pytest.raises(InputError, match="device memory"):  # FlexGen's account forgets the embedding
        wide = replace(TOY, vocab=2_000_000)
        flexgen(wide, MACHINE, workload)


def test_a_disk_of_unknown_speed_is_no_disk():
    hardware, shape = catalogue.load("rtx4090"), shape_by_name("opt-30b")
    with pytest.raises(InputError, match="places nothing: .*memory"):
        flexgen(shape, hardware, Workload.uniform(8, 100, 8), budgets=Budgets(host=1 << 30, disk=1 << 40))
