"""Test queues whose lengths are read from a file: predictions, searches, and refusals of wrong files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from runs import line

from flexhybrid import cli
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.jobs.lengths import read_lengths
from flexhybrid.jobs.run.options import RunOptions, check_options
from flexhybrid.resolve import best_policy
from policy_search.queue_search import QueueChoice, best_for_queue
from policy_search.search import PLAIN, SearchSettings
from sim.queue_clock import price_queue, walk_queue
from tests.toy_machine import MIB, SHAPE, machine


def write(path, rows, header=("prompt_tokens", "max_tokens", "answer_tokens")):
    if path.suffix == ".csv":
        lines = [",".join(header), *(",".join(map(str, row)) for row in rows)]
    else:
        lines = [json.dumps(dict(zip(header, row))) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["lengths.csv", "lengths.jsonl"])
def test_a_table_of_lengths_is_read_longest_first(tmp_path, name):
    rows = [(5, 20, 7), (9, 40, 40), (3, 40, 1)]
    read = read_lengths(write(tmp_path / name, rows), "opt-125m")
    assert [*zip(read.prompt_tokens, read.max_tokens, read.answers)] == [rows[1], rows[2], rows[0]]
    limits = read_lengths(write(tmp_path / name, rows, ("prompt_tokens", "max_tokens")), "opt-125m")
    assert limits.answer_tokens is None
    known = read_lengths(write(tmp_path / name, rows * 50, ("prompt_tokens", "max_tokens")), "opt-125m", 12)
    assert known.answers.mean() == pytest.approx(12, rel=0.02)


def test_requests_are_counted_by_the_checkpoint_s_tokenizer(tiny, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line(str(i), model="m", prompt=[5] * (4 + i), max_tokens=3 + i) + "\n" for i in range(2)))
    read = read_lengths(path, str(tiny / "config.json"))
    assert (read.prompt_tokens.tolist(), read.max_tokens.tolist()) == ([5, 4], [4, 3])
    with pytest.raises(InputError, match="the model's tokenizer"):
        read_lengths(path, "opt-125m")


@pytest.mark.parametrize(
    "text, words",
    [
        ("prompt_tokens,max_tokens\n3,\n", "line 2: max_tokens is ''"),
        (
            "prompt_tokens,max_tokens,answer_tokens\n3,4,4\n3,4,5\n",
            "line 3: answer_tokens is 5, more than max_tokens, 4",
        ),
        ("prompt_tokens,max_tokens\n3,4\nx,4\n", "line 3: prompt_tokens is 'x'"),
        ("prompt_tokens\n3\n", "line 1: there is no max_tokens; columns: prompt_tokens; known: prompt_tokens, max_tok"),
        ("n,prompt_token,max_tokens\n7,3,4\n", "line 1: unknown column 'prompt_token'; did you mean prompt_tokens"),
        ("prompt_tokens,max_tokens,answer_token\n3,4,5\n", "'answer_token'; did you mean answer_tokens"),
        ("prompt_tokens,max_tokens,Prefix_token,n\n3,4,2,7\n", "'Prefix_token'; did you mean prefix_tokens"),
        ("prompt_tokens,max_tokens\n", "no requests"),
    ],
)
def test_a_wrong_table_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_lengths(path, "opt-125m")


def test_simulate_shows_ramp_steady_state_and_drain(tmp_path, capsys, as_json):
    rng = np.random.default_rng(0)
    rows = [(20, 30, int(count)) for count in rng.integers(1, 31, 60)]
    path = write(tmp_path / "lengths.csv", rows)
    arguments = [
        "--system",
        "kv_only",
        "--model",
        "opt-125m",
        "--hardware",
        "t4",
        "--lengths",
        str(path),
        "--batch",
        "8",
    ]
    assert cli.main(["simulate", *arguments]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("ramp", "steady", "drain", "8 requests at a time"))
    closed = as_json("simulate", *arguments)
    assert closed["tokens"] == sum(row[2] for row in rows)
    assert sum(part["seconds"] for part in closed["phases"].values()) == pytest.approx(closed["total_s"])
    assert closed["phases"]["steady"]["running"] > 7 > closed["phases"]["drain"]["running"]
    assert cli.main(["simulate", *arguments, "--json", "--clock", "virtual"]) == 0
    assert json.loads(capsys.readouterr().out)["total_s"] == pytest.approx(closed["total_s"], rel=0.03)
    assert cli.main(["simulate", *arguments[:-1], "60"]) == 0  # all begin at once: there is nothing but the drain
    assert not {"ramp", "steady"} & set(capsys.readouterr().out.split())
    assert cli.main(["simulate", *arguments, "--output-len", "3"]) == 2
    assert "--lengths says how long" in capsys.readouterr().err


def test_the_search_for_a_queue_is_no_worse_than_its_start():
    """Answers end at a sixth of their limits; a search for the limits reserves too much memory for contexts."""
    rng = np.random.default_rng(0)
    answers = np.clip(rng.exponential(20, 60), 1, 120).astype(int)
    workload = Workload(np.full(60, 60), np.full(60, 120), answers)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine(), budgets=Budgets(device=40 * MIB, host=90 * MIB))
    settings = SearchSettings(max_batch=16, space=PLAIN, mini_batch_tokens=(1024, 4096))
    plain = Policy("plain", cache={"kv@host": 1.0})
    chosen = best_for_queue(problem, workload, settings, [plain])
    own, given = (walk_queue(problem, policy, workload, 16).total_s for policy in (chosen.policy, plain))
    assert own <= 1.05 * given and chosen.run.total_s == pytest.approx(own, rel=0.1)
    assert chosen.run.total_s <= price_queue(problem, plain, workload, 16).total_s


def test_auto_searches_by_the_queue_if_answers_are_known(monkeypatch):
    workload = Workload(np.full(40, 60), np.full(40, 120), np.full(40, 9))
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine(), budgets=Budgets(device=40 * MIB, host=90 * MIB))
    plain, asked = Policy("plain", cache={"kv@host": 1.0}), []

    def answer(problem, workload, settings, **_rough):
        asked.append(workload.answers.mean())
        return QueueChoice(plain, price_queue(problem, plain, workload, 4), None)

    monkeypatch.setattr("flexhybrid.resolve.best_for_queue", answer)
    assert best_policy(problem, workload, link_is_paced=True) == plain and asked == [9]


@pytest.mark.parametrize("mean", (0.0, -1.0, 0.5, float("nan")))
def test_a_mean_that_no_answers_have_is_refused(mean, tmp_path):
    with pytest.raises(InputError, match="--mean-output-len"):
        read_lengths(write(tmp_path / "a.csv", [(3, 4)], ("prompt_tokens", "max_tokens")), "opt-125m", mean)
    with pytest.raises(InputError, match="--mean-output-len"):
        check_options(RunOptions(tmp_path / "in", tmp_path / "out", LLMArguments("m"), answer_tokens=mean))


def test_a_table_has_the_shared_beginnings_of_prompts(tmp_path):
    header = ("prompt_tokens", "max_tokens", "prefix", "prefix_tokens")
    rows = [(90, 3, "a/b", "40/81"), (50, 2, "a", "40"), (30, 1, "", "")]
    path = write(tmp_path / "lengths.csv", rows, header)
    read = read_lengths(path, "opt-125m")
    assert read.shared_tokens.tolist() == [80, 32, 0]
    stand_ins = [read.stand_in(request).tolist() for request in range(3)]
    assert [len(ids) for ids in stand_ins] == [81, 33, 1] and stand_ins[0][:32] == stand_ins[1][:32]
    assert read.mean_prompt == (90 + 50 + 30 - 32) / 3
    for row, words in (
        ((90, 3, "a", "41"), "has 41 tokens, and 40 on an earlier line"),
        ((90, 3, "c", "91"), "within the prompt"),
        ((90, 3, "c/d", "40"), "where each part"),
    ):
        with pytest.raises(InputError, match=f"line 5: .*{words}"):
            read_lengths(write(path, [*rows, row], header), "opt-125m")


def test_the_search_knows_that_prompts_share():
    """With a shared system prompt more requests fit at a time than with unrelated prompts of equal length."""
    workload = Workload(np.full(40, 220), np.full(40, 12))
    alike = replace(workload, prefixes=Prefixes(np.array([200]), np.array([-1]), np.zeros(40, int)))
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine(), budgets=Budgets(device=24 * MIB, host=24 * MIB))
    settings = SearchSettings(max_batch=40, space=PLAIN, weights_device=0.0, mini_batch_tokens=(4096,))
    knows, ignores = (best_for_queue(problem, of, settings) for of in (alike, workload))
    assert knows.run.at_a_time > 2 * ignores.run.at_a_time
    knowing, ignorant = (walk_queue(problem, found.policy, alike, 40).total_s for found in (knows, ignores))
    assert knowing < 0.5 * ignorant and knows.run.total_s == pytest.approx(knowing, rel=0.1)
