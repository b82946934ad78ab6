"""FlexGen as a peer: its policy in our terms, and the process it runs in. Its own search is not run here: a stand-in
takes its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.peers import flexgen_search
from experiments.peers.flexgen_search import (
    CASES,
    PeerOptions,
    PeerUnavailable,
    constants_of,
    memories_of,
    percents,
    search,
    to_policy,
)
from flexhybrid.core.context.blocks import BlockEntries
from flexhybrid.core.context.packing import pack
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy

SHAPE = shape_by_name("opt-30b")
RECORD = Path(flexgen_search.__file__).parent.parent / "results" / "peers" / "flexgen-0.1.8.json"


def result(**changes) -> dict:
    """A search result made by hand: 3 GPU batches of 48 requests, all of the cache on the host."""
    return {
        "model": "opt-30b",
        "prompt_tokens": 512,
        "gen_tokens": 32,
        "gpu_batch_size": 48,
        "num_gpu_batches": 3,
        "weight_percent": [20.0, 70.0, 10.0],
        "cache_percent": [0.0, 100.0, 0.0],
        "hidden_percent": [0.0, 100.0, 0.0],
        "compress_weight": False,
        "compress_cache": False,
        "host_attention": True,
    } | changes


def peer_fields(whole: float, weights=(0.2, 0.7), cache=(0.0, 1.0), hidden=(0.0, 1.0)) -> dict:
    named = {"w": weights, "cache": cache, "act": hidden}
    return {
        f"{name}_{place}_percent": whole * share
        for name, shares in named.items()
        for place, share in zip(("gpu", "cpu"), shares, strict=True)
    }


# ---- the peer's policy in our terms ----------------------------------------------------------------------------------


def test_a_known_result_is_the_expected_policy():
    """543 tokens a request are ever cached: 34 blocks of 16, and its new token."""
    assert to_policy(result(), SHAPE) == Policy(
        "flexgen-0.1.8",
        Placement(device=0.2, host=0.7, disk=0.1),
        cache={"kv@host": 1.0},
        hidden="host",
        schedule="column",
        max_mini_batch_tokens=48 * (34 * 16 + 1),
        max_batch=144,
        attention="host",
    )


@pytest.mark.parametrize("gpu_batch, num_gpu_batches", [(1, 5), (16, 11), (48, 3)])
@pytest.mark.parametrize("cache", [[0.0, 100.0, 0.0], [10.0, 60.0, 30.0]])
def test_the_bound_cuts_equal_requests_into_the_peers_gpu_batches(gpu_batch, num_gpu_batches, cache):
    policy = to_policy(result(gpu_batch_size=gpu_batch, num_gpu_batches=num_gpu_batches, cache_percent=cache), SHAPE)
    tokens = np.full(policy.max_batch, 512 + 32 - 1)
    groups = pack(tokens, BlockEntries(policy.cache), policy.max_mini_batch_tokens, policy.packing)
    assert [len(group) for group in groups] == [gpu_batch] * num_gpu_batches


def test_a_divided_cache_keeps_its_shares_and_attends_on_the_device():
    policy = to_policy(result(cache_percent=[25.0, 50.0, 25.0]), SHAPE)
    assert policy.cache == {"kv@device": 0.25, "kv@host": 0.5, "kv@disk": 0.25}
    assert policy.attention == "device"


def test_attention_stays_on_the_device_where_the_peer_keeps_it_there():
    assert to_policy(result(host_attention=False), SHAPE).attention == "device"


@pytest.mark.parametrize("percent, tier", [([70.0, 30.0, 0.0], "device"), ([30.0, 70.0, 0.0], "host")])
def test_hidden_states_go_where_more_of_them_are(percent, tier):
    assert to_policy(result(hidden_percent=percent), SHAPE).hidden == tier


def test_compression_is_four_bits():
    policy = to_policy(result(compress_weight=True, compress_cache=True), SHAPE)
    assert policy.bits == Bits(weights=4, kv=4, act="native")


def test_a_solvers_dust_is_swept_away():
    """Without it a cache of one tier would be one of two, and host attention refused."""
    policy = to_policy(result(cache_percent=[0.0, 100.00002, -2e-5], weight_percent=[3e-5, 99.99997, 0.0]), SHAPE)
    assert policy.cache == {"kv@host": 1.0} and policy.attention == "host"
    assert policy.weights == Placement(host=1.0)


@pytest.mark.parametrize("wrong", [{"model": "opt-13b"}, {"prompt_tokens": 2040}])
def test_a_result_of_another_model_or_beyond_its_positions_is_refused(wrong):
    with pytest.raises(InputError):
        to_policy(result(**wrong), SHAPE)


@pytest.mark.parametrize("whole", [1.0, 100.0])
def test_shares_that_the_peer_calls_percent_are_told_from_percent(whole):
    assert percents(peer_fields(whole)) == {
        "weight_percent": [20.0, 70.0, 10.0],
        "cache_percent": [0.0, 100.0, 0.0],
        "hidden_percent": [0.0, 100.0, 0.0],
    }


def test_one_percent_on_the_device_is_not_taken_for_all_of_it():
    """Weights of 1 and 99 in true percent: only the hidden states' sum tells the unit."""
    assert percents(peer_fields(100.0, weights=(0.01, 0.99)))["weight_percent"] == [1.0, 99.0, 0.0]


def test_percent_of_neither_unit_are_refused():
    with pytest.raises(InputError, match="add up to 50"):
        percents(peer_fields(100.0, hidden=(0.0, 0.5)))


# ---- rates of our hardware in the peer's terms -----------------------------------------------------------------------


MACHINE = Hardware(
    "by hand",
    "cuda",
    {
        "compute": Line(s_per_flop=1e-14, s_per_byte=1e-12),
        "attend": Line(s_per_byte=2e-12),
        "attend_prefill": Line(s_per_flop=4e-14),
        "attend_host": Line(s_per_byte=5e-11),
        "h2d": Line(s_per_byte=4e-11),
        "d2h": Line(s_per_byte=8e-11),
    },
    device_memory=2**34,
    host_memory=2**38,
)


def test_the_peers_terms_take_our_lines_seconds():
    rates = constants_of(MACHINE, SHAPE, 512, 32)
    assert rates["ctog_bdw"] == pytest.approx(25e9)
    assert rates["gtoc_bdw_cache"] == rates["gtoc_bdw_hidden"] == pytest.approx(12.5e9)
    # Decode attention in two bytes: one operation for each byte of keys and values that is read.
    assert rates["bmm_flops_g"] == pytest.approx(0.5e12)
    assert rates["cpu_flops"] == pytest.approx(20e9)
    # The peer counts the whole square of the prompt, our line the half below the diagonal.
    assert rates["bmm_flops_p"] == pytest.approx(2 * 512 / 513 / 4e-14)
    # 64 rows share one read of the weights, a byte for 64 operations, and read and write a few rows themselves.
    assert rates["mm_flops_g"] == pytest.approx(64 / (64 * 1e-14 + 1e-12), rel=0.02)
    assert rates["mm_flops_p"] == pytest.approx(1e14, rel=0.05)
    assert not {"dtoc_bdw", "ctod_bdw_g"} & set(rates)  # no disk on record: the peer's own rates stay


def test_a_disk_on_record_replaces_the_peers():
    disk = {"disk_read": Line(s_per_byte=1 / 3e9), "disk_write": Line(s_per_byte=1 / 2e9)}
    rates = constants_of(replace(MACHINE, lines=MACHINE.lines | disk), SHAPE, 512, 32)
    assert rates["dtoc_bdw"] == pytest.approx(3e9)
    assert rates["ctod_bdw_g"] == rates["ctod_bdw_cache_p"] == rates["ctod_bdw_hidden_p"] == pytest.approx(2e9)


# ---- the process it runs in ------------------------------------------------------------------------------------------

STAND_IN = """
import dataclasses

alpha_g = alpha_c = alpha_n = 0.8

class pulp:
    __version__ = "0"
    class PULP_CBC_CMD:
        def __init__(self, msg): pass
        def available(self): return {cbc}
    @staticmethod
    def HiGHS(msg): return "highs"

@dataclasses.dataclass
class CostModelConfig:
    s: int = 1
    n: int = 1
    l: int = 1
    h1: int = 1
    h2: int = 1
    nh: int = 1
    gmem: int = 1
    cmem: int = 1
    nmem: int = 1
    ctog_bdw: float = 7.0
    gtoc_bdw_cache: float = 7.0
    gtoc_bdw_hidden: float = 7.0
    mm_flops_p: float = 7.0
    mm_flops_g: float = 7.0
    bmm_flops_p: float = 7.0
    bmm_flops_g: float = 7.0
    cpu_flops: float = 7.0

@dataclasses.dataclass
class Policy:
    gpu_batch_size: int = 4
    num_gpu_batches: int = 2
    w_gpu_percent: float = 0.25
    w_cpu_percent: float = 0.75
    cache_gpu_percent: float = 0.0
    cache_cpu_percent: float = 1.0
    act_gpu_percent: float = 0.0
    act_cpu_percent: float = 1.0
    cpu_cache_compute: bool = True
    compress_cache: bool = False

def solve_lp(config, bls, gbs, compress_w=False, verbose=1):
    return 1, Policy(), (bls * alpha_g, 1.0, 2.0), (config.gmem, 3)

def solve(config, solve_lp, args):
    print("chatter on the way")
    assert args["percent"] is None and args["compress_w"] is False
    for nb in (1, 2, 3):
        solve_lp(config, 4 * nb, 4)
    return {found}, 8.0
"""


def stand_in(folder: Path, found: str = "Policy()", cbc: bool = True) -> Path:
    """A peer's folder with a cost model of a dozen lines in the real one's shape."""
    file = folder / "experimental" / "cost_model.py"
    file.parent.mkdir()
    file.write_text(STAND_IN.replace("{found}", found).replace("{cbc}", str(cbc)), encoding="utf-8")
    return folder


@pytest.fixture
def machine(tmp_path) -> str:
    """A hardware file's name."""
    MACHINE.save(tmp_path / "machine.json")
    return str(tmp_path / "machine.json")


def test_the_peer_gets_this_machine_and_its_answer_comes_back(tmp_path, machine):
    found = search("opt-30b", machine, options=PeerOptions(stand_in(tmp_path), repeats=2))
    config = found["config"]
    assert (config["s"], config["n"], config["l"], config["h1"], config["h2"], config["nh"]) == (
        512, 32, 48, 7168, 28672, 56,
    )  # fmt: skip
    assert (config["gmem"], config["cmem"], config["nmem"]) == (2**34, 2**38, 0)
    assert config["ctog_bdw"] == pytest.approx(25e9)
    assert found["num_lps"] == 3 and len(found["search_s_samples"]) == 2
    assert found["solver"].startswith("CBC") and found["alpha"] == [0.8] * 3
    assert found["predicted_tokens_per_s"] == pytest.approx(8 * 0.8)
    assert found["hardware"] == "by hand"
    assert found["weight_percent"] == [25.0, 75.0, 0.0] and found["host_attention"]
    policy = to_policy(found, SHAPE)
    assert policy.max_batch == 8 and policy.weights == Placement(device=0.25, host=0.75)


def test_memories_alpha_and_the_peers_own_rates_can_be_asked_for(tmp_path, machine):
    found = search(
        "opt-30b",
        machine,
        options=PeerOptions(stand_in(tmp_path, cbc=False), ("20GiB", None, "1TB"), constants="peer", alpha=1.0),
    )
    assert found["memory_bytes"] == {"device": 20 * 2**30, "host": 2**38, "disk": 10**12}
    assert found["config"]["ctog_bdw"] == 7.0 and found["alpha"] == [1.0] * 3
    assert found["solver"].startswith("HiGHS in place of CBC")


def test_zero_takes_a_disk_away():
    with_disk = replace(MACHINE, disk_memory=10**12)
    assert memories_of(with_disk, (None, None, None))["disk"] == 10**12
    assert memories_of(with_disk, (None, None, "0"))["disk"] == 0


def test_a_search_without_a_policy_names_the_memories(tmp_path, machine):
    with pytest.raises(InputError, match="no policy for opt-30b with 512.32 tokens in device 16.00 GiB"):
        search("opt-30b", machine, options=PeerOptions(stand_in(tmp_path, found="None")))


def test_a_machine_without_a_size_on_record_asks_for_it():
    with pytest.raises(InputError, match="no host memory on record: give --host-memory"):
        memories_of(replace(MACHINE, host_memory=None), (None, None, None))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"model": "opt-31b"}, "opt-31b"),
        ({"hardware": "t5"}, "unknown hardware 't5'"),
        ({"model": "llama-2-7b"}, "OPT.s: multi-head"),
        ({"options": {"constants": "guessed"}}, "guessed"),
        ({"options": {"alpha": 0.0}}, "alpha"),
        ({"gen_tokens": 1}, "generation 1"),
        ({"options": {"memories": ("lots", None, None)}}, "lots"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, machine, wrong, words):
    with pytest.raises(InputError, match=words) as error:
        options = PeerOptions(stand_in(tmp_path), **wrong.pop("options", {}))
        search(**{"model": "opt-30b", "hardware": machine} | wrong, options=options)
    assert "\n" not in str(error.value) and not isinstance(error.value, PeerUnavailable)


def test_a_peer_that_is_not_there_ends_with_status_1_and_says_how_to_get_it(tmp_path, capsys):
    assert flexgen_search.main(["--peer", str(tmp_path / "nowhere")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "nowhere" in said and "pip install --no-deps" in said and "flexgen==0.1.8" in said


def test_a_peer_without_its_own_imports_says_which(tmp_path, machine, capsys):
    folder = stand_in(tmp_path)
    (folder / "experimental" / "cost_model.py").write_text("import attr_that_is_not_there\n", encoding="utf-8")
    assert flexgen_search.main(["--peer", str(folder), "--hardware", machine]) == 1
    said = capsys.readouterr().err
    assert "attr_that_is_not_there" in said and "pip install" in said and "Traceback" not in said


def test_a_peer_that_fails_is_one_line_with_status_2(tmp_path, machine, capsys):
    folder = stand_in(tmp_path, found="1 / 0")
    assert flexgen_search.main(["--peer", str(folder), "--hardware", machine]) == 2
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and said.count("\n") == 1


def test_main_writes_the_result_with_its_command(tmp_path, machine):
    out = tmp_path / "out.json"
    folder = stand_in(tmp_path)
    arguments = ["--peer", str(folder), "--hardware", machine, "--out", str(out), "--machine", "here"]
    assert flexgen_search.main(arguments) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["machine"] == "here" and str(folder) in written["command"]
    (run,) = written["runs"]
    assert Policy.from_dict(run["policy"]) == to_policy(run, SHAPE)


# ---- what is on record -----------------------------------------------------------------------------------------------


def test_the_record_holds_every_case_and_its_policies_follow_from_its_results():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [(run["model"], run["hardware"], run["constants"]) for run in record["runs"]] == list(CASES)
    for run in record["runs"]:
        assert run["peer_version"] == "0.1.8" and run["search_s"] > 0 and run["num_lps"] > 1
        assert percents(run["peer_policy"]) == {key: run[key] for key in percents(run["peer_policy"])}
        assert to_policy(run, shape_by_name(run["model"])) == Policy.from_dict(run["policy"])
        assert run["device_peak_bytes"][0] <= run["alpha"][0] * run["memory_bytes"]["device"] * (1 + 1e-6)
