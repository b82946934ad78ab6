"""Test the cluster simulation against queueing theory, a one-line simulation and results by hand; its commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from oracles.queueing import md1_latency_s, mmc_latency_s

from flexhybrid import cli
from flexhybrid.cascade.cluster import simulation as cluster
from flexhybrid.cascade.cluster.arrivals import poisson, read_trace
from flexhybrid.cascade.cluster.deployment import deploy, place
from flexhybrid.cascade.cluster.profiles import flow_of, offloaded_lines, read_profiles
from flexhybrid.cascade.cluster.served import BatchLine, Flow, ServedModel, chain, direct, even_cluster
from flexhybrid.cascade.cluster.simulation import PowerModel
from flexhybrid.cascade.placement.search import plan
from flexhybrid.cascade.routes import Cascade, CascadeModel, Expected, Skip
from flexhybrid.core.errors import InputError
from sim import catalogue

POWER = PowerModel(10.0, 70.0, "of a test")


def model(name: str, per_request: float, at_zero: float = 0.0, **more) -> ServedModel:
    return ServedModel(name, BatchLine(at_zero, per_request), BatchLine(1.0, 0.0), **more)


def machines(gpus: int):
    return even_cluster(gpus, 1, 2**30, 10.0, 1.0)


def station(servers: int, seconds: float):
    """Place one model with a replica on each of several GPUs."""
    return place((model("m", seconds),), chain((1.0,)), machines(servers), (tuple((g,) for g in range(servers)),))


@pytest.mark.parametrize("servers, rho, service", [(1, 0.6, "exponential"), (5, 0.8, "exponential"), (1, 0.7, "fixed")])
def test_mean_latencies_agree_with_queueing_theory(servers, rho, service):
    rate = rho * servers / 0.01
    found = cluster.simulate(station(servers, 0.01), poisson(rate, 100_000, 3), POWER, service=service)
    theory = mmc_latency_s(rate, 0.01, servers) if service == "exponential" else md1_latency_s(rate, 0.01)
    assert found.mean_latency_s == pytest.approx(theory, rel=0.02)
    assert found.busy.mean() == pytest.approx(rho, rel=0.01)


def test_closed_forms_by_hand():
    assert mmc_latency_s(0.5, 1.0, 1) == pytest.approx(1 / (1 - 0.5))  # M/M/1
    assert mmc_latency_s(1.0, 1.0, 2) == pytest.approx(4 / 3)  # 1/(1 - rho²) of a service
    assert md1_latency_s(0.5, 1.0) == pytest.approx(1.5)
    with pytest.raises(InputError, match="rho >= 1"):
        mmc_latency_s(2.0, 1.0, 2)


def test_one_server_of_fixed_service_is_lindleys_recursion():
    arrivals, done, expected = poisson(80.0, 5000, 1), 0.0, []
    for at in arrivals:
        done = max(done, at) + 0.01
        expected.append(done - at)
    found = cluster.simulate(station(1, 0.01), arrivals, POWER)
    np.testing.assert_allclose(found.latency_s, expected, rtol=1e-9)


def test_a_cascade_by_hand():
    """Two models on one GPU, batches of two, and a network hop: all times and joules are computed by hand."""
    one = place(
        (model("a", 1.0, 1.0, output_bytes=1e9, max_batch=2), model("b", 4.0)), Flow((1.0, 0.0), ((0.0, 1.0), (0, 0))),
        machines(2), (((0,),), ((1,),)),
    )  # fmt: skip
    found = cluster.simulate(one, np.array([0.0, 0.5, 0.5]), POWER)
    # a: [0, 2) the first alone, [2, 5) the two others; hop 1 s; b: [3, 7), [7, 11), [11, 15)
    np.testing.assert_allclose(found.latency_s, [7.0, 10.5, 14.5])
    assert found.span_s == 15.0 and found.mean_batch == {"a": 1.5, "b": 1.0} and found.answered == {"a": 0.0, "b": 1.0}
    assert found.joules_per_request == pytest.approx((2 * 15 * 10 + 60 * (5 + 12)) / 3)
    assert found.idle_joules_per_request == pytest.approx(100.0)


def test_partitions_form_a_pipeline_and_share_their_gpus_in_turn():
    whole = model("m", 2.0, hidden_bytes=1e9, max_partitions=2)
    one = place((whole,), chain((1.0,)), machines(2), (((0, 1),),))
    found = cluster.simulate(one, np.zeros(3), POWER)
    # partition 1: [0, 1), [1, 2), [2, 3); a second between; partition 2: [2, 3), [3, 4), [4, 5)
    np.testing.assert_allclose(found.latency_s, [3.0, 4.0, 5.0])
    shared = place((whole,), chain((1.0,)), machines(1), (((0, 0),),))
    np.testing.assert_allclose(sorted(cluster.simulate(shared, np.zeros(2), POWER).latency_s), [3.0, 4.0])


def test_a_batch_waits_until_it_is_full_or_its_time_is_up():
    one = place((model("m", 0.0, 1.0, max_batch=3),), chain((1.0,)), machines(1), (((0,),),))
    found = cluster.simulate(one, np.array([0.0, 0.2, 5.0, 5.1, 5.2]), POWER, batch_wait_s=0.5)
    np.testing.assert_allclose(found.latency_s, [1.5, 1.3, 1.2, 1.1, 1.0])


def test_shares_replicas_and_work_add_up():
    models = tuple(model(name, s, max_batch=4) for name, s in (("a", 0.001), ("b", 0.004), ("c", 0.02)))
    flow = direct((0.6, 0.3, 0.1))
    found_plan = plan(models, flow, machines(4), 120.0, batch=8, time_limit=3)
    deployment = deploy(found_plan, 1e-3)
    found = cluster.simulate(deployment, poisson(120.0, 20_000), POWER)
    assert list(found.answered.values()) == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
    work = 0.001 + 0.3 * 0.004 + 0.1 * 0.02  # lines through the origin: seconds a request do not depend on batches
    assert found.busy.sum() * found.span_s / found.num_requests == pytest.approx(work, rel=0.02)
    assert deployment.capacity() == pytest.approx(120.0 / deployment.rho(120.0))
    again = cluster.simulate(deployment, poisson(120.0, 20_000), POWER)
    np.testing.assert_array_equal(found.latency_s, again.latency_s)


def test_rho_spreads_models_over_their_replicas_as_well_as_can_be():
    # a on GPUs 0 and 1, b on 1 alone: all of a moves to 0 until both are level
    one = place((model("a", 0.1), model("b", 0.1)), chain((0.5, 0.5)), machines(2), (((0,), (1,)), ((1,),)))
    assert one.rho(10.0) == pytest.approx((1.0 + 0.5) / 2)
    cluster.check_stable(one, 13.0)
    with pytest.raises(InputError, match="unstable: .* rho = 1.05 >= 1"):
        cluster.check_stable(one, 14.0)


@pytest.mark.parametrize(
    "text, says",
    [
        ("arrival_s\n0.1\n0.2\nx\n", "row 4: 'x' is not a number"),
        ("arrival_s\n0.1\n-1\n", "row 3: '-1' is not a number of seconds >= 0"),
        ("arrival_s\n0.5\n0.4\n", "row 3: 0.4 s comes after 0.5 s"),
        ("arrival_s,size\n0.1,2\n,3\n", "row 3: '' is not a number"),
        ("arrival_s\nnan\n", "row 2"),
        ("time\n0.1\n", "has no column 'arrival_s'"),
        ("arrival_s\n", "no request"),
        ("", "has no column"),
    ],
)
def test_a_broken_trace_names_its_row(tmp_path, text, says):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_a_trace_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,who\n0,a\n0.5,b\n0.5,c\n")
    np.testing.assert_array_equal(read_trace(path), [0, 0.5, 0.5])


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: poisson(-1.0, 10), "rate is -1.0"),
        (lambda: poisson(1.0, 0), "number of requests is 0"),
        (lambda: cluster.simulate(station(1, 1.0), np.array([1.0, 0.0]), POWER), "do not decrease"),
        (lambda: cluster.simulate(station(1, 1.0), np.zeros(1), POWER, batch_wait_s=-1), "batch_wait_s"),
        (lambda: cluster.simulate(station(1, 1.0), np.zeros(1), POWER, service="gamma"), "unknown service"),
        (lambda: place((model("a", 1.0), model("b", 1.0)), chain((0.5, 0.5)), machines(1), (((0,),), ())).rho(1.0),
         "b, which is on no GPU"),
        (lambda: PowerModel(20.0, 10.0, ""), "idle <= busy"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(make, says):
    with pytest.raises(InputError, match=says):
        make()


# ---- offloaded giants, cascade files, the commands


def test_an_offloaded_giant_is_priced_by_the_virtual_clock():
    seconds, memory = offloaded_lines("opt-1.3b", "t4", 64, 2, batches=(1, 2))
    shape_bytes = 2.6e9  # its weights in float16 cross the link for every token: never faster than that
    link = catalogue.load("t4").lines["h2d"].s_per_byte
    assert seconds(1) > 0 and seconds.per_request >= 0 and memory(1) < catalogue.load("t4").device_memory
    kept = offloaded_lines("opt-1.3b", "t4", 64, 2, "kv_only", (1, 2))[0]
    assert kept(1) == pytest.approx(2 * shape_bytes * link, rel=0.25)


def cascade_of(answered, visited, skips=()) -> Cascade:
    models = tuple(CascadeModel(name) for name in "abcd"[: len(answered)])
    return Cascade(models, (0.8,) * (len(models) - 1), skips, expected=Expected(tuple(answered), tuple(visited), 0.9))


def test_flows_of_cascades_have_their_expected_shares():
    assert flow_of(cascade_of((0.5, 0.3, 0.2), (1, 0.5, 0.2))) == chain((0.5, 0.3, 0.2))
    skipping = cascade_of((0.5, 0.2, 0.3), (1, 0.35, 0.3), ((Skip(0.2, 2),), ()))
    flow = flow_of(skipping)
    assert flow.visits == pytest.approx([1, 0.35, 0.3]) and flow.answered == pytest.approx([0.5, 0.2, 0.3])
    with pytest.raises(InputError, match="do not fit its skips"):
        flow_of(cascade_of((0.5, 0.2, 0.3), (1, 0.9, 0.3), ((Skip(0.2, 2),), ())))


@pytest.fixture
def files(tmp_path):
    cascade_of((0.7, 0.3), (1.0, 0.3)).save(tmp_path / "cascade.json")
    (tmp_path / "profiles.json").write_text(json.dumps({"version": 1, "models": {
        "a": {"seconds": [[1, 0.01], [8, 0.04]], "memory_bytes": [[1, 1e9], [8, 2e9]], "max_batch": 8},
        "b": {"seconds": [[1, 0.1], [8, 0.3]], "memory_bytes": [[1, 8e9], [8, 9e9]], "max_batch": 8},
    }}))  # fmt: skip
    return tmp_path


def command(folder, *more) -> list[str]:
    return ["cascade", *more[:1], str(folder / "cascade.json"), "--profiles", str(folder / "profiles.json"),
            "--hardware", "t4", *more[1:]]  # fmt: skip


def test_plan_and_simulate_from_the_command_line(files, capsys):
    assert cli.main(command(files, "plan", "--hosts", "2", "--rate", "10", "--out", str(files / "plan.json"))) == 0
    assert "2 GPUs" in capsys.readouterr().out
    written = json.loads((files / "plan.json").read_text())
    assert [row["replicas"] for row in written["models"]] == [1, 1] and written["gap"] == 0
    assert cli.main(command(files, "simulate", "--hosts", "2", "--requests", "500", "--json", "--batch", "8")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_requests"] == 500 and found["capacity"] > found["plan"]["rate"] and "datasheet" in found["power"]
    assert found["tail_latency_s"] >= found["mean_latency_s"] > 0.01 and "latency_s" not in found
    assert cli.main(command(files, "simulate", "--hosts", "2", "--requests", "500")) == 0
    assert "joules" not in (out := capsys.readouterr().out) and "J per request" in out and "(predicted: T4" in out


@pytest.mark.parametrize(
    "more, says",
    [
        (("plan", "--rate", "-1"), "rate is -1.0"),
        (("plan", "--rate", "1000"), "no placement for 1000 requests/s: host0-gpu0 lacks"),
        (("simulate", "--trace", "nothing.csv"), "cannot read nothing.csv"),
        (("simulate", "--idle-w", "3"), "give both --idle-w and --busy-w"),
        (("plan", "--hosts", "0"), "hosts: 0 is not a whole number"),
    ],
)
def test_wrong_commands_are_one_line(files, capsys, more, says):
    assert cli.main(command(files, *more)) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "record, says",
    [
        ({"seconds": [[1, 1]]}, "memory_bytes must be a list"),
        ({"seconds": [[1, -1]], "memory_bytes": [[1, 1]]}, "seconds: a profile must be"),
        ({"offloaded": {"model": "opt-30b"}}, "offloaded: hardware must be a name"),
        ({"offloaded": {}, "seconds": []}, "either offloaded"),
        ({"offloaded": {}, "max_partitions": 2}, "max_partitions must be 1"),
        ({"second": []}, "unknown field 'second'"),
        ({"seconds": [[1, 1], [2, 1]], "memory_bytes": [[1, 1], [2, 1]], "max_batch": 0}, "max_batch is 0"),
        ({"seconds": [[1, 1]], "memory_bytes": [[1, 1]], "max_batch": 4}, "seconds has one batch size"),
    ],
)
def test_a_broken_profile_names_model_and_field(tmp_path, record, says):
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps({"version": 1, "models": {"a": record}}))
    with pytest.raises(InputError, match="profiles.json, model a: .*" + says):
        read_profiles(path, ["a"])


def test_the_page_about_clusters_works_as_written(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/cascade-cluster.md").read_text(encoding="utf-8")
    for name, text in zip(("cascade", "profiles"), re.findall(r"```json\n(.*?)```", page, re.DOTALL), strict=True):
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"```sh\n\.venv/bin/flexhybrid (.*?)\n```", page)
    assert len(commands) == len(re.findall(r"```sh", page)) == 2
    for words in commands:
        assert cli.main(shlex.split(words)) == 0, words
    out = capsys.readouterr().out
    assert "replica in 2 partitions" in out and "2000 requests in" in out
    assert json.loads((tmp_path / "plan.json").read_text())["models"][2]["name"] == "giant"
