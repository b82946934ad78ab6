"""Test jobs that search again while they run: once, for a stated reason, with unchanged answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from runs import by_id, line, run
from test_local_machine import CPU, machine
from test_run import SHIPPED, requests

from flexhybrid import resolve, runner
from flexhybrid.core.hardware import Hardware, Line, load_hardware
from flexhybrid.core.model.shape import shape_from_config
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.trace import LineTimes
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.jobs.profile.job import model_profile_path
from flexhybrid.jobs.run import outlook as outlook_module
from flexhybrid.jobs.run import replanning
from flexhybrid.jobs.run.lines import JobLines
from flexhybrid.jobs.run.outlook import ChangeCosts, Outlook, change_costs
from flexhybrid.jobs.run.replanning import Replanner, Watch
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.storage.loader import Checkpoint
from sim.correction import TRIALS
from sim.cost import price as seconds_of
from sim.queue_clock import IterationCost, price_queue
from tests import toy_machine

MIX = {"kv@host": 0.5, "act@host": 0.5}


class AtOnce:
    """A thread that has ended when ``start`` returns."""

    def __init__(self, target, args, **_more):
        self.start = lambda: target(*args)

    def is_alive(self) -> bool:
        return False


@pytest.fixture
def replanned(tmp_path, monkeypatch) -> list[str]:
    """Set up a machine 100 times as slow as its profile, and a search that always finds a mix; return the reasons."""
    machine(slower=1e-3).save(tmp_path / "machine.json")
    monkeypatch.setattr(replanning, "WINDOW_S", 0.0)
    monkeypatch.setattr(replanning, "WINDOW_ITERATIONS", 1)
    monkeypatch.setattr(replanning, "Thread", AtOnce)

    def mixed(self, _problem, current, _waiting, _limit_s):
        policy = replace(current, name="other", cache=MIX, max_batch=4 - len(reasons))
        return policy, replace(self.run, seconds=0 * self.run.seconds)

    monkeypatch.setattr(replanning, "time", Seconds())
    monkeypatch.setattr(Replanner, "_best", mixed)
    reasons, made = [], Replanner.made
    monkeypatch.setattr(Replanner, "made", lambda self: reasons.append(self.change.reason) or made(self))
    return reasons


def auto(source, out, model, *more) -> int:
    known = ["--hardware", str(out.parent / "machine.json")]
    return run(source, out, model, *known, *more, policy="auto")


def answers(path):
    return {name: row["body"]["choices"] for name, row in by_id(path).items()}


@pytest.mark.parametrize("costs", [ChangeCosts(0.0, 0.0, 1e-9), ChangeCosts(0.0, 1e-9, 0.0)], ids=["drain", "restart"])
def test_a_measured_rate_that_leaves_the_prediction_changes_the_policy_once(
    tiny, tmp_path, capsys, monkeypatch, replanned, costs
):
    """Running requests either end before the change or begin again in the next batch, whichever costs less."""
    batches, watch = [], JobLines.watch
    monkeypatch.setattr(JobLines, "watch", lambda self, known: batches.append(watch(self, known)) or batches[-1])
    monkeypatch.setattr(replanning, "change_costs", lambda *_: costs)
    source = tmp_path / "in.jsonl"
    rows = (line(f"r{i}", prompt=[5 + i, 7], n=1 + i % 3, max_tokens=4 + i % 9, temperature=i % 2) for i in range(24))
    source.write_text("\n".join(rows))  # a change may come while some answers to a line are complete
    assert run(source, tmp_path / "plain.jsonl", tiny) == 0 and not replanned
    capsys.readouterr()
    assert auto(source, tmp_path / "out.jsonl", tiny, "--max-num-seqs", "3") == 0
    assert replanned and "times as long as predicted" in replanned[0]
    assert f"replanned  {replanned[0]}; new policy other: " in capsys.readouterr().out
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "plain.jsonl")
    restarted = [((batch.begun_in >= 0) & (batch.ended_in < 0)).sum() for batch in batches if batch]
    assert len(restarted) > 2 and any(restarted) == (costs.restart_s < costs.drain_s)


def job_of_loads(folder, task_s: float, ends: dict) -> Hardware:
    """Write forty requests that load all of their context, and the record of a machine that its link limits."""
    link, lines = (
        Line(task_s, 0.0, 3e-10),
        {"compute": Line(task_s, 1e-10, 1e-13), "host_compute": Line(1e-7, 0.0, 1e-10)},
    )
    known = replace(machine(), lines=lines | {"h2d": link, "d2h": link}, attends_in_place=False)
    known.save(folder / "machine.json")
    rows = [line(str(i), prompt=[5] * 30, temperature=2.0, **ends) for i in range(40)]
    (folder / "in.jsonl").write_text("\n".join(rows))
    return known


FIRST = Policy("first", Placement(device=1), cache={"kv@host": 1.0}, max_batch=1)


@pytest.mark.parametrize("early", [True, False], ids=["trial", "windows"])
def test_lines_that_take_longer_correct_the_record_and_the_search(tiny, tmp_path, monkeypatch, capsys, early):
    """The link takes three times as long as recorded. This is known after the six iterations of a trial, or else after
    three windows. The real search then finds a better policy. The tokens are those of an unchanged run."""
    known = job_of_loads(tmp_path, 1e-7, {"max_tokens": 9})
    true, add, seen, init = known.scaled({"h2d": 3.0}), LineTimes.add, [], Replanner.__init__

    def add_planted(self, task, _seconds):
        add(self, task, seconds_of(true, task.verb, task.resource, task.work))

    for place, name, value in (
        (runner, "settle_policy", lambda *_: FIRST),
        (LineTimes, "add", add_planted),
        (replanning, "TRIED_S", 0.0),
        (replanning, "TRIAL_SHARE", 1e9),
        (replanning, "WINDOW_S", 1e9 if early else 0.0),
        (replanning, "WINDOW_ITERATIONS", 1),
        (replanning, "MOST_SEARCHES", 1),
        (replanning, "Thread", AtOnce),
        (replanning, "time", Seconds()),
        (Outlook, "slower", lambda *_: 3.0),
        (CpuUse, "others_since", lambda *_: 0.0),
        (Replanner, "__init__", lambda self, *which: seen.append(self) or init(self, *which)),
    ):
        monkeypatch.setattr(place, name, value)
    own = model_profile_path(Checkpoint(tiny).shape, "float32", CPU)
    known.save(own)
    for out, *more in (("kept", "--no-replan"), ("out", *([] if early else ["--no-trials"]))):
        arguments = tmp_path / "in.jsonl", tmp_path / f"{out}.jsonl", tiny, "--device-memory", "2MiB", *more
        assert run(*arguments, policy="auto") == 0
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "kept.jsonl")
    (replanner,) = seen
    assert replanner.num_searches == replanner.num_changes == 1
    for key, found in replanner.hardware.lines.items():
        assert found.at(1e6, 1e6) == pytest.approx(true.line(key, RESOURCE_OF.get(key, key)).at(1e6, 1e6)), key
    assert replanner.llm.settled_policy.cache.get("kv@host", 0.0) < 1.0
    told = capsys.readouterr().out
    assert ("trials     load_kv takes 3.00 of the profile's time" in told) == early
    kept = load_hardware(own)
    assert (TRIALS in kept.notes) == early
    assert kept.line("load_kv", "h2d").s_per_byte == pytest.approx((3 if early else 1) * known.lines["h2d"].s_per_byte)
    reason = "after 6 iterations: load_kv takes 3.00" if early else "iterations took 3.00 times as long as predicted"
    assert reason in told.partition("replanned  ")[2]


def test_a_second_search_finds_a_policy_for_short_answers(tiny, tmp_path, monkeypatch):
    """Answers end after a few of forty tokens. The tokens are those of an unchanged run."""
    job_of_loads(tmp_path, 1e-4, {"max_tokens": 40, "stop_token_ids": list(range(3, 61, 3))})
    for place, name, value in (
        (runner, "settle_policy", lambda *_: FIRST),
        (replanning, "WINDOW_S", 0.0),
        (replanning, "WINDOW_ITERATIONS", 1),
        (replanning, "LEAST_ANSWERS", 1),
        (replanning, "MOST_CHANGES", 1),
        (replanning, "MOST_SEARCHES", 2),
        (replanning, "Thread", AtOnce),
        (replanning, "time", Seconds()),
        (Outlook, "slower", lambda *_: 1.0),
    ):
        monkeypatch.setattr(place, name, value)
    made, job_made = [], Replanner.made
    monkeypatch.setattr(Replanner, "made", lambda self: made.append(job_made(self)) or made[-1])
    for out, *more in (("kept", "--no-replan"), ("out",)):
        assert auto(tmp_path / "in.jsonl", tmp_path / f"{out}.jsonl", tiny, "--device-memory", "2MiB", *more) == 0
    (change,) = made
    assert "tokens on average" in change.reason and (change.policy.max_batch or 2) > 1
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "kept.jsonl")


def test_a_crash_after_a_change_loses_nothing(tiny, tmp_path, monkeypatch, replanned):
    source, between = requests(tmp_path / "in.jsonl", 24), JobLines.between_batches

    def crash(self):
        between(self)
        if replanned:
            raise RuntimeError("crashed")

    with monkeypatch.context() as broken:
        broken.setattr(JobLines, "between_batches", crash)
        with pytest.raises(RuntimeError, match="crashed"):
            auto(source, tmp_path / "out.jsonl", tiny, "--max-num-seqs", "3")
    written = len((tmp_path / "out.jsonl").read_bytes().splitlines())
    assert replanned and 0 < written < 24
    assert auto(source, tmp_path / "out.jsonl", tiny) == 0
    assert run(source, tmp_path / "plain.jsonl", tiny) == 0
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "plain.jsonl")


def test_a_named_policy_is_kept(tiny, tmp_path, replanned):
    assert run(requests(tmp_path / "in.jsonl", 24), tmp_path / "out.jsonl", tiny, "--max-num-seqs", "3") == 0
    assert not replanned


class Seconds:
    """A clock for the iterations of an outlook, instead of the module ``time``."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def watched(monkeypatch):
    """Return a function that runs iterations with the given seconds (4 s are predicted) and returns the reasons."""
    clock = Seconds()
    monkeypatch.setattr(outlook_module, "time", clock)

    def watch(seconds, answer_tokens=64) -> tuple[Watch, list[str]]:
        pace = IterationCost({"h2d": np.array([4.0, *[0] * 9])}, 1, (1.0, 1.0))
        outlook, watch, running, said = Outlook(pace, Workload.uniform(4000, 9, 64)), Watch(), {}, []
        waiting = iter(range(4000))
        for taken in seconds:
            while len(running) < 4:
                running[next(waiting)] = 0
                outlook.begin(max(running))
            clock.now += taken
            for request in list(running):
                running[request] += 1
                if running[request] == answer_tokens:
                    outlook.end(request, running.pop(request))
            outlook.advance()
            said += [reason] if (reason := watch.look(outlook)) else []
        return watch, said

    return watch


@pytest.mark.parametrize("times", [1.3, 0.7])
def test_a_lasting_difference_from_the_prediction_is_a_reason(watched, times):
    watch, said = watched([4.0 * times] * 80)
    assert watch.slower == pytest.approx([times] * 3) and said
    assert said[0] == f"iterations took {times:.2f} times as long as predicted"


def test_noise_a_start_and_bursts_are_no_reason(watched):
    """Iterations vary by 50 %; the first ones are slow; or two of every four windows are slow."""
    noise = 4.0 * np.random.default_rng(3).uniform(0.5, 1.5, 400)
    assert watched(noise)[1] == []
    assert watched([40.0] * 16 + [4.0] * 300)[1] == []
    assert watched(([4.0] * 32 + [8.0] * 32) * 5)[1] == []


def test_other_answer_lengths_are_a_reason_once_enough_have_ended(watched):
    _, said = watched([4.0] * 400, answer_tokens=20)
    assert said and said[0] == "answers have 20 tokens on average, not 64"
    assert watched([4.0] * 300, answer_tokens=20)[1] == []  # 60 answers
    assert watched([4.0] * 400, answer_tokens=62)[1] == []


def test_without_times_of_lines_the_limiting_resource_is_slower():
    """A GPU reports no seconds of single lines."""
    llm = SimpleNamespace(problem=SimpleNamespace(hardware=toy_machine.machine()))
    replanner = Replanner(llm, SimpleNamespace(total_s=1.0, binding="h2d"))
    hardware, words = replanner._measured({}, 1.5)
    assert hardware == toy_machine.machine().scaled({"h2d": 1.5}) and words == "h2d takes 1.50 of the profile's time"


def test_what_a_change_costs_by_hand():
    """An iteration takes 2 s, and 0.1 s more per prompt token. Two running requests have 3 and 9 tokens left."""
    outlook = Outlook(PACE, Workload(np.array([5, 7, 4]), np.array([4, 10, 6])))
    outlook.begin(0)
    outlook.begin(1)
    outlook.advance()
    rest = outlook.rest()
    assert rest is not None
    costs = change_costs(*rest, PACE, replace(PACE, waiting=(0.5, 1.0)))
    full = (3 + 9) / 2  # iterations
    assert costs == pytest.approx((2.0 * full, 2.0 * 9, 2.0 + 0.1 * (5 + 7) + 1.0 * (full + 1)))
    waits, lengths = outlook.waiting()
    assert waits.tolist() == [2] and 0 < lengths[0] <= 6


PACE = IterationCost({"compute": np.array([2.0, 0, 0, 0, 0, 0, 0.1, 0, 0, 0])}, 1, (1.0, 1.0))


def test_auto_plans_for_the_longest_requests_too(monkeypatch):
    """A batch of mean lengths fits this device, but a batch with the longest request does not. A search of mean lengths
    alone would choose six requests at a time, which takes nine times the seconds."""
    lengths = np.r_[np.random.default_rng(0).integers(4, 40, 60), 60]
    waiting = Workload(lengths, np.full(61, 64))
    machine, budgets = toy_machine.machine(), Budgets(device=2**24, host=2**30)
    problem = Problem(shape=toy_machine.SHAPE, dtype="float32", hardware=machine, budgets=budgets)

    def seconds(policy: Policy) -> float:
        return price_queue(problem, policy, waiting, 61).total_s

    chosen = resolve.best_policy(problem, waiting, link_is_paced=True)
    assert seconds(chosen) < 0.2 * seconds(resolve.settle_policy("act_only", problem, waiting))
    monkeypatch.setattr(resolve, "QUEUE_SEARCH_S", 60.0)
    quick = resolve.best_policy(problem, waiting, link_is_paced=True)  # a search for the queue would not pay
    assert seconds(chosen) < 0.2 * seconds(quick)


def test_auto_prices_shared_prefixes():
    """A search for equal prompts would choose token ids, which share nothing and take 2.5 times the seconds of
    act_only."""
    lengths = 256 + np.random.default_rng(0).integers(4, 40, 64)
    common = Prefixes(np.array([256]), np.array([-1]), np.zeros(64, np.int64))
    waiting = Workload(lengths, np.full(64, 16), prefixes=common)
    machine, budgets = toy_machine.machine(link=0.2), Budgets(device=18 * 2**20, host=2**25)
    problem = Problem(shape=shape_from_config(SHIPPED), dtype="float32", hardware=machine, budgets=budgets)
    policies = resolve.best_policy(problem, waiting, True), resolve.settle_policy("act_only", problem, waiting)
    chosen, plain = (price_queue(problem, policy, waiting, 64).total_s for policy in policies)
    assert chosen <= 1.03 * plain
